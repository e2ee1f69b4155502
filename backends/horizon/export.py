"""Export of an integer model as the folder that the vendor's compiler takes: the ONNX file, its configuration, the commands."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxquant import backends
from fxquant.analysis.explain import refused
from fxquant.analysis.recording import returned
from fxquant.backends.onnx.export import check_arguments, save_models
from fxquant.backends.onnx.horizon import CALIBRATED_OPSET, OPSET, CalibratedWriter, HorizonWriter, fixed_shape, float_nodes, turn_outputs
from fxquant.errors import ConfigurationError, ExportError
from fxquant.ir.graph import BatchDim, TensorFact, fact, source
from fxquant.ir.integer import Operation, QParams, noted, operation, qparams
from fxquant.numerics.grids import ACTIVATION_TYPES, FLOAT32_EPSILON, wraps
from fxquant.ops import BY_NAME
from fxquant.ops.elementwise.activation import clamp
from fxquant.ops.elementwise.table import segments_of
from fxquant.prepared.sizes import at_example_sizes, unrolled
from fxquant.primitives import PRIMITIVES
from fxquant.primitives.elementwise import lookup
from fxquant.primitives.quantization import dequantize
from fxquant.support import logger
from fxquant.support.arguments import COUNT, FLAG, FOLDER, POSITIVE, TEXT, checked, checked_class, choice, such
from fxquant.support.progress import working
from fxquant.target import Target

# ---- The files that each of the vendor's compilers reads: one record for hb_mapper, one for hb_compile -----------------
#
# The keys of hb_mapper's configuration are those that it accepts here. The files for hb_compile follow public documents only, and have not
# been tried with it: D-Robotics, OpenExplore S100 3.5.0, "hb_compile" (the command and its configuration) and "PTQ FAQ" (opset 10 to 19,
# O0 to O2). Keys that these do not name are hb_mapper's.
OUTPUT = "model_output"  # where the compiler writes, inside the folder
README = "README.txt"


@dataclass(frozen=True)
class Format:
    """The files of one compiler."""

    compiler: str  # its command, which targets name in their rows
    writer: type[HorizonWriter]  # writer, opset: the class that writes the ONNX file, and its opset
    opset: int
    highest: str  # the highest level of its optimization
    commands: str  # the script, with names in braces
    unknown: tuple[str, ...] = ()  # keys of the configuration that it does not have
    untried: str | None = None  # the README's note on files that were not tried with a compiler; None if they were

    @property
    def marches(self) -> tuple[str, ...]:
        """Return the names of the targets whose integers its programs compute."""
        return tuple(target.name for target in backends.TARGETS.values() if target.compiler == self.compiler)


HB_MAPPER = Format(
    "hb_mapper",
    HorizonWriter,
    OPSET,
    "O3",
    """\
#!/bin/sh
# Makes {output}/{name}.bin of {name}.onnx with the vendor's compiler, whose programs are in PATH; then says what it costs.
set -e
cd "$(dirname "$0")"
hb_mapper makertbin --model-type onnx --config {name}.yaml
hb_perf {output}/{name}.bin
""",
)
HB_COMPILE = Format(
    "hb_compile",
    CalibratedWriter,
    CALIBRATED_OPSET,
    "O2",
    """\
#!/bin/sh
# Untried: makes {output}/{name}.hbm of {name}.onnx with the vendor's hb_compile, which is in PATH.
set -e
cd "$(dirname "$0")"
hb_compile --config {name}.yaml
""",
    ("input_layout_rt", "input_layout_train", "run_on_cpu", "debug"),
    """\
Untried. These files follow public documents of hb_compile and were not compiled, because that tool cannot be installed freely.
fxquant's tests evaluate such files with a reference implementation of HzCalibration: round to even of x / scale, clamp, times scale.
Compare the outputs of the .hbm with those of the integer model before you rely on it.
""",
)
FORMATS = {format.compiler: format for format in (HB_MAPPER, HB_COMPILE)}


# ---- Images from a camera as the input of a compiled program ---------------------------------------------------------
#
# The compiler inserts a layer before the model that subtracts the mean from each channel and rounds to the model's grid:
#
#     acc = 127 · q + 64, y = ⌊acc · 16513 / 2^21⌋ = q       for a mean of 128 and the scale 1
#
# So the bytes minus 128 are the integers of the model's input. For NV12 the hardware first repeats U and V for two by two pixels.
CENTRE = 128  # of a byte: the compiler's int8 is the byte minus this
HALF = 2  # NV12 has one U and one V for two by two pixels


CAMERAS = {"nv12": 3, "yuv444": 3, "rgb": 3, "bgr": 3, "gray": 1}  # channels of an image, by what a program takes


def camera_input(integer: fx.GraphModule, camera: str) -> fx.Node:
    """Return the input of a model that a program takes from a camera: an image on the scale 1.

    Raises ConfigurationError if there is none, if there are several, or if the program would compute other integers.
    """
    inputs = integer.graph.find_nodes(op="placeholder")
    shapes: list[tuple[Any, ...]] = [getattr(fact(node), "shape", ()) for node in inputs]
    images: list[fx.Node] = [node for node, shape in zip(inputs, shapes, strict=True) if len(shape) == 4 and shape[1] == CAMERAS[camera]]
    bytes_less_128 = [node for node in images if all(qparams(user) == QParams(1.0, "int8") for user in node.users)]
    because = None
    if (compiler := integer.meta["target"].compiler) != HB_MAPPER.compiler:
        because = f"files with a camera are not written for {compiler}"
    elif not images:
        because = f"its inputs have the shapes {', '.join(map(str, shapes))}, and an image of {camera} has {CAMERAS[camera]} channels"
    elif not bytes_less_128:
        user = next(iter(images[0].users))
        because = f"%{user.name} reads the input {images[0].name!r} as {qparams(user)}, and a byte less 128 is int8 on the scale 1"
    elif len(bytes_less_128) > 1:
        because = f"{' and '.join(node.name for node in bytes_less_128)} are images of bytes less 128, and one alone may come from a camera"
    elif camera == "nv12" and any(not isinstance(size, int) or size % HALF for size in fact(bytes_less_128[0]).shape[2:]):
        because = f"the input {bytes_less_128[0].name!r} is {fact(bytes_less_128[0])}, and NV12 has an even number of rows and of columns"
    if because is not None:
        raise ConfigurationError(
            f"the model cannot take {camera} from a camera",
            because=because,
            remedy="pass fxq.board.with_camera(integer, 'rgb', …) (--train-type rgb at the command line), or leave out camera=",
        )
    return bytes_less_128[0]


def nv12_of(image: Tensor) -> Tensor:
    """Return the bytes of NV12, uint8 (3 · H / 2, W), of integers (1, H, W, 3) that are Y, U and V minus 128; of Y alone, uint8 (H, W).

    Raises ConfigurationError if U and V are not equal for two by two pixels: NV12 cannot represent such an image.
    """
    _, height, width, channels = image.shape
    planes = (image[0] + CENTRE).to(torch.uint8)
    if channels == 1:
        return planes[..., 0]
    chroma = planes[::HALF, ::HALF, 1:]
    if not torch.equal(chroma.repeat_interleave(HALF, 0).repeat_interleave(HALF, 1), planes[..., 1:]):
        because = "its U and V differ within two by two pixels, and NV12 has one of each for these four"
        remedy = "pass images that fxq.nn.Nv12ToYuv444(centred=True) made of NV12, or photographs as --images at the command line"
        raise ConfigurationError("a batch is not an NV12 image", because=because, remedy=remedy)
    return torch.cat([planes[..., 0], chroma.reshape(height // HALF, width)])


COMPILER_KEYS = ("compile_mode", "optimize_level", "debug", "core_num", "jobs", "balance_factor", "max_time_per_fc")
LAYERS, SCRIPT = "layers.json", "compile.sh"
PLAIN = re.compile(r"[\w.+/-]+")  # names that the configuration can hold in quotes and in lists
NAME = such("a name of letters, digits, _, . and -", TEXT.take, lambda name: bool(PLAIN.fullmatch(name)) and "/" not in name)


@checked_class(
    optimize_level=choice("O0", "O1", "O2", "O3"),
    compile_mode=choice("latency", "bandwidth", "balance"),
    balance_factor=such("a number from 0 to 100", COUNT.take, lambda value: value <= 100).or_none("the compiler's own"),
    max_time_per_fc=POSITIVE.or_none("no limit"),
    debug=FLAG,
    core_num=such("1 or 2", POSITIVE.take, lambda value: value <= 2),
    jobs=POSITIVE.or_none("the compiler's own number"),
    outputs=choice("float32", "integer"),
    layout=choice("NHWC").or_none("the order of the model"),
    input_layout=choice("NHWC").or_none("the order of the model"),
    input_batch=POSITIVE,
)
@dataclass(frozen=True, kw_only=True)
class HorizonOptions:
    """Options of `export_horizon`: keys of the compiler's configuration, and the form of the program's inputs and outputs.

    optimize_level  "O0" to "O3"; hb_compile's highest level is O2, which it gets for O3
    compile_mode    the goal of the optimization: "latency", "bandwidth" or "balance"
    balance_factor  of "balance": from 0, bandwidth alone, to 100, latency alone
    max_time_per_fc the microseconds after which a program of higher priority may interrupt it
    debug           whether the program names its layers, for the vendor's profiler
    core_num        the number of the BPU's cores that one run uses: 1 or 2
    jobs            processes of the compiler
    outputs         "float32", or "integer": int8, int16 or int32 without the dequantization on the processor. layers.json then has the
                    dtype, the shape and the scales of each output: one, or one for each channel
    layout          "NHWC": outputs (N, C, H, W) are returned as (N, H, W, C)
    input_layout    "NHWC": float32 inputs (N, C, H, W) are taken as (N, H, W, C), as a camera's always are
    input_batch     samples that one run of the program takes, of a model with one float32 input

    Not here: bt601_video, which is with_camera(…, swing="studio"); mean and scale, which are with_camera's; remove_node_type of Quantize,
    Transpose and Reshape: images are not quantized on the processor, and `outputs` and `layout` cover the other end.
    """

    PUBLIC: ClassVar[str] = "fxq.board.HorizonOptions"
    optimize_level: str = "O3"
    compile_mode: str = "latency"
    core_num: int = 1
    jobs: int | None = None
    outputs: str = "float32"
    layout: str | None = None
    input_layout: str | None = None
    input_batch: int = 1
    balance_factor: int | None = None
    max_time_per_fc: int | None = None
    debug: bool = True


@checked(folder=FOLDER, name=NAME, camera=choice(*CAMERAS).or_none("float32"))
@working("writing for the vendor's compiler")
def export_horizon(
    integer: fx.GraphModule, folder: str | os.PathLike[str], name: str = "model", *, camera: str | None = None,
    input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None, options: HorizonOptions = HorizonOptions(),
) -> Path:  # fmt: skip
    """Write the files that the target's vendor compiler takes into a folder, and return the folder's path.

    The folder holds NAME.onnx, at opset 11 with a batch of 1, quantize and dequantize pairs and float weights on their grids; NAME.yaml,
    the configuration of hb_mapper; compile.sh; and layers.json, the source line of each layer and the shape of each input and output.
    Equal models give equal bytes. Unless asked otherwise, the program takes and returns float32, in the model's order of dimensions.

    The program that the compiler makes computes the integers of `integer`: `verify(integer, "model.bin", batches)` proves it on batches.
    Operators that stay in float are written as float operators, and run on the processor.

    camera     the program's input in place of float32: "nv12" from the camera's pyramid, or "yuv444", "rgb" or "bgr" from memory, in 0…255.
               `integer` must then be the result of `with_camera`: its only input is that minus 128, int8 with the scale 1
    input_names, output_names  names in the file; by default those of the graph

    For nash targets the file has opset 19 and `HzCalibration` nodes, and compile.sh calls hb_compile. These files follow public documents,
    and have not been tried with a compiler; a warning and README.txt say so.

    Raises ConfigurationError if the model is not an integer model, the compiler does not support its target, or an output that is to be an
    integer is computed in float. Raises ExportError for operators that its program would compute differently, such as an upper clamp inside
    the range of its grid.
    """
    check_arguments(integer, "qdq", "float", OPSET)
    integer = unrolled(at_example_sizes(integer))
    target = integer.meta["target"]
    check_march(target)
    if options.core_num > 1 and target.name == "bayes-e":
        because = f"{target.name} has one core, and its compiler refuses a model on more"
        raise ConfigurationError(f"core_num={options.core_num} cannot be used", because=because, remedy="leave core_num out")
    if not returned(integer):
        raise ExportError("there is nothing to write", because="the model returns no tensor", remedy="return a tensor in forward")
    format = FORMATS[target.compiler]
    placeholders = integer.graph.find_nodes(op="placeholder")
    image = None if camera is None else placeholders.index(camera_input(integer, camera))
    for error in refusals(integer):
        raise error
    model = format.writer(integer, "float", format.opset).write(input_names, output_names)
    for info in model.graph.input:
        if not PLAIN.fullmatch(info.name):
            because = "the compiler's configuration lists names with ; between them"
            remedy = "pass input_names of letters, digits, _, . and -"
            raise ConfigurationError(f"the input name {info.name!r} cannot be written", because=because, remedy=remedy)
    if options.layout is not None:
        turn_outputs(model)
    types = [camera or "" if index == image else "float32" for index in range(len(placeholders))]
    inputs: dict[str, Any] = {}
    for info, type in zip(model.graph.input, types, strict=True):
        shape = fixed_shape(info)
        layout = options.input_layout if type == "float32" and len(shape) == 4 else None
        turned = shape if layout is None else [shape[axis] for axis in (0, 2, 3, 1)]
        inputs[info.name] = {"shape": turned, "type": type, "layout": layout}
    batched = types == ["float32"] and isinstance(next(iter(fact(placeholders[0]).shape), 1), BatchDim)
    for field, chosen in (("input_batch", options.input_batch > 1), ("input_layout", options.input_layout is not None)):
        if chosen and (format is not HB_MAPPER or (field == "input_batch" and not batched)):
            because = "files of several samples, which need one float32 input with a batch, and of other layouts are written for hb_mapper"
            raise ConfigurationError(f"{field} cannot be used", because=because, remedy=f"leave {field} out")
    operators = [node for node in integer.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    sources = {node.name: source(node) for node in operators if node.target not in PRIMITIVES or operation(node) is not None}
    layers = {"name": name, "march": target.name, "layers": sources, "inputs": inputs, "outputs": _outputs(integer, model, options)}
    if options.input_batch > 1:
        layers["input_batch"] = options.input_batch
    directory = Path(folder)
    beside = {
        f"{name}.yaml": _configuration(integer, model, name, options, types),
        SCRIPT: format.commands.format(name=name, output=OUTPUT),
        LAYERS: json.dumps(layers, indent=1, ensure_ascii=False) + "\n",
    }
    if format.untried is not None:
        beside[README] = format.untried
        logger.warning(
            "the files for %s follow public documents of %s, and no compiler has tried them: see %s", target.name, format.compiler, README
        )
    save_models({f"{name}.onnx": model}, directory, None, beside, opened=False)
    (directory / SCRIPT).chmod(0o755)
    return directory


def refusals(integer: fx.GraphModule) -> list[ExportError]:
    """Return an error for each node of an integer model that the compiler would compute differently; `export_horizon` raises the first."""
    errors, integer = [], unrolled(integer)
    for node in integer.graph.nodes:
        try:
            _check_node(node)
            if integer.meta["target"].compiler == HB_MAPPER.compiler:
                _check_table(node, qparams(node), operation(node))
        except ExportError as error:
            errors.append(error)
    for node, breach in refused(integer):
        what = f"%{node.name} cannot be compiled for the chip"
        errors.append(ExportError(what, node=node, because=breach.sentence, remedy=breach.limit.remedy))
    return errors


def _configuration(integer: fx.GraphModule, model: Any, name: str, options: HorizonOptions, types: list[str]) -> str:
    march, inputs = integer.meta["target"].name, model.graph.input
    kinds = ["featuremap" if type == "float32" else type for type in types]
    format = FORMATS[integer.meta["target"].compiler]
    means = [" ".join([str(CENTRE)] * CAMERAS.get(each, 0)) for each in kinds]
    level = min(options.optimize_level, format.highest)
    if (options.compile_mode == "balance") != (options.balance_factor is not None):
        because = "the compiler takes both or neither"
        raise ConfigurationError("balance and balance_factor go together", because=because, remedy="give both, or leave both out")
    if level != options.optimize_level:
        logger.info("%s is replaced by %s, the highest level of %s", options.optimize_level, level, format.compiler)
    sections: dict[str, dict[str, Any]] = {
        "model_parameters": {
            **{"onnx_model": f"{name}.onnx", "march": march, "output_model_file_prefix": name, "working_dir": OUTPUT},
            "remove_node_type": "Dequantize" if options.outputs == "integer" else None,
        },
        "input_parameters": {
            "input_name": [info.name for info in inputs],
            "input_shape": ["x".join(map(str, fixed_shape(info))) for info in inputs],
            "input_type_rt": kinds,
            "input_layout_rt": ["NHWC" if each in CAMERAS else options.input_layout or "NCHW" for each in kinds],
            "input_type_train": ["yuv444" if each == "nv12" else each for each in kinds],
            "input_layout_train": ["NCHW"] * len(inputs),
            "norm_type": ["data_mean" if each in CAMERAS else "no_preprocess" for each in kinds],
            "mean_value": means if any(means) else None,
            "input_batch": options.input_batch if options.input_batch > 1 else None,
        },
        "calibration_parameters": {"calibration_type": "load", "run_on_cpu": float_nodes(integer, model) or None},
        "compiler_parameters": {**{name: getattr(options, name) for name in COMPILER_KEYS}, "optimize_level": level},
    }
    lines = []
    for section, entries in sections.items():
        written = {key: ";".join(each) if isinstance(each, list) else each for key, each in entries.items() if key not in format.unknown}
        lines += [f"{section}:", *(f"  {key}: {value!r}" for key, value in written.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _outputs(integer: fx.GraphModule, model: Any, options: HorizonOptions) -> dict[str, Any]:
    """Return the shape and layout of each output, of integers also dtype and scales. Raises ConfigurationError for one in float."""
    described: dict[str, Any] = {}
    for node, output in zip(returned(integer), model.graph.output, strict=True):
        shape = fixed_shape(output)
        entry = described[output.name] = {"shape": shape, "layout": options.layout if len(shape) == 4 else None}
        if options.outputs == "integer":
            grid = qparams(node.all_input_nodes[0]) if node.target is dequantize else None
            if grid is None or integer.meta["target"].compiler != HB_MAPPER.compiler:
                raise ConfigurationError(
                    f"the output {output.name!r} cannot be an integer",
                    because=f"%{node.name} is computed in float, on the processor",
                    remedy="return what the last quantized layer computes, or prepare it with fxq.Options(integer_tail=True); "
                    "programs for nash targets return float32",
                )
            entry |= {"dtype": grid.dtype, "scale": grid.scale}
    return described


def check_march(target: Target) -> None:
    """Raise ConfigurationError if no compiler of the vendor's computes the integers of the target."""
    name, marches = target.name, [march for format in FORMATS.values() for march in format.marches]
    if target.compiler is None:
        because = f"they compile for {', '.join(marches)}, and their programs compute other integers than {name}"
        remedy = "prepare the model for one of them, or write it with fxq.export_onnx(style='qdq')"
        raise ConfigurationError(f"an integer model of {name} cannot be written for the vendor's compilers", because=because, remedy=remedy)


def _check_node(node: fx.Node) -> None:
    """Raise ExportError for a node that the compiler would compute differently."""
    input_fact = fact(node)
    if node.op == "placeholder" and isinstance(input_fact, TensorFact) and not input_fact.dtype.is_floating_point and node.users:
        because = f"it is {str(input_fact.dtype).removeprefix('torch.')}, and the compiler takes float32 inputs"
        remedy = "take what depends on it out of the model"
        raise ExportError(f"the input {node.name!r} cannot be written for the vendor's compiler", node=node, because=because, remedy=remedy)
    if node.op == "call_function" and node.target in PRIMITIVES and PRIMITIVES[node.target].kind == "dynamic":
        what = "a layer that is quantized at run time cannot be written for the vendor's compiler"
        remedy = "leave out dynamic=True, or keep the layer in float"
        raise ExportError(what, node=node, because="its scales are not known before it runs", remedy=remedy)
    _check_bits(node)
    described, lowered = qparams(node), operation(node)
    if described is None or lowered is None or described.dtype not in ("int8", "int4", "int16"):
        return
    fused = lowered.arguments
    low, high = (fused.get("min"), fused.get("max")) if BY_NAME[lowered.name].function is clamp else fused.get("clamp") or (None, None)
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


def _check_table(node: fx.Node, described: QParams | None, lowered: Operation | None) -> None:
    """Raise ExportError for a sum on steps that the compiler raises, and for results of 16 bits that differ from the chip's."""
    because = None
    operand = qparams(node.all_input_nodes[0]) if node.all_input_nodes else None
    wide = lowered.arguments if lowered and described and described.dtype == "int16" else {}
    if described is not None and described.dtype == "int32" and float(torch.as_tensor(described.scale).min()) < FLOAT32_EPSILON:
        because = "the vendor's compiler raises steps of sums to 2^-23, and makes the weights smaller by as much"
    elif node.target is lookup and lowered and operand and described and "int16" in (operand.dtype, described.dtype):
        settings = {key: value for key, value in lowered.arguments.items() if key != "input"}
        of_shifted = [settings[key] for key in ("function", "factor", "offset", "settings")] if "settings" in settings else None
        name, factor, offset, settings = of_shifted or (lowered.name, 1, 0, settings)
        form = segments_of(name, factor, offset, tuple(settings.items()))
        if form is None or operand.dtype != "int16":
            because = "the vendor's compiler has other segments for it at 16 bits, or none"
        elif wraps(form, torch.as_tensor(operand.scale), torch.as_tensor(described.scale)):
            because = "at the end of its operand's range it exceeds its own by 2^16, and the chip returns the lowest integer there"
    elif wide.get("alpha", 1) not in (1, -1) or ("weight" not in wide and (wide.get("clamp") or (0, wide.get("max")))[1] is not None):
        because = "the vendor's compiler multiplies a term by alpha at 8 bits, and limits 16 bits from above by a table that is a step off"
    elif noted(node, "narrowed") is not None:
        because = "its operand of 16 bits is narrowed, so that no sum can overflow, and the chip does not narrow it"
    if because is not None:
        remedy = "quantize its operand and result as int8: fxq.ActivationConfig('int8') in the qconfig mapping, or keep it in float"
        raise ExportError(f"%{node.name} cannot be carried to the chip", node=node, because=because, remedy=remedy)


def _check_bits(node: fx.Node) -> None:
    """Raise ExportError for a primitive whose operands have more bits than the compiler's programs support."""
    record = PRIMITIVES.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    if record is None or record.kind == "float":  # an int32 accumulator is dequantized as it is
        return
    grids = [grid for operand in node.all_input_nodes if (grid := qparams(operand)) is not None]
    wide = next((grid.dtype for grid in grids if ACTIVATION_TYPES[grid.dtype].bits > record.chip_bits), None)
    if wide is not None:
        because = f"the vendor's compiler computes {record.name} of {record.chip_bits} bits; of {wide} its program gives other values"
        remedy = "quantize what it reads as int8: set_module_name(…, fxq.QConfig(fxq.ActivationConfig('int8'))) in the qconfig mapping"
        raise ExportError(f"%{node.name} cannot be computed of {wide} on the chip", node=node, because=because, remedy=remedy)
