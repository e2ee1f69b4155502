"""A weight quantizer: the dtype, the scale and the rounding of one weight, with their learned parameters.

    s = max |w| / divisor, or the one with the least Σ |error|^p, or learned   per output channel, or per tensor
    s = s · share, where tuning has chosen to clip the largest weights
    s = max(s, the least scale for bias and residual), rounded up to a power of two if required
    w_q = round(w / s)

An operator has one weight quantizer. A constant operand is quantized in the same way, with a single scale.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxquant.numerics import grids
from fxquant.numerics.grids import SMALLEST_SCALE, WEIGHT_INT8, IntType
from fxquant.numerics.rounding import AdaptiveRounding, Nearest, Rounding, clamped
from fxquant.quantization.learning import LSQ, Method, Remembered, TrainableScale, learned_step
from fxquant.training import fused_layers


class WeightScale(TrainableScale):
    """The learned scale of a layer's weight: one number for each of `channels`, or a single one.

    It is initialized to the scale with the least error, squared unless the config has another p, for the weight at the first batch in
    TRAIN or VALIDATE. Until then, and as long as a weight is 0, its `base_scale` is NaN, and it is computed from the weight at every call,
    so that a forward pass, `convert` and a copy with other parameters agree. A scale per channel is that of the weight without its batch
    norm, which multiplies both. Without a method it is a constant, learned by another model.
    """

    def __init__(self, channels: int, method: Method | None = LSQ) -> None:
        super().__init__(torch.full((channels,), float("nan"), dtype=torch.float32, device="cpu"), method)

    def of(self, weight: Tensor, gain: Tensor | None, dtype: IntType, keep: bool, p: float = 2.0) -> Tensor:
        """Return the scale for this weight, whose channels are dimension 0, times `gain`; float32 of shape (C,) or (1,).

        It starts at the scale with the least Σ |error|^p. `keep` stores that as the scale from which training starts.
        """
        factor, base = self.factor(gain), self.base_scale
        finite = torch.isfinite(base)
        if not bool(finite.all()):
            base = torch.where(finite, base, self._start(weight, factor, ~finite, dtype, p))
            if keep:  # the parameters keep their start values until there is a scale, and a forward pass never writes to them
                live = weight.detach().flatten(1).ne(0).any(1) if base.numel() > 1 else weight.detach().ne(0).any().reshape(1)
                self.base_scale.copy_(torch.where(finite | live, base, self.base_scale))
        return (self.current(base) * factor).clamp_min(SMALLEST_SCALE)

    def _start(self, weight: Tensor, factor: Tensor, missing: Tensor, dtype: IntType, p: float) -> Tensor:
        """Return the initial values of the missing scales; 1 for all others."""
        if self.base_scale.numel() == 1:
            scales = grids.least_error_scale(weight, None, dtype, p=p)
        else:
            scales = torch.ones_like(self.base_scale)
            scales[missing] = grids.least_error_scale(weight.detach()[missing], 0, dtype, p=p)
        return torch.where(factor > 0, scales / factor, scales)

    def factor(self, gain: Tensor | None) -> Tensor:
        """Return the factors of the learned scales, of their shape: the magnitudes of `gain`, or 1."""
        return torch.ones_like(self.base_scale) if gain is None or self.base_scale.numel() == 1 else gain.detach().abs()

    def forget(self) -> None:
        """Set the learned scale to NaN, so that training starts it again from the weight; a frozen scale stays."""
        if not self.frozen:
            self.assign(torch.full_like(self.base_scale, float("nan")))

    def extra_repr(self) -> str:
        return f"channels={self.base_scale.numel()}{', fixed' if self.frozen else ''}"


class _PerChannel(torch.nn.Module):
    def __init__(self, channels: int, buffer: str, start: float) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer(buffer, torch.full((channels,), start, dtype=torch.float32, device="cpu"))

    def extra_repr(self) -> str:
        return f"channels={self.channels}"


class BiasCorrection(_PerChannel):
    """A correction of the bias of an operator's integer form, not of its float form, that compensates for its rounded weight."""

    value: Tensor  # float32 buffer of shape (C,), in the unit of the output

    def __init__(self, channels: int) -> None:
        super().__init__(channels, "value", 0.0)


class Coverage(_PerChannel):
    """The share of a weight's largest magnitude that its scale covers, which tuning chooses.

    share   float32 buffer of shape (C,), one number for each output channel, or (1,): below 1, larger magnitudes are clipped; above 1,
            the largest integers are unused
    """

    share: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels, "share", 1.0)


Parts = tuple[Rounding, Coverage | None, BiasCorrection | None]  # of a weight quantizer, as tuning sets them


class QuantizedWeight(NamedTuple):
    """A weight's integers and their scale."""

    integers: Tensor  # integers in float32, of the weight's shape, with gradients
    scale: Tensor  # float32 of shape (C,), one number for each channel, or (1,)
    own: Tensor  # bool of that shape: whether the scale is that of the weight, and was not raised for the bias or a residual
    total: Tensor  # float64 of shape (C,): Σ |·| of each channel's integers


class WeightQuantizer(torch.nn.Module):
    """Quantizes the weight of one operator, in training and deployment alike.

    dtype         the integers
    per_channel   whether scales are per output channel
    power_of_two  whether scales are rounded up to powers of two
    p             the scale has the least Σ |error|^p for the current weight, and a learned one starts there; None: it covers the
                  weight, and a learned one starts at the least squared error
    pairs         whether scales are at least so large that no pair of products with bytes exceeds 16 bits
    """

    def __init__(
        self, dtype: IntType, *, per_channel: bool = True, power_of_two: bool = False, learned: WeightScale | None = None,
        rounding: Rounding | None = None, p: float | None = None, pairs: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dtype, self.per_channel, self.power_of_two, self.p, self.pairs = dtype, per_channel, power_of_two, p, pairs
        self.learned = learned  # the learned scale; None: the scale follows from the largest magnitude of the current weight
        self.rounding = Nearest() if rounding is None else rounding  # how the weight is rounded to integers
        self.correction: BiasCorrection | None = None  # the correction of the operator's bias; None: nothing is added
        self.coverage: Coverage | None = None  # the factor of the scale, unless it is learned; None: 1

    @property
    def description(self) -> str:
        """A description of the tuned parts; "" if nothing was tuned."""
        parts = {"weight rounded by samples": isinstance(self.rounding, AdaptiveRounding), "bias corrected": self.correction is not None}
        parts["no pair of products beyond 16 bits"] = self.pairs
        return ", ".join(text for text, is_done in parts.items() if is_done)

    def corrected(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias with its correction, of shape (C,); None where there is neither."""
        return bias if self.correction is None else self.correction.value if bias is None else bias + self.correction.value

    def correct(self, correction: BiasCorrection | None) -> None:
        """Set the correction, or remove it."""
        self._have("correction", correction)

    def cover(self, coverage: Coverage | None) -> None:
        """Set the coverage, or remove it."""
        self._have("coverage", coverage)

    @property
    def parts(self) -> Parts:
        """The parts that tuning sets: rounding, coverage and correction."""
        return self.rounding, self.coverage, self.correction

    def put(self, parts: Parts) -> None:
        """Set the rounding, the coverage and the correction."""
        self.rounding = parts[0]
        self.cover(parts[1])
        self.correct(parts[2])

    def _have(self, name: str, part: torch.nn.Module | None) -> None:
        for place in (self.__dict__, self._modules):
            place.pop(name, None)
        setattr(self, name, part)

    @torch.no_grad()
    def forget_correction(self) -> None:
        """Reset the correction to 0."""
        if self.correction is not None:
            self.correction.value.zero_()

    def forget_learned(self) -> None:
        """Start a learned scale again from the weight; one that another model has learned is removed."""
        if self.learned is not None and self.learned.method is None:
            self.learned = None
        elif self.learned is not None:
            self.learned.forget()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state_dict, tuned or not: the rounding, correction and coverage in it are created here, and absent ones are reset."""
        offset = prefix + "rounding.offset"
        if offset in state_dict and type(self.rounding) is Nearest:
            self.rounding = AdaptiveRounding(tuple(state_dict[offset].shape)).to(state_dict[offset].device)
        elif isinstance(self.rounding, AdaptiveRounding):
            state_dict.setdefault(offset, torch.zeros_like(self.rounding.offset))
        for name, buffer, kind in (("correction", "value", BiasCorrection), ("coverage", "share", Coverage)):
            part, key = getattr(self, name), f"{prefix}{name}.{buffer}"
            if key in state_dict and part is None:
                self._have(name, kind(len(state_dict[key])).to(state_dict[key].device))
            elif part is not None:
                state_dict.setdefault(key, getattr(kind(part.channels), buffer))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def expect_learned(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Prepare to load the learned scale of a state_dict of the whole operator; `prefix` is this module's.

        Where the state_dict has none, a learned scale starts again from the weight. A scale that is not learned here stays at the loaded
        value.
        """
        learned = prefix + "learned."
        if learned + "base_scale" in state_dict:
            if self.learned is None:
                base = state_dict[learned + "base_scale"]
                self.learned = WeightScale(base.numel(), None).to(base.device)
        elif self.learned is not None and self.learned.method is None:
            self.learned = None
        elif self.learned is not None and self.learned.method is not None:
            start = torch.full_like(self.learned.base_scale, float("nan"))
            values = zip(self.learned.trained, self.learned.method.start(start, self.learned.reach), strict=True)
            state_dict.update({learned + "base_scale": start, learned + "stopped": torch.zeros((), dtype=torch.int8, device="cpu")})
            state_dict.update({learned + name: parameter for name, parameter in values})

    def integers(
        self, weight: Tensor, gain: Tensor | None = None, least: Tensor | None = None, *, keep: bool = False, by_threshold: bool = False
    ) -> QuantizedWeight:
        """Return the integers of a float weight, whose channels are its dimension 0.

        gain          the factor of a folded batch norm, shape (C,)
        least         the lower bound of the scales, shape (C,) or (): see `numerics.grids.least_scale_for_bias`
        keep          whether a learned scale that has not started yet starts from this weight
        by_threshold  whether scales are a float32 threshold over 127: see `Arithmetic.float32_steps`
        """
        chosen = self._scale(weight, gain, keep)
        chosen = grids.scale_for_pairs(grids.largest_pairs(weight), chosen) if self.pairs else chosen
        scale, own = self._raised(chosen, least, by_threshold)
        integers = self._rounded(weight, scale, own, gain)
        return QuantizedWeight(integers, scale, own, grids.accumulator_bound(integers, None, 0, 1))

    def folded(
        self, weight: Tensor, gain: Tensor | None, least: Tensor | None = None, by_threshold: bool = False
    ) -> QuantizedWeight | None:
        """Return the `integers` of weight · gain by two fused kernels; None if the weight quantizer needs other kernels."""
        simple = self.learned is None and self.p is None and self.coverage is None and type(self.rounding) is Nearest
        if not simple or not fused_layers.admitted(weight, gain) or weight.numel() == 0:
            return None
        largest = fused_layers.largest(weight, gain)
        largest = largest if self.per_channel else largest.max().reshape(1)
        chosen = grids.scale_from_range(-largest, largest, self.dtype)
        if self.pairs:
            chosen = grids.scale_for_pairs(fused_layers.pairs(weight, gain), chosen)
        scale, own = self._raised(chosen, least, by_threshold)
        each = scale if scale.numel() == len(weight) else scale.expand(len(weight))
        integers, total = fused_layers.whole(weight, gain, each, self.dtype.low, self.dtype.high)
        return QuantizedWeight(integers, scale, own, total)

    def _raised(self, chosen: Tensor, least: Tensor | None, by_threshold: bool) -> tuple[Tensor, Tensor]:
        """Return the scales `chosen`, raised to at least `least`, and a boolean tensor: which scales were not raised."""
        raised = chosen if least is None else torch.maximum(chosen, least if chosen.numel() > 1 else least.max())
        scale = grids.round_up_to_power_of_two(raised) if self.power_of_two else raised
        return scale * WEIGHT_INT8.high / WEIGHT_INT8.high if by_threshold else scale, raised == chosen

    def _scale(self, weight: Tensor, gain: Tensor | None, keep: bool) -> Tensor:
        if self.learned is not None:
            return self.learned.of(weight, gain, self.dtype, keep, 2.0 if self.p is None else self.p)
        axis = 0 if self.per_channel else None
        if self.p is not None:
            scale = grids.least_error_scale(weight, axis, self.dtype, p=self.p, power_of_two=self.power_of_two)
        else:
            scale = grids.weight_scale(weight, axis, self.dtype)
        return scale if self.coverage is None else (scale * self.coverage.share).clamp_min(SMALLEST_SCALE)

    def _rounded(self, weight: Tensor, scale: Tensor, own: Tensor, gain: Tensor | None) -> Tensor:
        """Compute round(w / s); a scale that is not the weight's own has no gradient."""
        low, high = self.dtype.low, self.dtype.high
        step = scale.reshape(-1, *[1] * (weight.dim() - 1))
        real = weight / step
        if self.learned is None and self.p is None and self.coverage is None:
            return self.rounding.integers(real, low, high)  # within the range but for a rounding error, which takes no gradient away
        if self.learned is not None and self.learned.learns and torch.is_grad_enabled():
            exact = self.rounding.integers(real.detach().clamp(low, high), low, high)  # clipped first, as without gradients
            factor = self.learned.factor(gain) * own * torch.isfinite(self.learned.base_scale)
            return learned_step(weight, exact, step, self.learned, self.dtype, factor)
        return self.rounding.integers(clamped(real, low, high), low, high)

    def trained(self) -> dict[str, Tensor | None]:
        """Return the trained tensors besides the weight, by a description for error messages."""
        learned = [] if self.learned is None else list(self.learned.trained.values())
        tensors: dict[str, Tensor | None] = {"the learned scale of its weight": learned[0] if learned else None}
        return tensors | {f"the {name} of its weight's rounding": value for name, value in self.rounding.named_parameters()}

    def extra_repr(self) -> str:
        return f"{self.dtype}, {'per channel' if self.per_channel else 'per tensor'}{', power of two' if self.power_of_two else ''}"


# ---- Batch normalisation as a function of weight and bias, in every state and never destructive ----------------------
#
#     y = (conv(x, w) + b - mean) · γ / sqrt(var + ε) + β  =  conv(x, w · g) + (b - mean) · g + β,   g = γ / sqrt(var + ε)
#
# The layer is never divided by γ; a γ of zero is harmless.
class BatchNormTensors(NamedTuple):
    """The tensors of a functional batch norm, with the names of the module's."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float | None
    eps: float
    num_batches_tracked: Tensor | None = None
    track_running_stats: bool = True


BatchNorm = torch.nn.modules.batchnorm._NormBase | BatchNormTensors


def multiplied(batch_norm: BatchNorm, factors: Tensor) -> BatchNorm:
    """Return a batch norm whose result is multiplied by `factors`, one per channel; it has the same tensors as running statistics."""
    bn = BatchNormTensors(*(getattr(batch_norm, name) for name in BatchNormTensors._fields))
    weight = factors if bn.weight is None else bn.weight * factors
    return bn._replace(weight=weight, bias=None if bn.bias is None else bn.bias * factors)


def running_gain(batch_norm: BatchNorm) -> Tensor:
    """g, with the running statistics."""
    assert batch_norm.running_var is not None
    # float32 roots, and torch.rsqrt on GPUs, are not correctly rounded everywhere; a root in float64 and a division are
    gain = torch.reciprocal(torch.sqrt((batch_norm.running_var + batch_norm.eps).double()).float())
    return gain if batch_norm.weight is None else gain * batch_norm.weight


def fold(weight: Tensor, bias: Tensor | None, batch_norm: BatchNorm, axis: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias with the batch norm's running statistics folded in; differentiable. `axis` is that of output channels."""
    gain = running_gain(batch_norm)
    shape = [1] * weight.dim()
    shape[axis] = -1
    return weight * gain.reshape(shape), fold_bias(bias, batch_norm, gain)


def fold_bias(bias: Tensor | None, batch_norm: BatchNorm, gain: Tensor) -> Tensor:
    """Return the bias of the layer that `fold` describes, with its `running_gain`."""
    assert batch_norm.running_mean is not None
    offset = -batch_norm.running_mean if bias is None else bias - batch_norm.running_mean
    folded = offset * gain
    return folded if batch_norm.bias is None else folded + batch_norm.bias


def correct_batch(
    batch_norm: BatchNorm, gain: Tensor, weight_bias: Tensor | None, mean: Tensor, variance: Tensor, count: int, step: Tensor,
    usable: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (c, b), per channel, so that (z + b) · c is normalized by this batch's statistics; update the running ones; differentiable.

    z is the layer's result with the running statistics folded in, without its bias. `mean` and `variance`, float32, are those of z in
    units of `step`, a scalar or one number per channel, over `count` values of each channel:

        (z - mean(z)) · c + β  =  (z + β/c - mean(z)) · c,    c = sqrt((running_var + ε) / (var(z)/g² + ε)),   g = γ / sqrt(running_var + ε)

    g is the `gain`. So the statistics are those of the quantized weights. A channel that is not `usable`, or whose γ is 0, keeps the
    running ones.
    """
    assert batch_norm.running_mean is not None
    assert batch_norm.running_var is not None
    running = batch_norm.running_var + batch_norm.eps
    usable = usable & (gain != 0)
    unit = step / torch.where(usable, gain, 1)  # of the layer before its batch norm
    of_batch = variance * unit.square()
    correction = torch.where(usable, torch.sqrt(running / (of_batch + batch_norm.eps)), 1)
    beta = torch.zeros_like(running) if batch_norm.bias is None else batch_norm.bias
    offset = -batch_norm.running_mean if weight_bias is None else weight_bias - batch_norm.running_mean
    bias = torch.where(usable, beta / correction - mean * step, offset * gain + beta)
    center = mean * unit if weight_bias is None else mean * unit + weight_bias
    _update_running(batch_norm, center.detach(), of_batch.detach(), count, usable)
    return correction, bias


@torch.no_grad()
def _update_running(batch_norm: BatchNorm, mean: Tensor, variance: Tensor, count: int, usable: Tensor) -> None:
    if not batch_norm.track_running_stats or batch_norm.running_mean is None or batch_norm.running_var is None:
        return
    if batch_norm.num_batches_tracked is not None:
        batch_norm.num_batches_tracked.add_(1)
    momentum = batch_norm.momentum
    if momentum is None:
        momentum = 1.0 / float(batch_norm.num_batches_tracked) if batch_norm.num_batches_tracked is not None else 0.0
    unbiased = variance * (count / max(count - 1, 1))
    for running, observed in ((batch_norm.running_mean, mean), (batch_norm.running_var, unbiased)):
        if not running.requires_grad:  # what is trained does not follow the batches
            running.add_((observed - running) * momentum * usable)


# ---- Channel factors: powers of two that channels of a prepared model are multiplied by, and divided by where they are read
LARGEST_EXPONENT = 16  # of either sign


class ChannelFactors(nn.Module):
    """The powers of two by which one operator's input and output channels are multiplied.

    W'[o, i] = W[o, i] · 2^(outputs[o] - inputs[i]),   b'[o] = b[o] · 2^outputs[o]

    The parameters stay those of the float model, whose function keeps its bits unless a number leaves the range of float32.
    """

    inputs: Tensor  # int8 buffer of shape (input channels,): the operand is the float model's times 2^inputs
    outputs: Tensor  # int8 buffer of shape (output channels,): the result is the float model's times 2^outputs

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._active = Remembered(False)
        self.register_buffer("inputs", torch.zeros(inputs, dtype=torch.int8, device="cpu"))
        self.register_buffer("outputs", torch.zeros(outputs, dtype=torch.int8, device="cpu"))

    @property
    def active(self) -> bool:
        """Whether any factor is not 1."""
        return self._active.get(lambda: bool(self.inputs.any()) or bool(self.outputs.any()), self.inputs, self.outputs)

    @property
    def description(self) -> str:
        """The number of multiplied output channels and the range of factors, in words; "" if there are none."""
        if not self.active or not (count := int(self.outputs.count_nonzero())):
            return ""
        return f"equalized: {count} of {len(self.outputs)} channels times 2^{int(self.outputs.min())} to 2^{int(self.outputs.max())}"

    @torch.no_grad()
    def assign(self, inputs: Tensor, outputs: Tensor) -> None:
        """Set the exponents."""
        self.inputs.copy_(inputs)
        self.outputs.copy_(outputs)

    def of(self, operator: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of an operator (its record), with its parameters multiplied by the factors."""
        if not self.active:
            return arguments
        inputs, outputs = (grids.power_of_two(exponents.to(torch.int64)).float() for exponents in (self.inputs, self.outputs))
        return {**arguments, **operator.layer.rescaled(arguments, inputs, outputs)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state_dict; one without factors is that of a model that has none."""
        for name, own in (("inputs", self.inputs), ("outputs", self.outputs)):
            state_dict.setdefault(prefix + name, torch.zeros_like(own))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{len(self.inputs)} → {len(self.outputs)}"
