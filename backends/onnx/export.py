"""Write an integer graph as an ONNX file, in one of three styles, or a traced float model; the files are checked and complete."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
import torch
from onnx import helper
from onnx.external_data_helper import set_external_data
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxquant.backends.onnx.fast_kernels import FastWriter, SumsWriter
from fxquant.backends.onnx.fast_parts import plain
from fxquant.backends.onnx.float_export import LARGEST_DEVIATION, apart, random_value
from fxquant.backends.onnx.metadata import PRECISE, with_layouts
from fxquant.backends.onnx.qdq import QdqWriter
from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, OTHER_RUNTIMES, RUNTIME_NAMES, RUNTIMES, Runner, adds_pairs, open_file
from fxquant.backends.onnx.writer import TYPES, Writer, has_kernels, pairs_fit, value_info
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import BATCH_SIZES, by_name, fact, resolve
from fxquant.ir.integer import qparams
from fxquant.ir.loops import bodies
from fxquant.kernels.admission import DRAWN, MOST_DRAWS, evaluate, of_any_range, pairs_of_ends, whole_range
from fxquant.kernels.kernel import Match
from fxquant.numerics.grids import ACTIVATION_TYPES, INT8
from fxquant.prepared.sizes import with_integer_loops
from fxquant.prepared.stage import require_integer
from fxquant.primitives import PRIMITIVES, Role, role_of
from fxquant.primitives.elementwise import lookup
from fxquant.primitives.quantization import quantize
from fxquant.primitives.runtime_scales import dynamic_linear
from fxquant.support import disagreed, logger
from fxquant.support.files import Content, write_files

# ---- Style "fast": kernels are admitted one by one, and the whole model is compared ----------------------------------
#
# A kernel that differs from PyTorch here is written in the form of style "exact" instead, as the metadata and the log report.
Names = tuple[Sequence[str] | None, Sequence[str] | None]  # that the user gives to inputs and to outputs

LEAST_PRODUCTS = 256  # for each element of a layer's result: what sums of bytes gain, shifts and roundings take back where there are fewer


def write_fast(integer: fx.GraphModule, io: str, opset: int, names: Names, *, plain: bool = False) -> onnx.ModelProto | None:
    """Return the model in memory, compared with the integer graph. Raises ExportError if it differs as a whole.

    If `plain`, return None if the model has no kernels, or one is not exact here in a session without options.
    """
    if not has_kernels(integer):
        return _write_sums(integer, io, opset, names)
    writer = FastWriter(integer, io, opset)
    inexact = [node for node in writer.kernels() if not _kernel_is_exact(integer, node, opset)]
    kernels = [node for node in writer.kernels() if not writer.computes(node)]
    refused = [node.name for node in inexact if node in kernels]
    if plain and (refused or not kernels):
        return None
    _tell(integer, refused, len(kernels))
    return _compared(integer, lambda io: FastWriter(integer, io, opset, [node.name for node in inexact]), io, names)


def _write_sums(integer: fx.GraphModule, io: str, opset: int, names: Names) -> onnx.ModelProto:
    exact = {node.name: _sum_is_exact(integer, node, opset) for node in SumsWriter(integer, io, opset).kernels()}
    refused, absent = ([name for name, is_exact in exact.items() if is_exact in kinds] for kinds in ((None, False), (None,)))
    _tell(integer, [name for name, is_exact in exact.items() if is_exact is False], len(exact))
    if absent:
        logger.warning(
            "style 'fast': this onnxruntime has no sums of bytes for %d of %d layers, which are written as in style 'exact': %s",
            len(absent),
            len(exact),
            ", ".join(absent),
        )
    if SumsWriter(integer, io, opset, refused).relies_on_vnni():
        logger.warning(
            "style 'fast': this file needs onnxruntime 1.24, and on x86 processors without VNNI its numbers are others;"
            " those of style 'exact' are the same anywhere"
        )
    layers = [node for node in integer.graph.nodes if role_of(node.target) in (Role.CONVOLUTION, Role.LINEAR)]
    elements = [math.prod(fact(node).at(1)) for node in layers]
    products = sum(count * math.prod(fact(node.args[1]).at(1)[1:]) for node, count in zip(layers, elements, strict=True))
    if products < LEAST_PRODUCTS * sum(elements):
        logger.warning(
            "style 'fast': onnxruntime is likely to run the float model's file faster, and one of style 'exact' slower: an element of a"
            " layer's result has %.0f products on average, and sums of bytes make good for the shifts of %s from about %d on",
            products / sum(elements),
            integer.meta["target"].name,
            LEAST_PRODUCTS,
        )
    return _compared(integer, lambda io: SumsWriter(integer, io, opset, refused), io, names)


def _compared(integer: fx.GraphModule, writer: Callable[[str], Writer], io: str, names: Names) -> onnx.ModelProto:
    """Return the model that a writer for an `io` writes, after its form with float inputs and outputs was compared as a whole."""
    model = writer(io).write(*names)
    _check_whole(integer, writer("float").write(None, None) if io == "integer" else model)
    return model


def _run(model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Mapping[str, str], runtime: str) -> dict[str, Tensor]:
    level, threads = next((level, threads) for name, level, threads in RUNTIMES if name == runtime)
    return Runner(model, level, threads, None, settings)(feeds)


def _images(operands: Iterable[fx.Node]) -> int:
    """Return the batch size of a proof: the smaller an item of the smallest operand is, the larger is the batch."""
    smallest: int = min(math.prod(fact(operand).at(BATCH_SIZES[0])) for operand in operands)
    return min(MOST_DRAWS, -(-DRAWN // max(1, smallest))) * BATCH_SIZES[0]


Draw = Callable[[fx.Node, int, torch.Generator], Tensor]  # returns an operand of a proof at a batch size


def _whole_range(operand: fx.Node, images: int, generator: torch.Generator) -> Tensor:
    """Return integers of the whole range; every second item of the batch has pairs of its ends (`pairs_of_ends`)."""
    grid, operand_fact = qparams(operand), fact(operand)
    dtype, zero = (INT8, 0) if grid is None else (ACTIVATION_TYPES[grid.dtype], grid.zero_point)
    value = whole_range(dtype, operand_fact.at(images), dtype.low, generator)
    if operand_fact.batch_axis is None:
        return value
    odd = torch.arange(value.shape[operand_fact.batch_axis], device="cpu") % 2 == 1
    odd = odd.view(-1, *[1] * (value.dim() - 1 - operand_fact.batch_axis))
    return torch.where(odd, pairs_of_ends(dtype, value.shape, dtype.low, zero, generator), value)


def _every_byte(operand: fx.Node, images: int, generator: torch.Generator) -> Tensor:
    stored = fact(operand).dtype
    return torch.arange(torch.iinfo(stored).min, torch.iinfo(stored).max + 1, device="cpu").to(stored)


def _any_range(operand: fx.Node, images: int, generator: torch.Generator) -> Tensor:
    return of_any_range(fact(operand).at(images), generator)


def _kernel_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int) -> bool:
    """Return whether one kernel, alone, gives PyTorch's values for operands of the whole range."""
    if node.target is dynamic_linear:
        return _is_exact(FastWriter(integer, "float", opset), node, (), _any_range)
    writer = FastWriter(integer, "integer", opset)
    return _is_exact(writer, node, writer.parts_of(node), _every_byte if node.target is lookup else _whole_range)


def _sum_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int) -> bool | None:
    """Return the same of a layer as a sum of products of bytes; None if onnxruntime does not run it."""
    try:
        return _is_exact(SumsWriter(integer, "integer", opset), node, (), _whole_range)
    except ExportError as error:  # before 1.24 onnxruntime has no ConvInteger of int8
        logger.debug("%s: %s", node.name, error.because)
        return None


def _is_exact(writer: Writer, node: fx.Node, parts: Sequence[fx.Node], draw: Draw) -> bool:
    """Return whether onnxruntime, for a file of the node and its parts and for random operands, computes PyTorch's values."""
    operands = dict.fromkeys(plain(read) for part in (*parts, node) for read in part.all_input_nodes)
    constants = {each: resolve(writer.integer, str(each.target)).detach().cpu() for each in operands if each.op == "get_attr"}
    images, generator = _images(each for each in operands if each not in constants), torch.Generator().manual_seed(0)
    drawn = {each: draw(each, images, generator) for each in operands if each not in constants and each not in parts}
    fed = {each.name: writer.stored(each, value) for each, value in drawn.items()}
    writer.values.update(constants)
    writer.values.update((each, each.name) for each in drawn)
    e = writer.emitter
    e.types.update((name, value.dtype) for name, value in fed.items())
    result = writer.emit(node, PRIMITIVES[node.target])  # type: ignore[index]
    assert result is not None
    inputs = [value_info(name, value.dtype, value.shape) for name, value in fed.items()]
    outputs = [helper.make_tensor_value_info(result, TYPES[e.dtype(result)], None)]
    graph = helper.make_graph(e.nodes, "kernel", inputs, outputs, e.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", writer.opset)], ir_version=10)
    expected = writer.stored(node, evaluate(writer.integer, Match(node, (node,), ()), {**constants, **drawn})[0]).to(e.dtype(result))
    # Without VNNI it may be that only one of the runtimes saturates; session options help those alone that optimise.
    return all(torch.equal(_run(model, fed, {}, runtime)[result], expected) for runtime in MEASURED_RUNTIMES)


def _tell(integer: fx.GraphModule, refused: Sequence[str], count: int) -> None:
    """Record the nodes for which onnxruntime's kernel, alone, gave other integers than PyTorch."""
    because = f"it differs from the integer graph for {len(refused)} of {count} operators in this onnxruntime"
    disagreed(integer, "onnxruntime's kernel", [f"%{name}" for name in refused], because, "they are written as in style 'exact'")


def _check_whole(integer: fx.GraphModule, model: onnx.ModelProto) -> None:
    """Raise ExportError if the file's outputs for random inputs differ from the integer graph's, with `PRECISE` or without."""
    if float_nodes(integer):
        return  # rounding of host operators differs; the kernels were compared one by one
    for settings in ({}, PRECISE):
        for name, actual, expected in results_of(integer, model, settings):
            if not torch.equal(actual, expected):
                raise ExportError(
                    "the model in style 'fast' does not give the integer model's numbers in this onnxruntime",
                    because=f"{int((actual != expected).sum())} elements of the output {name!r} differ on random inputs, "
                    "though every kernel alone is exact",
                    remedy="export with style='exact', and report this with the version of onnxruntime and the processor",
                )


def results_of(graph: fx.GraphModule, model: onnx.ModelProto, settings: Mapping[str, str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each output of a model, and its value on random inputs in onnxruntime and in PyTorch, from its graph."""
    generator = torch.Generator().manual_seed(0)
    inputs = [random_input(graph, node, generator) for node in graph.graph.find_nodes(op="placeholder")]
    device = next((buffer.device for buffer in graph.buffers()), torch.device("cpu"))
    with torch.no_grad():
        results = pytree.tree_leaves(graph(**by_name(graph, [value.to(device) for value in inputs])))
    outputs = _run(model, dict(zip((info.name for info in model.graph.input), inputs, strict=True)), settings, MEASURED_RUNTIMES[0])
    for info, value in zip(model.graph.output, [value.cpu() for value in results if isinstance(value, Tensor)], strict=True):
        yield info.name, outputs[info.name], value


def float_nodes(integer: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that are neither primitives nor constants nor the ends of the graph."""
    return [
        node
        for node in integer.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output") and not (node.op == "call_function" and node.target in PRIMITIVES)
    ]


def random_input(integer: fx.GraphModule, node: fx.Node, generator: torch.Generator) -> Tensor:
    """Return float values over the range of the quantize that reads them; without one they are normal, and integers are 0 or 1."""
    value: Tensor = random_value(fact(node), generator)
    reader = next((user for user in node.users if user.target is quantize), None)
    if reader is None or not value.is_floating_point():
        return value
    low, high = (int(limit) for limit in reader.args[2:4])  # type: ignore[arg-type]
    scaled: Tensor = value * (float(resolve(integer, str(reader.args[1].target))) * max(high, -low - 1) / 2)  # type: ignore[union-attr]
    return scaled


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
    functions: bool = False
    runtime: str | None = None


def save_models(
    models: Mapping[str, onnx.ModelProto], folder: str | os.PathLike[str], external_data: bool | None,
    others: Mapping[str, Content] | None = None, opened: bool = True,
) -> None:  # fmt: skip
    """Check models and write them by their file names into one folder, followed by `others`, files that refer to them.

    The tensors of a model go to its name with ".data" appended if `external_data` requests it, or if one file cannot hold them.
    Tensors are removed from a model whose data is written externally. Raises ExportError if a model is not valid, is too
    large for one file, cannot be written, or, if it is `opened`, onnxruntime cannot open it; existing files are then unchanged.
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
        raise ExportError(f"{name} cannot be one file", because=because, remedy="leave external_data out, or pass external_data=True")
    offsets: dict[bytes, int] = {}  # of the tensors, in order; equal ones, as the weights of the steps of an LSTM, have one place
    if size > LARGEST_FILE if external_data is None else external_data:
        end = 0
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= SMALLEST_EXTERNAL:
                offset = offsets.setdefault(tensor.raw_data, end)
                end = max(end, offset + len(tensor.raw_data))
                set_external_data(tensor, f"{name}.data", offset, len(tensor.raw_data))
                tensor.ClearField("raw_data")
    return {**({f"{name}.data": list(offsets)} if offsets else {}), name: model.SerializeToString()}


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
                "multiply by a number after a matrix product instead of before it; or pass another opset, or style='exact'",
            ) from error


# ---- styles: how the file of an integer model is written ---------------------------------------------------------------
@dataclass(frozen=True)
class Style:
    """A way to write an integer model."""

    # An integer model, `io`, the opset and the names of inputs and outputs -> the model in memory.
    write: Callable[[fx.GraphModule, str, int, Names], onnx.ModelProto]
    words: str  # what it is, for messages
    opsets: range = range(17, min(onnx.defs.onnx_opset_version(), 27) + 1)  # the opsets in which it can be written, and the default
    default: int = 21
    exact: bool = True  # whether a file has the integer model's bits; `verify` measures the difference of one that has not


def _auto(integer: fx.GraphModule, io: str, opset: int, names: Names, runtime: str | None = None) -> onnx.ModelProto:
    """Return the model in style "fast" where that runtime has its kernels and they are exact, else in style "exact"."""
    model, here = None, runtime == RUNTIME_NAMES[0]
    if here or (runtime is None and has_kernels(integer)):
        try:
            model = write_fast(with_integer_loops(integer), io, opset, names, plain=not here)
        except ExportError as error:  # the model differs as a whole, or nothing can be written, which the exact style reports as well
            logger.warning("style 'auto': 'fast' cannot be used: %s", error.because)
    style, where = "exact" if model is None else "fast", runtime or ("any runtime" if model is None else RUNTIME_NAMES[0])
    logger.info("style 'auto': written in style '%s', for %s, where no style with equal bits is faster", style, where)
    return _exact(integer, io, opset, names) if model is None else model


def _exact(integer: fx.GraphModule, io: str, opset: int, names: Names, functions: bool = False) -> onnx.ModelProto:
    readable = with_integer_loops(integer) if bodies(integer.graph) else integer
    writer = Writer(readable, io, opset, {} if functions else None)
    model = writer.write(*names)
    if torch.float64 in writer.emitter.dtypes:
        logger.info(
            "style 'exact': sums beyond 24 bits are float64, which OpenVINO and IREE compute in float32; onnxruntime and TVM do not"
        )
    return model


def _fast(integer: fx.GraphModule, io: str, opset: int, names: Names) -> onnx.ModelProto:
    model = write_fast(with_integer_loops(integer), io, opset, names)
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
    model = writer.write(*names)
    if adds_pairs() and not pairs_fit(writer.emitter):
        logger.warning(
            "style 'qdq': onnxruntime's kernels saturate on this processor, which costs the outputs decibels; they do not with the session"
            " options %s, nor by default where the model was prepared with fxq.Options(without_vnni=True)",
            PRECISE,
        )
    return model


STYLES = {
    "auto": Style(_auto, "the fastest with equal bits: 'fast' where that is exact without options of a session, else 'exact'"),
    "exact": Style(_exact, "integers in standard operators, with equal bits wherever these are computed as ONNX defines"),
    "fast": Style(_fast, "kernels of 8 bits, with equal bits in onnxruntime as its metadata says"),
    "qdq": Style(_qdq, "floats between QuantizeLinear and DequantizeLinear, whose bits differ", range(11, 22), 17, False),
}
FLOAT_OPSETS = (range(11, 22), 18)  # those of a float model


def export_integer(integer: fx.GraphModule, path: str | os.PathLike[str], style: str, io: str, options: FileOptions) -> Path:
    """Write an integer model, and return the path; `style` and `io` are as in `fxq.export_onnx`."""
    check_arguments(integer, style, io, options.opset)
    version = STYLES[style].default if options.opset is None else options.opset
    if options.functions and style != "exact":
        remedy = "pass style='exact' as well, or leave functions out"
        raise ConfigurationError(f"functions cannot be written in style {style!r}", because="only 'exact' has them", remedy=remedy)
    check_choice("runtime", options.runtime, [None, RUNTIME_NAMES[0], *OTHER_RUNTIMES])
    write = partial(_exact, functions=True) if options.functions else STYLES[style].write
    write = partial(_auto, runtime=options.runtime) if style == "auto" else write
    model = with_layouts(write(integer, io, version, (options.input_names, options.output_names)), options.layouts, integer)
    save_models({Path(path).name: model}, Path(path).parent, options.external_data)
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
