"""Remedies for broken limits of a target: equivalent operators that keep the limit.

A remedy is a function of a `Rewriting`, registered for operators and measures of limits. The pass `adapt.apply` calls it.
"""

from fxquant.remedies import activations, convolution, elementwise, pooling, products
from fxquant.remedies.rewriting import REMEDIES, Rewriting

__all__ = ["REMEDIES", "Rewriting", "activations", "convolution", "elementwise", "pooling", "products"]
