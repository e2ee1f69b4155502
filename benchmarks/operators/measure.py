"""One call form through the whole compiler: what becomes of its nodes, and whether the contract holds."""

import logging
import math
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxquant as fxq
from benchmarks.fuzz import check
from benchmarks.operators.spelling import Spelling
from benchmarks.shared import at_most
from fxquant import backends
from fxquant.analysis.layers import left_in_float
from fxquant.errors import FxQuantError

INTEGER, FLOAT, REFUSED, CRASH, WRONG, RANDOM = "integer", "float", "refused", "crash", "wrong", "random"
KINDS = (INTEGER, FLOAT, REFUSED, CRASH, WRONG)
NONE, WHOLE, ALL = "none", "whole", "all"  # which are exported: none, those without float operators, or all
DECIDED = "decided"  # none, and nothing is run: what becomes integer is known once a model is prepared
COUNTS = (4, 3)  # batch sizes: the first is the example's
SECONDS = 120  # for one call form


@dataclass(frozen=True)
class Result:
    """The outcome of a call form on a target.

    kind     "integer": every node is; "float": some are not, and the contract holds; "refused": an FxQuantError; "crash": any other error;
             "wrong": the contract is broken, or the result is not that of the float model
    reasons  of nodes that stay in float; of an error, what it says
    place    where it ended, if it did not come to an end: "prepare", "calibrate", "convert", or a check of the contract
    sqnr     10·log10 of the power of the float model's result over that of the error, in dB, over all float results
    agreeing of integer and boolean results, the share of equal elements; None if there are none
    nodes    the operators in the prepared model, and of these those in float
    operators  the names of the records that became integer: operators, and what composites were written
    seconds  that it took
    """

    name: str
    target: str
    dtype: str
    kind: str
    reasons: tuple[str, ...] = ()
    place: str = ""
    sqnr: float = math.inf
    agreeing: float | None = None
    nodes: tuple[int, int] = (0, 0)
    operators: tuple[str, ...] = ()
    seconds: float = 0.0


def qconfig_of(target: str, dtype: str) -> fxq.QConfig:
    """Activations of this dtype, and weights as wide where the target has them; int8 on a processor is its own uint8."""
    record = backends.get(target)
    activation = record.default_activation if dtype == "int8" else dtype
    return fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig(dtype if dtype in record.weights else "int8"))


def has(target: str, dtype: str) -> bool:
    """Whether the target has activations of this dtype."""
    return dtype in backends.get(target).activations


Wanted = tuple[Spelling, str, str]  # what is tried: a call form, on a target, in a dtype


def several(entries: Sequence[Wanted], onnx: str) -> list[Result]:
    """The results of several call forms, on one thread: what a process of a pool runs."""
    return [timed(spelling, target, dtype, onnx) for spelling, target, dtype in entries]


def timed(spelling: Spelling, target: str, dtype: str, onnx: str) -> Result:
    """Return the result of one call form, on one thread, with the seconds that it took."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    return replace(measure(spelling, target, dtype, onnx), seconds=time.perf_counter() - started)


class Broken(Exception):
    """A check of the contract does not hold."""


def measure(spelling: Spelling, target: str, dtype: str, onnx: str = WHOLE) -> Result:
    """Return the result of one call form; an error of any kind is a result. `onnx` says which ones are exported."""
    logging.getLogger("fxquant").setLevel(logging.ERROR)
    place = ["prepare"]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            with at_most(SECONDS):
                return _measure(spelling, target, dtype, onnx, place)
        except Broken as error:
            return Result(spelling.name, target, dtype, WRONG, (str(error),), place[0])
        except FxQuantError as error:
            return Result(spelling.name, target, dtype, REFUSED, (_line(str(error)),), place[0])
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            return Result(spelling.name, target, dtype, CRASH, (f"{type(error).__name__}: {_line(str(error))} ({where})",), place[0])


def _measure(spelling: Spelling, target: str, dtype: str, onnx: str, place: list[str]) -> Result:
    model = spelling.model()
    batches = [spelling.batch(count, seed) for seed, count in enumerate(COUNTS if not spelling.fixed else COUNTS[:1] * 2)]
    samples = [*batches, spelling.batch(COUNTS[0], 10, 1.2)]
    place[0] = "the float model"
    with torch.no_grad():
        expected = [model(*_copied(batch)) for batch in batches]
    place[0] = "prepare"
    prepared = fxq.prepare(
        model, batches[0], target, qconfig_of(target, dtype), options=fxq.Options(dynamic_shapes={} if spelling.fixed else None)
    )
    layers = fxq.inspect.layers(prepared)
    operators = [layer for layer in layers if not layer.boundary]
    floats = left_in_float(layers)
    used = sorted({name for layer in operators if layer.integer for name in (layer.operator, layer.part.partition(":")[0]) if name})
    if onnx == DECIDED:
        kind = FLOAT if floats else INTEGER
        reasons = tuple(dict.fromkeys(f"{layer.operator}: {layer.reason}" for layer in floats))
        return Result(spelling.name, target, dtype, kind, reasons, nodes=(len(operators), len(floats)), operators=tuple(used))
    place[0] = "calibrate"
    fxq.calibrate(prepared, samples, show_progress=False)
    place[0] = "convert"
    integer = fxq.convert(prepared)
    place[0] = "the result"
    exported = onnx == ALL or (onnx == WHOLE and not floats)
    sqnr, agreeing = (math.inf, None) if spelling.row.random else _compared(prepared, batches, expected)
    if not spelling.row.random:
        _hold(model, prepared, integer, batches, place, exported, not floats)
    elif exported:
        place[0] = "export"
        with tempfile.TemporaryDirectory() as folder:
            fxq.export_onnx(integer, Path(folder) / "model.onnx", style="exact")
    kind = FLOAT if floats else INTEGER
    reasons = tuple(dict.fromkeys(f"{layer.operator}: {layer.reason}" for layer in floats))
    if sqnr < spelling.row.least and dtype != "int4":
        return Result(spelling.name, target, dtype, WRONG, (f"the result has {sqnr:.1f} dB", *reasons), "the result", sqnr, agreeing)
    return Result(spelling.name, target, dtype, kind, reasons, "", sqnr, agreeing, (len(operators), len(floats)), tuple(used))


def _hold(
    model: nn.Module, prepared: fx.GraphModule, integer: fx.GraphModule, batches: Sequence[Any], place: list[str], onnx: bool, whole: bool
) -> None:
    """The contract: E2, E4, E1, finite gradients, and E3, which leaves the model frozen."""
    names = ["validate_is_integer", "every_tensor_is_integer", "accumulators_fit"]
    for name in [*names, *(["integer_is_onnx", "results_of_onnx"] if onnx else []), "gradients_are_finite", "train_is_validate"]:
        place[0] = name
        try:
            if name == "gradients_are_finite":
                gradients_are_finite(prepared, batches[0])
            else:
                with torch.set_grad_enabled(whole):  # PyTorch computes some float operators in another way where gradients are recorded
                    check.CHECKS[name](model, prepared, integer, batches)
        except AssertionError as error:
            raise Broken(f"{name}: {_line(str(error)) or 'the bits differ'}") from error


def gradients_are_finite(prepared: fx.GraphModule, batch: Sequence[Tensor]) -> None:
    """In TRAIN, what the result's gradient becomes at the inputs and parameters is finite."""
    fxq.set_state(prepared, fxq.State.TRAIN)
    try:
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in batch]
        results = [y for y in tree_leaves(prepared(*inputs)) if isinstance(y, Tensor) and y.requires_grad]
        try:
            torch.autograd.backward([(y.real if y.is_complex() else y).float().sum() for y in results])
        except RuntimeError as error:
            if not any(text in str(error) for text in ("derivative for", "is not differentiable")):  # of which PyTorch has none
                raise
        values = [*inputs, *prepared.parameters()]
        assert all(bool(torch.isfinite(x.grad).all()) for x in values if x.grad is not None), "a gradient is not finite"
    finally:
        prepared.zero_grad()
        fxq.set_state(prepared, fxq.State.VALIDATE)


def _compared(prepared: fx.GraphModule, batches: Sequence[Any], expected: Sequence[Any]) -> tuple[float, float | None]:
    """The ratio of signal to noise, and the share of equal integers. Raises Broken where shapes or dtypes are others."""
    signal = noise = 0.0
    equal = total = 0
    for batch, reference in zip(batches, expected, strict=True):
        with torch.no_grad():
            results = tree_leaves(prepared(*_copied(batch)))
        wants = tree_leaves(reference)
        if len(results) != len(wants):
            raise Broken(f"{len(results)} results, and the float model has {len(wants)}")
        for one, other in zip(wants, results, strict=True):
            if not isinstance(one, Tensor):
                if one != other:
                    raise Broken(f"the result {other!r} is {one!r} in the float model")
                continue
            if one.shape != other.shape or one.dtype != other.dtype:
                raise Broken(f"a result is {other.dtype} {tuple(other.shape)}; in the float model {one.dtype} {tuple(one.shape)}")
            if one.is_floating_point() or one.is_complex():
                real = torch.isfinite(one)
                if not bool(torch.isfinite(other[real]).all()):
                    raise Broken("a result is not finite where that of the float model is")
                signal += float(one[real].to(torch.complex128).abs().square().sum())
                noise += float((one[real].to(torch.complex128) - other[real]).abs().square().sum())
            else:
                equal, total = equal + int((one == other).sum()), total + one.numel()
    return (10 * math.log10(signal / noise) if signal and noise else math.inf), (equal / total if total else None)


def _copied(batch: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in batch]


def _line(text: str) -> str:
    """The first line, and why, in one."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    because = next((line for line in lines[1:] if line.startswith("because")), "")
    return " – ".join(part for part in (lines[0], because) if part)[:300]
