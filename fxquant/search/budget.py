"""The budget of a model, and the cost of a choice of dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from fxquant.errors import ConfigurationError
from fxquant.support.arguments import NUMBER, Kind, checked_class, instance
from fxquant.target import Target
from fxquant.tuning.choices import ACTIVATION, WEIGHT, Choices, bits

_NONE = NUMBER.or_none("no limit")


@checked_class(macs_per_second=NUMBER, bytes_per_second=NUMBER)
@dataclass(frozen=True)
class Speed:
    """How fast a device is, for an estimate: a layer takes the time of its products and that of its bytes, one after the other.

    macs_per_second   multiply-accumulates of two int8 numbers; those of a and b bits take a·b/64 times as long
    bytes_per_second  of weights and tensors that are read, and of results that are written; an int4 is half a byte
    """

    macs_per_second: float
    bytes_per_second: float


SPEED: Kind = instance("a Speed", Speed).or_none("that of the target's chip")


@checked_class(weight_bytes=_NONE, weight_bits=_NONE, bit_operations=_NONE, latency=_NONE, speed=SPEED)
@dataclass(frozen=True)
class Budget:
    """Upper limits of a model; those that are None do not count.

    weight_bytes    the bytes of weights, two int4 in a byte; biases, and weights that no rule of a mapping can reach, are not counted
    weight_bits     the same as the average over all weights, in bits for each
    bit_operations  of one item: multiply-accumulates, each times the bits of both its factors
    latency         seconds for one item, as `speed` estimates it
    speed           None: the peak rates of the target, as those of `fxq.estimate`
    """

    weight_bytes: float | None = None
    weight_bits: float | None = None
    bit_operations: float | None = None
    latency: float | None = None
    speed: Speed | None = None

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in LIMITS):
            raise ConfigurationError(
                "the budget limits nothing",
                because="weight_bytes, weight_bits, bit_operations and latency are all None",
                remedy="give one of them, as in Budget(weight_bits=5)",
            )
        if self.latency is None and self.speed is not None:
            raise ConfigurationError(
                "a speed is given without a latency",
                because="it estimates seconds, and the budget has no latency",
                remedy="pass Budget(latency=0.01, speed=Speed(macs_per_second=1e12, bytes_per_second=1e10)), or neither",
            )

    def on(self, target: Target) -> Budget:
        """The budget with the peak rates of the target's chip, where it limits seconds and has no speed. Raises ConfigurationError."""
        if self.latency is None or self.speed is not None:
            return self
        if target.roofline is None:
            raise ConfigurationError(
                f"a latency on {target.name} cannot be estimated",
                because="the rates are those of the machine that the model runs on",
                remedy="pass Budget(latency=0.01, speed=Speed(macs_per_second=1e11, bytes_per_second=2e10))",
            )
        return replace(self, speed=Speed(target.roofline.macs_per_second, target.roofline.bytes_per_second))

    @property
    def limits(self) -> dict[str, float]:
        """Those that are given, by name."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors whose dtypes affect the limits: only weights where all limits are about their size."""
        return (WEIGHT,) if {*self.limits} <= {"weight_bytes", "weight_bits"} else (ACTIVATION, WEIGHT)


LIMITS = tuple(field.name for field in fields(Budget) if field.name != "speed")
Term = tuple[float, str, str, str, str]  # a cost, if these two choices have these dtypes: choice, dtype, choice, dtype; "" for none


def cost_terms(choices: Choices, limit: str, speed: Speed | None) -> Iterator[Term]:
    """Yield the terms of the cost that a limit bounds, a sum over choices and pairs of choices."""
    if limit in ("weight_bytes", "weight_bits"):
        weights = [choice for choice in choices.values() if choice.kind == WEIGHT]
        total = sum(choice.elements for choice in weights) or 1
        for choice in weights:
            for dtype in choice.dtypes:
                yield choice.bytes(dtype) if limit == "weight_bytes" else choice.elements * bits(dtype) / total, choice.name, dtype, "", ""
        return
    scale = 1.0 if speed is None else 1 / (64 * speed.macs_per_second)
    for products in choices.products:
        for left, left_bits in _sides(choices, products.left, products.width[0]):
            for right, right_bits in _sides(choices, products.right, products.width[1]):
                yield products.macs * left_bits * right_bits * scale, products.left, left, products.right, right
    if speed is not None:
        for choice in choices.values():
            for dtype in choice.dtypes:
                yield choice.bytes(dtype) * choice.passes / speed.bytes_per_second, choice.name, dtype, "", ""


def _sides(choices: Choices, name: str, width: int) -> list[tuple[str, int]]:
    return [(dtype, bits(dtype)) for dtype in choices[name].dtypes] if name else [("", width)]


def costs(choices: Choices, dtypes: Mapping[str, str], speed: Speed | None = None) -> dict[str, float]:
    """Return the cost of these dtypes for each limit; latency only with a speed."""

    def is_there(name: str, dtype: str) -> bool:
        return not name or dtypes.get(name, choices[name].dtype) == dtype

    limits = [limit for limit in LIMITS if limit != "latency" or speed is not None]
    return {
        limit: sum(
            cost
            for cost, left, left_dtype, right, right_dtype in cost_terms(choices, limit, speed if limit == "latency" else None)
            if is_there(left, left_dtype) and is_there(right, right_dtype)
        )
        for limit in limits
    }


def fits(found: Mapping[str, float], budget: Budget) -> bool:
    """Whether costs are within the budget, but for a rounding error."""
    return all(found[name] <= limit * (1 + 1e-9) for name, limit in budget.limits.items())
