"""A QConfigMapping as editable text: JSON with a line for each rule, without settings that have their default.

{"format": "fxquant qconfig", "version": 1,
 "default": {},
 "types": {
  "functional:relu": {"output": {"dtype": "int16"}}},
 "names": {
  "stem": {"weight": {"dtype": "int4"}},
  "head": null}}

A rule of null keeps in float. A type is the name of a class of torch.nn, or of a function ("functional:relu", "torch:add"), or of a
tensor's method ("method:relu"). {"dynamic": true} quantizes linear and recurrent layers at run time. "calls" has rules for one call of a
type in a module's forward, each a list of four: ["block", "Conv2d", 1, {…}].
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import nn

from fxquant.errors import ExportError, FxQuantError
from fxquant.numerics.rounding import Rounding
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.ranges import settings
from fxquant.quantization.spec import ActivationConfig, Call, Chosen, QConfig, QConfigMapping, WeightConfig, as_mapping
from fxquant.serialization.names import ARGUMENTS, OBSERVERS, ROUNDINGS, function_name, function_named
from fxquant.serialization.values import Malformed
from fxquant.support.arguments import PATH, checked, instance
from fxquant.support.files import write_file

FORMAT, VERSION = "fxquant qconfig", 1
PARTS: Mapping[str, type] = {"output": ActivationConfig, "weight": WeightConfig, "input": ActivationConfig}
_SECTIONS = ("types", "patterns", "names")
_METHOD = "method:"


@checked(mapping=instance("a QConfig or a QConfigMapping", QConfig, QConfigMapping))
def save_qconfig(mapping: QConfig | QConfigMapping, path: str | os.PathLike[str]) -> Path:
    """Write a mapping to a JSON file that a person can edit; returns its path. A QConfig is written as a mapping's default.

    Equal mappings give equal bytes. Raises ExportError for an observer, a rounding or a type that is a user's own, which a file cannot
    name, and where the file cannot be written; the previous file is then unchanged.
    """
    return write_file(path, written(as_mapping(mapping)))


@checked(path=PATH)
def load_qconfig(path: str | os.PathLike[str]) -> QConfigMapping:
    """Return the mapping in a file that `save_qconfig` wrote, or a person. Nothing a file names is imported.

    Raises ExportError, which says where, for a file that is missing or is none, and for a name that is unknown.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"reading it raises {type(error).__name__}: {error}") from None
    return read(text, path)


def written(rules: QConfigMapping) -> str:
    """Return the text of a file."""
    lines = [
        f'{{"format": {json.dumps(FORMAT)}, "version": {VERSION},',
        f' "default": {json.dumps(_written(rules.default, "the default"))}',
    ]
    for section in _SECTIONS:
        entries = {_type_name(key) if section == "types" else key: chosen for key, chosen in getattr(rules, section).items()}
        if section != "patterns":
            entries = dict(sorted(entries.items()))
        if entries:
            written = [f"  {json.dumps(name)}: {json.dumps(_written(chosen, name))}" for name, chosen in entries.items()]
            lines[-1] += ","
            lines.append(f" {json.dumps(section)}: {{")
            lines.append(",\n".join(written) + "}")
    if rules.calls:
        calls = {(call.module, _type_name(call.kind), call.index): _written(chosen, str(call)) for call, chosen in rules.calls.items()}
        lines[-1] += ","
        lines.append(' "calls": [\n' + ",\n".join(f"  {json.dumps([*call, calls[call]])}" for call in sorted(calls)) + "]")
    return "\n".join(lines) + "}\n"


def read(text: str, path: Any) -> QConfigMapping:
    """Return the mapping of a text; `path` is named in errors."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"it cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _unreadable(path, f'it does not say "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise _unreadable(path, f"it has version {document.get('version')!r}, and this fxquant reads version {VERSION}")
    unknown = [name for name in document if name not in ("format", "version", "default", *_SECTIONS, "calls")]
    if unknown:
        raise _unreadable(path, f"it has {unknown[0]!r}; its parts are default, {', '.join(_SECTIONS)}, calls")
    try:
        rules = {section: _section(document.get(section, {}), section) for section in _SECTIONS}
        calls = _calls(document.get("calls", []))
        return QConfigMapping(default=_read(document.get("default", {}), "the default"), **rules, calls=calls)
    except (ValueError, FxQuantError) as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Any, because: str) -> ExportError:
    return ExportError(f"{path} is not a qconfig", because=because, remedy="mend the file, or write one with fxq.save_qconfig")


def _written(chosen: Chosen, rule: str) -> Any:
    """Return a QConfig as a dict of the settings that differ from the default."""
    if chosen is None:
        return None
    parts = {name: _part(getattr(chosen, name), rule) for name in PARTS if getattr(chosen, name) is not None}
    return {name: part for name, part in parts.items() if part or name == "input"} | ({"dynamic": True} if chosen.dynamic else {})


def _part(config: Any, rule: str) -> dict[str, Any]:
    default, parts = type(config)(), {}
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(default, field.name):
            parts[field.name] = _value(value, config, rule)
    # A function that makes the usual observer asks for nothing else.
    if "observer" in parts and settings(config.new_observer()) == settings(default.new_observer()):
        del parts["observer"]
    return parts


def _value(value: Any, config: Any, rule: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    chosen: Any = value if isinstance(value, Observer) else value()
    kind: Any = type(chosen)
    if not isinstance(chosen, Observer | Rounding) or kind.__name__ not in {**OBSERVERS, **ROUNDINGS} or kind not in ARGUMENTS:
        raise _unnamed(getattr(kind, "__qualname__", str(value)), rule)
    usual = kind()
    arguments = {name: getattr(chosen, name) for name in ARGUMENTS[kind] if getattr(chosen, name) != getattr(usual, name)}
    return [kind.__name__, arguments] if arguments else kind.__name__


def _unnamed(name: str, rule: str) -> ExportError:
    because = f"{rule} asks for it, and a file names only what fxquant and PyTorch have"
    remedy = "use one of fxquant's, or keep the mapping as Python code"
    return ExportError(f"{name} cannot be written to a file", because=because, remedy=remedy)


def _type_name(kind: Any) -> str:
    if isinstance(kind, str):
        return _METHOD + kind
    called = str(getattr(kind, "__name__", ""))
    if isinstance(kind, type) and getattr(nn, called, None) is kind:
        return called
    name = function_name(kind) if callable(kind) else None
    if name is None:
        raise _unnamed(getattr(kind, "__qualname__", str(kind)), "a rule for this type")
    return name


def _section(document: Any, section: str) -> dict[Any, Chosen]:
    Malformed.unless(isinstance(document, dict), f"its {section} are not an object of rules")
    if section == "patterns":
        for pattern in document:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return {_type(name) if section == "types" else name: _read(chosen, name) for name, chosen in document.items()}


def _calls(document: Any) -> dict[Call, Chosen]:
    if not isinstance(document, list) or not all(isinstance(entry, list) and len(entry) == 4 for entry in document):
        raise ValueError("its calls are not a list of lists of four: a module's path, a type, how many run before it, and a QConfig")
    calls = {}
    for module, kind, index, chosen in document:
        if not isinstance(module, str) or not isinstance(kind, str) or not isinstance(index, int) or isinstance(index, bool):
            raise ValueError(f"{[module, kind, index]!r} is not a call: a module's path, a type, and an integer")
        call = Call(module, _type(kind), index)
        calls[call] = _read(chosen, str(call))
    return calls


def _type(name: str) -> Any:
    if name.startswith(_METHOD):
        return name.removeprefix(_METHOD)
    kind = getattr(nn, name, None) if name.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        return kind
    function: Callable[..., Any] | None = function_named(name)
    Malformed.unless(function is not None, f"{name!r} is not a class of torch.nn, a function that fxquant knows, or 'method:…'")
    return function


def _read(document: Any, rule: str) -> Chosen:
    if document is None:
        return None
    Malformed.unless(isinstance(document, dict), f"{rule}: its value is neither an object nor null")
    parts: dict[str, Any] = {}
    for name, part in document.items():
        if name == "dynamic" and isinstance(part, bool):
            parts[name] = part
            continue
        if name not in PARTS:
            raise ValueError(f"{rule}: {name!r} is unknown; a QConfig has {', '.join(PARTS)} and dynamic, which is true or false")
        parts[name] = None if part is None else _read_part(PARTS[name], part, f"{rule}, {name}")
    return QConfig(**parts)


def _read_part(kind: type, document: Any, where: str) -> Any:
    names = [field.name for field in fields(kind) if field.default is not MISSING or field.default_factory is not MISSING]
    Malformed.unless(isinstance(document, dict), f"{where}: it is not an object")
    values = {}
    for name, value in document.items():
        Malformed.unless(name in names, f"{where}: {name!r} is unknown; it has {', '.join(names)}")
        if name in ("observer", "rounding"):
            value = _made(value, name, where)
        values[name] = value
    try:
        return kind(**values)
    except FxQuantError as error:
        raise ValueError(f"{where}: {error.what}; {error.because}") from None


def _made(value: Any, name: str, where: str) -> Any:
    """Return a class by its name, or an observer with settings: ["PercentileObserver", {"percentile": 99.9}]."""
    table: Mapping[str, Any] = OBSERVERS if name == "observer" else ROUNDINGS
    called, arguments = value if isinstance(value, list) and len(value) == 2 else (value, None)
    if not isinstance(called, str) or called not in table or not (arguments is None or isinstance(arguments, dict)):
        raise ValueError(f"{where}: {value!r} is not a known {name}: the names are {', '.join(table)}")
    return table[called] if arguments is None else table[called](**arguments)
