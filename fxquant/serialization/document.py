"""A model, or observations, as a document of plain JSON values and a dictionary of tensors, and back."""

import copy
import json
import keyword
import re
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.accuracy.observations import Observations, Observed, Place
from fxquant.errors import ExportError, FxQuantError
from fxquant.frontend import InputCheck, attach_call_hooks, is_traced
from fxquant.frontend.inputs import CallSignature, is_signature
from fxquant.frontend.result import ReturnInTraining
from fxquant.frontend.tracer import ReturnForm, is_form
from fxquant.ir.carried import Carried
from fxquant.ir.graph import SIZE, SIZES, Annotation, Part, TensorFact, fact, inferred, on_meta, resolve, spelling, stage_of
from fxquant.ir.integer import Constant, Operation, QParams, Reference, operation
from fxquant.ir.model import CALLS, CARRIED, Model, dress_carried, replace_graph
from fxquant.ops import MODULES, Fixed, Own, Same
from fxquant.prepared.hooks import are_calls, restore_hooks
from fxquant.prepared.operators import QuantizedOperator, link, quantized_operators
from fxquant.prepared.stage import Stage, violations
from fxquant.quantization.observers import Observer
from fxquant.quantization.observers.histogram import Gathering, gathering
from fxquant.quantization.spec import QConfig
from fxquant.quantization.weights import LARGEST_EXPONENT
from fxquant.serialization.names import ARGUMENTS, OBSERVERS, PROPERTIES, function_name, function_named, is_method
from fxquant.serialization.tree import TargetOf, TreeReader, TreeWriter
from fxquant.serialization.values import Malformed, cannot_save, decode, encode, expect, look_up
from fxquant.support import logger

FORMAT, VERSION = "fxquant model", 3
PRESERVED = "preserved"  # in the file's meta: what the user asked to keep of the float model, by dotted names
_SECTIONS = ["format", "version", "name", "meta", "root", "modules", "tensors", "nodes"]

# What is kept of a node's meta, with the types it may have; `fact` is a nest of facts and numbers.
_META: Mapping[str, tuple[type, ...] | None] = {
    "fact": None, "source": (str,), "module": (str,), "made_by": (str,), "annotation": (Annotation,), "refusal": (str,),
    "qconfig": (tuple,), "spelling": (tuple,), "fused": (tuple,), "unfused": (str,), "batch_norm": (str,), "notes": (dict,),
    "qparams": (QParams,), "origin": (str,), "parameter": (bool,), "operation": (Operation,), "argument": (str,), "part": (Part,),
    "demand": (Own, Same, Fixed, NoneType), "ties": (tuple,), "python": (bool,),
}  # fmt: skip
_MODEL_META: Mapping[str, tuple[type, ...]] = {
    "stage": (str,), "target": (str,), "not_done": (list,), "chosen": (list,), "qconfigs": (list,), "lost_gradients": (list,),
    "warned_of_dropped_batches": (bool,), "told_of_training": (bool,),
}  # fmt: skip
_PATH = re.compile(r"[^.\n]+(\.[^.\n]+)*")  # a line break in it could stand for a line of the generated code


def write_model(model: Any, target_of: TargetOf) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors of a model. Raises ExportError, with the name of the part, if a file cannot hold some part."""
    if not isinstance(model, fx.GraphModule) or not (is_traced(model) or stage_of(model) is not None):
        cannot_save(f"a {type(model).__name__}", "it is not a model of fxquant", "save what trace, prepare or convert returned")
    if any(isinstance(hook, ReturnInTraining) for hook in model._forward_hooks.values()):
        cannot_save(
            "a model with a training branch",
            "it is Python, and a file holds no code",
            "keep prepared.state_dict(), for a model that fxq.prepare makes of the same float model with Options(training_branch=True);"
            " or save what fxq.convert returns, which has no branch",
        )
    others = [hook for hook in model._forward_pre_hooks.values() if not (isinstance(hook, InputCheck | CallSignature))]
    others += [hook for hook in model._forward_hooks.values() if not isinstance(hook, ReturnForm)]
    if others or model._backward_hooks or model._backward_pre_hooks:
        cannot_save("the model", "it has hooks, and a file holds no code", "remove the hooks first")
    target = model.meta.get("target")
    if target is not None and target_of(target.name) != target:
        cannot_save(f"the target {target.name!r}", "it is not known by name, and a file holds no code", "prepare the model for one that is")
    tree = TreeWriter(None if target is None else target.arithmetic, _noise(model))
    root = tree.contents(model, "")
    meta = {name: encode(_kept_of_model(name, value)) for name, value in model.meta.items() if name != CARRIED}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": _identifier(type(model).__name__),
        "meta": meta | _preserved(model),
        "root": root,
        "modules": tree.modules,
        "tensors": tree.roles,
        "nodes": [_located(node, model) for node in model.graph.nodes],
    }
    return document, tree.tensors


def _kept_of_model(name: str, value: Any) -> Any:
    """Return a target's name, and the stage INTEGER in place of FUSED: kernels depend on the machine that loads the file."""
    if name == "target":
        return value.name
    return Stage.INTEGER.name if name == "stage" and value == Stage.FUSED.name else value


def _preserved(model: fx.GraphModule) -> dict[str, Any]:
    """Return the preserved attributes of the float model, encoded; a warning lists the ones that a file cannot hold."""
    encoded, unsaved = {}, []
    for name, value in model.meta[CARRIED].preserved.items() if CARRIED in model.meta else ():
        try:
            encoded[name] = encode(value)
        except ExportError:
            unsaved.append(name)
    if unsaved:
        logger.warning("not in the file, which holds no code: %s; set these on the loaded model", ", ".join(unsaved))
    return {PRESERVED: {"dict": [[name, value] for name, value in encoded.items()]}} if encoded else {}


def _located(node: fx.Node, model: fx.GraphModule) -> dict[str, Any]:
    try:
        # What the user called is kept by name alone.
        called = tuple(kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)) for kind in spelling(node))
        return {
            "op": node.op,
            "name": _identifier(node.name),
            "target": _target(node, model),
            "args": [encode(argument) for argument in node.args],
            "kwargs": {_identifier(name): encode(argument) for name, argument in node.kwargs.items()},
            "meta": {name: encode(called if name == "spelling" else node.meta[name]) for name in _META if name in node.meta},
        }
    except FxQuantError as error:
        if error.node is not None:
            raise
        raise type(error)(error.what, node=node, because=error.because, remedy=error.remedy) from error


def _identifier(name: str) -> str:
    # Names become part of generated code.
    if not name.isidentifier() or keyword.iskeyword(name):
        cannot_save(f"the name {name[:80]!r}", "it is not a Python identifier", "rename it")
    return name


def _target(node: fx.Node, model: fx.GraphModule) -> str:
    target = node.target
    if callable(target):
        name = function_name(target)
        if name is None:
            written = getattr(target, "__name__", str(target))
            cannot_save(f"a call of {written}", "it is not one of the functions a file can name", "use PyTorch's functions", node)
        if name == "python:getattr" and (len(node.args) != 2 or node.args[1] not in PROPERTIES or node.kwargs):
            cannot_save("a call of getattr", f"it reads none of {', '.join(sorted(PROPERTIES))}", "use tensor methods", node)
        return name
    if node.op == "call_method" and not is_method(target):
        cannot_save(f"a call of .{target}()", "it is not one of the methods a file can name", "use PyTorch's functions", node)
    if node.op in ("call_module", "get_attr"):
        _check_registered(model, node, target)
    return target if node.op in ("call_method", "call_module", "get_attr") else _identifier(target)


def _check_registered(model: fx.GraphModule, node: fx.Node, path: str) -> None:
    """Raise ExportError, with the node, unless `path` leads to a registered module, parameter or buffer of the model."""
    *parents, name = path.split(".")
    holder: Any = model
    for part in parents:
        holder = holder._modules.get(part) if holder is not None else None
    if holder is not None and _PATH.fullmatch(path):
        if isinstance(holder._modules.get(name), nn.Module):
            return
        if node.op == "get_attr" and isinstance(holder._parameters.get(name, holder._buffers.get(name)), Tensor):
            return
    cannot_save(f"the path {path[:80]!r}", "no module, parameter or buffer is registered there", "register it", node)


def _noise(model: nn.Module) -> frozenset[int]:
    """Return the ids of the user's modules that are noise while training. Warns, since a file goes without them."""
    noise = [(name, operator.noise[0]) for name, operator in quantized_operators(model).items() if operator.noise[0] is not None]
    if noise:
        logger.warning(
            "a file holds no Python: the loaded model trains without the noise of %s; keep prepared.state_dict() to train on",
            ", ".join(f"{type(module).__name__} (%{name})" for name, module in noise),
        )
    return frozenset(id(module) for _, module in noise)


def read_model(document: Mapping[str, Any], tensors: Mapping[str, Tensor], target_of: TargetOf) -> fx.GraphModule:
    """Return the model of a document; it is compiled only if writing it again gives the same document.

    Raises Malformed, FxQuantError, or errors of the constructors of modules and nodes, for an invalid document.
    """
    _check_head(document, _SECTIONS, FORMAT, VERSION, "it is not a model that fxquant saved")
    meta = _model_meta(expect(document["meta"], dict))
    if PRESERVED in meta:
        preserved = expect(meta.pop(PRESERVED), dict)
        if not all(type(name) is str and all(map(str.isidentifier, name.split("."))) for name in preserved):
            raise Malformed("the preserved attributes of the float model have no names")
        meta[CARRIED] = Carried(None, {}, preserved)
    if "target" in meta:
        meta["target"] = target_of(meta["target"])
    tree = TreeReader(document["tensors"], tensors, meta["target"].arithmetic if "target" in meta else None)
    tree.read(document["modules"])
    model = Model(nn.Module(), fx.Graph(), expect(document["name"], str))
    shell = tree.fill(nn.Module(), expect(document["root"], dict))
    for part in ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        model.__dict__[part] = shell.__dict__[part]
    model.meta = meta
    replace_graph(model, _graph(expect(document["nodes"], list)))
    _check(model, document, target_of)
    attach_call_hooks(model)
    dress_carried(model)
    link(model, model.graph)
    if meta.get("stage") == Stage.PREPARED.name:
        restore_hooks(model)
    model.recompile()
    return model


def _check_head(document: Mapping[str, Any], sections: list[str], form: str, version: int, otherwise: str) -> None:
    """Raise Malformed unless a document has these sections, this format and this version."""
    Malformed.unless(list(document) == sections and document["format"] == form, otherwise)
    if document["version"] != version:
        raise Malformed(f"it has version {str(document['version'])[:20]}, and this fxquant reads version {version}")


def _check(model: Model, document: Mapping[str, Any], target_of: TargetOf) -> None:
    again, _ = write_model(model, target_of)
    if json.dumps(again) != json.dumps(document):
        part = next(name for name in _SECTIONS if again[name] != document[name] or str(again[name]) != str(document[name]))
        raise Malformed(f"its {part} hold a value that fxquant does not write")
    if not is_signature(model.meta, [str(node.target) for node in model.graph.find_nodes(op="placeholder")]):
        raise Malformed("it does not say how its inputs are given")
    if not are_calls(model.meta.get(CALLS, ()), model.graph if model.meta.get("stage") == Stage.PREPARED.name else None):
        raise Malformed("it does not say what calls of modules read and return")
    Malformed.unless(is_form(model.meta), "it does not say what it returns")
    stage = Stage[model.meta["stage"]] if "stage" in model.meta else Stage.TRACED
    Malformed.unless(stage is not Stage.INTEGER or "target" in model.meta, "an integer model has no target")
    contradictions = [(violation.node, violation.because) for violation in violations(model, stage)] or list(_contradictions(model, stage))
    if contradictions:
        raise Malformed(f"%{contradictions[0][0].name}: {contradictions[0][1]}")


def _contradictions(model: Model, stage: Stage) -> Iterator[tuple[fx.Node, str]]:
    """Yield the nodes of a graph before INTEGER that contradict their tensors; the rules of INTEGER prove every node."""
    if stage is Stage.INTEGER:
        return
    for node in model.graph.nodes:
        declared = fact(node)
        if node.op == "get_attr" and isinstance(declared, TensorFact):
            tensor = resolve(model, str(node.target))
            actual = TensorFact(tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else None
            if actual != declared:
                yield node, f"it is {actual}, and declared as {declared}"
        module = resolve(model, str(node.target)) if node.op == "call_module" else None
        if type(module) in MODULES:
            MODULES[type(module)][1](module)  # raises for settings that such a module cannot have
        if stage is not Stage.PREPARED or not isinstance(module, QuantizedOperator) or not isinstance(declared, TensorFact):
            continue
        if (computed := _computed(model, node, module)) != declared:
            yield node, f"its result is {computed}, and declared as {declared}"


def _computed(model: Model, node: fx.Node, module: QuantizedOperator) -> TensorFact:
    """Return the shape and dtype of an operator's result, inferred with its float function on meta tensors; raises its errors."""

    def example(operand: fx.Node, point: int) -> Any:
        if operand.op == "get_attr":
            value = resolve(model, str(operand.target))
            return value.to("meta") if isinstance(value, Tensor) else copy.deepcopy(value).to("meta")
        return on_meta(fact(operand), point)

    def run(point: int) -> Tensor:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: example(operand, point))
        result: Tensor = module.operator.function(*args, **kwargs)
        return result

    with torch.no_grad():
        return inferred(node, run)


def _model_meta(content: dict[str, Any]) -> dict[str, Any]:
    meta = {name: decode(value) for name, value in content.items()}
    for name, kinds in _MODEL_META.items():
        if name in meta:
            expect(meta[name], *kinds)
    if meta.get("stage", "TRACED") not in {stage.name for stage in Stage if stage is not Stage.FUSED}:
        raise Malformed("it is at no stage that fxquant has")
    lists = [value for value in meta.values() if isinstance(value, list)]
    Malformed.unless(all(type(item) is str for items in lists for item in items), "a list of notes holds values other than sentences")
    return meta


def _graph(entries: list[Any]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for entry in entries:
        if list(expect(entry, dict)) != ["op", "name", "target", "args", "kwargs", "meta"]:
            raise Malformed("a node does not have the fields of a node")
        name, op = expect(entry["name"], str), expect(entry["op"], str)
        args = tuple(decode(argument, nodes) for argument in expect(entry["args"], list))
        kwargs = {key: decode(argument, nodes) for key, argument in expect(entry["kwargs"], dict).items()}
        node = graph.create_node(op, _resolved(op, expect(entry["target"], str)), args, kwargs, name=name)
        Malformed.unless(node.name == name, f"the name {name[:80]!r} cannot be the name of a node, or is used twice")
        nodes[name] = node
        node.meta.update(_node_meta(expect(entry["meta"], dict)))
    last = list(graph.nodes)[-1:]
    if graph.find_nodes(op="output") != last or len(last[0].args) != 1 or last[0].kwargs:
        raise Malformed("a graph ends in its one output")
    Malformed.unless(not any(node.args or node.kwargs for node in graph.find_nodes(op="get_attr")), "a constant takes no arguments")
    for node in graph.nodes:
        _check_operation(node, nodes)
    return graph


def _check_operation(node: fx.Node, nodes: Mapping[str, fx.Node]) -> None:
    described = operation(node)
    if described is None:
        return
    constants = list(described.constants.values())
    if not all(isinstance(constant, Constant) for constant in constants):
        raise Malformed(f"the primitives of %{node.name} name values that are not constants")
    named = [value.node for value in pytree.tree_leaves(described.arguments) if isinstance(value, Reference)]
    if not all(type(name) is str and name in nodes for name in (*named, *(constant.node for constant in constants))):
        raise Malformed(f"the primitives of %{node.name} read a node that does not exist")


def _resolved(op: str, target: str) -> Any:
    if op != "call_function":
        return target
    function = function_named(target)
    if function is None and target.startswith("wrapped:"):
        missing = "which nothing in this process has wrapped: import the module that does, and load it again"
        raise Malformed(f"it calls {target[8:88]}, {missing}")
    if function is None:
        raise Malformed(f"no function is named {target[:80]!r}")
    return function


def _node_meta(content: dict[str, Any]) -> dict[str, Any]:
    meta = {}
    for name, value in content.items():
        Malformed.unless(name in _META, f"a node has no field named {name[:80]!r}")
        kinds = _META[name]
        meta[name] = decode(value) if kinds is None else expect(decode(value), *kinds)
    for entry in meta.get("qconfig", ()):
        if not (type(entry) is tuple and len(entry) == 2 and type(entry[0]) is str and isinstance(entry[1], QConfig | None)):
            raise Malformed("qconfig holds values other than paths with a QConfig each")
    for name in ("spelling", "fused", "ties"):
        Malformed.unless(all(type(item) is str for item in meta.get(name, ())), f"{name} holds values other than names")
    if not all(type(item) in (str, int, float, bool, NoneType) for item in meta.get("notes", {}).values()):
        raise Malformed("notes hold values other than numbers and sentences")
    if not all(map(SIZE.fullmatch, meta.get("notes", {}).get(SIZES, "").split())):
        raise Malformed("the sizes of an input are not described by name, bounds and step")
    return meta


OBSERVATIONS = "fxquant observations"  # their format, of version 1
LARGEST_HISTOGRAM = 2**24  # bins that a file may ask for before any tensor of them is read
_PLACE = ["name", "fused", "shape", "within", "exponents"]


def write_observations(observations: Observations) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return observations as a JSON document (dict) and tensors by name, which a file holds."""
    entries, tensors = [], {}
    for index, entry in enumerate(observations.values()):
        gathered = []
        for number, ((kind, settings), buffers) in enumerate(entry.gathered.items()):
            gathered.append([kind, dict(settings)])
            tensors.update({f"{index}.{number}.{name}": buffer.contiguous() for name, buffer in buffers.items()})
        entries.append({"places": [[encode(getattr(place, part)) for part in _PLACE] for place in entry.places], "gathered": gathered})
    return {"format": OBSERVATIONS, "version": 1, "observed": entries}, tensors


def read_observations(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Observations:
    """Return the observations of a document. Raises Malformed, or errors of the observers' constructors, for an invalid document."""
    _check_head(document, ["format", "version", "observed"], OBSERVATIONS, 1, "it holds no observations that fxquant saved")
    remaining = dict(tensors)
    observed = [_observed(expect(entry, dict), index, remaining) for index, entry in enumerate(expect(document["observed"], list))]
    Malformed.unless(not remaining, "it holds tensors that belong to no observation")
    return Observations(observed)


def _observed(entry: dict[str, Any], index: int, tensors: dict[str, Tensor]) -> Observed:
    Malformed.unless(list(entry) == ["places", "gathered"], "an observation does not have the fields of one")
    gathered: dict[Gathering, dict[str, Tensor]] = {}
    for number, part in enumerate(expect(entry["gathered"], list)):
        observer = _observer(part)
        way = gathering(observer)
        assert way is not None
        gathered[way] = {name: _buffer(f"{index}.{number}.{name}", like, tensors) for name, like in observer.named_buffers()}
    observed = Observed(tuple(_place(expect(place, list)) for place in expect(entry["places"], list)), gathered)
    Malformed.unless(observed.places and observed.count > 0, "an observation is of nothing")
    return observed


def _observer(part: Any) -> Observer:
    """Return an observer that gathers in the way that is written."""
    kind, settings = expect(part, list)
    chosen = {name: expect(value, int, float) for name, value in expect(settings, dict).items()}
    observer = look_up(OBSERVERS, kind, "observer")
    if not set(chosen) <= set(ARGUMENTS[observer]) or chosen.get("bins", 0) > LARGEST_HISTOGRAM:
        raise Malformed(f"no {kind} gathers with these settings")
    with torch.device("meta"):
        created: Observer = observer(**chosen)
    Malformed.unless(gathering(created) == (kind, tuple(chosen.items())), f"no {kind} gathers with these settings")
    return created


def _buffer(name: str, like: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype) or not bool(torch.isfinite(tensor).all()):
        raise Malformed(f"the tensor {name} is missing, or is not what its observer gathers")
    return tensor


def _place(parts: list[Any]) -> Place:
    name, fused, shape, within, exponents = (decode(part) for part in parts)
    low, high = (expect(bound, float) for bound in expect(within, tuple))
    names = tuple(expect(other, str) for other in expect(fused, tuple))
    Malformed.unless(low <= high, "the observed values are not an observation")
    powers = tuple(expect(power, int) for power in expect(exponents, tuple))
    Malformed.unless(not any(abs(power) > LARGEST_EXPONENT for power in powers), "the observed factors of channels are not factors")
    return Place(expect(name, str), names, expect(shape, str), (low, high), powers)
