"""Chosen tensors and weights of a prepared model rounded, without preparing it again."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fxquant.accuracy.choices import WEIGHT, Choice
from fxquant.accuracy.measure import is_real
from fxquant.accuracy.walk import weight_of
from fxquant.numerics.grids import ACTIVATION_TYPES, WEIGHT_TYPES, Grid, round_up_to_power_of_two
from fxquant.numerics.rounding import Nearest
from fxquant.prepared.operators import QuantizedOperator
from fxquant.prepared.undo import Snapshot
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.histogram import gathering
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import ActivationConfig
from fxquant.quantization.weights import running_gain

Way = str | Grid  # in which a choice is rounded: to a dtype with its observer's scale, or a tensor to this grid
Result = Callable[[Choice, Tensor], Any]  # what a tensor becomes
Weight = Callable[[Choice, QuantizedOperator, dict[str, Any]], Tensor]  # what a weight becomes, given the arguments of the call


@contextmanager
def changed(choices: Iterable[Choice], result: Result, weight: Weight) -> Iterator[None]:
    """Inside the context, replace the results of the operators of `choices` by `result(...)`, and their weights by `weight(...)`."""

    def of_weight(choice: Choice) -> Any:
        def hook(module: QuantizedOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            arguments = module.operator.bind_call(args, kwargs)
            name, value = weight_name(module, arguments), weight(choice, module, arguments)
            names = list(module.operator.parameter_names)[: len(args)]
            return tuple(value if each == name else arg for each, arg in zip(names, args, strict=True)), {
                key: value if key == name else arg for key, arg in kwargs.items()
            }

        return hook

    pairs = [(choice, operator) for choice in choices for operator in choice.operators]
    with Snapshot([operator for _, operator in pairs], always=True):  # without the hooks
        for choice, operator in pairs:
            if choice.kind == WEIGHT:
                operator.register_forward_pre_hook(of_weight(choice), with_kwargs=True)
            else:
                operator.register_forward_hook(lambda module, read, value, choice=choice: result(choice, value))
        yield


def rounded(choices: Mapping[str, Choice], ways: Mapping[str, Way]) -> AbstractContextManager[None]:
    """Return a context in which only the choices of these names are rounded (quantized and dequantized), in float.

    Other roundings of the integer model are left out: sums are float, and operators that only move values do not requantize.
    """
    grids = {
        name: grid_for(choices[name].operators[0].output, way) if isinstance(way, str) else way
        for name, way in ways.items()
        if choices[name].kind != WEIGHT
    }

    def on_grid(choice: Choice, value: Any) -> Any:
        grid = grids[choice.name]
        return grid.dequantize(grid.quantize(value)) if is_real(value) else value

    def of_dtype(choice: Choice, operator: QuantizedOperator, arguments: dict[str, Any]) -> Tensor:
        dtype = ways[choice.name]
        assert isinstance(dtype, str)
        return rounded_weight(operator, arguments, dtype)

    return changed([choices[name] for name in ways], on_grid, of_dtype)


def grid_for(quantizer: Quantizer, dtype: str, config: ActivationConfig | None = None) -> Grid:
    """Return the grid (dtype, scale, zero point) of a calibrated quantizer in another dtype, or with a config's observer."""
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
    """Return a config's observer with the quantizer's calibration statistics; None if the quantizer has no statistics of that kind."""
    observer = config.new_observer()
    way = gathering(observer)
    for source in quantizer.observers:
        if source is not quantizer.range and way is not None and gathering(source) == way:
            buffers = dict(source.named_buffers())
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
    weight: Tensor = arguments[name]
    places = torch.arange(weight.numel(), device=weight.device).reshape(weight.shape)
    arranged, where = weight_of(operator, arguments), weight_of(operator, {**arguments, name: places})
    assert arranged is not None
    assert where is not None
    batch_norm = arguments.get("batch_norm")
    gain = None if batch_norm is None else running_gain(batch_norm)
    shape = (-1, *[1] * (arranged.dim() - 1))
    quantizer = operator.weight_quantizer
    if dtype != quantizer.dtype.name:  # a copy, without what was learned
        quantizer = copy.deepcopy(quantizer)
        quantizer.dtype, quantizer.learned, quantizer.rounding = WEIGHT_TYPES[dtype], None, Nearest()
    quantized = quantizer.integers(arranged if gain is None else arranged * gain.reshape(shape), gain)
    real: Tensor = quantized.integers * quantized.scale.reshape(shape)
    if gain is not None:
        safe = torch.where(gain == 0, torch.ones_like(gain), gain).reshape(shape)
        real = torch.where(gain.reshape(shape) == 0, arranged, real / safe)
    result: Tensor = weight.detach().flatten().clone()
    result[where.flatten()] = real.flatten()
    return result.reshape(weight.shape)
