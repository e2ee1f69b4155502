"""Export of an integer model as the folder that the vendor's compiler takes: the ONNX file, its configuration, the commands."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.analysis.explain import refused
from fxquant.analysis.recording import returned
from fxquant.backends.horizon.formats import FORMATS, HB_MAPPER, OUTPUT, README, Format
from fxquant.backends.onnx.export import check_arguments, save_models
from fxquant.backends.onnx.horizon import OPSET, fixed_shape, float_nodes
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import TensorFact, fact, source
from fxquant.ir.integer import Operation, operation, qparams
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.ops import BY_NAME
from fxquant.ops.elementwise.activation import clamp
from fxquant.primitives import PRIMITIVES
from fxquant.support import logger
from fxquant.support.arguments import FOLDER, TEXT, checked, choice, such
from fxquant.support.progress import working

# ---- Images from a camera as the input of a compiled program ---------------------------------------------------------
#
# The compiler inserts a layer before the model that subtracts the mean from each channel and rounds to the model's grid:
#
#     acc = 127 · q + 64, y = ⌊acc · 16513 / 2^21⌋ = q       for a mean of 128 and the scale 1
#
# So the bytes minus 128 are the integers of the model's input. For NV12 the hardware first repeats U and V for two by two pixels.


CENTRE = 128  # of a byte: the compiler's int8 is the byte minus this
MEAN = f"\n  mean_value: '{CENTRE} {CENTRE} {CENTRE}'"
HALF = 2  # NV12 has one U and one V for two by two pixels


def check_camera(integer: fx.GraphModule, format: Format, camera: str) -> None:
    """Raise ConfigurationError if a program cannot take its only input from a camera with the integers of `integer`."""
    (first, *others) = integer.graph.find_nodes(op="placeholder")
    because = None
    if camera not in format.cameras:
        because = f"files with a camera are not written for {format.compiler}"
    elif others:
        because = f"it has {1 + len(others)} inputs, and one alone may come from a camera"
    else:
        because = _not_an_image(first, camera)
    if because is not None:
        raise ConfigurationError(
            f"the model cannot take {camera} from a camera",
            because=because,
            remedy="let fxq.nn.YuvToRgb(centred=True, …) be its first module, which takes YUV less 128 as (N, 3, H, W), and set its input's"
            f" scale before converting: fxq.set_qparams(prepared, {{'{first.name}_quantize': 1.0}}); or leave out camera=",
        )


def _not_an_image(node: fx.Node, camera: str) -> str | None:
    """Return why an input is not an image on the grid of bytes minus 128; None if it is one."""
    known = fact(node)
    shape = known.shape if isinstance(known, TensorFact) else ()
    if len(shape) != 4 or shape[1] != 3:
        return f"the input {node.name!r} has the shape {list(map(str, shape))}, and an image has 3 channels"
    if camera == "nv12" and any(not isinstance(size, int) or size % HALF for size in shape[2:]):
        return f"the input {node.name!r} has {shape[2]} rows of {shape[3]} pixels, and NV12 has an even number of both"
    for user in node.users:
        described = qparams(user)
        if described is None or described.dtype != "int8" or float(described.scale) != 1.0:  # type: ignore[arg-type]
            shown = "in float" if described is None else f"{described.dtype} on the scale {float(described.scale):g}"  # type: ignore[arg-type]
            return f"%{user.name} reads the input {node.name!r} {shown}, and a byte less 128 is int8 on the scale 1"
    return None


def nv12_of(image: Tensor) -> Tensor:
    """Return the bytes of NV12, uint8 (3 · H / 2, W), of integers (1, H, W, 3) that are Y, U and V minus 128.

    Raises ConfigurationError if U and V are not equal for two by two pixels: NV12 cannot represent such an image.
    """
    _, height, width, _ = image.shape
    planes = (image[0] + CENTRE).to(torch.uint8)
    chroma = planes[::HALF, ::HALF, 1:]
    if not torch.equal(chroma.repeat_interleave(HALF, 0).repeat_interleave(HALF, 1), planes[..., 1:]):
        raise ConfigurationError(
            "a batch is not an NV12 image",
            because="its U and V differ within two by two pixels, and NV12 has one of each for these four",
            remedy="pass images that fxq.nn.Nv12ToYuv444(centred=True) made of NV12",
        )
    return torch.cat([planes[..., 0], chroma.reshape(height // HALF, width)])


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
    for error in refusals(integer):
        raise error
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
    errors = []
    for node in integer.graph.nodes:
        try:
            _check_node(node)
        except ExportError as error:
            errors.append(error)
    for node, breach in refused(integer):
        what = f"%{node.name} cannot be compiled for the chip"
        errors.append(ExportError(what, node=node, because=breach.sentence, remedy=breach.limit.remedy))
    return errors


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
