"""Scales that training learns."""

from __future__ import annotations

from collections.abc import Mapping

from fxquant.quantization.learning.method import LSQ, LSQ_PLUS, PACT, TQT, Method
from fxquant.quantization.learning.scale import TrainableScale, learned_step, method_of

METHODS: Mapping[str, Method] = {method.name: method for method in (LSQ, LSQ_PLUS, PACT, TQT)}  # by what `training=` calls them

__all__ = ["LSQ", "LSQ_PLUS", "METHODS", "PACT", "TQT", "Method", "TrainableScale", "learned_step", "method_of"]
