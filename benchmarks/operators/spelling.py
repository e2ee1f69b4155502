"""Call forms of operators, and the model that is built from one.

A call form is a piece of Python: an expression of the inputs x, y and z ("torch.add(x, y)"), a few statements that return
something, or the constructor of a module ("nn.Softmax(-1)"), which is called with the inputs. What stands in braces belongs to
`__init__` ("F.prelu(x, {P(3)})"): a parameter P, a buffer B, or a module.
"""

import collections
import dataclasses
import itertools
import linecache
import math
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.operators import codebase
from fxquant.ops import FUNCTIONS, METHODS
from fxquant.support import seeded

# ---- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A random tensor for each batch.

    shape    without the batch, which is its dimension 0
    low, high  the interval of its values, uniform; None: normal
    dtype    integers from low to high - 1, or booleans, where it is not a float dtype
    batched  whether dimension 0 is the batch; without one the model is traced at one size
    """

    shape: tuple[int, ...]
    low: float | None = None
    high: float = 1.0
    dtype: torch.dtype = torch.float32
    batched: bool = True

    def draw(self, count: int, generator: torch.Generator, factor: float) -> Tensor:
        """A batch of it; what is normal is multiplied by the factor."""
        shape = (count, *self.shape) if self.batched else self.shape
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(int(self.low or 0), int(self.high), shape, generator=generator, dtype=self.dtype)
        if self.low is None:
            return (torch.randn(shape, generator=generator) * factor).to(self.dtype)
        return (self.low + (self.high - self.low) * torch.rand(shape, generator=generator)).to(self.dtype)


def normal(*shape: int, batched: bool = True) -> Input:
    return Input(shape, batched=batched)


def between(low: float, high: float, *shape: int) -> Input:
    return Input(shape or (3, 6, 6), low, high)


def whole(high: int, *shape: int, batched: bool = True) -> Input:
    return Input(shape, 0, high, torch.int64, batched)


def truth(*shape: int) -> Input:
    return Input(shape, dtype=torch.bool)


IMAGE, LINE, VOLUME, ROWS, TOKENS = normal(3, 6, 6), normal(3, 9), normal(3, 4, 5, 6), normal(8), normal(5, 8)
UNIT, POSITIVE, WIDE = between(-0.95, 0.95), between(0.3, 3.0), between(-6.0, 6.0)

# ---- rows and spellings -----------------------------------------------------------------------------------------------

HORIZON, NASH, PYTORCH = "h", "n", "p"  # whose list of operators: the RDK's and Horizon's own, Nash's export, PyTorch's quantization pages


@dataclass(frozen=True)
class Row:
    """An operator, and how it is written.

    operator   the name of its row on the page
    texts      its spellings
    over       its inputs, of x, y and z; the last one serves for those that follow as well
    lists      on whose lists it stands, letters of HORIZON, NASH and PYTORCH; "" is for what only models bring
    fixed      whether it is traced at one batch size
    least      the smallest ratio of signal to noise, in dB, that is not a defect: its function, or its input, is made such
    random     whether two runs of the float model differ, so that nothing can be compared
    """

    operator: str
    texts: tuple[str, ...]
    over: tuple[Input, ...] = (IMAGE,)
    lists: str = ""
    fixed: bool = False
    least: float = 15.0
    random: bool = False


@dataclass(frozen=True)
class Spelling:
    """One call form of a row, of a family of rows."""

    family: str
    row: Row
    text: str

    @property
    def name(self) -> str:
        return f"{self.family} | {self.row.operator} | {self.text}"

    @property
    def seed(self) -> bool:
        """Whether its operator stands on one of the two families' lists."""
        return bool(self.row.lists)

    @property
    def inputs(self) -> dict[str, Input]:
        """Return the inputs that it reads, by name."""
        used = ["x", "y", "z"][: len(self.row.over)]
        if not self.is_module:
            used = sorted(set(re.findall(INPUT, _without_braces(self.text))))
        return {name: self.row.over[min("xyz".index(name), len(self.row.over) - 1)] for name in used}

    @property
    def is_module(self) -> bool:
        """Whether it is a module's constructor: it reads no input."""
        return not re.search(INPUT, _without_braces(self.text))

    @property
    def fixed(self) -> bool:
        """Whether it is traced at one batch size."""
        return self.row.fixed or not all(entry.batched for entry in self.inputs.values())

    def batch(self, count: int, seed: int, factor: float = 1.0) -> tuple[Tensor, ...]:
        """Inputs, each of another range, so that no two share a scale by accident."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(entry.draw(count, generator, factor * (1 + 0.7 * index)) for index, entry in enumerate(self.inputs.values()))

    def model(self) -> nn.Module:
        """A module of its own class, in eval mode, as a user would have written it."""
        source = self.source()
        filename = f"<{self.row.operator} {next(COUNT)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        module = types.ModuleType("spelled")
        module.__dict__.update(NAMESPACE)
        exec(compile(source, filename, "exec"), module.__dict__)
        with seeded(0):
            instance: nn.Module = module.__dict__["Model"]()
        return instance.eval()

    def source(self) -> str:
        """The text of that class."""
        layers: list[str] = []

        def hoist(match: re.Match[str]) -> str:
            layers.append(match.group(1))
            return f"self.a{len(layers)}"

        names = ", ".join(self.inputs)
        text = f"{{{self.text}}}({names})" if self.is_module else self.text
        body = re.sub(r"\{\s*(.+?)\s*\}(?!\})", hoist, text)
        lines = [line.strip(" ") for line in body.split(";")] if re.search(r"\breturn\b", body) else [f"return {body}"]
        return "\n".join(
            (
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        self.a{index} = {entry}" for index, entry in enumerate(layers, 1)),
                f"    def forward(self, {names}):",
                *(f"        {line}" for line in lines),
                "",
            )
        )


INPUT = r"(?<![\w.'\"])[xyz](?![\w'\"=])"  # x, y or z, and no part of a name, of a text or of `x=`


def _without_braces(text: str) -> str:
    return re.sub(r"\{.+?\}", "", text)


COUNT = itertools.count()


def row(name: str, *texts: str, over: Input | tuple[Input, ...] = IMAGE, lists: str = "", **options: typing.Any) -> Row:
    """A row; `over` may be one input."""
    return Row(name, texts, over if isinstance(over, tuple) else (over,), lists, **options)


def unary(name: str, *more: str, over: Input = IMAGE, lists: str = "", aliases: tuple[str, ...] = (), **options: typing.Any) -> Row:
    """The row of a function of one tensor: function, method and method in place, under all of its names, and what else there is."""
    texts: list[str] = []
    for each in (name, *aliases):
        texts += [f"torch.{each}(x)"] if hasattr(torch, each) else []
        texts += [f"x.{each}()"] if hasattr(Tensor, each) else []
        texts += [f"x.clone().{each}_()"] if hasattr(Tensor, f"{each}_") else []
    return row(name, *texts, *more, over=over, lists=lists, **options)


def P(*shape: int) -> nn.Parameter:
    """A parameter with normal values."""
    return nn.Parameter(torch.randn(shape))


def B(values: typing.Any) -> nn.Buffer:
    """A buffer."""
    return nn.Buffer(values if isinstance(values, Tensor) else torch.tensor(values))


NAMESPACE: Mapping[str, typing.Any] = {
    "torch": torch, "nn": nn, "F": F, "fxq": fxq, "math": math, "operator": operator, "collections": collections,
    "dataclasses": dataclasses, "Tensor": Tensor, "P": P, "B": B, "H": codebase,
}  # fmt: skip


def spelled(families: Mapping[str, tuple[Row, ...]]) -> Iterator[Spelling]:
    """Yield every call form of all rows."""
    for family, rows in families.items():
        for entry in rows:
            for text in entry.texts:
                yield Spelling(family, entry, text)


def written_forms(text: str) -> list[str]:
    """Return a call in all of its forms: of a text that begins with a bare name, the calls of functions and methods of that name.

    "clip(x, 0, 1)" → torch.clip(x, 0, 1), torch.clip_(x.clone(), 0, 1), x.clip(0, 1), x.clone().clip_(0, 1)
    """
    call = re.match(r"([a-z]\w*)\(", text)
    if call is None:
        return [text]
    depths = list(itertools.accumulate((each in "([{") - (each in ")]}") for each in text))
    end = next(at for at in range(call.end(), len(text)) if depths[at] == 0)
    comma = next((at for at in range(call.end(), end) if text[at] == "," and depths[at] == 1), end)
    operand, others, after = text[call.end() : comma], text[comma:end], text[end + 1 :]
    receiver = operand if re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])?|\{.*\}", operand) else f"({operand})"
    forms: dict[typing.Any, str] = {}
    for name in (call[1], f"{call[1]}_"):
        copy = ".clone()" if name.endswith("_") else ""
        for label, home in (("torch", torch), ("torch.special", torch.special), ("F", F)):
            if getattr(home, name, None) in FUNCTIONS:
                forms.setdefault(getattr(home, name), f"{label}.{name}({receiver if copy else operand}{copy}{others}){after}")
        if name in METHODS:
            forms[name] = f"{receiver}{copy}.{name}({others.removeprefix(', ')}){after}"
    return list(forms.values()) or [text]
