"""Processors: affine uint8 activations with float32 requantization, as onnxruntime's integer operators compute it.

The package also holds the fast implementations for processors. `native` compiles native.c once for the machine, into the user's cache,
where there is a compiler; elsewhere the primitives run. `training` offers the fused kernels of training steps in C, and what observers
count, where it counts as `torch.histc` does on this machine.
"""

from functools import partial

from fxquant.backends.cpu import chains, compiled, looping, proofs, training  # noqa: F401  # they register what they offer
from fxquant.kernels import patterns
from fxquant.kernels.kernel import Kernel
from fxquant.primitives.arithmetic import RealArithmetic
from fxquant.target import Target

__all__ = ["KERNELS", "TARGETS"]

REAL = RealArithmetic("real", residual="requantize")  # onnxruntime adds 8-bit tensors much faster than accumulators
ACTIVATIONS = ("uint8", "int8", "int4", "int32")
WEIGHTS = ("int4", "int8")

X86 = "x86 processors: a weight scale for each output channel"
ARM = "ARM processors: one weight scale for each layer"

_processor = partial(Target, default_activation="uint8", dynamic=True, recurrent=("int16",))
TARGETS = (
    _processor("x86", X86, REAL, ACTIVATIONS, WEIGHTS, aliases=("fbgemm", "onednn", "xnnpack"), pairs=True),
    _processor("qnnpack", ARM, REAL, ACTIVATIONS, WEIGHTS, per_channel_weights=False),
)

KERNELS = (
    Kernel("loop", patterns.repeated, (chains.program,)),
    Kernel("recurrence", patterns.recurrence, (chains.program,)),
    Kernel("rows", patterns.rows, (chains.program,)),
    Kernel("sum of products", patterns.sum_of_products, (compiled.depthwise, compiled.convolution)),
    Kernel("quantization", patterns.quantization, (compiled.quantize,)),
    Kernel("maximum", patterns.maximum, (compiled.max_pool,)),
    Kernel("table", patterns.pointwise, (compiled.pointwise, chains.chain)),
    Kernel("dynamic layer", patterns.dynamic_layer, (compiled.native_dynamic,)),
    Kernel("movement", patterns.moved, (compiled.move,)),
    Kernel("product", patterns.product, (compiled.product,)),
    Kernel("chain", patterns.elementwise_chain, (chains.chain,)),
)
