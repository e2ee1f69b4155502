"""One way to write an operator in a random model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator.

    operator    its name in the table, of which {rank} is the number of the first operand's spatial dimensions
    call        the expression: {0}, {1} are operands, {layer} a module of its own, {p0}, {p1} parameters, {buffer} a constant
    layer       the module's constructor
    parameters  the values that parameters start from
    buffer      the value of the constant
    after       statements that follow in __init__
    options     what the fields of all these can be, simplest first; a string is formatted once more

    Fields besides the options: {channels}, {last} and {sizes} are the size of the first operand's dimension 1, of its last one, and all
    but the batch's; {ones} is ", 1" for each spatial dimension.
    """

    operator: str
    call: str
    layer: str = ""
    parameters: tuple[str, ...] = ()
    buffer: str = ""
    after: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)

    @property
    def operands(self) -> int:
        """How many values it reads."""
        return 1 + max(position for position in range(4) if f"{{{position}}}" in self.call)


def spell(name: str, *calls: str, **options: tuple[Any, ...]) -> list[Spelling]:
    return [Spelling(name, call, options={key: value for key, value in options.items() if f"{{{key}" in call}) for call in calls]


def module(name: str, layer: str, *after: str, call: str = "{layer}({0})", **options: tuple[Any, ...]) -> Spelling:
    return Spelling(name, call, layer, after=after, options=options)


def held(name: str, call: str, *parameters: str, buffer: str = "", **options: tuple[Any, ...]) -> Spelling:
    return Spelling(name, call, parameters=parameters, buffer=buffer, options=options)
