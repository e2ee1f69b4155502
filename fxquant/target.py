"""What a target is: data."""

from __future__ import annotations

from dataclasses import dataclass

from fxquant.numerics import Arithmetic


@dataclass(frozen=True)
class Target:
    """A target to compile for.

    activations and weights name the integer dtypes it computes with ("int32" is the output of a last layer);
    aliases are the chips and other names that mean it.
    """

    name: str
    description: str
    arithmetic: Arithmetic
    activations: tuple[str, ...] = ("int8",)
    weights: tuple[str, ...] = ("int8",)
    aliases: tuple[str, ...] = ()
    per_channel_weights: bool = True
