"""Accept a model for a trace, or refuse it before any work; and find the batch sizes for which a graph holds, or fix one."""

import bisect
import operator
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _PyTreeCodeGen

from fxquant.errors import ConfigurationError, TraceError
from fxquant.frontend.environment import exported_at, is_library
from fxquant.frontend.onnx_files import is_onnx, read_onnx
from fxquant.frontend.written_out import CHECKS, python_form
from fxquant.ir.graph import BATCH_SIZES, BatchDim, TensorFact, fact, model_meta, set_fact, stage_of, target_name
from fxquant.ir.integer import noted, notes
from fxquant.ir.model import Model
from fxquant.support import logger

# ---- `torch.export` programs as models: ATen operators in PyTorch's call forms, so that they are traced like any module ----
_READ = "fxquant.exported"  # in meta of a module that `module_of` made
LOST_GRADIENTS = "lost_gradients"  # in `meta` of a model: sentences about gradients that TRAIN cannot have
_LOST = (
    "an exported program holds no hooks, no torch.inference_mode and no custom backward: "
    "TRAIN uses the gradients of its operators; pass the nn.Module to keep those of your code"
)
_TRAINS = frozenset(("train", "training", "use_input_stats"))  # the arguments of ATen operators that are true in train mode
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*([^\n]*)')


def module_of(program: torch.export.ExportedProgram) -> nn.Module:
    """Return a module that computes the program's function with its parameters under their names, and does not check its inputs.

    While it is traced, operators get the source lines and the modules that they had in the exported model. Batch norms and dropouts that
    were exported in train mode follow the mode of the module: in eval mode they use running statistics, and drop nothing.
    """
    module: Any = program.module()
    for name in ("train", "eval"):  # an exported module refuses both
        vars(module).pop(name, None)
    lost = _follow_mode(module)
    _in_python(module)
    if any(parameter.requires_grad for parameter in module.parameters()):
        module.meta[LOST_GRADIENTS] = [_LOST, *lost]
    if hasattr(module, "_guards_fn"):
        del module._guards_fn
    module.meta[_READ] = True
    return module  # type: ignore[no-any-return]


def _in_python(module: Any) -> None:
    """Replace ATen operators of a graph, and of graphs that it calls, by PyTorch's functions."""
    graph: fx.Graph = module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            inner: Any = module.get_submodule(str(node.args[1].target))
            _in_python(inner)
            node.target = _in_gradient_mode
        elif node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.name.partition("::")[2] in CHECKS:
                graph.erase_node(node)
                continue
            with graph.inserting_before(node):
                stack = node.meta.get("nn_module_stack") or {}
                path = str(next(reversed(stack.values()))[0]) if stack else ""
                graph.call_function(exported_at, (re.sub(r"^L\['self'\]\.?", "", path), _line(node)))
            node.target = python_form(node.target)
    module.recompile()


def _follow_mode(program: Any) -> list[str]:
    """Make operators exported in train mode read their module's mode, and remove batch counters; return notes on lost gradient rules.

    Norms without running statistics do not change. Logs a warning if only dropouts were exported in train mode.
    """
    followed = set()
    inside = []
    for graph in [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]:
        for node in graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            arguments = dict(zip([argument.name for argument in node.target._schema.arguments], node.args, strict=False))
            if arguments.get("running_mean", 0) is None:
                continue
            names = {name for name, value in arguments.items() if (value is True and name in _TRAINS) or (value and name == "dropout_p")}
            if names:  # replaced by the mode, and a share to drop by its product with the mode
                with graph.inserting_before(node):
                    mode = graph.create_node("get_attr", "training")
                    drop = graph.call_function(operator.mul, (arguments["dropout_p"], mode)) if "dropout_p" in names else None
                node.args = tuple((arguments | {name: mode if arguments[name] is True else drop for name in names}).values())
            followed |= names
            inside += [node.name] if names and (arguments.get("dropout_p") or arguments.get("dropout")) else []
            if node.target is torch.ops.aten.add_.Tensor and not node.users and "num_batches_tracked" in str(node.args[0]):
                graph.erase_node(node)  # a batch norm that is a function does not read its counter
    if followed and followed <= {"train", "dropout_p"}:
        logger.warning(
            "dropouts of the program were exported in train mode: in eval mode, and as integers, they drop nothing; to drop there as well"
            " (Monte Carlo dropout), pass the nn.Module"
        )
    return [f"dropout inside of attention and of recurrent layers is off in TRAIN: {', '.join(inside)}"] if inside else []


def _in_gradient_mode(enabled: bool, function: Any, *args: Any) -> Any:
    """Return a part of a program that was exported in this gradient mode."""
    with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
        return function(*args)


def lost_gradients(module: nn.Module) -> list[str]:
    """Return notes on the gradients that a program, which is this module now, has lost."""
    meta = vars(module).get("meta")  # a user's module may have a child of that name
    return list(meta.get(LOST_GRADIENTS, ())) if isinstance(meta, dict) else []


def is_unpacked(module: nn.Module) -> bool:
    """Return whether a module was returned by `ExportedProgram.module()` or `torch.export.unflatten`, and not by `module_of`."""
    if isinstance(module, torch.export.UnflattenedModule):
        return True
    if not isinstance(module, fx.GraphModule) or model_meta(module).get(_READ) or not isinstance(module.graph._codegen, _PyTreeCodeGen):
        return False
    return any(node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes)


def _line(node: fx.Node) -> str:
    """Return the innermost line that is the user's, as errors and `explain` tell it; a library's where there is none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, number, function, text = ([frame for frame in frames if not is_library(frame[0])] or frames)[-1]
    return f"{file.rpartition('/')[2]}:{number} in {function}:  {text.strip()}"


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
    """Return the float model that is meant: the model itself, the one `torch.compile` wrapped, or the module of a program or ONNX file.

    A program is an ExportedProgram; an ONNX file is its path, which ends in ".onnx", or an onnx.ModelProto.

    Raises ConfigurationError for anything else: a prepared or an integer model of fxquant, alone or inside of another module, a model that
    torch.ao has prepared or converted, a scripted model, the module of an ExportedProgram, and an object that is not a module.
    """
    if isinstance(model, torch.export.ExportedProgram):
        return module_of(model)
    if not isinstance(model, nn.Module):
        if is_onnx(model):
            return read_onnx(model)
        because = "a model is an nn.Module, an ExportedProgram, the path of an ONNX file or an onnx.ModelProto"
        remedy = "name a file that ends in .onnx" if isinstance(model, (str, os.PathLike)) else "wrap the function in an nn.Module"
        raise ConfigurationError(f"a {type(model).__name__} cannot be traced", because=because, remedy=remedy)
    eager = uncompiled(model)
    if isinstance(eager, torch.jit.ScriptModule):
        refuse_scripted("the model")
    if is_unpacked(eager):
        because = "its graph has the guards of the example's sizes, and neither the lines nor the names of the model that was exported"
        remedy = "pass the ExportedProgram itself: what torch.export.export or torch.export.load returns, without .module() or unflatten"
        raise ConfigurationError("the model is the module of an ExportedProgram, not the program", because=because, remedy=remedy)
    for path, module in eager.named_modules():
        stage = stage_of(module)
        if stage is not None:
            _refuse_stage(path, stage, model_meta(module).get("target"))
        kind = type(module)
        if is_quantized_by_torch(kind):
            what = "the model is not a float model: torch.ao has prepared or converted it"
            because = f"{_at(path)} is a {kind.__module__}.{kind.__qualname__}, which already observes or quantizes"
            remedy = "pass the original float nn.Module; QuantStub, DeQuantStub and FloatFunctional may stay in it"
            raise ConfigurationError(what, because=because, remedy=remedy)
    return eager


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped; any other module itself."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported before somebody compiles
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module.get_submodule("_orig_mod")
    return module


def refuse_scripted(what: str, at: str | None = None) -> NoReturn:
    """Raise the error for a module whose Python is gone."""
    because = "scripting and torch.jit.trace replace a module's Python, which fxquant traces, by a TorchScript program"
    remedy = "pass the module it was made from, with no scripted part"
    raise ConfigurationError(f"{what} is a torch.jit.ScriptModule", at=at, because=because, remedy=remedy)


def is_quantized_by_torch(kind: type) -> bool:
    """Return whether a class is one of torch.ao or torchao that observes or quantizes."""
    if (kind.__module__ + ".").startswith(_QUANTIZED) and kind.__name__ not in _WRITTEN_BY_USERS:
        return True
    return any(base.__name__ in _OBSERVERS and base.__module__.startswith(_HOMES) for base in kind.__mro__)


def _at(path: str) -> str:
    return f"the submodule {path}" if path else "the model"


def _refuse_stage(path: str, stage: str, target: Any) -> NoReturn:
    prepared = "a prepared model", "; continue this one with fxq.calibrate, fxq.set_state and fxq.convert"
    integer = "an integer model", "; this one is finished: call it, fxq.export_onnx or fxq.save it"
    kinds = {"PREPARED": prepared, "INTEGER": integer, "FUSED": integer}
    kind, going_on = kinds.get(stage, (f"a graph that was stopped at stage {stage}", ""))
    march = f" for {target.name}" if target is not None else ""
    because = f"it was compiled{march} already, and quantizing it twice would mix two arithmetics"
    remedy = "pass the float nn.Module it was made from, also for another target" + going_on
    raise ConfigurationError(f"{_at(path)} is not a float model, but {kind}", because=because, remedy=remedy)


# ---- the batch sizes between which the facts of a traced graph hold --------------------------------------------------
#
# Facts are inferred at four batch sizes, 4 and larger. A slice can have another size at other batch sizes: `x[:2]` has one row of
# a batch of one, `x[-20:]` has no more than 20 of a large one. Such operators are run again, without data, until the limits are found.
SMALLEST_BATCH, LARGEST_BATCH = "smallest_batch", "largest_batch"  # in the notes of the inputs
LARGE = 2**16  # stands for every batch size above: nobody cuts off at more

# These keep the first dimension as it is for some batch sizes only.
_CUT = frozenset((operator.getitem, "split", "tensor_split", "narrow", "chunk", "split_with_sizes", "__getitem__"))


@dataclass(frozen=True)
class BatchLimits:
    """The smallest and the largest batch size for which all facts hold, each with a node that ends them; None where none does."""

    smallest: int = 1
    largest: int | None = None
    at_smallest: fx.Node | None = None
    at_largest: fx.Node | None = None

    def beyond(self, batch: int) -> tuple[str, str, fx.Node | None] | None:
        """Return ("small" or "large", the allowed batch sizes in words, the node) for a batch size beyond the limits; None within them."""
        if batch < self.smallest:
            return "small", f"from a batch of {self.smallest} on", self.at_smallest
        if self.largest is not None and batch > self.largest:
            return "large", f"up to a batch of {self.largest}", self.at_largest
        return None

    def another(self, batch: int) -> int | None:
        """Return a small batch size within the limits and not equal to `batch`; None if there is none."""
        sizes = (2, 4, self.smallest, self.smallest + 1)
        return next((size for size in sizes if size != batch and size >= self.smallest and size <= (self.largest or size)), None)


def note_batch_limits(traced: fx.Graph, batch: int) -> None:
    """Note the limits of a traced graph on its inputs. Raises TraceError where the example's own batch size is beyond them."""
    limits = batch_limits(traced)
    beyond = limits.beyond(batch)
    if beyond is not None:
        because = f"the size of what this line computes follows the batch evenly only {beyond[1]}"
        remedy = "trace with an example of such a size, or with options=fxq.Options(dynamic_shapes={}) to fix the batch size"
        raise TraceError(f"the batch size of the example, {batch}, is too {beyond[0]}", node=beyond[2], because=because, remedy=remedy)
    for node in traced.find_nodes(op="placeholder"):
        if limits.smallest > 1:
            notes(node)[SMALLEST_BATCH] = limits.smallest
        if limits.largest is not None:
            notes(node)[LARGEST_BATCH] = limits.largest


def noted_limits(graph: fx.Graph) -> BatchLimits:
    """Return the limits of the batch size that `note_batch_limits` noted on the placeholders of `graph` or of its source."""
    for node in graph.find_nodes(op="placeholder"):
        return BatchLimits(noted(node, SMALLEST_BATCH) or 1, noted(node, LARGEST_BATCH))
    return BatchLimits()


def batch_limits(traced: fx.Graph) -> BatchLimits:
    """Return the smallest and the largest batch size at which all shapes of a traced graph hold, in one walk over its nodes."""
    mode, limits, checked = FakeTensorMode(allow_non_fake_inputs=True), BatchLimits(), set()
    for node in traced.nodes:
        if not _may_cut(node) or (key := _key(node)) in checked:
            continue
        checked.add(key)
        if not _holds(mode, node, BATCH_SIZES[0]):
            continue  # it depends on more than sizes
        small = [size for size in range(limits.smallest, BATCH_SIZES[0]) if not _holds(mode, node, size)]
        if small:
            limits = BatchLimits(small[-1] + 1, limits.largest, node, limits.at_largest)
        large = LARGE if limits.largest is None else limits.largest
        if not _holds(mode, node, large, failed=True):  # an operator that fails at a batch size says so itself
            sizes = range(BATCH_SIZES[1], large)
            first = bisect.bisect_left(sizes, True, key=lambda size: not _holds(mode, node, size, failed=True))
            limits = BatchLimits(limits.smallest, sizes[0] + first - 1, limits.at_smallest, node)
    return limits


def _may_cut(node: fx.Node) -> bool:
    """Return whether a node's result can be another one than its fact says: not where every size follows the first one of an operand."""
    result = fact(node)
    if node.op not in ("call_function", "call_method") or not isinstance(result, TensorFact):
        return False
    operands = [operand_fact for operand in node.all_input_nodes if (operand_fact := fact(operand)) is not None]
    tensors = [each.shape for each in operands if isinstance(each, TensorFact)]
    if len(tensors) == len(operands) and not any(isinstance(size, BatchDim) for shape in tensors for size in shape):
        return False
    sizes = [(dim, size) for shape in (result.shape, *tensors) for dim, size in enumerate(shape) if isinstance(size, BatchDim)]
    plain = all(each == (0, BatchDim()) for each in sizes) and result.shape[:1] == (BatchDim(),)
    return not plain or node.target in _CUT or target_name(node) in _CUT


def _key(node: fx.Node) -> Any:
    """Equal for calls that have the same limits: the same function of operands with the same facts."""

    def described(operand: fx.Node) -> str:
        operand_fact = fact(operand)
        return str(operand_fact) if isinstance(operand_fact, TensorFact | BatchDim) else operand.name

    return node.target, repr(fx.map_arg((node.args, node.kwargs), described))


def _size(node_fact: BatchDim | TensorFact, batch: int) -> Any:
    """Return a size, or the sizes of a tensor, at a batch size."""
    try:
        return node_fact.at(batch)
    except ValueError:
        raise _Uneven from None


class _Uneven(Exception):
    """A size is not an integer at this batch size, as B/2 at an odd one: its fact says nothing there."""


def _holds(mode: FakeTensorMode, node: fx.Node, batch: int, *, failed: bool = False) -> bool:
    """Return whether the node's result at a batch size has the shape and dtype of its fact; `failed` if PyTorch raises an error."""
    try:
        result, node_fact = _run(mode, node, batch), fact(node)
        return bool(tuple(result.shape) == _size(node_fact, batch) and result.dtype == node_fact.dtype)
    except _Uneven:
        return True
    except Exception:  # whatever PyTorch raises
        return failed


def _run(mode: FakeTensorMode, node: fx.Node, batch: int) -> Any:
    def example(operand: fx.Node) -> Any:
        operand_fact = fact(operand)
        if isinstance(operand_fact, BatchDim):
            return _size(operand_fact, batch)
        if isinstance(operand_fact, TensorFact):
            return torch.empty(_size(operand_fact, batch), dtype=operand_fact.dtype, device="cpu")
        return operand_fact if isinstance(operand_fact, int | float) else _run(mode, operand, batch)  # several results

    with mode:
        args, kwargs = fx.map_arg((node.args, node.kwargs), example)
        function: Callable[..., Any] = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        return function(*args, **kwargs)


# ---- a graph at one batch size: every size in it is a number ---------------------------------------------------------
def with_fixed_batch(model: fx.GraphModule, batch_size: int) -> Model:
    """Return a traced or integer model at `batch_size`, as if traced with `dynamic_shapes={}`; it shares the parameters.

    Raises ConfigurationError for a batch size that the graph does not hold for: one beyond the limits of its batch, or another than the
    one it was traced with, where that is fixed.
    """
    limits = noted_limits(model.graph)
    if not limits.smallest <= batch_size <= (limits.largest or batch_size):
        because = f"the model slices its batch at a fixed index, and takes from {limits.smallest} to {limits.largest or 'any'} rows"
        remedy = "pass a batch size between these"
        raise ConfigurationError(f"batch_size={batch_size} cannot be used", because=because, remedy=remedy)
    shapes = [node_fact.shape for node in model.graph.find_nodes(op="placeholder") if isinstance(node_fact := fact(node), TensorFact)]
    traced = next((shape[0] for shape in shapes if shape), batch_size)
    if traced != batch_size and not any(isinstance(size, BatchDim) for shape in shapes for size in shape):
        because = f"the model was traced with fixed sizes, and a batch of {traced}"
        remedy = f"leave it out, or trace with an example of {batch_size} rows, or without the option dynamic_shapes={{}}"
        raise ConfigurationError(f"batch_size={batch_size} cannot be used", because=because, remedy=remedy)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in model.graph.nodes:
        node_fact = _fact_at(node, batch_size)
        if isinstance(fact(node), BatchDim) and node.op != "placeholder":
            copies[node] = node_fact
            continue
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node_fact is not None:
            set_fact(copied, node_fact)
    for node in reversed(model.graph.nodes):
        copied = copies[node]
        if isinstance(copied, fx.Node) and node.users and not copied.users and copied.op != "placeholder":
            graph.erase_node(copied)  # only sizes were read of it
    fixed = Model.of(model, graph)
    fixed.recompile()
    return fixed


def _fact_at(node: fx.Node, batch_size: int) -> Any:
    def fixed(value: Any) -> Any:
        if isinstance(value, BatchDim):
            return value.at(batch_size)
        return TensorFact(value.at(batch_size), value.dtype) if isinstance(value, TensorFact) else value

    try:
        return fx.node.map_aggregate(fact(node), fixed)
    except ValueError as error:
        because = f"here {error}"
        remedy = "pass a batch size that this line can divide"
        raise ConfigurationError(f"batch_size={batch_size} cannot be used", node=node, because=because, remedy=remedy) from None
