"""The check that an ONNX model of float operators computes what PyTorch does; translation between opsets may change the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.errors import ExportError
from fxquant.ir.facts import BATCH_SIZES, BatchDim, TensorFact

LARGEST = 1e-3  # relative to the largest value of an output: float32 sums in another order differ by some millionths of it


def apart(found: Tensor, wanted: Tensor) -> float:
    """Return the difference of two results relative to the largest expected value; infinity if shape or dtype differ."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else float("inf")
    if wanted.numel() == 0:
        return 0.0
    largest = wanted.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return (found.double() - wanted.double()).nan_to_num(0.0).abs().max().item() / max(largest, 1e-30)


def agrees(model: onnx.ModelProto, part: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether onnxruntime computes what a module of tensors does, on random inputs of these facts, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    given = [random_value(known, generator) for known in inputs]
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    names = [info.name for info in model.graph.input]
    try:
        with torch.no_grad():
            results = part(*given)
        wanted = [value for value in (results if isinstance(results, tuple | list) else [results]) if isinstance(value, Tensor)]
        feeds = dict(zip(names, (torch.as_tensor(value) for value in given), strict=True))
        _, level, threads = RUNTIMES[0]
        found = list(Runner(copied, level, threads)(feeds).values())
    except (ExportError, ValueError):
        return False
    return len(found) == len(wanted) and all(apart(one, other) <= LARGEST for one, other in zip(found, wanted, strict=True))


def random_value(known: Any, generator: torch.Generator) -> Any:
    """Return a random tensor of this fact: normal values, integers 0 or 1; for a size, the integer itself."""
    if not isinstance(known, TensorFact):
        return known.at(BATCH_SIZES[0]) if isinstance(known, BatchDim) else int(known)
    size = known.at(BATCH_SIZES[0])
    if not known.dtype.is_floating_point:
        return torch.randint(0, 2, size, generator=generator, device="cpu").to(known.dtype)
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(known.dtype)
