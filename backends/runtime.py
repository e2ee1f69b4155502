"""Running an exported model every way there is, with its inner tensors in view."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from fxquant.errors import ExportError

# Name, optimisation level, threads. "reference" is ONNX's own evaluator in numpy.
RUNTIMES = (
    ("onnxruntime", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, 1),
    ("onnxruntime, 2 threads", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, 2),
    ("onnxruntime, no optimisation", onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, 1),
    ("reference", None, 1),
)
RUNTIME_NAMES = tuple(name for name, _, _ in RUNTIMES)


class OnnxModel:
    """An exported file, read; raises ExportError if it is no ONNX file written by fxquant.

    `tensors` describes its values: kind ("quantized", "accumulator", "float"), scale and dtype; `in_float` says why
    operators are outside of the integer part, by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.model = onnx.load(str(self.path))
        except (OSError, DecodeError) as error:
            raise ExportError(
                f"{self.path} cannot be read as ONNX",
                because=str(error).splitlines()[0] or type(error).__name__,
                remedy="pass a file written by fxq.export_onnx",
            ) from None
        properties = {entry.key: entry.value for entry in self.model.metadata_props}
        if "fxquant.tensors" not in properties:
            raise ExportError(
                f"{self.path} was not written by fxquant",
                because="its metadata has no entry fxquant.tensors",
                remedy="pass a file written by fxq.export_onnx",
            )
        self.io = properties.get("fxquant.io", "float")
        self.target = properties.get("fxquant.target", "")
        self.in_float: dict[str, str] = json.loads(properties.get("fxquant.float", "{}"))
        self.tensors: dict[str, dict[str, Any]] = json.loads(properties["fxquant.tensors"])
        self.input_names = [info.name for info in self.model.graph.input]
        self.output_names = [info.name for info in self.model.graph.output]

    def names(self, kinds: Sequence[str]) -> list[str]:
        """The described values of these kinds, in the order they are computed."""
        return [name for name, entry in self.tensors.items() if entry["kind"] in kinds]

    def runner(self, runtime: str, expose: Sequence[str], feed: Sequence[str] = ()) -> Runner:
        """A way to run the model: `expose` names values returned besides the outputs, `feed` values given as inputs."""
        model = _with_values(self.model, expose, feed)
        _, level, threads = next(row for row in RUNTIMES if row[0] == runtime)
        return Runner(model, level, threads)

    def runners(self, expose: Sequence[str], feed: Sequence[str] = ()) -> Iterator[tuple[str, Runner]]:
        """One runner per runtime."""
        for name in RUNTIME_NAMES:
            yield name, self.runner(name, expose, feed)


class Runner:
    """One runtime holding one model."""

    def __init__(self, model: onnx.ModelProto, level: Any, threads: int) -> None:
        self.outputs = [info.name for info in model.graph.output]
        self.inputs = [info.name for info in model.graph.input]
        if level is None:
            evaluator = ReferenceEvaluator(model)
            self._run: Callable[[dict[str, Any]], Any] = lambda feeds: evaluator.run(None, feeds)
            return
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._run = lambda feeds: session.run(None, feeds)

    def __call__(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs and exposed values, by name."""
        arrays = {name: feeds[name].detach().cpu().numpy() for name in self.inputs}
        results = self._run(arrays)
        return {
            name: torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)))
            for name, value in zip(self.outputs, results, strict=True)
        }


def _with_values(model: onnx.ModelProto, expose: Sequence[str], feed: Sequence[str]) -> onnx.ModelProto:
    """A copy whose outputs include `expose` and whose inputs include `feed`, with what computed those cut off."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph = copied.graph
    known = {info.name: info for info in (*graph.value_info, *graph.output, *graph.input)}
    cut = set(feed)
    kept = [node for node in graph.node if not (cut & set(node.output))]
    del graph.node[:]
    graph.node.extend(kept)
    present = {info.name for info in graph.output}
    graph.output.extend(known[name] for name in expose if name not in present and name not in cut)
    graph.input.extend(known[name] for name in feed)
    if cut:
        _prune(graph)
    return copied


def _prune(graph: onnx.GraphProto) -> None:
    """Drop the nodes and inputs that no output needs; float nodes before the cut are not run in vain."""
    needed = {info.name for info in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    inputs = [info for info in graph.input if info.name in needed]
    del graph.input[:]
    graph.input.extend(inputs)
