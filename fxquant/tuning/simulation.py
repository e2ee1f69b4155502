"""A prepared model in float in which only chosen tensors and weights are rounded, without preparing it again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxquant.analysis.recording import still
from fxquant.ir.graph import by_name
from fxquant.ir.model import autocast_off
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES, Grid, round_up_to_power_of_two
from fxquant.numerics.rounding import Nearest
from fxquant.prepared.operators import QuantizedOperator
from fxquant.quantization.batch_norm import running_gain
from fxquant.quantization.observers import Observer, gathering
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import ActivationConfig
from fxquant.quantization.state import State
from fxquant.quantization.weights import WeightQuantizer
from fxquant.tuning.choices import WEIGHT, Choice, Choices, is_real
from fxquant.tuning.real import weight_of

Way = str | Grid  # in which a choice is rounded: to a dtype with its observer's scale, or a tensor to this grid


class Simulation:
    """The float model of a prepared one, with chosen tensors and weights rounded as their integers would be.

    What else the integer model does is left out: sums are those of floats, and what only moves or joins values rounds none of them.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices, self.prepared = choices, choices.prepared
        self._grids: dict[QuantizedOperator, Grid] = {}
        self._weights: dict[QuantizedOperator, str] = {}
        self.observe: Any = None  # called with the choice's name and its values: see `watched`

    @contextmanager
    def running(self) -> Iterator[Simulation]:
        """Inside, the model runs in float, and nothing of it changes by that."""
        handles = []
        for choice in self.choices.values():
            for operator in choice.operators:
                if choice.kind == WEIGHT:
                    handles.append(operator.register_forward_pre_hook(self._rounded_weight(choice), with_kwargs=True))
                else:
                    handles.append(operator.register_forward_hook(self._rounded(choice)))
        try:
            with still(self.prepared, State.FLOAT), autocast_off():
                yield self
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def rounded(self, ways: Mapping[str, Way]) -> Iterator[None]:
        """Inside, the choices of these names are rounded, each in its way."""
        for name, way in ways.items():
            choice = self.choices[name]
            for operator in choice.operators:
                if choice.kind == WEIGHT:
                    assert isinstance(way, str)
                    self._weights[operator] = way
                else:
                    self._grids[operator] = grid_for(operator.output, way) if isinstance(way, str) else way
        try:
            yield
        finally:
            self._grids.clear()
            self._weights.clear()

    def outputs(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the floating-point outputs of the model."""
        return real_outputs(self.prepared(**by_name(self.prepared, inputs)))

    def _rounded(self, choice: Choice) -> Any:
        def hook(module: QuantizedOperator, _: Any, result: Tensor) -> Tensor:
            if self.observe is not None:
                result = self.observe(choice, result)
            grid = self._grids.get(module)
            return result if grid is None or not is_real(result) else grid.dequantize(grid.quantize(result))

        return hook

    def _rounded_weight(self, choice: Choice) -> Any:
        def hook(module: QuantizedOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            dtype = self._weights.get(module)
            if dtype is None and self.observe is None:
                return None
            arguments = module.operator.bind_call(args, kwargs)
            name = weight_name(module, arguments)
            if self.observe is not None:
                value = self.observe(choice, arguments[name], arguments)
            else:
                assert dtype is not None
                value = rounded_weight(module, arguments, dtype)
            names = list(module.operator.parameter_names)[: len(args)]
            return tuple(value if known == name else arg for known, arg in zip(names, args, strict=True)), {
                key: value if key == name else held for key, held in kwargs.items()
            }

        return hook


def real_outputs(result: Any) -> list[Tensor]:
    """Return the floating-point tensors among a model's outputs."""
    return [value for value in pytree.tree_leaves(result) if is_real(value)]


# ---- grids and weights ---------------------------------------------------------------------------------------------------


def grid_for(quantizer: Quantizer, dtype: str, config: ActivationConfig | None = None) -> Grid:
    """Return the grid that a calibrated quantizer would have in a dtype, and with a config's observer in place of its own."""
    kind = ACTIVATION_TYPES[dtype]
    if config is None and kind == quantizer.dtype:
        return quantizer.grid
    observer = quantizer.observer if config is None else taking_over(quantizer, config)
    assert observer is not None
    observer = quantizer.chooser(observer)
    if kind.affine:
        scale, zero_point = quantizer.affine_grid(*observer.interval(kind), kind)
        return Grid(kind, scale, int(zero_point))
    scale = quantizer.scale_by(observer, kind)
    return Grid(kind, round_up_to_power_of_two(scale) if quantizer.power_of_two else scale)


def taking_over(quantizer: Quantizer, config: ActivationConfig) -> Observer | None:
    """Return a config's observer with what calibration has gathered in the quantizer; None where nothing gathered in its way."""
    observer = config.new_observer()
    way = gathering(observer)
    for known in quantizer.observers:
        if known is not quantizer.range and way is not None and gathering(known) == way:
            buffers = dict(known.named_buffers())
            if buffers.keys() == dict(observer.named_buffers()).keys():
                for name, buffer in observer.named_buffers():
                    buffer.copy_(buffers[name])
                return observer
    return None


def weight_name(operator: QuantizedOperator, arguments: Mapping[str, Any]) -> str:
    """Return the parameter of an operator that its weight is."""
    return "weight" if "weight" in arguments else "other"


@torch.no_grad()
def rounded_weight(operator: QuantizedOperator, arguments: Mapping[str, Any], dtype: str) -> Tensor:
    """Round the weight, as the operator reads it, to integers of a dtype with the scales of its config, and dequantize it."""
    name = weight_name(operator, arguments)
    if operator.factors is None or not operator.factors.active:
        return _rounded(operator, arguments, name, dtype)
    acting = operator.factors.of(operator.operator, dict(arguments))
    ones = operator.factors.of(operator.operator, {**arguments, name: torch.ones_like(arguments[name])})
    rounded: Tensor = _rounded(operator, acting, name, dtype) / ones[name]  # factors are powers of two
    return rounded


def _rounded(operator: QuantizedOperator, arguments: Mapping[str, Any], name: str, dtype: str) -> Tensor:
    """Round and dequantize a weight to which its factors are applied."""
    weight = arguments[name]
    places = torch.arange(weight.numel(), device=weight.device).reshape(weight.shape)
    arranged, where = weight_of(operator, arguments), weight_of(operator, {**arguments, name: places})
    assert arranged is not None
    assert where is not None
    batch_norm = arguments.get("batch_norm")
    gain = None if batch_norm is None else running_gain(batch_norm)
    shape = (-1, *[1] * (arranged.dim() - 1))
    folded = arranged if gain is None else arranged * gain.reshape(shape)
    own = operator.weight_quantizer
    quantizer = own if dtype == own.dtype.name else _of_dtype(own, dtype)
    found = quantizer.integers(folded, gain)
    real: Tensor = found.integers * found.scale.reshape(shape)
    if gain is not None:
        safe = torch.where(gain == 0, torch.ones_like(gain), gain).reshape(shape)
        real = torch.where(gain.reshape(shape) == 0, arranged, real / safe)
    result: Tensor = weight.detach().flatten().clone()
    result[where.flatten()] = real.flatten()
    shaped: Tensor = result.reshape(weight.shape)
    return shaped


def _of_dtype(own: WeightQuantizer, dtype: str) -> WeightQuantizer:
    """Return a copy of a weight quantizer for another dtype, without what was learned."""
    found = copy.deepcopy(own)
    found.dtype, found.learned, found.rounding = WEIGHT_TYPES[dtype], None, Nearest()
    return found
