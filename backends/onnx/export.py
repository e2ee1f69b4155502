"""Write an integer graph as an ONNX file, in one of three styles, or a traced float model; the files are checked and complete."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import set_external_data
from torch import fx

from fxquant.backends.onnx.fast import Names, float_nodes, has_kernels, results_of, write_fast
from fxquant.backends.onnx.float_export import LARGEST_DEVIATION, apart
from fxquant.backends.onnx.metadata import with_layouts
from fxquant.backends.onnx.qdq import QdqWriter
from fxquant.backends.onnx.runtime import open_file
from fxquant.backends.onnx.writer import Writer
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.loops import bodies
from fxquant.ops.core.form import INT16_OPSET
from fxquant.prepared.stage import require_integer
from fxquant.prepared.unrolled import unrolled, with_integer_loops
from fxquant.support import logger
from fxquant.support.files import Content, write_files

# ---- files: complete or unchanged, and two for a model that is too large for one -------------------------------------
LARGEST_FILE = 2**31 - 2**20  # a protobuf message is limited to 2 GiB; the remainder is for the graph
SMALLEST_EXTERNAL = 1024  # bytes; smaller tensors stay in the model itself


@dataclass(frozen=True)
class FileOptions:
    """The arguments of `fxq.export_onnx` that do not depend on the kind of model."""

    opset: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    external_data: bool | None = None
    layouts: Mapping[str, str] | None = None


def save_models(
    models: Mapping[str, onnx.ModelProto], folder: str | os.PathLike[str], external_data: bool | None,
    others: Mapping[str, Content] | None = None, opened: bool = False,
) -> None:  # fmt: skip
    """Check models and write them by their file names into one folder, followed by `others`, files that refer to them.

    The tensors of a model go to its name with ".data" appended if `external_data` requests it, or if one file cannot hold them.
    Tensors are removed from a model whose data is written externally. Raises ExportError if a model is not valid, is too
    large for one file, cannot be written, or, with `opened`, if onnxruntime cannot open it; existing files are then unchanged.
    """
    contents = dict[str, Content]()
    for name, model in models.items():
        contents.update(_contents(model, name, external_data))
    write_files(folder, {**contents, **(others or {})}, lambda written: _check_files(written, models, folder, opened))


def _contents(model: onnx.ModelProto, name: str, external_data: bool | None) -> dict[str, Content]:
    """Return the files of a model: its tensors, if they have their own file, and the model."""
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if external_data is False and size > LARGEST_FILE:
        because = f"its tensors have {size:,} bytes, and a file of ONNX ends at 2 GiB"
        remedy = "leave external_data out, or pass external_data=True"
        raise ExportError(f"{name} cannot be one file", because=because, remedy=remedy)
    parts: list[bytes] = []
    if size > LARGEST_FILE if external_data is None else external_data:
        offset = 0
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= SMALLEST_EXTERNAL:
                parts.append(tensor.raw_data)
                set_external_data(tensor, f"{name}.data", offset, len(tensor.raw_data))
                offset += len(tensor.raw_data)
                tensor.ClearField("raw_data")
    return {**({f"{name}.data": parts} if parts else {}), name: model.SerializeToString()}


def _check_files(written: Path, models: Mapping[str, onnx.ModelProto], folder: str | os.PathLike[str], opened: bool) -> None:
    for name in models:
        try:
            onnx.checker.check_model(str(written / name), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            because = f"onnx says: {str(error).strip().splitlines()[0]}"
            remedy = "keep the operator it names, if any, out of the model, and report this with the model"
            raise ExportError(f"the file {Path(folder, name)} would not be valid", because=because, remedy=remedy) from error
        try:
            if opened:
                open_file(written / name)
        except Exception as error:  # the runtime's errors have no common class
            raise ExportError(
                f"onnxruntime could not open the file {Path(folder, name)}",
                because=f"it says: {str(error).strip().splitlines()[0]}",
                remedy="change the float operators that read or compute the value it names, or call them outside of the model; "
                "multiply by a number after a matrix product instead of before it; in style 'qdq' at opset 21, pass opset=17",
            ) from error


# ---- styles: how the file of an integer model is written ---------------------------------------------------------------
@dataclass(frozen=True)
class Style:
    """A way to write an integer model."""

    # An integer model, `io`, the opset and the names of inputs and outputs -> the model in memory.
    write: Callable[[fx.GraphModule, str, int, Names], onnx.ModelProto]
    words: str  # what it is, for messages
    opsets: range = range(17, 22)  # the opsets in which it can be written, and the default
    default: int = 21
    exact: bool = True  # whether a file has the integer model's bits; `verify` measures the difference of one that has not
    opened: float = math.inf  # the opset from which on a file is opened in onnxruntime before it appears, also without float operators


def written_out(integer: fx.GraphModule) -> fx.GraphModule:
    """Return the model without loops, for the styles that have none."""
    return unrolled(integer) if bodies(integer.graph) else integer


def _auto(integer: fx.GraphModule, io: str, opset: int, names: Names) -> onnx.ModelProto:
    model, quicker = None, ", which runs anywhere; onnxruntime runs 'fast' faster on processors with VNNI"
    if has_kernels(integer):
        quicker = ""
        try:
            model = write_fast(written_out(integer), io, opset, names, plain=True)
        except ExportError as error:  # the model differs as a whole, or nothing can be written, which the exact style reports as well
            logger.warning("style 'auto': 'fast' cannot be used: %s", error.because)
    logger.info("style 'auto': written in style '%s'%s", "exact" if model is None else "fast", quicker)
    return _exact(integer, io, opset, names) if model is None else model


def _exact(integer: fx.GraphModule, io: str, opset: int, names: Names) -> onnx.ModelProto:
    return Writer(with_integer_loops(integer) if bodies(integer.graph) else integer, io, opset).write(*names)


def _fast(integer: fx.GraphModule, io: str, opset: int, names: Names) -> onnx.ModelProto:
    model = write_fast(written_out(integer), io, opset, names)
    assert model is not None
    return model


def _qdq(integer: fx.GraphModule, io: str, opset: int, names: Names) -> onnx.ModelProto:
    writer = QdqWriter(integer, io, opset)
    if writer.in_floats:
        logger.warning(
            "int16 tensors that opset %d has no integers for: %d, %s; they are rounded by Div, Round, Clip and Mul,"
            " which compilers for chips drop or keep in float: pass opset=21, or use fxq.board.export_horizon for Horizon's compiler",
            opset,
            len(writer.in_floats),
            ", ".join(f"%{node.name}" for node in writer.in_floats[:4]),
        )
    return writer.write(*names)


# Without VNNI onnxruntime breaks QuantizeLinear of opset 21 in front of a linear layer whose operand has three dimensions of fixed
# sizes (1.31, 1.32).
STYLES = {
    "auto": Style(_auto, "'fast' where that is exact here without options of a session, else 'exact'"),
    "exact": Style(_exact, "integers in standard operators, with equal bits in every runtime"),
    "fast": Style(_fast, "kernels of 8 bits, with equal bits in onnxruntime as its metadata says"),
    "qdq": Style(_qdq, "floats between QuantizeLinear and DequantizeLinear, whose bits differ", range(11, 22), 17, False, INT16_OPSET),
}
FLOAT_OPSETS = (range(11, 22), 18)  # those of a float model


def export_integer(integer: fx.GraphModule, path: str | os.PathLike[str], style: str, io: str, options: FileOptions) -> Path:
    """Write an integer model, and return the path; `style` and `io` are as in `fxq.export_onnx`."""
    check_arguments(integer, style, io, options.opset)
    version = STYLES[style].default if options.opset is None else options.opset
    model = with_layouts(STYLES[style].write(integer, io, version, (options.input_names, options.output_names)), options.layouts, integer)
    # Float operators as PyTorch's exporter writes them can form what onnxruntime's optimizer breaks.
    opened = bool(float_nodes(integer)) or version >= STYLES[style].opened
    save_models({Path(path).name: model}, Path(path).parent, options.external_data, opened=opened)
    return Path(path)


def check_arguments(integer: fx.GraphModule, style: str, io: str, opset: int | None) -> None:
    """Raise ConfigurationError or ExportError for unsupported arguments."""
    require_integer(integer)
    if style not in list(STYLES):
        because = "; ".join(f"'{name}' is {each.words}" for name, each in STYLES.items())
        raise ConfigurationError(f"style={style!r} is unknown", because=because, remedy="pass one of these")
    check_choice("io", io, ["float", "integer"])
    check_choice("opset", STYLES[style].default if opset is None else opset, list(STYLES[style].opsets))


def check_choice(name: str, value: object, choices: list[object]) -> None:
    """Raise ConfigurationError if `value`, passed as `name`, is not one of `choices`."""
    if value not in choices:
        raise ConfigurationError(
            f"{name}={value!r} is unknown", because=f"it is one of {', '.join(map(str, choices))}", remedy="pass one of these"
        )


class FloatWriter(Writer):
    """Writes a traced graph as one region of float operators."""

    style = "float"


def export_float(traced: fx.GraphModule, path: str | os.PathLike[str], options: FileOptions) -> Path:
    """Write a traced float model, and return the path; the batch is dynamic if it was traced so.

    Before the file appears it is run in onnxruntime on random inputs. Raises ExportError if the result differs from PyTorch by
    more than rounding.
    """
    opsets, default = FLOAT_OPSETS
    opset = default if options.opset is None else options.opset
    check_choice("opset", opset, list(opsets))
    model = FloatWriter(traced, "float", opset).write(options.input_names, options.output_names)
    _check_outputs(traced, model)
    save_models({Path(path).name: with_layouts(model, options.layouts, traced)}, Path(path).parent, options.external_data)
    return Path(path)


def _check_outputs(traced: fx.GraphModule, model: onnx.ModelProto) -> None:
    for name, actual, expected in results_of(traced, model, {}):
        if not expected.is_floating_point() and expected.shape == actual.shape:
            continue  # an index may change if two values are nearly equal
        far = apart(actual, expected)
        logger.info("output %s in onnxruntime: %.3g of its largest number from PyTorch, at most", name, far)
        if far > LARGEST_DEVIATION:
            because = f"onnxruntime is up to {far:.3g} of its largest number away from PyTorch on random inputs"
            remedy = "export with another opset, and report this with the model"
            raise ExportError(f"the file would not compute the model's output {name!r}", because=because, remedy=remedy)
