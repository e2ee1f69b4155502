"""Accuracy that is won without training, a module each."""

from fxquant.tuning.equalization import equalize

__all__ = ["equalize"]
