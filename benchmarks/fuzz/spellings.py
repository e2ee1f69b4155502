"""How operators are written in a model: one line each.

A line says nothing of what its operands have to be. It is tried in PyTorch, and what PyTorch refuses is drawn again.
"""

import inspect
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.fuzz.spelling import Options, Spelling
from benchmarks.fuzz.spelling import held as _held
from benchmarks.fuzz.spelling import module as _module
from benchmarks.fuzz.spelling import spell as _spell
from benchmarks.fuzz.whole import whole_numbers
from benchmarks.operators.spelling import INPUT, written_forms
from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS, Operator
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE, REQUANTIZE

FLOAT = "float"  # the operator of what the table may not know
UNWRITTEN = (  # made by passes, never written by a user
    *(QUANTIZE.name, DEQUANTIZE.name, REQUANTIZE.name, "shifted", "scale_channels"),
    *("exponential", "inverse_root", "bounded_inverse", "of_one_magnitude", "kept", "added", "masked_softmax", "ranked", "pick"),
    *("log_of_one_and_exponential", "angle_of_share", "loop_item", "loop_state", "loop_carry", "loop_last", "loop_stack", "over_lengths"),
    *("sum_at", "index_sum", "finely", "in_dtype", "log_of_base", "dynamic_linear"),
    *("meshgrid", "as_strided"),  # of what has no batch, and of inputs alone
)

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
    keywords = {name: CONVOLUTION[name] for name in ("groups", "bias")}
    yield _module("conv{rank}d", same, "{odd}", **keywords, kernel=(1, 3, 2), odd=ODD)
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
    rows = "{0}[0].reshape(-1, {last})"
    yield from _spell("computed_linear", f"F.linear({{0}}, {rows}[:2])", f"F.linear({{0}}, {rows}[:3]) * 0.25")
    for rank in (1, 2):
        kernels = "{0}[:, :1, ..., :1].flatten(0, 1).unsqueeze(1)"
        each = f"F.conv{rank}d({{0}}.reshape(1, -1, *{{0}}.shape[2:]), {kernels}, groups={{0}}.shape[0])"
        yield from _spell(f"computed_conv{rank}d", f"F.conv{rank}d({{0}}, {{0}}[:1, :, ..., :1])", each)
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
    yield from _spell("piece", "torch.cat(({0}, {0}.relu())).chunk(2)[1]", "torch.cat(({0}, -{0})).split(len({0}))[0]")
    yield from _spell(
        "interleave", "{0}.repeat_interleave(2, 0).chunk(2)[0]", "torch.cat(({0}, {0}.repeat_interleave(2, dim=0)))[: len({0})]"
    )
    yield from _spell("getitem", "{0}.unbind({dim})[0]", "{0}.narrow({dim}, 0, 1)", "{0}.repeat_interleave(2, {dim})", dim=(1, -1))
    yield from _spell("getitem", "{0}.select({dim}, -1)", "torch.select({0}, {dim}, 0)", dim=(1, -1))
    yield _held("getitem", "torch.index_select({0}, {dim}, {buffer})", buffer="torch.tensor([0, 0, 1])", dim=(1, -1))
    yield from _spell("flip", "{0}.flip({dim})", "torch.flip({0}, (1, -1))", "torch.fliplr({0})", dim=(1, -1))
    yield from _spell("roll", "{0}.roll({shift}, {dim})", "torch.roll({0}, (1, {shift}), (1, -1))", shift=(1, -2, 7), dim=(1, -1))
    yield from _spell("cat", "torch.cat(({0}, {1}), {dim})", "torch.cat([{0}, {1}, {0}], {dim})", dim=(1, -1))
    yield Spelling("cat", "torch.cat([{p0}.expand({0}.shape[0], *{sizes}), {0}], 1)", parameters=("torch.randn(1, *{sizes})",))
    yield Spelling("embedding", "F.embedding({0}.argmax(1), {p0})", parameters=("torch.randn({channels}, 3)",))
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
    call = "F.interpolate({0}, {size}, mode={mode!r})"
    yield from _spell(
        "interpolate", call, "F.interpolate({0}, scale_factor=1.7, mode={mode!r})", mode=("bicubic", "area", "trilinear"), size=sizes
    )
    yield from _spell("interpolate", "F.interpolate({0}, {size}, mode={mode!r}, antialias=True)", mode=("bilinear", "bicubic"), size=sizes)


def _geometry() -> Iterator[Spelling]:
    """Windows, and images read between their pixels."""
    sizes = (2, 3, 1)
    yield from _spell("adaptive_max_pool{rank}d", "F.adaptive_max_pool{rank}d({0}, {size})", size=sizes)
    yield _module("adaptive_max_pool{rank}d", "nn.AdaptiveMaxPool{rank}d({size})", size=sizes)
    pooled = "F.max_pool{rank}d({0}, {kernel}, return_indices=True)"
    yield from _spell("max_pool{rank}d_with_indices", pooled + "[0]", kernel=(2, 3))
    for name in ("max_unpool{rank}d", "max_pool_indices{rank}d"):
        yield from _spell(name, f"F.max_unpool{{rank}}d(*{pooled}, {{kernel}}, output_size={{0}}.shape)", kernel=(2, 3))
    adaptive = "F.adaptive_max_pool{rank}d({0}, {size}, return_indices=True)"
    yield from _spell("adaptive_max_pool{rank}d_with_indices", adaptive + "[0]", size=sizes)
    yield from _spell("adaptive_max_indices{rank}d", "{0}.flatten(2).gather(2, " + adaptive + "[1].flatten(2))", size=sizes)
    yield from _spell(
        "unfold", "F.unfold({0}, {kernel}, padding={padding}, stride={stride})", kernel=(2, 1, 3), padding=(0, 1), stride=(1, 2)
    )
    yield from _spell("fold", "F.fold(F.unfold({0}, {kernel}), {0}.shape[2:], {kernel})", kernel=(2, 1))
    yield from _spell("unfold_dimension", "{0}.unfold({dim}, 2, {step})", dim=(1, -1), step=(1, 2))
    grid = "{0}[:, [0, 0]].permute(0, 2, 3, 1).tanh()"
    paddings, aligned = ("zeros", "border", "reflection"), (False, True)
    yield from _spell(
        "grid_sample", f"F.grid_sample({{0}}, {grid}, 'bilinear', {{padding!r}}, {{corners}})", padding=paddings, corners=aligned
    )
    grid = "F.affine_grid({0}.flatten(1)[:, :6].reshape(-1, 2, 3), {0}.shape, {corners})"
    yield from _spell("affine_grid", f"F.grid_sample({{0}}, {grid}, align_corners={{corners}})", corners=aligned)
    yield from _spell("warp", "fxq.nn.Warp()({0}, {0}[:, [0, 0]].permute(0, 2, 3, 1))")
    yield _module("deform_conv2d", "fxq.nn.DeformConv2d({channels}, 3, 1)", call="{layer}({0}, {0}[:, [0, 0]])")
    yield _module("deformed_taps", "fxq.nn.DeformConv2d({channels}, 2, 1)", call="{layer}({0}, {0}[:, [0, 0]])")


def _settings() -> Iterator[Spelling]:
    """Functions with settings of their own."""
    yield from _spell("leaky_relu", "F.leaky_relu({0}, {slope})", slope=(0.01, 0.3, -0.2))
    yield from _spell("elu", "F.elu({0}, alpha={alpha})", alpha=(1.0, 0.3))
    yield _module("softplus", "nn.Softplus({beta}, {threshold})", beta=(1.0, 0.5, 3.0), threshold=(20.0, 1.0))
    yield from _spell("gelu", "F.gelu({0}, approximate={kind!r})", kind=("none", "tanh"))
    yield from _spell("threshold", "F.threshold({0}, {low}, {value})", low=(0.1, -0.5), value=(0.1, 0, -2.0))
    yield from _spell("pow", "{0} ** {exponent}", "{0}.pow({exponent})", exponent=(2, 3, 1, 4, 0))
    yield from _spell("pow", "({0}.abs() + 0.5) ** {exponent}", exponent=(2, 0.5, -1, -1.5))


def _composites() -> Iterator[Spelling]:
    """Composites of other operators, where the target has int16."""
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
    yield _module("normalized_instances", "nn.InstanceNorm{rank}d({channels}, affine={affine}, track_running_stats=True)", affine=FLAG)
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


def _recurrent() -> Iterator[Spelling]:
    bias, relu, size = (True, False), ("tanh", "relu"), (3, 1, 4)
    for name in ("rnn", "gru", "lstm"):
        layer = f"nn.{name.upper()}({{last}}, {{size}}, {{layers}}, bias={{bias}}, bidirectional={{both}}, batch_first=True)"
        last = "[1][0]" if name == "lstm" else "[1]"
        for picked in ("[0]", last):
            yield _module(name, layer, call=f"{{layer}}({{0}}){picked}", size=size, layers=(1, 2), bias=bias, both=FLAG)
    yield _module("rnn", "nn.RNN({last}, 3, nonlinearity={kind!r}, batch_first=True)", call="{layer}({0})[0]", kind=relu)
    yield _module("lstm", "nn.LSTM({last}, 4, proj_size=2, batch_first=True)", call="{layer}({0})[0]")
    yield _module("lstm", "nn.LSTM({last}, {last}, batch_first=True)", call="{layer}({0}, ({1}[:, :1].transpose(0, 1),) * 2)[0]")
    yield _module("rnn_cell", "nn.RNNCell({last}, {last}, nonlinearity={kind!r})", call="{layer}({0}, {0})", kind=relu)
    yield _module("gru_cell", "nn.GRUCell({last}, {last}, bias={bias})", call="{layer}({0}, {1})", bias=bias)
    yield _module("gru_cell", "nn.GRUCell({last}, {size})", call="{layer}({0})", size=size)
    yield _module("lstm_cell", "nn.LSTMCell({last}, {last}, bias={bias})", call="{layer}({0}, ({1}, {0}))[0]", bias=bias)
    yield _module("lstm_cell", "nn.LSTMCell({last}, {last})", call="{layer}(*[{0}, {layer}({0}, ({1}, {1}))])[1]")


def _choices() -> Iterator[Spelling]:
    """Comparisons, booleans, orders, places and assignments."""
    chosen = "torch.where({condition}, {{0}}, {{1}})"
    compared = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for name, sign in compared.items():
        both, number = f"{{0}} {sign} {{1}}", f"{{0}} {sign} {{number}}"
        yield from _spell(name, *(chosen.format(condition=condition) for condition in (both, number)), number=NUMBERS)
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        yield from _spell(f"logical_{name}", chosen.format(condition=f"({{0}} > 0) {sign} ({{1}} > 0.5)"))
    yield from _spell("logical_not", chosen.format(condition="~({0} > {1})"))
    for name in ("any", "all"):
        yield from _spell(name, chosen.format(condition=f"({{0}} > 0).{name}({{dim}}, keepdim=True)"), dim=DIMS)
    for name in TRUTHS:
        yield from _spell(name, chosen.format(condition=f"torch.{name}({{0}})"))
    close = chosen.format(condition="torch.isclose({0}, {1}, {share}, {near})")
    yield from _spell("isclose", close, share=(0.0, 0.1), near=(0.5, 1e-3))
    yield from _spell("where", "(s := {0}.clone(), s.__setitem__(s < 0, torch.tanh(s[s < 0]) * {number}))[0]", number=NUMBERS)
    yield from _spell("curve", "torch.where({0} > 0, {0}.sqrt(), {0})", "torch.where({0} > 1, 1 / {0}, {0} * {number})", number=NUMBERS)
    yield from _spell("curve", "torch.where({0}.abs() < 1, torch.asin({0}), torch.sigmoid({0}) * {0} - {number})", number=NUMBERS)
    yield from _spell("where", "torch.where({0} > 0, {1}, {number})", "{0}.masked_fill({1} > 0.5, {number})", number=NUMBERS)
    yield from _spell("clamp_between", "torch.clamp({0}, {1} - 1, {1})")
    for name, end in (("amin", ""), ("argmax", ".float()"), ("argmin", ".float()")):  # a place is a number to what follows
        yield from _spell(name, f"{{0}}.{name}({{dim}}, keepdim={{keep}}){end}", dim=(1, -1), keep=FLAG)
    for name in ("max", "min"):
        yield from _spell(f"{name}_along", f"torch.{name}({{0}}, {{dim}})[0]", dim=(1, -1))
    yield from _spell("sort", "{0}.sort({dim}, {flag})[0]", dim=(1, -1), flag=FLAG)
    yield from _spell("argsort", "{0}.argsort({dim}, {flag}).float()", dim=(1, -1), flag=FLAG)
    yield from _spell("topk", "{0}.topk(1, {dim}, {flag})[0]", dim=(1, -1), flag=FLAG)
    yield from _spell("kthvalue", "torch.kthvalue({0}, 1, {dim})[0]", dim=(1, -1))
    yield from _spell("median", "torch.median({0}, {dim})[0]", dim=(1, -1))
    places = "{0}.argmax({dim}, True)"
    yield from _spell("gather", f"{{1}}.gather({{dim}}, {places})", f"torch.take_along_dim({{0}}, {places}, {{dim}})", dim=(1, -1))
    yield from _spell("scatter", f"{{0}}.scatter({{dim}}, {places}, {{1}})", dim=(1, -1))
    yield from _spell("setitem", "torch.slice_scatter({0}, {0}[:, -1:], 1, 0, 1)", "torch.select_scatter({0}, {1}[:, -1], 1, 0)")
    yield _held("setitem", "{0}.index_fill({dim}, {buffer}, {number})", buffer="torch.tensor([0])", dim=(1, -1), number=NUMBERS)
    yield from _chosen()
    yield from _spell("cumsum", "torch.cumsum({0}, {dim})", dim=(1, -1))


def _chosen() -> Iterator[Spelling]:
    """Elements chosen by lists and constants, and elements gathered at places."""
    for name, lists in (("index", "..., [0, -1], [0, 0]"), ("index_parts", ":, None, ..., [0, -1], [0, 0]")):
        yield from _spell(name, f"{{0}}[{lists}]")
    yield from _spell("take", "{0} + torch.take({0}, torch.tensor([0]))")
    yield from _spell("diagonal", "torch.diagonal({0}, {offset}, 1, -1)", offset=(0, -1))
    yield from _spell("write", "torch.diagonal_scatter({0}, torch.diagonal({1}, 0, 1, -1), 0, 1, -1)")
    yield from _spell("pick_parts", "{0}[:, :1, {1}.flatten(1)[0].argmax(0, keepdim=True) % 1]")
    yield from _spell("pick_each", "{0}[torch.arange({0}.shape[0]), {0}.flatten(2)[..., 0].argmax(1)]")
    added, along = "{0}.argmax({dim}, True).expand_as({0})", {"dim": (1, -1)}
    yield from _spell("scatter_add", f"{{0}}.scatter_add({{dim}}, {added}, {{0}})", **along)
    yield from _spell("scatter_extremum", f"{{0}}.scatter_reduce({{dim}}, {added}, {{1}}, '{{how}}')", how=("amax", "amin"), **along)
    yield from _spell("index_add", "torch.index_add({0}, {dim}, torch.tensor([0]), {0}.narrow({dim}, 0, 1))", **along)
    yield from _spell("one_hot", "{0}.gather(-1, torch.nn.functional.one_hot({0}.argmin(-1), {last}))")
    counted = "torch.count_nonzero({0} > {number}, 1).unsqueeze(1)"
    yield from _spell("count_nonzero", f"torch.where({counted} == 1, {{0}}, {{1}})", number=NUMBERS)
    first = "torch.tensor([0]), torch.tensor([0])"
    yield from _spell("index_put", f"{{0}} + {{0}}[0].index_put(({first}), torch.tensor({{number}}))", number=(0.5, -1.0))
    bags = "torch.nn.functional.embedding_bag({0}.flatten(2)[..., 0].argsort(1), torch.eye({channels}), mode='{how}')"
    yield from _spell("embedding_bag", bags, how=("mean", "sum", "max"))


def _quotients() -> Iterator[Spelling]:
    """Quotients, and sums of products."""
    for name in NUMBERED[:3]:
        yield from _spell(name, f"torch.{name}({{0}}, {{number}})", f"{{0}}.{name}({{number}})", number=FACTORS)
    yield from _spell("power_of", "torch.pow({number}, {0})", "{number} ** {0}", number=(2, 0.5, 1.7))
    yield from _spell("quotient_of", "{number} / ({0}.abs() + 0.5)", number=FACTORS)
    yield from _spell("true_divide", "{0} / ({1}.abs() + 0.5)", "torch.div({0}, {1}.exp())")
    yield from _spell("trunc_divide", "torch.div({0}, {number}, rounding_mode='trunc')", number=FACTORS)
    yield from _spell("einsum", "torch.einsum('b...i,b...i->b...', {0}, {1})", "torch.einsum('bi...,bj...->bij', {0}, {1})")
    yield from _spell("added_product", "torch.baddbmm({0}, {0}, {1})", "torch.baddbmm({0}, {0}, {1}, beta={number})", number=FACTORS)
    yield _module("bilinear", "nn.Bilinear({last}, {last}, {size})", call="{layer}({0}, {1})", size=(1, 3))
    yield from _spell("lerp", "torch.lerp({0}, {1}, {number})", "torch.lerp({0}, {1}, {1})", number=(0.3, 1.5))


def _pairs() -> Iterator[Spelling]:
    """Of two tensors: powers, rounded quotients, signs, and products of many."""
    positive = "({1}.abs() + 0.5)"
    yield from _spell("power", "({0}.abs() + 0.5) ** {1}.tanh()", f"torch.pow({positive}, {{0}}.tanh())")
    yield _held("power", "{0} ** {buffer}", buffer="torch.arange({last}) % 3")
    yield from _spell("floor_quotient", f"torch.div({{0}}, {positive}, rounding_mode='floor')", f"{{0}} // {positive}", f"2 // {positive}")
    yield from _spell("trunc_quotient", f"torch.div({{0}}, {positive}, rounding_mode='trunc')")
    yield from _spell("floor_remainder", f"{{0}} % {positive}", f"torch.remainder({{0}}, {positive})")
    yield from _spell("trunc_remainder", f"torch.fmod({{0}}, {positive})")
    yield from _spell("signbit", "torch.where(torch.signbit({0}), {0}, {1})")
    for name in ("prod", "cumprod"):
        yield from _spell(name, f"torch.{name}({{0}}, dim={{dim}})", f"{{0}}.{name}(dim={{dim}})", dim=(1, -1))
    yield from _spell("broadcast_tensors", "torch.broadcast_tensors({0}, {1}[:, :1])[{member}]", member=(0, 1))


def _windows() -> Iterator[Spelling]:
    """Pools by a power."""
    yield from _spell("lp_pool{rank}d", "F.lp_pool{rank}d({0}, {p}, {kernel})", p=(2, 1), kernel=(2, 3))


def _floats() -> Iterator[Spelling]:
    """Operators that stay in float."""
    yield from _spell(FLOAT, "torch.special.bessel_j0({0})", "torch.logcumsumexp({0}, {dim})", "torch.fft.rfft({0}).abs()", dim=(-1, 1))
    yield from _spell(FLOAT, "{0}.cummax({dim}).values", "{0}.mode({dim}).values", dim=(-1, 1))


# ---- functions of one tensor, read off the table -------------------------------------------------------------------------------

SPACES = {"torch": torch, "F": F, "torch.special": torch.special, "operator": operator}
WITHIN_ONE = ("asin", "acos", "atanh", "erfinv", "logit", "ndtri", "entr")  # not defined everywhere, as those of the next line
GUARDED = ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma")
TRUTHS = ("isnan", "isinf", "isfinite", "isreal", "isposinf", "isneginf")  # no model ends in them
NUMBERED = ("floor_divide", "remainder", "fmod", "power_of", "threshold")  # they need a number besides
SKIPPED_METHODS = ("detach", "view_as", "reshape_as")


def _public(function: Any) -> str | None:
    """The name a user writes for a function."""
    return next((f"{space}.{name}" for space, names in SPACES.items() for name, value in vars(names).items() if value is function), None)


def plain(record: Operator) -> Iterator[Spelling]:
    """The spellings of an operator that needs nothing but one tensor: functions, methods and modules."""
    required = [name for name, value in _signature(record).items() if value is inspect.Parameter.empty]
    if required != ["input"] or record.operands != ("input",) or record.absorbs:
        return
    if _signature(record).get("dim1") == 0:  # by default it works on the batch
        return
    operands = {**dict.fromkeys(GUARDED, "({0}.abs() + 0.5)"), **dict.fromkeys(WITHIN_ONE, "(torch.sigmoid({0}) * 0.8 + 0.1)")}
    operand = {**operands, "acosh": "({0}.abs() + 1.5)"}.get(record.name, "{0}")
    for function in [function for function, (entry, _) in FUNCTIONS.items() if entry is record]:
        name = _public(function)
        if name is not None:
            yield Spelling(record.name, f"{name}({operand}{'.clone()' if name.endswith('_') else ''})")
    for method in [method for method, (entry, _) in METHODS.items() if entry is record and method not in SKIPPED_METHODS]:
        yield Spelling(record.name, f"{operand}{'.clone()' if method.endswith('_') else ''}.{method}()")
    for module in [module for module, (entry, _) in MODULES.items() if entry is record]:
        if getattr(nn, module.__name__, None) is module:
            yield Spelling(record.name, "{layer}({0})", f"nn.{module.__name__}()")


def sampled(record: Operator) -> Iterator[Spelling]:
    """The samples of an operator's record: its texts, and its arguments in the first of its functions that has a public name."""
    public = next((name for function in filter(callable, record.calls) if (name := _public(function)) is not None), None)
    for sample in record.samples:
        shape = "{0}" if sample.over is None else f"(torch.sigmoid({{0}}) * {sample.over[1] - sample.over[0]} + {sample.over[0]})"
        if sample.text and not set(sample.text).intersection("{;"):
            shapes = {name: shape.replace("{0}", f"{{{position}}}") for position, name in enumerate("xyz")}
            yield Spelling(record.name, re.sub(INPUT, lambda match, shapes=shapes: shapes[match.group()], written_forms(sample.text)[0]))
        if sample.text or public is None:
            continue
        tensors = [name for name, value in sample.arguments.items() if name in record.operands and isinstance(value, tuple)]
        leads = sum(one == each for one, each in zip(record.parameter_names, tensors, strict=False))
        operands = [
            ("" if position < leads else f"{name}=") + shape.replace("{0}", f"{{{position}}}") for position, name in enumerate(tensors)
        ]
        settings = [f"{name}={value!r}" for name, value in sample.arguments.items() if name not in tensors]
        yield Spelling(record.name, f"{public}({', '.join([*operands, *settings])})")


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
        _geometry,
        _settings,
        _composites,
        _attention,
        _recurrent,
        _choices,
        _quotients,
        whole_numbers,
        _pairs,
        _windows,
        _floats,
    ):
        yield from family()
    for record in OPERATORS.values():
        if record.name not in (*UNWRITTEN, *TRUTHS, *NUMBERED, "dropout"):  # functional dropout acts by default
            yield from plain(record)


def _and_those_of_records() -> Iterator[Spelling]:
    """Yield all call forms above, and the samples of every other operator."""
    written = list(_all())
    names = {spelling.operator.format(rank=rank) for spelling in written for rank in (1, 2, 3)}
    yield from written
    for record in OPERATORS.values():
        if record.name not in names and record.name not in UNWRITTEN:
            yield from sampled(record)


SPELLINGS: tuple[Spelling, ...] = tuple(_and_those_of_records())


def by_operator() -> dict[str, list[Spelling]]:
    """Return the call forms of every operator; a form of all ranks is under each name that it serves."""
    spellings: dict[str, list[Spelling]] = {}
    for spelling in SPELLINGS:
        names = [spelling.operator.format(rank=rank) for rank in (1, 2, 3)]
        for name in dict.fromkeys(names):
            spellings.setdefault(name, []).append(spelling)
    return spellings


def unspelled() -> list[str]:
    """The operators of the table that nothing here writes."""
    spellings = by_operator()
    return [record.name for record in OPERATORS.values() if record.name not in spellings and record.name not in UNWRITTEN]
