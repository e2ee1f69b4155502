"""Scales that training learns: the methods, with their parameters and gradients, and the step of training that integers on a scale take."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fxquant.numerics.grids import SMALLEST_SCALE, Grid, IntType
from fxquant.numerics.rounding import Transformable

Parameters = tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """The operands of the backward pass of quantization: values v with scale s were rounded to integers q."""

    gradient: Tensor  # the gradient of the dequantized values, of v's shape
    real: Tensor  # v / s
    integers: Tensor  # q; centred on an affine grid
    inside: Tensor  # the inverse saturation mask, bool of v's shape: true where v is inside the grid
    scale: Tensor  # s, which broadcasts against v
    base: Tensor  # the scale that training started from, of the shape of the trained parameters
    # The ratio of a weight's scale to the trained scale, of the shape of the trained parameters; 0 where the scale was replaced.
    factor: Tensor | None
    low: int  # low, high: the limits of q
    high: int

    def summed(self, values: Tensor) -> Tensor:
        """Sum the values that share a scale; the result has the shape of `base`."""
        return values.sum_to_size(self.scale.shape).reshape(self.base.shape)

    def of_logarithm(self) -> Tensor:
        """Compute s · ∂L/∂s, the gradient of log s, which is dimensionless; that of a weight's scale is multiplied by `proportion`.

        ∂L/∂s is the sum of gradient · (q - v/s) inside the grid, and of gradient · q outside.
        """
        gradient = self.summed(self.gradient * (self.integers - self.real * self.inside)) * self.scale.reshape(self.base.shape)
        return gradient if self.factor is None else gradient * self.factor.square() * self.proportion()

    def proportion(self) -> Tensor:
        """Compute the factor with which a weight's scale and its values change in proportion: 1 / (|v| · s · e).

        e is the root mean square of q - v/s inside the grid and q outside, at least that of rounding, sqrt(1/12). A gradient g that is
        independent of the rounding errors has s · ∂L/∂s ≈ |g| · s · e. So a step that changes the weight by |g| / |v| of it changes the
        scale by as much. v is the weight with its batch norm; in terms of the trained weight the factor is multiplied by `factor` squared.
        """
        error = self.integers - self.real * self.inside
        squares = self.summed(error.square()).clamp_min(self.real.numel() / self.base.numel() / 12)
        size = self.summed(self.real.square()).clamp_min(1.0)  # a weight of zeros has no gradient
        step = self.scale.reshape(self.base.shape)
        return ((self.real.numel() / self.base.numel()) / (size * squares)).sqrt() / step.square()


class Method:
    """A method that learns a scale.

    name          its name as a value of `training=`
    parameters    the names of its parameters, each of the scale's shape
    power_of_two  whether the scale is rounded up to a power of two
    moves_end     whether the lowest float value of an affine grid is learned, too
    """

    name: str
    parameters: tuple[str, ...]
    power_of_two = False
    moves_end = False

    def start(self, base: Tensor, reach: float) -> Parameters:
        """Return the parameters that give this scale, on a grid whose largest |integer| is `reach`. By default: 0."""
        return tuple(torch.zeros_like(base) for _ in self.parameters)

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        """Return the current scale, which is positive, for the one that training started from."""
        raise NotImplementedError

    def gradients(self, step: Step) -> Parameters:
        """Return the gradients of the parameters."""
        raise NotImplementedError

    def end(self, base: Tensor, end: Tensor, parameters: Parameters) -> Tensor:
        """Return the current lowest float value, for the scale and the lowest float value at the start."""
        raise NotImplementedError

    def __reduce__(self) -> str:
        """Return the name of the one instance, which copies and files hold by it."""
        return next(name for name, value in globals().items() if value is self)


class _LSQ(Method):
    """Learned step size quantization.

    Esser, McKinstry, Bablani, Appuswamy, Modha: Learned Step Size Quantization, ICLR 2020, section 2. For a real
    number v on a scale s, with q = clip(round(v / s), low, high) and v̂ = q · s:

        ∂v̂/∂v = 1 where low ≤ v/s ≤ high, 0 elsewhere
        ∂v̂/∂s = q - v/s where low ≤ v/s ≤ high, q elsewhere

    summed over the numbers that share s. On an affine grid q and the limits are centred, and the zero point is held.

    What is trained is `scale_change`, 0 at first:

        scale = base · (1 + scale_change) where scale_change ≥ 0,   base / (1 - scale_change) where scale_change < 0

    It is positive whatever an optimizer does, and has no unit: scales of 0.001 and of 10 train alike. Its gradient is s · ∂L/∂s, of a
    weight multiplied by `Step.proportion`; weight decay pulls it to the calibrated scale.

    The paper trains s itself, and multiplies its gradient by 1 / sqrt(n · high), so that scales and weights move in proportion. But with
    that factor the scales of a 4-bit U-Net moved ten thousand times less than its weights did, an int16 scale grew fivefold in four steps,
    and a layer of few 8-bit weights has a scale that moves a hundred times faster than they do, since a clipped one counts for high = 127
    steps. And n counts the batch, so that gradients accumulated over parts of a batch, or over processes, were not those of the whole.
    """

    name = "learned"
    parameters: tuple[str, ...] = ("scale_change",)

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        change = parameters[0]
        return torch.where(change < 0, base / (1 + change.abs()), base * (1 + change)).clamp_min(SMALLEST_SCALE)

    def gradients(self, step: Step) -> Parameters:
        return (step.of_logarithm(),)


class _LSQPlus(_LSQ):
    """LSQ+: the scale and the offset of an affine grid are learned.

    Bhalgat, Lee, Nagel, Blankevoort, Kwak: LSQ+, improving low-bit quantization through learnable offsets and better initialization, CVPR
    Workshops 2020, section 3. The lowest integer stands for the float value β; with v/s inside the grid, and q from 0 to `STEPS`:

        ∂v̂/∂s = round(v/s) - v/s inside, q elsewhere          ∂v̂/∂β = 0 inside, 1 elsewhere

    The zero point is round(-β / s), an integer of the dtype, so that 0 is exact, as integer arithmetic requires; the paper allows any β.
    `offset_change` starts at 0, and is a fraction of the interval that the grid covered at the start: β is its value at the start plus
    that fraction. So both parameters are dimensionless.
    """

    name = "lsq+"
    parameters: tuple[str, ...] = ("scale_change", "offset_change")
    moves_end = True

    def end(self, base: Tensor, end: Tensor, parameters: Parameters) -> Tensor:
        return end + parameters[1] * base * STEPS

    def gradients(self, step: Step) -> Parameters:
        stored = step.integers - step.low  # as the zero point is part of β
        of_scale = step.summed(step.gradient * torch.where(step.inside, step.integers - step.real, stored))
        return of_scale * step.scale.reshape(step.base.shape), step.summed(step.gradient * ~step.inside) * step.base * STEPS


class _PACT(Method):
    """The value at which an activation is clipped is learned.

    Choi, Wang, Venkataramani, Chuang, Srinivasan, Gopalakrishnan: PACT, parameterized clipping activation for quantized neural networks,
    2018, section 3. v is clipped at α, which the largest integer stands for (of a symmetric grid, the smallest stands for -α):

        ∂v̂/∂v = 1 inside, 0 elsewhere     ∂v̂/∂α = 0 inside, q / reach elsewhere: 1 above, and, where the grid has a lower half, -1 below

    α itself is trained, in the unit of the tensor: weight decay, which the paper uses with the weights' strength, pulls it to 0. Its
    gradient is the plain sum.
    """

    name = "pact"
    parameters: tuple[str, ...] = ("alpha",)

    def start(self, base: Tensor, reach: float) -> Parameters:
        return (base * reach,)

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        return (parameters[0] / reach).clamp_min(SMALLEST_SCALE)

    def gradients(self, step: Step) -> Parameters:
        return (step.summed(step.gradient * step.integers * ~step.inside) / max(step.high, -step.low),)


class _TQT(Method):
    """Scales are powers of two, and the threshold that they are rounded up from is learned.

    Jain, Gural, Wu, Dick: Trained Quantization Thresholds for accurate and efficient fixed-point inference, MLSys 2020, section 3.
    With a threshold t, s = 2^ceil(log2 t) / 2^(bits - 1), and rounding up passed straight through:

        ∂v̂/∂(log2 t) = s · ln 2 · (q - v/s inside, q elsewhere)

    What is trained is `log2_change`, 0 at first: the logarithm of the threshold minus that of the one that training started from. The
    paper trains it with Adam, whose steps do not depend on the gradient's size; for other optimizers' sake a weight's is multiplied by
    `Step.proportion`, as LSQ's is.
    """

    name = "tqt"
    parameters: tuple[str, ...] = ("log2_change",)
    power_of_two = True

    def scale(self, base: Tensor, parameters: Parameters, reach: float) -> Tensor:
        # an exponent overflows where a factor does not
        return (base * torch.exp2(parameters[0])).clamp(SMALLEST_SCALE, 1 / SMALLEST_SCALE)

    def gradients(self, step: Step) -> Parameters:
        return (step.of_logarithm() * math.log(2),)


STEPS = 255  # of the one affine dtype, uint8
LSQ, LSQ_PLUS, PACT, TQT = _LSQ(), _LSQPlus(), _PACT(), _TQT()
METHODS: Mapping[str, Method] = {method.name: method for method in (LSQ, LSQ_PLUS, PACT, TQT)}  # by what `training=` calls them

Fact = TypeVar("Fact")


class Remembered(Generic[Fact]):
    """A fact that follows from buffers. It is computed again once a buffer was replaced or written on, by whatever code.

    Reading a value of a buffer can wait for a device; looking at its version does not.
    Buffers that one of torch.func's transforms has wrapped, or that are on the meta device, have no value to read: the fact is the last
    one that was computed, or `unknown`.
    """

    def __init__(self, unknown: Fact) -> None:
        self._unknown = unknown
        self._seen: tuple[tuple[Tensor, int], ...] | None = None
        self._fact = unknown

    def get(self, compute: Callable[[], Fact], *buffers: Tensor) -> Fact:
        """Return the fact that `compute` returns for these buffers."""
        if (seen := self._seen) is not None and len(seen) == len(buffers):
            for (old, version), buffer in zip(seen, buffers, strict=True):
                if old is not buffer or version != buffer._version:
                    break
            else:
                return self._fact
        if any(buffer.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(buffer) for buffer in buffers):
            return self._fact
        if any(buffer.is_inference() for buffer in buffers):  # these have no version
            return compute()
        self._fact = compute()
        self._seen = tuple((buffer, buffer._version) for buffer in buffers)
        return self._fact

    def __reduce__(self) -> tuple[Any, ...]:
        return Remembered, (self._unknown,)


class TrainableScale(nn.Module):
    """A scale that may be learned.

    base_scale   float32 buffer of shape () or (C,); the scale that training starts from, NaN before calibration
    stopped      int8 buffer, 0 or 1: whether the scale is constant, `frozen` or `given`. As a buffer it is copied with a model's
                 state; int8, since averages of models subtract buffers, which bool does not support
    method       the method that learns it; None: it is not learned. The method's parameters are registered at this module
    """

    base_scale: Tensor
    stopped: Tensor

    derived = ("stopped",)  # buffers that follow from other facts
    given = False  # whether the scale was given rather than found

    def __init__(self, base_scale: Tensor, method: Method | None) -> None:
        super().__init__()
        self._stopped = Remembered(False)
        self.method = method
        self.register_buffer("base_scale", base_scale)
        self.register_buffer("stopped", torch.zeros((), dtype=torch.int8, device="cpu"))
        if method is not None:
            for name, value in zip(method.parameters, method.start(base_scale, 1.0), strict=True):
                self.register_parameter(name, nn.Parameter(value))

    @property
    def reach(self) -> float:
        """The largest magnitude of an integer on the scale."""
        return 1.0

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained parameters by name, or their substitutes while FSDP holds them; empty where nothing is learned."""
        return {} if self.method is None else {name: getattr(self, name) for name in self.method.parameters}

    @property
    def frozen(self) -> bool:
        """Whether the scale was stopped."""
        return self._stopped.get(lambda: bool(self.stopped), self._buffers["stopped"]) and not self.given  # type: ignore[arg-type]

    @frozen.setter
    def frozen(self, value: bool) -> None:
        with torch.no_grad():
            self.stopped.fill_(value or self.given)

    @property
    def learns(self) -> bool:
        """Whether gradients reach the scale."""
        return self.method is not None and not self.frozen and any(parameter.requires_grad for parameter in self.trained.values())

    def current(self, base: Tensor | None = None) -> Tensor:
        """Return the current scale, detached: the method's scale from the trained parameters and `base`, by default `base_scale`."""
        base = self.base_scale if base is None else base
        return base if self.method is None or self.frozen else self.method.scale(base, self._values(), self.reach)

    def _values(self) -> Parameters:
        return tuple(parameter.detach() for parameter in self.trained.values())

    @torch.no_grad()
    def assign(self, scale: Tensor) -> None:
        """Set the scale that training starts from."""
        self.base_scale.copy_(scale)
        if self.method is not None:
            for parameter, value in zip(self.trained.values(), self.method.start(self.base_scale, self.reach), strict=True):
                parameter.copy_(value)

    def stop(self) -> None:
        """Freeze the scale at its current value, also for an optimizer that holds its parameters."""
        self.assign(self.current())
        self.frozen = True
        for parameter in self.trained.values():
            parameter.requires_grad_(False)
            parameter.grad = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a scale whether it was learned or not, here and in the file, by the same method or by another one.

        A scale that was frozen in the file is frozen again. A scale that was set here by hand is kept, unless the file's was frozen.
        """
        base, stopped = prefix + "base_scale", prefix + "stopped"
        saved = method_of(state_dict, prefix)
        if stopped in state_dict:
            moved = not bool(state_dict[stopped])
            if moved and self.given:
                state_dict[base] = self.base_scale.clone()
                _popped(state_dict, prefix, saved)
                saved = None
            if self.frozen != (not moved):
                for parameter in self.trained.values():
                    parameter.requires_grad_(moved)
            self.frozen = not moved and not self.given
            state_dict[stopped] = self.stopped.clone()
        if saved != self.method and base in state_dict:
            if saved is not None:
                values = _popped(state_dict, prefix, saved)
                if not self.frozen:
                    state_dict[base] = saved.scale(state_dict[base], values, self._reach_in(state_dict, prefix))
            if self.method is not None:
                start = self.method.start(state_dict[base].detach(), self._reach_in(state_dict, prefix))
                state_dict.update({prefix + name: value for name, value in zip(self.method.parameters, start, strict=True)})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _reach_in(self, state_dict: Mapping[str, Any], prefix: str) -> float:
        """Return the `reach` of the quantizer in `state_dict`; here the module's own."""
        return self.reach


def method_of(state_dict: Mapping[str, Any], prefix: str) -> Method | None:
    """Return the learning method of the scale under a prefix of a state_dict, by its parameters' names; None if it is not learned."""
    methods = (LSQ_PLUS, LSQ, PACT, TQT)  # one that has the parameters of another, and more, goes first
    return next((method for method in methods if all(prefix + name in state_dict for name in method.parameters)), None)


def _popped(state_dict: dict[str, Any], prefix: str, method: Method | None) -> Parameters:
    """Remove the parameters of a method from a state_dict, and return them."""
    return () if method is None else tuple(state_dict.pop(prefix + name) for name in method.parameters)


class _LearnedStep(Transformable):
    @staticmethod
    def forward(value: Tensor, exact: Tensor, scale: Tensor, base: Tensor, factor: Tensor | None, *how: Any) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.method, ctx.low, ctx.high, *_ = inputs[5:]  # and the method's parameters

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, exact, scale, base, factor = ctx.saved_tensors
        real = value / scale
        inside = (real >= ctx.low) & (real <= ctx.high)
        of_real = gradient / scale  # of the dequantized value
        of_value = (of_real * inside).to(value.dtype) if ctx.needs_input_grad[0] else None
        of_exact = gradient if ctx.needs_input_grad[1] else None
        step = Step(of_real, real, exact, inside, scale, base, factor, ctx.low, ctx.high)
        return of_value, of_exact, *(None,) * 6, *(each.float() for each in ctx.method.gradients(step))


def learned_step(
    value: Tensor, exact: Tensor, scale: Tensor, trained: TrainableScale, limits: IntType | Grid, factor: Tensor | None = None
) -> Tensor:
    """Return `exact`, the integers of `value` / `scale`, with the method's gradients to `value` and to the trained parameters.

    `scale` broadcasts against `value` and equals the trained scale times `factor`, element by element. Where `factor` is 0 the scale was
    replaced, and the trained one has no gradient.
    If `exact` requires a gradient itself, for instance for a learned rounding, it gets the gradient of the result.
    """
    result: Tensor = _LearnedStep.call(
        value, exact, scale, trained.base_scale.clone(), factor, trained.method, limits.low, limits.high, *trained.trained.values()
    )
    return result
