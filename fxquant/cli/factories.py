"""The model that a command names, package.module:factory, a name of a hub or an ONNX file, and the options that commands share."""

import argparse
import ast
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.export import Dim

from fxquant.errors import ConfigurationError
from fxquant.frontend import CUT, read_onnx
from fxquant.support.progress import working

FORM = "package.module:factory"
HUB_FORMS = "timm:NAME, torchvision:NAME or hf:NAME"
REMEDY = f"name a class of modules, a function that returns a module, or a module, as {FORM}; a model as {HUB_FORMS}; or an .onnx file"


@dataclass(frozen=True)
class Hub:
    """A package that makes pretrained models by name, and the preprocessing with which a model was trained."""

    package: str
    make: Callable[..., Any]  # from the package, a name and keywords
    transform: Callable[..., Callable[[Any], Any]]  # from the package, the name and the model: from a PIL image to float32 (3, H, W)


def _of_transformers(transformers: Any, name: str, **settings: Any) -> Any:
    (architecture,) = transformers.AutoConfig.from_pretrained(name).architectures
    return getattr(transformers, architecture).from_pretrained(name, **settings)


def _transform_of_transformers(transformers: Any, name: str, _: nn.Module) -> Callable[[Any], Any]:
    processor = transformers.AutoImageProcessor.from_pretrained(name)
    return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]


HUBS = {
    "timm": Hub(
        "timm",
        lambda timm, name, pretrained=True, **settings: timm.create_model(name, pretrained=pretrained, **settings),
        lambda timm, _, model: timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False),
    ),
    "torchvision": Hub(
        "torchvision",
        lambda torchvision, name, weights="DEFAULT", **settings: torchvision.models.get_model(name, weights=weights, **settings),
        lambda torchvision, name, _: torchvision.models.get_model_weights(name).DEFAULT.transforms(),
    ),
    "hf": Hub("transformers", _of_transformers, _transform_of_transformers),
}


def transform_of(name: str, model: nn.Module) -> Callable[[Any], Any] | None:
    """Return the preprocessing of a hub's model, from a PIL image to float32 (3, H, W); None for other models."""
    source, _, rest = name.partition("?")[0].partition(":")
    if source not in HUBS:
        return None
    package = _imported(HUBS[source].package)
    with _of_user(f"the preprocessing of {name} is not known", "give --size, --mean and --std"):
        return HUBS[source].transform(package, rest, model)


def model_named(name: str, cut: Sequence[str] | None = None) -> nn.Module:
    """Return the model of a name like package.module:factory?key=value, or of the path of an ONNX file, in eval mode.

    Modules are imported from the current folder, too. The factory is a class of modules or a function, which is called with the keywords
    behind the question mark, or a module. The model of a hub is pretrained, unless `timm:NAME?pretrained=False` or
    `torchvision:NAME?weights=None` says otherwise.
    An ONNX file returns the results of the nodes in `cut`, of its last convolutions if that is empty.
    Raises ConfigurationError, with the line of the user's code, if it cannot be imported, raises, or returns something else.
    """
    if name.endswith(".onnx"):
        read = read_onnx(name, cut)
        print(*(f"output {index}: {node}" for index, node in enumerate(read.meta[CUT])), sep="\n", end="\n" * bool(read.meta[CUT]))
        return read
    if cut is not None:
        because, remedy = f"{name} does not end in .onnx", "return in forward what the program is to return"
        raise ConfigurationError("--cut means nothing here", because=because, remedy=remedy)
    named, _, query = name.partition("?")
    module, colon, path = named.partition(":")
    settings = _settings(name, query)
    with working(f"loading {named}"):
        if module in HUBS and path:
            package = _imported(HUBS[module].package)
            with _of_user(f"{named} cannot be loaded", "look up the model's name, and whether its weights can be downloaded"):
                return HUBS[module].make(package, path, **settings).eval()  # type: ignore[no-any-return]
        if not colon or not path or not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
            raise ConfigurationError(f"{name!r} does not name a model", because=f"a model is named as {FORM}", remedy=REMEDY)
        value = _attribute(_imported(module), path, named)
        model = value if isinstance(value, nn.Module) and not settings else _made(value, named, settings)
    return model.eval()


def _settings(name: str, query: str) -> dict[str, Any]:
    """Return the keywords of a name; one that is not a Python literal is a string."""
    settings: dict[str, Any] = {}
    for entry in filter(None, query.split("&")):
        key, equals, value = entry.partition("=")
        if not equals or not key.isidentifier():
            because, remedy = f"{entry!r} is not key=value", f"write {FORM}?key=value&key=value, in quotes for the shell"
            raise ConfigurationError(f"{name!r} does not name a model", because=because, remedy=remedy)
        settings[key] = value
        with suppress(ValueError, SyntaxError):
            settings[key] = ast.literal_eval(value)
    return settings


def _imported(module: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    packages = [hub.package for hub in HUBS.values()]
    remedy = f"pip install {module}" if module in packages else f"write a module that Python imports from {here} or from its own packages"
    with _of_user(f"{module} cannot be imported", remedy):
        return importlib.import_module(module)


def _attribute(value: Any, path: str, name: str) -> Any:
    for part in path.split("."):
        if not hasattr(value, part):
            names = [each for each in vars(value) if not each.startswith("_")] if hasattr(value, "__dict__") else []
            near = difflib.get_close_matches(part, names, n=1)
            because = f"{getattr(value, '__name__', type(value).__name__)} has no {part}"
            remedy = f"did you mean {near[0]!r}?" if near else f"its names are {', '.join(names) or 'none'}"
            raise ConfigurationError(f"{name} does not exist", because=because, remedy=remedy)
        value = getattr(value, part)
    return value


def _made(factory: Any, name: str, settings: Mapping[str, Any]) -> nn.Module:
    if not callable(factory):
        raise ConfigurationError(f"{name} is not a factory", because=f"it is a {type(factory).__name__}", remedy=REMEDY)
    if required := [each for each in _required(factory) if each not in settings]:
        remedy = f"write {name}?{required[0]}=VALUE, or name a function that passes them"
        raise ConfigurationError(f"{name} cannot be called without arguments", because=f"it requires {', '.join(required)}", remedy=remedy)
    with _of_user(f"{name} does not make a model", "call it in Python, and mend what it raises"):
        model = factory(**settings)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{name} does not make a model", because=f"it returns a {type(model).__name__}", remedy=REMEDY)
    return model


def _required(factory: Any) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of a built-in, which is called as it is
        return []
    return [each.name for each in parameters if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


@contextmanager
def _of_user(what: str, remedy: str) -> Iterator[None]:
    """Within, an error of the user's code becomes a ConfigurationError with the line that raised it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        because = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigurationError(what, because=because.splitlines()[0], remedy=remedy, at=_line(error)) from error


def _line(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that an error passed: none of this package, of Python or of installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    foreign = (str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "<frozen")
    passed = reversed(traceback.extract_tb(error.__traceback__))
    last = next((each for each in passed if not each.filename.startswith(foreign) and "site-packages" not in each.filename), None)
    return None if last is None else f"{last.filename}:{last.lineno} in {last.name}:  {last.line}"


FILE = "a model that fxq.save wrote (.fxq), or a file that fxq.export_onnx wrote (.onnx)"
DATA = ".npz, .npy, .safetensors or .pt, or a folder of .npy; arrays by the names of the inputs with the batch as dimension 0"


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], purpose: str, more: str) -> argparse.ArgumentParser:
    """Return the parser of a new command, which calls `run`; `more` is below its purpose in its own help."""
    described = f"{purpose[0].upper()}{purpose[1:]}.\n{more}"
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(name, help=purpose, description=described, formatter_class=form)
    parser.set_defaults(run=run)
    return parser


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add --data and --images, which may be left out, and --batch-size."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=path, metavar="FILE", help=f"inputs: {DATA} (default: random ones)")
    add_images(source, "photographs for a model that takes a camera's images, which are made NV12: files and folders")
    add_rows(parser)


def add_images(source: Any, purpose: str = "photographs as samples: files, and folders of photographs") -> None:
    """Add --images: photographs, and folders of photographs."""
    source.add_argument("--images", nargs="+", type=path, metavar="PATH", help=purpose)


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add --batch-size: how many samples of the data run at a time."""
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="rows run at a time (default: 32)")


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the options of an ONNX file: --style, --opset and --runtime."""
    parser.add_argument("--style", choices=("auto", "exact", "fast", "qdq"), default="auto", help="form of the ONNX file (default: auto)")
    parser.add_argument("--opset", type=positive, metavar="N", help="opset of the ONNX file (default: the style's usual one)")
    add_runtime(parser, "what runs the ONNX file: --style auto is the fastest with equal bits there")


def add_runtime(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add --runtime, the program that runs an ONNX file."""
    names = ("onnxruntime", "openvino", "tvm", "iree", "litert")
    parser.add_argument("--runtime", choices=names, help=f"{purpose} (default: onnxruntime in several ways, and ONNX's evaluator)")


def path(text: str) -> Path:
    """Return the path in an option; shells leave the ~ in --data=~/images.npy as it is."""
    return Path(text).expanduser()


def positive(text: str) -> int:
    """Return the positive integer in an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def shape(text: str) -> tuple[int, ...]:
    """Return the sizes in an option, like 1,3,224,224."""
    return tuple(positive(size) for size in text.split(","))


_SIZE = r"(?P<dim>[1-9]\d*)=(?P<name>[a-z_A-Z]\w*)(?::(?P<smallest>\d+):(?P<largest>\d+))?"
SIZES = "INPUT:DIMENSION=NAME:SMALLEST:LARGEST,…"


def add_dynamic(parser: argparse.ArgumentParser) -> None:
    """Add --dynamic, the sizes that vary."""
    sizes = f"sizes of an input that vary, once for each input: {SIZES}, as image:2=height:32:512,3=width:32:512; alone, all that can"
    parser.add_argument("--dynamic", action="append", nargs="?", const=True, metavar="INPUT:SIZES", help=sizes)


def dynamic_shapes(declared: list[Any] | None, model: nn.Module, example: tuple[Any, ...] | Mapping[str, Any]) -> Any:
    """Return what the options --dynamic say, as `fxq.Options.dynamic_shapes` takes it. Raises ConfigurationError for another form."""
    if declared is None or True in declared:
        return declared and True
    names = list(example) if isinstance(example, Mapping) else list(inspect.signature(model.forward).parameters)[: len(example)]
    shapes: dict[str, dict[int, Any]] = {name: {0: "batch"} for name in names}
    for text in declared:
        name, _, sizes = text.partition(":")
        if name not in shapes:
            _refuse_dynamic(text, f"{name!r} is not an input; the inputs are {', '.join(names)}")
        for size in sizes.split(","):
            match = re.fullmatch(_SIZE, size, re.ASCII)
            if match is None:
                _refuse_dynamic(text, f"{size!r} is not DIMENSION=NAME or DIMENSION=NAME:SMALLEST:LARGEST; dimension 0 is the batch")
            bounds = [int(bound) for bound in match.group("smallest", "largest") if bound]
            if bounds and bounds[0] >= bounds[1]:
                _refuse_dynamic(text, f"{match['name']} goes from {bounds[0]} to {bounds[1]}")
            shapes[name][int(match["dim"])] = Dim(match["name"], **dict(zip(("min", "max"), bounds, strict=False)))
    return shapes


def _refuse_dynamic(text: str, because: str) -> NoReturn:
    remedy = f"write {SIZES}, as --dynamic image:2=height:32:512,3=width:32:512, or --dynamic alone for each size that can vary"
    raise ConfigurationError(f"--dynamic {text} names no sizes", because=because, remedy=remedy)
