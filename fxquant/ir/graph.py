"""Facts on nodes, and the few ways passes change a graph.

All static facts about a node are in `node.meta` and are read and written through this module,
so no other file names a key. Facts survive `copy.deepcopy` of a GraphModule.

    fact        `TensorFact` of the node's value, or a tuple/list/dict of them, or a number
    source      the user's line: "model.py:41 in forward:  y = self.act(y)"
    module      the dotted path of the user's module the node came from ("layer1.0.conv1")
    made_by     the pass (or "trace") that created the node
    qconfig     the QConfigs (or None) attached to the user's modules around the call, by their paths, nearest first
    matched_rules      the rules of the qconfig that cover the node, and each node that was fused into it
    batch_norm  the dotted path of the module in which a batch norm was called that is fused into the node
    detached    whether the node is computed without gradients while the prepared model trains
    part        the composite operator a node is a part of ("softmax: exp"), with what that demands of its grid
    argument    what the user calls an input whose name is none in Python, or one that generated code needs ("torch")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxquant.ir.codegen import registered
from fxquant.ir.facts import Size, TensorFact

# ---- typed access to node.meta ------------------------------------------------------------------------------------------


def fact(node: fx.Node) -> Any:
    """Return the node's `TensorFact` (or nest of them, or number); None if nothing is known."""
    return node.meta.get("fact")


def set_fact(node: fx.Node, value: Any) -> None:
    """Write the node's fact."""
    node.meta["fact"] = value


def source(node: fx.Node) -> str:
    """Return the user's source line, or an empty string."""
    return str(node.meta.get("source", ""))


def argument_name(node: fx.Node) -> str:
    """Return the user's name of the input that a placeholder stands for; as a rule, the placeholder's own."""
    return str(node.meta.get("argument", node.target))


def set_argument_name(node: fx.Node, name: str) -> None:
    """Write what the user calls this input."""
    node.meta["argument"] = name


def by_name(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs of a graph, given in its order, as keyword arguments by the names of its placeholders."""
    return dict(zip((str(node.target) for node in module.graph.find_nodes(op="placeholder")), inputs, strict=True))


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the user's module this node came from, or an empty string for the model itself."""
    return str(node.meta.get("module", ""))


def made_by(node: fx.Node) -> str:
    """Return the pass that created the node, or "trace"."""
    return str(node.meta.get("made_by", "trace"))


def attached_qconfigs(node: fx.Node) -> tuple[tuple[str, Any], ...]:
    """Return the QConfigs (or None, for float) attached to the modules around the call, with their paths: the nearest first."""
    return tuple(node.meta.get("qconfig", ()))


def attach_qconfigs(node: fx.Node, value: tuple[tuple[str, Any], ...]) -> None:
    """Write the QConfigs attached to the modules around the call, the nearest first."""
    node.meta["qconfig"] = value


def matched_rules(node: fx.Node) -> tuple[Any, ...]:
    """Return the rules for this node, then for each node fused into it, in the order they run: a `spec.MatchedRules` for each."""
    return tuple(node.meta.get("matched_rules", ()))


def set_matched_rules(node: fx.Node, *rules: Any) -> None:
    """Write the rules of the qconfig that cover the node, and each node fused into it."""
    node.meta["matched_rules"] = rules


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """Return the node's shape; raises TypeError if its value is not one tensor."""
    value = fact(node)
    if not isinstance(value, TensorFact):
        raise TypeError(f"%{node.name} is not a tensor of known shape")
    return value.shape


def reads_shape_only(node: fx.Node) -> bool:
    """Return whether the node asks a tensor for its size, and not for its values."""
    return node.op == "call_method" and node.target in ("size", "dim")


def batch_norm_path(node: fx.Node) -> str:
    """Return the dotted path of the module in which the batch norm of this node was called; an empty string for the model itself."""
    return str(node.meta.get("batch_norm", module_path(node)))


def set_batch_norm_path(node: fx.Node, path: str) -> None:
    """Write where the batch norm was called that is fused into this node."""
    node.meta["batch_norm"] = path


# ---- what quantization knows about a node -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Annotation:
    """Whether a node becomes integer, and why.

    dtype    the name of its integer dtype, or None if it stays in float
    because  the reason, for `explain`
    config   the QConfig that applies to it
    group    the id of the group of tensors that share its scale, once scales are shared
    on_host  whether it stays in float since it would break a limit of the target
    """

    dtype: str | None
    because: str
    config: Any = None
    group: int | None = None
    on_host: bool = False


def annotation(node: fx.Node) -> Annotation | None:
    """Return the node's annotation; None before `specs.annotate`."""
    value = node.meta.get("annotation")
    return value if isinstance(value, Annotation) else None


def annotate(node: fx.Node, value: Annotation) -> None:
    """Write the node's annotation."""
    node.meta["annotation"] = value


HOST_SINCE = "it runs on the host, since "  # how the reason of what stays `on_host` begins


def is_on_host(node: fx.Node) -> bool:
    """Return whether the node stays in float since it would break a limit of the target."""
    spec = annotation(node)
    return spec is not None and spec.on_host


def observed(node: fx.Node) -> tuple[float, float] | None:
    """Return the interval beyond which the node's values make no difference to any reader; None if all of them do."""
    return node.meta.get("observed")


def set_observed(node: fx.Node, interval: tuple[float, float]) -> None:
    """Write the interval beyond which the node's values make no difference."""
    node.meta["observed"] = interval


def refusal(node: fx.Node) -> str | None:
    """Return why the node could not be brought to canonical form; None if it was, or was never an operator."""
    return node.meta.get("refusal")


def refuse(node: fx.Node, because: str, *, python: bool = False) -> None:
    """Write why the node could not be brought to canonical form; `python`: it calls the user's Python as it is."""
    node.meta["refusal"], node.meta["python"] = because, python


WRAPPED, LEAF = "it is kept as Python, by fxq.wrap", "it is kept as one module, by leaf="


def is_python(node: fx.Node) -> bool:
    """Return whether a node calls the user's Python as it is."""
    return bool(node.meta.get("python"))


def restore_flags(meta: dict[str, Any]) -> None:
    """Set in the meta of a node that was read from a file the flags that files hold only as texts of reasons."""
    if meta.get("refusal") in (WRAPPED, LEAF):
        meta["python"] = True
    if "annotation" in meta:
        meta["annotation"] = replace(meta["annotation"], on_host=meta["annotation"].because.startswith(HOST_SINCE))


def is_parameter(node: fx.Node) -> bool:
    """Return whether the node's value follows from parameters, buffers and constants alone: it is one, or is computed from such."""
    return node.op == "get_attr" or bool(node.meta.get("parameter"))


def computes_tensor(node: fx.Node) -> bool:
    """Return whether the node computes tensors: it is neither an input nor the output, a parameter or a number."""
    if node.op in ("placeholder", "output") or is_parameter(node):
        return False
    known = fact(node)
    return isinstance(known, TensorFact | list | tuple | dict) or (known is None and refusal(node) is not None)  # kept as Python


def trains_only(node: fx.Node) -> bool:
    """Return whether a node is there for training alone: nothing reads it, and the integer model goes without it."""
    return bool(node.meta.get("trains_only"))


def mark_training(node: fx.Node) -> None:
    """Record that a node is there for training alone."""
    node.meta["trains_only"] = True


def mark_parameter(node: fx.Node) -> None:
    """Record that the node is computed from parameters alone."""
    node.meta["parameter"] = True


def is_detached(node: fx.Node) -> bool:
    """Return whether the node is computed without gradients while the prepared model trains. A parameter says so by a detach of its own."""
    return bool(node.meta.get("detached")) and not is_parameter(node)


def detach(node: fx.Node) -> None:
    """Record that the node is computed without gradients."""
    node.meta["detached"] = True


def detached_arguments(node: fx.Node) -> tuple[int | str, ...]:
    """Return the positions and the keywords of arguments that have no gradient, of a node that has one by others."""
    return tuple(node.meta.get("detached_arguments", ()))


def detach_arguments(node: fx.Node, *names: int | str) -> None:
    """Write the positions and the keywords of arguments that have no gradient; the node itself has one."""
    node.meta.pop("detached", None)
    node.meta["detached_arguments"] = names


def gradient_changes(node: fx.Node) -> dict[int, str]:
    """Return the paths of the rules that change the gradient of a node, or of the output's values by position; an empty path stops it."""
    return dict(node.meta.get("gradient_changes", {}))


def change_gradient(node: fx.Node, rule: str, position: int = 0) -> None:
    """Write the path of the rule that changes the gradient; an empty one stops it."""
    node.meta["gradient_changes"] = {**gradient_changes(node), position: rule}


def parameter_value(root: torch.nn.Module, node: fx.Node) -> Any:
    """Return the present value of a parameter, or of a node computed from parameters; without gradients, which some functions lack."""
    if node.op == "get_attr":
        return resolve(root, str(node.target))
    args: Any = fx.map_arg(node.args, lambda operand: parameter_value(root, operand))
    kwargs: Any = fx.map_arg(node.kwargs, lambda operand: parameter_value(root, operand))
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":  # it changes the gradient
            return resolve(root, str(node.target))(*args, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def stated_demand(node: fx.Node) -> Any:
    """Return the demand of a composite on the grid of this part of it (an `ops.Demand`); None for any other node."""
    return node.meta.get("demand")


def state_demand(node: fx.Node, value: Any) -> None:
    """Write the demand of the composite on the grid of this part of it."""
    node.meta["demand"] = value


@dataclass(frozen=True)
class Part:
    """The operator of the model that a node is a part of.

    composite  the operator's name
    role       the part's
    inner      whether its value is read by other parts alone; the last one's is the operator's result
    step       of a recurrence: at which of its steps it is computed, counted from 0; None of what is computed once
    """

    composite: str
    role: str
    inner: bool = True
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.composite}: {self.role}"


def part(node: fx.Node) -> Part | None:
    """Return the composite a node is a part of; None if it is a whole operator."""
    value = node.meta.get("part")
    return value if isinstance(value, Part) else None


def set_part(node: fx.Node, value: Part) -> None:
    """Write which composite the node is a part of."""
    node.meta["part"] = value


def is_inner_part(node: fx.Node) -> bool:
    """Return whether a node holds an inner tensor of a composite."""
    known = part(node)
    return known is not None and known.inner


def step_of(node: fx.Node) -> int | None:
    """Return the step of a recurrence at which a part of it is computed, counted from 0; None for any other node."""
    known = part(node)
    return None if known is None else known.step


def ties(node: fx.Node) -> tuple[str, ...]:
    """Return the names of a node's ties: nodes with one tie in common share one grid."""
    return tuple(node.meta.get("ties", ()))


def tie(node: fx.Node, name: str) -> None:
    """Add a name to those with which the node's tensor shares its grid."""
    node.meta["ties"] = (*ties(node), name)


def spelling(node: fx.Node) -> tuple[Any, ...]:
    """Return the functions, or the classes of modules, that the user called for this node; several after fusion."""
    return tuple(node.meta.get("spelling", ()))


def spell(node: fx.Node, *written: Any) -> None:
    """Add functions, or classes of modules, that the user called for this node."""
    node.meta["spelling"] = (*spelling(node), *written)


def fused(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the nodes fused into this one."""
    return tuple(node.meta.get("fused", ()))


def absorb(node: fx.Node, other: fx.Node) -> None:
    """Record that `other` is now part of `node`.

    If `node` has no gradients and `other` has some, by operands of its own, the arguments of `node` are marked as without gradients.
    """
    if is_detached(node) and not is_detached(other):
        brought = {operand for operand in other.all_input_nodes if operand is not node}
        own = [name for name, value in node.kwargs.items() if not brought.intersection(_nodes_in(value))]
        detach_arguments(node, *range(len(node.args)), *own)
    set_matched_rules(node, *matched_rules(node), *matched_rules(other))
    node.meta["fused"] = (*fused(node), *fused(other), other.name)
    if passed_on(other):
        node.meta["passed_on"] = (*passed_on(node), *passed_on(other))
    spell(node, *spelling(other))


def passed_on(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Return pairs of names: a removed node, which passed on its operand as it is, and that operand."""
    return tuple(node.meta.get("passed_on", ()))


def pass_on(operand: fx.Node, node: fx.Node) -> None:
    """Record that the readers of `node` read its operand from now on."""
    operand.meta["passed_on"] = (*passed_on(operand), *passed_on(node), (node.name, operand.name))


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def unfused(node: fx.Node) -> str | None:
    """Return why a node was not fused into its operand; None where no pass tried."""
    value = node.meta.get("unfused")
    return None if value is None else str(value)


def set_unfused(node: fx.Node, because: str) -> None:
    """Write why the node was not fused."""
    node.meta["unfused"] = because


def notes(node: fx.Node) -> dict[str, Any]:
    """Return the facts recorded while lowering: "accumulator_bits", "residual", "wide"."""
    value: dict[str, Any] = node.meta.setdefault("notes", {})
    return value


def noted(node: fx.Node, key: str) -> Any:
    """Return one of the facts in `notes`; None where it was not recorded."""
    return node.meta.get("notes", {}).get(key)


def channel_exponents(node: fx.Node) -> list[Any] | None:
    """Return the exponents e of a node of an integer graph: its tensor is the float model's times 2^e. None where it is that tensor.

    They are nested lists of its shape without the batch, where a list of one element is for a whole dimension.
    """
    known = noted(node, "exponents")
    return None if known is None else list(json.loads(known))


def set_channel_exponents(node: fx.Node, value: list[Any]) -> None:
    """Write the exponents that `channel_exponents` returns."""
    notes(node)["exponents"] = json.dumps(value)


@dataclass(frozen=True)
class QParams:
    """The grid of a quantized tensor in an integer graph: an integer q of this dtype stands for (q - zero_point) · scale.

    A 32-bit output may have several scales, along dimension `axis` of the tensor, counted from the end (-1 is the last).
    """

    scale: float | tuple[float, ...]
    dtype: str
    axis: int | None = None
    zero_point: int = 0


def qparams(node: fx.Node) -> QParams | None:
    """Return the grid of the quantized tensor a node of an integer graph holds; None for any other node."""
    value = node.meta.get("qparams")
    return value if isinstance(value, QParams) else None


def set_qparams(node: fx.Node, value: QParams) -> None:
    """Write the dtype, scale and zero point of the node's tensor."""
    node.meta["qparams"] = value


def zero_point(node: fx.Node) -> int:
    """Return the integer that stands for 0 in the tensor a node of an integer graph holds."""
    known = qparams(node)
    return 0 if known is None else known.zero_point


@dataclass(frozen=True)
class Reference:
    """A reference, among the arguments of an `Operation`, to the node of this name."""

    node: str


@dataclass(frozen=True)
class Constant:
    """A parameter as integers: the node that holds them, and what one unit stands for.

    With several scales, they run along dimension `axis`, counted from the end. Those of a transposed convolution's
    weight are the output channels', group after group. `zero_point` is the integer that stands for 0, or one for each index of
    `axis`: that of a bias that holds half a step of the output. Without a scale, (), they stand for themselves: a mask, an index.
    """

    node: str
    scale: float | tuple[float, ...]
    axis: int | None = None
    zero_point: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class Operation:
    """The operator of the table that the primitives behind a quantized tensor compute together.

    name          the operator's name
    arguments     its canonical arguments, with a `Reference` for every value of the graph; parameters are absent
    constants     its parameters, by role ("weight", "bias")
    intermediate  the scale and dtype of what a residual is added to, where it is not added in the accumulator
    """

    name: str
    arguments: dict[str, Any]
    constants: dict[str, Constant]
    intermediate: QParams | None = None


def operation(node: fx.Node) -> Operation | None:
    """Return the operator that a node of an integer graph is the result of; None for any other node."""
    value = node.meta.get("operation")
    return value if isinstance(value, Operation) else None


def set_operation(node: fx.Node, value: Operation) -> None:
    """Write the operator whose result the node is."""
    node.meta["operation"] = value


def kernel(node: fx.Node) -> tuple[str, tuple[str, ...]] | None:
    """Return the kernel that computes a node of an integer graph, and the nodes computed with it, itself the last; None without one."""
    return node.meta.get("kernel")


def set_kernel(node: fx.Node, name: str, covers: tuple[str, ...]) -> None:
    """Write which kernel computes the node, and which nodes with it."""
    node.meta["kernel"] = name, covers


def model_meta(model: Any) -> dict[str, Any]:
    """Return the `meta` of a graph module; empty for any other module, and for subclasses whose constructors leave it out."""
    found = getattr(model, "meta", None) if isinstance(model, fx.GraphModule) else None
    return found if isinstance(found, dict) else {}


def stage_of(model: Any) -> str | None:
    """Return the stage that the passes have brought a graph to; None for a module that they have not rewritten."""
    return model_meta(model).get("stage")


def is_deployed(model: Any) -> bool:
    """Return whether this is an integer model, with kernels or without."""
    return stage_of(model) in ("INTEGER", "FUSED")


def origin(node: fx.Node) -> str:
    """Return the name of the prepared node an integer node was lowered from."""
    return str(node.meta.get("origin", node.name))


def is_inner(node: fx.Node) -> bool:
    """Return whether a node of an integer graph is an inner primitive of a lowered operator, and not its result."""
    return origin(node) != node.name


# ---- changing a graph ---------------------------------------------------------------------------------------------------


def inherit(node: fx.Node, parent: fx.Node, made_by: str) -> fx.Node:
    """Give a new node the source line, the module, the attached QConfigs and the matched_rules of the node it was made for.

    A node made for a node without gradients has none either.
    """
    for key in ("source", "module", "qconfig", "matched_rules", "detached"):
        if key in parent.meta:
            node.meta[key] = parent.meta[key]
    node.meta["made_by"] = made_by
    return node


def resolve(root: torch.nn.Module, path: str) -> Any:
    """Return what is registered at a dotted path, or else the attribute there. Raises AttributeError if there is none."""
    return registered(root, path)


def attach(root: torch.nn.Module, path: str, value: torch.nn.Module | torch.Tensor) -> None:
    """Register a module, or a buffer, at a dotted path, making plain modules on the way.

    The path may be the name of an attribute of GraphModule: a user's module may be called "graph".
    """
    *parents, name = path.split(".")
    for part in parents:
        child = root._modules.get(part)
        if child is None:
            child = root._modules[part] = torch.nn.Module()
        root = child
    if isinstance(value, torch.nn.Module):
        root._modules[name] = value
    elif isinstance(value, torch.nn.Parameter):
        root._parameters[name] = value
    else:
        root._buffers[name] = value


def describe(node: fx.Node, fact: Any, source: str, module: str, made_by: str = "trace") -> None:
    """Write everything that is known about a new node."""
    meta = node.meta
    meta["fact"], meta["source"], meta["module"], meta["made_by"] = fact, source, module, made_by
