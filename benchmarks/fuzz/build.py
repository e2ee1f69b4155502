"""A case becomes the text of a Python program, in blocks: the model, and what is done with it."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.fuzz.generate import Case, Config, Input, Settings, Step
from fxquant.support import seeded

NAMESPACE = {"torch": torch, "nn": nn, "F": F, "fxq": fxq}

Block = tuple[str, str]  # a name, and statements


class Player:
    """Plays a model's steps on small tensors while they are written, since what a layer has to be depends on what reaches it.

    `values` are the tensors so far, by name; `made` the statements of __init__ and `said` those of forward.
    """

    def __init__(self, seed: int, inputs: Sequence[Input], batch: int) -> None:
        self.seed = seed
        self.made: list[str] = []
        self.said: list[str] = []
        self.self = nn.Module().eval()
        self.scope: dict[str, Any] = {**NAMESPACE, "self": self.self}
        self.values: dict[str, Tensor] = {}
        self.fields: dict[str, dict[str, Any]] = {}
        self.kept = 0, 0
        with seeded(seed):
            for entry in inputs:
                self.values[entry.name] = eval(data(entry, batch), self.scope)

    def play(self, step: Step) -> Tensor:
        """Return the step's result, and keep its statements. Raises what PyTorch raises."""
        self.kept = len(self.made), len(self.said)
        fields = self.fields[step.name] = _fields(step, self.values[step.operands[0]])
        for operand in step.operands:
            self.scope[operand] = self.values[operand]
        with seeded(self.seed), torch.no_grad():
            for line in _made(step, fields) if step.shares is None else ():
                exec(line, self.scope)
                self.made.append(line)
            call = _filled(step.spelling.call, fields, step.operands)
            if step.spelling.operator == "dropout":  # it acts in training alone, and only then refuses what it cannot take
                self.self.train()
                eval(call, self.scope)
            self.self.eval()
            value = eval(call, self.scope)
        if not isinstance(value, Tensor):
            raise TypeError(f"{call} is not a tensor")
        self.said.append(f"{step.name} = {call}")
        self.values[step.name] = value
        return value

    def accepts(self, step: Step, largest: int) -> bool:
        """Whether PyTorch runs the step, and its result is a float tensor of a sensible size without NaN."""
        try:
            value = self.play(step)
        except Exception:  # whatever PyTorch has against it
            return False
        return value.dtype == torch.float32 and 0 < value.numel() <= 2 * largest and bool(torch.isfinite(value).all())

    def forget(self, step: Step) -> None:
        """As if the last step had not been played."""
        self.values.pop(step.name, None)
        del self.made[self.kept[0] :], self.said[self.kept[1] :]

    def name_of(self, step: Step) -> str:
        """The operator's name, for the rank at hand."""
        return step.spelling.operator.format(**self.fields[step.name])


def _fields(step: Step, operand: Tensor) -> dict[str, Any]:
    sizes = list(operand.shape)
    holder = step.holder
    fields: dict[str, Any] = {
        "rank": len(sizes) - 2,
        "channels": sizes[1] if len(sizes) > 1 else 1,
        "last": sizes[-1] if sizes else 1,
        "sizes": sizes[1:],
        "ones": ", 1" * (len(sizes) - 2),
        "layer": f"self.l{holder}",
        "buffer": f"self.c{holder}",
        **{f"p{index}": f"self.p{holder}{'ab'[index]}" for index in range(len(step.spelling.parameters))},
    }
    for key, value in step.options.items():
        fields[key] = value.format(**fields) if isinstance(value, str) else value
    return fields


# What a layer's constructor need not be told.
DEFAULTS = (
    ", stride=1", ", padding=0", ", dilation=1", ", groups=1", ", bias=True", ", padding_mode='zeros'", ", ceil_mode=False",
    ", mode='nearest'",
)  # fmt: skip


def _filled(text: str, fields: dict[str, Any], operands: Sequence[str] = ()) -> str:
    return text.format(*operands, **fields)


def _made(step: Step, fields: dict[str, Any]) -> list[str]:
    """The statements of __init__ that a step needs."""
    spelling, lines = step.spelling, []
    if spelling.layer:
        layer = _filled(spelling.layer, fields)
        for default in DEFAULTS:
            layer = layer.replace(default, "")
        lines.append(f"{fields['layer']} = {layer}")
    for index, value in enumerate(spelling.parameters):
        lines.append(f"{fields[f'p{index}']} = nn.Parameter({_filled(value, fields)})")
    if spelling.buffer:
        lines.append(f"self.register_buffer('c{step.holder}', {_filled(spelling.buffer, fields)})")
    return [*lines, *(line for text in spelling.after if (line := _filled(text, fields)))]


# ---- the program --------------------------------------------------------------------------------------------------------------


def blocks(case: Case) -> list[Block]:
    """Return the blocks before the checks: model, prepare, calibrate, train and convert. Raises PyTorch's error if a step does not fit."""
    player = Player(case.seed, case.inputs, case.batches[0])
    for step in case.steps:
        player.play(step)
    steps = [("model", _model(case, player)), ("prepare", _prepare(case)), ("calibrate", CALIBRATE)]
    if case.optimizer is not None:
        steps.append(("train", TRAIN.format(optimizer=case.optimizer)))
    return [*steps, ("convert", "integer = fxq.convert(prepared)")]


def _model(case: Case, player: Player) -> str:
    names = ", ".join(entry.name for entry in case.inputs)
    result = ", ".join(f"'{name}': {name}" if case.named_outputs else name for name in case.outputs)
    body = ["def __init__(self):", "    super().__init__()", *(f"    {line}" for line in player.made)]
    lines = [
        "class Model(nn.Module):",
        *([*(f"    {line}" for line in body), ""] if player.made else []),
        f"    def forward(self, {names}):",
        *(f"        {line}" for line in player.said),
        f"        return {f'{{{result}}}' if case.named_outputs else result}",
        "",
        "",
        f"torch.manual_seed({case.seed})",
        "model = Model().eval()",
        f"batches = [{', '.join(_batch(case, size) for size in case.batches)}]",
    ]
    return "\n".join(lines)


def _batch(case: Case, size: int) -> str:
    return f"({', '.join(data(entry, size) for entry in case.inputs)},)"


def data(entry: Input, batch: int) -> str:
    """An expression for an input's data."""
    return entry.data.format(sizes=", ".join(map(str, (batch, *entry.sizes))))


CALIBRATE = "fxq.calibrate(prepared, batches, show_progress=False)"
TRAIN = """fxq.set_state(prepared, fxq.State.TRAIN)
prepared.train()
parameters = list(prepared.parameters()) or [torch.zeros(1, requires_grad=True)]
optimizer = {optimizer}
for batch in batches:
    loss = sum(y.square().mean() for y in tree_leaves(prepared(*[x.clone() for x in batch])))
    if loss.requires_grad:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
prepared.eval()
fxq.set_state(prepared, fxq.State.VALIDATE)"""


def _prepare(case: Case) -> str:
    lines = [f"model.{rule.where}.qconfig = {qconfig(rule.config)}" for rule in case.rules if rule.method == "attribute"]
    mapped = [rule for rule in case.rules if rule.method != "attribute"]
    options = [f'target="{case.target}"'] if case.target != "bayes-e" else []
    if mapped:
        default = qconfig(case.config) if case.config != Config() else ""
        lines.append(f"qconfig = fxq.QConfigMapping({default})")
        lines += [f"qconfig = qconfig.{rule.method}({rule.where}, {qconfig(rule.config)})" for rule in mapped]
        options.append("qconfig=qconfig")
    elif case.config != Config():
        options.append(f"qconfig={qconfig(case.config)}")
    if case.batch_norm != "live":
        options.append(f'options=fxq.Options(batch_norm="{case.batch_norm}")')
    lines.append(f"prepared = fxq.prepare({', '.join(['model', 'batches[0]', *options])})")
    return "\n".join(lines)


def qconfig(config: Config | None) -> str:
    """A QConfig as it is written."""
    if config is None:
        return "None"
    kinds = {"output": "ActivationConfig", "weight": "WeightConfig", "input": "ActivationConfig"}
    parts = {part: getattr(config, part) for part in kinds if getattr(config, part)}
    return f"fxq.QConfig({', '.join(f'{part}=fxq.{kinds[part]}({_keywords(settings)})' for part, settings in parts.items())})"


def _keywords(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


# ---- what is printed -----------------------------------------------------------------------------------------------------------

IMPORTS = {
    "copy": "import copy",
    "tempfile": "import tempfile",
    "Path": "from pathlib import Path",
    "torch": "import torch",
    "fx": "from torch import fx",
    "nn": "from torch import nn",
    "F": "from torch.nn import functional as F",
    "tree_leaves": "from torch.utils._pytree import tree_leaves",
    "fxq": "import fxquant as fxq",
    "OnnxModel": "from fxquant.backends.onnx.runtime import OnnxModel",
    "origin": "from fxquant.ir.integer import origin",
    "quantized_operators": "from fxquant.prepared.operators import quantized_operators",
    "PRIMITIVES": "from fxquant.primitives import PRIMITIVES",
}


def program(parts: Sequence[Block]) -> str:
    """The blocks as one program, with the imports that it needs."""
    body = "\n".join(text for _, text in parts)
    needed = [line for name, line in IMPORTS.items() if re.search(rf"(?<![\w.'\"]){name}\b", body)]
    return "\n".join([*needed, "", "", body]) + "\n"


def imports() -> str:
    """All imports that a program may need."""
    return "\n".join(IMPORTS.values())
