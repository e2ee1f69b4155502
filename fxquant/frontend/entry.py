"""Models that may be traced, others being refused before any work; and graphs at one batch size."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import fx, nn

from fxquant.errors import ConfigurationError
from fxquant.frontend.batch_limits import noted_limits
from fxquant.frontend.exported import is_unpacked, module_of
from fxquant.ir.facts import BatchDim, TensorFact
from fxquant.ir.graph import fact, model_meta, set_fact, stage_of
from fxquant.ir.model import Model

STAGE = "fxquant.prepared.stage"  # in `meta` of a traced GraphModule

# Classes of torch.ao and of torchao that stand in a model only once it has been prepared or converted there.
_OBSERVERS = frozenset(("ObserverBase", "FakeQuantizeBase", "AffineQuantizedObserverBase"))
_HOMES = ("torch.ao.", "torch.quantization.", "torchao.")
_QUANTIZED = (
    "torch.ao.nn.quantized.", "torch.ao.nn.qat.", "torch.ao.nn.intrinsic.qat.", "torch.ao.nn.intrinsic.quantized.",
    "torch.ao.nn.sparse.quantized.",
)  # fmt: skip
_WRITTEN_BY_USERS = frozenset(("FloatFunctional", "FXFloatFunctional"))  # float modules, in spite of their home


def is_traced(module: object) -> bool:
    """Return whether a module is a GraphModule that `trace` made, and no pass has rewritten."""
    return model_meta(module).get(STAGE) == "traced" and stage_of(module) is None


def float_model(model: Any) -> nn.Module:
    """Return the float model that is meant: the model itself, the one `torch.compile` wrapped, or the module of an ExportedProgram.

    Raises ConfigurationError for anything else: a prepared or an integer model of fxquant, alone or inside of another module, a model that
    torch.ao has prepared or converted, a scripted model, the module of an ExportedProgram, and an object that is not a module.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return module_of(model)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"a {type(model).__name__} cannot be traced", because="a model is an nn.Module", remedy="wrap the function in an nn.Module"
        )
    found = uncompiled(model)
    if isinstance(found, torch.jit.ScriptModule):
        refuse_scripted("the model")
    if is_unpacked(found):
        raise ConfigurationError(
            "the model is the module of an ExportedProgram, not the program",
            because="its graph has the guards of the example's sizes, and neither the lines nor the names of the model that was exported",
            remedy="pass the ExportedProgram itself: what torch.export.export or torch.export.load returns, without .module() or unflatten",
        )
    for path, module in found.named_modules():
        stage = stage_of(module)
        if stage is not None:
            _refuse_stage(path, stage, model_meta(module).get("target"))
        kind = type(module)
        if is_quantized_by_torch(kind):
            raise ConfigurationError(
                "the model is not a float model: torch.ao has prepared or converted it",
                because=f"{_at(path)} is a {kind.__module__}.{kind.__qualname__}, which already observes or quantizes",
                remedy="pass the original float nn.Module; QuantStub, DeQuantStub and FloatFunctional may stay in it",
            )
    return found


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped; any other module itself."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported before somebody compiles
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module.get_submodule("_orig_mod")
    return module


def refuse_scripted(what: str, at: str | None = None) -> NoReturn:
    """Raise the error for a module whose Python is gone."""
    raise ConfigurationError(
        f"{what} is a torch.jit.ScriptModule",
        because="scripting and torch.jit.trace replace a module's Python, which fxquant traces, by a TorchScript program",
        remedy="pass the module it was made from, with no scripted part",
        at=at,
    )


def is_quantized_by_torch(kind: type) -> bool:
    """Return whether a class is one of torch.ao or torchao that observes or quantizes."""
    home = kind.__module__ + "."
    if home.startswith(_QUANTIZED) and kind.__name__ not in _WRITTEN_BY_USERS:
        return True
    return any(base.__name__ in _OBSERVERS and base.__module__.startswith(_HOMES) for base in kind.__mro__)


def _at(path: str) -> str:
    return f"the submodule {path}" if path else "the model"


def _refuse_stage(path: str, stage: str, target: Any) -> NoReturn:
    kinds = {"PREPARED": "a prepared model", "INTEGER": "an integer model"}
    stage = "INTEGER" if stage == "FUSED" else stage
    march = f" for {target.name}" if target is not None else ""
    going_on = {
        "PREPARED": "; continue this one with fxq.calibrate, fxq.set_state and fxq.convert",
        "INTEGER": "; this one is finished: call it, fxq.export_onnx or fxq.save it",
    }
    raise ConfigurationError(
        f"{_at(path)} is not a float model, but {kinds.get(stage, f'a graph that was stopped at stage {stage}')}",
        because=f"it was compiled{march} already, and quantizing it twice would mix two arithmetics",
        remedy="pass the float nn.Module it was made from, also for another target" + going_on.get(stage, ""),
    )


# ---- a graph at one batch size: every size in it is a number ---------------------------------------------------------


def with_fixed_batch(model: fx.GraphModule, batch_size: int) -> Model:
    """Return a traced or integer model at `batch_size`, as if traced with `dynamic_shapes={}`; it shares the parameters.

    Raises ConfigurationError for a batch size that the graph does not hold for: one beyond the limits of its batch, or another than the
    one it was traced with, where that is fixed.
    """
    _check_batch(model, batch_size)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in model.graph.nodes:
        known = _fact_at(node, batch_size)
        if isinstance(fact(node), BatchDim) and node.op != "placeholder":
            copies[node] = known
            continue
        made = copies[node] = graph.node_copy(node, copies.__getitem__)
        if known is not None:
            set_fact(made, known)
    for node in reversed(model.graph.nodes):
        made = copies[node]
        if isinstance(made, fx.Node) and node.users and not made.users and made.op != "placeholder":
            graph.erase_node(made)  # only sizes were read of it
    fixed = Model.of(model, graph)
    fixed.recompile()
    return fixed


def _fact_at(node: fx.Node, batch_size: int) -> Any:
    """Return the fact of a node at this batch size."""

    def fixed(value: Any) -> Any:
        if isinstance(value, BatchDim):
            return value.at(batch_size)
        return TensorFact(value.at(batch_size), value.dtype) if isinstance(value, TensorFact) else value

    try:
        return fx.node.map_aggregate(fact(node), fixed)
    except ValueError as error:
        raise ConfigurationError(
            f"batch_size={batch_size} cannot be used",
            node=node,
            because=f"here {error}",
            remedy="pass a batch size that this line can divide",
        ) from None


def _check_batch(model: fx.GraphModule, batch_size: int) -> None:
    limits = noted_limits(model.graph)
    if not limits.smallest <= batch_size <= (limits.largest or batch_size):
        raise ConfigurationError(
            f"batch_size={batch_size} cannot be used",
            because=f"the model slices its batch at a fixed index, and takes from {limits.smallest} to {limits.largest or 'any'} rows",
            remedy="pass a batch size between these",
        )
    shapes = [known.shape for node in model.graph.find_nodes(op="placeholder") if isinstance(known := fact(node), TensorFact)]
    if not any(isinstance(size, BatchDim) for shape in shapes for size in shape):
        traced = next((shape[0] for shape in shapes if shape), batch_size)
        if traced != batch_size:
            raise ConfigurationError(
                f"batch_size={batch_size} cannot be used",
                because=f"the model was traced with fixed sizes, and a batch of {traced}",
                remedy=f"leave it out, or trace with an example of {batch_size} rows, or without dynamic_shapes={{}}",
            )
