"""A kit's models: the integers of a program, computed by its target's arithmetic or a variant of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, fx

from fxquant.api import convert, load
from fxquant.conformance import manifest
from fxquant.conformance.manifest import Array, Kit, ProbeProgram
from fxquant.errors import ExportError
from fxquant.target import Target

UNKNOWN = np.iinfo(np.int64).min  # for a value that is not an integer
SLACK = 1e-3, 2.0**-22  # tolerance of a quotient from its integer, absolute and relative: float32 keeps 24 bits


def model_of(kit: Kit, program: ProbeProgram) -> fx.GraphModule:
    """Return the prepared model of a program. Raises ExportError if the kit is damaged."""
    found: fx.GraphModule = load(kit.file(f"{manifest.MODELS}/{program.name}.fxq"))
    return found


def kit_images(kit: Kit) -> list[Tensor]:
    """Return the inputs of every program, each a batch of one. Raises ExportError if the kit is damaged."""
    path = kit.file(f"{manifest.BOARD}/{manifest.INPUTS}")
    try:
        whole = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ExportError(f"{path} cannot be read", because=str(error), remedy="write the kit again") from error
    return [torch.from_numpy(image[None]) for image in whole]


def computed(prepared: fx.GraphModule, target: Target, images: list[Tensor], steps: Mapping[int, Array]) -> dict[int, Array]:
    """Compute the integers of outputs, by index, with a target's arithmetic; the prepared model is left unchanged."""
    before = prepared.meta["target"]
    prepared.meta["target"] = target
    try:
        integer = convert(prepared, kernels="reference")
    finally:
        prepared.meta["target"] = before
    results = [integer(image) for image in images]
    return {index: integers(torch.cat([result[index] for result in results]).numpy(), step) for index, step in steps.items()}


def integers(value: Array, step: Array) -> Array:
    """Return a runtime's output as int64: integers unchanged, float values divided by the step; UNKNOWN unless a multiple of it."""
    if value.dtype.kind in "iu":
        return value.astype(np.int64)
    with np.errstate(all="ignore"):
        quotient = value.astype(np.float64) / step
        nearest = np.rint(quotient)
        absolute, relative = SLACK
        right = np.isfinite(quotient) & (np.abs(quotient - nearest) <= absolute + relative * np.abs(nearest))
        return np.where(right, np.where(right, nearest, 0).astype(np.int64), UNKNOWN)
