"""The operators of a prepared model."""

import functools
import math
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fxquant.errors import CalibrationError
from fxquant.ir import loops
from fxquant.ir.functional import stopped
from fxquant.ir.graph import batch_norm_path, is_parameter, module_path, noise, parameter_value
from fxquant.ir.model import autocast_off, no_program_of_prepared
from fxquant.lowering.eager import EagerLowering, FusedLowering, Mode
from fxquant.lowering.lowering import Quantized, cannot_be_integers, first_not_finite, limited, named_parameters, plainly
from fxquant.numerics.grids import EVERYTHING, Grid, Interval
from fxquant.numerics.rounding import clamped, straight_through
from fxquant.ops import Operator, map_operands
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.quantization.weights import ChannelFactors, WeightQuantizer
from fxquant.training import fused_layers

# Of float tensors that operators return: their integers, the grid of these, and the version of the tensor that they are of. They are not
# attributes of the tensors, which would be saved with them.
_CARRIED: MutableMapping[Tensor, tuple[Tensor, Grid, int]] = WeakTensorKeyDictionary()
Lowered = TypeVar("Lowered", bound=EagerLowering)
Inputs = Mapping[str, Any]  # a Quantizer, a list of them, or None for a constant


@dataclass(frozen=True)
class Quantizers:
    """The quantizers of an operator, as `QuantizedOperator` describes them."""

    inputs: Inputs
    output: Quantizer | None
    owns_output: bool  # whether the quantizer of the result is the operator's own, and not that of another one
    intermediate: Quantizer | None
    weight: WeightQuantizer
    factors: ChannelFactors | None = None
    observed: Interval = EVERYTHING


class QuantizedOperator(nn.Module):
    """One operator of a prepared model. It reads and returns float tensors in every state.

    In FLOAT and CALIBRATE it computes the operator's float function. In TRAIN and VALIDATE it quantizes its
    operands, computes the operator's integer function, and returns the dequantized result;
    so neighbours may be in different states.

    output        the quantizer of its result, shared with the operators that must share its scale
    plain         whether its result is a bool or int64 tensor, without a quantizer; it differs between states only if it is computed
                  from quantized operands
    intermediate  the quantizer of the layer's result before a fused residual is added, for targets that cannot add it in the accumulator
    weight_quantizer  computes the integers of its weight, and of its constants
    factors       the powers of two of its channels, from equalization; None if its record has no `layer`
    left_out      whether the current calibration or tuning method must not change this operator
    detached      whether it is computed without gradients, or the names of its arguments that have none
    observed      an interval to which results are clamped before they are observed: readers do not distinguish values beyond it
    inputs        the quantizers of its operands, by parameter name. They are registered at the operators that compute the
                  operands, and only referred to here.
    owners        the user's modules whose `training` flag it obeys, besides its own flag, not registered here: the called module, and
                  the batch norm; None for the model itself
    noise         the user's module that draws noise for its result in train mode, not registered here; None if there is none
    """

    owners: tuple[nn.Module | None, nn.Module | None] = (None, None)
    noise: tuple[nn.Module | None] = (None,)
    detached: bool | tuple[str, ...] = ()

    def __init__(
        self, name: str, operator: Operator, arithmetic: Arithmetic, quantizers: Quantizers, *, live_batch_norm: bool, path: str = "",
        detached: bool | tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.path, self.operator, self.arithmetic = name, path, operator, arithmetic
        self.inputs, self.owns_output, self.observed = dict(quantizers.inputs), quantizers.owns_output, quantizers.observed
        if quantizers.owns_output and quantizers.output is not None:
            self.quantizer = quantizers.output
        self._shared = (quantizers.output,)  # a tuple hides the module from registration, so that it is registered once
        self.intermediate = quantizers.intermediate
        self.weight_quantizer = quantizers.weight
        self.factors = quantizers.factors
        self.live_batch_norm, self.detached = live_batch_norm, detached
        self._is_impure = operator.function in fx.node._side_effectful_functions  # as torch.fx asks a module
        self.state, self.left_out = State.CALIBRATE, False
        _leave_to_eager()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state_dict; if it holds this operator, first create or remove learned modules of the weight quantizer to match it."""
        if prefix + "quantizer.base_scale" in state_dict:
            self.weight_quantizer.expect_learned(state_dict, prefix + "weight_quantizer.")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def output(self) -> Quantizer:
        """The quantizer of the result; the result must not be `plain` (not a quantized tensor)."""
        output = self._shared[0]
        assert output is not None, f"the result of %{self.name} has no quantizer"
        return output

    @property
    def plain(self) -> bool:
        """Whether the result is not a quantized tensor: booleans, integers, or the float values of a dynamic layer."""
        return self._shared[0] is None

    @property
    def unseen(self) -> bool:
        """Whether a quantizer of its operands or sums is `unseen`, so that its weight's learned scale is initialized at every call."""
        return any(quantizer is not None and quantizer.unseen for quantizer in (*self._shared, self.intermediate))

    @property
    def is_training(self) -> bool:
        """Whether statistics follow the batches and dropout drops: in TRAIN, while it and the module of its call are in train mode."""
        return self._trains_in(self.owners[0])

    def _trains_in(self, owner: nn.Module | None) -> bool:
        return self.state is State.TRAIN and self.training and (owner is None or owner.training)

    def multiplied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Multiply weight and bias among the arguments of a call by the factors of equalization; return the arguments."""
        if self.factors is None or not self.factors.active:
            return args, kwargs
        arguments = self.factors.of(self.operator, self.operator.bind_call(args, kwargs))
        positional = self.operator.parameter_names[: len(args)]
        return tuple(arguments[name] for name in positional), {name: arguments[name] for name in kwargs}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.detached is True and torch.is_grad_enabled():
            with torch.no_grad():
                return self._computed(args, kwargs)
        if self.detached and torch.is_grad_enabled():
            names = self.operator.parameter_names
            args = tuple(stopped(value) if name in self.detached else value for name, value in zip(names, args, strict=False))  # type: ignore[operator]
            kwargs = {name: stopped(value) if name in self.detached else value for name, value in kwargs.items()}  # type: ignore[operator]
        return self._computed(args, kwargs)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        args, kwargs = self.multiplied(args, kwargs)
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            raise no_program_of_prepared("torch.jit.trace" if torch.jit.is_tracing() else "torch.export")  # type: ignore[attr-defined, no-untyped-call]
        if self.state is State.CALIBRATE:
            return self._calibrate(args, kwargs)
        if self.state is State.FLOAT:
            result: Tensor = self.operator.function(*args, **kwargs)
            return result
        with autocast_off() if torch._C._is_any_autocast_enabled() else nullcontext():
            return self._integer(args, kwargs)

    def _calibrate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.intermediate is not None:
            kwargs = {**kwargs, "before_residual": self.intermediate.observe}
        try:
            value: Tensor = self.operator.function(*args, **kwargs)
            if self.owns_output:
                table = self.operator.layer.table(self.operator.bind_call(args, kwargs))
                low, high = (-math.inf, math.inf) if table is not None else _limits(kwargs.get("clamp"))
                within = self.observed[0] <= low and high <= self.observed[1]
                self.output.observe(value if within else limited(value if table is None else table, self.observed))
                if self.output.follows_sum and not self.output.paused:  # without observers, nothing says so later
                    self.weight_quantizer.forget_learned()
        except CalibrationError as error:
            because = first_not_finite(self._parameters_of(self.operator.bind_call(args, kwargs)))
            if because is None:
                raise
            raise cannot_be_integers(self.name, because, error.at or "", self.path) from None
        return value

    def _parameters_of(self, arguments: dict[str, Any]) -> dict[str, Tensor | None]:
        """Return the tensors among the arguments of a call that are parameters, by their descriptions in errors."""
        named = named_parameters(arguments.get("weight"), arguments.get("bias"), arguments.get("batch_norm"))
        constants = {name for name, quantizer in self.inputs.items() if quantizer is None}
        return named | {f"its constant {name!r}": value for name in constants if isinstance(value := arguments[name], Tensor)}

    def _integer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        observing = self.is_training and self.owns_output
        if not self.plain and not (observing and self.output.follows_training):
            self.output.require()
        lowering = self.lowering(FusedLowering)
        arguments = self.operator.bind_call(args, kwargs)
        lowering.observed_instead = self.operator.layer.table(arguments)
        operands = self._operands(arguments)
        for operand in operands.values() if self.operator.moves else ():
            if isinstance(operand, Quantized):
                lowering.remember(operand)
        result = self.operator.lower(lowering, **operands)
        if isinstance(result, Quantized):
            result = lowering.remembered(result)
            return result.value if self.plain else _carrying(result, result.value is lowering.last_quantized)
        value: Tensor = result
        return value

    def lowering(self, kind: type[Lowered]) -> Lowered:
        """Return the lowering that computes its operator eagerly, in its present state and mode."""
        moving = self.is_training
        mode = Mode(moving, moving and self.owns_output, self._trains_in(self.owners[1]) and self.live_batch_norm)
        lowering = kind(self.name, self.arithmetic, self._shared[0], self.intermediate, self.weight_quantizer, mode)
        lowering.user_module, lowering.noise_module = self.owners[0], self.noise[0] if moving else None
        lowering.shares, lowering.observed_range = not self.owns_output and not self.plain, self.observed
        lowering.keeps_start = lowering.keeps_start and not self.unseen
        return lowering

    def _operands(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with every activation as its integers."""
        used = {name: iter(q if isinstance(q, list) else [q]) for name, q in self.inputs.items()}

        def take(name: str, value: Tensor) -> Quantized | Tensor:
            quantizer = next(used[name])
            if quantizer is None and self.plain and self.operator.moves:
                return plainly(value, tuple(value.shape))
            return value if quantizer is None else take_integers(value, quantizer)

        return map_operands(self.operator, arguments, take)

    def extra_repr(self) -> str:
        return f"{self.operator.name}, {self.state.value}"


@functools.cache
def _leave_to_eager() -> None:
    """Make torch.compile run operators eagerly, and compile only the code around them.

    A compiler that fuses, reorders or contracts float operations would have to be proved exact. It could fuse little, since each
    operator reads its scales. This is not called when the module is imported, since importing PyTorch's compiler takes seconds.
    """
    QuantizedOperator.forward = torch.compiler.disable(QuantizedOperator.forward)  # type: ignore[method-assign, no-untyped-call]
    loops.at_once = torch.compiler.disable(loops.at_once)  # type: ignore[no-untyped-call]


def _carrying(result: Quantized, whole: bool) -> Tensor:
    """Return the dequantized tensor of a result; if `whole`, keep its integers for operators that read it on the same grid."""
    real = result.real()
    if real is result.dequantized and real in _CARRIED:  # the operand's own
        return real.view_as(real)
    if whole and not real.is_inference() and fused_layers.admitted(real, result.value):
        _CARRIED[real] = (result.value, result.grid, real._version)
    return real


def carrying(integers: Tensor, grid: Grid) -> Tensor:
    """Return the float tensor of centred integers on a grid, with the integers for operators that read it on the same grid."""
    return _carrying(Quantized(integers, grid, tuple(integers.shape)), True)


def take_integers(value: Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize a float tensor with a quantizer's scale; exact if the tensor is integers times that scale.

    If its operator kept the integers of this tensor, and the tensor was not written to since, these are returned.
    """
    quantizer.require()
    grid = quantizer.grid
    carried = _CARRIED.get(value)
    if carried is not None and not value.is_inference() and fused_layers.admitted(value):
        integers, carried_grid, version = carried
        if version == value._version and not _watched(value, integers) and carried_grid.equals(grid):
            return Quantized(integers, grid, tuple(value.shape), value)
    wide = grid.low - 0.5, grid.high + 0.5  # so that what was rounded to a limit is inside, whatever the division rounds
    if fused_layers.admitted(value):
        return Quantized(fused_layers.quantized(value, grid, wide), grid, tuple(value.shape))
    with torch.no_grad():
        integers = grid.quantize(value)
    if value.requires_grad and torch.is_grad_enabled():
        integers = straight_through(clamped(value / grid.scale, *wide), integers)
    return Quantized(integers, grid, tuple(value.shape))


def _limits(clamp: Any) -> Interval:
    """Return the limits of a fused clamp; ±∞ where there is none."""
    low, high = (None, None) if clamp is None else clamp
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _watched(value: Tensor, integers: Tensor) -> bool:
    """Return whether this tensor's gradient is retained or read by hooks, and so has to pass through the tensor."""
    if not torch.is_grad_enabled():
        return False
    return value.requires_grad != integers.requires_grad or bool(value._backward_hooks) or (value.requires_grad and value.retains_grad)


def quantized_operators(model: nn.Module) -> dict[str, QuantizedOperator]:
    """Return the quantized operators of a prepared model, by node name, in the order they run."""
    return {module.name: module for module in model.modules() if isinstance(module, QuantizedOperator)}


# ---- What operators of a prepared model refer to: the user's modules that they obey, and the functions that read them ----
#
# `module.eval()` holds for what was computed in that module.
def link(prepared: nn.Module, graph: fx.Graph) -> None:
    """Set for every operator the modules whose `training` flag it obeys (its own, its batch norm) and the module that draws its noise.

    Set for every quantizer `Quantizer.read`, the elementwise functions that read its tensor; () if any reader is not elementwise.
    """
    modules, read = dict(prepared.named_modules(remove_duplicate=False)), dict[Quantizer, list[Any]]()
    for node in graph.find_nodes(op="call_module"):
        operator = modules.get(str(node.target))
        if isinstance(operator, QuantizedOperator):
            arguments = operator.operator.arguments(node)
            batch_norm = arguments.get("batch_norm")
            where = batch_norm_path(node) if "batch_norm" in node.kwargs else module_path(node)  # that of a function
            path = str(batch_norm.target) if isinstance(batch_norm, fx.Node) else where
            operator.owners = _owner(modules, module_path(node)), _owner(modules, path)
            operator.noise = (_owner(modules, noise(node) or ""),)
            values = fx.map_arg(arguments, lambda value: parameter_value(prepared, value) if is_parameter(value) else value)
            function = None if operator.plain else operator.operator.of_element(values)
            for quantizer in operand_quantizers(operator):
                if quantizer is not operator._shared[0]:
                    read.setdefault(quantizer, []).append(function)
    for quantizer, functions in read.items():
        quantizer.read = () if quantizer.is_output or None in functions else tuple(functions)


def followed_by(operator: QuantizedOperator) -> list[Quantizer]:
    """Return the quantizers of an operator's result and sums, whose scales may follow its values in TRAIN; none where it does not train."""
    every = (operator._shared[0] if operator.owns_output else None, operator.intermediate)
    return [each for each in every if each is not None] if operator.is_training else []


def operand_quantizers(operator: QuantizedOperator) -> Iterator[Quantizer]:
    """Yield the quantizers of its operands."""
    for quantizers in operator.inputs.values():
        yield from (each for each in (quantizers if isinstance(quantizers, list) else [quantizers]) if each is not None)


def _owner(modules: dict[str, nn.Module], path: str) -> nn.Module | None:
    """Return the module at a path; None for the model itself, whose flag an operator shares, and where no module exists."""
    return modules.get(path) if path else None
