"""The definition of a target, as data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from fxquant.errors import ConfigurationError
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.support.arguments import FLAG, NUMBER, TEXT, checked_class

RESIDUALS = ("accumulator", "requantize")  # see `Arithmetic.residual`


@dataclass(frozen=True)
class Limit:
    """A limit of a target on some operators.

    operators  the names of the operators it is about; empty: every operator
    measure    the limited property of the operator, a name of `fxquant.analysis.measures.MEASURES`; None: the target has no such operator
    low, high  the smallest and largest allowed value, or None
    among      the allowed values, if they are not a range; None otherwise
    remedy     what the user can do
    allows     the allowed values in words, if the numbers alone would not be clear
    always     whether the vendor's compiler refuses violations: its remedy needs no `adapt`; `export_horizon` refuses the others
    """

    operators: tuple[str, ...]
    measure: str | None
    low: int | Fraction | None = None
    high: int | Fraction | None = None
    among: tuple[Any, ...] | None = None
    remedy: str = ""
    allows: str = ""
    always: bool = False

    def broken_by(self, values: Sequence[Any]) -> list[Any]:
        """Return the values that break the limit, each once."""
        return [value for value in dict.fromkeys(values) if not self._allowed(value)]

    def _allowed(self, value: Any) -> bool:
        if self.among is not None:
            return value in self.among
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.allows:
            return self.allows
        if self.among is not None:
            return ", ".join(map(str, self.among))
        if self.low is None:
            return f"at most {self.high}"
        if self.high is None:
            return f"at least {self.low}"
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@checked_class(macs_per_second=NUMBER, bytes_per_second=NUMBER, source=TEXT, assumed=FLAG)
@dataclass(frozen=True)
class Roofline:
    """The peak rates of a chip, which no program exceeds.

    macs_per_second   multiply-accumulates of two int8 numbers
    bytes_per_second  to and from its memory
    source            where the rates are published; for an unpublished rate, the basis of the assumption
    assumed           whether the rate of the memory is such an assumption, which may be wrong by a factor of two either way
    """

    macs_per_second: float
    bytes_per_second: float
    source: str = "given"
    assumed: bool = False


@dataclass(frozen=True)
class Target:
    """A target to compile for.

    activations and weights name the integer dtypes it computes with ("int32" is the output of a last layer; an affine one,
    "uint8", needs an arithmetic with *real* requantization); default_activation is the dtype of an ActivationConfig without
    one; aliases are chips, PyTorch's engines and other names for it; limits are its limits on operators, which `fxq.check` applies to a
    model. float16 names the operators, and PyTorch's functions, that it computes itself, in float16, if they are not integer
    operators; consistency is which scales are powers of two: 0 none, 1 those of activations, 2 those of weights as well.
    dynamic is whether it quantizes the operands of linear layers at run time.
    recurrent names the dtypes that the tensors inside of its recurrences may have besides.
    normalizes_items is whether norms first bring the items of a batch to one magnitude, by operators that it runs on 16 bits.
    roofline holds the peak rates of its chip, for `fxq.estimate`; None if they are those of the machine.
    pairs is whether onnxruntime's kernels may add products for it two by two, in 16 bits: on x86 processors without VNNI.
    compiler names the program of the chip's vendor whose programs compute its integers, for `export_horizon`; None if there is none.
    """

    name: str
    description: str
    arithmetic: Arithmetic
    activations: tuple[str, ...] = ("int8",)
    weights: tuple[str, ...] = ("int8",)
    aliases: tuple[str, ...] = ()
    per_channel_weights: bool = True
    limits: tuple[Limit, ...] = ()
    default_activation: str = "int8"
    float16: frozenset[str] = frozenset()
    consistency: int = 0
    roofline: Roofline | None = None
    dynamic: bool = False
    normalizes_items: bool = True
    recurrent: tuple[str, ...] = ()
    pairs: bool = False
    compiler: str | None = None

    def __post_init__(self) -> None:
        if not self.arithmetic.adds_zero_points and any(ACTIVATION_TYPES[name].affine for name in self.activations):
            raise ValueError(f"{self.name}: its arithmetic adds no zero point, so it has no affine activations")

    @property
    def march(self) -> str:
        """Return the name without its variant: "nash-e" of "nash-e/requantize"."""
        return self.name.partition("/")[0]

    def variant(self, how: str) -> "Target":
        """Return the target with another choice of `Arithmetic.residual`, which is added to its name: "nash-e/requantize".

        Raises ConfigurationError for another name.
        """
        if how == self.arithmetic.residual:
            return self
        if how not in RESIDUALS:
            because = f"a variant says how residuals are added: {' or '.join(map(repr, RESIDUALS))}"
            remedy = f'append one of them to the target, as in "{self.name}/{RESIDUALS[0]}", or nothing'
            raise ConfigurationError(f"{self.name} has no variant {how!r}", because=because, remedy=remedy)
        return replace(self, name=f"{self.name}/{how}", compiler=None, arithmetic=replace(self.arithmetic, residual=how))

    def computes_in_float16(self, name: str) -> bool:
        """Return whether it computes an operator of this name in float16: a function's, or a module's class ("LayerNorm")."""
        plain = name.lower().replace("_", "")
        return any(plain == each.replace("_", "") for each in self.float16)
