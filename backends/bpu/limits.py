"""The limits of each march on an operator's parameters, as far as Horizon's public documents state them, and its chip's peak rates.

Sources: the operator lists of the RDK X3 (Bernoulli2) and RDK Ultra (Bayes) user guides, and the lists of the conversion tool for the same
chips where they state more. For Nash: the constraints that its export publishes. Where the documents give two different values, the
looser one is used here, and a comment gives the other.

A composite is checked against the limits of its parts, not against limits published for the composite as a whole.
A softmax, for example, accepts any rank and axis that its parts accept.

A limit that is missing here is unknown. For Bernoulli no limits are published. For Bayes-e the limits of Bayes are used, since no others
are published. For Nash the published tables give dtypes rather than sizes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from fxquant.target import Limit, Roofline

CONVOLUTION = "conv2d"
TRANSPOSED = "conv_transpose2d"
AVERAGES = "avg_pool2d adaptive_avg_pool2d"
SUMS = "add sub"
ELEMENTWISE = "add sub mul"
GIGABYTE = 2**30


def _limit(operators: str, measure: str | None, remedy: str, **allowed: Any) -> Limit:
    return Limit(tuple(operators.split()), measure, remedy=remedy, **allowed)


def _absent(operators: str, remedy: str) -> Limit:
    return _limit(operators, None, remedy)


SMALLER_KERNEL = "use several smaller kernels one after another"
SMALLER_STRIDE = "use a smaller stride, or pool in two steps"
STEPS = "pool in two steps, by windows of at most 7: resize or crop to sides of such factors first"
NARROW = "give its input dtype='int8'"
FEWER_CHANNELS = "split the channels, or use fewer"
UNDILATED = "use stride 1 in the dilated layer, and the stride in the layer before or after it"
ON_THE_HOST = "replace it, or keep it in float on the host with a QConfig of None"

# Averages divide by the window's size, padding included, on every march.
COUNTED = (
    _limit(AVERAGES, "count_include_pad", "pass count_include_pad=True, or pad nothing", among=(True,)),
    _limit("avg_pool2d", "divisor_override", "multiply by a constant after the pooling instead", among=(None,)),
)

SHARED = (
    _limit(CONVOLUTION, "stride where it is dilated", UNDILATED, high=1),
    _limit(CONVOLUTION, "stride with a residual added", "add the residual to a layer of stride 1 or 2", high=2),
    _limit("interpolate", "align_corners", "pass align_corners=False", among=(False,)),
    _limit("amax argmax argmin", "reduced size", FEWER_CHANNELS, high=64),  # on Bayes by the conversion tool
    *COUNTED,
)

BERNOULLI2 = (
    _limit("", "rank", "reshape to four dimensions: batch, channels, height, width", low=4, high=4),
    _limit("", "batch", "run smaller batches", high=128),
    _limit("", "bounds", "use relu or relu6", among=((0, None), (0, 6)), allows="relu and relu6"),
    # conv3d, and the modules and functions that the operator list has for Bayes alone
    _absent("linear", "write it as a convolution with a 1×1 kernel"),
    _absent("conv3d conv_transpose1d conv_transpose3d avg_pool3d max_pool3d adaptive_avg_pool3d", "use two-dimensional layers"),
    _absent("reshape permute expand repeat", "leave it out, or do it after the model's output; pixel and channel shuffles are available"),
    _absent("div", "multiply by the reciprocal"),
    _absent("prelu leaky_relu elu selu softplus hardsigmoid", "use relu, relu6, sigmoid, tanh, silu or gelu"),
    # The published tables serve exp, sigmoid, tanh, silu and gelu; no document says that they serve another function.
    _absent(
        "abs log sqrt rsqrt reciprocal erf sin cos pow square hardswish mish softsign tanhshrink logsigmoid maximum minimum", ON_THE_HOST
    ),
    _absent(
        "acos acosh asin asinh atan atanh ceil celu cosh deg2rad digamma entr erfc erfcx erfinv exp2 expm1 floor frac hardshrink i0 i0e "
        "i1 i1e lgamma log10 log1p log2 log_ndtr logit ndtr ndtri rad2deg round rrelu sign sinc sinh softshrink tan threshold trunc",
        ON_THE_HOST,
    ),
    _absent(
        "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isfinite isinf isnan where all any amin gather scatter setitem "
        "sum_at index_sum scatter_extremum "
        "embedding cumsum tril triu flip roll floor_divide fmod remainder trunc_divide grid_sample warp affine_grid fold "
        "unfold signbit",
        ON_THE_HOST,
    ),
    _limit(CONVOLUTION, "kernel", SMALLER_KERNEL, low=1, high=7),
    _limit(CONVOLUTION, "channels of a kernel without groups", FEWER_CHANNELS, high=4096),
    _limit(CONVOLUTION, "channels of a kernel with groups", FEWER_CHANNELS, high=2048),
    _limit(CONVOLUTION, "weights for one output channel", "use a smaller kernel or fewer channels", high=32768),
    _limit(CONVOLUTION, "dilation", "use a dilation of 1, 2 or 4", among=(1, 2, 4)),
    _limit(TRANSPOSED, "kernel", "use a kernel of 2 to 14", low=2, high=14),
    _limit(TRANSPOSED, "stride", "use a stride of 2 or 4", low=2, high=4),  # the conversion tool: 2 or 4
    _limit(TRANSPOSED, "padding beyond (kernel - 1) / 2", "pad less", high=0, allows="none"),
    _limit(TRANSPOSED, "dilation", "use dilation 1", high=1),
    # The tool makes one depthwise convolution of an average, whose kernel it cannot split.
    _limit(AVERAGES, "kernel", STEPS, low=1, high=7, always=True),
    _limit("adaptive_avg_pool2d mean", "side of an averaged image", STEPS, high=7, always=True),
    _limit("mean", "rank of an averaged image", "pass keepdim=True, and flatten afterwards", low=4, always=True),
    _limit(AVERAGES, "stride", SMALLER_STRIDE, high=185),
    _limit("adaptive_avg_pool2d", "area of a global average", "pool in two steps", high=8192),
    _limit("max_pool2d", "kernel", "pool in two steps", high=64),
    _limit("max_pool2d", "stride", SMALLER_STRIDE, high=256),  # the conversion tool: 185
    _limit(f"{TRANSPOSED} {ELEMENTWISE} cat", "channels", FEWER_CHANNELS, high=2048),
    _limit(ELEMENTWISE, "number of constant operands", "fold the constant into the layer before it", high=0),
    _limit(SUMS, "broadcasting", "bring both operands to one shape first", among=("equal", "NC11")),
    _limit("mul", "broadcasting", "bring both operands to one shape first", among=("equal", "NC11", "1111")),
    _limit("cat", "output channels", FEWER_CHANNELS, high=2048),
    _limit("interpolate", "resize factor", "resize in two steps", low=Fraction(1, 256), high=256),
    _limit("interpolate", "resize factor that is not a power of two", "resize by 2, 4, 8, …", among=(), allows="powers of two"),
    _limit("mean", "reduced dimension", "average height and width with adaptive_avg_pool2d(1)", among=(1,)),
    _limit("sum", "reduced dimension", "average height and width with adaptive_avg_pool2d(1)", among=(0, 1)),
    _limit("amax argmax argmin", "number of readers inside the model", "take the maximum at the model's output only", high=0),
    _limit("amax argmax argmin", "reduced dimension", "take the maximum over the channels", among=(1,)),
    _limit("pad", "padding mode", "pad with a constant, or replicate", among=("constant", "replicate")),
    _limit("exp sigmoid tanh silu gelu", "elements, aligned", "use a smaller image or fewer channels", high=8192),
    *SHARED,
)

BAYES = (
    _limit("", "batch", "run smaller batches", high=4096),
    _limit("", "sizes", "split the tensor", high=65536),
    _limit("", "bytes", "split the tensor", high=GIGABYTE),
    _limit(CONVOLUTION, "kernel", SMALLER_KERNEL, high=31),
    _limit(CONVOLUTION, "channels", FEWER_CHANNELS, high=8192),
    # As the model's output it may have 16384, or 65536 by the conversion tool.
    _limit(CONVOLUTION, "output channels inside the model", FEWER_CHANNELS, high=8192),
    _limit(CONVOLUTION, "output channels", FEWER_CHANNELS, high=65536),
    _limit(CONVOLUTION, "weights for one output channel", "use a smaller kernel or fewer channels", high=65535),
    _limit(CONVOLUTION, "stride", SMALLER_STRIDE, low=1, high=256),
    _limit(CONVOLUTION, "dilation", "use a smaller dilation", low=1, high=16),
    _limit(CONVOLUTION, "bits of the result where it is dilated", "give its output dtype='int8'", high=8),
    _limit(CONVOLUTION, "padding", "pad less, or in a separate layer", high=256),
    _limit("conv3d", "kernel in depth and height", SMALLER_KERNEL, high=9),
    _limit("conv3d", "kernel in width", SMALLER_KERNEL, high=8191),  # the conversion tool: 31 in height and width
    _limit("conv3d", "padding beyond kernel / 2", "pad less", high=0, allows="none"),
    _limit("conv3d", "stride", SMALLER_STRIDE, low=1, high=2),
    _limit("conv3d", "number of different strides", "use one stride for all dimensions", high=1),
    _limit("conv3d", "groups", "use groups=1", high=1),
    _limit(f"conv3d {TRANSPOSED}", "dilation", "use dilation 1", high=1),
    _limit(f"conv3d {TRANSPOSED}", "batch", "run smaller batches", high=128),
    _limit(TRANSPOSED, "kernel", "use a kernel of 1 to 14", low=1, high=14),  # in another place: 2 to 14
    _limit(TRANSPOSED, "stride", "use a stride of 1 to 14", low=1, high=14),
    _limit(TRANSPOSED, "stride beyond the kernel", "use a stride no larger than the kernel", high=0, allows="none"),
    _limit(TRANSPOSED, "channels", FEWER_CHANNELS, high=2048),
    _limit(TRANSPOSED, "output channels", FEWER_CHANNELS, high=2048),
    _limit(TRANSPOSED, "padding beyond kernel / stride", "pad less", high=0, allows="none"),
    _limit(TRANSPOSED, "output padding", "use an output padding of 0 or 1", low=0, high=1),
    _limit(TRANSPOSED, "weights for one output channel", "use a smaller kernel or fewer channels", high=65535),
    _limit("linear", "features", "split the layer", high=8192),
    _limit(f"{AVERAGES} max_pool2d", "kernel", "pool in two steps", high=256),
    _limit(f"{AVERAGES} max_pool2d", "stride", SMALLER_STRIDE, high=256),
    _limit("avg_pool2d", "padding", "pad less", high=256),
    _limit("max_pool2d", "padding", "pad less", high=255),
    _limit("max_pool2d", "sizes", "pool in parts", high=8192),
    _limit(ELEMENTWISE, "rank", "reshape to two to five dimensions", low=2, high=5),
    _limit(ELEMENTWISE, "dimension that is broadcast", "give both operands the same batch", low=1, allows="all but the batch"),
    _limit(ELEMENTWISE, "number of operands that are broadcast", "expand one of them first", high=1),
    _limit(ELEMENTWISE, "number of constant operands", "combine the constants first", high=1),
    _limit("cat", "number of operands", "concatenate in two steps", low=2, high=1024),
    _limit("cat", "concatenated dimension", "concatenate along another dimension than the batch", low=1, allows="all but the batch"),
    _limit("matmul", "matrix sizes", "split the matrices", high=8192),
    _limit("interpolate", "sizes", "resize in parts", high=8192),
    _limit("permute", "place of the batch", "leave the batch in its place", high=0, allows="the first dimension"),
    _limit("argmax argmin", "number of readers inside the model", "take the index at the model's output only", high=0),
    _limit("grid_sample", "image size", "sample a smaller image", high=1024),
    _limit("grid_sample", "image area", "sample a smaller image", high=720 * 1024),  # in an older edition: 512 · 1024
    _limit("pad", "padding mode", "pad with a constant, or replicate", among=("constant", "replicate", "circular")),
    # Int16 is for convolutions, elementwise operators and tables; max pooling is listed both ways.
    _limit("conv3d conv_transpose2d linear interpolate avg_pool2d adaptive_avg_pool2d", "bits", NARROW, high=8),
    # The compiler brings int16 operands of these to int8.
    _limit("mean adaptive_avg_pool2d", "bits of an averaged image", NARROW, high=8, always=True),
    _limit(CONVOLUTION, "bits where it is dilated", NARROW, high=8, always=True),
    _limit(CONVOLUTION, "bits with groups and a stride", NARROW, high=8, always=True),
    *SHARED,
)

NASH = (
    # Padding is counted, or there is none. The windows of an adaptive pooling have equal sizes, which the arithmetic requires anyway.
    *COUNTED,
    _limit("max_pool1d max_pool2d", "dilation", "use dilation 1", high=1),
    _limit("pad", "padding mode", "pad with a constant, or replicate", among=("constant", "replicate")),
    _limit("argmax argmin", "reduced size", FEWER_CHANNELS, high=32767),
    _limit("all any", "reduced size", "reduce in two steps", high=65535),
    _limit("gelu", "approximation", "pass approximate='none'", among=("none",)),
    _limit("matmul", "rank", "give both operands at least two dimensions", low=2),
    _limit("mean sum", "number of reduced dimensions", "reduce one dimension after another", high=1),
    # No published table of operators has these; an unpublished one may.
    _absent("conv_transpose1d conv_transpose3d avg_pool1d avg_pool3d max_pool3d", "use the two-dimensional layer"),
)


# ---- the peak rates of the chips
#
# Published TOPS count a multiply-accumulate of int8 numbers as two operations. Memory is published as its width and its speed: bits / 8
# times transfers per second. Where only its kind is published, the width is assumed from chips of the same class, and the row says so.
# No source says what fraction of the peak a program reaches.


def peak(tops: float, bits: int, megatransfers: int, source: str, assumed: bool = True) -> Roofline:
    """Return the rates of a chip by its published TOPS, the width of its memory in bits, and the memory's million transfers a second."""
    return Roofline(tops * 1e12 / 2, bits / 8 * megatransfers * 1e6, source, assumed)


JOURNEY_2 = peak(4, 32, 2400, "Journey 2: 4 TOPS (the vendor's announcement, 2019); memory assumed, 32 bits of LPDDR4-2400")
JOURNEY_3 = peak(
    5, 32, 3200, "Journey 3: 5 TOPS, 32 bits of memory at 3200 MT/s (eet-china.com/mp/a330998.html); X3 is the same", assumed=False
)
JOURNEY_5 = peak(
    128, 128, 3200, "Journey 5: 128 TOPS (42how.com, 2021-07-31), RDK Ultra 96; memory assumed, 128 bits of LPDDR4 at 3200 MT/s"
)
RDK_X5 = peak(10, 32, 4266, "RDK X5: 10 TOPS (the vendor's announcement); memory assumed, 32 bits of LPDDR4-4266")
JOURNEY_6E = peak(80, 96, 6400, "Journey 6E, RDK S100: 80 TOPS (the vendor's announcement, 2024); memory assumed, 96 bits of LPDDR5-6400")
JOURNEY_6M = peak(128, 96, 6400, "Journey 6M, RDK S100P: 128 TOPS (the same); memory assumed, 96 bits of LPDDR5-6400")
JOURNEY_6B = peak(18, 32, 4266, "Journey 6B: 18 TOPS (the same); memory assumed, 32 bits of LPDDR4X-4266")
JOURNEY_6P = peak(560, 256, 6400, "Journey 6P: 560 TOPS (chinaevtimes.com, 2025-07-22); memory assumed, 256 bits of LPDDR5-6400")
JOURNEY_6H = peak(420, 192, 6400, "Journey 6H: 420 TOPS (the vendor's announcement, 2024); memory assumed, 192 bits of LPDDR5-6400")


# ---- The float16 operators of Nash-p and Nash-h: every operator of their export that has no integer form, except sums of products
#
# Source: the table of operators that Horizon's export for Nash publishes, and its advice for these marches: sums of products in integers,
# all else in float16. Such an operator runs on the march, so no tensor is transferred to the host for it. Its values are not covered by the
# integer contract: PyTorch and ONNX compute it in float32 here.


_NAMES = """
abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil cos cosh erf exp floor log maximum minimum
neg negative reciprocal rsqrt sigmoid sign sin sinh sqrt tan tanh pow add sub subtract rsub mul multiply div divide true_divide truediv
remainder fmod eq ne lt le gt ge greater greater_equal less less_equal logical_and logical_or logical_not zeros_like ones_like full_like
relu relu6 hardtanh hardsigmoid elu gelu leaky_relu prelu silu softplus softmax log_softmax clamp clip clamp_min clamp_max
batch_norm batch_norm1d batch_norm2d batch_norm3d layer_norm instance_norm instance_norm1d instance_norm2d instance_norm3d normalize norm
scale_channels avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d interpolate
upsample grid_sample affine_grid pad pixel_shuffle pixel_unshuffle all argmax argmin max min amax amin mean sum cumsum topk sort argsort
cat concat concatenate stack split chunk unbind reshape view flatten squeeze unsqueeze permute transpose t expand expand_as repeat tile flip
roll gather index_select getitem setitem slice_scatter scatter scatter_add scatter_reduce masked_fill where tril triu dropout identity
embedding contiguous clone detach to float
"""
FLOAT16 = frozenset(_NAMES.split())
