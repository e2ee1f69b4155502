"""The findings of a comparison of two forms of a model, as values and as text, and the comparison of the bits of two tensors."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """Where two forms first differ."""

    name: str
    operator: str
    source: str
    inputs: tuple[str, ...]
    index: tuple[int, ...]
    values: tuple[float, float]
    labels: tuple[str, str]
    count: int
    inputs_equal: bool

    def __str__(self) -> str:
        index = ", ".join(map(str, self.index))
        rows = [
            f"first difference at %{self.name} = {self.operator}({', '.join('%' + i for i in self.inputs)})",
            f"  at       {self.source}" if self.source else "",
            f"  element  [{index}] is {self.values[0]:g} in {self.labels[0]} and {self.values[1]:g} in {self.labels[1]}",
            f"  extent   {self.count} elements of this tensor differ; its inputs are {'equal' if self.inputs_equal else 'not comparable'}",
        ]
        return "\n".join(row for row in rows if row)


@dataclass
class Report:
    """The findings of a verification. True if all bits are equal.

    mismatches  differing elements, over all tensors, batches and runtimes
    elements    elements compared; tensors: distinct tensors compared
    flips       elements that differ because a float operator before them rounds differently, when the file runs on its own: at a boundary
                after float operators, and in outputs that float operators compute. They are outside of the contract and not counted as
                mismatches
    floats      the error of outputs that float operators compute, by name, where the integers before them are equal
    first       the place of the first difference; None if there is none
    targets     the targets of the two forms, if they differ
    given       for a BPU program: the names of its inputs, whose integers were taken from the integer model
    unseen      for a BPU program: its outputs that are not tensors of the integer model, with the reason
    """

    pairs: list[str] = field(default_factory=list)
    mismatches: int = 0
    elements: int = 0
    flips: int = 0
    names: set[str] = field(default_factory=set)
    first: Difference | None = None
    floats: dict[str, "FloatDifference"] = field(default_factory=dict)
    targets: tuple[str, str] | None = None
    given: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        return len(self.names)

    def __bool__(self) -> bool:
        return self.mismatches == 0 and self.elements > 0

    def __str__(self) -> str:
        counted = f"{self.mismatches} mismatching elements of {self.elements} in {self.tensors} tensors"
        lines = [f"{'equal' if self else 'NOT equal'}: {counted} ({'; '.join(self.pairs)})"]
        if self.flips:
            lines.append(f"{self.flips} elements flipped after float operators, which runtimes round differently")
        lines.extend(f"  {difference}" for difference in self.floats.values() if difference.differing)
        if self.given:
            lines.append(f"given from the integer model, and computed by the processor: {', '.join('%' + name for name in self.given)}")
        lines.extend(f"not compared: {name}: {because}" for name, because in self.unseen.items())
        if self.first is not None:
            lines.append(str(self.first))
        if self.targets is not None:
            lines.append(f"one of the two was compiled for {self.targets[0]}, the other for {self.targets[1]}, whose numbers differ")
        return "\n".join(lines)


@dataclass
class FloatDifference:
    """The difference between two forms of an output that float operators compute, over all runtimes and batches.

    largest is the largest absolute difference, infinite where one value is NaN or infinite and the other is not. ulps is the largest
    difference in steps of the dtype, None if it is not a float dtype.
    """

    name: str
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    ulps: int | None = None

    def add(self, one: Tensor, other: Tensor) -> None:
        """Take the values of one more batch into account."""
        apart = different(one, other)
        self.elements += apart.numel()
        self.differing += int(apart.sum())
        if one.shape != other.shape or one.dtype != other.dtype or one.is_complex():
            self.largest = math.inf if bool(apart.any()) else self.largest
            return
        left, right = one[apart], other[apart]
        distance = torch.nan_to_num((left.double() - right.double()).abs(), nan=math.inf)
        ulps = None
        if one.is_floating_point():
            finite = torch.isfinite(left) & torch.isfinite(right)
            ulps = max((abs(a - b) for a, b in zip(_steps(left[finite]), _steps(right[finite]), strict=True)), default=0)
        self.largest = max(self.largest, float(distance.max()) if distance.numel() else 0.0)
        self.ulps = ulps if self.ulps is None else max(self.ulps, ulps or 0)

    def __str__(self) -> str:
        steps = "" if self.ulps is None else f" ({self.ulps} ulp)"
        return f"{self.name}: {self.differing} of {self.elements} elements differ, by {self.largest:.3g}{steps} at most"


@dataclass
class Deviation:
    """The difference of one output of a file in style "qdq" from the integer model's, over all batches.

    largest and differing are in steps of the output's scale, or in float values if the output is not a quantized tensor.
    """

    name: str
    scale: Tensor | None
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, actual: Tensor) -> None:
        """Take the values of one more batch into account."""
        one, other = expected.double(), actual.double()
        self.signal += float(one.square().sum())
        self.noise += float((one - other).square().sum())
        if self.scale is not None:  # integers, in steps
            one, other = torch.round(one / self.scale.double()), torch.round(other / self.scale.double())
        distance = (one - other).abs()
        self.elements += distance.numel()
        self.differing += int((distance != 0).sum())
        self.largest = max(self.largest, float(distance.max()) if distance.numel() else 0.0)

    @property
    def share(self) -> float:
        """The share of elements that differ."""
        return self.differing / max(self.elements, 1)

    @property
    def sqnr(self) -> float:
        """10·log10 of the output's power over that of the difference, in dB."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf

    def __str__(self) -> str:
        unit = "steps" if self.scale is not None else "(not quantized)"
        differing = f"{100 * self.share:.2f} % of {self.elements} elements differ"
        return f"{self.name}: {differing}, by {self.largest:.4g} {unit} at most; SQNR {self.sqnr:.1f} dB"


@dataclass
class DeviationReport(Report):
    """The measured distance of a file that is not exact by nature (style "qdq") from the integer model.

    Never true: even where no output differed on these batches, nothing says that none ever will. `outputs` holds a
    `Deviation` for each runtime and output.
    """

    outputs: dict[str, list[Deviation]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        lines = ["not exact by nature (style 'qdq'), measured against the integer model:"]
        for runtime, outputs in self.outputs.items():
            lines.append(f"  {runtime}")
            lines.extend(f"    {output}" for output in outputs)
        return "\n".join(lines)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as an element, in bytes


def different(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors have different bytes, so that 0.0 differs from -0.0; any two NaN are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.ones(max(one.numel(), other.numel()), dtype=torch.bool, device="cpu")
    if one.is_complex():
        return different(torch.view_as_real(one), torch.view_as_real(other)).any(-1)
    if not one.is_floating_point():
        return one != other
    bits = _BITS[one.element_size()]
    return (one.view(bits) != other.view(bits)) & ~(torch.isnan(one) & torch.isnan(other))


def _steps(values: Tensor) -> list[int]:
    """Return finite floats as integers in the same order: neighbours differ by one, and 0.0 and -0.0 are equal."""
    raw = values.view(_BITS[values.element_size()]).to(torch.int64)
    largest = 2 ** (8 * values.element_size() - 1)
    return [number if number >= 0 else -(number + largest) for number in raw.flatten().tolist()]


def differing(one: Tensor, other: Tensor) -> int:
    """Return the number of elements that differ (see `different`)."""
    return int(different(one, other).sum())
