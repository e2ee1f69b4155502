"""Softmax, its logarithm, and softmax with a mask: composites, 16 bits wide inside.

    softmax(x) = e / Σ e,   log_softmax(x) = d - log Σ e,   logsumexp(x) = max x + log Σ e,   with d = x - max x, e = exp(d)

No e is larger than 1, so its scale is constant: 2^-15. The scales of the differences d, the sum and its reciprocal are calibrated.

The boolean mask that an added float mask is computed from, and the number that it adds where it hides, are recovered:

    (1 - mask) * -1e9              mask                   of booleans, or of 0 and 1, as integers or floats
    where(mask, 0, -inf)           mask
    mask.float() * -1e9            not mask
    causal + padding               both of them

They are found in the graph, not in the values: such a mask is computed from booleans, and is never dequantized.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.ir.graph import BatchDim, TensorFact, is_parameter, parameter_value
from fxquant.ops.core import NORMED, WIDE, Builder, Fixed, Operator, Trait, composite, fact, sample, sampled, taking, written
from fxquant.ops.core.casting import in_dtype, made_number, to_real
from fxquant.ops.core.places import constant_value
from fxquant.ops.core.record import OPERATORS, Own, Same, calls, has_weights, operator_of, register
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.arithmetic import add, mul, sub
from fxquant.ops.elementwise.comparison import amax, amin, minimum, where
from fxquant.ops.elementwise.comparison import any as any_of
from fxquant.ops.elementwise.table import by_table
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.ops.movement.shape import MANY_SIZES, identity, many_sizes, numbers, permute, rank_of, reshape
from fxquant.ops.pooling.totals import sum
from fxquant.ops.reduction.moments import over_dimensions, refuses_reduction
from fxquant.support import reached

HIDDEN = -64.0  # elements this far below the largest of their row have no weight: exp(-64) < 2^-92
ABSORBING = -1e7  # scores are lost next to it in float32, so that all of a row that is hidden is equal


def only_views(record: Operator) -> bool:
    """Return whether an operator only moves elements, or gives them another float dtype."""
    return Trait.VIEWS in record.traits or record.function is in_dtype


def far_below(value: Any) -> bool:
    """Return whether a number, or every element of a constant, is so far below the scores that it hides them."""
    number = _everywhere(value)
    constant = constant_value(value) if number is None else None
    return number is not None and number <= HIDDEN if constant is None else bool((constant <= HIDDEN).all())


class Hiding:
    """The boolean form of an added mask.

    adds       the number that it adds to hidden elements; None if there are several
    otherwise  bool mask of the elements with equal weights in a row that is hidden completely: in a sum of two masks, the elements that
               at least one of them keeps; None: all
    """

    def __init__(self, build: Builder, mask: fx.Node) -> None:
        self._build = build
        self._mask = mask
        self.otherwise: fx.Node | None = None
        self._added: set[float] = set()

    @property
    def adds(self) -> float | None:
        return next(iter(self._added)) if len(self._added) == 1 else None

    @property
    def empty(self) -> str:
        """The treatment of rows that are hidden completely: `empty` of `masked_softmax`."""
        if self.adds is None or self.adds == -math.inf:
            return "zeros"
        return "equal" if self.adds <= ABSORBING else "whole"

    def kept(self, mask: Any, dim: int | None) -> fx.Node | None:
        """Return a bool node, True where the added mask is 0; None if the mask is not computed from booleans alone.

        `dim`, counted from the end, is the dimension of the softmax; None if it is unknown.
        """
        if not isinstance(mask, fx.Node):
            return None
        if is_parameter(mask):
            return self._of_constant(mask)
        record = operator_of(mask)
        if record is None:
            return None
        arguments = record.arguments(mask)
        function = record.function
        if only_views(record):
            return self._moved(mask, self.kept(arguments["input"], _dim_before(mask, dim)))
        if function is where:
            return self._chosen(**arguments, dim=dim)
        if function is minimum or (function is add and arguments["alpha"] == 1):
            left, right = (self.kept(arguments[name], dim) for name in ("input", "other"))
            return self._both(left, right) if function is minimum else self._sum(left, right, dim, mask)
        bound = arguments.get("other", arguments.get("min"))
        if Trait.BOUNDED_BELOW in record.traits and far_below(bound) and arguments.get("max") is None:
            return self.kept(arguments["input"], dim)
        if function is torch.neg:
            product = arguments["input"]
            return self._multiple(**OPERATORS[mul].arguments(product), dim=dim, sign=-1) if calls(product, mul) else None
        if function is torch.log:
            return self._seen(-math.inf, self.holds(arguments["input"], dim, True))
        return self._multiple(**arguments, dim=dim) if function is mul else None

    def _multiple(self, input: Any, other: Any, dim: int | None, sign: int = 1) -> fx.Node | None:
        """Return the bool node kept by number · b or number · (b - 1), with b a boolean as 0 and 1; None for any other product."""
        for factor, value in ((other, input), (input, other)):
            number = _everywhere(factor)
            number = None if number is None else sign * number
            if number is not None and number <= HIDDEN:
                return self._seen(number, self._not(self.holds(value, dim, False)))
            if number is not None and number >= -HIDDEN:
                return self._seen(-number, self._less_one(value, dim))
        return None

    def holds(self, value: Any, dim: int | None, largest: bool) -> fx.Node | None:
        """Return where a tensor of only 0 and 1 is 1.

        For float inputs: where they are the largest of their row, or, without `largest`, where they are not the smallest.
        """
        if not isinstance(value, fx.Node) or not isinstance(fact(value), TensorFact):
            return None
        if is_parameter(value):
            return self._of_zeros_and_ones(value)
        record, dtype = operator_of(value), fact(value).dtype
        if dtype == torch.bool:
            return value
        if record is None:
            return self._given(value, dim, largest) if value.op == "placeholder" and dtype == torch.float32 else None
        arguments = record.arguments(value)
        if record.function is to_real:
            return self._build.host(WHOLE["gt"], arguments["input"], 0)
        if only_views(record):
            return self._moved(value, self.holds(arguments["input"], _dim_before(value, dim), largest))
        if record.function is where:
            branches = _everywhere(arguments["input"]), _everywhere(arguments["other"])
            return arguments["condition"] if branches == (1, 0) else self._not(arguments["condition"]) if branches == (0, 1) else None
        if record.function is sub and arguments["alpha"] == 1 and _everywhere(arguments["input"]) == 1:
            return self._not(self.holds(arguments["other"], dim, not largest))
        if record.function is mul:
            factors = [self.holds(arguments[name], None, largest) for name in ("input", "other")]
            return self._both(*factors)
        return None

    def _of_zeros_and_ones(self, constant: fx.Node) -> fx.Node | None:
        value = constant_value(constant)
        plain = value is not None and not value.is_complex() and bool(((value == 0) | (value == 1)).all())
        return self._build.host(torch.ne, constant, 0) if plain else None

    def _given(self, mask: fx.Node, dim: int | None, largest: bool) -> fx.Node | None:
        if dim is None or len(fact(mask).shape) < -dim or not isinstance(fact(mask).shape[dim], int):
            return None
        wide = self._build.host(finely, mask)
        return self._build.host(torch.eq if largest else torch.ne, wide, self._build.host(amax if largest else amin, wide, [dim], True))

    def _less_one(self, value: Any, dim: int | None) -> fx.Node | None:
        """Compute (mask - 1) · 1e9."""
        record = operator_of(value) if isinstance(value, fx.Node) else None
        if record is None or Trait.ADDS not in record.traits:
            return None
        arguments = record.arguments(value)
        one = 1 if record.function is sub else -1
        subtracts_one = _everywhere(arguments["other"]) == one and arguments["alpha"] == 1
        return self.holds(arguments["input"], dim, True) if subtracts_one else None

    def _chosen(self, condition: Any, input: Any, other: Any, dim: int | None) -> fx.Node | None:
        if not isinstance(condition, fx.Node):
            return None
        for hidden, visible, keeps in ((other, input, True), (input, other, False)):
            if far_below(hidden) and not far_below(visible):
                self._added |= _numbers(hidden)
                keep = condition if keeps else self._not(condition)
                return keep if _everywhere(visible) == 0 else self._both(keep, self.kept(visible, dim))
        return None

    def _sum(self, left: fx.Node | None, right: fx.Node | None, dim: int | None, node: fx.Node) -> fx.Node | None:
        """Return the bool node that a sum of two masks keeps: their conjunction.

        In a row where the conjunction is empty, keep the disjunction: there exactly one mask adds its number to every element.
        """
        if left is None or right is None or dim is None or self.adds is None:
            return None
        both, one = self._build.host(torch.logical_and, left, right), self._build.host(torch.logical_or, left, right)
        if self.empty == "equal" and node is self._mask:
            self.otherwise = one
            return both
        nonempty = self._build.host(any_of, both, [dim], True)
        alone = self._build.host(torch.logical_and, one, self._build.host(torch.logical_not, nonempty))
        return self._build.host(torch.logical_or, both, alone)

    def _of_constant(self, mask: fx.Node) -> fx.Node | None:
        value = constant_value(mask)
        if value is None or not value.is_floating_point() or not bool(((value == 0) | (value <= HIDDEN)).all()):
            return None
        self._added |= set(value[value != 0].flatten().tolist())
        return self._build.host(torch.eq, mask, 0.0)

    def _seen(self, adds: float, visible: fx.Node | None) -> fx.Node | None:
        self._added.add(adds)
        return visible

    def _not(self, value: fx.Node | None) -> fx.Node | None:
        if value is not None and value.target is torch.logical_not:
            opposite: fx.Node = value.args[0]  # type: ignore[assignment]
            return opposite
        return None if value is None else self._build.host(torch.logical_not, value)

    def _both(self, left: Any, right: Any) -> fx.Node | None:
        return None if left is None or right is None else self._build.host(torch.logical_and, left, right)

    def _moved(self, node: fx.Node, visible: fx.Node | None) -> fx.Node | None:
        """Move booleans as the node moves numbers."""
        if visible is None or node.target in (identity, in_dtype):
            return visible
        return self._build.host(node.target, visible, *node.args[1:])  # type: ignore[arg-type]


def _numbers(value: Any) -> set[float]:
    """Return the set of distinct numbers in a constant, or of a number itself."""
    number = _everywhere(value)
    if number is not None:
        return {number}
    constant = constant_value(value)
    assert constant is not None
    return set(constant.flatten().tolist())


def level_of(constant: fx.Node) -> float | None:
    """Return the only nonzero number of a constant mask; None if there are several or none."""
    levels = {number for number in _numbers(constant) if number != 0}
    return next(iter(levels)) if len(levels) == 1 else None


def _dim_before(node: fx.Node, dim: int | None) -> int | None:
    """Return the dimension of a node's operand that becomes dimension `dim` of its result: -1, or None if it is another one."""
    before, after, record = fact(node.args[0]).shape, fact(node).shape, operator_of(node)  # type: ignore[arg-type]
    if record is None or dim != -1 or not before or before[-1] != after[-1]:
        return None
    return None if record.function is permute and node.args[1][-1] not in (-1, len(before) - 1) else -1  # type: ignore[index, operator]


def finely(input: Tensor) -> Tensor:
    """Return a float mask unchanged, to be quantized in the widest dtype of the target.

    The largest element of a row has to be distinguished from the others.
    """
    return input


def _everywhere(value: Any) -> float | None:
    """Return the one number that a number, a constant, or a tensor that the model creates holds everywhere; None where there is none."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    if is_parameter(value):
        tensor = constant_value(value)
        return float(tensor.flatten()[0]) if tensor is not None and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()) else None
    return made_number(value)


register("finely", finely, ("input",), lambda lowering, input: input, Same(), dtypes={"input": "int16"})


# ---- Softmax and its logarithm ---------------------------------------------------------------------------------------
AT_MOST_ONE = Fixed(2.0**-15, "int16")
CENTRE = 6.0  # the exponent of the largest element where exponents reach from -CENTRE to CENTRE
CENTRED, AT_MOST_CENTRE, INVERSE = (Fixed(largest / 32767, "int16") for largest in (CENTRE, math.exp(CENTRE), math.exp(-CENTRE)))
BELOW = Fixed(2 * CENTRE / 32767, "int16")


def _total(build: Builder) -> Own:
    """Return the demand of a sum of exponentials: with little headroom where its reciprocal has segments, which share out its range."""
    return replace(WIDE, headroom=1.125) if build.segments else WIDE


def _exponentials(build: Builder, input: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return the maximum over `dims`, input minus maximum, and its exponential.

    By segments, which are short where the exponential bends, all are of exponents `CENTRE` larger; the maximum is that much smaller.
    """
    largest = build(amax, input, dims, True)
    largest = build(sub, largest, CENTRE, demand=WIDE) if build.segments else largest
    difference = build(sub, input, largest, demand=CENTRED if build.segments else WIDE)
    exponential = build(torch.exp, difference, demand=AT_MOST_CENTRE if build.segments else AT_MOST_ONE)
    return largest, difference, exponential


FUNCTIONAL = taking("input dim _stacklevel dtype", ("input", "dim"))


def _chosen_dimension(node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without a dimension, PyTorch chooses it, with a warning."""
    chosen = 0 if rank_of(arguments["input"]) in (0, 1, 3) else 1
    return arguments if arguments["dim"] is not None else {**arguments, "dim": chosen}


def _refuses_logsumexp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    because = refuses_reduction(arguments["input"], arguments["dim"])
    return because or (MANY_SIZES if not arguments["keepdim"] and many_sizes(node) else None)


@composite(
    function=lambda input, dim=None: F.softmax(input, dim, _stacklevel=5),
    takes="input dim dtype",
    calls={F.softmax: FUNCTIONAL},
    modules={nn.Softmax2d: lambda m: {"dim": -3}},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
    samples=(sample(input=(3, 6, 6), dim=-3),),
)
def softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(x) / Σ exp(x) along one dimension."""
    _, _, exponential = _exponentials(build, input, [dim])
    total = build(sum, exponential, [dim], True, demand=_total(build))
    return build(mul, exponential, build(torch.reciprocal, total, demand=INVERSE if build.segments else WIDE))


@composite(
    function=lambda input, dim=None: F.log_softmax(input, dim, _stacklevel=5),
    takes="input dim dtype",
    calls={F.log_softmax: FUNCTIONAL},
    traits=frozenset({Trait.SOFTMAX}),
    normalize=_chosen_dimension,
    samples=(sample(input=(3, 6, 6), dim=-1),),
)
def log_softmax(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute x - log Σ exp(x) along one dimension."""
    largest, difference, exponential = _exponentials(build, input, [dim])
    logarithm = build(torch.log, build(sum, exponential, [dim], True, demand=_total(build)), demand=WIDE)
    if build.segments:  # the difference ends where the exponential is lost
        return build(sub, input, build(add, largest, logarithm, demand=WIDE))
    return build(sub, difference, logarithm)


@composite(takes="input dim _stacklevel dtype", normalize=_chosen_dimension, samples=(sample(input=(3, 6, 6), dim=1),))
def softmin(build: Builder, input: fx.Node, dim: Any = None) -> Any:
    """Compute exp(-x) / Σ exp(-x) along one dimension."""
    return build(softmax, build(torch.neg, input), dim)


@composite(normalize=over_dimensions, refuses=_refuses_logsumexp, samples=(sample(input=(3, 6, 6), dim=[1, 3]),))
def logsumexp(build: Builder, input: fx.Node, dim: list[int], keepdim: bool = False) -> Any:
    """Compute log Σ exp(x) over dimensions."""
    largest, _, exponential = _exponentials(build, input, dim)
    logarithm = build(torch.log, build(sum, exponential, dim, True, demand=_total(build)), demand=WIDE)
    if keepdim:
        return build(add, largest, logarithm)
    shape = [size for position, size in enumerate(numbers(fact(largest).shape)) if position not in dim]
    return build(add, build(reshape, largest, shape), build(reshape, logarithm, shape))


# ---- Softmax with a boolean mask: a composite with 16-bit inner tensors ----------------------------------------------
#
#     y = e / max(Σ e, 1),   e = exp(factor · (x - max x)) of the elements that are kept, and 0 of the others
#
# The maximum is taken over the kept elements, so that Σ e ≥ 1. A row that is hidden completely becomes zeros.
# An added mask (of -10000, -inf, …) is split into a boolean mask and a bias of the kept elements. Where the mask is computed from
# booleans, `Hiding` recovers these from the graph. Otherwise both are computed in float; for a constant, once.
LOWEST = -1e9  # saturates on every grid
SMALLEST = -12.0  # exp of it is less than half a step of 2^-15


def kept(mask: Tensor, dim: int) -> Tensor:
    """Return the bool mask of an added mask: True where an element is not far below the largest along `dim`."""
    value = mask.float()
    return value > value.amax(dim, keepdim=True) + HIDDEN


def added(mask: Tensor, dim: int) -> Tensor:
    """Return the bias of an added mask: mask - its maximum along `dim` for kept elements, 0 for hidden ones.

    A softmax does not change when the maximum is subtracted.
    """
    value = mask.float()
    return torch.where(kept(mask, dim), value - value.amax(dim, keepdim=True), 0.0)


def parts_of(mask: fx.Node, dim: int) -> tuple[bool, bool]:
    """Return whether an added mask hides elements, and whether it adds something to others: as it seems where it is not constant."""
    value = constant_value(mask)
    return (True, True) if value is None else (not bool(kept(value, dim).all()), bool((added(value, dim) != 0).any()))


def may_hide(mask: fx.Node) -> bool:
    """Return whether an added mask may hide scores; a constant position bias, whose elements lie close together, does not.

    Views and repetitions of such a constant do not either.
    """
    record = operator_of(mask)
    if not is_parameter(mask) and record is not None and only_views(record):
        return may_hide(record.arguments(mask)["input"])
    if not is_parameter(mask):
        return True
    value = constant_value(mask)
    if value is None or not value.is_floating_point() or value.numel() == 0:
        return False
    return not bool(value.max() - value.min() < -HIDDEN)


def is_scores(mask: fx.Node) -> bool:
    """Return whether an added mask depends on a layer with weights, so that it is a bias and hides nothing."""
    before = reached([mask], lambda node: (each for each in node.all_input_nodes if isinstance(fact(each), TensorFact)))
    return any(map(has_weights, before))


def terms_of(mask: fx.Node) -> list[fx.Node]:
    """Return the tensors that a mask is the sum of; none where it is not a sum of two, or is a constant."""
    if not calls(mask, add):
        return []
    arguments = OPERATORS[add].arguments(mask)
    terms = [arguments["input"], arguments["other"]]
    return terms if arguments["alpha"] == 1 and all(isinstance(t, fx.Node) and isinstance(fact(t), TensorFact) for t in terms) else []


def repeated(mask: fx.Node) -> Tensor | None:
    """Return one sample's part of a mask computed from constants and the batch size, which repeats it along dimension 0.

    A window's mask is an example: it is the same for every image. None where a mask reads anything else, or does not repeat.
    """
    if is_parameter(mask) or not isinstance(fact(mask), TensorFact) or not fact(mask).shape:
        return None
    try:
        one, three = (_at(mask, batch, {}) for batch in (1, 3))
    except (LookupError, ValueError, RuntimeError, TypeError):
        return None
    same = isinstance(one, Tensor) and isinstance(three, Tensor) and torch.equal(three, one.repeat(3, *[1] * (one.dim() - 1)))
    return one if same else None


def _at(node: fx.Node, batch: int, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node at a batch size. Raise LookupError where it is not the same for all inputs of that size."""
    if node in values:
        return values[node]
    size, model = fact(node), node.graph.owning_module
    if isinstance(size, int | BatchDim):
        values[node] = size if isinstance(size, int) else size.at(batch)
    elif is_parameter(node) and model is not None:
        values[node] = parameter_value(model, node)
    elif operator_of(node) is None or node.op != "call_function" or not node.all_input_nodes:
        raise LookupError(node.name)
    else:
        arguments = fx.map_arg(node.args, lambda operand: _at(operand, batch, values))
        values[node] = node.target(*arguments)  # type: ignore[operator]
    return values[node]


HOST = tuple(
    register(name, function, ("mask",), refuses=lambda node, arguments: "an attention mask is computed in float, not in integers")
    for name, function in (("kept", kept), ("added", added))
)


def exponential(input: Tensor, factor: float = 1.0) -> Tensor:
    """Compute exp(factor · x) of numbers that are not positive."""
    return torch.exp(input * factor)


register(
    "exponential",
    exponential,
    ("input",),
    lambda lowering, input, factor: by_table(lowering, input, "exp", factor),
    keeps=lambda arguments, after, bits: (SMALLEST / arguments["factor"], math.inf),
    samples=written("torch.softmax(x.masked_fill({B(torch.eye(6).bool())}, -math.inf), -1)", within=NORMED),
    onnx=lambda c: c.do("Exp", c.input if c["factor"] == 1 else c.do("Mul", c.input, c.number(c["factor"]))),
)


def _masked_softmax(input: Tensor, keep: Tensor, dim: int, empty: str = "zeros", otherwise: Tensor | None = None) -> Tensor:
    missing = ~keep.expand_as(input).any(dim, keepdim=True)
    visible = keep if empty == "zeros" else keep | (missing if otherwise is None else missing & otherwise)
    scores = torch.where(keep, input, LOWEST) if empty == "equal" else input
    return torch.where(visible, torch.softmax(torch.where(visible, scores, -math.inf), dim), 0.0)


def shares(
    build: Builder, input: fx.Node, keep: fx.Node | None, dim: int, factor: float = 1.0, empty: str = "zeros",
    otherwise: fx.Node | None = None,
) -> Any:  # fmt: skip
    """Return the softmax of factor · input along a dimension, over the kept elements; `empty` and `otherwise` as in `masked_softmax`."""
    counted = keep
    if build.segments and factor != 1:  # before what is left out gets the lowest integer
        input = build(mul, input, float(factor), demand=WIDE)
    if keep is not None:
        counted = keep if empty == "zeros" else with_empty_rows(build, keep, dim - len(fact(input).shape) if dim >= 0 else dim, otherwise)
        input = build(where, keep if empty == "equal" else counted, input, LOWEST, demand=Same(("input",)))
    if build.segments and keep is None:
        _, _, values = _exponentials(build, input, [dim])
    elif build.segments:  # the largest of a row of which nothing is kept has no range that could be moved by a number
        difference = build(sub, input, build(amax, input, [dim], True), demand=BELOW)
        values = build(torch.exp, build(add, difference, CENTRE, demand=CENTRED), demand=AT_MOST_CENTRE)
    else:
        values = build(exponential, build(sub, input, build(amax, input, [dim], True), demand=WIDE), float(factor), demand=AT_MOST_ONE)
    if keep is not None:
        values = build(where, counted, values, 0.0, demand=Same(("input",)))
    total = build(sum, values, [dim], True, demand=_total(build))
    if keep is not None:
        total = build(clamp, total, math.exp(CENTRE) if build.segments else 1.0, None)
    return build(mul, values, build(torch.reciprocal, total, demand=INVERSE if build.segments else WIDE))


def with_empty_rows(build: Builder, keep: fx.Node, dim: int, otherwise: fx.Node | None) -> fx.Node:
    """Return the mask `keep` with rows along the negative `dim` that are all False replaced: by `otherwise`, or by True if that is None."""
    value = constant_value(keep)
    if value is not None and value.dim() >= -dim and bool(value.any(dim).all()):
        return keep
    nonempty = build.host(any_of, keep, [dim], True) if len(fact(keep).shape) >= -dim else keep
    missing = build.host(torch.logical_not, nonempty)
    return build.host(torch.logical_or, keep, missing if otherwise is None else build.host(torch.logical_and, missing, otherwise))


@composite(operands=("input",), function=_masked_softmax, reads=("keep", "otherwise"), traits=frozenset({Trait.SOFTMAX}))
@sampled("torch.softmax(x.masked_fill({B(torch.eye(6).bool())}, -math.inf), -1)", within=NORMED)
def masked_softmax(build: Builder, input: fx.Node, keep: fx.Node, dim: int, empty: str = "zeros", otherwise: fx.Node | None = None) -> Any:
    """Compute the softmax along one dimension over the elements where `keep` is True; hidden elements become 0.

    `empty` is the result for a row that is hidden completely: "zeros"; "equal", the softmax of equal numbers; or "whole", the softmax
    without a mask. With `otherwise`, a bool mask, such a row keeps the elements where `otherwise` is True.
    """
    return shares(build, input, keep, dim, empty=empty, otherwise=otherwise)
