"""Declare what fxquant lacks: operators of your own, functions of one tensor, and the speed of a processor."""

from fxquant.ops.core.custom import operator, unary
from fxquant.target import Roofline

__all__ = ["Roofline", "operator", "unary"]
