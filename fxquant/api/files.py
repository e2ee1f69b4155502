"""Write models to files, and load them."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from fxquant import backends
from fxquant.accuracy.observations import Observations
from fxquant.accuracy.states import follow_unseen
from fxquant.analysis.explain import explain
from fxquant.analysis.text import text
from fxquant.api.preparing import convert, find_kernels, run_with_kernels
from fxquant.backends.onnx.metadata import LAYOUTS
from fxquant.errors import ConfigurationError
from fxquant.frontend import is_traced, trace
from fxquant.frontend.entry import with_fixed_batch
from fxquant.ir.graph import is_deployed, stage_of
from fxquant.ir.model import look_at_constants
from fxquant.prepared.sizes import at_example_sizes
from fxquant.prepared.stage import Stage
from fxquant.serialization import load_file, save_model, save_observations
from fxquant.support.arguments import FOLDER, PATH, POSITIVE, checked
from fxquant.support.files import write_files
from fxquant.support.progress import working


@checked(layouts=LAYOUTS, batch_size=POSITIVE.or_none("it varies where the model was traced so"))
@working("writing ONNX")
def export_onnx(
    model: nn.Module, path: str | os.PathLike[str], style: str = "auto", io: str = "float", opset: int | None = None,
    input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None, *, external_data: bool | None = None,
    layouts: Mapping[str, str] | None = None, functions: bool = False, example_inputs: Any = None, batch_size: int | None = None,
    runtime: str | None = None,
) -> Path:  # fmt: skip
    """Write a model as an ONNX file, and return its path: an integer model, a prepared one, or a float one.

    style  "auto": the fastest with equal bits in the `runtime`: "fast" if this target requantizes by float32 numbers and every kernel is
           exact here without session options, else "exact"; the log says which, and so does `onnx_metadata`. For a prepared model "qdq".
           "exact": standard operators on integers, equal bits in any runtime that computes them as ONNX defines, at any optimisation
           "fast": equal bits by 8-bit kernels, proved in onnxruntime before it is written. Its metadata names session options to
           run it with, above all on x86 processors without VNNI. If the target requantizes by shifts (bayes-e, bernoulli2, …), those
           processors compute other results whatever the options, as the metadata and a line of the log report.
           "qdq": float operators between QuantizeLinear and DequantizeLinear, for other compilers. Its bits
           differ: `verify` measures the difference. Below opset 13 weights are floats on their quantized grid, and below 21 tensors of
           int16 are rounded by Div, Round, Clip and Mul.
    io     "float": inputs and outputs are those of the float model; "integer": they are the quantized integers.
    opset  17 to 27, as far as the installed onnx has them, by default 21; in style "qdq" 11 to 21, by default 17; for a float model
           11 to 21, by default 18. Float operators of PyTorch's exporters below opset 18 are compared in onnxruntime first.
    input_names, output_names  names in the file, by default those of the graph. An inner tensor of such a name gets another name in the
           file, which its entry in the metadata says.
    external_data  True writes tensors of a kilobyte and more to `path`.data, False never does; by default it is
           done if one file cannot hold the model.
    layouts        {"image": "NHWC"}: inputs of the file, by name, that are given channels last. A Transpose inside converts
           them to PyTorch's order; `verify` and `record` take PyTorch's layout all the same.
    functions      True writes, in style "exact", each requantization as one call of a function of the file, for a graph that is easier to
           read. Several runtimes read no functions (OpenVINO, RKNN), and ONNX's version converter loses them.
    example_inputs the inputs for tracing a float model that is not traced yet
    batch_size     the fixed number of rows of a batch, for compilers that need every size: each input, output and inner value has a
           fixed shape, the example's, as if the model was traced with `dynamic_shapes={}`, and `verify` takes batches of this size. By
           default every size is dynamic that varies in the model.
    runtime        what "auto" is for: "onnxruntime" as it is here ("fast" on every target), "openvino", "tvm", "iree" or "litert" ("exact")

    A prepared model is written with the current weights and scales, as fxq.convert(model) would be: its grids are in the file's
    QuantizeLinear. A float model is traced in eval mode and written by PyTorch's exporter, in style "float"; onnxruntime's results are
    compared with PyTorch's before the file appears.

    `onnx_metadata` reads the file's metadata: scales, zero points and dtypes of its inputs, outputs
    and inner tensors. Numbers and None among the model's outputs are left out of the file. The file is checked before it
    appears, also by opening it in onnxruntime, and is written atomically. Raises ConfigurationError or ExportError.
    """
    from fxquant.backends.onnx.export import FileOptions, export_float, export_integer

    look_at_constants(model)
    options = FileOptions(opset, input_names, output_names, external_data, layouts, functions, runtime)
    if isinstance(model, fx.GraphModule) and stage_of(model) == Stage.PREPARED.name:
        model, style = convert(model, kernels="reference"), "qdq" if style == "auto" else style
    elif isinstance(model, nn.Module) and not is_deployed(model):
        if style not in ("auto", "float") or io != "float":
            because = "it has no integers"
            remedy = "leave both out, or pass what fxq.prepare or fxq.convert returns"
            raise ConfigurationError(f"a float model cannot be written with style={style!r} and io={io!r}", because=because, remedy=remedy)
        if example_inputs is None and not is_traced(model):
            because = "they give its graph shapes and dtypes"
            remedy = "pass example_inputs=, or what fxq.convert returns if the integer model was meant"
            raise ConfigurationError("a float model cannot be exported without example inputs", because=because, remedy=remedy)
        traced = trace(model, example_inputs)
        return export_float(traced if batch_size is None else with_fixed_batch(at_example_sizes(traced), batch_size), path, options)
    if example_inputs is not None:
        raise ConfigurationError(
            "example_inputs mean nothing here", because="a prepared and an integer model are graphs already", remedy="leave them out"
        )
    if batch_size is not None and isinstance(model, fx.GraphModule) and is_deployed(model):
        model = with_fixed_batch(at_example_sizes(model), batch_size)
    return export_integer(model, path, style, io, options)  # type: ignore[arg-type]


@checked()
@working("saving")
def save(model: fx.GraphModule | Observations, path: str | os.PathLike[str]) -> Path:
    """Write a traced, prepared or integer model, or observations, to one file, atomically; return its path.

    The file holds the graph as JSON and the tensors as safetensors, and no code; equal models give equal bytes.
    A loaded model continues from the state of this one: its state, scales, observations and frozen statistics are kept. Other
    attributes and methods of the float model are not in the file.

    Raises ExportError, and writes nothing, if something cannot be stored in a file: hooks, a class or function that
    is neither PyTorch's nor fxquant's.
    """
    look_at_constants(model)
    return save_observations(model, path, backends.get) if isinstance(model, Observations) else save_model(model, path, backends.get)


@checked(path=PATH)
@working("loading")
def load(path: str | os.PathLike[str], *, kernels: str = "auto") -> Any:
    """Load a file of `save`: a GraphModule, on the CPU, or Observations. No name in a file is imported.

    An integer model runs with the kernels of this machine; kernels="reference" disables them, as for `convert`.

    Raises ExportError if the file is missing, damaged, or in a format that this fxquant cannot read.
    """
    loaded = load_file(path, backends.get)
    if kernels == "auto" and isinstance(loaded, fx.GraphModule) and is_deployed(loaded):
        find_kernels(loaded)
        run_with_kernels(loaded)
    elif isinstance(loaded, fx.GraphModule):
        follow_unseen(loaded)
    return loaded


@checked(path=FOLDER)
def dump(model: fx.GraphModule, path: str | os.PathLike[str]) -> Path:
    """Write the graph's text to `path`/graph.txt, and its explanation to `path`/explain.txt; return the directory."""
    directory = Path(path)
    write_files(directory, {"graph.txt": text(model), "explain.txt": explain(model)})
    return directory


@working("measuring speed in onnxruntime")
def speed_of(path: Path, model: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """Return the speed of an ONNX file in onnxruntime, on one thread, in times that of the float model's file."""
    from fxquant.backends.onnx.runtime import shortest_runs

    with tempfile.TemporaryDirectory(prefix="fxquant-") as folder:
        other = export_onnx(model, Path(folder) / "float.onnx", example_inputs=dict(batch))
        before, now = shortest_runs([other, path], batch)
    return before / now


def check_horizon(target: str) -> None:
    """Raise ConfigurationError if there is no target of this name, or `export_horizon` cannot write its integer models."""
    from fxquant.backends.horizon.export import check_march

    check_march(backends.get(target))
