"""The command line."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.support.arguments import Kind, checked, words

FILE = "a model that fxq.save wrote (.fxq), or a file that fxq.export_onnx wrote (.onnx)"
RANDOM_SIZES = (4, 1)  # of the batches that are drawn where no data is given


@checked(arguments=Kind("a list of strings", words).or_none("those of the process"))
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 if something is not equal, 2 for an error the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except FxQuantError as error:
        print(f"fxquant: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output has seen enough
        sys.stderr.close()
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxquant",
        description="Quantization whose numbers are exact: training, integer graph and ONNX agree bit for bit.",
        epilog="The exit status is 0, 1 if something is not equal, and 2 for an error. `fxquant COMMAND --help` says more of a command.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small network on real digits, quantize it, export it, and prove the bits equal")
    demo.add_argument("--target", default="bayes-e", help="target to compile for: a march, a chip, x86 or qnnpack (default: bayes-e)")
    demo.add_argument("--out", default="fxquant-demo", help="directory for model.onnx and the graphs (default: fxquant-demo)")
    demo.add_argument("--adapt", action="store_true", help="rewrite operators that exceed a limit of the target")
    demo.set_defaults(run=_demo)

    inspect = _command(
        commands,
        "inspect",
        "describe a file: stage, target, inputs, operators, dtypes, scales, sizes, and which operators stay in float and why",
        "The table lists every quantized tensor in the order they are computed.",
    )
    inspect.add_argument("file", type=Path, metavar="FILE", help=FILE)
    inspect.add_argument("--graph", action="store_true", help="print only the graph, as text")
    inspect.set_defaults(run=_inspect)

    diff = _command(
        commands,
        "diff",
        "compare what two files hold: their graphs as text, their scales, their weights",
        "Both are saved models, or both are ONNX files. The exit status is 0 if they hold the same, and 1 if not.",
    )
    diff.add_argument("a", type=Path, metavar="A", help=FILE)
    diff.add_argument("b", type=Path, metavar="B", help="another of the same kind")
    diff.set_defaults(run=_diff)

    report = _command(
        commands,
        "report",
        "write one HTML page of a model: its graph, its layers, how far they are from the float model, and what to do",
        "The page opens without network. The advice needs --reference, the traced or prepared float side.",
    )
    report.add_argument("file", type=Path, metavar="FILE", help="a model that fxq.save wrote (.fxq)")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)")
    report.add_argument(
        "--reference", type=Path, metavar="FILE", help="the same model as fxq.trace or fxq.prepare made it, saved; a prepared one in float"
    )
    _data(report)
    report.set_defaults(run=_report)

    segments = _command(
        commands,
        "segments",
        "write an integer model as one ONNX file for each stretch of the target's integers or the host's float operators",
        "A manifest connects the files: fxq.run_segments runs the folder and returns the bits of the entire model.",
    )
    segments.add_argument("file", type=Path, metavar="FILE", help="an integer model that fxq.save wrote (.fxq)")
    segments.add_argument("folder", type=Path, metavar="FOLDER", help="where manifest.json and the files are written")
    segments.add_argument(
        "--cut", action="append", default=[], metavar="NAME", help="cut after this tensor or module as well; may be given several times"
    )
    segments.set_defaults(run=_segments)

    export = _command(
        commands,
        "export",
        "write an integer model for another program: as ONNX, C, a program of PyTorch's own, or for a vendor's compiler",
        "Any number of forms may be asked for.",
    )
    export.add_argument("file", type=Path, metavar="FILE", help="an integer model that fxq.save wrote (.fxq)")
    export.add_argument("--onnx", type=Path, metavar="PATH", help="an ONNX file with the same bits in every runtime (.onnx)")
    export.add_argument("--c", type=Path, metavar="PATH", help="a C99 program without dependencies: its source, with header and main (.c)")
    export.add_argument("--pt2", type=Path, metavar="PATH", help="an archive of torch.export (.pt2)")
    export.add_argument("--torchscript", type=Path, metavar="PATH", help="TorchScript (.pt)")
    export.add_argument(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="rows of a batch: of the C program (default: 1), and of the ONNX file, which then has fixed sizes alone (default: any batch)",
    )
    export.add_argument(
        "--to", choices=("horizon",), help="what the vendor's compiler for bernoulli2, bayes and bayes-e takes: a folder (see --out)"
    )
    export.add_argument("--camera", choices=("nv12", "yuv444"), help="let the program of --to take images of a camera")
    export.add_argument("--out", type=Path, default=Path("horizon"), metavar="FOLDER", help="the folder of --to (default: horizon)")
    export.add_argument("--compile", action="store_true", help="compile the folder of --to, too, which needs the vendor's tool")
    export.set_defaults(run=_export)

    _conformance_options(commands)
    verify = _command(
        commands,
        "verify",
        "run two forms of one model and compare every quantized tensor, bit for bit",
        "The forms are a prepared model, an integer model, an ONNX file and a BPU program; at most one is a file of the last two kinds.\n"
        "An ONNX file is run in every runtime there is, a program (.bin, .hbm) in the vendor's simulator.\n"
        "The first difference is located. The exit status is 0 if not one bit differs, and 1 if one does.",
    )
    verify.add_argument("a", type=Path, metavar="A", help=FILE)
    verify.add_argument("b", type=Path, metavar="B", help="another form of the same model")
    _data(verify)
    verify.set_defaults(run=_verify)
    return parser


def _conformance_options(commands: Any) -> None:
    conformance = _command(
        commands,
        "conformance",
        "check that a board computes fxquant's integers: write probe programs for it, and compare its results",
        "With --target, write a kit: a program for each operator, compiled by the vendor's tool. Copy KIT/board to the board, and run\n"
        "`python3 run.py` there. With --results, say per operator whether every integer is equal, or how many differ and which known\n"
        "variant of the arithmetic fits; conformance.json is written into DIR. The exit status is 0 if every operator that runs on the\n"
        "BPU is equal, and 1 if one differs or was not run.",
    )
    conformance.add_argument("kit", type=Path, metavar="KIT", help="the folder of the kit")
    conformance.add_argument(
        "--target", metavar="MARCH", help="write the kit for this march or chip: bernoulli2, bayes, bayes-e, x3, x5, …"
    )
    conformance.add_argument("--dtype", nargs="+", metavar="DTYPE", help="dtypes of activations of --target: int8, int16 (default: int8)")
    conformance.add_argument("--operators", nargs="+", metavar="NAME", help="operators of --target (default: all)")
    conformance.add_argument(
        "--results", type=Path, metavar="DIR", help="compare the results that the board's run.py wrote into this folder"
    )
    conformance.add_argument(
        "--simulate", type=Path, metavar="DIR", help="let the vendor's simulator write the results into this folder first, and compare them"
    )
    conformance.set_defaults(run=_conformance)


def _command(commands: Any, name: str, purpose: str, more: str) -> argparse.ArgumentParser:
    described = f"{purpose[0].upper()}{purpose[1:]}.\n{more}"
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=described, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser


def _data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="inputs: .npy, .npz or .safetensors, arrays by the names of the inputs with the batch as dimension 0 (default: random ones)",
    )
    command.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="rows run at a time (default: 32)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


# The imports are where they are needed: `fxquant --help` answers at once.


def _demo(options: argparse.Namespace) -> int:
    from fxquant.demo.run import run_demo

    outcome = run_demo(options.target, options.out, adapt=options.adapt)
    return 0 if outcome.report and outcome.float_nodes == 0 else 1


def _inspect(options: argparse.Namespace) -> int:
    from fxquant.reporting.inspection import describe, read

    contents = read(options.file)
    print(contents.text.rstrip("\n") if options.graph else describe(contents))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from fxquant.reporting.inspection import difference, read

    found = difference(read(options.a), read(options.b))
    print(found or "equal: the same graph, scales and tensors")
    return 1 if found else 0


def _report(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.analysis.sample import batches_from, random_batches
    from fxquant.reporting.inspection import saved_model

    model = saved_model(options.file)
    reference = None if options.reference is None else saved_model(options.reference)
    batches: Any = None
    if reference is not None:
        drawn = options.data is None
        batches = random_batches(model, RANDOM_SIZES) if drawn else batches_from(options.data, model, options.batch_size)
        if drawn:
            print(f"no --data: {len(batches)} random batches, which fill the range of every input")
        if reference.meta.get("stage") == "PREPARED":
            fxq.set_state(reference, fxq.State.FLOAT)
    print(fxq.report(model, options.out, batches, reference=reference, title=options.file.name))
    return 0


def _segments(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.reporting.inspection import saved_model

    integer = saved_model(options.file)
    manifest = fxq.export_segments(integer, options.folder, cut=options.cut)
    for index, segment in enumerate(fxq.segments(integer, cut=options.cut)):
        print(f"{index}  {segment.device:10} {len(segment.nodes):5} nodes  {', '.join(segment.inputs)}  ->  {', '.join(segment.outputs)}")
    print(manifest)
    return 0


def _export(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.reporting.inspection import saved_model

    writers: dict[str, Callable[..., Path]] = {
        "onnx": functools.partial(fxq.export_onnx, batch_size=options.batch_size),
        "c": functools.partial(fxq.export_c, batch_size=options.batch_size or 1),
        "pt2": fxq.export_pt2,
        "torchscript": fxq.export_torchscript,
    }
    asked = {name: path for name in writers if (path := getattr(options, name)) is not None}
    if not asked and options.to is None:
        raise ConfigurationError(
            "nothing is to be written",
            because="a form is asked for by its option",
            remedy=f"give one of --{', --'.join(writers)} or --to horizon",
        )
    if options.compile and options.to is None:
        raise ConfigurationError("nothing can be compiled", because="--compile is about the folder of --to", remedy="give --to horizon")
    if options.camera and options.to is None:
        raise ConfigurationError("no camera can be chosen", because="--camera is about the folder of --to", remedy="give --to horizon")
    integer = saved_model(options.file)
    for name, path in asked.items():
        print(writers[name](integer, path))
    if options.to is not None:
        folder = fxq.export_horizon(integer, options.out, camera=options.camera)
        print(fxq.compile_horizon(folder) if options.compile else folder)
    return 0


def _conformance(options: argparse.Namespace) -> int:
    import fxquant as fxq

    asked = [name for name in ("target", "results", "simulate") if getattr(options, name) is not None]
    if len(asked) != 1:
        raise ConfigurationError(
            "the request is not clear",
            because="--target writes a kit, --results and --simulate compare results"
            + (f"; given are --{' and --'.join(asked)}" if asked else ""),
            remedy="give one of them",
        )
    if options.target is None:
        unused = [name for name in ("dtype", "operators") if getattr(options, name) is not None]
        if unused:
            raise ConfigurationError(
                f"--{unused[0]} means nothing here", because="the kit was written for its operators and dtypes", remedy="leave it out"
            )
        folder = options.results if options.simulate is None else fxq.simulate_conformance(options.kit, options.simulate)
        found = fxq.check_conformance(options.kit, folder)
        print(found)
        print(found.to_json(folder / "conformance.json"))
        return 0 if found else 1
    print(fxq.conformance_kit(options.kit, options.target, dtypes=options.dtype or ["int8"], operators=options.operators))
    return 0


def _verify(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.analysis.sample import batches_from, random_batches
    from fxquant.reporting.inspection import saved_model

    first, second = (path if path.suffix.lower() in (".onnx", ".bin", ".hbm") else saved_model(path) for path in (options.a, options.b))
    model = next((form for form in (first, second) if not isinstance(form, Path)), None)
    if model is None:
        raise ConfigurationError(
            "two exported files cannot be verified against each other",
            because="inputs, and where a difference is, are known from the graph of a saved model",
            remedy="pass the integer model that one of them was exported from: fxq.save(integer, 'model.fxq')",
        )
    drawn = options.data is None
    batches = random_batches(model, RANDOM_SIZES) if drawn else batches_from(options.data, model, options.batch_size)
    report = fxq.verify(first, second, batches)
    if drawn:
        print(f"no --data: {len(batches)} random batches, which fill the range of every input")
    print(report)
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
