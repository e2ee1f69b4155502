"""Style "fast" as it is written: kernels are admitted one by one, and the whole model is compared, before the file is created.

A kernel that differs from PyTorch here is written in the form of style "exact" instead, as the metadata and the log report.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx
import torch
from onnx import helper
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxquant.backends.onnx.fast_kernels import FastWriter, SumsWriter
from fxquant.backends.onnx.fast_parts import plain
from fxquant.backends.onnx.float_export import random_value
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, RUNTIMES, Runner
from fxquant.backends.onnx.writer import DOMAIN, TYPES, Writer, value_info
from fxquant.errors import ExportError
from fxquant.ir.graph import BATCH_SIZES, by_name, fact, resolve
from fxquant.ir.integer import qparams
from fxquant.kernels.admission import DRAWN, MOST_DRAWS, evaluate, of_any_range, pairs_of_ends, whole_range
from fxquant.kernels.kernel import Match
from fxquant.numerics.grids import ACTIVATION_TYPES, INT8
from fxquant.primitives import PRIMITIVES, Role, role_of
from fxquant.primitives.elementwise import lookup
from fxquant.primitives.quantization import quantize, requantize_real
from fxquant.primitives.runtime_scales import dynamic_linear
from fxquant.support import disagreed, logger

Names = tuple[Sequence[str] | None, Sequence[str] | None]  # that the user gives to inputs and to outputs

LEAST_PRODUCTS = 256  # for each element of a layer's result: what sums of bytes gain, shifts and roundings take back where there are fewer


def has_kernels(integer: fx.GraphModule) -> bool:
    """Return whether ONNX's integer operators, which multiply by a float32 number, can requantize as the model's arithmetic does.

    If they cannot, they compute sums of products only.
    """
    return requantize_real in integer.meta["target"].arithmetic.primitives


def write_fast(integer: fx.GraphModule, io: str, opset: int, names: Names, *, plain: bool = False) -> onnx.ModelProto | None:
    """Return the model in memory, compared with the integer graph. Raises ExportError if it differs as a whole.

    If `plain`, return None if the model has no kernels, or one is not exact here in a session without options.
    """
    if not has_kernels(integer):
        return _write_sums(integer, io, opset, names)
    settings: dict[str, str] = {}
    writer = FastWriter(integer, io, opset)
    looked_up = [node.name for node in writer.kernels() if writer.computes(node) and not _kernel_is_exact(integer, node, opset, settings)]
    kernels = [node for node in writer.kernels() if not writer.computes(node)]
    refused = [node for node in kernels if not _kernel_is_exact(integer, node, opset, settings)]
    if plain and (refused or not kernels):
        return None
    if refused:
        settings = PRECISE
        refused = [node for node in kernels if not _kernel_is_exact(integer, node, opset, settings)]
        logger.warning("style 'fast': onnxruntime needs the session options %s for exact kernels here", settings)
    _tell(integer, [node.name for node in refused], len(kernels))
    exact = [*looked_up, *(node.name for node in refused)]
    sessions = [settings] if settings is PRECISE else [settings, PRECISE]
    return _compared(integer, lambda io: FastWriter(integer, io, opset, exact, settings), io, names, sessions)


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
    return _compared(integer, lambda io: SumsWriter(integer, io, opset, refused), io, names, [{}, PRECISE])


def _compared(
    integer: fx.GraphModule, writer: Callable[[str], Writer], io: str, names: Names, sessions: Sequence[Mapping[str, str]]
) -> onnx.ModelProto:
    """Return the model that a writer for an `io` writes, after its form with float inputs and outputs was compared as a whole."""
    model = writer(io).write(*names)
    _check_whole(integer, writer("float").write(None, None) if io == "integer" else model, sessions)
    return model


def _run(
    model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Mapping[str, str], runtime: str = MEASURED_RUNTIMES[0]
) -> dict[str, Tensor]:
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


def _kernel_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int, settings: Mapping[str, str]) -> bool:
    """Return whether one kernel, alone, gives PyTorch's values for operands of the whole range."""
    if node.target is dynamic_linear:
        return _is_exact(FastWriter(integer, "float", opset), node, (), _any_range, settings)
    writer = FastWriter(integer, "integer", opset)
    return _is_exact(writer, node, writer.parts_of(node), _every_byte if node.target is lookup else _whole_range, settings)


def _sum_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int) -> bool | None:
    """Return the same of a layer as a sum of products of bytes; None if onnxruntime does not run it."""
    try:
        return _is_exact(SumsWriter(integer, "integer", opset), node, (), _whole_range, {})
    except ExportError as error:  # before 1.24 onnxruntime has no ConvInteger of int8
        logger.debug("%s: %s", node.name, error.because)
        return None


def _is_exact(writer: Writer, node: fx.Node, parts: Sequence[fx.Node], draw: Draw, settings: Mapping[str, str]) -> bool:
    """Return whether onnxruntime computes PyTorch's values: the node and these parts are written to a file, and run on drawn operands."""
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
    own = [helper.make_opsetid(DOMAIN, 1)] if e.functions else []
    opsets = [helper.make_opsetid("", writer.opset), *own]
    model = helper.make_model(graph, opset_imports=opsets, functions=list(e.functions.values()), ir_version=10)
    expected = writer.stored(node, evaluate(writer.integer, Match(node, (node,), ()), {**constants, **drawn})[0]).to(e.dtype(result))
    # Without VNNI it may be that only one of the runtimes saturates.
    return all(torch.equal(_run(model, fed, settings, runtime)[result], expected) for runtime in MEASURED_RUNTIMES)


def _tell(integer: fx.GraphModule, refused: Sequence[str], count: int) -> None:
    """Record the nodes for which onnxruntime's kernel, alone, gave other integers than PyTorch."""
    because = f"it differs from the integer graph for {len(refused)} of {count} operators in this onnxruntime"
    disagreed(integer, "onnxruntime's kernel", [f"%{name}" for name in refused], because, "they are written as in style 'exact'")


def _check_whole(integer: fx.GraphModule, model: onnx.ModelProto, sessions: Sequence[Mapping[str, str]]) -> None:
    """Raise ExportError if the model's outputs, with any of these session options, differ from the integer graph's on random inputs."""
    if float_nodes(integer):
        return  # rounding of host operators differs; the kernels were compared one by one
    for settings in sessions:
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
    expected = [value.cpu() for value in results if isinstance(value, Tensor)]
    outputs = _run(model, dict(zip((info.name for info in model.graph.input), inputs, strict=True)), settings)
    for info, value in zip(model.graph.output, expected, strict=True):
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
