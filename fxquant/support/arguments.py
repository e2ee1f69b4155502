"""Check the arguments of the public functions: one table by name, for a name means the same everywhere.

`checked` looks the parameters of a function up in this table. Its keywords are for names with another meaning in that function.
A parameter whose default is a dataclass takes one of that class.
Models, examples and batches are checked where they are used.
"""

import difflib
import functools
import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from fxquant.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """The values that an argument may have."""

    right: str  # a description of the allowed values, for errors
    take: Callable[[Any], Any]  # converts a value for the function; raises TypeError or ValueError for a value that is not allowed

    def or_none(self, meaning: str) -> "Kind":
        """Return this kind with None allowed too; `meaning` says what None stands for."""
        return Kind(f"{self.right}, or None: {meaning}", lambda value: None if value is None else self.take(value))


def checked(**special: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks a function's arguments by the table, and converts harmless other forms.

    The function raises ConfigurationError, which names the argument and what is right, before it is entered. It raises it also for
    an unknown or a missing argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        kinds = {name: kind for name in signature.parameters if (kind := special.get(name, KINDS.get(name))) is not None}
        records = {name: type(each.default) for name, each in signature.parameters.items() if is_dataclass(each.default)}
        kinds |= {name: instance(f"{_public(record)}(…)", record) for name, record in records.items()}
        called = function.__qualname__.removesuffix(".__init__")
        # What a call that gives nothing to check gives by position: `self`, or nothing, as long as nothing else is required.
        required = [name for name, parameter in signature.parameters.items() if parameter.default is inspect.Parameter.empty]
        bare = len(required) if required in ([], ["self"]) else None

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) == bare and not kwargs:
                return function(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _wrong_call(called, signature, kwargs, error) from None
            for name in bound.arguments:
                if name in kinds:
                    bound.arguments[name] = accepted(called, name, bound.arguments[name], kinds[name])
            return function(*bound.args, **bound.kwargs)

        call.__dict__["checked"] = kinds
        return cast(Callable[P, R], call)

    return decorate


def checked_class(**special: Kind) -> Callable[[type[T]], type[T]]:
    """Return a decorator that applies `checked` to the constructor of a class."""

    def decorate(kind: type[T]) -> type[T]:
        changed = cast(Any, kind)
        changed.__init__ = checked(**special)(changed.__init__)
        return kind

    return decorate


def accepted(called: str, name: str, value: Any, kind: Kind) -> Any:
    """Return the value as the kind converts it. Raises ConfigurationError, which names the argument, if the kind refuses it."""
    try:
        return kind.take(value)
    except (TypeError, ValueError, OSError) as error:
        because = f"{called} takes {kind.right}" + (f"; {error}" if str(error) else "")
        remedy = f"pass it instead of this {type(value).__name__}"
        raise ConfigurationError(f"{name}={shown(value)} is not usable", because=because, remedy=remedy) from error.__cause__


def _public(record: type) -> str:
    """Return the name by which users have a record of options; its PUBLIC where that is not at the top of the package."""
    return str(getattr(record, "PUBLIC", f"fxq.{record.__name__}"))


OF_OTHERS = {"backend": "target", "march": "target", "quantizer": "qconfig", "qconfig_dict": "qconfig"}  # arguments of other toolkits


def _wrong_call(called: str, signature: inspect.Signature, arguments: Mapping[str, Any], error: TypeError) -> ConfigurationError:
    names = [name for name in signature.parameters if name != "self"]
    unknown = [name for name in arguments if name not in names]
    inside = {
        field.name: f"{name}={_public(type(each.default))}({field.name}=…)"
        for name, each in signature.parameters.items()
        if is_dataclass(each.default)
        for field in fields(each.default)
    }
    asked = unknown and OF_OTHERS.get(unknown[0])
    near = [asked] if asked in names else difflib.get_close_matches(unknown[0], [*names, *inside], n=1) if unknown else []
    because = f"its arguments are {', '.join(names) or 'none'}"
    remedy = f"did you mean {inside.get(near[0], repr(near[0]))}?" if near else "pass these"
    return ConfigurationError(f"{called} cannot be called like this: {error}", because=because, remedy=remedy)


def shown(value: Any) -> str:
    """Return the text of a value in an error: its repr where that is short, its type otherwise."""
    plain = isinstance(value, str | int | float | complex | bytes | list | tuple | dict | set | Path | None)
    written = repr(value) if plain else getattr(value, "__qualname__", "")
    return written if 0 < len(written) <= 60 else f"<{type(value).__name__}>"


def instance(right: str, *kinds: type) -> Kind:
    """Return the kind of instances of these classes; they are not converted."""

    def take(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return Kind(right, take)


def such(right: str, take: Callable[[Any], Any], holds: Callable[[Any], bool]) -> Kind:
    """Return a kind of values that `take` converts to a value for which `holds` is true."""

    def narrowed(value: Any) -> Any:
        accepted = take(value)
        if not holds(accepted):
            raise ValueError
        return accepted

    return Kind(right, narrowed)


def by_names(right: str, holds: Callable[[Any], bool]) -> Kind:
    """Return the kind of dicts from strings to values for which `holds` is true."""
    return such(right, instance("", Mapping).take, lambda value: all(isinstance(name, str) and holds(value[name]) for name in value))


def choice(*names: str) -> Kind:
    """Return the kind of these names."""
    return such(f"one of {', '.join(map(repr, names))}", instance("", str).take, lambda value: value in names)


TEXT = such("a text that is not empty", instance("", str).take, bool)


def _whole(value: Any) -> int:
    """Return an integer; an integer of numpy is taken, a bool is not."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    """Return a finite float; a number of numpy or a tensor with one element is taken, a bool is not."""
    if isinstance(value, bool | str | bytes) or not (isinstance(value, numbers.Real) or hasattr(value, "item")):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _flag(value: Any) -> bool:
    """Return a bool; one of numpy is taken."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise TypeError
    return bool(value)


def _path(value: Any) -> str:
    """Return a path as a string, with the home folder of a user in place of a leading ~ or ~user."""
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError
    if "\0" in path:
        raise ValueError("a path has no NUL character")
    os.fsencode(path)  # a UnicodeEncodeError is a ValueError
    return os.path.expanduser(path)


def _file(value: Any) -> str:
    """Return a path where a file can be: not a folder, but inside one."""
    path = _path(value)
    if os.path.isdir(path) or not os.path.basename(path):
        raise ValueError("it is the path of a folder")
    _folder(os.path.dirname(os.path.abspath(path)))
    return path


def _folder(value: Any) -> str:
    """Return a path where a folder is or can be made."""
    path = _path(value)
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ValueError(f"{there} is a file")
    return path


def words(value: Any) -> list[str]:
    """Return a list of strings; a single string is refused."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    names = list(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _names(value: Any) -> list[str]:
    if isinstance(value, set | frozenset):
        raise TypeError  # they have no order
    return [TEXT.take(name) for name in words(value)]


def _one_or_more(value: Any) -> list[str]:
    return [TEXT.take(value)] if isinstance(value, str) else _names(value)


def _cuts(value: Any) -> list[str | list[str]]:
    if isinstance(value, str | bytes | set | frozenset) or not isinstance(value, Iterable):
        raise TypeError
    return [TEXT.take(names) if isinstance(names, str) else _names(names) for names in value]


def _leaf(value: Any) -> Any:
    if isinstance(value, str | type) or not callable(value):
        leaves = [value] if isinstance(value, str | type) else list(value)
        if not leaves or not all(isinstance(one, type) or (isinstance(one, str) and one) for one in leaves):
            raise TypeError
    return value


def _passes(value: Any) -> dict[str, list[Any]]:
    by_name = {TEXT.take(name): [own] if callable(own) else list(own) for name, own in instance("", Mapping).take(value).items()}
    if not all(callable(one) for own in by_name.values() for one in own):
        raise TypeError
    return by_name


def _pattern(value: Any) -> str:
    try:
        re.compile(TEXT.take(value))
    except re.error:
        raise ValueError from None
    return str(value)


def of_environment(name: str, default: str, kind: Kind) -> Any:
    """Return the value of an environment variable as the kind converts it; an empty one is the default."""
    return accepted("the environment", name, os.environ.get(name) or default, kind)


_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)

SWITCH = such("1, true, yes or on, or 0, false, no or off", lambda value: _SWITCH.get(value.lower()), lambda value: value is not None)
FLAG = Kind("True or False", _flag)
COUNT = such("an integer of 0 or more", _whole, lambda value: value >= 0)
POSITIVE = such("a positive integer", _whole, lambda value: value > 0)
FINITE = Kind("a finite number", _number)
NUMBER = such("a positive, finite number", _number, lambda value: value > 0)
PATH = Kind("the path of a file: a str or a pathlib.Path that is not empty", _path)
FILE = Kind("the path of a file, a str or a pathlib.Path, in a folder that is there or can be made", _file)
FOLDER = Kind("the path of a folder, a str or a pathlib.Path, that is there or can be made", _folder)
NAMES = Kind("a list of names: strings that are not empty", _names)
CALLABLE = such("a function, or anything that can be called", lambda value: value, callable)

KINDS: dict[str, Kind] = {
    **dict.fromkeys((
        "adapt", "check", "distributed", "equalize", "functions", "machine", "only_missing", "per_channel", "power_of_two", "real", "steps",
        "training_branch",
    ), FLAG),
    "FXQUANT_DEBUG": such("0, 1, 2 or 3", int, lambda value: 0 <= value <= 3),
    "batch_fn": CALLABLE.or_none("batches are taken as they are"),
    "batch_size": POSITIVE,
    "bins": such("an even number of at least 2", _whole, lambda value: value >= 2 and value % 2 == 0),
    "cut": Kind("a list of names of tensors, or of lists of such names", _cuts),
    "debug": such("0, 1, 2 or 3", _whole, lambda value: 0 <= value <= 3).or_none("the value of FXQUANT_DEBUG"),
    "deviations": NUMBER,
    "dump": FOLDER.or_none("the value of FXQUANT_DUMP"),
    "external_data": FLAG.or_none("only where one file cannot hold the model"),
    "averaging_constant": such("a number above 0 and at most 1", _number, lambda value: 0 < value <= 1),
    "highest": FINITE,
    "input_names": NAMES.or_none("the names of forward's arguments"),
    "kernels": choice("auto", "reference"),
    "kinds": Kind("'quantized', 'accumulators', 'float', 'outputs' or the name of a tensor, or a list of these", _one_or_more),
    "leaf": Kind("a class of modules, the path of one, several of these, or a function of a module and its path", _leaf).or_none(
        "PyTorch's own modules are not traced into"
    ),
    "lowest": FINITE,
    "modules": Kind("the name of a module or node, or a list of such names", _one_or_more).or_none("all of them"),
    "name": Kind("a module's path or a node's name: a string that is not empty", TEXT.take),
    "num_batches": COUNT.or_none("all there are"),
    "out_dir": FOLDER.or_none("nothing is written"),
    "opset": Kind("an integer", _whole).or_none("the style's usual one"),
    "output_names": NAMES.or_none("made from the names of the graph"),
    "p": such("a number from 1 to 16", _number, lambda value: 1 <= value <= 16),
    "passes": Kind("a dict from names of passes to functions of a graph and its context, or lists of such functions", _passes).or_none(
        "the compiler's own run"
    ),
    "path": FILE,
    "pattern": Kind("a regular expression that re.compile takes: a string that is not empty", _pattern),
    "percentile": such("a number above 0 and at most 100", _number, lambda value: 0 < value <= 100),
    "preserve": NAMES,
    "round_weights": FLAG.or_none("those of less than 8 bits are"),
    "correct_bias": FLAG.or_none("biases are, by 16 samples or more"),
    "choose_ranges": FLAG.or_none("ranges are, by 16 samples or more"),
    "integer_tail": FLAG.or_none("on a chip they are"),
    "runtime": choice(
        "onnxruntime", "onnxruntime, 2 threads", "onnxruntime, no optimisation", "reference", "openvino", "tvm", "iree", "litert"
    ).or_none("onnxruntime"),
    "sample": POSITIVE,
    "scale": NUMBER.or_none("it is observed"),
    "seed": COUNT,
    "show_progress": FLAG.or_none("in a terminal"),
    "threshold": NUMBER.or_none("it is observed"),
}  # fmt: skip
