"""ONNX: the files that integer models are exported to, the styles they are written in, and the runtimes that run them.

`writer` walks the integer graph once; a style, a row of `export.STYLES`, says how a primitive is written.

exact   the ONNX form of each primitive, on integers held in floats, with equal bits in every runtime that computes these
        operators as ONNX defines. A fixed-point requantization after its first shift is one float32 product, rounded, where a
        factor per channel is proved to give the same 255 steps (`primitives.quantization`), else an int32 product. A matrix
        product beyond 2^24 is float64, and a convolution a float64 sum over blocks of channels.
fast    for targets with float32 requantization: int8 is stored as uint8 with zero point 128, and a layer with its requantization is one
        integer kernel. `fast_parts` finds the nodes of a kernel, `fast_kernels` writes it, `fast` admits it. Each kernel is compared with
        PyTorch while the file is written, then the whole model. A table becomes its function (`fast_parts`) where float32 rounds every
        entry alike; a gate becomes a QLinearMul. Where the target shifts, the accumulator alone is an integer kernel:
        ConvInteger of int8 and uint8, the order of factors that onnxruntime is fast for, or MatMulInteger.
qdq     for other compilers: each operator in float, between QuantizeLinear and DequantizeLinear. It is written as
        the `onnx` form of the operator's record, or as its primitives if these only move elements, or as PyTorch's export of its
        function. This style is not exact; `verify` measures its error and never reports it as equal.

Float operators are written by PyTorch's exporter (`float_export`), all of a model in one call; `replacements` has those that it cannot
write, made of others. `segments` writes each segment of a model as a separate file. `metadata` documents a file's metadata.
"""
