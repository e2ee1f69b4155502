"""Horizon's functions that compile a quantized model, over the installed compiler."""

from __future__ import annotations

import logging
import os
import shutil
import webbrowser
from pathlib import Path
from typing import Any

from torch import fx

import fxquant as fxq
from fxquant import backends
from fxquant.backends.horizon.compiled_program import Binary
from fxquant.backends.horizon.formats import FORMATS, HB_MAPPER
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.compat.horizon.served.march import get_march
from fxquant.errors import ConfigurationError
from fxquant.support.arguments import FILE, FLAG, FOLDER, Kind, checked, choice
from fxquant.support.files import write_file

logger = logging.getLogger("fxquant")

LEVELS = {"fast": "O3", "ddr": "O2", "balance": "O2"}
OPTIMIZE = {"ddr": "bandwidth"}
LEVEL = choice("O0", "O1", "O2", "O3", *LEVELS)
OPT = Kind(
    "one of 'O0', 'O1', 'O2', 'O3', 'fast', 'ddr', 'balance', or 0 to 3",
    lambda value: LEVEL.take(f"O{value}" if isinstance(value, int) else value),
)
HBM = Kind("the path of a .hbm or .bin file to write", FILE.take)


def _folder(module: Any, folder: Path, march: str | None, name: str | None, opt: str, called: str) -> tuple[fx.GraphModule, Path]:
    """Return the integer model, and its folder for the compiler. Raises ConfigurationError for a march other than the model's."""
    integer = integer_of(module, called)
    wanted, own = march or get_march(), integer.meta["target"]
    if wanted is not None and backends.get(wanted).march != own.march:
        raise ConfigurationError(
            f"{called} cannot compile this model for {wanted}",
            because=f"it was prepared for {own.name}, whose arithmetic is another",
            remedy=f"prepare it after set_march({wanted!r}), or leave march out",
        )
    level = _level(LEVELS.get(opt, opt), own.name, called)
    return integer, fxq.export_horizon(integer, folder, name or "model", optimize=level, mode=OPTIMIZE.get(opt, "latency"))


def _level(level: str, target: str, called: str) -> str:
    """Return a level that the target's compiler has: the highest of hb_compile is O2, but the plugin's default is O3."""
    format = FORMATS.get(target)
    if format is None or level in format.levels:
        return level
    highest = format.levels[-1]
    logger.info("%s: %s is replaced by %s, the highest level of %s", called, highest, level, format.compiler)
    return highest


def _say_inputs(called: str, source: Any, input_layout: Any, output_layout: Any) -> None:
    """Log that inputs and outputs differ from the requested ones."""
    sources = {source} if isinstance(source, str) else set(source)
    if sources != {"ddr"} or input_layout not in (None, "NCHW") or output_layout != "NCHW":
        logger.warning(
            "%s: the compiled model reads float32 inputs from memory, in PyTorch's order, and writes outputs so:"
            " not source %s, layouts %s, %s."
            " For a camera, insert fxq.nn.Nv12ToYuv444 before the model",
            called, ", ".join(sorted(sources)), input_layout, output_layout,
        )  # fmt: skip


@checked(hbm=HBM, opt=OPT)
def compile_model(
    module: Any,
    example_inputs: Any,
    hbm: str | os.PathLike[str],
    march: str | None = None,
    name: str | None = None,
    input_source: Any = "ddr",
    input_layout: str | None = None,
    output_layout: str = "NCHW",
    opt: str = "O2",
    balance_factor: int = 2,
    progressbar: bool = True,
    jobs: int = 16,
    debug: bool = True,
    extra_args: Any = None,
) -> int:
    """Compile a prepared or integer model with the vendor's hb_mapper; return 0 on success.

    hbm   the file to write: a .bin, for the board and for fxq.verify; if its name ends in .hbm, the BPU programs alone, with the
          .bin next to it. The compiler's working folder is next to it, under its name without the ending
    opt   "O0" to "O3"; "fast" is O3, "ddr" optimizes for bandwidth, "balance" is O2

    module    a prepared or integer model, or a trace of one that convert_fx returned

    Inputs are in memory ("ddr"), float32, in PyTorch's order; a line of the log reports a request for another source or layout.
    The other arguments have no effect. For nash the folder that hb_compile takes is written, and compile.sh in it has to be run elsewhere.
    Raises ConfigurationError for nash, and if the tool is not installed; ExportError; and CompilationError with the layer and its
    source line.
    """
    path = Path(hbm)
    _say_inputs("compile_model", input_source, input_layout, output_layout)
    _, folder = _folder(module, path.with_suffix(""), march, name, opt, "compile_model")
    made = fxq.compile_horizon(folder, show_progress=None if progressbar else False)
    shutil.copyfile(made, path.with_suffix(".bin"))
    if path.suffix == ".hbm":
        opened = Binary(made)  # the extracted files exist as long as this object
        shutil.copyfile(opened.hbm, path)
    quantized = f"{made.stem}_quantized_model.onnx"
    shutil.copyfile(made.with_name(quantized), path.with_name(f"{path.stem}_quantized_model.onnx"))
    return 0


@checked(out_dir=FOLDER, opt=OPT)
def perf_model(
    module: Any,
    example_inputs: Any,
    march: str | None = None,
    out_dir: str | os.PathLike[str] = ".",
    name: str | None = None,
    hbm: str | os.PathLike[str] | None = None,
    input_source: Any = "ddr",
    input_layout: str | None = None,
    output_layout: str = "NCHW",
    opt: str = "O3",
    balance_factor: int = 2,
    progressbar: bool = True,
    jobs: int = 16,
    layer_details: bool = False,
    extra_args: Any = None,
) -> fxq.Estimate:
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
        binary = fxq.compile_horizon(folder, show_progress=None if progressbar else False)
    found = fxq.estimate(integer, compiled=binary)
    details = [" ".join(map(str, row)) for cost in found.compiled for row in cost.layers] if layer_details else []
    directory.mkdir(parents=True, exist_ok=True)
    head = [] if binary else [f"{integer.meta['target'].name}: bounds by fxquant's own model; the vendor's compiler was not run"]
    text = "\n".join([*head, str(found), *details])
    write_file(directory / "estimate.txt", text + "\n")
    print(text if layer_details else "\n".join([*head, found.summary]))
    return found


@checked(save_path=FILE.or_none("model.html"), show=FLAG)
def visualize_model(
    module: Any,
    example_inputs: Any = None,
    march: str | None = None,
    save_path: str | os.PathLike[str] | None = None,
    show: bool = False,
    **options: Any,
) -> Path:
    """Write a page of the model's graph and layers, and open it in a browser with `show`; return its path. `march` has no effect.

    Raises ConfigurationError for an option that Horizon's function does not have.
    """
    for option in options:
        if option not in ("input_source", "input_layout", "output_layout", "opt", "balance_factor", "progressbar", "jobs", "extra_args"):
            raise ConfigurationError(
                f"visualize_model has no option {option!r}", because="it draws a model, and compiles nothing", remedy="leave it out"
            )
    made = fxq.report(integer_of(module, "visualize_model"), save_path or "model.html")
    if show:
        webbrowser.open_new_tab(made.resolve().as_uri())
    return made


@checked(hbir=FILE)
def export_hbir(module: Any, example_inputs: Any, hbir: str | os.PathLike[str], march: str | None = None) -> tuple[list[str], list[str]]:
    """Write the installed compiler's input, a folder with an ONNX file, at `hbir` without its ending; return input and output names.

    HBIR itself is not written: its format is the compiler's own.
    """
    path = Path(hbir)
    _, folder = _folder(module, path.with_suffix(""), march, path.stem, "O2", "export_hbir")
    told = fxq.onnx_metadata(folder / f"{path.stem}.onnx")
    return [entry["name"] for entry in told["inputs"]], [entry["name"] for entry in told["outputs"]]
