"""Any elementwise function of one tensor as one table."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fxquant.errors import ConfigurationError
from fxquant.ops import FUNCTIONS
from fxquant.ops.core import custom

_DECLARED: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {}


class SegmentLUT(nn.Module):
    """An elementwise function of one tensor as one table: of 256 entries in int8 and uint8, of 65,536 in int16.

    function  differentiable; one of PyTorch's, or composed of several
    name      that of its operator in graphs; a function made with `def` has its own. Two modules of one function share it.

    A march's form of a 16-bit table, lines and segments of 64 entries, is its compiler's compression of an equivalent table. Raises
    ConfigurationError if the name is another function's, and if there is none: a lambda, a partial and a callable object have none.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], name: str | None = None) -> None:
        super().__init__()
        known = function in FUNCTIONS or function in _DECLARED
        called = name or str(getattr(function, "__name__", ""))
        if not known and not called.isidentifier():
            raise ConfigurationError(
                "the table of a function without a name cannot be declared",
                because=f"{called or type(function).__name__} is not a name, and a file identifies the function of a table by its name",
                remedy='name it: SegmentLUT(function, name="…"), a different name for each function',
            )
        if not known:
            _DECLARED[function] = custom.unary(called, function)
        self.function = _DECLARED.get(function, function)

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)
