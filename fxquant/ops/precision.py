"""Casts between real dtypes: a quantized tensor stays what it is, and the host makes the dtype of it where integers become real.

A cast to float16 and back rounds to the 11 bits of its numbers, and to bfloat16 to 8: an int8 grid has no more. On a wider grid the
rounding is left out, as it is for every operator between two grids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.lowering import Lowering, Quantized
from fxquant.ops.record import Operator, Same, register

REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def in_dtype(input: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Real numbers in another dtype."""
    return input.to(dtype)


def _lower(lowering: Lowering, input: Quantized, dtype: torch.dtype) -> Quantized:
    return input


def _refuses(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    if arguments["dtype"] != torch.bfloat16 or all(user.target in (in_dtype, "float", "to", "type") for user in node.users):
        return None
    return "bfloat16 numbers are the host's: no runtime of ONNX returns them"


IN_DTYPE = register(Operator("in_dtype", in_dtype, ("input",), _lower, Same(), refuses=_refuses))
