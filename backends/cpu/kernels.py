"""The list of kernels for PyTorch on the CPU."""

from fxquant.backends.cpu import compiled, dynamic_linear, tensors
from fxquant.kernels import patterns
from fxquant.kernels.kernel import Kernel

KERNELS = (
    Kernel("sum of products", patterns.sum_of_products, (compiled.Depthwise(), compiled.Convolution(), tensors.OneDnn())),
    Kernel("quantization", patterns.quantization, (compiled.Quantize(),)),
    Kernel("maximum", patterns.maximum, (compiled.MaxPool(), tensors.TensorPool())),
    Kernel("table", patterns.pointwise, (compiled.Pointwise(), tensors.TensorTable())),
    Kernel("dynamic layer", patterns.dynamic_layer, (dynamic_linear.NativeDynamic(), dynamic_linear.OneDnnDynamic())),
    Kernel("concatenation", patterns.joined, (compiled.Join(),)),
)
