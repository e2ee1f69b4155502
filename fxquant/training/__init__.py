"""Fused kernels for training, as autograd functions: layers, elementwise operators, lookup tables, and tensors saved for backward.

Each kernel equals its reference in PyTorch bit for bit; a backend may offer a faster one (`fxquant.support`).

The extra cost of a training step over the float model's is memory traffic over large tensors. `fused_layers` has kernels for accumulators
and weights, which replace compositions of primitives. Tests and `benchmarks.training_speed` compare the two, and
`fused_layers.unfused()` turns the kernels off. Learned scales, float64 sums and `torch.func`'s transforms use the composition.

`fused_elementwise` defers an expression of products and sums of two tensors until it is requantized: if a C kernel has
that expression, no accumulator is materialized. It has lookup tables and their slopes as well.

Each activation's integers are cached weakly with it, and consumers with the same scale skip requantization. In-place writes, hooks and
`retain_grad()` bypass that cache. For backward an operator saves compact tensors: operands as bytes, indices into tables, and
saturation masks, dense or sparse. A sum that could exceed 2^24 is formed once if the current operand keeps it below, else in parts of the
input channels.
"""
