"""The inputs of a model: its call signature, the placeholders with their names and batch dimensions, and the check of later calls."""

from __future__ import annotations

import builtins
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigurationError, FxQuantError, TraceError
from fxquant.frontend.entry import BatchLimits, noted_limits
from fxquant.frontend.fake import Evaluator
from fxquant.frontend.handler import new_graph
from fxquant.ir import graph
from fxquant.ir.graph import BatchDim, TensorFact, unusual_kind
from fxquant.ir.integer import noted, notes

# ---- how a model is called: like the float model it was made from ----------------------------------------------------
#
# A graph takes the tensors among the arguments, one after the other. A `forward(x, pair, mask=None)` that was traced with a
# tuple of two tensors and no mask takes x, pair_0 and pair_1; called with x and a pair, positional or by name, with `mask=None`
# or without, the model takes them apart. An argument that is not a tensor is fixed in the graph, so it must be what it was.
_SIGNATURE = "fxquant.signature"  # in `meta`: {"parameters": [[name, kind, may be left out, form], …]}, as plain values

# A form says what an argument was in the trace:
#   ["tensor", name]   a tensor, which became the input of that name
#   ["value", v]       a number, a string or None
#   ["items", [form]]  a tuple or a list
#   ["keys", [[key, form]]]  a dict
#   ["leaves", [form]] another container that PyTorch can flatten
#   ["object", kind]   anything else
Form = list[Any]

_ATOMS = (type(None), bool, int, float, str)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Iterator[str | None]) -> list[list[Any]]:
    """Return the parameters of `model.forward` with the values of one call.

    `names` yields the name of the input for each leaf of the arguments that is a tensor, and None for any other leaf.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    forms = {name: _form(value, names) for name, value in bound.arguments.items()}
    entries = []
    for parameter in inspect.signature(model.forward).parameters.values():
        absent: dict[Any, Form] = {parameter.VAR_POSITIONAL: ["items", []], parameter.VAR_KEYWORD: ["keys", []]}
        default = absent.get(parameter.kind, ["nothing"]) if parameter.default is parameter.empty else _form(parameter.default, iter(()))
        form = forms.get(parameter.name, default)
        entries.append([parameter.name, int(parameter.kind), form == default or form[0] == "object", form])
    return entries


def _form(value: Any, names: Iterator[str | None]) -> Form:
    """Return the form of an argument; takes as many names as it has leaves."""
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return ["items", [_form(item, names) for item in value]]
    if isinstance(value, dict) and type(value) in pytree.SUPPORTED_NODES and all(type(key) in _ATOMS for key in value):
        return ["keys", [[key, _form(item, names)] for key, item in value.items()]]
    leaves = pytree.tree_leaves(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return ["leaves", [_form(leaf, names) for leaf in leaves]]
    name = next(names, None)
    if name is not None:
        return ["tensor", name]
    return ["value", value] if type(value) in _ATOMS else ["object", type(value).__name__]


@dataclass(frozen=True)
class CallSignature:
    """A forward pre-hook that converts the arguments of forward to the inputs of the graph.

    The graph's own form is accepted as well: inputs by name, or, if an argument holds several, one after the other.
    Raises ConfigurationError if the arguments do not fit forward, or if an argument that is not a tensor has changed.
    """

    parameters: tuple[list[Any], ...]  # the parameters of forward, from `signature_of`
    names: tuple[str, ...]  # the inputs of the graph
    placed: tuple[str, ...]  # the inputs that are one argument each, and can be passed by position

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        names = self.names
        if not kwargs and self.placed == names and len(args) == len(names) == len(self.parameters):
            return None
        if kwargs and not args and kwargs.keys() == set(names):
            return tuple(kwargs[name] for name in names), {}
        inputs: dict[str, Any] = {}
        try:
            _bind(list(self.parameters), args, kwargs, inputs)
        except ConfigurationError:
            plain = not kwargs and len(args) == len(names) and all(isinstance(arg, torch.Tensor) for arg in args)
            if plain and not set(self.placed) >= set(names):
                return None
            raise
        return tuple(inputs[name] for name in names), {}


def call_signature(module: fx.GraphModule) -> CallSignature | None:
    """Return the hook that lets a graph be called like the float model; None where no signature was noted."""
    if _SIGNATURE not in module.meta:
        return None
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    parameters = module.meta[_SIGNATURE]["parameters"]
    placed = [form[1] for _, kind, _, form in parameters if form[0] == "tensor" and kind != inspect.Parameter.KEYWORD_ONLY]
    return CallSignature(tuple(parameters), tuple(names), tuple(placed))


def _bind(signature: list[list[Any]], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[str, Any]) -> None:
    parameters = [
        inspect.Parameter(name, inspect._ParameterKind(kind), **({"default": None} if optional and kind not in _VARIADIC else {}))
        for name, kind, optional, _ in signature
    ]
    # A parameter that may be left out can stand before one that may not, which Python does not know.
    declared = inspect.Signature(parameters, __validate_parameters__=False)
    try:
        values = declared.bind(*args, **kwargs).arguments
    except TypeError as error:
        written = ", ".join(name for name, *_ in signature)
        because = f"{error}; it was traced as forward({written})"
        remedy = "call it like the float model; arguments that had their default value may be left out"
        raise ConfigurationError("the arguments do not fit the model's forward", because=because, remedy=remedy) from None
    for name, kind, optional, form in signature:
        if name in values:
            _take(name, form, values[name], inputs)
        elif not optional and kind in _VARIADIC:
            _take(name, form, () if kind == inspect.Parameter.VAR_POSITIONAL else {}, inputs)


def _take(path: str, form: Form, value: Any, inputs: dict[str, Any]) -> None:
    """Write the inputs inside the argument `value` into `inputs`, by name; raise if it has another structure than `form`."""
    kind = form[0]
    if kind == "tensor":
        if isinstance(value, (tuple, list, Mapping, type(None))):
            _refuse_call(path, f"it is {_said(value)}", "it was a tensor in the trace")
        inputs[form[1]] = value
    elif kind == "value":
        if type(value) not in _ATOMS or isinstance(value, bool) != isinstance(form[1], bool) or value != form[1]:
            because = f"it was {form[1]!r} in the trace, and values other than tensors are fixed in a graph"
            _refuse_call(path, f"it is {_said(value)}", because)
    elif kind == "object":
        _refuse_call(path, f"it is {_said(value)}", f"it was a {form[1]} in the trace; its content is fixed in the graph, so leave it out")
    elif kind == "keys":
        if not isinstance(value, Mapping) or value.keys() != {key for key, _ in form[1]}:
            _refuse_call(path, f"it is {_said(value)}", f"it was {_said(dict(form[1]))} in the trace")
        for key, inner in form[1]:
            _take(f"{path}[{key!r}]", inner, value[key], inputs)
    else:
        items = pytree.tree_leaves(value) if kind == "leaves" else list(value) if isinstance(value, (tuple, list)) else None
        if items is None or len(items) != len(form[1]):
            _refuse_call(path, f"it is {_said(value)}", f"it held {len(form[1])} items in the trace, and a graph takes as many")
        for index, (inner, item) in enumerate(zip(form[1], items, strict=True)):
            _take(f"{path}[{index}]", inner, item, inputs)


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} items"
    return repr(value) if type(value) in _ATOMS else f"a {type(value).__name__}"


def _refuse_call(path: str, what: str, because: str) -> NoReturn:
    raise ConfigurationError(
        f"argument {path} does not fit the graph: {what}",
        because=because,
        remedy="pass what the example inputs had there, or trace the model again with an example of the new one",
    )


def set_signature(module: fx.GraphModule, signature: list[list[Any]]) -> None:
    """Write a signature into the `meta` of a traced module, which prepared and integer models copy."""
    module.meta[_SIGNATURE] = {"parameters": signature}


def is_signature(meta: dict[str, Any], inputs: list[str]) -> bool:
    """Return whether `meta` of a loaded model holds no call signature, or a valid one whose tensors are the inputs."""
    if _SIGNATURE not in meta:
        return True
    try:
        parameters = meta[_SIGNATURE]["parameters"]
        tensors = [name for _, _, _, form in parameters for name in _names(form)]
        sound = all(name.isidentifier() and kind in range(5) and type(optional) is bool for name, kind, optional, _ in parameters)
        return sound and sorted(tensors) == sorted(inputs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False


def _names(form: Form) -> Iterator[str]:
    kind, *content = form
    if kind == "tensor":
        yield content[0]
    elif kind in ("items", "leaves", "keys"):
        for item in content[0]:
            yield from _names(item[1] if kind == "keys" else item)
    elif kind not in ("value", "object", "nothing"):
        raise ValueError(kind)


# ---- Which sizes of the example inputs vary: what `dynamic_shapes` says, in the forms that `torch.export` takes -------
#
# One size can be the batch, which is dimension 0 where it is declared there. What depends on it grows with it. Any other size is only
# known at the example's size and at the largest size, and must lie between what its Dim declares.
_HINT = type(Dim.AUTO)
_FORMS = "a tuple by argument, or a dict by name: options=fxq.Options(dynamic_shapes=({0: 'batch', 2: torch.export.Dim('height')},))"
BATCH = "batch"
# The largest size, where none is declared: sums along it are proved to fit up to there.
TIMES_THE_EXAMPLE, LEAST_LARGEST = 4, 512


@dataclass(frozen=True)
class VaryingSize:
    """A size that varies, with the bounds and the step of its values."""

    name: str
    example: int
    smallest: int = 1
    largest: int = 0
    step: int = 1  # sizes are multiples of it
    asked: bool = True  # whether the user asked for it by name, so that it is refused, and not fixed, where it cannot vary
    dims: tuple[tuple[int, int], ...] = ()  # leaf and dimension of each occurrence
    why: str = ""  # the reason, with its line, where it is fixed

    @property
    def sentence(self) -> str:
        return f"{self.name} of the inputs is fixed to {self.example}: {self.why}"

    def goes_in_steps(self, step: int) -> bool:
        """Return whether there are other sizes than the example's that are multiples of a step, as it is."""
        stepped = self.stepped(step)
        return self.example % step == 0 and stepped.largest > max(self.example // 2, stepped.smallest)

    def stepped(self, step: int) -> VaryingSize:
        """Return the size in steps."""
        return replace(self, step=step, smallest=-(-self.smallest // step) * step, largest=self.largest // step * step)

    @property
    def reference(self) -> int:
        """The size at the first two points: the example's, or another one where the example has the largest."""
        return self.example if self.example < self.largest else self._far_from(self.example)

    @property
    def another(self) -> int:
        """A size for a third trace, far from the first one: sizes that are not equal there must differ in a part of a 32nd, too."""
        return self._far_from(self.reference)

    def _far_from(self, size: int) -> int:
        """Return an odd number of steps: about twice a size, or half a size where it is large or the bounds are close."""
        steps, least, most = size // self.step, -(-max(self.smallest, 2) // self.step), self.largest // self.step
        fewer, more = max(steps // 2, least) | 1, min(2 * steps + 1, most - (most % 2 == 0))
        lower = fewer < steps and (size >= HALVED or 2 * more < 3 * steps)
        return self.step * (fewer if lower else more if more > steps else most)


HALVED = 128  # a size from here on is halved for another trace, which then takes less time


@dataclass(frozen=True)
class Sizes:
    """The sizes of the flattened arguments that vary."""

    batch: tuple[int | None, ...]  # of each leaf, the dimension that is the batch; None if it has none
    others: tuple[VaryingSize, ...] = ()
    fixed: tuple[VaryingSize, ...] = ()  # those that could not vary

    def at(self, leaf: int, shape: Sequence[int], batch: int | None, others: Mapping[str, int]) -> list[int]:
        """Return the shape of the argument number `leaf` with the size `batch` of the batch, and `others`, by name, of other sizes."""
        sizes = list(shape)
        axis = self.batch[leaf]
        if batch is not None and axis is not None:
            sizes[axis] = batch
        for other in self.others:
            for at, dim in other.dims:
                if at == leaf and other.name in others:
                    sizes[dim] = others[other.name]
        return sizes


def sizes_that_vary(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Sizes:
    """Return which sizes of the flattened arguments vary.

    With `dynamic_shapes=None` it is the batch alone: dimension 0 of every tensor whose size there is that of the first tensor. With True
    it is each that can vary besides. Otherwise it is each dimension that `dynamic_shapes` marks by a Dim, a name, Dim.AUTO or Dim.DYNAMIC;
    other dimensions are fixed.

    Raises ConfigurationError for `dynamic_shapes` of another form.
    """
    leaves = pytree.tree_leaves((list(args), dict(kwargs)))
    if dynamic_shapes is None or dynamic_shapes is True:
        first = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
        marks = [_every_size(leaf, first) for leaf in leaves]
        return _sizes(leaves, marks if dynamic_shapes else [[mark for mark in each if mark[1] is BATCH] for each in marks])
    if dynamic_shapes is False or (isinstance(dynamic_shapes, dict) and not dynamic_shapes):
        return Sizes((None,) * len(leaves))
    if isinstance(dynamic_shapes, torch.export.ShapesCollection | torch.export.AdditionalInputs):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, dict(kwargs))  # type: ignore[no-untyped-call]
    named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    if isinstance(dynamic_shapes, tuple | list) and len(dynamic_shapes) == len(named):
        dynamic_shapes = dict(zip(named, dynamic_shapes, strict=True))
    if not isinstance(dynamic_shapes, Mapping):
        entries = f" of {len(dynamic_shapes)} entries" if isinstance(dynamic_shapes, tuple | list) else ""
        _refuse(f"it is a {type(dynamic_shapes).__name__}{entries}, and forward is called with {', '.join(named)}")
    unknown = [str(name) for name in dynamic_shapes if name not in named]
    if unknown:
        _refuse(f"it has an entry for {', '.join(unknown)}, and forward is called with {', '.join(named)}")
    return _sizes(leaves, [marks for name, value in named.items() for marks in _marks(name, value, dynamic_shapes.get(name))])


def _every_size(leaf: Any, batch: int | None) -> list[tuple[int, Any]]:
    """Return the entries of `dynamic_shapes` that let each size of an argument vary that can; of one that is the batch, its name."""
    sizes = leaf.shape if isinstance(leaf, Tensor) else ()
    return [(dim, BATCH if dim == 0 and size == batch else Dim.AUTO) for dim, size in enumerate(sizes) if size or dim == 0]


def sizes_that_differ(examples: Sequence[Any]) -> Any:
    """Return `dynamic_shapes` for the first of several example inputs, from the dimensions besides 0 that differ; None if none does."""
    every = [[leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)] for example in examples]
    if len({tuple(tensor.dim() for tensor in tensors) for tensors in every}) > 1 or any(each.is_nested for each in itertools.chain(*every)):
        return None  # the error of the batch says so
    shapes, differ = torch.export.ShapesCollection(), False  # type: ignore[no-untyped-call]
    for at, tensor in enumerate(every[0]):
        batch = {0: BATCH} if tensor.dim() and all(tensors[at].shape[:1] == tensors[0].shape[:1] for tensors in every) else {}
        sizes = enumerate(zip(*(tensors[at].shape for tensors in every), strict=True))
        rest = {dim: Dim.AUTO(max=max(*seen, _largest(seen[0]))) for dim, seen in sizes if dim and len(set(seen)) > 1}
        shapes[tensor], differ = {**batch, **rest}, differ or bool(rest)
    return shapes if differ else None


def _largest(size: int) -> int:
    """Return the largest size where none is declared."""
    return max(TIMES_THE_EXAMPLE * size, LEAST_LARGEST)


def _sizes(leaves: list[Any], marks: list[list[tuple[int, Any]]]) -> Sizes:
    """Return the sizes that the entries mark, which are listed for each leaf, with their dimensions: one size for each name.

    Unnamed entries of one dimension and one size in the example are one size, too.
    """
    grouped: dict[Any, list[tuple[int, int, Any]]] = {}
    for leaf, entries in enumerate(marks):
        for dim, entry in entries:
            name = entry if isinstance(entry, str) else entry.__name__ if type(entry) is Dim else None
            grouped.setdefault(name or (dim, leaves[leaf].shape[dim]), []).append((leaf, dim, entry))
    batch: tuple[int | None, ...] = (None,) * len(leaves)
    others, batch_key = list[VaryingSize](), _key_of_batch(grouped)
    for key, places in grouped.items():
        seen = {int(leaves[leaf].shape[dim]): dim for leaf, dim, _ in places}
        if len(seen) > 1:
            listed = ", ".join(f"{size} in dimension {dim}" for size, dim in seen.items())
            _refuse(f"the dimensions that it marks as {key!r} differ in size in the example: {listed}")
        if key == batch_key:
            dims = {leaf: dim for leaf, dim, _ in places}
            batch = tuple(map(dims.get, range(len(leaves))))
            continue
        size = next(iter(seen))
        declared = [entry for _, _, entry in places if isinstance(entry, Dim | _HINT)]
        smallest = max([1, *(entry.min or 0 for entry in declared)])
        largest = min([entry.max for entry in declared if isinstance(entry.max, int)], default=_largest(size))
        if not smallest <= size <= largest:
            _refuse(f"the example has size {size} where {key!r} goes from {smallest} to {largest}")
        unnamed = f"size_{key[0]}" if isinstance(key, tuple) else ""
        taken = any(other.name == unnamed for other in others)
        name = re.sub(r"\W", "_", key) if isinstance(key, str) else f"{unnamed}_{size}" if taken else unnamed
        asked = isinstance(key, str) or any(isinstance(entry, _HINT) and entry.type.name == "DYNAMIC" for entry in declared)
        others.append(VaryingSize(name, size, smallest, largest, asked=asked, dims=tuple((leaf, dim) for leaf, dim, _ in places)))
    return Sizes(batch, tuple(others))


def _key_of_batch(grouped: Mapping[Any, list[tuple[int, int, Any]]]) -> Any:
    """Return the size that is the batch: by its name, as dimension 0, or as the only one that varies, at dimension 1; None if none is."""
    if BATCH in grouped:
        return BATCH
    first = next((key for key, places in grouped.items() if any(dim == 0 for _, dim, _ in places)), None)
    if first is not None or len(grouped) != 1:
        return first
    ((key, places),) = grouped.items()
    alone = all(dim == 1 for _, dim, _ in places) and (not isinstance(key, str) or key.lower().startswith("b"))
    return key if alone else None


def _marks(path: str, value: Any, declared: Any) -> list[list[tuple[int, Any]]]:
    """Return the dimensions of each leaf of an argument that vary, each with its entry of `dynamic_shapes`."""
    if isinstance(value, Tensor):
        return [_of_tensor(path, value, declared)]
    if declared is None or (isinstance(declared, Mapping | tuple | list) and not declared):
        return [[] for _ in pytree.tree_leaves(value)]
    children, _ = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if len(children) == 1 and children[0] is value:
        _refuse(f"it has an entry for {path}, which is a {type(value).__name__} and has no dimensions")
    keys: list[Any] = list(value) if isinstance(value, Mapping) else list(range(len(children)))
    if isinstance(declared, tuple | list) and len(declared) == len(keys):
        declared = dict(zip(keys, declared, strict=True))
    if not isinstance(declared, Mapping) or not set(declared) <= set(keys):
        _refuse(f"its entry for {path} does not have the structure of that argument, a {type(value).__name__} of {len(keys)}")
    return [mark for key, child in zip(keys, children, strict=True) for mark in _marks(f"{path}[{key!r}]", child, declared.get(key))]


def _of_tensor(path: str, tensor: Tensor, declared: Any) -> list[tuple[int, Any]]:
    if isinstance(declared, tuple | list) and len(declared) == tensor.dim():
        declared = dict(enumerate(declared))
    if declared is not None and not isinstance(declared, Mapping):
        _refuse(f"its entry for {path}, a tensor of {tensor.dim()} dimensions, is {declared!r}")
    for dim in declared or {}:
        if type(dim) is not int or not 0 <= dim < tensor.dim():
            _refuse(f"{path} has no dimension {dim!r}, but {tensor.dim()} dimensions, counted from 0")
    return [(dim, entry) for dim, entry in (declared or {}).items() if _varies(path, dim, int(tensor.shape[dim]), entry)]


def _varies(path: str, dim: int, size: int, entry: Any) -> bool:
    """Return whether an entry of `dynamic_shapes` marks its dimension as varying."""
    if entry is None or (isinstance(entry, _HINT) and entry.type.name == "STATIC") or (type(entry) is int and entry == size):
        return False
    if isinstance(entry, str) or type(entry) is Dim or isinstance(entry, _HINT):
        return True
    if isinstance(entry, Dim):
        what = f"dimension {dim} of {path} is {entry.__name__}, computed from another"
        remedy = "declare it as a Dim of its own; what the model computes keeps the two alike"
        raise ConfigurationError(what, because="each size that varies is declared by itself", remedy=remedy)
    _refuse(f"dimension {dim} of {path}, whose size is {size}, is said to be {entry!r}")


def _refuse(because: str) -> NoReturn:
    raise ConfigurationError(
        "dynamic_shapes does not fit the example inputs",
        because=because,
        remedy=f"pass None where dimension 0 is the batch, {{}} to fix every size, or {_FORMS}",
    )


@dataclass(frozen=True, eq=False)
class ExampleInputs:
    """The arguments of one forward call."""

    leaves: tuple[Any, ...]  # the arguments, flattened
    names: tuple[str | None, ...]  # the placeholder's name for every leaf that is a tensor, else None
    spec: Any  # the pytree spec that rebuilds (args, kwargs) from leaves
    sizes: Sizes  # which sizes of the leaves vary
    signature: list[list[Any]]  # the call signature of forward
    renamed: dict[str, str]  # the user's names of inputs whose names generated code cannot use, by placeholder name
    evaluator: Evaluator = field(default_factory=Evaluator)  # of all traces: what one has evaluated, the next ones need not
    until: int | None = None  # the number of operations after which a trace ends, without an output

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with other tensors, by placeholder name."""
        leaves = [leaf if name is None else tensors[name] for name, leaf in zip(self.names, self.leaves, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(args), kwargs

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the example tensors by placeholder name, in order."""
        return {name: leaf for name, leaf in zip(self.names, self.leaves, strict=True) if name is not None}

    @property
    def batch(self) -> int | None:
        """The batch size of the example; None if it is not to vary."""
        return next((int(leaf.shape[axis]) for leaf, axis in zip(self.leaves, self.sizes.batch, strict=True) if axis is not None), None)

    def varying(self, *others: VaryingSize) -> ExampleInputs:
        """Return a copy in which the sizes `others` vary besides the batch, and no more."""
        return replace(self, sizes=replace(self.sizes, others=others))

    def with_fixed(self, sizes: Sequence[VaryingSize], error: FxQuantError) -> ExampleInputs:
        """Return the example inputs with `sizes` fixed; the error's reason and line are the reason of each size."""
        why = error.because + f" ({error.at})" * bool(error.at)
        others = tuple(other for other in self.sizes.others if other not in sizes)
        fixed = (*self.sizes.fixed, *(replace(size, why=why) for size in sizes))
        return replace(self, sizes=replace(self.sizes, others=others, fixed=fixed))

    def fixed(self) -> ExampleInputs:
        """Return these inputs with every size fixed."""
        return replace(self, sizes=Sizes((None,) * len(self.leaves)))

    def shapes(self, batch: int | None, others: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the shape of every tensor, by its name, with the size `batch` of the batch and `others`, by name, of other sizes."""
        leaves = enumerate(zip(self.names, self.leaves, strict=True))
        return {name: self.sizes.at(index, leaf.shape, batch, others) for index, (name, leaf) in leaves if name is not None}

    def resized(self, batch: int | None, others: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return the example tensors repeated or truncated to other sizes."""
        tensors = self.tensors()
        for name, shape in self.shapes(batch, others).items():
            for dim, size in enumerate(shape):
                if size != tensors[name].shape[dim]:
                    places = torch.arange(size, device=tensors[name].device) % max(tensors[name].shape[dim], 1)
                    tensors[name] = tensors[name].index_select(dim, places)
        return tensors


def bind_inputs(model: nn.Module, example_inputs: Any, dynamic_shapes: Any, compared: bool = True) -> ExampleInputs:
    """Name the tensors of the example inputs after the parameters of the model's forward; `compared`: see `require_values`."""
    args, kwargs = _as_call(example_inputs)
    order = list(inspect.signature(model.forward).parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        because = str(error)
        remedy = "pass a tuple of positional arguments, or a dict of keyword arguments"
        raise TraceError("the example inputs do not fit the model's forward", because=because, remedy=remedy) from error
    by_path = {**dict(zip(_positional_names(model, len(args)), args, strict=True)), **kwargs}
    leaves, spec = pytree.tree_flatten((list(args), kwargs))
    names = [name for path, value in by_path.items() for name in _leaf_names(path, value)]
    if not any(name is not None for name in names):
        because = "tensors among the inputs become the inputs of the graph"
        remedy = "pass at least one tensor, for example (torch.randn(1, 3, 224, 224),)"
        raise ConfigurationError("the example inputs hold no tensor", because=because, remedy=remedy)
    require_values(model, zip(names, leaves, strict=True), compared)
    written: list[str | None] = []
    for name in names:
        while name is not None and name in written:
            name += "_"
        written.append(name)
    graph = new_graph()
    legal = {name: graph.placeholder(name).name for name in written if name is not None}  # no keywords, no names of generated code
    names = [name if name is None or (hasattr(builtins, name) and name not in _BUILT_IN) else legal[name] for name in written]
    sizes = sizes_that_vary(model, args, kwargs, dynamic_shapes)
    tensors = [(leaf, axis) for leaf, axis in zip(leaves, sizes.batch, strict=True) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    batches = [leaf.shape[axis] for leaf, axis in tensors if axis is not None] or [leaf.shape[0] for leaf, _ in tensors[:1]]
    if 0 in batches:
        because = "the graph is compared with the model on them, and nothing would be compared"
        remedy = "pass at least one row, for example (torch.randn(1, 3, 224, 224),)"
        raise ConfigurationError("the example inputs hold an empty batch", because=because, remedy=remedy)
    signature = signature_of(model, args, kwargs, iter(names))
    renamed = {new: old for new, old in zip(names, written, strict=True) if new is not None and old is not None and new != old}
    return ExampleInputs(leaves=tuple(leaves), names=tuple(names), spec=spec, sizes=sizes, signature=signature, renamed=renamed)


def _as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Mapping) and all(isinstance(name, str) for name in example_inputs):
        return (), dict(example_inputs)
    because = "forward is called with them"
    remedy = "pass a tuple of positional arguments, or a dict of keyword arguments"
    raise ConfigurationError(f"example inputs of type {type(example_inputs).__name__} cannot be used", because=because, remedy=remedy)


def _positional_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def _leaf_names(path: str, value: Any) -> list[str | None]:
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return [path if isinstance(value, torch.Tensor) else None]
    return [f"{path}_{index}" if isinstance(leaf, torch.Tensor) else None for index, leaf in enumerate(leaves)]


# The built-in names that generated code may use. An input may have the name of any other: `input` is a common one.
_BUILT_IN = {"Ellipsis"} | {
    each.__name__
    for each in (
        *(abs, bool, complex, dict, float, frozenset, getattr, int, len, list, max, min, pow),
        *(range, round, set, slice, str, sum, tuple),
    )
}


# ---- requirements on the tensors: they are dense and have values -----------------------------------------------------
def require_values(model: nn.Module, inputs: Iterable[tuple[str | None, Any]], compared: bool = True) -> None:
    """Raise ConfigurationError for example inputs that are sparse or nested, and for inputs or parameters without values.

    `inputs` are the leaves of the example inputs, each with its name if it is a tensor. Where graph and model are not `compared` on
    them, their shapes are enough.
    """
    for name, value in inputs:
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_nested or value.layout is not torch.strided:
            kind = "a nested" if value.is_nested else f"a {str(value.layout).removeprefix('torch.')}"
            because = "the inputs of a graph are dense: every element is stored"
            remedy = "pad it with torch.nested.to_padded_tensor" if value.is_nested else "convert it with .to_dense()"
            raise ConfigurationError(f"the example input {name} is {kind} tensor", because=because, remedy=remedy)
        if value.is_meta and compared:
            because = "it is on the device meta, and the graph is compared with the model on the example inputs"
            remedy = "pass a tensor with values, of the device the model is on"
            raise ConfigurationError(f"the example input {name} has no values", because=because, remedy=remedy)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(parameter, UninitializedTensorMixin):
            because = "it belongs to a lazy module, which learns its sizes from the first inputs"
            remedy = "call the model on the example inputs once"
            raise ConfigurationError(f"the model's {name} has no shape yet", because=because, remedy=remedy)
        if parameter.is_meta:
            because = "it is on the device meta, and values become integers"
            remedy = 'give the model memory with model.to_empty(device="cpu"), and load its parameters'
            raise ConfigurationError(f"the model's {name} has no values", because=because, remedy=remedy)
        made_of = type(parameter)
        if made_of.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:  # torchao's quantize_ makes such, and DTensor is one
            kind = f"{made_of.__module__}.{made_of.__qualname__}"
            because = f"a {kind} replaces PyTorch's operators, and may hold other numbers than it shows"
            plain = "full_tensor" if hasattr(parameter, "full_tensor") else "dequantize"
            parts = "for m in model.modules() for n, p in list(m.named_parameters(recurse=False))"
            line = f"[setattr(m, n, torch.nn.Parameter(p.{plain}())) {parts}]"
            remedy = f"pass the float model, before quantize_ or the like; or make its parameters plain: {line}"
            raise ConfigurationError(f"the model's {name} is not a plain tensor", because=because, remedy=remedy)


# ---- The check of a graph's inputs: what the graph was made for is computed, anything else is refused ----------------
#
# The shapes and dtypes of a graph, its constants, and the proof that its accumulators fit hold for the inputs it was traced with and for
# every batch size. So every form of a model (traced, prepared, integer, loaded, copied) checks its inputs before it computes. It checks
# shapes, dtypes and the like, never values, so that a check takes a few microseconds.
@dataclass(frozen=True)
class Input:
    """The requirements on one input."""

    name: str
    dtype: torch.dtype | None
    sizes: tuple[int | None, ...]  # the size of each dimension; None for one that varies
    others: dict[int, tuple[str, int, int, int]]  # of a dimension that varies and is not the batch: name, smallest, largest, step
    fixed: dict[int, str]  # of a dimension that cannot vary: the reason
    form: str | None  # shape and dtype as text; None if they are unknown
    optional: bool  # whether it may be absent


@dataclass(frozen=True)
class InputCheck:
    """A forward pre-hook that raises ConfigurationError unless the flat inputs have the traced shapes and dtypes, for any batch size."""

    inputs: tuple[Input, ...]
    made: str  # the model's last step, for error messages: "traced" or "prepared"
    batches: BatchLimits  # the range of batch sizes for which the graph's shapes hold

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_number(args, kwargs)
        first: dict[str, tuple[str, int]] = {}  # of each size that varies, the input that has it, and the size
        for index, expected in enumerate(self.inputs):
            if expected.form is None or (index >= len(args) and expected.name not in kwargs):
                continue
            value = args[index] if index < len(args) else kwargs[expected.name]
            self._check_kind(module, expected, value)
            for dim, (size, expected_size) in enumerate(zip(value.shape, expected.sizes, strict=True)):
                if expected_size is not None:
                    if size != expected_size:
                        why = expected.fixed.get(dim)
                        because = f"{self._made_with(expected)}, and dimension {dim} is fixed" + (f": {why}" if why else "")
                        remedy = f"pass an input of size {expected_size} there, or change that line"
                        if not why:
                            remedy = (
                                "pass an input of that form, or let the size vary: prepare(…, dynamic_shapes=…), with a torch.export.Dim "
                                f"for dimension {dim} of {expected.name}"
                            )
                        self._refuse(expected, f"dimension {dim} has size {size}", because, remedy)
                    continue
                name, smallest, largest, step = expected.others.get(dim, (BATCH, 0, size, 1))
                where, own = first.setdefault(name, (expected.name, size))
                if own != size:
                    self._refuse(expected, f"its {name} is {size}", f"input {where} has a {name} of {own}, and all inputs share one")
                if not smallest <= size <= largest or size % step:
                    steps = f", in steps of {step}" if step > 1 else ""
                    because = f"{name} goes from {smallest} to {largest}{steps}: these sizes were traced, and sums are proved to fit"
                    remedy = f"resize it, or prepare the model with torch.export.Dim({name!r}, max=…) in dynamic_shapes"
                    self._refuse(expected, f"dimension {dim} has size {size}", because, remedy)
                beyond = self.batches.beyond(size) if name == BATCH else None
                if size > 0 and beyond is not None:
                    because = f"the model slices its batch at a fixed index, and its shapes are valid {beyond[1]}"
                    self._refuse(expected, f"its batch is {size}", because)

    def _check_number(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [expected.name for expected in self.inputs]
        signature = f"its graph takes {len(names)} input{'' if len(names) == 1 else 's'}, {', '.join(names)}"
        remedy = f"call the model with {', '.join(names)}"
        if len(args) > len(names):
            raise ConfigurationError(f"the model is given {len(args)} inputs", because=signature, remedy=remedy)
        for name in kwargs:
            if name not in names:
                raise ConfigurationError(f"the model has no input {name}", because=signature, remedy=remedy)
            if name in names[: len(args)]:
                because = "it is passed by position and by name"
                raise ConfigurationError(f"input {name} is given twice", because=because, remedy="pass it once")
        for expected in self.inputs[len(args) :]:
            if not expected.optional and expected.name not in kwargs:
                raise ConfigurationError(f"the model is not given its input {expected.name}", because=signature, remedy=remedy)

    def _check_kind(self, module: torch.nn.Module, expected: Input, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            array = type(value).__module__.partition(".")[0] == "numpy"
            kind = f"numpy.{type(value).__name__}" if array else type(value).__name__
            because = f"the model was {self.made} with a tensor, {expected.form}"
            self._refuse(expected, f"it is a {kind}", because, "convert it with torch.from_numpy(array)" if array else None)
        unusual = unusual_kind(value)
        if unusual is not None:
            self._refuse(expected, f"it is a {unusual[0]} tensor", f"{self._made_with(expected)}, a dense tensor with values", unusual[1])
        if value.dim() != len(expected.sizes):
            self._refuse(expected, f"it has {value.dim()} dimensions", self._made_with(expected))
        if value.dtype != expected.dtype:
            self._refuse(expected, f"its type is {value.dtype}", self._made_with(expected), f"convert it with .to({expected.dtype})")
        tensors = itertools.chain(module.buffers(), module.parameters())
        home = next(tensors, value).device
        if value.device != home and all(tensor.device != value.device for tensor in tensors):
            remedy = f"move one to the other: x.to({str(home)!r}), or model.to({str(value.device)!r})"
            self._refuse(expected, f"it is on {value.device}", f"the parameters and constants of the model are on {home}", remedy)

    def _made_with(self, expected: Input) -> str:
        return f"the model was {self.made} with {expected.form}"

    def _refuse(self, expected: Input, what: str, because: str, remedy: str | None = None) -> NoReturn:
        again = "prepare" if self.made == "prepared" else "trace"
        raise ConfigurationError(
            f"input {expected.name} does not fit the graph: {what}",
            because=because,
            remedy=remedy or f"pass an input of that form, or {again} the model again with an example of the new one",
        )


def input_check(module: fx.GraphModule) -> InputCheck:
    """Return the check of the inputs that the placeholders of a graph describe."""
    inputs = module.graph.find_nodes(op="placeholder")
    kind = "prepared" if "target" in module.meta else "traced"
    return InputCheck(tuple(map(_described, inputs)), kind, noted_limits(module.graph))


def _described(node: fx.Node) -> Input:
    fact, optional = graph.fact(node), bool(node.args)
    if not isinstance(fact, TensorFact):
        return Input(str(node.target), None, (), {}, {}, None, optional)
    sizes = tuple(None if isinstance(size, BatchDim) else size for size in fact.shape)
    fixed = {dim: why for dim in range(len(sizes)) if (why := noted(node, f"{FIXED}{dim}"))}
    return Input(str(node.target), fact.dtype, sizes, graph.sizes_of_input(node), fixed, str(fact), optional)


FIXED = "fixed_"  # in the notes of an input, before the number of a dimension: why its size cannot vary


def note_sizes(node: fx.Node, leaf: int, sizes: Sizes) -> None:
    """Note on an input the sizes that vary besides the batch, and the reason of each that cannot."""
    notes(node).update({f"{FIXED}{dim}": other.why for other in sizes.fixed for at, dim in other.dims if at == leaf})
    places = [(dim, other) for other in sizes.others for at, dim in other.dims if at == leaf]
    if places:
        notes(node)[graph.SIZES] = " ".join(
            f"{dim}:{other.name}:{other.smallest}:{other.largest}:{other.step}" + f":{other.example}" * (other.example != other.reference)
            for dim, other in places
        )
