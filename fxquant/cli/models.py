"""The commands that take a model from Python to files, quantize and check, and the one that checks a board: conformance."""

import argparse
from typing import Any

from fxquant.cli.factories import DATA, HUB_FORMS, add_dynamic, add_form, add_images, add_rows, command, path, positive, shape
from fxquant.cli.photographs import add_photographs
from fxquant.errors import ConfigurationError

MODEL = (
    "the model: a class, a function or a module in a Python module, with ?key=value for its arguments; the current folder is importable. "
    f"Or a pretrained one: {HUB_FORMS}; or the path of a float ONNX file"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model and its quantization."""
    parser.add_argument("model", metavar="MODULE:FACTORY | FILE.onnx", help=MODEL)
    target = "target to compile for: a march, a chip, x86 or qnnpack (default: bayes-e)"
    parser.add_argument("--target", "--march", default="bayes-e", metavar="NAME", help=target)
    parser.add_argument("--qconfig", type=path, metavar="FILE", help="rules of precision by name and type, as fxq.save_qconfig writes them")
    parser.add_argument("--adapt", action="store_true", help="rewrite operators that exceed a limit of the target")
    cut = "nodes of an ONNX file that are its outputs; without names its last convolutions, which a detector's decoding reads"
    parser.add_argument("--cut", nargs="*", metavar="NODE", help=cut)
    add_dynamic(parser)


def add_quantize(commands: Any) -> None:
    """Add the command `quantize`."""
    quantize = command(
        commands,
        "quantize",
        _quantize,
        "prepare, calibrate, convert, export and verify a model, and report on it",
        "The folder holds model.onnx, integer.fxq, report.html and summary.json. The last fifth of the samples (32 at most) is held back.\n"
        "On it the ONNX file is compared with the integer model, bit for bit, and the integer model with the float one.\n"
        "Nothing is written before all of that is done. The exit status is 0 if not one bit differs, and 1 if one does.",
    )
    add_model(quantize)
    source = quantize.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=path, metavar="PATH", help=f"samples to calibrate and to verify: {DATA}; or photographs")
    add_images(source)
    add_photographs(quantize)
    add_rows(quantize)
    accuracy = "dB that every output is to have, to the float model: 16 bits for as few tensors and weights as that takes"
    quantize.add_argument("--accuracy", type=float, metavar="DB", help=accuracy)
    quantize.add_argument("--out", default="quantized", metavar="FOLDER", help="where files are written (default: quantized)")
    add_form(quantize)
    rows = "rows of a batch of the ONNX file, which then has fixed sizes alone"
    quantize.add_argument("--fixed-batch", type=positive, metavar="N", help=rows)
    weights = "choose weights with which onnxruntime is exact on x86 processors without VNNI, too (default: on such, for x86)"
    quantize.add_argument("--without-vnni", action="store_true", default=None, help=weights)
    quantize.add_argument("--horizon", action="store_true", help="write the folder horizon, too, for the vendor's compiler")
    quantize.add_argument("--measure", action="store_true", help="measure the ONNX file's speed next to the float model's, in onnxruntime")
    quantize.add_argument("--no-report", dest="report", action="store_false", help="write no report.html, which needs plotly")


def _quantize(options: argparse.Namespace) -> int:
    from fxquant.cli.quantizing import run

    return run(options)


def add_check(commands: Any) -> None:
    """Add the command `check`."""
    purpose = "list the limits of a target that a model breaks, and the operators that stay in float, before calibration"
    more = "Each is listed with the line of the model's code and a remedy. The exit status is 0 if there is nothing, and 1 if there is."
    check = command(commands, "check", _check, purpose, more)
    add_model(check)
    source = check.add_mutually_exclusive_group()
    sizes = "sizes of a float32 input; once for each of forward's arguments; an ONNX file may hold them"
    source.add_argument("--shape", action="append", type=shape, metavar="N,C,…", help=sizes)
    source.add_argument("--data", type=path, metavar="PATH", help=f"samples, of which the first is the input: {DATA}; or photographs")
    add_images(source)
    add_photographs(check)


def _check(options: argparse.Namespace) -> int:
    import fxquant as fxq
    from fxquant.analysis.sample import random_example
    from fxquant.cli.factories import dynamic_shapes, model_named
    from fxquant.cli.photographs import samples_of
    from fxquant.frontend import inputs_of_file

    mapping = None if options.qconfig is None else fxq.load_qconfig(options.qconfig)
    model = model_named(options.model, options.cut)
    example: Any = random_example(options.shape) if options.shape else inputs_of_file(model)
    if options.data or options.images:
        example = {name: array[:1] for name, array in samples_of(options, model, most=1).items()}
    if example is None:
        because = "what forward computes is traced on inputs of these sizes, and only ONNX files have them"
        raise ConfigurationError("check has no inputs", because=because, remedy="add --shape N,C,… for each input, or --data PATH")
    settings = fxq.Options(adapt=options.adapt, dynamic_shapes=dynamic_shapes(options.dynamic, model, example))
    result = fxq.check(model, example, options.target, mapping, options=settings)
    print(result)
    return 0 if result else 1


def add_conformance(commands: Any) -> None:
    """Register the command `conformance`, which compares the integers of a board with fxquant's."""
    conformance = command(
        commands,
        "conformance",
        _conformance,
        "check that a board computes fxquant's integers: write probe programs for it, and compare its results",
        "With --target, write a kit: a program for each operator, compiled by the vendor's tool. Copy KIT/board to the board, and run\n"
        "`python3 run.py` there. With --results, say per operator whether every integer is equal, or how many differ;\n"
        "conformance.json is written into DIR. The exit status is 0 if every operator that runs on the BPU is equal, and 1 if one differs\n"
        "or was not run.",
    )
    conformance.add_argument("kit", type=path, metavar="KIT", help="the folder of the kit")
    request = conformance.add_mutually_exclusive_group(required=True)
    request.add_argument("--target", metavar="MARCH", help="write the kit for this march or chip: bernoulli2, bayes, bayes-e, x3, x5, …")
    conformance.add_argument("--dtype", nargs="+", metavar="DTYPE", help="dtypes of activations of --target: int8, int16 (default: int8)")
    conformance.add_argument("--operators", nargs="+", metavar="NAME", help="operators of --target (default: all)")
    request.add_argument("--results", type=path, metavar="DIR", help="compare the results that the board's run.py wrote into this folder")
    simulated = "let the vendor's simulator write the results into this folder first, and compare them"
    request.add_argument("--simulate", type=path, metavar="DIR", help=simulated)


def _conformance(options: argparse.Namespace) -> int:
    import fxquant as fxq

    if options.target is None:
        if unused := [name for name in ("dtype", "operators") if getattr(options, name) is not None]:
            because = "the kit was written for its operators and dtypes"
            raise ConfigurationError(f"--{unused[0]} means nothing here", because=because, remedy="leave it out")
        folder = options.results if options.simulate is None else fxq.board.simulate_conformance(options.kit, options.simulate)
        result = fxq.board.check_conformance(options.kit, folder)
        print(result)
        print(result.to_json(folder / "conformance.json"))
        return 0 if result else 1
    print(fxq.board.conformance_kit(options.kit, options.target, dtypes=options.dtype or ["int8"], operators=options.operators))
    return 0
