"""Accuracy that is won without training."""

from fxquant.tuning.equalization import equalize

__all__ = ["equalize"]
