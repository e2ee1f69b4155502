"""Values as JSON: numbers, strings, None and lists are themselves, anything else is an object with one key, its kind."""

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import fx

from fxquant.errors import ExportError, Located, Unless
from fxquant.ir.graph import Annotation, BatchDim, Part, TensorFact
from fxquant.ir.integer import Constant, Operation, QParams, Reference
from fxquant.numerics.rounding import Rounding
from fxquant.ops import Fixed, Own, Same
from fxquant.quantization.spec import ActivationConfig, QConfig, WeightConfig
from fxquant.quantization.weights import BatchNormTensors
from fxquant.serialization.names import ARGUMENTS, OBSERVERS, ROUNDINGS

DEPTH = 32  # how deeply lists, tuples and dicts may be nested
INTEGER_LIMIT = 2**63  # integers are smaller in magnitude

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_CONSTANTS: Mapping[str, Any] = {
    "ellipsis": ...,
    **{str(each): each for each in (torch.strided, torch.contiguous_format, torch.preserve_format)},
    **{str(each): each for each in (torch.channels_last, torch.channels_last_3d)},
}

_NUMBER = (float, int, NoneType)
RECORDS: Mapping[type, Mapping[str, tuple[type, ...]]] = {  # every field of a record, with the types its value may have
    WeightConfig: {
        "dtype": (str,), "per_channel": (bool,), "training": (str,), "power_of_two": (bool,), "rounding": (type,), "p": (float, NoneType),
    },
    ActivationConfig: {
        "dtype": (str, NoneType), "observer": (type, functools.partial), "scale": _NUMBER, "threshold": _NUMBER, "training": (str,),
        "power_of_two": (bool,), "zero_point": (int, NoneType),
    },
    QConfig: {"output": (ActivationConfig,), "weight": (WeightConfig,), "input": (ActivationConfig, NoneType), "dynamic": (bool,)},
    Annotation: {"dtype": (str, NoneType), "because": (str,), "config": (QConfig, NoneType), "group": (int, NoneType), "on_host": (bool,)},
    QParams: {"scale": (float, tuple), "dtype": (str,), "axis": (int, NoneType), "zero_point": (int, tuple)}, Reference: {"node": (str,)},
    Part: {"composite": (str,), "role": (str,), "inner": (bool,)}, Same: {"operands": (tuple,)},
    Own: {**dict.fromkeys(("dtype", "shared_where", "otherwise"), (str, NoneType)), "headroom": (float,), "limit": (float, NoneType)},
    Fixed: {"scale": (float,), "dtype": (str,), "zero_point": (int, NoneType), "otherwise": (Fixed, Own, NoneType)},
    Constant: {
        "node": (str,), "scale": (float, tuple), "axis": (int, NoneType), "zero_point": (int, tuple), "times": (int, NoneType),
    },
    Operation: {"name": (str,), "arguments": (dict,), "constants": (dict,), "intermediate": (QParams, NoneType)},
}  # fmt: skip
# Fields that are written only where they are otherwise.
_USUAL: Mapping[type, Mapping[str, Any]] = {
    QConfig: {"dynamic": False}, Own: {"limit": None}, Annotation: {"on_host": False}, Constant: {"times": None},
}  # fmt: skip
_RECORDS_BY_NAME = {kind.__name__: kind for kind in RECORDS}


class Malformed(Unless, ValueError):
    """Raised for a file that is not a valid model file."""


def cannot_save(what: str, because: str, remedy: str, node: Located | None = None) -> NoReturn:
    """Raise the error for something that has no place in a file."""
    raise ExportError(f"{what} cannot be saved", node=node, because=because, remedy=remedy)


def expect(value: Any, *kinds: type) -> Any:
    """Return the value, if it is exactly of one of these types. Raises Malformed otherwise."""
    if type(value) not in kinds:
        raise Malformed(f"a {type(value).__name__} is in the place of a {' or '.join(kind.__name__ for kind in kinds)} belongs")
    return value


def encode(value: Any) -> Any:
    """Return the value as JSON. Raises ExportError if it has no form there."""
    if value is None or isinstance(value, bool) or type(value) is str or (type(value) is int and abs(value) < INTEGER_LIMIT):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else "tuple"
        if hasattr(value, "_fields") and type(value) is not BatchNormTensors:
            cannot_save(f"a named tuple {name}", "its class is not one of fxquant's own", "return a plain tuple or a dict instead")
        return {name: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    return _encode_numbers(value) if type(value) is torch.Tensor else _encode_other(value)


def _encode_other(value: Any) -> Any:
    kind = type(value)
    if kind is slice:
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    if kind is torch.dtype and str(value).removeprefix("torch.") in DTYPES:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if kind is BatchDim:
        largest = [] if value.largest is None else [value.largest]
        return {"batch": [*value.coefficient.as_integer_ratio(), *value.offset.as_integer_ratio(), *largest]}
    if kind is TensorFact:
        return {"tensor": [encode(value.dtype)["dtype"], [encode(size) for size in value.shape]]}
    if kind in RECORDS:
        usual = _USUAL.get(kind, {})
        names = [name for name in RECORDS[kind] if name not in usual or getattr(value, name) != usual[name]]
        return {kind.__name__: {name: encode(getattr(value, name)) for name in names}}
    for name, constant in _CONSTANTS.items():
        if value is constant:
            return {"constant": name}
    if isinstance(value, type) and issubclass(value, Rounding):
        return {"rounding": _known_name(value, ROUNDINGS, "rounding", "save state_dict() and prepare the model again")}
    if isinstance(value, type | functools.partial) or callable(value):
        return _encode_observer(value)
    cannot_save(f"a {kind.__name__}", f"a file holds no value like {str(value)[:80]}", "use numbers, strings, tuples, lists and dicts")


def _encode_numbers(value: torch.Tensor) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or value.is_complex() or value.layout is not torch.strided or value.is_meta:
        cannot_save("a tensor in node.meta", f"it is {dtype}, {value.layout} and on {value.device}", "keep plain tensors of numbers")
    return {"numbers": [dtype, list(value.shape), [encode(number) for number in value.detach().flatten().tolist()]]}


def _encode_observer(value: Any) -> Any:
    kind, arguments = (value.func, value.keywords) if isinstance(value, functools.partial) and not value.args else (value, {})
    if type(value) in ARGUMENTS:  # an instance, whose settings count
        kind, arguments = type(value), {name: getattr(value, name) for name in ARGUMENTS[type(value)]}
    remedy = "use one of these, a functools.partial of one, or a class of yours that is declared with names="
    name = _known_name(kind, OBSERVERS, "observer", remedy)
    return {"observer": [name, {key: encode(item) for key, item in arguments.items()}]}


def _known_name(kind: Any, table: Mapping[str, Any], what: str, remedy: str) -> str:
    """Return the name of a class in a table. Raises ExportError if the table has no such class."""
    name = str(getattr(kind, "__name__", kind))
    if not isinstance(kind, type) or table.get(name) is not kind:
        cannot_save(f"the {what} {name}", f"a file names its {what}s, and can name {', '.join(table)}; it holds no code", remedy)
    return name


def decode(value: Any, nodes: Mapping[str, fx.Node] | None = None, depth: int = 0) -> Any:
    """Decode a value of `encode`; `nodes` are the nodes that it may refer to, by name. Raises Malformed for other values."""
    Malformed.unless(depth <= DEPTH, f"values are nested more than {DEPTH} deep")
    if isinstance(value, list):
        return [decode(item, nodes, depth + 1) for item in value]
    if isinstance(value, dict):
        return _decode_tagged(value, nodes or {}, depth + 1)
    Malformed.unless(type(value) is not int or abs(value) < INTEGER_LIMIT, "a number is too large")
    return expect(value, NoneType, bool, int, float, str)


def _decode_tagged(value: dict[str, Any], nodes: Mapping[str, fx.Node], depth: int) -> Any:
    Malformed.unless(len(value) == 1, f"an object has {len(value)} keys where it has one, its kind")
    ((kind, content),) = value.items()
    if kind in _RECORDS_BY_NAME:
        record = _RECORDS_BY_NAME[kind]
        fields, usual = RECORDS[record], _USUAL.get(record, {})
        if list(expect(content, dict)) != [name for name in fields if name in content or name not in usual]:
            raise Malformed(f"a {kind} has the fields {', '.join(fields)}")
        return record(**{name: expect(decode(item, None, depth), *fields[name]) for name, item in content.items()})
    if kind in _GROUPS:
        return _GROUPS[kind]([decode(item, nodes, depth) for item in expect(content, list)])
    if kind == "node":
        return look_up(nodes, content, "node that precedes its use")
    Malformed.unless(kind in _SIMPLE, f"no kind of value is named {kind[:80]!r}")
    return _SIMPLE[kind](content)


def _decode_batch(content: Any) -> BatchDim:
    items = expect(content, list)
    above, below, offset_above, offset_below, *largest = (expect(number, int) for number in _exactly(items, 5 if len(items) == 5 else 4))
    return BatchDim(Fraction(above, below), Fraction(offset_above, offset_below), *largest)


def _decode_tensor(content: Any) -> TensorFact:
    dtype, shape = _exactly(expect(content, list), 2)
    return TensorFact(tuple(expect(decode(size), int, BatchDim) for size in expect(shape, list)), look_up(DTYPES, dtype, "dtype"))


def _decode_observer(content: Any) -> Any:
    name, arguments = _exactly(expect(content, list), 2)
    kind = look_up(OBSERVERS, name, "observer")
    chosen = {key: expect(item, int, float, bool) for key, item in expect(arguments, dict).items()}
    Malformed.unless(set(chosen) <= set(ARGUMENTS[kind]), f"{name} does not take {', '.join(chosen)}")
    return functools.partial(kind, **chosen) if chosen else kind


def _decode_numbers(content: Any) -> torch.Tensor:
    dtype, shape, numbers = _exactly(expect(content, list), 3)
    values = [expect(decode(number), bool, int, float) for number in expect(numbers, list)]
    sizes = [expect(size, int) for size in expect(shape, list)]
    return torch.tensor(values, dtype=look_up(DTYPES, dtype, "dtype"), device="cpu").reshape(sizes)


_GROUPS: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "slice": lambda items: slice(*_exactly(items, 3)),
    "dict": lambda items: {key: item for key, item in (_exactly(expect(pair, list), 2) for pair in items)},
    BatchNormTensors.__name__: lambda items: BatchNormTensors(*items),
}
_NOT_FINITE = {name: float(name) for name in ("nan", "inf", "-inf")}
_SIMPLE: Mapping[str, Callable[[Any], Any]] = {
    "float": lambda content: look_up(_NOT_FINITE, content, "number"),
    "dtype": lambda content: look_up(DTYPES, content, "dtype"),
    "constant": lambda content: look_up(_CONSTANTS, content, "constant"),
    "device": lambda content: torch.device(expect(content, str)),
    "complex": lambda content: complex(*(expect(decode(part), float) for part in _exactly(expect(content, list), 2))),
    "batch": _decode_batch,
    "tensor": _decode_tensor,
    "numbers": _decode_numbers,
    "observer": _decode_observer,
    "rounding": lambda content: look_up(ROUNDINGS, content, "rounding"),
}


def look_up(table: Mapping[str, Any], name: Any, what: str) -> Any:
    """Return the entry of a table. Raises Malformed if there is none."""
    Malformed.unless(expect(name, str) in table, f"no {what} is named {name[:80]!r}")
    return table[name]


def _exactly(items: list[Any], count: int) -> list[Any]:
    Malformed.unless(len(items) == count, f"a list has {len(items)} items where it has {count}")
    return items
