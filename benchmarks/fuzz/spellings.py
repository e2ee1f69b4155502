"""How operators are written in a model: one line each.

A line says nothing of what its operands have to be. It is tried in PyTorch, and what PyTorch refuses is drawn again.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS, Operator
from fxquant.ops.boundary import DEQUANTIZE, QUANTIZE, REQUANTIZE

FLOAT = "float"  # the operator of what the table may not know
UNWRITTEN = (  # made by passes, never written by a user
    *(QUANTIZE.name, DEQUANTIZE.name, REQUANTIZE.name, "shifted", "scale_channels"),
    *("exponential", "inverse_root", "kept", "added", "masked_softmax"),
)

Options = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator.

    operator    its name in the table, of which {rank} is the number of the first operand's spatial dimensions
    call        the expression: {0}, {1} are operands, {layer} a module of its own, {p0}, {p1} parameters, {buffer} a constant
    layer       the module's constructor
    parameters  the values that parameters start from
    buffer      the value of the constant
    after       statements that follow in __init__
    options     what the fields of all these can be, simplest first; a string is formatted once more

    Fields besides the options: {channels}, {last} and {sizes} are the size of the first operand's dimension 1, of its last one, and all
    but the batch's; {ones} is ", 1" for each spatial dimension.
    """

    operator: str
    call: str
    layer: str = ""
    parameters: tuple[str, ...] = ()
    buffer: str = ""
    after: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)

    @property
    def operands(self) -> int:
        """How many values it reads."""
        return 1 + max(position for position in range(4) if f"{{{position}}}" in self.call)


def _spell(name: str, *calls: str, **options: tuple[Any, ...]) -> list[Spelling]:
    return [Spelling(name, call, options={key: value for key, value in options.items() if f"{{{key}" in call}) for call in calls]


def _module(name: str, layer: str, *after: str, call: str = "{layer}({0})", **options: tuple[Any, ...]) -> Spelling:
    return Spelling(name, call, layer, after=after, options=options)


def _held(name: str, call: str, *parameters: str, buffer: str = "", **options: tuple[Any, ...]) -> Spelling:
    return Spelling(name, call, parameters=parameters, buffer=buffer, options=options)


# ---- what is common to many ---------------------------------------------------------------------------------------------------

ODD = (
    "", "", "", "",
    "{layer}.weight.data *= 1e-3", "{layer}.weight.data *= 1e3", "{layer}.weight.data *= 1e-7", "{layer}.weight.data[0] = 0",
    "{layer}.weight.data[0] *= 1e-6", "{layer}.weight.data *= 0", "{layer}.bias.data *= 100", "{layer}.bias.data[-1] = 1e4",
)  # fmt: skip
OUTPUTS = (1, 2, 3, 4, 8, "{channels}", "{channels}", "{channels}")
FLAG = (False, True)
DIMS = (1, -1, (1, -1), 2, (1, 2), (2, 3))
FACTORS = (1, 2, -1, 0.5, 1.7, -0.3, 100.0, 1e-3)
NUMBERS = (1, 0.5, -1, 3.7, -0.01, 100.0, 1e-4, 0)
STATISTICS = (
    "{layer}.running_mean.normal_()", "{layer}.running_var.uniform_(0.5, 2)",
    "nn.init.uniform_({layer}.weight, 0.5, 1.5)", "nn.init.normal_({layer}.bias, std=0.3)",
)  # fmt: skip

CONVOLUTION: Options = {
    "kernel": (1, 3, 2, 5), "stride": (1, 2, 3), "padding": (0, 1, "'same'", "'valid'", 2), "dilation": (1, 1, 2),
    "groups": (1, 1, 2, "{channels}"), "bias": (True, False), "outputs": OUTPUTS,
}  # fmt: skip
POOL: Options = {"kernel": (2, 3, 1), "stride": (2, 1, 3), "padding": (0, 1), "ceil": FLAG}


def _convolutions() -> Iterator[Spelling]:
    arguments = "{outputs}, {kernel}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups}, bias={bias}"
    modes = ("zeros", "zeros", "reflect", "replicate", "circular")
    layer = f"nn.Conv{{rank}}d({{channels}}, {arguments}, padding_mode={{mode!r}})"
    yield _module("conv{rank}d", layer, "{odd}", **CONVOLUTION, mode=modes, odd=ODD)
    same = "nn.Conv{rank}d({channels}, {channels}, {kernel}, padding='same', groups={groups}, bias={bias})"
    kept = {name: CONVOLUTION[name] for name in ("groups", "bias")}
    yield _module("conv{rank}d", same, "{odd}", **kept, kernel=(1, 3, 2), odd=ODD)
    weight = "torch.randn({outputs}, {channels}, *[{kernel}] * {rank})"
    options = {name: CONVOLUTION[name] for name in ("outputs", "kernel", "stride", "dilation")}
    yield _held("conv{rank}d", "F.conv{rank}d({0}, {p0}, None, {stride}, 0, {dilation})", weight, **options)
    yield _held("conv{rank}d", "F.conv{rank}d({0}, {p0}, {p1}, stride={stride})", weight, "torch.randn({outputs})", **options)
    reverse = {**{name: CONVOLUTION[name] for name in ("kernel", "stride", "dilation", "groups", "bias", "outputs")}, "padding": (0, 1)}
    arguments = "{outputs}, {kernel}, {stride}, {padding}, {more}, groups={groups}, bias={bias}, dilation={dilation}"
    layer = f"nn.ConvTranspose{{rank}}d({{channels}}, {arguments})"
    yield _module("conv_transpose{rank}d", layer, "{odd}", **reverse, more=(0, 1), odd=ODD)
    weight = "torch.randn({channels}, {outputs}, *[{kernel}] * {rank})"
    call = "F.conv_transpose{rank}d({0}, {p0}, stride={stride})"
    yield _held("conv_transpose{rank}d", call, weight, outputs=OUTPUTS, kernel=(1, 3, 2), stride=(1, 2))


def _arithmetic() -> Iterator[Spelling]:
    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
        yield from _spell(name, f"{{0}} {sign} {{1}}", f"torch.{name}({{0}}, {{1}})", f"{{0}}.clone().{name}_({{1}})")
        yield from _spell(name, f"{{0}} {sign} {{number}}", f"{{number}} {sign} {{0}}", f"{{0}}.{name}({{number}})", number=NUMBERS)
        for shape in ("{channels}" + "{ones}", "{last}", "{sizes}"):
            yield _held(name, f"{{0}} {sign} {{p0}}", f"torch.randn({shape})")
            yield _held(name, f"{{buffer}} {sign} {{0}}", buffer=f"torch.randn({shape}) * {{scale}}", scale=(1, 10, 1e-3))
    yield from _spell("add", "torch.add({0}, {1}, alpha={number})", number=FACTORS)
    yield from _spell("sub", "torch.sub({0}, {1}, alpha={number})", number=FACTORS)
    yield from _spell("div", "{0} / {number}", "torch.div({0}, {number})", "{0}.clone().div_({number})", number=FACTORS)


def _clamps() -> Iterator[Spelling]:
    yield from _spell("clamp", "F.relu({0})", "torch.relu({0})", "{0}.relu()", "F.relu6({0})", "F.relu({0}.clone(), inplace=True)")
    yield from _spell("clamp", "F.hardtanh({0}, {low}, {high})", "{0}.clamp({low}, {high})", low=(-1.0, -0.3), high=(1.0, 0.5))
    yield from _spell("clamp", "{0}.clamp(min={low})", "torch.clip({0}, max={low})", "{0}.clone().clamp_({low})", low=(0, 0.1, -0.5, 1e-4))
    yield from (_module("clamp", layer) for layer in ("nn.ReLU()", "nn.ReLU6()", "nn.ReLU(inplace=True)", "nn.Hardtanh(-0.5, 1.5)"))


def _products() -> Iterator[Spelling]:
    bias = (True, False)
    yield _module("linear", "nn.Linear({last}, {outputs}, bias={bias})", "{odd}", outputs=(*OUTPUTS, "{last}"), bias=bias, odd=ODD)
    yield _held("linear", "F.linear({0}, {p0})", "torch.randn({outputs}, {last})", outputs=OUTPUTS)
    yield from _spell("matmul", "{0} @ {1}", "{0} @ {1}.transpose(-1, -2)", "{0}.transpose(-1, -2) @ {1}", "torch.bmm({0}, {1}.mT)")
    yield _held("matmul", "{0} @ {p0}", "torch.randn({last}, {outputs})", outputs=OUTPUTS)
    yield _held("matmul", "torch.matmul({buffer}, {0})", buffer="torch.randn({outputs}, {sizes}[-2])", outputs=OUTPUTS)
    yield _held("matmul", "torch.addmm({p1}, {0}, {p0})", "torch.randn({last}, {outputs})", "torch.randn({outputs})", outputs=OUTPUTS)
    yield _module("prelu", "nn.PReLU()")
    yield _module("prelu", "nn.PReLU({channels}, {slope})", slope=(0.25, 1.5, -0.5, 0.0))
    yield _held("prelu", "F.prelu({0}, {p0})", "torch.randn({channels})")


def _normalizations() -> Iterator[Spelling]:
    for rank in (1, 2, 3):
        yield _module("batch_norm", f"nn.BatchNorm{rank}d({{channels}})", *STATISTICS)
        yield _module("batch_norm", f"nn.BatchNorm{rank}d({{channels}}, affine=False)", *STATISTICS[:2])
    call = "F.batch_norm({0}, {buffer}[0], {buffer}[1], {p0}, {p1})"
    statistics = "torch.stack((torch.randn({channels}), torch.rand({channels}) + 0.5))"
    yield _held("batch_norm", call, "torch.randn({channels})", "torch.randn({channels})", buffer=statistics)


def _pools() -> Iterator[Spelling]:
    for kind in ("max", "avg"):
        yield from _spell(f"{kind}_pool{{rank}}d", f"F.{kind}_pool{{rank}}d({{0}}, {{kernel}}, {{stride}}, {{padding}})", **POOL)
        layer = f"nn.{kind.capitalize()}Pool{{rank}}d({{kernel}}, {{stride}}, {{padding}}, ceil_mode={{ceil}})"
        yield _module(f"{kind}_pool{{rank}}d", layer, **POOL)
    yield from _spell("avg_pool{rank}d", "F.avg_pool{rank}d({0}, {kernel}, {stride}, {padding}, {ceil}, False)", **POOL)
    yield from _spell("max_pool{rank}d", "F.max_pool{rank}d({0}, {kernel}, {stride}, {padding}, dilation=2)", **POOL)
    sizes = (1, 2, 3)
    yield from _spell("adaptive_avg_pool{rank}d", "F.adaptive_avg_pool{rank}d({0}, {size})", size=sizes)
    yield _module("adaptive_avg_pool{rank}d", "nn.AdaptiveAvgPool{rank}d({size})", size=sizes)
    for name in ("mean", "sum", "amax"):
        yield from _spell(name, f"{{0}}.{name}({{dim}}, keepdim={{keep}})", f"torch.{name}({{0}}, {{dim}})", dim=DIMS, keep=FLAG)


def _moves() -> Iterator[Spelling]:
    yield from _spell("reshape", "{0}.flatten(1)", "{0}.view({0}.shape[0], -1)", "torch.flatten({0}, {dim})", dim=(1, 2, -2))
    yield from _spell("reshape", "{0}.unsqueeze({dim})", "{0}.squeeze({dim})", "{0}.reshape(-1, {last})", dim=(1, -1, 2))
    yield from _spell("reshape", "{0}.unflatten(1, (-1, {parts}))", "{0}.view(*{0}.shape[:-1], -1, {parts})", parts=(1, 2, 3))
    yield _module("reshape", "nn.Flatten({start})", start=(1, 2))
    yield from _spell("identity", "{0}.clone()", "{0}.contiguous()", "{0}.detach()")
    yield _module("identity", "nn.Identity()")
    orders = ("0, 2, 1", "0, 2, 3, 1", "0, 3, 1, 2", "0, 4, 1, 2, 3", "1, 0", "2, 0, 1")
    yield from _spell("permute", "{0}.transpose(1, -1)", "{0}.mT", "torch.movedim({0}, 1, -1)", "{0}.permute({order})", order=orders)
    yield from _spell("expand", "{0}[:, :1].expand(-1, {count}, *{sizes}[1:])", "torch.broadcast_to({0}, (2, *{0}.shape))", count=(2, 3))
    yield from _spell("expand", "{0}.mean(1, keepdim=True).expand_as({0})", "{0}.unsqueeze(1).expand(-1, {count}, *{sizes})", count=(2, 3))
    yield from _spell("repeat", "{0}.repeat(1, {count}{ones})", "torch.tile({0}, ({count},))", "{0}.repeat(2, 1, 1{ones})", count=(2, 3))
    yield from _spell("getitem", "{0}[:, {start}:]", "{0}[..., ::2]", "{0}[:, {start}]", "{0}[:, None]", "{0}[..., :-1]", start=(0, 1, -1))
    yield from _spell("getitem", "{0}[:, [0, -1, 0]]", "{0}.chunk(2, {dim})[-1]", "{0}.split(2, {dim})[0]", "{0}[:1]", dim=(1, -1))
    yield from _spell("getitem", "{0}.unbind({dim})[0]", "{0}.narrow({dim}, 0, 1)", "{0}.repeat_interleave(2, {dim})", dim=(1, -1))
    yield from _spell("getitem", "{0}.select({dim}, -1)", "torch.select({0}, {dim}, 0)", dim=(1, -1))
    yield _held("getitem", "torch.index_select({0}, {dim}, {buffer})", buffer="torch.tensor([0, 0, 1])", dim=(1, -1))
    yield from _spell("flip", "{0}.flip({dim})", "torch.flip({0}, (1, -1))", "torch.fliplr({0})", dim=(1, -1))
    yield from _spell("roll", "{0}.roll({shift}, {dim})", "torch.roll({0}, (1, {shift}), (1, -1))", shift=(1, -2, 7), dim=(1, -1))
    yield from _spell("cat", "torch.cat(({0}, {1}), {dim})", "torch.cat([{0}, {1}, {0}], {dim})", dim=(1, -1))
    yield from _spell("cat", "torch.concat([{0}, {1}, {2}], 1)", "torch.cat([{0}])")
    yield from _spell("stack", "torch.stack(({0}, {1}), {dim})", "torch.stack([{0}, {0}, {1}], {dim})", dim=(1, -1, 2))
    yield from _spell("pixel_shuffle", "F.pixel_shuffle({0}, {factor})", factor=(2, 1))
    yield _module("pixel_shuffle", "nn.PixelShuffle(2)")
    yield from _spell("pixel_unshuffle", "F.pixel_unshuffle({0}, {factor})", factor=(2, 3, 1))
    yield from _spell("channel_shuffle", "F.channel_shuffle({0}, {groups})", groups=(2, 3, 1))
    margins = ("1, 1", "0, 2", "1, -1", "1, 0, 2, 1", "1, 1, 1, 1, 0, 1", "-1, -1")
    values = (0, 0.5, -1.3, 50.0)
    modes = ("replicate", "circular", "reflect")
    yield from _spell("pad", "F.pad({0}, ({margins}))", "F.pad({0}, ({margins}), value={value})", margins=margins, value=values)
    yield from _spell("pad", "F.pad({0}, ({margins}), mode={mode!r})", margins=margins, mode=modes)
    kinds = ("Zero", "Reflection", "Replication", "Circular")
    yield from (_module("pad", f"nn.{kind}Pad{{rank}}d({{size}})", size=(1, 2)) for kind in kinds)
    yield _module("pad", "nn.ConstantPad{rank}d(1, {value})", value=values)
    yield from _spell("maximum", "torch.maximum({0}, {1})", "{0}.max({1})")
    yield from _spell("minimum", "torch.minimum({0}, {1})", "torch.min({0}, {1})")
    yield _held("maximum", "torch.maximum({0}, {p0})", "torch.randn({channels}{ones})")
    yield from _spell("dropout", "F.dropout({0}, 0.4, self.training)", "F.dropout1d({0}, 0.4, self.training)")
    yield from (_module("dropout", f"nn.{kind}(0.3)") for kind in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"))


def _resizes() -> Iterator[Spelling]:
    modes = ("nearest", "nearest-exact", "linear", "bilinear")
    factors, sizes, aligned = (2, 1, 1.5, 0.5, 3), (4, 1, 7), (False, True)
    call = "F.interpolate({0}, scale_factor={factor}, mode={mode!r})"
    yield from _spell("interpolate", call, "F.interpolate({0}, {size}, mode={mode!r})", mode=modes, factor=factors, size=sizes)
    call = "F.interpolate({0}, {size}, mode={mode!r}, align_corners={aligned})"
    yield from _spell("interpolate", call, mode=modes[2:], size=sizes, aligned=aligned)
    yield _module("interpolate", "nn.Upsample(scale_factor={factor}, mode={mode!r})", factor=factors, mode=modes)


def _settings() -> Iterator[Spelling]:
    """Functions with settings of their own."""
    yield from _spell("leaky_relu", "F.leaky_relu({0}, {slope})", slope=(0.01, 0.3, -0.2))
    yield from _spell("elu", "F.elu({0}, alpha={alpha})", alpha=(1.0, 0.3))
    yield _module("softplus", "nn.Softplus({beta}, {threshold})", beta=(1.0, 0.5, 3.0), threshold=(20.0, 1.0))
    yield from _spell("gelu", "F.gelu({0}, approximate={kind!r})", kind=("none", "tanh"))
    yield from _spell("pow", "{0} ** {exponent}", "{0}.pow({exponent})", exponent=(2, 3, 1, 4, 0))
    yield from _spell("pow", "({0}.abs() + 0.5) ** {exponent}", exponent=(2, 0.5, -1, -1.5))


def _composites() -> Iterator[Spelling]:
    """What is made of other operators, where the target has int16."""
    yield from _spell("softmax", "torch.softmax({0}, {dim})", "F.softmax({0}, dim={dim})", "{0}.softmax({dim})", dim=(-1, 1))
    yield from _spell("log_softmax", "torch.log_softmax({0}, {dim})", "F.log_softmax({0}, dim={dim})", dim=(-1, 1))
    yield from _spell("layer_norm", "F.layer_norm({0}, ({last},))", "F.layer_norm({0}, ({last},), eps={eps})", eps=(1e-5, 0.1))
    yield _module("layer_norm", "nn.LayerNorm({last})")
    yield _module("layer_norm", "nn.LayerNorm({last}, bias={bias})", bias=(True, False))
    yield from _spell("softmin", "F.softmin({0}, {dim})", dim=(-1, 1))
    yield from _spell("logsumexp", "torch.logsumexp({0}, {dim}, keepdim={keep})", dim=DIMS, keep=FLAG)
    yield from _spell("glu", dim=(-1, 1))
    yield _module("group_norm", "nn.GroupNorm({groups}, {channels})", groups=(1, 2, "{channels}"))
    yield from _spell("group_norm", "F.group_norm({0}, {groups}, eps={eps})", groups=(1, 2), eps=(1e-5, 0.1))
    yield _module("instance_norm", "nn.InstanceNorm{rank}d({channels}, affine={affine})", affine=FLAG)
    yield _module("rms_norm", "nn.RMSNorm({last})")
    yield from _spell("rms_norm", "F.rms_norm({0}, ({last},), eps={eps})", eps=(1e-5, 0.1))
    for name in ("var", "std"):
        yield from _spell(name, f"{{0}}.{name}({{dim}}, correction={{one}}, keepdim={{keep}})", dim=DIMS, one=(0, 1), keep=FLAG)
        yield from _spell(f"{name}_mean", f"torch.{name}_mean({{0}}, {{dim}})[{{member}}]", dim=DIMS, member=(0, 1))
    yield from _spell("norm", "{0}.norm({p}, {dim}, {keep})", p=(2, 1, 3, 0.5, "float('inf')"), dim=DIMS, keep=FLAG)
    yield from _spell("normalize", "F.normalize({0}, {p}, {dim})", p=(2.0, 1.0), dim=(1, -1))


def _attention() -> Iterator[Spelling]:
    """Attention, and masks in front of a softmax."""
    name = "scaled_dot_product_attention"
    yield from _spell(name, f"F.{name}({{0}}, {{0}}, {{0}}, is_causal={{flag}})", f"F.{name}({{0}}, {{1}}, {{1}})", flag=FLAG)
    mask = "torch.rand({last}, {last}).round() * {value}"
    values = (-1e9, "float('-inf')", -100.0, 1.0)
    yield _held("softmax", "torch.softmax({0} @ {0}.mT @ {0} + {buffer}.nan_to_num(0)[0], -1)", buffer=mask, value=values[:1])
    yield _held("softmax", "torch.softmax(({0} * 0.3).masked_fill({buffer} > 0.5, {value}), -1)", buffer="torch.rand({last})", value=values)
    yield _module(
        "multi_head_attention", "nn.MultiheadAttention({last}, 1, batch_first=True)", call="{layer}({0}, {0}, {0})[{member}]", member=(0, 1)
    )


def _floats() -> Iterator[Spelling]:
    """What stays in float, or may."""
    yield from _spell(FLOAT, "torch.cumsum({0}, {dim})", "F.normalize({0}, dim={dim})", dim=(-1, 1))
    yield from _spell(FLOAT, "torch.atan({0})", "1 / ({0}.abs() + 1)", "{0}.floor()", "{0}.sign()")
    yield from _spell(FLOAT, "{0} / ({1}.abs() + 1)", "torch.where({0} > 0, {0}, {1})", "{0}.std(-1)", "{0}.argmax(-1).float()")
    yield from _spell(FLOAT, "F.glu({0}, {dim})", "{0}.amin({dim})", "{0}.sort({dim}).values", "{0}.norm(dim={dim})", dim=(1, -1))
    yield _module(FLOAT, "nn.RNN({last}, 3, batch_first=True)", call="{layer}({0})[0]")
    yield _module(FLOAT, "nn.GRU({last}, 3, batch_first=True)", call="{layer}({0})[0]")


# ---- functions of one tensor, read off the table -------------------------------------------------------------------------------

SPACES = {"torch": torch, "F": F, "operator": operator}
GUARDED = ("log", "sqrt", "rsqrt", "reciprocal")  # not defined everywhere
SKIPPED_METHODS = ("detach", "view_as", "reshape_as")


def _public(function: Any) -> str | None:
    """The name a user writes for a function."""
    return next((f"{space}.{name}" for space, names in SPACES.items() for name, known in vars(names).items() if known is function), None)


def plain(record: Operator) -> Iterator[Spelling]:
    """The spellings of an operator that needs nothing but one tensor: functions, methods and modules."""
    required = [name for name, value in _signature(record).items() if value is inspect.Parameter.empty]
    if required != ["input"] or record.operands != ("input",) or record.absorbs:
        return
    operand = "({0}.abs() + 0.5)" if record.name in GUARDED else "{0}"
    for function in [function for function, (known, _) in FUNCTIONS.items() if known is record]:
        name = _public(function)
        if name is not None:
            yield Spelling(record.name, f"{name}({operand})")
    for method in [method for method, (known, _) in METHODS.items() if known is record and method not in SKIPPED_METHODS]:
        yield Spelling(record.name, f"{operand}{'.clone()' if method.endswith('_') else ''}.{method}()")
    for module in [module for module, (known, _) in MODULES.items() if known is record]:
        if getattr(nn, module.__name__, None) is module:
            yield Spelling(record.name, "{layer}({0})", f"nn.{module.__name__}()")


def _signature(record: Operator) -> Mapping[str, Any]:
    if record.parameters:
        return record.parameters
    return {name: parameter.default for name, parameter in inspect.signature(record.function).parameters.items()}


def _all() -> Iterator[Spelling]:
    for family in (
        _convolutions,
        _arithmetic,
        _clamps,
        _products,
        _normalizations,
        _pools,
        _moves,
        _resizes,
        _settings,
        _composites,
        _attention,
        _floats,
    ):
        yield from family()
    for record in OPERATORS.values():
        if record.name not in (*UNWRITTEN, "dropout"):  # functional dropout acts unless it is told not to
            yield from plain(record)


SPELLINGS: tuple[Spelling, ...] = tuple(_all())


def by_operator() -> dict[str, list[Spelling]]:
    """The spellings of every operator; those of all ranks under each name they stand for."""
    found: dict[str, list[Spelling]] = {}
    for spelling in SPELLINGS:
        names = [spelling.operator.format(rank=rank) for rank in (1, 2, 3)]
        for name in dict.fromkeys(names):
            found.setdefault(name, []).append(spelling)
    return found


def unspelled() -> list[str]:
    """The operators of the table that nothing here writes."""
    known = by_operator()
    return [record.name for record in OPERATORS.values() if record.name not in known and record.name not in UNWRITTEN]
