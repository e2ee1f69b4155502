"""Execution of an exported model in every available runtime, with access to its inner tensors."""

from __future__ import annotations

import copy
import functools
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_loop, op_max_pool
from torch import Tensor

from fxquant.backends.onnx.metadata import onnx_metadata, read_metadata, read_model, to_file
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import DTYPE_NAMES

# Name, optimisation level, threads. "reference" is ONNX's own evaluator in numpy.
RUNTIMES = (
    ("onnxruntime", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, 1),
    ("onnxruntime, 2 threads", onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, 2),
    ("onnxruntime, no optimisation", onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, 1),
    ("reference", None, 1),
)
RUNTIME_NAMES = tuple(name for name, _, _ in RUNTIMES)
MEASURED_RUNTIMES = ("onnxruntime", "onnxruntime, no optimisation")  # for measuring a file that is not exact by design
Run = Callable[[dict[str, np.ndarray[Any, Any]]], Any]  # inputs by name to a list of outputs, in order
DATA_FOLDER = "session.model_external_initializers_file_folder_path"
RUNS = 7  # that are timed


def open_file(path: Path) -> None:
    """Open a file with onnxruntime's default options, and run nothing. Raises onnxruntime's own error if it cannot be opened."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the error holds the message already
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@functools.cache
def adds_pairs() -> bool:
    """Return whether onnxruntime adds products of bytes two by two here, in 16 bits, which saturate: on x86 processors without VNNI."""
    types = onnx.TensorProto.UINT8, onnx.TensorProto.INT32
    input, output = (helper.make_tensor_value_info(name, kind, [1, 2]) for name, kind in zip("xy", types, strict=True))
    weight = numpy_helper.from_array(np.full((2, 2), 127, np.int8), "w")
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "pairs", [input], [output], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return int(Runner(model, *RUNTIMES[0][1:])({"x": torch.full((1, 2), 255, dtype=torch.uint8)})["y"][0, 0]) != 2 * 255 * 127


# ---- runtimes of other packages, with the settings that keep bits ---------------------------------------------------
def shortest_runs(paths: Sequence[Path], batch: Mapping[str, Tensor]) -> list[float]:
    """Return the seconds of the shortest of `RUNS` runs of each file in onnxruntime, in turn, on one thread."""
    sessions = []
    for path in paths:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        for name, value in onnx_metadata(path).get("session_options", {}).items():
            options.add_session_config_entry(name, value)
        sessions.append(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
    seconds = [math.inf] * len(sessions)
    for _ in range(RUNS):
        for index, session in enumerate(sessions):
            feeds = {each.name: array.numpy() for each, array in zip(session.get_inputs(), batch.values(), strict=True)}
            start = time.perf_counter()
            session.run(None, feeds)
            seconds[index] = min(seconds[index], time.perf_counter() - start)
    return seconds


def _openvino(model: onnx.ModelProto) -> Run:
    import openvino

    # By default products are bfloat16 where the processor has it, and weights between QuantizeLinear and DequantizeLinear are 7 bits.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "LP_TRANSFORMS_MODE": "NO"}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString(), b""), "CPU", settings)

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        results = compiled(list(feeds.values()))
        return [results[index] for index in range(len(compiled.outputs))]

    return run


def _tvm(model: onnx.ModelProto) -> Run:
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    module = relax.transform.LegalizeOps()(relax.transform.DecomposeOpsForInference()(from_onnx(model)))
    main = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())["main"]

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        results = main(*map(tvm.runtime.tensor, feeds.values()))
        return [result.numpy() for result in ([results] if hasattr(results, "numpy") else results)]

    return run


def _iree(model: onnx.ModelProto) -> Run:
    import iree.runtime
    from iree.compiler import compile_str
    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    info = onnx_importer.ModelInfo(model)
    module = info.create_module(context=Context()).operation
    onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
    flags = ["--iree-llvmcpu-target-cpu=host", "--iree-input-demote-f64-to-f32=false", "--iree-input-demote-i64-to-i32=false"]
    program = compile_str(str(module), input_type="onnx", target_backends=["llvm-cpu"], extra_args=flags)
    context = iree.runtime.load_vm_flatbuffer(program, driver="local-sync")
    dtypes = [helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type) for output in model.graph.output]

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        results = context[model.graph.name](*feeds.values())
        values = [np.array(result.to_host()) for result in (results if isinstance(results, tuple | list) else [results])]  # its memory ends
        return [value.view(dtype) for value, dtype in zip(values, dtypes, strict=True)]  # unsigned integers come as signed ones

    return run


def _litert(model: onnx.ModelProto) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    command = shutil.which("onnx2tf")
    if command is None:
        raise ImportError("the command onnx2tf, which makes TFLite files, is not on the path; any Python environment may have it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path)
        call = [command, "-i", path, "-o", folder, "-n", "-kat", *(info.name for info in model.graph.input)]
        converted = subprocess.run(call, capture_output=True, text=True, check=False)
        files = sorted(Path(folder).glob("*_float32.tflite"))
        if not files:
            raise RuntimeError(f"onnx2tf: {['it wrote no file', *converted.stdout.splitlines(), *converted.stderr.splitlines()][-1]}")
        interpreter = Interpreter(model_content=files[0].read_bytes(), num_threads=1)
    interpreter.allocate_tensors()

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        for details in interpreter.get_input_details():
            interpreter.set_tensor(details["index"], feeds[details["name"]])
        interpreter.invoke()
        places = {details["name"]: details["index"] for details in interpreter.get_output_details()}
        return [interpreter.get_tensor(places[info.name]) for info in model.graph.output]

    return run


OTHER_RUNTIMES: dict[str, Callable[[onnx.ModelProto], Run]] = {"openvino": _openvino, "tvm": _tvm, "iree": _iree, "litert": _litert}


def _of_fixed_sizes(name: str, model: onnx.ModelProto) -> Run:
    """Return a function that runs a model in the runtime `name`, compiled anew for other sizes of inputs.

    Raises ConfigurationError where the runtime is not installed.
    """
    compiled: dict[tuple[tuple[int, ...], ...], Run] = {}

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> Any:
        shapes = tuple(value.shape for value in feeds.values())
        if shapes not in compiled:
            sized = copy.deepcopy(model)
            for info, shape in zip(sized.graph.input, shapes, strict=True):
                for dim, size in zip(info.type.tensor_type.shape.dim, shape, strict=True):
                    dim.dim_value = size
            del sized.graph.value_info[:]  # which states sizes that vary
            try:
                compiled[shapes] = OTHER_RUNTIMES[name](onnx.shape_inference.infer_shapes(sized))
            except ImportError as error:
                because, remedy = f"its package is not installed: {error}", f'pip install "fxquant[{name}]"'
                raise ConfigurationError(f"runtime={name!r} cannot be used", because=because, remedy=remedy) from error
        return compiled[shapes](feeds)

    return run


# ---- defects of ONNX's own evaluator --------------------------------------------------------------------------------
# It multiplies sums by float32 scales in float64, and adds the zero point before it rounds; the operators' kernels, and
# style "fast", expect one product in float32, rounded half to even.
def _requantized(sums: np.ndarray[Any, Any], multiplier: Any, zero_point: Any) -> np.ndarray[Any, Any]:
    limits = np.iinfo(zero_point.dtype)
    rounded = np.rint(sums.astype(np.float32) * multiplier.astype(np.float32)).astype(np.float64) + zero_point
    result: np.ndarray[Any, Any] = np.clip(rounded, limits.min, limits.max).astype(zero_point.dtype)
    return result


class QLinearConv(OpRun):
    """ONNX's QLinearConv for the reference evaluator: sums of products in float64, which are exact, then requantized in float32."""

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[np.ndarray[Any, Any]]:
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = inputs
        node = helper.make_node("Conv", ["x", "w", "b"][: 2 + len(bias)], ["y"], **{n: v for n, v in attributes.items() if v is not None})
        feeds = {"x": x.astype(np.float64) - x_zero, "w": w.astype(np.float64) - w_zero.astype(np.float64).reshape(-1, *[1] * (w.ndim - 1))}
        if bias:
            feeds["b"] = bias[0].astype(np.float64)
        results: Any = ReferenceEvaluator(node).run(None, feeds)
        return (_requantized(results[0], (x_scale * w_scale / y_scale).reshape(-1, *[1] * (w.ndim - 2)), y_zero),)


class QLinearMatMul(OpRun):
    """ONNX's QLinearMatMul for the reference evaluator: sums of products in float64, which are exact, then requantized in float32."""

    def _run(self, *inputs: Any) -> Any:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
        return (_requantized((a.astype(np.float64) - a_zero) @ (b.astype(np.float64) - b_zero), a_scale * b_scale / y_scale, y_zero),)


class Gather(OpRun):
    """Gather of onnx's reference evaluator, which before onnx 1.23 fails for indices that are not contiguous."""

    def _run(self, x: Any, indices: Any, axis: int | None = None) -> Any:
        return (np.take(x, indices, axis=axis or 0),)


class MaxPool(op_max_pool.MaxPool):
    """MaxPool of onnx's reference evaluator, corrected: padding is in its shape if strides and dilations are 1; no NaN pads integers."""

    def _run(self, x: Any, **attributes: Any) -> Any:  # type: ignore[override]
        kernel = attributes["kernel_shape"]
        rank = len(kernel)
        if attributes.get("ceil_mode") or (attributes.get("auto_pad") or "NOTSET") != "NOTSET" or len(self.onnx_node.output) > 1:
            return super()._run(x, **attributes)  # type: ignore[no-untyped-call]
        pads = attributes.get("pads") or [0] * (2 * rank)
        strides, dilations = (attributes.get(name) or [1] * rank for name in ("strides", "dilations"))
        margin = [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
        padded = np.pad(x, margin, constant_values=np.iinfo(x.dtype).min if np.issubdtype(x.dtype, np.integer) else -np.inf)
        reach = tuple(dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True))
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=tuple(range(2, 2 + rank)))
        steps = (slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations)))
        return (windows[steps].max(axis=tuple(range(-rank, 0))),)


class Loop(op_loop.Loop):
    """Loop of onnx's reference evaluator, which joins what each iteration gives along the first dimension in place of a new one."""

    def _run(self, M: Any, cond: Any, *args: Any, **settings: Any) -> Any:
        results = super()._run(M, cond, *args, **settings)  # type: ignore[no-untyped-call]
        (body,) = (attribute.g for attribute in self.onnx_node.attribute if attribute.name == "body")
        ranks = [len(info.type.tensor_type.shape.dim) for info in body.output[1:]]
        states = len(body.input) - 2
        every = zip(results[states:], ranks[states:], strict=True)
        return (*results[:states], *(each if each.ndim > rank else each.reshape(int(M), -1, *each.shape[1:]) for each, rank in every))


class GatherElements(OpRun):
    """The operator beyond some tens of elements, and for fewer indices than elements along other dimensions, where it fails."""

    def _run(self, data: Any, indices: Any, axis: int | None = None) -> Any:
        along = (axis or 0) % data.ndim
        cropped = data[tuple(slice(None) if dim == along else slice(size) for dim, size in enumerate(indices.shape))]
        return (np.take_along_axis(cropped, indices, along),)


CORRECTED = (QLinearConv, QLinearMatMul, Gather, GatherElements, Loop, MaxPool)


class Evaluator(ReferenceEvaluator):
    """ONNX's own evaluator with these operators, also inside functions and graphs of nodes, whose evaluators are of its class."""

    def __init__(self, proto: Any, **settings: Any) -> None:
        super().__init__(proto, **{**settings, "new_ops": list(CORRECTED)})


class OnnxModel:
    """An exported file, read; raises ExportError if it is not an ONNX file written by fxquant.

    `tensors` describes its values, `metadata` is all its metadata: see `fxquant.backends.onnx.metadata`;
    `in_float` states why operators are outside of the integer part, by name.
    Tensors in an external file are read when they are needed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.model = read_model(self.path)
        self.metadata = read_metadata(self.model, self.path)
        self.style: str = self.metadata.get("style", "exact")
        self.io: str = self.metadata.get("io", "float")
        self.target: str = self.metadata.get("target", "")
        self.in_float: dict[str, str] = self.metadata.get("float", {})
        self.tensors: dict[str, dict[str, Any]] = self.metadata["tensors"]
        self.layouts = {entry["name"]: to_file(entry["layout"]) for entry in self.metadata["inputs"] if "layout" in entry}
        self.input_names = [info.name for info in self.model.graph.input]
        self.output_names = [info.name for info in self.model.graph.output]

    def value(self, name: str) -> str:
        return str(self.tensors.get(name, {}).get("value", name))

    def names(self, kinds: Sequence[str]) -> list[str]:
        """Return the described values of these kinds, in the order they are computed."""
        return [name for name, entry in self.tensors.items() if entry["kind"] in kinds]

    def runner(self, runtime: str, expose: Sequence[str], feed: Sequence[str] = ()) -> Runner:
        """Return a runner of the model: `expose` names values returned besides the outputs, `feed` values given as inputs."""
        model = _with_values(self.model, expose, feed)
        level, threads = next(((level, threads) for name, level, threads in RUNTIMES if name == runtime), (runtime, 1))
        return Runner(model, level, threads, self.path.parent, self.metadata.get("session_options", {}), str(self.path), self.layouts)

    def runners(self, expose: Sequence[str], feed: Sequence[str] = ()) -> Iterator[tuple[str, Runner]]:
        for name in RUNTIME_NAMES:
            yield name, self.runner(name, expose, feed)


class Runner:
    """One runtime with one model; `folder` holds its external data, `settings` are options of onnxruntime.

    Inputs have PyTorch's layout; `layouts` are the orders of dimensions of inputs for which the file has another layout.

    Raises ExportError, which contains `name`, if the model cannot be loaded or run.
    """

    def __init__(
        self, model: onnx.ModelProto, level: Any, threads: int, folder: Path | None = None, settings: Mapping[str, str] | None = None,
        name: str = "the model", layouts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self.layouts = layouts or {}
        self.outputs = [info.name for info in model.graph.output]
        self.inputs = [info.name for info in model.graph.input]
        dims = {info.name: info.type.tensor_type.shape.dim for info in model.graph.input}
        self.sizes = {name: [size.dim_value if size.HasField("dim_value") else None for size in shape] for name, shape in dims.items()}
        self.dtypes = {info.name: helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type) for info in model.graph.input}
        self.name = name
        self.runtime = level if isinstance(level, str) else "ONNX's reference evaluator" if level is None else "onnxruntime"
        try:
            self._open(model, level, threads, folder, settings)
        except Exception as error:  # the runtimes' own errors have no common class
            raise self._failed(error) from error

    def _open(self, model: onnx.ModelProto, level: Any, threads: int, folder: Path | None, settings: Mapping[str, str] | None) -> None:
        if (level is None or isinstance(level, str)) and folder is not None:
            load_external_data_for_model(model, str(folder))
        if isinstance(level, str):
            self._run: Run = _of_fixed_sizes(level, model)
            return
        if level is None:
            evaluator = Evaluator(model)
            self._run = lambda feeds: evaluator.run(None, feeds)
            return
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        for name, value in (settings or {}).items():
            options.add_session_config_entry(name, value)
        if folder is not None:
            options.add_session_config_entry(DATA_FOLDER, str(folder))
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._run = lambda feeds: session.run(None, feeds)

    def __call__(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs and exposed values by name."""
        permuted = {name: feeds[name].permute(tuple(self.layouts[name])) if name in self.layouts else feeds[name] for name in self.inputs}
        arrays = {name: np.ascontiguousarray(value.numpy(force=True)).reshape(value.shape) for name, value in permuted.items()}
        self._check(arrays)
        try:
            results = self._run(arrays)
        except ConfigurationError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        return {
            name: torch.from_numpy(np.array(value, order="C"))  # a copy: evaluators return constant arrays, and negative strides
            for name, value in zip(self.outputs, results, strict=True)
        }

    def _check(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Raise ExportError for an array whose dtype differs from the file's, or whose sizes differ from the fixed sizes in it."""
        for name, value in inputs.items():
            if value.dtype != self.dtypes[name]:
                because = f"its input {name!r} is {self.dtypes[name]}, and this one {value.dtype}"
                remedy = f"convert it: tensor.to(torch.{self.dtypes[name]})"
                raise ExportError(f"{self.name} cannot be run on this batch", because=because, remedy=remedy)
            expected, actual = self.sizes[name], list(value.shape)
            if len(expected) != len(actual) or any(size not in (None, own) for size, own in zip(expected, actual, strict=True)):
                fixed = ["any" if size is None else size for size in expected]
                because = f"its input {name!r} has the sizes {fixed}, and this one {actual}"
                remedy = "pass batches of these sizes, or export without batch_size= a model whose batch is dynamic"
                raise ExportError(f"{self.name} cannot be run on this batch", because=because, remedy=remedy)

    def _failed(self, error: Exception) -> ExportError:
        lines = str(error).splitlines() or [type(error).__name__]
        telling = [line for line in lines if " error: " in line or line.startswith("While validating")]  # of compilers' long messages
        reason = (telling or lines)[0]
        because = f"{self.runtime} says: {reason}"
        remedy = "export it again with fxq.export_onnx, and keep its .data file, if any, in the same folder"
        if self.runtime in OTHER_RUNTIMES:
            remedy = "export it with style='exact' if it has another; docs/guide/onnx.md says what which runtime reads"
        elif "NOT_IMPLEMENTED" in reason:
            remedy = "export it with style='exact', or install a newer onnxruntime: style 'fast' of targets that shift needs 1.24"
        return ExportError(f"{self.name} cannot be run", because=because, remedy=remedy)


def _with_values(model: onnx.ModelProto, expose: Sequence[str], feed: Sequence[str]) -> onnx.ModelProto:
    """Return a copy whose outputs include `expose` and whose inputs include `feed`; the nodes that compute `feed` are removed."""
    copied, cut = copy.deepcopy(model), set(feed)
    graph = copied.graph
    infos = {info.name: info for info in (*graph.value_info, *graph.output, *graph.input)}
    keep(graph.node, (node for node in graph.node if cut.isdisjoint(node.output)))
    present = {info.name for info in graph.output}
    graph.output.extend(infos[name] for name in expose if name not in present and name not in cut)
    graph.input.extend(infos[name] for name in feed)
    if cut:  # float nodes before it are not run in vain
        needed = prune(graph, graph.node)
        keep(graph.input, (info for info in graph.input if info.name in needed))
    return copied


def keep(field: Any, entries: Iterable[Any]) -> None:
    """Replace the entries of a repeated field of a message."""
    kept = list(entries)
    del field[:]
    field.extend(kept)


def prune(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Remove the nodes that no output needs; return the names of the outputs and of the values that the other nodes read."""
    needed, kept = {info.name for info in graph.output}, list[onnx.NodeProto]()
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(values_read(node))
            kept.append(node)
    keep(graph.node, reversed(kept))
    return needed


def values_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the values that a node reads: its inputs, and the outer values that graphs inside it, as of a Loop, read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            own = {entry.name for entry in (*inner.input, *inner.initializer)} | {name for n in inner.node for name in n.output}
            ends = (entry.name for entry in inner.output)
            yield from (name for name in (*(name for n in inner.node for name in values_read(n)), *ends) if name not in own)


# ---- Inspection of an exported file: its graph as text, its constants, its shapes ------------------------------------
P = ParamSpec("P")
R = TypeVar("R")


def _of_any_file(function: Callable[Concatenate[OnnxModel, P], R]) -> Callable[Concatenate[OnnxModel, P], R]:
    """Wrap a function so that it raises ExportError for any error of ONNX's readers about a damaged or forged file."""

    @functools.wraps(function)
    def call(opened: OnnxModel, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(opened, *args, **kwargs)
        except Exception as error:  # their errors have no common class
            because = str(error).strip().split("\n")[0] or type(error).__name__
            remedy = "export it again with fxq.export_onnx, and keep its .data file, if any, in the same folder"
            raise ExportError(f"{opened.path} cannot be read as ONNX", because=because, remedy=remedy) from error

    return call


@_of_any_file
def operators(opened: OnnxModel) -> dict[str, str]:
    """Return the operator of every node of the graph, by the name of its first output."""
    return {node.output[0]: node.op_type for node in opened.model.graph.node}


@_of_any_file
def shape(opened: OnnxModel, name: str) -> str:
    """Return the element type and shape of a value, as in f32[batch,3,8,8]; empty if the file does not state it."""
    graph = opened.model.graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.name == name:
            return _type(info.type.tensor_type)
    return ""


def _type(tensor: Any) -> str:
    array = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    sizes = ",".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{_NAMES.get(np.dtype(array), str(array))}[{sizes}]"


_NAMES = {torch.empty((), dtype=dtype, device="cpu").numpy().dtype: name for dtype, name in DTYPE_NAMES.items() if dtype != torch.bfloat16}


@_of_any_file
def constants(opened: OnnxModel) -> dict[str, Tensor]:
    """Return the constants of the graph by name."""
    return {tensor.name: _tensor(numpy_helper.to_array(tensor, str(opened.path.parent))) for tensor in opened.model.graph.initializer}


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    # Types that numpy and PyTorch do not share, such as int4, are shown in wider ones.
    return torch.from_numpy(array.copy() if array.dtype in _NAMES else array.astype(np.int8 if "int" in str(array.dtype) else np.float32))


@_of_any_file
def text(opened: OnnxModel) -> str:
    """Return the graph and its functions as text, one line for each node."""
    model = opened.model
    versions = ", ".join(f"{entry.domain or 'onnx'} {entry.version}" for entry in model.opset_import)
    lines = [f"graph   # {versions}", *(f"  %{info.name} = input   {_type(info.type.tensor_type)}" for info in model.graph.input)]
    lines += [f"  {_node(node)}" for node in model.graph.node]
    lines.append(f"  return {', '.join('%' + info.name for info in model.graph.output)}")
    for function in sorted(model.functions, key=lambda function: function.name):
        lines += [f"function {function.name}({', '.join('%' + name for name in function.input)})"]
        lines += [f"  {_node(node)}" for node in function.node]
        lines += [f"  return {', '.join('%' + name for name in function.output)}"]
    return "\n".join(lines) + "\n"


def _node(node: onnx.NodeProto) -> str:
    arguments = [f"%{name}" if name else "none" for name in node.input]
    arguments += [f"{attribute.name}={_value(helper.get_attribute_value(attribute))}" for attribute in node.attribute]
    return f"{', '.join('%' + name for name in node.output)} = {node.op_type}({', '.join(arguments)})"


def _value(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        array = numpy_helper.to_array(value)
        return str(array.tolist()) if array.size <= 4 else f"{array.dtype}{list(array.shape)}"
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
