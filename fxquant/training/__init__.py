"""Fused kernels for training, as autograd functions: layers, elementwise operators, lookup tables, and what is saved for backward.

Each computes what its reference in PyTorch computes, bit for bit; a backend may offer a faster one (`fxquant.support.offers`).

What a training step costs beyond the float model's is memory traffic over large tensors. `fused_layers` has the kernels of an accumulator
and of a weight, each of which stands for a composition of primitives. Tests and `benchmarks.training_speed` compare the two, and
`fused_layers.unfused()` turns the kernels off. Learned scales, float64 sums and `torch.func`'s transforms use the composition.

`fused_elementwise` keeps an expression of products and sums of two tensors as it is called, until it is requantized: where a C kernel has
that expression, no accumulator is materialized. It has lookup tables and their slopes as well.

Each activation's integers are cached weakly beside it, and consumers on the same grid skip requantization. In-place writes, hooks and
`retain_grad()` bypass that cache. For backward an operator saves what its gradients need: operands as bytes, indices into tables, and
saturation masks, dense or sparse. A sum that could exceed 2^24 is formed once if the current operand keeps it below, else in parts of the
input channels.
"""
