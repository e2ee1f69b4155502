"""Read, set and freeze the scales of a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.calibration.calibration import owned_quantizers, require_prepared, select, update_scales
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import argument_name, source
from fxquant.numerics.grids import is_scale
from fxquant.ops import Trait
from fxquant.ops.core.boundary import QUANTIZE
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.support.arguments import FLAG, Kind, checked
from fxquant.target import Target

INTERMEDIATE = ".intermediate"  # after an operator's name: the tensor that its residual is added to


def _scales(value: Any) -> dict[str, tuple[float, int | None]]:
    """Return names with scales, and with zero points where they are given; whether the values are valid is checked later, by name."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise TypeError
    return {name: _scale(scale) for name, scale in value.items()}


def _scale(value: Any) -> tuple[float, int | None]:
    if isinstance(value, tuple):
        scale, zero_point = value
        return _scale(scale)[0], index(zero_point)
    if isinstance(value, str | bytes | bool):
        raise TypeError
    return float(value), None


@checked()
def qparams(prepared: nn.Module) -> dict[str, float | tuple[float, int]]:
    """Return the scale of every operator's output by node name, NaN where it is not known yet, or is that of a 32-bit sum.

    For a uint8 output this is a pair: the scale and the zero point.

    Where a residual is fused into an operator, the tensor that it is added to has a scale too, "name.intermediate", for when it cannot
    be added in the accumulator.
    """
    require_prepared(prepared)
    grids = {name: quantizer.grid for name, quantizer in _by_name(quantized_operators(prepared)).items()}
    return {name: (float(grid.scale), grid.zero_point) if grid.type.affine else float(grid.scale) for name, grid in grids.items()}


def _by_name(operators: Mapping[str, QuantizedOperator]) -> dict[str, Quantizer]:
    """Return the quantizers of outputs, and of the tensors that residuals are added to, by their names in `qparams`."""
    found: dict[str, Quantizer] = {}
    for name, operator in operators.items():
        if not operator.plain:
            found[name] = operator.output
        if operator.intermediate is not None:
            found[name + INTERMEDIATE] = operator.intermediate
    return found


@checked(scales=Kind("a dict of scales, positive and finite numbers, by module path or node name", _scales))
def set_qparams(prepared: nn.Module, scales: Mapping[str, float | tuple[float, int]]) -> None:
    """Fix scales by module path or by the names of `qparams`; they no longer follow any observation.

    A pair is a scale and a zero point, as `qparams` returns for a uint8 output; with a scale alone the zero point is unchanged.

    Only the named tensors are fixed: where a residual is fused into an operator, the tensor that it is added to keeps its own statistics.

    Raises ConfigurationError, and changes nothing, if a name matches no operator or a scale is not positive and finite.
    """
    require_prepared(prepared)
    operators = quantized_operators(prepared)
    named = _by_name(operators)
    given: Mapping[str, tuple[float, int | None]] = scales  # type: ignore[assignment]  # as `_scales` has made them
    chosen: list[tuple[str, Quantizer, tuple[float, int | None]]] = []
    for name, (scale, zero_point) in given.items():
        what = f"the scale {scale} for {name!r} is not usable"
        if not 0 < scale < float("inf"):
            raise ConfigurationError(what, because="a scale is a positive, finite number", remedy="pass a positive scale")
        if not is_scale(float(scale)):
            because = "a scale is a float32 number, which lies between 2^-126 (1.2e-38) and 3.4e38"
            raise ConfigurationError(what, because=because, remedy="pass a scale that is of the size of the tensor's values")
        if name.endswith(INTERMEDIATE) and name in named:
            chosen.append((name, named[name], (scale, zero_point)))
            continue
        for operator in select(operators, [name]):
            if operator.plain:
                kind = "float" if Trait.DYNAMIC in operator.operator.traits else "boolean or integer"
                because = f"the result of %{operator.name} is {kind}, which has no scale"
                raise ConfigurationError(f"the scale of {name!r} cannot be set", because=because, remedy="leave it out")
            if operator.output.follows_sum:
                raise ConfigurationError(
                    f"the scale of {name!r} cannot be set",
                    because=f"%{operator.name} has a 32-bit output, whose scale is that of its weight and its input",
                    remedy="give it an int8 or int16 output, or leave it out",
                )
            chosen.append((name, operator.output, (scale, zero_point)))
    for name, quantizer, (_, zero_point) in chosen:
        dtype = quantizer.dtype
        if zero_point is not None and not (dtype.affine and dtype.low <= zero_point <= dtype.high):
            raise ConfigurationError(
                f"the zero point {zero_point} for {name!r} is not usable",
                because=f"%{quantizer.name} is {dtype}" + (f", {dtype.low} to {dtype.high}" if dtype.affine else ", which is symmetric"),
                remedy="pass one of these" if dtype.affine else "pass its scale alone",
            )
    for _, quantizer, (scale, zero_point) in chosen:
        quantizer.set_scale(scale, zero_point)


@checked(scales=FLAG, batch_norm=FLAG)
def freeze(prepared: nn.Module, *, scales: bool = True, batch_norm: bool = True) -> None:
    """Freeze scales, followed or learned, and running statistics, which besides the model's parameters change in training.

    Afterwards TRAIN in train mode computes exactly what VALIDATE does, dropout aside. Scales that are frozen stay so through
    `state_dict`; which statistics are frozen is not a part of it.
    """
    require_prepared(prepared)
    for operator in quantized_operators(prepared).values():
        if batch_norm:
            operator.live_batch_norm = False
        if scales:
            if operator.state is State.CALIBRATE:
                update_scales(operator)
            for quantizer in owned_quantizers(operator):
                quantizer.freeze()
            if operator.weight_quantizer.learned is not None:
                operator.weight_quantizer.learned.stop()


logger = logging.getLogger("fxquant")

LOST = 0.5  # the share of an input's values that are not 0, and become 0
WIDE = "int16"


def warn_of_lost_inputs(prepared: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Warn of each input of a calibrated model of which one batch loses at least half of its values, with the line that reads it."""
    target: Target = prepared.meta["target"]
    placeholders = {node.name: value for node, value in zip(prepared.graph.find_nodes(op="placeholder"), inputs, strict=False)}
    for node, operator, share in lost(prepared, placeholders):
        readers = list(node.users)
        line = next((text for reader in readers if (text := source(reader))), "")
        logger.warning(
            "%.0f %% of the values of input %s that are not 0 become 0 at its scale of %.4g%s: its few large values set the scale; %s, or"
            " give the model its logarithm or its root; fxq.compare shows what this costs",
            100 * share,
            argument_name(node.all_input_nodes[0]),
            float(operator.output.scale),
            f", read in {line}" if line else "",
            _finer(operator, target),
        )


def _finer(operator: QuantizedOperator, target: Target) -> str:
    if operator.output.dtype.name == WIDE:
        return f"{WIDE} is too coarse for it: leave what reads it in float"
    if WIDE not in target.activations:
        return f"{target.name} has no {WIDE} to round it more finely"
    return f"where it is read, QConfig(input=ActivationConfig({WIDE!r})) rounds it more finely"


def lost(prepared: fx.GraphModule, inputs: Mapping[str, object], least: float = LOST) -> Iterator[tuple[fx.Node, QuantizedOperator, float]]:
    """Yield the nodes and operators that quantize inputs, with the share of values lost there, where that is at least so large."""
    operators = quantized_operators(prepared)
    for node in prepared.graph.nodes:
        operator = operators.get(node.name) if node.op == "call_module" else None
        read = node.all_input_nodes
        if operator is None or operator.operator is not QUANTIZE or not read or not isinstance(value := inputs.get(read[0].name), Tensor):
            continue
        scale = operator.output.scale
        if not value.is_floating_point() or scale.numel() != 1 or not bool(torch.isfinite(scale)):
            continue
        real = value.detach()
        nonzero = int((real != 0).sum())
        if nonzero > 1 and (share := int((real != 0).sum() - (torch.round(real / scale.to(real.device)) != 0).sum()) / nonzero) >= least:
            yield node, operator, share
