"""The C functions of `functions/`: one template each, instantiated for the element types that it is called with.

A section of a file begins with `/// name: X Y`: the function's name, and the placeholders in it for element types. A section without
a colon is a helper that has no placeholders. Functions that differ only in their comment and expression share a template; both are
inserted on instantiation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "functions"
FILES = ("values.c", "sums.c", "places.c")
C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "uint8_t",  # 0 or 1
}
_SHORT = {
    "float": "f32", "double": "f64", "uint8_t": "u8", "int8_t": "i8", "int16_t": "i16", "int32_t": "i32", "int64_t": "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Template:
    """The text of a function, and its placeholders for element types."""

    text: str
    types: tuple[str, ...]


def _sections(file: str) -> dict[str, Template]:
    found = {}
    for section in re.split(r"^/// ", (FOLDER / file).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, _, text = section.partition("\n")
        name, _, types = head.partition(":")
        found[name.strip()] = Template(text.strip(), tuple(types.split()))
    return found


@functools.cache
def templates() -> Mapping[str, Template]:
    """Return the functions by name."""
    return {name: template for file in FILES for name, template in _sections(file).items()}


@functools.cache
def helpers() -> Mapping[str, Template]:
    """Return the helpers that functions call, ordered so that each follows the helpers that it calls itself."""
    return _sections("helpers.c")


class Functions:
    """The functions that a program has used so far."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def name(self, template: str, name: str, dtypes: Sequence[torch.dtype], replaced: Mapping[str, str] | None = None) -> str:
        """Return the name of a template's function for these element types, and instantiate it on first use."""
        known = templates()[template]
        types = [C_TYPES[dtype] for dtype in dtypes]
        made = "_".join([name, *(_SHORT[kind] for kind in types)])
        if made not in self._made:
            words = {template: made, **dict(zip(known.types, types, strict=True)), **(replaced or {})}
            self._made[made] = re.sub(r"\b[A-Za-z_]+\b", lambda word: words.get(word[0], word[0]), known.text)
        return made

    def text(self) -> str:
        """Return the text of all functions, preceded by the helpers that they call."""
        bodies = "\n\n".join(self._made.values())
        needed: list[str] = []
        for name, helper in reversed(list(helpers().items())):
            if re.search(rf"\b{name}\b", "\n".join([bodies, *needed])):
                needed.append(helper.text)
        return "\n\n".join([*reversed(needed), bodies])
