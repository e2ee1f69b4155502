"""A seed becomes a case: a small description of a model, how it is quantized, and its checks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.fuzz.spellings import FLOAT, Spelling, by_operator
from fxquant import backends

TARGETS = ("bernoulli", "bernoulli2", "bayes", "bayes-e", "nash-e", "nash-m", "nash-e-level2", "x86", "qnnpack")

# How an input is drawn, simplest first.
DATA = (
    "torch.randn({sizes})",
    "torch.rand({sizes})",
    "torch.randint(-8, 9, ({sizes})) / 4",  # ties
    "torch.randn({sizes}) * 1e4",
    "torch.randn({sizes}) * 1e-4",
    "torch.randn({sizes}) * (1 + 99 * (torch.rand({sizes}) < 0.02))",  # spikes
    "torch.zeros({sizes})",
    "torch.full(({sizes}), -0.3)",
    "torch.randn({sizes}) + 20",
)
OPTIMIZERS = ("torch.optim.SGD(parameters, 0.01)", "torch.optim.Adam(parameters, 0.01)", "torch.optim.SGD(parameters, 1.0, momentum=0.9)")
CHANNELS = (1, 2, 3, 4, 4, 6, 8)
LARGEST = 6000  # elements of a value for one example

Settings = dict[str, str]  # keyword arguments as they are written


@dataclass(frozen=True)
class Input:
    """An input: its sizes without the batch's, and an expression for its data."""

    name: str
    sizes: tuple[int, ...]
    data: str = DATA[0]


@dataclass(frozen=True)
class Step:
    """One line of `forward`, whose result is called `name`, and the layer or the parameters that it alone, or `shares` too, uses."""

    name: str
    spelling: Spelling
    operands: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    shares: str | None = None

    @property
    def holder(self) -> str:
        """The step whose layer and parameters it uses, without the letter."""
        return (self.shares or self.name)[1:]


@dataclass(frozen=True)
class Config:
    """A QConfig: what differs from the default of its output, weight and input."""

    output: Settings = field(default_factory=dict)
    weight: Settings = field(default_factory=dict)
    input: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """Where a Config other than the default stands: a method of QConfigMapping, or "attribute", and its first argument as it is written."""

    method: str
    where: str
    config: Config | None  # None: float


@dataclass(frozen=True)
class Case:
    """A description of a model that is drawn, compiled and checked.

    batches     the sizes of the batches, the first of which is the example
    float_onnx  whether ONNX files are written although operators stay in float: PyTorch's exporter takes seconds for them
    """

    seed: int
    target: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    named_outputs: bool = False
    config: Config = Config()
    rules: tuple[Rule, ...] = ()
    batch_norm: str = "live"
    batches: tuple[int, ...] = (2,)
    optimizer: str | None = None
    checks: tuple[str, ...] = ()
    float_onnx: bool = False


def pruned(case: Case) -> Case:
    """Without the steps, inputs and rules that nothing needs any more."""
    needed = set(case.outputs)
    for step in reversed(case.steps):
        if step.name in needed:
            needed.update(step.operands)
    steps = tuple(step for step in case.steps if step.name in needed)
    names = {step.name for step in steps}
    steps = tuple(step if step.shares is None or step.shares in names else replace(step, shares=None) for step in steps)
    layers = {f"l{step.holder}" for step in steps}
    rules = tuple(rule for rule in case.rules if not _layer(rule) or _layer(rule) in layers)
    return replace(case, steps=steps, inputs=tuple(entry for entry in case.inputs if entry.name in needed), rules=rules)


def _layer(rule: Rule) -> str:
    """The layer a rule is about; empty if it is about others."""
    return rule.where.strip("'\"") if rule.method in ("attribute", "set_module_name") else ""


# ---- drawing a model -----------------------------------------------------------------------------------------------------------

FOLLOWERS = ("batch_norm", "clamp", "clamp", "add", "mul", "cat", "sigmoid")  # what stands after a layer more often than by chance
LAYERS = ("conv1d", "conv2d", "conv3d", "linear", "conv_transpose2d", "matmul")


class Drawing:
    """A model that grows step by step; every step is tried in PyTorch."""

    def __init__(self, lot: random.Random, seed: int) -> None:
        from benchmarks.fuzz.build import Player

        self.lot = lot
        self.inputs = self._inputs()
        self.steps: list[Step] = []
        self.player = Player(seed, self.inputs, 2)
        self.operators = by_operator()

    def _inputs(self) -> list[Input]:
        lot = self.lot
        rank = lot.choice((0, 1, 1, 2, 2, 2, 2, 3))
        largest = {0: 0, 1: 12, 2: 9, 3: 5}[rank]
        first = Input("x0", (lot.choice(CHANNELS), *(lot.randint(min(2, largest), largest) for _ in range(rank))), self._data())
        inputs = [first]
        while lot.random() < 0.3 and len(inputs) < 3:
            sizes = first.sizes if lot.random() < 0.7 else (lot.choice(CHANNELS), *first.sizes[1:])
            inputs.append(Input(f"x{len(inputs)}", sizes, self._data()))
        return inputs

    def _data(self) -> str:
        return DATA[0] if self.lot.random() < 0.7 else self.lot.choice(DATA)

    def grow(self, operator: str, attempts: int = 4) -> bool:
        """One more step, of this operator; False if nothing that was tried is accepted."""
        for _ in range(attempts):
            step = self._step(self.lot.choice(self.operators[operator]))
            if self.player.accepts(step, LARGEST) and self.player.name_of(step) in (operator, FLOAT):
                self.steps.append(step)
                return True
            self.player.forget(step)
        return False

    def _step(self, spelling: Spelling) -> Step:
        lot = self.lot
        name = f"v{len(self.steps)}"
        values = list(self.player.values)
        read = {operand for step in self.steps for operand in step.operands}
        unread = [entry.name for entry in self.inputs if entry.name not in read] or values
        first = values[-1] if lot.random() < 0.6 else lot.choice(unread if lot.random() < 0.5 else values)
        alike = [value for value in values if self.player.values[value].shape == self.player.values[first].shape]
        alike = [value for value in alike if value in unread and value != first] or alike
        others = [lot.choice(alike if lot.random() < 0.8 else values) for _ in range(spelling.operands - 1)]
        earlier = [step for step in self.steps if step.spelling is spelling and (spelling.layer or spelling.parameters)]
        if earlier and lot.random() < 0.4:
            shared = lot.choice(earlier)
            return Step(name, spelling, (first, *others), shared.options, shared.shares or shared.name)
        return Step(name, spelling, (first, *others), {key: lot.choice(values) for key, values in spelling.options.items()})

    def next_operator(self) -> str:
        """Return what to try next: any operator of the table, or what often follows a layer."""
        lot = self.lot
        if self.steps and self.steps[-1].spelling.layer and lot.random() < 0.5:
            return lot.choice(FOLLOWERS)
        return lot.choice(LAYERS) if lot.random() < 0.3 else lot.choice(list(self.operators))


def draw(seed: int, targets: Sequence[str] = TARGETS, operator: str | None = None, steps: int | None = None) -> Case:
    """The case of a seed. `operator` is one that is in it for certain, `steps` how many it has at most; by default by lot."""
    lot = random.Random(seed)
    target = random.Random(f"target {seed}").choice(targets)  # so that a seed draws the same model for a target, however it was chosen
    operator = operator or lot.choice(list(by_operator()))
    while True:
        drawing = Drawing(lot, seed)
        count = lot.choice((1, 1, 2, 3, 4, 5, 6, 8, 12)) if steps is None else steps
        before = lot.randrange(count)
        for _ in range(3 * before):
            if len(drawing.steps) < before:
                drawing.grow(drawing.next_operator())
        if not drawing.grow(operator, 12):
            continue
        starred = drawing.steps[-1].name
        for _ in range(3 * count):
            if len(drawing.steps) < count:
                drawing.grow(drawing.next_operator())
        return _configured(lot, seed, target, drawing, starred)


def _configured(lot: random.Random, seed: int, target: str, drawing: Drawing, starred: str) -> Case:
    read = {operand for step in drawing.steps for operand in step.operands}
    loose = [step.name for step in drawing.steps if step.name not in read]
    outputs = list(dict.fromkeys(lot.sample(loose, min(len(loose), lot.randint(1, 4)))))
    reached = {step.name for step in pruned(Case(seed, target, tuple(drawing.inputs), tuple(drawing.steps), tuple(outputs))).steps}
    if starred not in reached:
        outputs.append(starred)
    case = Case(
        seed,
        target,
        tuple(drawing.inputs),
        tuple(drawing.steps),
        tuple(outputs),
        named_outputs=lot.random() < 0.1,
        config=_config(lot, target, common=True),
        batch_norm=lot.choice(("live", "live", "frozen", "folded")),
        batches=(lot.choice((2, 3, 1, 5)), *lot.sample((1, 2, 3, 4, 7), lot.randint(1, 2))),
        optimizer=lot.choice(OPTIMIZERS) if lot.random() < 0.4 else None,
        float_onnx=lot.random() < 0.1,
    )
    case = replace(case, checks=_checks(lot, case))
    return pruned(replace(case, rules=_rules(lot, case)))


# ---- drawing a configuration ---------------------------------------------------------------------------------------------------


def _config(lot: random.Random, target: str, common: bool = False) -> Config:
    """Any configuration that the target has dtypes for; the default more often than not where it is the `common` one."""
    if common and lot.random() < 0.4:
        return Config()
    record = backends.get(target)
    activations = [dtype for dtype in record.activations if dtype != "int32"] * 8 + ([] if common else ["int32", "int16"])
    default = record.default_activation
    edge = _activation(lot, activations, default) if lot.random() < 0.2 else {}
    return Config(_activation(lot, activations, default), _weight(lot, record.weights), edge)


def _activation(lot: random.Random, dtypes: Sequence[str], default: str) -> Settings:
    settings: Settings = {}
    if (dtype := lot.choice([*dtypes, *[default] * len(dtypes)])) != default:
        settings["dtype"] = repr(dtype)
    if lot.random() < 0.4:
        observers = ("MinMaxObserver", "MovingAverageMinMaxObserver", "PercentileObserver")
        settings["observer"] = f"fxq.observers.{lot.choice(observers)}"
    if lot.random() < 0.15:
        settings[lot.choice(("scale", "threshold"))] = lot.choice(("0.05", "1.0", "0.001", "4.0", "1e-06"))
        if dtype == "uint8" and "scale" in settings:
            settings |= {"dtype": repr(dtype), "zero_point": lot.choice(("0", "1", "77", "128", "255"))}
    if lot.random() < 0.4:
        settings["training"] = lot.choice(("'learned'", "'frozen'", "'lsq+'", "'pact'", "'tqt'"))
    if lot.random() < 0.15:
        settings["power_of_two"] = "True"
    return settings


def _weight(lot: random.Random, dtypes: Sequence[str]) -> Settings:
    settings: Settings = {}
    if (dtype := lot.choice([*dtypes, *["int8"] * len(dtypes)])) != "int8":
        settings["dtype"] = repr(dtype)
    if lot.random() < 0.3:
        settings["per_channel"] = "False"
    if lot.random() < 0.3:
        settings["training"] = lot.choice(("'learned'", "'tqt'"))
    if lot.random() < 0.15:
        settings["power_of_two"] = "True"
    return settings


def _rules(lot: random.Random, case: Case) -> tuple[Rule, ...]:
    layers = [f"l{step.name[1:]}" for step in case.steps if step.spelling.layer and step.shares is None]
    kinds = [step.spelling.layer.partition("(")[0] for step in case.steps if step.spelling.layer]
    kinds = [kind for kind in kinds if "{" not in kind] + ["F.relu", "torch.add", "torch.sigmoid"]
    rules = []
    while lot.random() < 0.35 and len(rules) < 3:
        config = None if lot.random() < 0.25 else _config(lot, case.target)
        method = lot.choice(("set_module_name", "set_module_name", "attribute", "set_object_type"))
        if method == "set_object_type" or not layers:
            rules.append(Rule("set_object_type", lot.choice(kinds), config))
        else:
            layer = lot.choice(layers)
            rules.append(Rule(method, layer if method == "attribute" else repr(layer), config))
    return tuple(rules)


def _checks(lot: random.Random, case: Case) -> tuple[str, ...]:
    """Return the checks of a case: the contract always, the rest by lot, since it takes time."""
    from benchmarks.fuzz.check import ALWAYS, LAST, SOMETIMES, UNTRAINED

    chosen = [check for check in SOMETIMES if lot.random() < 0.3]
    if case.optimizer is not None:
        chosen = [check for check in chosen if check not in UNTRAINED]
    return (*ALWAYS, *chosen, *LAST)
