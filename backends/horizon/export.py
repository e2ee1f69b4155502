"""Export of an integer model as the folder that the vendor's compiler takes: the ONNX file, its configuration, the commands."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from fxquant.analysis.segments import returned
from fxquant.backends.horizon.camera import MEAN, check_camera
from fxquant.backends.horizon.formats import FORMATS, HB_MAPPER, OUTPUT, README, Format
from fxquant.backends.onnx.export import check_arguments
from fxquant.backends.onnx.horizon import OPSET, fixed_shape, float_nodes
from fxquant.backends.onnx.model_files import save_models
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, source
from fxquant.ir.integer import Operation, operation, qparams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME
from fxquant.ops.elementwise.activation import clamp
from fxquant.primitives import PRIMITIVES
from fxquant.support.arguments import FOLDER, TEXT, checked, choice, such
from fxquant.support.progress import working

logger = logging.getLogger("fxquant")

LAYERS = "layers.json"
SCRIPT = "compile.sh"
PLAIN = re.compile(r"[\w.+/-]+")  # names that the configuration can hold in quotes and in lists
NAME = such("a name of letters, digits, _, . and -", TEXT.take, lambda name: bool(PLAIN.fullmatch(name)) and "/" not in name)


@checked(
    folder=FOLDER,
    name=NAME,
    optimize=choice(*HB_MAPPER.levels),
    mode=choice("latency", "bandwidth"),
    camera=choice(*HB_MAPPER.cameras).or_none("float32"),
)
@working("writing for the vendor's compiler")
def export_horizon(
    integer: fx.GraphModule,
    folder: str | os.PathLike[str],
    name: str = "model",
    *,
    optimize: str = "O2",
    mode: str = "latency",
    camera: str | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Path:
    """Write the files that the target's vendor compiler takes into a folder, and return the folder's path.

    The folder holds NAME.onnx, at opset 11 with a batch of 1, quantize and dequantize pairs and float weights on their grids; NAME.yaml,
    the configuration of hb_mapper; compile.sh, the commands; and layers.json, the source line of each layer, for the errors of
    `compile_horizon`. Equal models give equal bytes. The file takes and returns float32, in the model's order of dimensions.

    The program that the compiler makes computes the integers of `integer`: `verify(integer, "model.bin", batches)` proves it on batches.
    Operators that stay in float are written as they are, and run on the processor.

    optimize   the level of the compiler: "O0" to "O3"
    mode       what it optimizes for: "latency" or "bandwidth"
    camera     what the program takes in place of float32: "nv12" from the camera's pyramid, or "yuv444" from memory, each channel in 0…255.
               The model's only input is then YUV minus 128, int8 on the scale 1: `fxq.nn.YuvToRgb(centred=True, …)` is its first module,
               and its input's scale is set by `set_qparams`. The program's integers are those of `integer`
    input_names, output_names  names in the file; by default those of the graph

    For nash targets the file has opset 19 and `HzCalibration` nodes, and compile.sh calls hb_compile. These files follow public documents,
    and have not been tried with a compiler; a warning and README.txt say so.

    Raises ConfigurationError if the model is not an integer model or the compiler does not support its target. Raises ExportError for
    operators that its program would compute differently, such as an upper clamp inside the range of its grid, or an average pool of int16.
    """
    check_arguments(integer, "qdq", "float", OPSET)
    target = _check_target(integer)
    format = FORMATS[target]
    format.check_level(optimize)
    if camera is not None:
        check_camera(integer, format, camera)
    for node in integer.graph.nodes:
        _check_node(node)
    model = format.writer(integer, "float", format.opset).write(input_names, output_names)
    for info in model.graph.input:
        if not PLAIN.fullmatch(info.name):
            raise ConfigurationError(
                f"the input name {info.name!r} cannot be written",
                because="the compiler's configuration lists names with ; between them",
                remedy="pass input_names of letters, digits, _, . and -",
            )
    directory = Path(folder)
    inputs = [(info.name, fixed_shape(info)) for info in model.graph.input]
    beside = {
        f"{name}.yaml": _configuration(format, name, target, inputs, optimize, mode, camera, float_nodes(integer, model)),
        SCRIPT: format.commands.format(name=name, output=OUTPUT),
        LAYERS: json.dumps(_layers(integer, name, target), indent=1, ensure_ascii=False) + "\n",
    }
    if format.untried is not None:
        beside[README] = format.untried
        logger.warning(
            "the files for %s follow public documents of %s, and no compiler has tried them: see %s", target, format.compiler, README
        )
    save_models({f"{name}.onnx": model}, directory, None, beside)
    (directory / SCRIPT).chmod(0o755)
    return directory


def refusals(integer: fx.GraphModule) -> list[ExportError]:
    """Return an error for each node of an integer model that the compiler would compute differently; `export_horizon` raises the first."""
    found = []
    for node in integer.graph.nodes:
        try:
            _check_node(node)
        except ExportError as error:
            found.append(error)
    return found


def _configuration(
    format: Format,
    name: str,
    march: str,
    inputs: list[tuple[str, list[int]]],
    level: str,
    mode: str,
    camera: str | None,
    processor: list[str],
) -> str:
    def every(word: str) -> str:
        return ";".join(word for _ in inputs)

    return format.configuration.format(
        name=name,
        march=march,
        output=OUTPUT,
        names=";".join(input for input, _ in inputs),
        shapes=";".join("x".join(map(str, shape)) for _, shape in inputs),
        types=every("featuremap" if camera is None else camera),
        trained=every("featuremap" if camera is None else "yuv444"),
        layouts=every("NCHW"),
        arrived=every("NCHW" if camera is None else "NHWC"),
        norms=every("no_preprocess" if camera is None else "data_mean"),
        mean="" if camera is None else MEAN,
        processor=f"\n  run_on_cpu: '{';'.join(processor)}'" if processor else "",
        level=level,
        mode=mode,
    )


def _layers(integer: fx.GraphModule, name: str, march: str) -> dict[str, Any]:
    """Return what `compile_horizon` reads of the model: its name, its march, and the source line of each layer."""
    made = [node for node in integer.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    sources = {node.name: source(node) for node in made if node.target not in PRIMITIVES or operation(node) is not None}
    return {"name": name, "march": march, "layers": sources}


def check_march(name: str) -> None:
    """Raise ConfigurationError if no compiler of the vendor's computes the integers of the target of this name."""
    if name not in FORMATS:
        raise ConfigurationError(
            f"an integer model of {name} cannot be written for the vendor's compilers",
            because=f"they compile for {', '.join(FORMATS)}, and their programs compute other integers than {name}",
            remedy=f"prepare the model for {' or '.join(HB_MAPPER.marches)}, or write it with fxq.export_onnx(style='qdq')",
        )


def _check_target(integer: fx.GraphModule) -> str:
    """Return the target's name. Raises ConfigurationError if no compiler computes its integers, ExportError if nothing is returned."""
    name: str = integer.meta["target"].name
    check_march(name)
    if not returned(integer):
        raise ExportError("there is nothing to write", because="the model returns no tensor", remedy="return a tensor in forward")
    return name


def _check_node(node: fx.Node) -> None:
    """Raise ExportError for a node that the compiler would compute differently."""
    known = fact(node)
    if node.op == "placeholder" and isinstance(known, TensorFact) and not known.dtype.is_floating_point and node.users:
        raise ExportError(
            f"the input {node.name!r} cannot be written for the vendor's compiler",
            node=node,
            because=f"it is {str(known.dtype).removeprefix('torch.')}, and the compiler takes float32 inputs",
            remedy="take what depends on it out of the model",
        )
    if node.op == "call_function" and node.target in PRIMITIVES and PRIMITIVES[node.target].kind == "dynamic":
        raise ExportError(
            "a layer that is quantized at run time cannot be written for the vendor's compiler",
            node=node,
            because="its scales are not known before it runs",
            remedy="leave out dynamic=True, or keep the layer in float",
        )
    _check_bits(node)
    described, lowered = qparams(node), operation(node)
    if described is None or lowered is None or described.dtype not in ("int8", "int4", "int16"):
        return
    low, high = _clamp(lowered)
    scale, dtype = float(described.scale), ACTIVATION_TYPES[described.dtype]  # type: ignore[arg-type]
    inside = {
        which: f"{bound:g} is {bound / scale:.4g} steps of {scale:.6g}"
        for which, bound, limit in (("lower", low, dtype.low), ("upper", high, dtype.high))
        if bound and math.isfinite(bound) and abs(bound) / scale < abs(limit) - 0.5
    }
    # With a lower limit of 0, a layer has no upper limit in the integer graph either; operators after tables keep it (CHIP.md, section 10).
    if "lower" in inside or ("upper" in inside and low != 0):
        which = "lower" if "lower" in inside else "upper"
        raise ExportError(
            f"the {which} clamp of %{node.name} cannot be carried to the chip",
            node=node,
            because=f"the vendor's compiler drops it: {inside[which]}, inside of the range of its {described.dtype}",
            remedy="let the range end at the clamp: calibrate by statistics, or set the scale with fxq.set_qparams(prepared, "
            f"{{{node.name!r}: …}}) before converting",
        )


def _check_bits(node: fx.Node) -> None:
    """Raise ExportError for a primitive whose operands have more bits than the compiler's programs support."""
    record = PRIMITIVES.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    if record is None or record.kind == "float":  # an int32 accumulator is dequantized as it is
        return
    read = [known.dtype for operand in node.all_input_nodes if (known := qparams(operand)) is not None]
    wide = next((dtype for dtype in read if ACTIVATION_TYPES[dtype].bits > record.chip_bits), None)
    if wide is not None:
        raise ExportError(
            f"%{node.name} cannot be computed of {wide} on the chip",
            node=node,
            because=f"the vendor's compiler computes {record.name} of {record.chip_bits} bits; of {wide} its program gives other values",
            remedy="quantize what it reads as int8: set_module_name(…, fxq.QConfig(fxq.ActivationConfig('int8'))) in the qconfig mapping",
        )


def _clamp(lowered: Operation) -> tuple[float | None, float | None]:
    """Return the limits that are fused into an operator, or that it consists of; None for a missing limit."""
    if BY_NAME[lowered.name].function is clamp:
        low, high = lowered.arguments.get("min"), lowered.arguments.get("max")
    else:
        low, high = lowered.arguments.get("clamp") or (None, None)
    return low, high
