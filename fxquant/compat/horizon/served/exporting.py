"""Horizon's functions that check and write a model: programs of the installed compiler, ONNX files, and TorchScript programs."""

import functools
import io
import operator
import os
import shutil
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fxquant as fxq
from fxquant import backends
from fxquant.backends.horizon.compiled_program import Binary
from fxquant.backends.horizon.export import HB_MAPPER
from fxquant.compat.common import foreign, refusals, refused
from fxquant.compat.horizon.served import get_march, required
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.errors import ExportError
from fxquant.ir.graph import is_deployed, stage_of
from fxquant.support import logger
from fxquant.support.arguments import FILE, FLAG, FOLDER, PATH, Kind, checked, choice
from fxquant.support.files import write_file

OPTIONS = refusals(
    "onnx",
    training=lambda mode: str(mode).endswith("EVAL"),
    dynamic_axes=lambda axes: all(list(each) == [0] for each in (axes or {}).values()),
    keep_initializers_as_inputs=operator.not_,
    custom_opsets=operator.not_,
)
takes = foreign("onnx", OPTIONS)

LEVELS = {"fast": "O3", "ddr": "O2", "balance": "O2"}
OPTIMIZE = {"ddr": "bandwidth"}
LEVEL = choice("O0", "O1", "O2", "O3", *LEVELS)
OPT = Kind(
    "one of 'O0', 'O1', 'O2', 'O3', 'fast', 'ddr', 'balance', or 0 to 3",
    lambda value: LEVEL.take(f"O{value}" if isinstance(value, int) else value),
)
HBM = Kind("the path of a .hbm or .bin file to write", FILE.take)


def _folder(
    module: Any, folder: Path, march: str | None, name: str | None, opt: str, called: str, camera: str | None = None
) -> tuple[fx.GraphModule, Path]:  # fmt: skip
    """Return the integer model, and its folder for the compiler. Raises ConfigurationError for a march other than the model's."""
    integer = integer_of(module, called)
    asked, own = march or get_march(), integer.meta["target"]
    if asked is not None and backends.get(asked).march != own.march:
        raise refused("march of a model", called=called, march=asked, name=own.name)
    options = fxq.board.HorizonOptions(optimize_level=LEVELS.get(opt, opt), compile_mode=OPTIMIZE.get(opt, "latency"))
    return integer, fxq.board.export_horizon(integer, folder, name or "model", camera=camera, options=options)


def _say_inputs(called: str, source: Any, input_layout: Any, output_layout: Any) -> None:
    sources = {source} if isinstance(source, str) else set(source)
    if sources != {"ddr"} or input_layout not in (None, "NCHW") or output_layout != "NCHW":
        logger.warning(
            "%s: the compiled model reads float32 inputs from memory, in PyTorch's order, and writes outputs so:"
            " not source %s, layouts %s, %s."
            " For a camera, insert fxq.nn.Nv12ToYuv444 before the model",
            called, ", ".join(sorted(sources)), input_layout, output_layout,
        )  # fmt: skip


@takes()
def check_model(module: Any, example_inputs: Any, march: str | None = None) -> int:
    """Return 0 if a float or prepared model meets all limits of the march without float operators, otherwise the number of findings.

    An integer model is compiled instead, to check it with the vendor's compiler itself: 0, or 1 if it refuses the model. Findings and
    refusals are printed. The other arguments have no effect. Raises ConfigurationError for an integer model without the tool.
    """
    if isinstance(module, torch.jit.ScriptModule):
        module = integer_of(module, "check_model")
    if isinstance(example_inputs, list):
        example_inputs = tuple(example_inputs)
    if isinstance(module, fx.GraphModule) and is_deployed(module):
        with tempfile.TemporaryDirectory() as folder:
            try:
                fxq.board.compile_horizon(fxq.board.export_horizon(module, folder), show_progress=False)
            except (fxq.errors.ExportError, fxq.errors.CompilationError) as error:
                print(error)
                return 1
        return 0
    findings = fxq.check(module, example_inputs, required("check_model") if march is None else march)
    if findings:
        return 0
    print(findings)
    return len(findings)


@takes(hbm=HBM, opt=OPT)
def compile_model(
    module: Any, hbm: str | os.PathLike[str], march: str | None = None, name: str | None = None, input_source: Any = "ddr",
    input_layout: str | None = None, output_layout: str = "NCHW", opt: str = "O2", progressbar: bool = True,
) -> int:  # fmt: skip
    """Compile a prepared or integer model, or a trace of one of convert_fx, with the vendor's hb_mapper; return 0 on success.

    hbm   the file to write: a .bin, for the board and for fxq.verify; if its name ends in .hbm, the BPU programs alone, with the
          .bin next to it. The compiler's working folder is next to it, under its name without the ending
    opt   "O0" to "O3"; "fast" is O3, "ddr" optimizes for bandwidth, "balance" is O2

    Inputs are in memory ("ddr"), float32, in PyTorch's order; a line of the log reports a request for another source or layout.
    The other arguments have no effect. For nash the folder that hb_compile takes is written, and compile.sh in it has to be run elsewhere.
    Raises ConfigurationError for nash, and if the tool is not installed; ExportError; and CompilationError with the layer and its
    source line.
    """
    _say_inputs("compile_model", input_source, input_layout, output_layout)
    return compiled(module, hbm, march, name, opt, progressbar)


def compiled(
    module: Any, hbm: str | os.PathLike[str], march: str | None, name: str | None, opt: str, progressbar: bool, camera: str | None = None
) -> int:  # fmt: skip
    """Compile as `compile_model`; `camera` is that of `fxquant.export_horizon`."""
    path = Path(hbm)
    _, folder = _folder(module, path.with_suffix(""), march, name, opt, "compile_model", camera)
    binary = fxq.board.compile_horizon(folder, show_progress=None if progressbar else False)
    shutil.copyfile(binary, path.with_suffix(".bin"))
    if path.suffix == ".hbm":
        opened = Binary(binary)  # the extracted files exist as long as this object
        shutil.copyfile(opened.hbm, path)
    shutil.copyfile(binary.with_name(f"{binary.stem}_quantized_model.onnx"), path.with_name(f"{path.stem}_quantized_model.onnx"))
    return 0


@takes(out_dir=FOLDER, opt=OPT)
def perf_model(
    module: Any, march: str | None = None, out_dir: str | os.PathLike[str] = ".", name: str | None = None,
    hbm: str | os.PathLike[str] | None = None, opt: str = "O3", progressbar: bool = True, layer_details: bool = False,
) -> fxq.results.Estimate:  # fmt: skip
    """Compile a model into a folder, and return the vendor compiler's estimates together with fxquant's own bounds.

    For a march that hb_mapper does not compile for, such as nash, the result has fxquant's own bounds alone, and its first line says so.

    out_dir        the folder; estimate.txt is written into it, and the compiler's pages are in its model_output
    hbm            a .bin that `compile_model` made, which is not compiled again
    layer_details  also print the vendor's table of layers
    """
    directory = Path(out_dir)
    binary: Path | None = None
    integer = integer_of(module, "perf_model")
    if hbm is not None:
        binary = Path(hbm).with_suffix(".bin")
    elif integer.meta["target"].name in HB_MAPPER.marches:
        integer, folder = _folder(integer, directory, march, name, opt, "perf_model")
        binary = fxq.board.compile_horizon(folder, show_progress=None if progressbar else False)
    estimate = fxq.estimate(integer, compiled=binary)
    details = [" ".join(map(str, row)) for cost in estimate.compiled for row in cost.layers] if layer_details else []
    directory.mkdir(parents=True, exist_ok=True)
    head = [] if binary else [f"{integer.meta['target'].name}: bounds by fxquant's own model; the vendor's compiler was not run"]
    text = "\n".join([*head, str(estimate), *details])
    write_file(directory / "estimate.txt", text + "\n")
    print(text if layer_details else "\n".join([*head, estimate.summary]))
    return estimate


@takes(save_path=FILE.or_none("model.html"), show=FLAG)
def visualize_model(module: Any, save_path: str | os.PathLike[str] | None = None, show: bool = False) -> Path:
    """Write a page of the model's graph and layers, and open it in a browser with `show`; return its path. Nothing is compiled."""
    page = fxq.report(integer_of(module, "visualize_model"), save_path or "model.html")
    if show:
        webbrowser.open_new_tab(page.resolve().as_uri())
    return page


@takes(hbir=FILE)
def export_hbir(module: Any, hbir: str | os.PathLike[str], march: str | None = None) -> tuple[list[str], list[str]]:
    """Write the installed compiler's input, a folder with an ONNX file, at `hbir` without its ending; return input and output names.

    HBIR itself is not written: its format is the compiler's own.
    """
    path = Path(hbir)
    _, folder = _folder(module, path.with_suffix(""), march, path.stem, "O2", "export_hbir")
    metadata = fxq.export.onnx_metadata(folder / f"{path.stem}.onnx")
    return [entry["name"] for entry in metadata["inputs"]], [entry["name"] for entry in metadata["outputs"]]


@takes(f=FILE)
def export_to_onnx(
    model: Any, args: Any, f: Any, input_names: list[str] | None = None, output_names: list[str] | None = None,
    opset_version: int | None = 11, *, _exact: bool = False,
) -> Path:  # fmt: skip
    """Write a float model, or a prepared one with quantize and dequantize around float operators: for viewing, and other compilers.

    It does not have the bits of the integer model, which `export_quantized_onnx` writes, as standard operators on integers. Operators are
    ONNX's own, whatever `operator_export_type` is. Opset 11, the plugin's, means the style's default where that opset lacks operators.
    Return the path. Raises ConfigurationError for an unsupported option that would change the file.
    """
    names: Any = {"input_names": input_names, "output_names": output_names}
    opset = None if opset_version == 11 else opset_version
    if _exact:
        return fxq.export_onnx(integer_of(model, "export_quantized_onnx"), f, opset=opset, **names)
    if not isinstance(model, fx.GraphModule) or stage_of(model) is None:
        return fxq.export_onnx(model, f, example_inputs=tuple(args) if isinstance(args, list) else args, opset=opset, **names)
    return fxq.export_onnx(integer_of(model, "export_to_onnx"), f, style="qdq", opset=opset_version, **names)


export_quantized_onnx = functools.partial(export_to_onnx, _exact=True)

INTEGER_FILE = "fxquant_integer.fxq"


@checked(f=FILE)
def save(m: torch.jit.ScriptModule, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
    """Write a trace of an integer model together with the integer graph. Raises ConfigurationError for a program of another model."""
    integer = integer_of(m, "horizon.jit.save")
    with tempfile.TemporaryDirectory() as folder:
        saved = fxq.save(integer, Path(folder) / INTEGER_FILE).read_bytes()
    archive = io.BytesIO()
    torch.jit.save(m, archive, _extra_files={**(_extra_files or {}), INTEGER_FILE: saved})
    write_file(f, archive.getvalue())


@takes(f=PATH)
def load(f: Any, map_location: Any = None) -> torch.jit.ScriptModule:
    """Load a program that `save` wrote, for `compile_model`. Raises ExportError for any other file."""
    extra: dict[str, Any] = {INTEGER_FILE: ""}
    try:
        program = torch.jit.load(f, map_location, extra)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, OSError) as error:
        raise ExportError(
            f"{f} is not a TorchScript program", because=str(error).splitlines()[0], remedy="pass what horizon.jit.save wrote"
        ) from None
    if extra[INTEGER_FILE]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / INTEGER_FILE
            content = extra[INTEGER_FILE]
            write_file(file, content if isinstance(content, bytes) else content.encode("latin-1"))
            object.__setattr__(program, "fxquant_integer", fxq.load(file))
    return program  # type: ignore[no-any-return]
