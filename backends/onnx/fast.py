"""Style "fast" as it is written: kernels are admitted one by one, and the whole model is compared, before the file is created.

A kernel that differs from PyTorch here is written in the form of style "exact" instead, as the metadata and the log report.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import onnx
import torch
from onnx import helper
from torch import Tensor, fx

from fxquant.backends.onnx.emitter import DOMAIN, TYPES, value_info
from fxquant.backends.onnx.fast_kernels import FastWriter, moved_by
from fxquant.backends.onnx.fast_parts import plain
from fxquant.backends.onnx.metadata import PRECISE
from fxquant.backends.onnx.runtime import MEASURED_RUNTIMES, RUNTIMES, Runner
from fxquant.backends.onnx.sums import SumsWriter
from fxquant.errors import ExportError
from fxquant.ir.facts import BATCH_SIZES, TensorFact
from fxquant.ir.graph import by_name, fact, resolve
from fxquant.ir.integer import qparams, zero_point
from fxquant.kernels.admission import DRAWN, MOST_DRAWS, pairs_of_ends, whole_range
from fxquant.numerics.grids import ACTIVATION_TYPES, INT8
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.arithmetic import Arithmetic
from fxquant.primitives.elementwise import lookup
from fxquant.primitives.quantization import quantize
from fxquant.primitives.requantize import requantize_real
from fxquant.primitives.runtime_scales import dynamic_linear
from fxquant.support.offers import disagreed

logger = logging.getLogger("fxquant")


def has_kernels(arithmetic: Arithmetic) -> bool:
    """Return whether ONNX's integer operators, which multiply by a float32 number, can requantize as this arithmetic does.

    If they cannot, they compute sums of products only.
    """
    return requantize_real in arithmetic.primitives


def write_fast(
    integer: fx.GraphModule,
    io: str,
    opset: int,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    *,
    plain: bool = False,
) -> onnx.ModelProto | None:
    """Return the model in memory, compared with the integer graph. Raises ExportError if it differs as a whole.

    If `plain`, return None if the model has no kernels, or one is not exact here in a session without options.
    """
    if not has_kernels(integer.meta["target"].arithmetic):
        return _write_sums(integer, io, opset, input_names, output_names)
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
    names = [*looked_up, *(node.name for node in refused)]
    model = FastWriter(integer, io, opset, names, settings).write(input_names, output_names)
    whole = FastWriter(integer, "float", opset, names).write(None, None) if io == "integer" else model
    _check_whole(integer, whole, [settings] if settings is PRECISE else [settings, PRECISE])
    return model


def _write_sums(
    integer: fx.GraphModule, io: str, opset: int, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
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
    writer = SumsWriter(integer, io, opset, refused)
    if writer.relies_on_vnni():
        logger.warning(
            "style 'fast': this file needs onnxruntime 1.24, and on x86 processors without VNNI its numbers are others;"
            " those of style 'exact' are the same anywhere"
        )
    model = writer.write(input_names, output_names)
    whole = SumsWriter(integer, "float", opset, refused).write(None, None) if io == "integer" else model
    _check_whole(integer, whole, [{}, PRECISE])
    return model


def _run(
    model: onnx.ModelProto, feeds: dict[str, Tensor], settings: Mapping[str, str], runtime: str = MEASURED_RUNTIMES[0]
) -> dict[str, Tensor]:
    """Run the model in an onnxruntime of `RUNTIMES`, with these session options."""
    level, threads = next((level, threads) for name, level, threads in RUNTIMES if name == runtime)
    return Runner(model, level, threads, None, settings)(feeds)


def _images(operands: Iterable[fx.Node]) -> int:
    """Return the batch size of a proof: the smaller an item of the smallest operand is, the larger is the batch."""
    smallest: int = min(math.prod(fact(operand).at(BATCH_SIZES[0])) for operand in operands)
    return min(MOST_DRAWS, -(-DRAWN // max(1, smallest))) * BATCH_SIZES[0]


def _whole_range(operand: fx.Node, images: int, generator: torch.Generator) -> Tensor:
    """Return integers of the whole range; every second item of the batch has pairs of its ends (`pairs_of_ends`)."""
    described, known = qparams(operand), fact(operand)
    dtype, zero = (INT8, 0) if described is None else (ACTIVATION_TYPES[described.dtype], described.zero_point)
    value = whole_range(dtype, known.at(images), dtype.low, generator)
    if known.batch_axis is None:
        return value
    odd = torch.arange(value.shape[known.batch_axis], device="cpu") % 2 == 1
    odd = odd.view(-1, *[1] * (value.dim() - 1 - known.batch_axis))
    return torch.where(odd, pairs_of_ends(dtype, value.shape, dtype.low, zero, generator), value)


def _every_byte(operand: fx.Node) -> Tensor:
    stored = fact(operand).dtype
    return torch.arange(torch.iinfo(stored).min, torch.iinfo(stored).max + 1, device="cpu").to(stored)


def _kernel_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int, settings: Mapping[str, str]) -> bool:
    """Return whether one integer kernel, alone, gives PyTorch's integers for operands of the whole range."""
    if node.target is dynamic_linear:
        return _dynamic_is_exact(integer, node, opset, settings)
    writer = FastWriter(integer, "integer", opset)
    parts = writer.parts_of(node)
    generator = torch.Generator().manual_seed(0)
    given: dict[fx.Node, Tensor] = {}
    operands = dict.fromkeys(plain(read) for part in (*parts, node) for read in part.all_input_nodes)
    images = _images(operand for operand in operands if operand.op != "get_attr")
    for operand in operands:
        if operand.op == "get_attr":
            given[operand] = writer.values[operand] = resolve(integer, str(operand.target)).cpu()
        elif operand not in parts:
            given[operand] = _every_byte(operand) if node.target is lookup else _whole_range(operand, images, generator)
            writer.values[operand] = operand.name
            writer.emitter.types[operand.name] = torch.uint8
    fed = {
        operand.name: (given[operand].to(torch.int16) + moved_by(operand)).to(torch.uint8) for operand in given if operand.op != "get_attr"
    }
    result = writer.emit(node, PRIMITIVES[node.target])  # type: ignore[index]
    assert result is not None
    sizes = {name: value_info(name, torch.uint8, value.shape) for name, value in fed.items()}
    graph = helper.make_graph(
        writer.emitter.nodes,
        "kernel",
        list(sizes.values()),
        [helper.make_tensor_value_info(result, onnx.TensorProto.UINT8, None)],
        writer.emitter.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with torch.no_grad():
        for part in parts:
            for centred in part.all_input_nodes:
                if centred not in given:
                    given[centred] = given[plain(centred)].to(torch.int32) - zero_point(plain(centred))
            given[part] = part.target(*fx.map_arg(part.args, given.__getitem__))  # type: ignore[operator]
        wanted: Tensor = node.target(*fx.map_arg(node.args, given.__getitem__))  # type: ignore[operator]
    return all(
        torch.equal(_run(model, fed, settings, runtime)[result].to(torch.int16) - moved_by(node), wanted.to(torch.int16))
        for runtime in MEASURED_RUNTIMES  # without VNNI it may be that only one of them saturates
    )


def _tell(integer: fx.GraphModule, refused: Sequence[str], count: int) -> None:
    """Record the nodes for which onnxruntime's kernel, alone, gave other integers than PyTorch."""
    because = f"it differs from the integer graph for {len(refused)} of {count} operators in this onnxruntime"
    disagreed(integer, "onnxruntime's kernel", [f"%{name}" for name in refused], because, "they are written as in style 'exact'")


def _sum_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int) -> bool | None:
    """Return whether a layer as a sum of products of bytes, alone, gives PyTorch's integers for operands of the whole range.

    Return None if onnxruntime does not run it.
    """
    writer = SumsWriter(integer, "integer", opset)
    operand, *constants = (argument for argument in node.args if isinstance(argument, fx.Node))
    given = {constant: resolve(integer, str(constant.target)).detach().cpu() for constant in constants}
    given[operand] = _whole_range(operand, _images([operand]), torch.Generator().manual_seed(0))
    writer.values.update(given)
    writer.values[operand], writer.emitter.types[operand.name] = operand.name, torch.int8
    result = writer.emit(node, PRIMITIVES[node.target])  # type: ignore[index]
    assert result is not None
    dtype = writer.emitter.dtype(result)
    model = helper.make_model(
        helper.make_graph(
            writer.emitter.nodes,
            "kernel",
            [value_info(operand.name, torch.int8, given[operand].shape)],
            [helper.make_tensor_value_info(result, TYPES[dtype], None)],
            writer.emitter.initializers,
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10,
    )
    with torch.no_grad():
        wanted: Tensor = node.target(*fx.map_arg(node.args, given.__getitem__))  # type: ignore[operator]
    try:
        return all(
            torch.equal(_run(model, {operand.name: given[operand]}, {}, runtime)[result], wanted.to(dtype)) for runtime in MEASURED_RUNTIMES
        )
    except ExportError as error:  # before 1.24 onnxruntime has no ConvInteger of int8
        logger.debug("%s: %s", node.name, error.because)
        return None


def _dynamic_is_exact(integer: fx.GraphModule, node: fx.Node, opset: int, settings: Mapping[str, str]) -> bool:
    """Return whether a dynamically quantized layer, alone, gives PyTorch's values for an operand with all possible integers."""
    writer = FastWriter(integer, "float", opset)
    operand, constants = node.args[0], [value for value in node.args[1:] if isinstance(value, fx.Node)]
    assert isinstance(operand, fx.Node)
    given = {constant: resolve(integer, str(constant.target)).detach().cpu() for constant in constants}
    generator = torch.Generator().manual_seed(0)
    size = fact(operand).at(_images([operand]))
    ends = torch.tensor([-128, 127], device="cpu", dtype=torch.int64)[
        torch.randint(0, 2, size, generator=generator, device="cpu", dtype=torch.int64)
    ]
    within = torch.randint(-128, 128, size, generator=generator, device="cpu")
    value = torch.where(torch.rand(size, generator=generator, device="cpu", dtype=torch.float32) < 0.5, ends, within).float()
    writer.values.update(given)
    writer.values[operand], writer.emitter.types[operand.name] = operand.name, torch.float32
    result = writer.emit(node, PRIMITIVES[node.target])  # type: ignore[index]
    assert result is not None
    known = value_info(operand.name, torch.float32, value.shape)
    outputs = [helper.make_tensor_value_info(result, onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph(writer.emitter.nodes, node.name, [known], outputs, writer.emitter.initializers)
    own = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=own, functions=list(writer.emitter.functions.values()), ir_version=8)
    with torch.no_grad():
        wanted: Tensor = dynamic_linear(value, *(given.get(argument, argument) for argument in node.args[1:]))  # type: ignore[arg-type]
    return all(torch.equal(_run(model, {operand.name: value}, settings, runtime)[result], wanted) for runtime in MEASURED_RUNTIMES)


def _check_whole(integer: fx.GraphModule, model: onnx.ModelProto, sessions: Sequence[Mapping[str, str]]) -> None:
    """Raise ExportError if the model's outputs, with any of these session options, differ from the integer graph's on random inputs."""
    generator = torch.Generator().manual_seed(0)
    placeholders = [node for node in integer.graph.nodes if node.op == "placeholder"]
    inputs = [random_input(integer, node, generator) for node in placeholders]
    if float_nodes(integer):
        return  # rounding of host operators differs; the kernels were compared one by one
    with torch.no_grad():
        wanted: list[Tensor] = []
        device = next((buffer.device for buffer in integer.buffers()), torch.device("cpu"))
        results = integer(**by_name(integer, [value.to(device) for value in inputs]))
        fx.node.map_aggregate(results, lambda value: wanted.append(value.cpu()) if isinstance(value, Tensor) else None)
    fed = dict(zip((info.name for info in model.graph.input), inputs, strict=True))
    for settings in sessions:
        found = _run(model, fed, settings)
        for value, output in zip(wanted, model.graph.output, strict=True):
            if not torch.equal(found[output.name], value):
                raise ExportError(
                    "the model in style 'fast' does not give the integer model's numbers in this onnxruntime",
                    because=f"{int((found[output.name] != value).sum())} elements of the output {output.name!r} differ on random inputs, "
                    "though every kernel alone is exact",
                    remedy="export with style='exact', and report this with the version of onnxruntime and the processor",
                )


def float_nodes(integer: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that are neither primitives nor constants nor the ends of the graph."""
    return [
        node
        for node in integer.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output") and not (node.op == "call_function" and node.target in PRIMITIVES)
    ]


def random_input(integer: fx.GraphModule, node: fx.Node, generator: torch.Generator) -> Tensor:
    """Return float values over the range of the quantize that reads them; without one they are normal, and integers are 0 or 1."""
    known: TensorFact = fact(node)
    size = known.at(BATCH_SIZES[0])
    if not known.dtype.is_floating_point:
        return torch.randint(0, 2, size, generator=generator, device="cpu").to(known.dtype)
    reader = next((user for user in node.users if user.target is quantize), None)
    step = 1.0
    if reader is not None:
        low, high = (int(limit) for limit in reader.args[2:4])  # type: ignore[arg-type]
        step = float(resolve(integer, str(reader.args[1].target))) * max(high, -low - 1) / 2  # type: ignore[union-attr]
    return (torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") * step).to(known.dtype)
