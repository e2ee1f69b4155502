"""Estimate the cost of a model on a chip: products and bytes of each operator, against the peak rates of the chip."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import fx

from fxquant import backends
from fxquant.accuracy.result import Rows
from fxquant.analysis.layers import HOST, Layer, layers
from fxquant.analysis.measures import bytes_of
from fxquant.backends.horizon.compiled_program import Binary, CompiledCost
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import fact, is_deployed
from fxquant.ir.integer import operation
from fxquant.prepared.sizes import unrolled
from fxquant.reporting.page import operator_graph
from fxquant.support.arguments import PATH, checked, instance, such
from fxquant.support.progress import working
from fxquant.target import Roofline, Target

ITEMSIZES = {"int16": 2, "int32": 4, "int64": 8, "float32": 4}  # bytes; of other dtypes 1
MILLION = 1e6  # microseconds in a second
PATH_OF_PROGRAM = PATH.or_none("the vendor's figures are left out")
ROOFLINE = instance("a fxq.extend.Roofline", Roofline).or_none("that of the target")


class LayerEstimate(NamedTuple):
    """The cost of one operator, for one item.

    layer            its name
    operator         PyTorch's name of the operator
    dtype            the dtype of its result
    macs             multiply-accumulates
    bytes            bytes of its weights, operands and result
    compute_us       microseconds of its products at the peak rate; products of a and b bits take a·b/64 times as long as those of int8
    memory_us        microseconds of its bytes at the peak rate
    microseconds     the larger of the two
    bound            "compute" or "memory", whichever is larger; "host" for an operator that runs there, whose time is unknown
    """

    layer: str
    operator: str
    dtype: str
    macs: int
    bytes: int
    compute_us: float
    memory_us: float
    microseconds: float
    bound: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(Rows[LayerEstimate]):
    """The result of `estimate`: a row for each operator; iterates, and prints as a table with totals.

    roofline  the peak rates that it uses
    target    the target that has them
    compiled  the figures of the vendor's tool for the BPU programs of a .bin, if one was given
    """

    roofline: Roofline
    target: str
    compiled: tuple[CompiledCost, ...] = ()

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all operators."""
        return sum(row.macs for row in self.items)

    @property
    def bytes(self) -> int:
        """Bytes that are moved for all operators, each reading from memory and writing to it."""
        return sum(row.bytes for row in self.items)

    @property
    def seconds(self) -> float:
        """The sum of the times of all operators on the target: a lower bound for a program that moves these bytes."""
        return sum(row.microseconds for row in self.items if not math.isnan(row.microseconds)) / MILLION

    @property
    def on_host(self) -> tuple[str, ...]:
        """The operators that run on the host, whose time is not in the sum."""
        return tuple(row.layer for row in self.items if row.bound == HOST)

    @property
    def summary(self) -> str:
        """The totals, the rates that they are computed with, and their uncertainty, as lines of text."""
        bound = [sum(row.microseconds for row in self.items if row.bound == name) for name in ("compute", "memory")]
        rates = f"{self.roofline.macs_per_second:.4g} multiply-accumulates and {self.roofline.bytes_per_second:.4g} bytes a second"
        lines = [
            f"{self.macs:,} multiply-accumulates, {self.bytes:,} bytes moved",
            f"{self.seconds * MILLION:.4g} µs: {bound[0]:.4g} bound by compute, {bound[1]:.4g} by memory",
            f"rates: {rates}; {self.roofline.source}",
            "uncertainty: a bound from below where every operator moves its bytes; programs reach a part of peak rates, and a compiler"
            " that keeps tensors on the chip moves fewer bytes"
            + ("; the rate of the memory is assumed, and may be wrong by a factor of 2" if self.roofline.assumed else ""),
        ]
        if self.on_host:
            shown = ", ".join(self.on_host[:8]) + (", …" if len(self.on_host) > 8 else "")
            lines.append(f"not in the time, since they run on the host: {len(self.on_host)} operators: {shown}")
        if self.compiled:
            total = sum(cost.microseconds for cost in self.compiled)
            moved = sum(cost.bytes for cost in self.compiled)
            lines.append(f"the vendor's compiler says: {total:.4g} µs, {moved:,} bytes moved, of {len(self.compiled)} BPU programs")
            lines.extend(f"  {cost}" for cost in self.compiled)
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.summary}"


@checked(
    integer=instance("an integer model", fx.GraphModule),
    target=such("the name of a target, or a Target", instance("", str, Target).take, bool).or_none("the one it was converted for"),
    roofline=ROOFLINE,
    compiled=PATH_OF_PROGRAM,
)
@working("estimating")
def estimate(
    integer: fx.GraphModule, target: str | Target | None = None, *, roofline: Roofline | None = None,
    compiled: str | os.PathLike[str] | None = None,
) -> Estimate:  # fmt: skip
    """Estimate the cost of an integer model on a chip: products, moved bytes, and the time of each at peak rates, by operator.

    The rates are those of `target`, the one that the model was converted for unless another is named, or a `roofline` of your own:
    fxq.extend.Roofline(macs_per_second, bytes_per_second). An operator takes the longer of its two times (Williams, Waterman and
    Patterson 2009, "Roofline"), as if products and transfers overlapped within it, and each operator read from memory and wrote to
    it. Costs are of one item, or of the batch that the model is fixed to.

    `compiled` is the .bin that `compile_horizon` made of the model. The vendor's hb_perf then gives the result's `compiled`: microseconds,
    runs a second and bytes of each BPU program, and its table of layers. The processor's part is not included.

    Raises ConfigurationError for other models, where no rates are known of the target, and for a .bin without the vendor's
    tool; UnknownTarget, CompilationError.
    """
    if not is_deployed(integer):
        because = "it is not an integer model: fxq.convert determines dtypes and weights"
        raise ConfigurationError("the cost of this model is not known yet", because=because, remedy="pass fxq.convert(prepared)")
    chosen: Target = integer.meta["target"] if target is None else backends.get(target)
    rates = roofline or chosen.roofline
    if rates is None:
        because = "they are those of the machine that the model runs on"
        remedy = "pass roofline=fxq.extend.Roofline(macs_per_second=1e11, bytes_per_second=2e10), with the numbers of your machine"
        raise ConfigurationError(f"the peak rates are not known of {chosen.name}", because=because, remedy=remedy)
    integer = unrolled(integer)
    every = layers(integer)
    shown = operator_graph(integer, every)
    nodes = {node.name: node for node in integer.graph.nodes}
    by_name = {layer.name: layer for layer in every}
    rows = []
    for layer in every:
        operands = list(shown.predecessors(layer.name))
        read = sum(by_name[each].activation_bytes if each in by_name else bytes_of(fact(nodes[each])) for each in operands)
        moved = layer.weight_bytes + read + layer.activation_bytes
        compute, memory, bound = math.nan, math.nan, HOST
        if layer.integer or layer.boundary or layer.dynamic:
            compute = layer.macs * _slowness(nodes[layer.name], nodes, by_name, operands) / rates.macs_per_second * MILLION
            memory = moved / rates.bytes_per_second * MILLION
            bound = "compute" if compute > memory else "memory"
        figures = layer.macs, moved, compute, memory, max(compute, memory)
        rows.append(LayerEstimate(layer.name, layer.operator, layer.dtype, *figures, bound))
    costs = () if compiled is None else tuple(Binary(Path(compiled)).costs())
    title = f"one item on {chosen.name}, at the peak rates of the chip"
    return Estimate(title, tuple(rows), roofline=rates, target=chosen.name, compiled=costs)


def _slowness(node: fx.Node, nodes: Mapping[str, fx.Node], by_name: Mapping[str, Layer], operands: list[str]) -> float:
    """Return the cost of one product relative to int8 times int8: the product of the operands' stored widths in bits, divided by 64."""
    lowered = operation(node)
    constant = None if lowered is None else lowered.constants.get("weight")
    widths = [8 * ITEMSIZES.get(by_name[name].dtype, 1) for name in operands if name in by_name][:2]
    if by_name[node.name].dynamic:
        widths = [8]  # of the bytes that its operand becomes
    weight = widths[-1:] if constant is None else [8 * fact(nodes[constant.node]).dtype.itemsize]
    return math.prod([*widths[:1], *weight]) / 64 if widths else 1.0
