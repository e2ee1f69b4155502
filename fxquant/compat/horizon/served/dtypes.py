"""Horizon's dtypes: each is the name of fxquant's, and `qinfo` describes its integers."""

from __future__ import annotations

from typing import Any

from fxquant.compat.horizon.served.qconfig import dtype_of
from fxquant.numerics.grids import ACTIVATION_TYPES

qint4, qint8, qint16, qint32 = "int4", "int8", "int16", "int32"
QuantDType = str


class qinfo:
    """The integers of a dtype: the smallest, the largest, and the number of bits."""

    def __init__(self, dtype: Any) -> None:
        known = ACTIVATION_TYPES[dtype_of(dtype)]
        self.min, self.max, self.bits = known.low, known.high, known.bits
