"""Searches over whole configurations: sensitivity, mixed precision, and `tune`. They prepare and calibrate models themselves.

A search asks `tuning.choices` which tensors and weights of a prepared model a rule of a mapping can change, and for the mapping that
changes them. `tuning.simulation` rounds some of them in the float model, by hooks, so that a trial prepares nothing, and `tuning.effects`
measures the outputs. The chosen mapping is prepared with `observations` and measured in integers. `tune` tries a table of remedies.
"""

from fxquant.search.bit_widths import Budget, mixed_precision
from fxquant.search.sensitivity import sensitivity
from fxquant.target import Roofline as Speed

__all__ = ["Budget", "Speed", "mixed_precision", "sensitivity"]
