"""The closed tables: every function, method and class a model file can name.

A name in a file is looked up here and nowhere else; what is not listed can neither be saved nor loaded.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxquant import functional
from fxquant.frontend.opaque import WRAPPED, Wrapped
from fxquant.ops import OPERATORS, Operator
from fxquant.ops.parameters import FUNCTIONS as OF_PARAMETERS
from fxquant.primitives import PRIMITIVES
from fxquant.quantization.observers import (
    ClipObserver,
    ClipStdObserver,
    HistogramObserver,
    KLObserver,
    LpObserver,
    MinMaxObserver,
    MixObserver,
    MovingAverageMinMaxObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
)
from fxquant.quantization.rounding import AdaptiveRounding, Nearest, Rounding
from fxquant.quantization.weights import BiasCorrection, Coverage
from fxquant.stubs import FUNCTIONS as STUBS

# ---- functions ------------------------------------------------------------------------------------------------------

_TORCH = """
abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all alpha_dropout amax amin aminmax angle any arange arccos
arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_tensor asin asinh atan atan2 atanh atleast_1d atleast_2d
atleast_3d baddbmm bernoulli bilinear bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
block_diag bmm broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil celu channel_shuffle chunk clamp clamp_max clamp_min
clip clone column_stack complex concat concatenate conj constant_pad_nd conv_tbc conv1d conv2d conv3d conv_transpose1d conv_transpose2d
conv_transpose3d copysign cos cosh cosine_similarity count_nonzero cov cross cummax cummin cumprod cumsum deg2rad det detach diag
diag_embed diagflat diagonal diagonal_scatter diff digamma dist div divide dot dropout dsplit dstack einsum embedding embedding_bag empty
empty_like eq equal erf erfc erfinv exp exp2 expm1 eye feature_alpha_dropout feature_dropout fix flatten flip fliplr flipud float_power
floor floor_divide fmax fmin fmod frac frexp frobenius_norm full full_like gather ge ger greater greater_equal grid_sampler
grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt hardshrink heaviside histc hsplit hstack hypot imag index_add index_copy
index_fill index_put index_reduce index_select inner instance_norm inverse isclose isfinite isin isinf isnan isneginf isposinf isreal
istft kron kthvalue layer_norm ldexp le lerp less less_equal lgamma linspace log log10 log1p log2 log_softmax logaddexp logaddexp2
logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp lstm lstm_cell lt masked_fill masked_scatter
masked_select matmul matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d max_pool3d maximum mean median meshgrid min
minimum mm mode moveaxis movedim msort mul multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow ne neg
negative nextafter nonzero norm normal not_equal numel ones ones_like outer pairwise_distance pdist permute pinverse pixel_shuffle
pixel_unshuffle polar polygamma positive pow prelu prod quantile rad2deg rand rand_like randint randint_like randn randn_like randperm
range ravel real reciprocal relu remainder renorm repeat_interleave reshape rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll
rot90 round row_stack rrelu rsqrt rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted select select_scatter selu sgn
sigmoid sign signbit sin sinc sinh slice_scatter slogdet softmax sort split split_with_sizes sqrt square squeeze stack std std_mean stft
sub subtract sum svd swapaxes swapdims t take take_along_dim tan tanh tensor tensor_split tensordot threshold tile topk trace transpose
trapezoid tril tril_indices triu triu_indices true_divide trunc unbind unflatten unique_consecutive unsqueeze var var_mean vdot
view_as_complex view_as_real vsplit vstack where xlogy zeros zeros_like
_weight_norm
"""
_FUNCTIONAL = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d
adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid alpha_dropout avg_pool1d avg_pool2d
avg_pool3d batch_norm bilinear celu channel_shuffle cosine_similarity dropout dropout1d dropout2d dropout3d elu embedding embedding_bag
feature_alpha_dropout fold gelu glu grid_sample group_norm gumbel_softmax hardshrink hardsigmoid hardswish hardtanh instance_norm
interpolate layer_norm leaky_relu linear local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d max_pool1d
max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mish
multi_head_attention_forward normalize one_hot pad pairwise_distance pixel_shuffle pixel_unshuffle prelu relu relu6 rms_norm rrelu
scaled_dot_product_attention selu sigmoid silu softmax softmin softplus softshrink softsign tanh tanhshrink threshold unfold upsample
"""
_LINALG = (
    "cross det diagonal eigh eigvalsh inv matmul matrix_exp matrix_norm matrix_power multi_dot norm pinv slogdet solve svd vector_norm"
)
_SPECIAL = "digamma entr erf erfc erfinv exp2 expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp ndtr ndtri sinc softmax xlogy"
_FFT = "fft fft2 fftfreq fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftfreq rfftn"
_PYTHON = """
abs add and_ eq floordiv ge getitem gt invert le lshift lt matmul mod mul ne neg or_ pos pow rshift sub truediv truth xor
"""

_METHODS = """
abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all amax amin aminmax angle any arccos arccosh arcsin arcsinh
arctan arctan2 arctanh argmax argmin argsort argwhere asin asinh atan atan2 atanh baddbmm bernoulli bfloat16 bincount bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bool broadcast_to byte ceil char chunk clamp clamp_max
clamp_min clip clone conj contiguous copysign cos cosh count_nonzero cov cpu cross cuda cummax cummin cumprod cumsum deg2rad det detach
diag diag_embed diagflat diagonal diagonal_scatter diff digamma dim dist div divide dot double dsplit eq equal erf erfc erfinv exp exp2
expand expand_as expm1 fix flatten flip fliplr flipud float float_power floor floor_divide fmax fmin fmod frac frexp gather ge ger greater
greater_equal gt half hardshrink heaviside histc hsplit hypot index_add index_copy index_fill index_put index_reduce index_select inner int
inverse isclose isfinite isinf isnan isneginf isposinf isreal istft kron kthvalue ldexp le lerp less less_equal lgamma log log10 log1p log2
log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logsumexp long lt masked_fill
masked_scatter masked_select matmul matrix_exp matrix_power max maximum mean median min minimum mm mode moveaxis movedim msort mul
multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow ndimension ne neg negative nelement new_empty
new_full new_ones new_tensor new_zeros nextafter nonzero norm not_equal numel outer permute pinverse polygamma positive pow prelu prod
quantile rad2deg ravel reciprocal relu remainder renorm repeat repeat_interleave reshape reshape_as roll rot90 round rsqrt scatter
scatter_add scatter_reduce select select_scatter sgn short sigmoid sign signbit sin sinc sinh size slice_scatter slogdet softmax sort split
split_with_sizes sqrt square squeeze std stft sub subtract sum sum_to_size svd swapaxes swapdims t take take_along_dim tan tanh
tensor_split tile to topk trace transpose tril triu true_divide trunc type type_as unbind unflatten unfold unique_consecutive unsqueeze var
vdot view view_as vsplit where xlogy
__and__ __or__ __xor__ __pow__ __rpow__ __rsub__ __rtruediv__ __rfloordiv__ __rmatmul__ __rmod__
"""

PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # what a node that calls `getattr` may read


def _listed(space: str, home: Any, names: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    return ((f"{space}:{name}", getattr(home, name)) for name in names.split())


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    table = dict(_listed("python", operator, _PYTHON))
    table.update(_listed("python", math, "ceil exp floor log log2 sqrt trunc"))
    table.update(_listed("python", builtins, "bool float getattr int max min round sum"))
    for space, home, names in (
        ("torch", torch, _TORCH),
        ("functional", F, _FUNCTIONAL),
        ("linalg", torch.linalg, _LINALG),
        ("special", torch.special, _SPECIAL),
        ("fft", torch.fft, _FFT),
        ("fxquant", functional, "setitem write copy fill zero stopped"),
    ):
        table.update(_listed(space, home, names))
    table.update({f"stub:{function.__name__}": function for function in STUBS})
    table.update({f"parameters:{function.__name__}": function for function in OF_PARAMETERS})
    table.update({f"operator:{record.name}": function for function, record in OPERATORS.items()})
    table.update({f"primitive:{record.name}": function for function, record in PRIMITIVES.items()})
    return table


@functools.cache
def _names() -> dict[Callable[..., Any], str]:
    names: dict[Callable[..., Any], str] = {}
    for name, function in _functions().items():
        names.setdefault(function, name)
    return names


def function_name(function: Callable[..., Any]) -> str | None:
    """The name of a function a graph may call; None if it is not listed."""
    if isinstance(function, Wrapped):
        return f"wrapped:{function.key}"
    return _names().get(function)


def function_named(name: str) -> Callable[..., Any] | None:
    """The function of that name; None if it is not listed, or is a user's that nobody has wrapped in this process."""
    space, _, key = name.partition(":")
    return WRAPPED.get(key) if space == "wrapped" else _functions().get(name)


@functools.cache
def _methods() -> frozenset[str]:
    return frozenset(_METHODS.split())


def is_method(name: str) -> bool:
    """Whether a graph may call the tensor method of that name."""
    return name in _methods()


def operator_named(name: str) -> Operator | None:
    """The operator of the table with that name."""
    function = _functions().get(f"operator:{name}")
    return OPERATORS[function] if function is not None else None


# ---- classes ----------------------------------------------------------------------------------------------------------

_CONVOLUTION = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"
_TRANSPOSED = "in_channels out_channels kernel_size stride padding output_padding groups bias dilation padding_mode"
_BATCH_NORM = "num_features eps momentum affine track_running_stats"
_MAX_POOL = "kernel_size stride padding dilation return_indices ceil_mode"
_AVG_POOL = "kernel_size stride padding ceil_mode count_include_pad"
_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional"
_LINEAR = "in_features out_features bias"

# The constructor arguments of every class a file can name, which its instances hold under the same names.
_LAYERS: Mapping[type[nn.Module], str] = {
    nn.Module: "", nn.Sequential: "", nn.ModuleList: "", nn.ModuleDict: "", nn.Identity: "",
    nn.Linear: _LINEAR, nn.modules.linear.NonDynamicallyQuantizableLinear: _LINEAR,
    nn.Bilinear: "in1_features in2_features out_features bias",
    nn.Conv1d: _CONVOLUTION, nn.Conv2d: _CONVOLUTION, nn.Conv3d: _CONVOLUTION,
    nn.ConvTranspose1d: _TRANSPOSED, nn.ConvTranspose2d: _TRANSPOSED, nn.ConvTranspose3d: _TRANSPOSED,
    nn.BatchNorm1d: _BATCH_NORM, nn.BatchNorm2d: _BATCH_NORM, nn.BatchNorm3d: _BATCH_NORM, nn.SyncBatchNorm: _BATCH_NORM,
    nn.InstanceNorm1d: _BATCH_NORM, nn.InstanceNorm2d: _BATCH_NORM, nn.InstanceNorm3d: _BATCH_NORM,
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias", nn.RMSNorm: "normalized_shape eps elementwise_affine",
    nn.GroupNorm: "num_groups num_channels eps affine", nn.LocalResponseNorm: "size alpha beta k", nn.CrossMapLRN2d: "size alpha beta k",
    nn.MaxPool1d: _MAX_POOL, nn.MaxPool2d: _MAX_POOL, nn.MaxPool3d: _MAX_POOL,
    nn.AvgPool1d: _AVG_POOL, nn.AvgPool2d: _AVG_POOL + " divisor_override", nn.AvgPool3d: _AVG_POOL + " divisor_override",
    nn.AdaptiveAvgPool1d: "output_size", nn.AdaptiveAvgPool2d: "output_size", nn.AdaptiveAvgPool3d: "output_size",
    nn.AdaptiveMaxPool1d: "output_size return_indices", nn.AdaptiveMaxPool2d: "output_size return_indices",
    nn.AdaptiveMaxPool3d: "output_size return_indices",
    nn.LPPool1d: "norm_type kernel_size stride ceil_mode", nn.LPPool2d: "norm_type kernel_size stride ceil_mode",
    nn.LPPool3d: "norm_type kernel_size stride ceil_mode",
    nn.MaxUnpool1d: "kernel_size stride padding", nn.MaxUnpool2d: "kernel_size stride padding",
    nn.MaxUnpool3d: "kernel_size stride padding",
    nn.ReLU: "inplace", nn.ReLU6: "inplace", nn.SiLU: "inplace", nn.Hardswish: "inplace", nn.Hardsigmoid: "inplace", nn.Mish: "inplace",
    nn.SELU: "inplace", nn.Sigmoid: "", nn.Tanh: "", nn.Tanhshrink: "", nn.Softsign: "", nn.LogSigmoid: "", nn.GELU: "approximate",
    nn.ELU: "alpha inplace", nn.CELU: "alpha inplace", nn.LeakyReLU: "negative_slope inplace", nn.Softplus: "beta threshold",
    nn.Hardtanh: "min_val max_val inplace", nn.Threshold: "threshold value inplace", nn.PReLU: "num_parameters init",
    nn.RReLU: "lower upper inplace", nn.GLU: "dim", nn.Hardshrink: "lambd", nn.Softshrink: "lambd",
    nn.Softmax: "dim", nn.LogSoftmax: "dim", nn.Softmin: "dim", nn.Softmax2d: "",
    nn.Dropout: "p inplace", nn.Dropout1d: "p inplace", nn.Dropout2d: "p inplace", nn.Dropout3d: "p inplace",
    nn.AlphaDropout: "p inplace", nn.FeatureAlphaDropout: "p inplace",
    nn.Flatten: "start_dim end_dim", nn.Unflatten: "dim unflattened_size",
    nn.Upsample: "size scale_factor mode align_corners recompute_scale_factor",
    nn.UpsamplingBilinear2d: "size scale_factor", nn.UpsamplingNearest2d: "size scale_factor",
    nn.PixelShuffle: "upscale_factor", nn.PixelUnshuffle: "downscale_factor", nn.ChannelShuffle: "groups",
    nn.Fold: "output_size kernel_size dilation padding stride", nn.Unfold: "kernel_size dilation padding stride",
    nn.ZeroPad1d: "padding", nn.ZeroPad2d: "padding", nn.ZeroPad3d: "padding",
    nn.ConstantPad1d: "padding value", nn.ConstantPad2d: "padding value", nn.ConstantPad3d: "padding value",
    nn.ReflectionPad1d: "padding", nn.ReflectionPad2d: "padding", nn.ReflectionPad3d: "padding",
    nn.ReplicationPad1d: "padding", nn.ReplicationPad2d: "padding", nn.ReplicationPad3d: "padding",
    nn.CircularPad1d: "padding", nn.CircularPad2d: "padding", nn.CircularPad3d: "padding",
    nn.CosineSimilarity: "dim eps",
    nn.Embedding: "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse",
    nn.EmbeddingBag: "num_embeddings embedding_dim max_norm norm_type scale_grad_by_freq mode sparse include_last_offset padding_idx",
    nn.MultiheadAttention: "embed_dim num_heads dropout bias add_bias_kv add_zero_attn kdim vdim batch_first",
    nn.LSTM: _RECURRENT + " proj_size", nn.GRU: _RECURRENT, nn.RNN: _RECURRENT + " nonlinearity",
    nn.LSTMCell: "input_size hidden_size bias", nn.GRUCell: "input_size hidden_size bias",
    nn.RNNCell: "input_size hidden_size bias nonlinearity",
}  # fmt: skip
_OBSERVERS: Mapping[type[Observer], str] = {
    MinMaxObserver: "",
    MovingAverageMinMaxObserver: "averaging_constant",
    HistogramObserver: "bins sample",
    LpObserver: "p bins sample",
    MSEObserver: "bins sample",
    PercentileObserver: "percentile bins sample",
    ClipStdObserver: "deviations bins sample",
    KLObserver: "bins sample",
    MixObserver: "bins sample",
    ClipObserver: "lowest highest",
}

_ROUNDINGS: Mapping[type[Rounding], str] = {Nearest: "", AdaptiveRounding: "shape"}

_CORRECTIONS: Mapping[type[nn.Module], str] = {BiasCorrection: "channels", Coverage: "channels"}

LAYERS = {kind.__name__: kind for kind in (*_LAYERS, *_OBSERVERS, *_ROUNDINGS, *_CORRECTIONS)}
OBSERVERS = {kind.__name__: kind for kind in _OBSERVERS}
ROUNDINGS = {kind.__name__: kind for kind in _ROUNDINGS}
ARGUMENTS: Mapping[type[nn.Module], tuple[str, ...]] = {
    kind: tuple(a.split()) for kind, a in (*_LAYERS.items(), *_OBSERVERS.items(), *_ROUNDINGS.items(), *_CORRECTIONS.items())
}
