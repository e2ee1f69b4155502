"""A case is run block by block and held to the contract; what fails, or is refused, is said with the block it happened in.

The functions of the contract are printed with a program that fails, so they use nothing but the names that `build.IMPORTS` has.
"""

import copy
import inspect
import linecache
import logging
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

import fxquant as fxq
from benchmarks.fuzz import build
from benchmarks.fuzz.generate import Case
from benchmarks.shared import at_most
from fxquant.backends.onnx.runtime import OnnxModel
from fxquant.errors import FxQuantError
from fxquant.ir.graph import part
from fxquant.ir.integer import origin
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives import PRIMITIVES

# ---- the contract: printed as it stands ---------------------------------------------------------------------------------------


def bits(result):
    """Shapes and bytes of all tensors: -0.0 is not 0.0. All NaN are equal; a value that is not a tensor is returned itself."""
    tensors = [y.double() if isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16 else y for y in tree_leaves(result)]
    tensors = [torch.where(y.isnan(), torch.nan, y) if isinstance(y, torch.Tensor) and y.is_floating_point() else y for y in tensors]
    return [(y.shape, y.dtype, y.numpy().tobytes()) if isinstance(y, torch.Tensor) else y for y in tensors]


def answer(model, batch):
    """The bits of a model's results; its error where it refuses the batch."""
    try:
        with torch.no_grad():
            return bits(model(*[x.clone() for x in batch]))
    except fxq.FxQuantError as error:
        return type(error)


def integers_of(integer, batch):
    """The integers of every quantized tensor of the integer graph, by the name of its node."""
    return next(fxq.inspect.record(integer, [batch]))


def is_float_function(node):
    """Whether a node calls a function that is not a primitive."""
    return node.op == "call_function" and node.target not in PRIMITIVES


def validate_is_integer(model, prepared, integer, batches):
    """E2: the bytes of the results."""
    for batch in batches:
        assert answer(prepared, batch) == answer(integer, batch)


def every_tensor_is_integer(model, prepared, integer, batches):
    """E2: the integers of every tensor in between."""
    report = fxq.verify(prepared, integer, batches, show_progress=False)
    assert report.mismatches == 0, report


def wild_inputs(model, prepared, integer, batches):
    """E2 of inputs beyond everything that was observed; refused by both, or the same bits."""
    for factor in (1e3, 1e30, float("inf"), float("nan"), -0.0):
        wild = [x * factor for x in batches[0]]
        try:
            model(*wild)
        except RuntimeError:  # PyTorch refuses them, as a loss refuses a value that is not a probability
            continue
        assert answer(prepared, wild) == answer(integer, wild), factor


def accumulators_fit(model, prepared, integer, batches):
    """E4: no accumulator holds a value beyond the bits that were proved for its operator."""
    proved = {layer.name: layer.accumulator_bits for layer in fxq.inspect.layers(integer)}
    # What `centre` gives is an operand's integers, and no sum.
    allowed = {node.name: proved.get(origin(node)) for node in integer.graph.nodes if getattr(node.target, "__name__", "") != "centre"}
    for values in fxq.inspect.record(integer, batches, "accumulators"):
        for name, value in values.items():
            largest, width = int(value.abs().max()), allowed.get(name)
            assert not width or largest < 2 ** (width - 1), f"%{name} holds {largest}, and {width} bits were proved"


def integer_is_onnx(model, prepared, integer, batches, style="exact"):
    """E1: the integers of every tensor in every runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = fxq.export_onnx(integer, Path(folder) / "model.onnx", style=style)
        report = fxq.verify(integer, path, batches, show_progress=False)
        assert report.mismatches == 0, report


def results_of_onnx(model, prepared, integer, batches, style="exact"):
    """E1: the bytes of the file's results, where no float operator is in between."""
    if any(node.op in ("call_module", "call_method") or is_float_function(node) for node in integer.graph.nodes):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = OnnxModel(fxq.export_onnx(integer, Path(folder) / "model.onnx", style=style))
        for runtime in ("onnxruntime", "onnxruntime, no optimisation"):
            run = file.runner(runtime, [])
            for batch in batches:
                outputs = run(dict(zip(file.input_names, batch, strict=True)))
                results = answer(integer, batch)
                if isinstance(results, list):  # a file has no numbers and no None
                    results = [one for one in results if isinstance(one, tuple)]
                assert bits([outputs[name] for name in file.output_names]) == results, runtime


def fast_is_integer(model, prepared, integer, batches):
    """E1 of style "fast"."""
    integer_is_onnx(model, prepared, integer, batches, "fast")
    results_of_onnx(model, prepared, integer, batches, "fast")


def integers_in_and_out(model, prepared, integer, batches, style="exact"):
    """The file with io="integer" takes and returns the integers that its metadata says."""
    with tempfile.TemporaryDirectory() as folder:
        path = fxq.export_onnx(integer, Path(folder) / "model.onnx", io="integer", style=style)
        file, facts = OnnxModel(path), fxq.export.onnx_metadata(path)
        run = file.runner("onnxruntime", [])
        for batch in batches:
            values = integers_of(integer, batch)

            def stored(entry, real, values=values):
                name = entry.get("tensor")
                if name is None or entry["dtype"] == "float":
                    return real
                inside = (name, f"{name}_quantize", name.removesuffix("_output"))  # an input; what is stored in another way than inside
                integers = next(values[node] for node in inside if node in values)
                kinds = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}
                moved = 0 if integers.dtype == torch.uint8 else file.tensors[name].get("zero_point", 0)
                return (integers.int() + moved).to(kinds[entry["dtype"]])

            outputs = run({entry["name"]: stored(entry, x) for entry, x in zip(facts["inputs"], batch, strict=True)})
            for entry in facts["outputs"]:
                if "tensor" in entry and entry["dtype"] != "float":
                    assert torch.equal(outputs[entry["name"]], stored(entry, None)), entry


def fast_integers_in_and_out(model, prepared, integer, batches):
    """The file with io="integer" in style "fast" takes and returns the integers that its metadata says."""
    integers_in_and_out(model, prepared, integer, batches, "fast")


def qdq_runs(model, prepared, integer, batches):
    """Style "qdq" is written, loads, runs and is measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = fxq.export_onnx(integer, Path(folder) / "model.onnx", style="qdq")
        report = fxq.verify(integer, path, batches, show_progress=False)
        assert report.outputs


def saved_is_equal(model, prepared, integer, batches):
    """Saving and loading keeps the bits of both forms, and the bytes of what is saved again."""
    with tempfile.TemporaryDirectory() as folder:
        for form in (prepared, integer):
            first = fxq.save(form, Path(folder) / "first.fxq")
            loaded = fxq.load(first)
            assert fxq.save(loaded, Path(folder) / "again.fxq").read_bytes() == first.read_bytes()
            assert answer(loaded, batches[0]) == answer(form, batches[0])


def copied_is_equal(model, prepared, integer, batches):
    """So does a deep copy; and a copy of the prepared model converts to the same integer model."""
    copied = copy.deepcopy(prepared)
    assert answer(copied, batches[0]) == answer(prepared, batches[0])
    assert answer(fxq.convert(copied), batches[0]) == answer(integer, batches[0])
    assert answer(copy.deepcopy(integer), batches[0]) == answer(integer, batches[0])


class AllInDouble(torch.overrides.TorchFunctionMode):
    """Every conversion to float32 in a model becomes one to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        wider = {torch.float32: torch.float64}
        args = [wider.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        return function(*args, **{name: wider.get(x, x) if isinstance(x, torch.dtype) else x for name, x in (kwargs or {}).items()})


def float_is_the_model(model, prepared, integer, batches):
    """State FLOAT is the float model, up to the rounding that folding a batch norm moves, and the model's own. For models not trained."""
    fxq.set_state(prepared, fxq.State.FLOAT)
    try:
        with torch.no_grad():
            actual, expected = (tree_leaves(form(*[x.clone() for x in batches[0]])) for form in (prepared, model))
            try:
                with AllInDouble():
                    exact = tree_leaves(copy.deepcopy(model).double()(*[x.double() for x in batches[0]]))
            except (RuntimeError, ValueError):  # a constant of its own is float32, or what a recurrent layer reads
                exact = expected
        for one, other, right in zip(actual, expected, exact, strict=True):
            own = float((other.double() - right.double()).abs().nan_to_num(0, 0, 0).max())
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()) + 4 * own, equal_nan=True)
    finally:
        fxq.set_state(prepared, fxq.State.VALIDATE)


def train_is_validate(model, prepared, integer, batches):
    """E3: TRAIN, in train mode, with frozen statistics and without dropout."""
    expected = [answer(prepared, batch) for batch in batches]
    fxq.freeze(prepared)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    operators = quantized_operators(prepared).values()
    for module in prepared.modules():
        if module is not prepared and (module not in operators or module.operator.name == "dropout"):
            module.eval()  # float operators, and dropout, which is random by intent
    results = [tree_leaves(prepared(*[x.clone() for x in batch])) for batch in batches]
    assert [bits([y.detach() if isinstance(y, torch.Tensor) else y for y in result]) for result in results] == expected


Check = Callable[..., None]
ALWAYS = ("validate_is_integer", "every_tensor_is_integer", "accumulators_fit", "integer_is_onnx")
FAST = ("fast_is_integer", "fast_integers_in_and_out")
SOMETIMES = (
    "results_of_onnx", "wild_inputs", "integers_in_and_out", "qdq_runs", *FAST, "saved_is_equal", "copied_is_equal", "float_is_the_model"
)  # fmt: skip
WRITING = ("integer_is_onnx", "results_of_onnx", "integers_in_and_out", "qdq_runs", *FAST)  # an ONNX file
UNTRAINED = ("float_is_the_model",)  # of models that were not trained
LAST = ("train_is_validate",)  # it leaves the model frozen
CHECKS: dict[str, Check] = {name: globals()[name] for name in (*ALWAYS, *SOMETIMES, *LAST)}
PRINTED: tuple[Any, ...] = (bits, answer, integers_of, is_float_function, AllInDouble, *CHECKS.values())
SOURCES = {function: inspect.getsource(function).rstrip() for function in PRINTED}


def block(name: str) -> build.Block:
    """The check as statements: the functions it uses, and its call."""
    used: list[Any] = []

    def take(function: Any) -> None:
        for other in SOURCES:
            if other is not function and other not in used and re.search(rf"\b{other.__name__}\(", SOURCES[function]):
                take(other)
        used.append(function)

    take(CHECKS[name])
    sources = "\n\n\n".join(SOURCES[function] for function in used)
    return name, f"\n\n{sources}\n\n\n{name}(model, prepared, integer, batches)"


# ---- running -------------------------------------------------------------------------------------------------------------------

SECONDS = 120  # that a case may take
PASSED, REFUSED, FAILED, INVALID = "passed", "refused", "FAILED", "invalid"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. `block` is where it ended, `reason` the kind of error there, `text` its message.

    program    as far as it was run, without checks that passed: of a failure, a program that fails
    operators  the operators of the table that became integer
    floats     how many operators stayed in float
    ratios     of signal to quantization noise, in dB, of every output
    """

    kind: str
    block: str = ""
    reason: str = ""
    text: str = ""
    program: str = ""
    operators: tuple[str, ...] = ()
    floats: int = 0
    ratios: tuple[float, ...] = ()

    @property
    def like(self) -> tuple[str, str]:
        """Two failures with the same are taken for one."""
        return self.block, self.reason


def run(case: Case) -> Outcome:
    """Run the case. Every error that is not an FxQuantError is a failure, as is a check that does not hold."""
    try:
        parts = build.blocks(case)
    except Exception as error:
        return Outcome(INVALID, "model", type(error).__name__, str(error))
    parts += [block(name) for name in case.checks]
    scope: dict[str, Any] = {"__name__": "__fuzz__"}
    exec(build.imports(), scope)
    finished: list[build.Block] = []
    facts: dict[str, Any] = {}
    with _quiet(), at_most(SECONDS):
        for name, text in parts:
            if name in WRITING and facts["floats"] and not case.float_onnx:
                continue
            try:
                _execute(name, text, case.seed, scope)
                if name == "model":
                    _execute(name, "floats = [model(*[x.clone() for x in batch]) for batch in batches]", case.seed, scope)
                if name == "convert":
                    facts = _facts(scope, case)
            except BaseException as error:
                if name == "train" and _float_model_raises(error, scope):
                    return Outcome(INVALID, name, type(error).__name__, str(error))
                return _ended(name, error, build.program([*finished, (name, text)]), facts)
            if name not in CHECKS:
                finished.append((name, text))
    return Outcome(PASSED, **facts)


def _execute(name: str, text: str, seed: int, scope: dict[str, Any]) -> None:
    file = f"<fuzz {seed} {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    try:
        exec(compile(text, file, "exec"), scope)
    finally:
        linecache.cache.pop(file, None)


def _float_model_raises(error: BaseException, scope: dict[str, Any]) -> bool:
    """Whether the float model cannot be trained for the same reason, as one with an operator that PyTorch has no derivative of."""
    if not isinstance(error, RuntimeError):
        return False
    model, batches = copy.deepcopy(scope["model"]), scope["batches"]
    try:
        loss = sum(y.square().mean() for y in tree_leaves([model(*[x.clone() for x in batch]) for batch in batches]))
        loss.backward()
    except RuntimeError as floats:
        return str(floats) == str(error)
    return False


def _ended(name: str, error: BaseException, program: str, facts: dict[str, Any]) -> Outcome:
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = str(error) if str(error) else _line(error)
    if name == "model":
        return Outcome(INVALID, name, type(error).__name__, text)
    if isinstance(error, FxQuantError) and type(error).__name__ != "StageViolation":
        return Outcome(REFUSED, name, type(error).__name__, text, program, **facts)
    return Outcome(FAILED, name, _reason(error), text, program, **facts)


def _reason(error: BaseException) -> str:
    """The kind of an error, with the innermost function of fxquant in which it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/fuzz/check.py" not in frame.filename]
    ours = [frame for frame in frames if _is_ours(frame.filename)]
    if (isinstance(error, AssertionError) and frames[-1].filename.startswith("<fuzz")) or not ours:
        return type(error).__name__
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}"


def _is_ours(file: str) -> bool:
    return any(f"/{folder}/" in file for folder in ("fxquant", "passes", "backends")) and "site-packages" not in file


def _line(error: BaseException) -> str:
    return str(traceback.extract_tb(error.__traceback__)[-1].line)


def _is_shifted(prepared: fx.GraphModule, node: fx.Node) -> bool:
    module = prepared.get_submodule(str(node.target)) if node.op == "call_module" else None
    return getattr(getattr(module, "operator", None), "name", "") == "shifted"


def becomes_integer(case: Case) -> set[str]:
    """The operators of a case that are integer in its prepared model; none where it is refused, or no model."""
    scope: dict[str, Any] = {"__name__": "__fuzz__"}
    exec(build.imports(), scope)
    with _quiet(), at_most(SECONDS):
        try:
            for name, text in build.blocks(case)[:2]:
                _execute(name, text, case.seed, scope)
        except (FxQuantError, RuntimeError, ValueError, TypeError, IndexError):
            return set()
    return _integer_operators(scope["prepared"])


def _in_curve(node: fx.Node) -> Iterator[str]:
    """The names in the nest of a curve: operators that are one table with others."""
    waiting: list[Any] = list(node.args[1:])
    while waiting:
        each = waiting.pop()
        if isinstance(each, tuple | list):
            waiting += each
        elif isinstance(each, str):
            yield each


def _integer_operators(prepared: fx.GraphModule) -> set[str]:
    operators = {operator.operator.name for operator in quantized_operators(prepared).values()}
    operators |= {str(node.args[1]) for node in prepared.graph.nodes if _is_shifted(prepared, node)}  # a function with a number before it
    operators |= {name for node in prepared.graph.nodes for name in _in_curve(node)}
    return operators | {node_part.composite for node in prepared.graph.nodes if (node_part := part(node)) is not None}


def _facts(scope: dict[str, Any], case: Case) -> dict[str, Any]:
    """Return facts of a converted model: operators that became integer, and how near to the float model it is."""
    operators = _integer_operators(scope["prepared"])
    ratios: list[float] = []
    if case.optimizer is None:
        with torch.no_grad():
            outputs = tree_leaves(scope["integer"](*[x.clone() for x in scope["batches"][0]]))
        for one, other in zip(tree_leaves(scope["floats"][0]), outputs, strict=True):
            noise, signal = float((one - other).double().square().sum()), float(one.double().square().sum())
            ratios.append(10 * float(torch.log10(torch.tensor(signal / noise))) if noise and signal else float("inf"))
    floats = [n for n in scope["integer"].graph.nodes if n.op in ("call_module", "call_method") or is_float_function(n)]
    return {"operators": tuple(sorted(operators)), "floats": len(floats), "ratios": tuple(ratios)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, no log lines and no warnings; afterwards the global generator has its former state."""
    logger = logging.getLogger("fxquant")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
