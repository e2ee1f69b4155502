"""Recorded vectors: what the vendor's program gives, beside what the integer graph is derived from, for the suite to compare.

One file for each march and dtype holds, for rows of one network, the scales of all tensors and elements of each output, as integers;
`weights.npz` the parameters of the rows, and `images.npz` the inputs. A network is built from these alone.
"""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

import fxquant as fxq
from benchmarks.silicon import tool
from fxquant.conformance.kit import SCALES, TOGETHER, Together, compile_model, converted, images, mapping_of, output_steps, probe_target
from fxquant.conformance.rows import ROWS, Row

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "silicon"
TIES = ".ties"  # after the name of a file whose scales are powers of two, at which many results lie halfway between integers
ELEMENTS = 512  # of an output that are kept, of each image
IMAGES = 2


def kept(output: Tensor) -> Tensor:
    """Elements of an output that are recorded: all, or so many at even distances."""
    flat = output.flatten()
    return flat[:: max(1, math.ceil(flat.numel() / ELEMENTS)) | 1][:ELEMENTS]


def record(rows: Sequence[Row], march: str, dtype: str, scales: str) -> Path:
    """Write the vectors of rows that are equal."""
    groups, arrays = [], {}
    for index, start in enumerate(range(0, len(rows), TOGETHER)):
        chosen = rows[start : start + TOGETHER]
        outputs, by_name = _recorded(chosen, march, dtype, scales)
        groups.append({"rows": [row.name for row in chosen], "scales": by_name})
        arrays.update({f"{index}/{number}": output for number, output in enumerate(outputs)})
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{march}-{dtype}{'' if scales == SCALES[0] else TIES}.npz"
    np.savez_compressed(path, about=np.frombuffer(json.dumps({"scales": scales, "groups": groups}).encode(), np.uint8), **arrays)
    return path


def _recorded(rows: Sequence[Row], march: str, dtype: str, scales: str) -> tuple[list[Any], dict[str, float]]:
    prepared, integer = converted(rows, march, dtype, scales)
    inputs = images()[1][:IMAGES]
    with tempfile.TemporaryDirectory() as folder:
        theirs = tool.outputs(compile_model(integer, Path(folder)), inputs)
    outputs = []
    for index, step in enumerate(output_steps(integer)):
        whole = [_integers(each[index], step) for each in theirs]
        together = torch.cat([kept(value) for value in whole]).numpy()
        narrow = next(
            kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= together.min() and together.max() <= np.iinfo(kind).max
        )
        outputs.append(together.astype(narrow))
    by_name = {name: float(scale) for name, scale in fxq.qparams(prepared).items() if math.isfinite(float(scale))}  # type: ignore[arg-type]
    return outputs, by_name


def _integers(value: Tensor, step: Tensor | None) -> Tensor:
    assert step is not None
    return (value.double() / step).round().to(torch.int64)


def write_common() -> None:
    """Write the parameters of all rows, and the images."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    states = {f"{name}/{key}": value.half().numpy() for name, row in ROWS.items() for key, value in row.build().state_dict().items()}
    np.savez_compressed(FOLDER / "weights.npz", **states)  # type: ignore[arg-type]
    np.savez_compressed(FOLDER / "images.npz", *(image.numpy() for image in images()[1][:IMAGES]))


def cases(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[Tensor]]]:
    """For each network of a file: the file's facts, the network's, and the recorded integers of each output."""
    with np.load(path) as arrays:
        about = json.loads(bytes(arrays["about"]).decode())
        for index, group in enumerate(about["groups"]):
            yield about, group, [torch.from_numpy(arrays[f"{index}/{number}"]).long() for number in range(len(group["rows"]))]


def rebuilt(names: Sequence[str], scales: Mapping[str, float], march: str, dtype: str, how: str) -> fx.GraphModule:
    """The integer graph of rows, derived from recorded parameters and scales: nothing is calibrated."""
    rows = [ROWS[name] for name in names]
    model = Together(rows).eval()
    with np.load(FOLDER / "weights.npz") as arrays:
        for row, network in zip(rows, model.rows, strict=True):
            state = network.state_dict()
            network.load_state_dict({key: torch.from_numpy(arrays[f"{row.name}/{key}"]).to(value.dtype) for key, value in state.items()})
    with np.load(FOLDER / "images.npz") as arrays:
        example = torch.from_numpy(arrays["arr_0"])
    prepared = fxq.prepare(model, example, probe_target(march), mapping_of(rows, dtype, how))
    present = fxq.qparams(prepared)
    assert all(name in present or name.startswith("pad") for name in scales), "zeros before a convolution are part of it, nothing else"
    fxq.set_qparams(prepared, {name: scale for name, scale in scales.items() if name in present})
    fxq.set_state(prepared, fxq.State.VALIDATE)
    return fxq.convert(prepared, kernels="reference")


def computed(integer: fx.GraphModule) -> list[Tensor]:
    """The elements of each output of the recorded images that are kept, as integers."""
    with np.load(FOLDER / "images.npz") as arrays:
        results = [integer(torch.from_numpy(arrays[name])) for name in arrays.files]
    steps = output_steps(integer)
    return [torch.cat([kept(_integers(result[index], step)) for result in results]) for index, step in enumerate(steps)]
