"""What is done where a target's limit is broken: operators that mean the same, and keep the limit.

A remedy is a function of a `Rewriting`, registered for operators and measures of limits. The pass `adapt.apply` asks for it.
"""

from fxquant.remedies import activations, convolution, elementwise, pooling, products
from fxquant.remedies.rewriting import REMEDIES, Rewriting

__all__ = ["REMEDIES", "Rewriting", "activations", "convolution", "elementwise", "pooling", "products"]
