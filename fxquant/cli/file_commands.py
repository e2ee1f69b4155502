"""The commands that work on files: inspect, diff, report, segments, export and verify."""

import argparse
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxquant.cli.factories import DATA, FILE, add_data, add_form, add_images, add_runtime, command, path, positive
from fxquant.cli.photographs import camera_batches
from fxquant.errors import ConfigurationError, Interrupted

NEEDED = {  # by options of `export`: those of which each needs one
    "--option --camera --compile --board": "--to",
    "--train-type --mean --std": "--camera",
    "--data --images": "--board",
    "--output-names": "--onnx --to",
}
FLAGS = {"True": True, "False": False}
RANDOM_SIZES = (4, 1)  # of the batches that are drawn where no data is given


def _batches(options: argparse.Namespace, model: Any) -> list[Any]:
    """Return the batches of --data or --images, or random ones, which is said."""
    from fxquant.analysis.sample import batches_from, random_batches

    if options.data is not None:
        return batches_from(options.data, model, options.batch_size or 1)
    if options.images:
        return camera_batches(options, model)
    print(f"no --data: {len(RANDOM_SIZES)} random batches, which fill the range of every input")
    return random_batches(model, RANDOM_SIZES)


def add_inspect(commands: Any) -> None:
    """Add the command `inspect`."""
    purpose = "describe a file: stage, target, inputs, operators, dtypes, scales, sizes, and which operators stay in float and why"
    parser = command(commands, "inspect", _inspect, purpose, "The table lists every quantized tensor in the order they are computed.")
    parser.add_argument("file", type=path, metavar="FILE", help=FILE)
    parser.add_argument("--graph", action="store_true", help="print only the graph, as text")


def _inspect(options: argparse.Namespace) -> int:
    from fxquant.reporting.inspection import describe, read

    contents = read(options.file)
    print(contents.text.rstrip("\n") if options.graph else describe(contents))
    return 0


def add_diff(commands: Any) -> None:
    """Add the command `diff`."""
    purpose = "compare what two files hold: their graphs as text, their scales, their weights"
    more = "Both are saved models, or both are ONNX files. The exit status is 0 if they hold the same, and 1 if not."
    diff = command(commands, "diff", _diff, purpose, more)
    diff.add_argument("a", type=path, metavar="A", help=FILE)
    diff.add_argument("b", type=path, metavar="B", help="another of the same kind")


def _diff(options: argparse.Namespace) -> int:
    from fxquant.reporting.inspection import difference, read

    text = difference(read(options.a), read(options.b))
    print(text or "equal: the same graph, scales and tensors")
    return 1 if text else 0


def add_report(commands: Any) -> None:
    """Add the command `report`."""
    purpose = "write one HTML page of a model: its graph, its layers, how far they are from the float model, and what to do"
    more = "The page opens without network. The advice needs --reference, the traced or prepared float side."
    report = command(commands, "report", _report, purpose, more)
    report.add_argument("file", type=path, metavar="FILE", help="a model that fxq.save wrote (.fxq)")
    report.add_argument("--out", type=path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)")
    same = "the same model as fxq.trace or fxq.prepare made it, saved; a prepared one in float"
    report.add_argument("--reference", type=path, metavar="FILE", help=same)
    add_data(report)


def _report(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.reporting.forms import saved_model

    model = saved_model(options.file)
    reference = None if options.reference is None else saved_model(options.reference)
    batches: Any = None
    if reference is not None:
        batches = _batches(options, model)
        if reference.meta.get("stage") == "PREPARED":
            fxq.set_state(reference, fxq.State.FLOAT)
    print(fxq.report(model, options.out, batches, reference=reference, title=options.file.name))
    return 0


def add_segments(commands: Any) -> None:
    """Add the command `segments`."""
    purpose = "write an integer model as one ONNX file for each stretch of the target's integers or the host's float operators"
    more = "A manifest connects the files: fxq.export.run_segments runs the folder and returns the bits of the entire model."
    segments = command(commands, "segments", _segments, purpose, more)
    segments.add_argument("file", type=path, metavar="FILE", help="an integer model that fxq.save wrote (.fxq)")
    segments.add_argument("folder", type=path, metavar="FOLDER", help="where manifest.json and the files are written")
    cut = "cut after this tensor or module as well; may be given several times"
    segments.add_argument("--cut", action="append", default=[], metavar="NAME", help=cut)


def _segments(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.reporting.forms import saved_model

    integer = saved_model(options.file)
    manifest = fxq.export.export_segments(integer, options.folder, cut=options.cut)
    for index, segment in enumerate(fxq.inspect.segments(integer, cut=options.cut)):
        print(f"{index}  {segment.device:10} {len(segment.nodes):5} nodes  {', '.join(segment.inputs)}  ->  {', '.join(segment.outputs)}")
    print(manifest)
    return 0


def add_export(commands: Any) -> None:
    """Add the command `export`."""
    purpose = "write an integer model for another program: as ONNX, C, a program of PyTorch's own, or for a vendor's compiler"
    export = command(commands, "export", _export, purpose, "Any number of forms may be asked for.")
    export.add_argument("file", type=path, metavar="FILE", help="an integer model that fxq.save wrote (.fxq)")
    export.add_argument("--onnx", type=path, metavar="PATH", help="an ONNX file with the same bits in every runtime (.onnx)")
    export.add_argument("--c", type=path, metavar="PATH", help="a C99 program without dependencies: its source, with header and main (.c)")
    export.add_argument("--pt2", type=path, metavar="PATH", help="an archive of torch.export (.pt2)")
    rows = "rows of a batch: of the C program (default: 1), and of the ONNX file, which then has fixed sizes alone (default: any batch)"
    export.add_argument("--batch-size", type=positive, metavar="N", help=rows)
    add_form(export)
    export.add_argument("--output-names", nargs="+", metavar="NAME", help="names of the outputs of --onnx and --to")
    help_text = "what the vendor's compiler for bernoulli2, bayes and bayes-e takes: a folder (see --out)"
    export.add_argument("--to", choices=("horizon",), help=help_text)
    fields = "optimize_level O2, outputs integer, layout NHWC, core_num 2, jobs 4, …; may be given several times"
    field = f"a field of fxq.board.HorizonOptions: {fields}"
    export.add_argument("--option", action="append", nargs=2, metavar=("NAME", "VALUE"), help=field)
    export.add_argument("--camera", choices=("nv12", "yuv444", "rgb", "bgr", "gray"), help="the images that the program of --to takes")
    export.add_argument("--train-type", metavar="ORDER", help="rgb, bgr or gray: the model's channels, to which camera.fxq converts")
    export.add_argument("--mean", nargs="+", type=float, metavar="NUMBER", help="its mean of images of 0 to 255, by channel (default: 0)")
    export.add_argument("--std", nargs="+", type=float, metavar="NUMBER", help="its divisors (default: 1)")
    export.add_argument("--out", type=path, default=Path("horizon"), metavar="FOLDER", help="the folder of --to (default: horizon)")
    export.add_argument("--compile", action="store_true", help="compile the folder of --to, too, which needs the vendor's tool")
    export.add_argument("--board", type=path, metavar="FOLDER", help="compile, and write what runs the program on a board and checks it")
    export.add_argument("--data", type=path, metavar="FILE", help=f"inputs for --board: {DATA} (default: random ones)")
    add_images(export, "photographs for --board, which are made NV12 for the program of --camera: files and folders")


def _export(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.conformance.kit import check_batches
    from fxquant.reporting.forms import saved_model

    names = {"output_names": options.output_names}
    form = {name: getattr(options, name) for name in ("batch_size", "style", "opset", "runtime")}
    writers: dict[str, Callable[..., Path]] = {
        "onnx": functools.partial(fxq.export_onnx, **form, **names),
        "c": functools.partial(fxq.export.export_c, batch_size=options.batch_size or 1),
        "pt2": fxq.export.export_pt2,
    }
    asked = {name: path for name in writers if (path := getattr(options, name)) is not None}
    if not asked and options.to is None:
        remedy = f"give one of --{', --'.join(writers)} or --to horizon"
        raise ConfigurationError("nothing is to be written", because="a form is asked for by its option", remedy=remedy)
    _, *keywords = inspect.signature(fxq.board.with_camera).parameters
    colours = {name: value for name in keywords if (value := getattr(options, name, None)) is not None}
    stated = {f"--{name.replace('_', '-')}" for name, value in vars(options).items() if value}
    for dependent, others in NEEDED.items():
        needing = [name for name in dependent.split() if name in stated]
        if needing and stated.isdisjoint(others.split()):
            because, remedy = f"it is about {others.replace(' ', ' and ')}", f"give {others.replace(' ', ' or ')}, or leave it out"
            raise ConfigurationError(f"{needing[0]} means nothing here", because=because, remedy=remedy)
    integer = saved_model(options.file)
    for name, path in asked.items():
        print(writers[name](integer, path))
    if options.to is not None:
        if colours and options.camera in ("rgb", "bgr", "gray"):
            colours["swing"] = options.camera
        model = fxq.board.with_camera(integer, **colours) if colours else integer
        fields: dict[str, Any] = {name: int(text) if text.isdecimal() else FLAGS.get(text, text) for name, text in options.option or ()}
        batches = _batches(options, model) if options.board else []
        check_batches(model, batches, options.camera)  # before minutes of compiling
        output = fxq.board.export_horizon(model, options.out, camera=options.camera, options=fxq.board.HorizonOptions(**fields), **names)
        if colours:
            print(fxq.save(model, output / "camera.fxq"))
        if options.compile or options.board:
            output = fxq.board.compile_horizon(output)
        print(output)
        if options.board:
            print(fxq.board.board_kit(options.board, model, output, batches))
    return 0


def add_verify(commands: Any) -> None:
    """Add the command `verify`."""
    verify = command(
        commands,
        "verify",
        _verify,
        "run two forms of one model and compare every quantized tensor, bit for bit",
        "The forms are a prepared model, an integer model, an ONNX file and a BPU program; at most one is a file of the last two kinds.\n"
        "An ONNX file is run in every runtime there is, a program (.bin, .hbm) in the vendor's simulator.\n"
        "The first difference is located. The exit status is 0 if not one bit differs, and 1 if one does.",
    )
    verify.add_argument("a", type=path, metavar="A", help=FILE)
    verify.add_argument("b", type=path, metavar="B", help="another form of the same model")
    add_runtime(verify, "what runs the ONNX file")
    add_data(verify)


def _verify(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.reporting.forms import saved_model

    first, second = (path if path.suffix.lower() in (".onnx", ".bin", ".hbm") else saved_model(path) for path in (options.a, options.b))
    model = next((form for form in (first, second) if not isinstance(form, Path)), None)
    try:
        report = fxq.verify(first, second, () if model is None else _batches(options, model), runtime=options.runtime)
    except Interrupted as stopped:
        print(stopped.result)
        raise
    print(report)
    return 0 if report else 1
