"""Writing of folders for a board: programs, inputs, expected results; of a user's model, or of the probes of a conformance kit."""

import difflib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, fx, nn

from fxquant import backends
from fxquant.analysis.recording import OUTPUTS, GraphForm, Wanted, returned
from fxquant.api import calibrate, convert, prepare
from fxquant.backends.horizon.export import CENTRE, HB_MAPPER, LAYERS, HorizonOptions, camera_input, export_horizon, nv12_of, refusals
from fxquant.backends.horizon.tool import LOG, Tool, compile_horizon
from fxquant.conformance import board, manifest
from fxquant.conformance.manifest import Case, Kit, ProbeProgram, Refusal, digest, packed
from fxquant.conformance.rows import ROWS, SIZE, Row
from fxquant.errors import CompilationError, ConfigurationError, ExportError
from fxquant.ir.graph import resolve
from fxquant.options import Options
from fxquant.prepared.stage import require_integer
from fxquant.primitives.quantization import dequantize
from fxquant.quantization.spec import ActivationConfig, QConfig, QConfigMapping, WeightConfig
from fxquant.serialization import save_model
from fxquant.support import log_levels, reached, seeded
from fxquant.support.arguments import FOLDER, PATH, Kind, checked, words
from fxquant.support.files import check_place, place_files, write_file, write_files
from fxquant.support.progress import progress, working
from fxquant.target import Target

# ---- operators as networks that are compiled together, and the images that they are compared on ----------------------
TOGETHER = 40  # rows in one file
REACH = 2.5  # the range of calibration's images
SCALES = ("observed", "powers of two")


def probe_target(march: str) -> Target:
    """Return the target of a march or chip name without its variant ("nash-e/requantize"), with the vendor programs' arithmetic."""
    return backends.get(backends.get(march).march)


class Together(nn.Module):
    """Several rows in parallel, on one image."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(row.build() for row in rows)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(row(image) for row in self.rows)


def images() -> tuple[list[Tensor], list[Tensor]]:
    """Return batches for calibration, and images to compare: beyond calibration's range, on ties of the input's scale, extremes."""
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    with seeded(0):
        calibration = [torch.randn(4, 3, SIZE, SIZE, **on_cpu).clamp(-REACH, REACH) for _ in range(3)]
        calibration[0][0, 0, 0, 0] = REACH
        beyond = 1.2 * torch.randn(1, 3, SIZE, SIZE, **on_cpu).clamp(-REACH, REACH)
        ties = (torch.randint(-128, 128, (1, 3, SIZE, SIZE), device="cpu", dtype=torch.int64) + 0.5) * (REACH / 127)
        extremes = torch.where(torch.rand(1, 3, SIZE, SIZE, **on_cpu) < 0.5, -2 * REACH, 2 * REACH)
        small = 0.1 * torch.randn(1, 3, SIZE, SIZE, **on_cpu)
    return calibration, [beyond, ties, extremes, small, torch.zeros(1, 3, SIZE, SIZE, **on_cpu)]


def mapping_of(rows: Sequence[Row], dtype: str, scales: str) -> QConfigMapping:
    """Return the quantization of rows."""
    power = scales == SCALES[1]
    weight = WeightConfig(power_of_two=power)
    config = QConfig(ActivationConfig(dtype, power_of_two=power), weight)
    joined = replace(config, output=replace(config.output, training="frozen"))  # so its operands have scales of their own
    mapping = QConfigMapping().set_global(config).set_object_type(torch.cat, joined)  # integer also if it is only an output
    for index, row in enumerate(rows):
        if row.int32:
            mapping = mapping.set_module_name(f"rows.{index}.layers.c", QConfig(ActivationConfig("int32"), weight))
    return mapping


def converted(rows: Sequence[Row], march: str, dtype: str, scales: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the prepared and the integer model of rows, calibrated."""
    calibration, _ = images()
    with log_levels({"fxquant": logging.ERROR}):  # whether a probe breaks limits of a march does not matter
        prepared = prepare(Together(rows).eval(), calibration[0][:1], probe_target(march), mapping_of(rows, dtype, scales))
        # Without equalization, so that scales suffice to rebuild it.
        calibrate(prepared, calibration, options=Options(equalize=False), show_progress=False)
        return prepared, convert(prepared)


def groups(rows: Sequence[Row], together: int) -> list[Sequence[Row]]:
    """Return the rows grouped by file."""
    shared = [row for row in rows if not row.alone]
    return [*(shared[start : start + together] for start in range(0, len(shared), together)), *([row] for row in rows if row.alone)]


def output_steps(integer: fx.GraphModule) -> list[Tensor | None]:
    """Return the value of a step of each output, float64, shaped to broadcast; None for an output that is not made of integers."""
    scales: list[Any] = [node.args[1] if node.target is dequantize else None for node in returned(integer)]
    return [None if scale is None else resolve(integer, scale.target).double() for scale in scales]


# ---- networks that the vendor's tool compiles, and their operators on the processor ----------------------------------
MOVING = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")  # operators that change no value


@dataclass(frozen=True)
class Compiled:
    """A compiled integer model: the .bin, its quantized model, and where each node of that runs."""

    binary: Path
    runs_on: Mapping[str, str]  # by node: "BPU" or "CPU"

    @property
    def quantized(self) -> Path:
        """Return the path of the quantized ONNX model, which has the tensor names of the compiled program."""
        return self.binary.with_name(f"{self.binary.stem}_quantized_model.onnx")


def compile_model(integer: fx.GraphModule, to: Path, name: str = "model") -> Compiled:
    """Compile an integer model without optimization into a folder. Raises the errors of `export_horizon` and `compile_horizon`."""
    folder = export_horizon(integer, to, name, options=HorizonOptions(optimize_level="O0"))
    binary = compile_horizon(folder, show_progress=False)
    rows = (line.split() for line in (folder / LOG).read_text(encoding="utf-8").splitlines())
    return Compiled(binary, {row[0]: row[1] for row in rows if len(row) > 3 and row[1] in ("BPU", "CPU")})


def on_processor(compiled: Compiled) -> list[list[str]]:
    """Return, for each output of a compiled model, the nodes before it that compute on the processor, as "name (type)"."""
    graph = onnx.load(str(compiled.quantized)).graph
    makers = {output: node for node in graph.node for output in node.output}
    names = []
    for output in graph.output:
        names_before = reached([output.name], lambda name: makers[name].input if name in makers else ())
        before = [makers[name] for name in names_before if name in makers]
        computing = [node for node in before if compiled.runs_on.get(node.name) == "CPU" and node.op_type not in MOVING]
        names.append(list(dict.fromkeys(f"{node.name} ({node.op_type})" for node in computing)))
    return names


@checked(folder=FOLDER, compiled=PATH)
@working("writing for the board")
def board_kit(folder: str | os.PathLike[str], integer: fx.GraphModule, compiled: str | os.PathLike[str], batches: Iterable[Any]) -> Path:
    """Write a folder that runs a compiled program on a board and checks it, and return the folder's path.

    Copy it to the board, and run `python3 run.py` there. This runs the program on the batches by hobot_dnn, bpu_infer_lib or hbm_runtime,
    saves the outputs, and compares them with those of the integer model, integer by integer. The first output that differs is named.

    integer   the integer model that `export_horizon` wrote
    compiled  the path that `compile_horizon` returned
    batches   inputs of `integer`, as `verify` takes them

    The folder holds the program, run.py, programs.json, inputs.npz and expected.npz: arrays by the names of inputs and outputs, with the
    sample as dimension 0. Images of a camera are NV12, uint8 (N, 3H/2, W), or YUV444, uint8 (N, H, W, 3).

    Raises ConfigurationError if `compiled` is not the program of `integer`; CalibrationError for a batch that it cannot take.
    """
    require_integer(integer)
    program, form, ends = Path(compiled), GraphForm(integer), returned(integer)
    layers = program.parent.parent / LAYERS
    about = json.loads(layers.read_text(encoding="utf-8")) if program.is_file() and layers.is_file() else {}
    inputs, outputs = about.get("inputs", {}), about.get("outputs", {})
    if not inputs or (len(inputs), len(outputs)) != (len(form.input_names), len(ends)):
        because = f"it or {layers} is missing, or has other inputs or outputs"
        remedy = "pass the model that fxq.board.export_horizon wrote, and what fxq.board.compile_horizon returned"
        raise ConfigurationError(f"{program} is not the program of this model", because=because, remedy=remedy)
    if about.get("input_batch", 1) > 1:
        because, remedy = "the kit runs samples one by one, and its program takes several", "export it with input_batch=1"
        raise ConfigurationError(f"{program} is not for a kit", because=because, remedy=remedy)
    steps = output_steps(integer)
    names = [f"output {index}" if step is None else ends[index].all_input_nodes[0].name for index, step in enumerate(steps)]
    samples: dict[str, list[Tensor]] = {name: [] for name in (*inputs, *outputs)}
    for index, batch in enumerate(batches):
        batch_inputs = form.inputs(batch, index)
        computed = form.run(batch_inputs, Wanted.of(OUTPUTS, *form.tensors.keys() & names))
        for (name, rows), value in zip(samples.items(), (*batch_inputs, *(computed[each] for each in names)), strict=True):
            rows.append(_samples(value, (inputs | outputs)[name]))
    if not all(samples.values()):
        raise ConfigurationError("there is nothing to run on a board", because="`batches` yielded no batch", remedy="pass one or more")
    arrays = {name: torch.cat(rows).numpy() for name, rows in samples.items()}
    camera = next((each["type"] for each in inputs.values() if each["type"] != "float32"), None)
    shapes = {name: each["shape"] if camera is None else [1, *arrays[name].shape[1:]] for name, each in inputs.items()}
    listed = {"name": program.stem, "inputs": shapes, "outputs": list(outputs), "camera": camera}
    expected = {name: arrays[name] for name in outputs}
    for (name, entry), step in zip(outputs.items(), steps, strict=True):
        if step is not None and "dtype" not in entry:  # the program returns float32
            expected[f"{name}/step"] = (step if entry["layout"] is None else step.squeeze()).numpy()
    about = {manifest.PROGRAMS: json.dumps({"programs": [listed]}, indent=1).encode(), manifest.EXPECTED: packed(expected)}
    write_files(Path(folder), {program.name: program.read_bytes(), **about, **_shared({name: arrays[name] for name in inputs})})
    return Path(folder)


def check_batches(integer: fx.GraphModule, batches: Iterable[Any], camera: str | None) -> None:
    """Raise CalibrationError or ConfigurationError for a batch that the program of an integer model cannot take."""
    form = GraphForm(integer)
    image = None if camera is None else camera_input(integer, camera).name
    for index, batch in enumerate(batches):
        for name, value in zip(form.input_names, form.inputs(batch, index), strict=True):
            _samples(value, {"type": camera if name == image else None, "shape": [1]})


def _samples(value: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """Return an input or output (N, …) in the program's form; (1, …) for one without a batch."""
    kind, turned = entry.get("type"), value.permute(0, 2, 3, 1) if value.dim() == 4 else value
    if kind == "nv12":
        return torch.stack([nv12_of(image[None]) for image in turned.round()])
    if kind not in (None, "float32"):
        return (turned.round() + CENTRE).to(torch.uint8)
    value = value if entry.get("layout") is None else turned
    return value if entry["shape"][:1] == [1] else value[None]


DTYPES = ("int8", "int16")


@dataclass(frozen=True)
class Made:
    """A program that is written: the digests of its files by their paths in the kit, and its expected integers and steps."""

    program: ProbeProgram
    files: dict[str, str]
    arrays: dict[str, manifest.Array]


@checked(
    folder=FOLDER,
    target=Kind("the name of a march or a chip", lambda value: backends.get(value).name),
    dtypes=Kind("a list of dtypes", words),
    operators=Kind("a list of names", words).or_none("all of them"),
    scales=Kind("a list of strings", words),
)
def conformance_kit(
    folder: str | os.PathLike[str], target: str = "bayes-e", *, dtypes: Sequence[str] = DTYPES[:1], operators: Sequence[str] | None = None,
    scales: Sequence[str] = SCALES, show_progress: bool | None = None,
) -> Path:  # fmt: skip
    """Write probe programs for a board into a folder, and return its path: `check_conformance` evaluates the board's results.

    Each operator is a small network, compiled by the vendor's tool. Its inputs hold extremes, zeros and ties of the input's scale. The
    folder holds

        board/          the part to copy to the board: programs (.bin), inputs.npz, and run.py, which needs only Python and numpy
        expected.npz    the expected integers of each program, computed by the integer model
        models/         the prepared models, for `simulate_conformance`
        manifest.json   the operator of each output, and which operators the compiler refused or left to the processor

    dtypes     of activations: "int8", and "int16" on bayes and bayes-e
    operators  names of operators; all of them by default
    scales     "observed" by calibration, which exposes the widths of multipliers; "powers of two", which puts sums on ties

    It takes some minutes for all operators. Raises ConfigurationError if the vendor's tool is not installed or does not support the march,
    for an unknown dtype or operator, and if no operator could be compiled; UnknownTarget.
    """
    march = backends.get(target).march
    rows = _chosen(march, dtypes, operators, scales)
    Tool.find()
    place = Path(folder)
    check_place(place / manifest.MANIFEST)
    with tempfile.TemporaryDirectory(prefix="fxquant-") as temporary:
        _write(Path(temporary), rows, march, dtypes, scales, show_progress)
        place_files(Path(temporary), place, manifest.MANIFEST)
    return place


def _write(place: Path, rows: Sequence[Row], march: str, dtypes: Sequence[str], scales: Sequence[str], show: bool | None) -> None:
    """Write the kit of these rows into an empty folder."""
    plan = [(group, dtype, how) for dtype in dtypes for how in scales for group in groups(rows, TOGETHER)]
    programs: list[ProbeProgram] = []
    refused = []
    files: dict[str, str] = {}
    arrays: dict[str, manifest.Array] = {}
    for group, dtype, how in progress(plan, len(plan), f"compiling probes for {march}", show):
        for outcome in _made(place, group, march, dtype, how, len(programs)):
            if isinstance(outcome, Refusal):
                refused.append(outcome)
                continue
            programs.append(outcome.program)
            arrays.update(outcome.arrays)
            files.update(outcome.files)
    if not programs:
        because = "\n".join(each.because for each in refused)
        raise ConfigurationError(f"no program is left for {march}", because=because, remedy="choose other operators")
    shared = _shared({programs[0].input: torch.cat(images()[1]).numpy()})
    write_files(place / manifest.BOARD, shared)
    write_file(place / manifest.EXPECTED, expected := packed(arrays))
    files |= {manifest.EXPECTED: digest(expected), **{f"{manifest.BOARD}/{name}": digest(content) for name, content in shared.items()}}
    kit = Kit(place, probe_target(march).name, tuple(programs), tuple(refused), files)
    shape = [1, 3, SIZE, SIZE]
    listed = [{"name": program.name, "inputs": {program.input: shape}, "outputs": program.outputs} for program in programs]
    about = {"kit": kit.identity, "target": kit.target, "programs": listed}
    write_file(place / manifest.BOARD / manifest.PROGRAMS, json.dumps(about, indent=1))
    write_file(place / manifest.MANIFEST, kit.as_json())


def _chosen(march: str, dtypes: Sequence[str], operators: Sequence[str] | None, scales: Sequence[str]) -> list[Row]:
    """Return the requested operators. Raises ConfigurationError for unknown ones."""
    if march not in HB_MAPPER.marches:
        because = f"its programs are compiled by the vendor's hb_mapper, for {', '.join(HB_MAPPER.marches)}"
        remedy = f"choose {' or '.join(HB_MAPPER.marches)}"
        raise ConfigurationError(f"a conformance kit cannot be written for {march}", because=because, remedy=remedy)
    supported = [dtype for dtype in DTYPES if dtype in probe_target(march).activations]
    names = list(ROWS) if operators is None else list(dict.fromkeys(operators))
    for what, asked, right in (("dtype", dtypes, supported), ("operator", names, list(ROWS)), ("kind of scales", scales, list(SCALES))):
        wrong = next((each for each in asked if each not in right), None)
        if wrong is not None or not asked:
            near = difflib.get_close_matches(str(wrong), right, n=3)
            missing = f"there is no {what} {wrong!r} for {march}" if asked else f"no {what} is asked for"
            remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "choose among these"
            raise ConfigurationError(missing, because=f"there are {', '.join(right)}", remedy=remedy)
    return [ROWS[name] for name in names]


def _made(place: Path, rows: Sequence[Row], march: str, dtype: str, how: str, number: int) -> Iterator[Made | Refusal]:
    """Yield programs of rows, numbered from this number on: one, or several if the compiler refuses a part of the rows."""
    prepared, integer = converted(rows, march, dtype, how)
    reasons: dict[int, str] = {}
    for error in refusals(integer):
        words = (error.module or "").split(".")
        if len(words) < 2 or words[0] != "rows" or int(words[1]) >= len(rows):
            raise error  # it names no row
        reasons.setdefault(int(words[1]), error.because)
    if reasons:
        yield from (Refusal(rows[index].name, dtype, how, reason) for index, reason in sorted(reasons.items()))
        if remaining := [row for index, row in enumerate(rows) if index not in reasons]:
            yield from _made(place, remaining, march, dtype, how, number)
        return
    try:
        yield _compiled(place, rows, prepared, integer, f"{dtype}-{number}", dtype, how)
    except (CompilationError, ExportError) as error:
        if len(rows) == 1:
            yield Refusal(rows[0].name, dtype, how, error.because)
            return
        middle = len(rows) // 2
        first = list(_made(place, rows[:middle], march, dtype, how, number))
        yield from first
        yield from _made(place, rows[middle:], march, dtype, how, number + sum(isinstance(each, Made) for each in first))


def _compiled(place: Path, rows: Sequence[Row], prepared: fx.GraphModule, integer: fx.GraphModule, name: str, dtype: str, how: str) -> Made:
    """Compile a program of rows, and write its files and its prepared model into the kit."""
    with tempfile.TemporaryDirectory(prefix="fxquant-") as folder:
        compiled = compile_model(integer, Path(folder), name)
        processor = on_processor(compiled)
        graph = onnx.load(str(compiled.quantized)).graph
        content = {path.name: path.read_bytes() for path in (compiled.binary, compiled.quantized)}
    steps = output_steps(integer)
    cases = [
        Case(row.name, manifest.FLOAT if step is None else manifest.PROCESSOR if nodes else manifest.BPU, ", ".join(nodes))
        for row, step, nodes in zip(rows, steps, processor, strict=True)
    ]
    program = ProbeProgram(name, dtype, how, graph.input[0].name, tuple(output.name for output in graph.output), tuple(cases))
    results = [integer(image) for image in images()[1]]
    arrays = {}
    for index, step in enumerate(steps):
        if step is not None:
            arrays[f"{name}/{index}"] = torch.cat([(result[index].double() / step).round().to(torch.int64) for result in results]).numpy()
            arrays[f"{name}/{index}/step"] = step.numpy()
    write_files(place / manifest.BOARD, content)
    (place / manifest.MODELS).mkdir(exist_ok=True)
    model = save_model(prepared, place / manifest.MODELS / f"{name}.fxq", backends.get)
    files = {f"{manifest.BOARD}/{path}": digest(data) for path, data in content.items()}
    return Made(program, {**files, f"{manifest.MODELS}/{name}.fxq": digest(model.read_bytes())}, arrays)


def _shared(inputs: Mapping[str, manifest.Array]) -> dict[str, bytes]:
    """Return the files that all programs of a board's folder share, by name."""
    return {manifest.INPUTS: packed(inputs), manifest.SCRIPT: Path(board.__file__).read_bytes()}
