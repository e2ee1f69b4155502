"""Common parts of operators with weights: their sums of products, and everything that is fused into them.

The integer meaning, per output channel c:

    acc = Σ x·w_q + b_q  (+ r·k_c),   w_q = round(w/s_c),  b_q = round(b/(s_x·s_c)),  k_c = round(s_r/(s_x·s_c))
    y   = requantize(acc, s_x·s_c/s_y), limited to the fused clamp

An int16 operand whose sums could exceed the accumulator is first brought to a scale 2^n larger, rounding half up.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.errors import ConfigurationError
from fxquant.ir.graph import Size, TensorFact, fact, is_parameter, resolve
from fxquant.lowering.lowering import Clamp, Epilogue, Lift, Lowering, Quantized, ResidualFactor, named_parameters
from fxquant.numerics import grids
from fxquant.numerics.grids import FLOAT32_EXACT, INT32, SMALLEST_SCALE, WEIGHT_INT8, Grid, Ratio, accumulator_bound, power_of_two
from fxquant.numerics.rounding import clamped, straight_through
from fxquant.ops.core.sums import lower_add
from fxquant.primitives import accumulate, elementwise, product
from fxquant.primitives.arithmetic import LAYER, WIDE_LAYER
from fxquant.primitives.record import Role, role_of
from fxquant.primitives.selection import choose, compare
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import BatchNorm, QuantizedWeight, correct_batch, fold, fold_bias, multiplied, running_gain
from fxquant.training import fused_layers
from fxquant.training.fused_layers import form_of

# ---- Sums of products of an operand and a weight's integers: narrow, wide, in parts, and the largest accumulator -----

# Sums that can be formed in parts, and the dimension of their input channels.
IN_PARTS: dict[Role | None, int] = {Role.CONVOLUTION: 1, Role.LINEAR: -1}


@dataclass(frozen=True)
class Product:
    """The primitives of a weighted layer, and the form of the weight that they take."""

    narrow: Callable[..., Tensor]  # the primitive for accumulators below 2^24
    wide: Callable[..., Tensor]  # the primitive for larger accumulators
    attributes: tuple[Any, ...] = ()  # the arguments of both after input, weight and bias
    trailing: int = 0  # the number of dimensions after the channels in the output
    # Permutes a weight whose dimension 0 is the output channels into the form that both take.
    layout: Callable[[Tensor], Tensor] = lambda weight: weight
    channels: int = 0  # the dimension of the output channels in that form
    transposed: bool = False  # whether it is a transposed convolution, whose biases may have fewer bits
    in_parts: bool = False  # whether `wide` takes a `Split` that keeps the sums of parts below 2^24; else it sums in float64


@dataclass(frozen=True)
class LayerSum:
    """A weighted layer with its quantized weight: the primitives, the operand, whose integers are at most `magnitude`, and the weight."""

    lowering: Lowering
    product: Product
    input: Quantized
    magnitude: int
    weight: QuantizedWeight

    @property
    def limit(self) -> int:
        """The largest accumulator."""
        return accumulator_limit(self.lowering)

    @property
    def kind(self) -> str:
        """Kind of its accumulator for `Arithmetic.requantize`."""
        return WIDE_LAYER if self.input.dtype.bits > 8 else LAYER

    @property
    def integer_dtype(self) -> torch.dtype:
        """Dtype that holds a number of steps: a bias, a multiplier."""
        return torch.int64 if self.lowering.weight.dtype.bits > 8 else torch.int32

    def bound(self, bias: Tensor | None) -> Tensor:
        """Return the largest |accumulator| that any input can cause, per output channel."""
        bound = self.weight.total * self.magnitude
        return bound if bias is None else bound + bias.detach().double().abs()

    def epilogue(self, steps: tuple[Tensor, ...], clamp: Clamp | None, bound: float, lift: Lift | None) -> Epilogue:
        """Return the epilogue that requantizes the accumulator, of scale `steps`, to the output."""
        ratio = Ratio(tuple(per_channel(factor, self.product.trailing) for factor in steps))
        return Epilogue(ratio, clamp, bound, lift, self.kind)

    def accumulate(self, largest: float, bias: Tensor | None) -> Any:
        """Return the sum, which can reach `largest`: narrow where float32 is exact, else wide."""
        lowering, product, dtype = self.lowering, self.product, self.lowering.weight.dtype
        operands = (
            self.input.value,
            lowering.constant("weight", product.layout(self.weight.integers), dtype.storage),
            None if bias is None else lowering.constant("bias", bias, self.integer_dtype),
            *product.attributes,
        )
        if largest < FLOAT32_EXACT:
            return lowering.call(product.narrow, *operands)
        axis = IN_PARTS.get(role_of(product.narrow))
        parts = 0 if axis is None else lowering.parts(self.input.value, self.weight.integers, bias)
        if parts == 1:
            return lowering.call(product.narrow, *operands)
        if parts and self.input.value.shape[axis] == operands[1].shape[1]:  # not in groups
            return self._in_channels(parts, operands[1], bias)
        integers = self.weight.integers.detach()
        cut = (
            [list(lowering.once(f"cut {tuple(integers.shape)}", lambda: _cut(integers, self.magnitude, dtype)))] if product.in_parts else []
        )
        how = "in parts" if product.in_parts else "in float64"
        lowering.note("wide", f"a sum can reach {largest:.0f}, beyond 2^24, so it is formed {how}")
        return lowering.call(product.wide, *operands, *cut)

    def _in_channels(self, parts: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the sums over parts of the input channels, and add them in float64."""
        lowering, product, axis = self.lowering, self.product, IN_PARTS[role_of(self.product.narrow)]
        pairs = zip(self.input.value.chunk(parts, axis), weight.chunk(parts, 1), strict=True)
        terms = [lowering.call(product.narrow, *pair, None, *product.attributes).double() for pair in pairs]
        total: Tensor = functools.reduce(torch.add, terms)
        return total if bias is None else total + per_channel(bias, product.trailing)


def accumulator_limit(lowering: Lowering) -> int:
    """Return the largest accumulator: of 48 bits where weights have 16, else of 32."""
    return grids.INT48_MAX if lowering.weight.dtype.bits > 8 else grids.INT32_MAX


def per_channel(channels: Tensor, trailing: int) -> Tensor:
    """Reshape per-channel values to broadcast to an output with `trailing` dimensions after the channel; a single one stays a scalar."""
    return channels.reshape(-1, *[1] * trailing) if channels.numel() > 1 else channels.reshape(())


def _cut(integers: Tensor, magnitude: int, dtype: grids.IntType) -> accumulate.Split:
    """Return the fewest parts of an operand of this magnitude, and of the weight, for which every sum of parts stays below 2^24."""
    bits = (magnitude - 1).bit_length() + 1
    largest: dict[int, float] = {}  # Σ|w_j| of the worst part, by the number of the weight's parts
    for parts, weight_parts in sorted(itertools.product(range(1, bits + 1), range(1, dtype.bits + 1)), key=lambda p: (p[0] * p[1], p[1])):
        cut = accumulate.Split(parts, -(-bits // parts), weight_parts, -(-dtype.bits // weight_parts))
        if weight_parts not in largest:
            factors = accumulate.split(integers, weight_parts, cut.weight_bits)
            largest[weight_parts] = max(float(accumulator_bound(factor, None, 0, 1).max()) for factor in factors)
        if largest[weight_parts] * 2 ** (cut.bits - 1) < FLOAT32_EXACT:
            return cut
    raise AssertionError("parts of one bit always fit: a channel has fewer than 2^24 weights")


# ---- A residual in the accumulator of a layer: its multiplier per output channel, and why it is not added there ------
def residual_factor(layer: LayerSum, residual: Quantized, steps: tuple[Tensor, ...], bound: Tensor) -> tuple[ResidualFactor | None, Tensor]:
    """Return (factor, bound with the residual), or (None, bound) where the residual has to be added after a requantization."""
    lowering = layer.lowering
    if requantizes_residuals(lowering):
        lowering.note("residual", "added after a requantization, as this target does")
        return None, bound
    factor, added = scaled_residual(layer, residual, Ratio((residual.scale,), steps), steps)
    with_residual = bound + added
    shifts = factor.right_shift is not None
    reason = _not_in_accumulator(layer, residual, factor.value().detach(), float(with_residual.max()), shifts)
    if reason is not None:
        lowering.note("residual", f"added after a requantization: {reason}")
        return None, bound
    lowering.note("residual", "added in the accumulator")
    return factor, with_residual


def scaled_residual(layer: LayerSum, residual: Quantized, ratio: Ratio, steps: tuple[Tensor, ...]) -> tuple[ResidualFactor, Tensor]:
    """Return the factor that requantizes a residual to the accumulator's scale, and the largest value it can add to an accumulator."""
    bits, right_shift = layer.lowering.arithmetic.residual_bits, None
    if bits:
        mantissa, exponent = ratio.mantissa(bits, largest_exponent=31, carries=False)
        multiplier, right_shift = mantissa << (-exponent).clamp_min(0), exponent.clamp_min(0)
    else:
        shape = torch.broadcast_shapes(*(factor.shape for factor in steps))  # type: ignore[no-untyped-call]
        multiplier = ratio.rounded(torch.zeros(shape, dtype=torch.int64, device=steps[0].device))
    added = torch.ceil(ResidualFactor(multiplier, right_shift).value() * residual.grid.magnitude)
    real = ratio.approximate()
    if real.requires_grad and torch.is_grad_enabled():
        multiplier = straight_through(real if right_shift is None else real * power_of_two(right_shift), multiplier.double())
    return ResidualFactor(multiplier, right_shift), added


def _not_in_accumulator(layer: LayerSum, residual: Quantized, factor: Tensor, largest: float, shifts: bool) -> str | None:
    """Return why a residual times these factors is not added to the accumulator, which can reach `largest` with it; None if it is."""
    smallest = min(layer.lowering.arithmetic.smallest_residual_multiplier, 2**residual.dtype.bits)
    output = layer.lowering.output.dtype  # a 32-bit one is the sum itself
    if shifts and max(residual.dtype.bits, layer.input.dtype.bits, 0 if output == INT32 else output.bits) > 8:
        return "its target adds 16-bit tensors in a separate step"
    if not shifts and int(factor.min()) < smallest:
        return f"its multiplier falls to {int(factor.min())}, below {smallest}"
    return f"the accumulator could reach {largest:.0f}" if largest > layer.limit else None


def requantizes_residuals(lowering: Lowering) -> bool:
    """Return whether a residual is added to the layer's requantized 8-bit output; a wider output includes it in the accumulator."""
    return lowering.arithmetic.residual == "requantize" and lowering.output.dtype.bits <= 8


MOST_NARROWED = 8  # bits an int16 operand may give up so that its sums fit the accumulator
FUSED = ("batch_norm", "residual", "clamp")  # the keywords of what is fused into a layer, in the order in which it is computed
ABSORBED = frozenset(FUSED)

BeforeResidual = Callable[[Tensor], None]


def epilogue(value: Tensor, residual: Tensor | None, clamp: Clamp | None, before_residual: BeforeResidual | None) -> Tensor:
    """Add the fused residual, then apply the fused clamp. `before_residual` is called with the value before the residual."""
    if residual is not None:
        if before_residual is not None:
            before_residual(value)
        value = value + residual
    if clamp is None:
        return value
    return clamped(value, *clamp) if torch.is_grad_enabled() else value.clamp_(*clamp)  # nobody else has it


def absorbing(layer: Callable[..., Tensor], folded: Callable[..., tuple[Tensor, Tensor]], names: Sequence[str] = ()) -> Any:
    """Return the float function of a layer, whose attributes have these names, with the batch norm, residual and clamp fused into it."""

    def function(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *attributes: Any, batch_norm: BatchNorm | None = None,
        residual: Tensor | None = None, clamp: Clamp | None = None, before_residual: BeforeResidual | None = None,
    ) -> Tensor:  # fmt: skip
        if batch_norm is not None:
            weight, bias = folded(weight, bias, batch_norm, **dict(zip(names, attributes, strict=False)))
        return epilogue(layer(input, weight, bias, *attributes), residual, clamp, before_residual)

    return function


def lower_weighted(
    lowering: Lowering, product: Product, input: Quantized, weight: Tensor, bias: Tensor | None, residual: Quantized | None = None,
    clamp: Clamp | None = None, batch_norm: BatchNorm | None = None,
) -> Quantized:  # fmt: skip
    """Lower a weighted layer with its fused batch norm, residual and clamp; output channels are the weight's dimension 0.

    A batch norm is folded in with its running statistics, in every state, so that the integers of the weight are those
    that are deployed. Where it is live, the sums then have the statistics of the batch: another bias and another step.
    """
    lowering.parameters.update(named_parameters(weight, bias, batch_norm))
    if batch_norm is not None and lowering.live_batch_norm:
        lowering.weight.forget_correction()  # the statistics, which are of the integers from now on, take its place

    def rounded() -> tuple[QuantizedWeight, Tensor | None, Tensor | None]:
        gain, by_threshold = None if batch_norm is None else running_gain(batch_norm), lowering.arithmetic.float32_steps
        added = lowering.weight.corrected(bias if batch_norm is None or gain is None else fold_bias(bias, batch_norm, gain))
        least = _least_scale(lowering, input, added, residual)
        quantized = lowering.weight.folded(weight, gain, least, by_threshold)
        if quantized is None:
            folded = weight if batch_norm is None else fold(weight, None, batch_norm, 0)[0]
            quantized = lowering.weight.integers(folded, gain, least, keep=lowering.keeps_start, by_threshold=by_threshold)
        return quantized, added, gain

    quantized, added, gain = lowering.once("weight", rounded)
    layer = LayerSum(lowering, product, *_narrowed(lowering, input, quantized, added), quantized)
    live = _live(layer, batch_norm, gain, bias) if batch_norm is not None and gain is not None and lowering.live_batch_norm else None

    def constants() -> tuple[Tensor | None, Tensor, ResidualFactor | None, int | Tensor, tuple[Tensor, ...], Lift | None]:
        steps, offset = lowering.arithmetic.step(layer.input.scale, quantized.scale), added if live is None else live.bias
        steps = steps if live is None else (*steps, live.correction)
        bias_q = None if offset is None else _bias_integers(lowering, offset, layer.input.scale, quantized.scale)
        bound, factor = layer.bound(bias_q), None
        if residual is not None:
            factor, bound = residual_factor(layer, residual, steps, bound)
        apart = residual is not None and factor is None
        to = lowering.intermediate if apart else lowering.output
        lift = _lift(layer, bias_q, steps, to)
        if lift is not None and lowering.lifts_late and bias_q is not None:  # one step for all channels, but a lift for each
            steps = (steps[0].reshape(-1).expand(len(bias_q)), *steps[1:])
        lifted: int | Tensor = 0
        if to is not None and lift is not None and not lowering.lifts_late:
            lifted = lift(to.grid.scale).flatten().expand(len(quantized.integers))
            bias_q, bound = lifted if bias_q is None else bias_q + lifted, bound + lifted.abs()
        return bias_q, bound, factor, lifted, steps, lift

    bias_q, bound, factor, lifted, steps, lift = lowering.once("constants", constants)
    largest = lowering.prove(bound, "the sum", layer.limit)
    lowering.describe("weight", quantized.scale, product.channels - weight.dim())
    lowering.describe("bias", layer.input.scale * quantized.scale, -1, lifted)
    end = lowering.once("epilogue", lambda: layer.epilogue(steps, clamp, largest, lift))
    if live is None:
        return _finished(layer, layer.accumulate(largest, bias_q), end, residual, factor)
    shaped = None if bias_q is None else per_channel(bias_q, product.trailing)
    return _finished(layer, live.sums, end, residual, factor, shaped, live.statistics)


def lower_uniform(
    lowering: Lowering, product: Product, input: Quantized, shape: Sequence[int], value: float, clamp: Clamp | None, bias: float = 0.0,
    residual: Quantized | None = None,
) -> Quantized:  # fmt: skip
    """Lower a layer whose weight has this shape and one value: all its integers are ±127, with the scale |value| / 127, and one bias.

    A residual is added in the accumulator, and must fit in it.
    """
    device = input.scale.device
    scale = (torch.tensor(abs(value), dtype=torch.float32, device=device) / WEIGHT_INT8.high).clamp_min(SMALLEST_SCALE).reshape(1)
    integers = torch.full(tuple(shape), math.copysign(WEIGHT_INT8.high, value), dtype=torch.float32, device=device)
    total = accumulator_bound(integers, None, 0, 1)
    layer = LayerSum(lowering, product, input, input.grid.magnitude, QuantizedWeight(integers, scale, torch.ones_like(scale).bool(), total))
    steps = lowering.arithmetic.step(input.scale, scale)
    bias_value = torch.tensor([bias], dtype=torch.float32, device=device)
    bias_q = lowering.arithmetic.bias(bias_value, input.scale, scale).expand(len(integers)) if bias else None
    lift = _lift(layer, bias_q, steps, lowering.output)
    bound, lifted = layer.bound(bias_q), torch.zeros(1, dtype=torch.float32, device=device)
    if lift is not None and not lowering.lifts_late:
        lifted = lift(lowering.output.grid.scale).flatten()
        bias_q = (lifted if bias_q is None else bias_q + lifted).expand(len(integers))
        bound = bound + lifted.abs()
    factor = None
    if residual is not None:
        factor, added = scaled_residual(layer, residual, Ratio((residual.scale,), steps), steps)
        bound = bound + added
    largest = lowering.prove(bound, "the sum", layer.limit)
    lowering.describe("weight", scale)
    lowering.describe("bias", scale * input.scale, -1, lifted.expand(len(integers)))
    return _finished(layer, layer.accumulate(largest, bias_q), layer.epilogue(steps, clamp, largest, lift), residual, factor)


def _lift(layer: LayerSum, bias: Tensor | None, steps: tuple[Tensor, ...], to: Quantizer | None) -> Lift | None:
    """Return a function of the output's scale: the increase of the bias's integers by half a step of the output; or None."""
    arithmetic, trailing = layer.lowering.arithmetic, layer.product.trailing
    if not arithmetic.half_step_in_bias or to is None or (to.dtype == INT32 and bias is None):
        return None
    step = functools.reduce(torch.mul, steps).detach()
    own = torch.zeros((), dtype=torch.float64, device=step.device) if bias is None else bias.detach().double()

    def lift(scale: Tensor) -> Tensor:
        half_of = torch.zeros_like(scale) if to.dtype == INT32 else scale.detach()  # a sum that is not rounded holds no half step
        return per_channel(arithmetic.layer_bias(own, step, half_of, layer.product.transposed) - own, trailing)

    return lift


def _least_scale(lowering: Lowering, input: Quantized, bias: Tensor | None, residual: Quantized | None) -> Tensor | None:
    """Return the lower limit of the weight's scales, or None: bias and residual leave the sum room, and a sum's step has its least size."""
    scales = []
    if bias is not None:
        scales.append(grids.least_scale_for_bias(bias, input.scale, grids.bias_limit(input.dtype, lowering.weight.dtype)))
    if residual is not None and not requantizes_residuals(lowering):
        limit = (accumulator_limit(lowering) + 1) // 2
        scales.append(grids.least_scale_for_residual(residual.scale, residual.grid.magnitude, input.scale, limit))
    if lowering.arithmetic.float32_steps and lowering.output is not None and lowering.output.dtype == INT32:
        # The chip raises the step of such a sum to 2^-23; on a raised scale the weight is rounded for the step that it has there.
        scales.append((grids.FLOAT32_EPSILON * (1 + 2.0**-20) / input.scale.detach().double()).float())
    return functools.reduce(torch.maximum, scales) if scales else None


def _narrowed(lowering: Lowering, input: Quantized, weight: QuantizedWeight, bias: Tensor | None) -> tuple[Quantized, int]:
    """Return the operand and its magnitude: on a scale 2^n larger where int16 sums could exceed the limit, by the least n that fits."""
    bits = input.dtype.bits

    def fits(n: int) -> bool:
        bias_q = None if bias is None else lowering.arithmetic.bias(bias.detach(), input.scale * 2.0**n, weight.scale)
        return float(accumulator_bound(weight.integers, bias_q, 0, 2 ** (bits - 1 - n)).max()) <= accumulator_limit(lowering)

    n = 0 if bits <= 8 else lowering.once("narrowed", lambda: next(filter(fits, range(MOST_NARROWED)), MOST_NARROWED))
    if n == 0:
        return input, input.grid.magnitude
    lowering.note("narrowed", f"its operand is narrowed by {n} of its {bits} bits, so that the sum fits the accumulator")
    value = lowering.call(elementwise.shift_right, input.value, n)
    return Quantized(value, Grid(input.dtype, input.scale * 2.0**n), input.shape), 2 ** (bits - 1 - n)


class _Live(NamedTuple):
    """Sums without a bias, with the correction and bias that follow from the statistics of their batch."""

    sums: Tensor
    correction: Tensor
    bias: Tensor
    statistics: fused_layers.Collected | None


def _live(layer: LayerSum, batch_norm: BatchNorm, gain: Tensor, bias: Tensor | None) -> _Live:
    """Return the sums without a bias, and the statistics of this batch as a factor of the sums' scale and a bias.

    `bias` is the layer's. A channel whose weights are all 0, or whose scale was raised, does not depend on the statistics.
    """
    lowering, weight = layer.lowering, layer.weight
    if not bool(torch.isfinite(weight.scale).all()):  # before any statistics move
        raise lowering.not_finite()
    sums = _narrow(lowering.computed(layer.accumulate(lowering.prove(layer.bound(None), "the sum", layer.limit), None)))
    axis = sums.dim() - 1 - layer.product.trailing
    count = sums.numel() // sums.shape[axis]
    check_statistics(lowering, count)
    one = weight.scale.numel() == 1
    alive = torch.ones_like(weight.own) if one else weight.total > 0
    usable = weight.own & alive & (weight.scale > SMALLEST_SCALE)
    statistics: fused_layers.Collected | None = None
    form = form_of(sums, layer.product.trailing) if fused_layers.plain(sums, dtypes=(torch.float32, torch.float64)) else None
    if form is None:
        dims = [d for d in range(sums.dim()) if d != axis]
        variance, mean = torch.var_mean(sums, dims, correction=0)
    else:
        statistics = fused_layers.collected(sums, form)
        sums, variance, mean = statistics.sums, statistics.variance, statistics.mean
    step = layer.input.scale * weight.scale
    return _Live(sums, *correct_batch(batch_norm, gain, bias, mean.float(), variance.float(), count, step, usable), statistics)


def _narrow(sums: Tensor) -> Tensor:
    """Convert float64 sums to float32 if it represents every sum exactly (half the memory, faster kernels); else return them unchanged."""
    if sums.dtype != torch.float64:
        return sums
    low, high = grids.ends_of(sums)
    return sums.float() if max(-low, high) < FLOAT32_EXACT else sums


def check_statistics(lowering: Lowering, values: int) -> None:
    """Raise ConfigurationError for so few values of each channel that they have no variance."""
    if values < 2:
        what = f"the batch norm of %{lowering.name} cannot use the statistics of this batch"
        because = f"the batch has {values} value{'' if values == 1 else 's'} for each channel, and fewer than 2 have no variance"
        remedy = "train with a larger batch (drop_last=True in a DataLoader), or call fxq.freeze(prepared, scales=False) first"
        raise ConfigurationError(what, **lowering.place, because=because, remedy=remedy)


def _bias_integers(lowering: Lowering, bias: Tensor, input_scale: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest integers to b / (s_x · s), float64, gradients straight through."""
    exact = lowering.arithmetic.bias(bias.detach(), input_scale, scale)
    return straight_through(bias / (input_scale * scale), exact) if bias.requires_grad else exact


def _finished(
    layer: LayerSum, accumulator: Any, end: Epilogue, residual: Quantized | None, factor: ResidualFactor | None, bias: Tensor | None = None,
    statistics: fused_layers.Collected | None = None,
) -> Quantized:  # fmt: skip
    """Add the bias, unless the sum has it, and the residual, in the accumulator if it has a factor; requantize and clamp."""
    lowering, trailing = layer.lowering, layer.product.trailing
    if residual is not None and factor is None:
        inner = replace(end, clamp=None, to=lowering.intermediate, role="intermediate_")
        return lower_add(lowering, lowering.complete(accumulator, inner, bias, statistics=statistics), residual, clamp=end.clamp)
    shaped = None
    if factor is not None:
        multiplier = lowering.constant("residual_multiplier", per_channel(factor.multiplier, trailing), layer.integer_dtype)
        shaped = ResidualFactor(multiplier)
        if factor.right_shift is not None:
            shift = lowering.constant("residual_right_shift", per_channel(factor.right_shift, trailing), torch.int32)
            shaped = ResidualFactor(multiplier, shift)
    return lowering.complete(accumulator, end, bias, residual, shaped, statistics)


def sizes(value: Any, rank: int) -> list[int]:
    """Return one integer per dimension."""
    values = [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]
    return values * rank if len(values) == 1 else values


def rescaled(
    arguments: dict[str, Any], inputs: Tensor, outputs: Tensor, arrange: Callable[[Tensor, int], Tensor] = lambda weight, groups: weight
) -> dict[str, Any]:
    """Return the parameters of a layer whose operand's channels were multiplied by `inputs`, and whose result's are to be by `outputs`.

    `arrange` makes its weight (out, in/groups, …), and undoes itself. Where a batch norm is fused, it takes the factors of the result.
    """
    groups = arguments.get("groups", 1)
    rows = arrange(arguments["weight"], groups)
    trailing = [1] * (rows.dim() - 2)
    read = inputs.reshape(groups, 1, -1).expand(-1, len(rows) // groups, -1).reshape(*rows.shape[:2], *trailing)
    batch_norm = arguments.get("batch_norm")
    if batch_norm is not None:
        return {"weight": arrange(rows / read, groups), "batch_norm": multiplied(batch_norm, outputs)}
    weight = arrange(rows * (outputs.reshape(-1, 1, *trailing) / read), groups)
    bias = arguments.get("bias")
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias * outputs}


def refuses_weighted(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Return why a layer cannot be integer: its weight or bias is computed; None if neither is."""
    for name in ("weight", "bias"):
        value = arguments[name]
        if isinstance(value, fx.Node) and not is_parameter(value):
            return f"its {name} is computed by %{value.name} from more than parameters"
    return None


# ---- Slopes below zero as integers in steps of 2^-7, for targets that multiply by such -------------------------------
LARGEST_DIFFERENCE = 127  # of one and a slope, in its steps, where what is added is a byte


def shifts_of(slopes: Tensor, bits: int, added: bool) -> tuple[Tensor, Tensor]:
    """Return (A, n), int64: A = round_half_even(slope · 2^n), with n = `bits`, or bits - 1 if `added` and 2^n - A does not fit a byte."""
    shift = torch.full_like(slopes, bits, dtype=torch.int64)
    if added:
        shift = torch.where(2.0**bits - torch.round(slopes.double() * 2.0**bits) > LARGEST_DIFFERENCE, bits - 1, shift)
    return torch.round(slopes.double() * power_of_two(shift)).to(torch.int64), shift


def by_whole_slope(lowering: Lowering, input: Quantized, slopes: Tensor, clamp: Clamp | None, added: bool) -> Any:
    """Compute q where q ≥ 0, else ⌊q · A / 2^n + ½⌋, then on the output's grid.

    Where the target has `added` a byte to q, the result is at most q + 127.
    """
    whole, shift = shifts_of(slopes, lowering.arithmetic.slope_bits, added)
    lowering.describe("slope", power_of_two(-shift).float().flatten(), -slopes.dim() if slopes.dim() else None)
    slope = lowering.constant("slope", whole, torch.int32)
    multiplied = lowering.call(elementwise.multiply, input.value, slope, False)
    steeper = whole > torch.ones_like(shift) << shift
    if added and bool(steeper.any()):  # what is added to q is negative there, and its halves are rounded away from 0
        half_step = lowering.constant("half_step", -steeper.to(torch.int64), torch.int32)
        multiplied = lowering.call(elementwise.add_constant, multiplied, half_step)
    unit = Ratio((torch.ones((), dtype=torch.float32, device=slopes.device),), (power_of_two(shift),))
    grid = input.grid
    below = lowering.arithmetic.requantize(lowering, multiplied, unit, *grid.bounds, grid, "negative_")
    if added and bool((whole <= 0).any()):
        most = lowering.constant("most", torch.tensor(LARGEST_DIFFERENCE, device=slopes.device), torch.int32)
        raised = lowering.call(elementwise.add_constant, lowering.call(elementwise.widen, input.value), most)
        one = Ratio((torch.ones((), dtype=torch.float32, device=slopes.device),))
        limit = lowering.arithmetic.requantize(lowering, raised, one, *grid.bounds, grid, "limit_")
        below = lowering.call(product.minimum, below, limit)
    zero = lowering.constant("zero", torch.zeros((), dtype=torch.float32, device=slopes.device), torch.int8)
    chosen = lowering.call(choose, input.value, below, lowering.call(compare, input.value, zero, "ge"))
    to = lowering.output
    moved = lowering.rescale(Quantized(chosen, grid, input.shape), to, "")
    if clamp is None or clamp == (None, None) or lowering.bounds(clamp, to) == to.grid.bounds:
        return moved
    return lowering.holds(lowering.call(elementwise.clamp, moved, *lowering.bounds(clamp, to)), to.grid)


def shape_of(value: Any) -> tuple[Size, ...] | None:
    """Return the shape of an argument: a parameter's own, or the traced one; None if it is not a tensor."""
    if isinstance(value, fx.Node) and value.op == "get_attr" and value.graph.owning_module is not None:
        parameter = resolve(value.graph.owning_module, str(value.target))
        return tuple(parameter.shape) if isinstance(parameter, Tensor) else None
    value_fact = fact(value) if isinstance(value, fx.Node) else None
    return value_fact.shape if isinstance(value_fact, TensorFact) else None


# ---- Functions of parameters that passes and remedies compute: a graph may call them, and a file may name them -------
def folded_weight(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> Tensor:
    """Return the weight of a layer with its batch norm, of running statistics, multiplied in; `axis` has its output channels."""
    return fold(weight.transpose(0, axis), bias, batch_norm, 0)[0].transpose(0, axis)


def folded_bias(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> Tensor:
    """Return a layer's bias (C,), multiplied by the factors (C,)."""
    return fold(weight.transpose(0, axis), bias, batch_norm, 0)[1]


def multiplied_weight(weight: Tensor, factors: Tensor) -> Tensor:
    """Return a layer's weight (C, …), with output channel c multiplied by element c of the factors (C,)."""
    return weight * factors.reshape(-1, *[1] * (weight.dim() - 1))


def multiplied_bias(bias: Tensor, factors: Tensor) -> Tensor:
    """Return the bias beside that weight."""
    return bias * factors.reshape(-1)


def increased_bias(bias: Tensor | None, terms: Tensor, times: float) -> Tensor:
    """Return a layer's bias (C,), or 0 where it has none, plus `times` · the C elements of the terms."""
    added = terms.reshape(-1) * times
    return added if bias is None else bias + added


def multiplied_inputs(weight: Tensor, factors: Tensor) -> Tensor:
    """Return a linear layer's weight (N, C), with input channel c multiplied by element c of the factors (C,)."""
    return weight * factors


def bias_of_inputs(bias: Tensor | None, weight: Tensor, terms: Tensor) -> Tensor:
    """Return a linear layer's bias (N,), or 0 where it has none, plus its products with the terms (C,) of its input channels."""
    added = weight @ terms
    return added if bias is None else bias + added


def spread(weight: Tensor, dilation: list[int]) -> Tensor:
    """Return a kernel with zeros between its taps, whose convolution without dilation equals that of `weight` with `dilation`."""
    sizes = [(taps - 1) * step + 1 for taps, step in zip(weight.shape[2:], dilation, strict=True)]
    result = weight.new_zeros((*weight.shape[:2], *sizes))
    places = (slice(None), slice(None), *(slice(None, None, step) for step in dilation))
    result[places] = weight
    return result


def channel_weight(like: Tensor, factor: float) -> Tensor:
    """Return the weight (C, 1, 1, 1) of a depthwise 1×1 convolution, all `factor`, with C elements of `like`."""
    return torch.full((like.numel(), 1, 1, 1), factor, dtype=like.dtype, device=like.device)


OF_PARAMETERS = (
    *(folded_weight, folded_bias, multiplied_weight, multiplied_bias, increased_bias),
    *(multiplied_inputs, bias_of_inputs, spread, channel_weight),
)
