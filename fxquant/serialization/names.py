"""The closed tables: every function, method and class a model file can name.

Names in a file are looked up here and nowhere else; a function or class that is not listed can neither be saved nor loaded.
"""

import builtins
import functools
import math
import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxquant.frontend.opaque import WRAPPED, Wrapped
from fxquant.ir import functional, loops
from fxquant.numerics.rounding import AdaptiveRounding, Nearest, Rounding
from fxquant.ops import FUNCTIONS, METHODS, OPERATORS
from fxquant.ops.core.weighted import OF_PARAMETERS
from fxquant.primitives import PRIMITIVES
from fxquant.quantization.observers.ranges import CLASSES, SETTINGS
from fxquant.quantization.weights import BiasCorrection, Coverage

# Beside the functions and methods that spell operators: what else a model may call, or has in files under this name of several.
_TORCH = """
aminmax angle arange argwhere as_tensor bernoulli bincount block_diag bucketize cartesian_prod chunk complex conj conv_tbc copysign cov
cross cummax cummin cumulative_trapezoid det diag_embed diagflat diff dist dsplit embedding_bag empty empty_like equal eye float_power
frexp frobenius_norm full full_like heaviside histc hsplit imag index_reduce inverse isin istft kron kthvalue ldexp linspace logaddexp2
logcumsumexp logdet logspace masked_scatter masked_select matrix_exp matrix_power median mode msort multinomial mvlgamma nanmedian
nanquantile nextafter nonzero normal numel ones ones_like pairwise_distance pdist pinverse polar polygamma quantile rand rand_like
randint randint_like randn randn_like randperm range real renorm rot90 scalar_tensor searchsorted slogdet split split_with_sizes stft
svd tensor tensor_split trapezoid trapz tril_indices triu_indices unbind unique_consecutive vander view_as_complex view_as_real vsplit
xlogy zeros zeros_like _weight_norm
"""
_FUNCTIONAL = """
adaptive_avg_pool1d avg_pool1d binary_cross_entropy binary_cross_entropy_with_logits gumbel_softmax huber_loss kl_div l1_loss
logsigmoid mse_loss pairwise_distance poisson_nll_loss smooth_l1_loss soft_margin_loss threshold upsample
"""
_LINALG = "cross det eigh eigvalsh inv matrix_exp matrix_power pinv slogdet solve svd"
_FFT = "fft fft2 fftfreq fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftfreq rfftn"
_PYTHON = """
abs add and_ eq floordiv ge getitem gt invert le lshift lt matmul mod mul ne neg or_ pos pow rshift sub truediv truth xor
"""

_METHODS = """
aminmax angle argwhere bernoulli bincount chunk conj copysign cov cross cuda cummax cummin det diag_embed diagflat diff dim dist dsplit
equal float_power frexp heaviside histc hsplit index_reduce inverse istft kron kthvalue ldexp logaddexp2 logcumsumexp logdet
masked_scatter masked_select matrix_exp matrix_power median mode msort multinomial mvlgamma nanmedian nanquantile ndimension nelement
new_empty new_full new_ones new_tensor new_zeros nextafter nonzero numel pinverse polygamma put quantile renorm rot90 size slogdet split
split_with_sizes stft sum_to_size svd tensor_split unbind unique_consecutive vsplit xlogy __and__ __or__ __xor__ __pow__ __rpow__
__rsub__ __rtruediv__ __rfloordiv__ __rmatmul__ __rmod__
"""

PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # what a node that calls `getattr` may read


def _listed(space: str, home: Any, names: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    return ((f"{space}:{name}", getattr(home, name)) for name in names.split())


def _spelling(space: str, home: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of a module that are call forms of operators, except in-place ones."""
    for function in FUNCTIONS:
        name = getattr(function, "__name__", "").removeprefix(f"{space}_")
        if name and not name.endswith("_") and getattr(home, name, None) is function:
            yield f"{space}:{name}", function


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    homes = (
        ("torch", torch, _TORCH),
        ("functional", F, _FUNCTIONAL),
        ("linalg", torch.linalg, _LINALG),
        ("special", torch.special, "xlog1py xlogy"),
        ("nn", torch._C._nn, "pad_sequence"),
    )
    table = dict(_listed("python", operator, _PYTHON))
    table.update(_listed("python", math, "ceil exp floor log log2 sqrt trunc"))
    table.update(_listed("python", builtins, "bool float getattr int max min round sum"))
    for space, home, names in (*homes, ("fft", torch.fft, _FFT), ("fxquant", functional, "setitem write copy fill zero stopped")):
        table.update(_listed(space, home, names))
    for space, home, _ in homes:
        table.update(_spelling(space, home))
    table.update({f"loop:{function.__name__}": function for function in (loops.begin, loops.end)})
    table.update({f"stub:{function.__name__}": function for function in functional.STUBS})
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
    """Return the name of a function a graph may call; None if it is not listed."""
    return f"wrapped:{function.key}" if isinstance(function, Wrapped) else _names().get(function)


def function_named(name: str) -> Callable[..., Any] | None:
    """Return the function of that name; None if it is not listed, or is a user's that nobody has wrapped in this process."""
    space, _, key = name.partition(":")
    return WRAPPED.get(key) if space == "wrapped" else _functions().get(name)


@functools.cache
def _methods() -> frozenset[str]:
    return frozenset(_METHODS.split()).union(name for name in METHODS if not name.endswith("_"))


def is_method(name: str) -> bool:
    """Return whether a graph may call the tensor method of that name."""
    return name in _methods()


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

_ROUNDINGS: Mapping[type[Rounding], str] = {Nearest: "", AdaptiveRounding: "shape"}

_CORRECTIONS: Mapping[type[nn.Module], str] = {BiasCorrection: "channels", Coverage: "channels"}

# A user's observer with a name is added to the tables of observers when it is defined.
OBSERVERS = CLASSES
LAYERS: Mapping[str, type[nn.Module]] = ChainMap(OBSERVERS, {kind.__name__: kind for kind in (*_LAYERS, *_ROUNDINGS, *_CORRECTIONS)})  # type: ignore[arg-type]
ROUNDINGS = {kind.__name__: kind for kind in _ROUNDINGS}
ARGUMENTS: Mapping[type[nn.Module], tuple[str, ...]] = ChainMap(
    SETTINGS, {kind: tuple(a.split()) for kind, a in (*_LAYERS.items(), *_ROUNDINGS.items(), *_CORRECTIONS.items())}
)
