"""Fused kernels for training, as autograd functions: layers, elementwise operators, lookup tables, and what is saved for backward.

Each computes what its reference in PyTorch computes, bit for bit; a backend may offer a faster one (`fxquant.support.offers`).
"""
