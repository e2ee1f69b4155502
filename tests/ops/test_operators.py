"""Every call form of every operator of the table: the float function within a stated bound, and the contract E1 to E3 by bits."""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.ir import graph
from fxquant.ir.graph import part as part_of
from fxquant.ir.graph import resolve
from fxquant.ir.integer import qparams
from fxquant.ops import FUNCTIONS, METHODS, MODULES, OPERATORS, Same
from fxquant.ops.core.samples import ATTENDED, COMPOSED, EXACT, HEADS, LIMITED, NORMED, RECURRENT, ROUNDED, SAMPLED
from fxquant.ops.elementwise.table import UNARY
from fxquant.ops.movement.shape import identity
from fxquant.quantization.observers import MinMaxObserver
from tests.shared import contract, declared
from tests.shared.contract import compiled, graph_values
from tests.shared.networks import members

Forward = Callable[..., Any]

FORMATS = (
    ("bayes-e", "int8", "int8"), ("nash-e", "int8", "int8"), ("bayes-e", "int16", "int8"), ("nash-e", "int16", "int16"),
    ("x86", "uint8", "int8"),
)  # fmt: skip


def covering(activation: str = "int8", weight: str = "int8") -> fxq.QConfig:
    """A configuration with which no value of the batches is cut off."""
    return fxq.QConfig(fxq.ActivationConfig(activation, observer=MinMaxObserver), fxq.WeightConfig(weight))


def kept_integer(config: fxq.QConfig) -> fxq.QConfigMapping:
    """The configuration, by rules that name what copies several tensors: it would be in float where it only leaves the model."""
    mapping = fxq.QConfigMapping(default=config)
    for record in OPERATORS.values():
        if record.name in ("cat", "stack", "where", "setitem", "scatter", "index_put", "write", "to_real", "pad"):
            for spelling in (record.function, *record.calls, *record.modules):
                mapping = mapping.set_object_type(spelling, config)
    return mapping


FINE = 1.5  # more for int16, whose step is 2^-15 of the range, as are the rounding of slopes and of weights, and float32's own
SAMPLED_FINE = 600.0  # the same in steps of int16, where positions are rounded
COMPOSED_FINE = 20.0  # and for a composite in int16, each of whose parts is rounded to 16 bits, one of them headroom
HALF_STEP = 0.5
SLOPED = 3.5  # the chip rounds a slope to 7 bits and what it multiplies to the operand's grid, whose step is 3.5 of the clamped result's
CHIP_FINE = 7  # times these on bayes-e: each requantization by 16 and 15 bits loses two more steps (CHIP.md, section 18)
WIDE_INSIDE = (COMPOSED, NORMED, ATTENDED, HEADS)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Sample(NamedTuple):
    """A small model around one call, which `build` makes; its inputs are normal, or uniform over `domain`.

    bound  the largest distance from the float function, in steps of the result's scale, for all elements but a `share` of them
    """

    operator: str
    bound: float
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[[], nn.Module]
    domain: tuple[float, float] | None = None
    share: float = 0.0


@torch.no_grad()
def put_on_grid(weight: Tensor) -> None:
    """Multiples of 1/128 of which the largest of each channel, of either dimension, is 127/128: quantizing changes nothing."""
    weight.copy_(torch.randint(-127, 128, weight.shape) / 128)
    weight.flatten(1)[:, 0] = 127 / 128
    weight[0].reshape(weight.shape[1], -1)[:, 0] = 127 / 128


def model_of(sample: Sample) -> nn.Module:
    """The model of a sample: its weights are on their grid, and what norms multiply by and add is not trivial."""
    torch.manual_seed(0)
    model = sample.build().eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, NORMS):
                nn.init.uniform_(parameter, *((0.5, 1.5) if name == "weight" else (-0.5, 0.5)))
            elif parameter.dim() > 1:
                put_on_grid(parameter)
            else:
                nn.init.normal_(parameter, std=0.1)
        if isinstance(getattr(module, "running_var", None), Tensor):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


def within(call: declared.Call) -> float:
    """Return the bound of a sample on a record: its own, or that of its kind of operators."""
    if call.sample.within is not None:
        return call.sample.within
    if call.operator.name in UNARY:
        return LIMITED
    return COMPOSED if call.operator.expand is not None else EXACT if isinstance(call.operator.demand, Same) else ROUNDED


def sample_of(call: declared.Call) -> Sample:
    return Sample(call.operator.name, within(call), call.shapes, call.build, call.sample.over, call.sample.share)


# Of a sample, the first call form is held to the contract; of the others only what they become.
CALLS = list(declared.calls())
FIRST_CALLS = [call for call in CALLS if declared.is_first(call)]

# int16: see FINE. uint8: since its zero point is an integer, one end of its interval lies up to half a step inside the values.
EXTRA = {"int16": FINE, "uint8": 0.5}
NAMED = [
    (f"{call.operator.name}: {call.form if call.sample.text else 'declared'}-{index}", sample_of(call))
    for index, call in enumerate(FIRST_CALLS)
]
EVERY = [sample for _, sample in NAMED]
OF_ITS_OPERATOR = {sample.operator: sample for sample in reversed(EVERY)}  # the first one
BY_OPERATOR = {sample.operator: sample for sample in EVERY if sample.operator not in (*UNARY, "deformed_taps")}  # the last one, no tables
PACKED = 10
FIRST = [(name, sample) for name, sample in NAMED if OF_ITS_OPERATOR[sample.operator] is sample]
FURTHER = [(name, sample) for name, sample in NAMED if OF_ITS_OPERATOR[sample.operator] is not sample]


def turn(sample: Sample) -> int:
    """Return the index (0 to 3) of a sample's format: it depends on the sample alone, so that a new sample changes no other's index."""
    return zlib.crc32(repr((sample.shapes, sample.operator)).encode()) % 4


def quick_format(sample: Sample) -> tuple[str, str, str]:
    """The symmetric format in which `make quick` has an operator."""
    return FORMATS[turn(sample)]


def packed(named: Sequence[tuple[str, Sample]], format: tuple[str, str, str], marks: Sequence[pytest.MarkDecorator] = ()) -> Iterator[Any]:
    """Rows of several samples in one format."""
    for start in range(0, len(named), PACKED):
        names, samples = zip(*named[start : start + PACKED], strict=True)
        yield pytest.param(list(samples), *format, id="-".join([f"{names[0]} to {names[-1]}", *format]), marks=marks)


def quick(format: tuple[str, str, str]) -> list[tuple[str, Sample]]:
    """Return the first samples of the operators whose quick format is `format`; unary functions, which become tables, are together."""
    return sorted((named for named in FIRST if quick_format(named[1]) == format), key=lambda named: named[1].operator in UNARY)


def others(format: tuple[str, str, str]) -> list[tuple[str, Sample]]:
    """The samples of the opposite quick format; on x86 all, but for composites, which stay in float there."""
    if format[1] == "uint8":
        return [(name, sample) for name, sample in FIRST if sample.bound not in WIDE_INSIDE]
    opposite = FORMATS[3 - FORMATS.index(format)]
    return [(name, sample) for name, sample in FIRST if quick_format(sample) == opposite]


# After canonical.rewrite an operator is the same however it is spelled: one sample of it is held to the contract in three
# formats, both arithmetics and all widths among them; the others, with arguments and operands of their own, in one format.
# tests/ops/test_operator_oracle.py holds every operator to the oracle in each format.
ROWS = [
    *(row for format in FORMATS[:4] for row in packed(quick(format), format, [pytest.mark.quick])),
    *(row for format in FORMATS for row in packed(others(format), format, [pytest.mark.nightly])),
    *(
        row
        for index, format in enumerate(FORMATS[:4])
        for row in packed([named for named in FURTHER if turn(named[1]) == index], format, [pytest.mark.nightly] if index else [])
    ),
]


@members(lambda samples: dict(models=nn.ModuleList(map(model_of, samples)), counts=[len(sample.shapes) for sample in samples]))
def Pack(self, *inputs: Tensor) -> Any:
    """The models of several samples, each with inputs of its own, as one model."""
    left = iter(inputs)
    results = [model(*itertools.islice(left, count)) for model, count in zip(self.models, self.counts, strict=True)]
    return tuple(results)


def inputs_of(sample: Sample, count: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Of different ranges, so that no two inputs share a scale by accident."""
    generator = torch.Generator().manual_seed(seed)
    if sample.domain is not None:
        low, high = sample.domain
        return tuple(low + (high - low) * torch.rand(count, *shape, generator=generator) for shape in sample.shapes)
    return tuple(torch.randn(count, *shape, generator=generator) * (1 + 0.7 * index) for index, shape in enumerate(sample.shapes))


def real_of(integer: fx.GraphModule, values: dict[str, Tensor], name: str) -> Tensor:
    grid = qparams(next(node for node in integer.graph.nodes if node.name == name))
    result: Tensor = (values[name].float() - grid.zero_point) * grid.scale
    return result


# ---- the table is complete ----------------------------------------------------------------------------------------------
UNSAMPLED = {
    **{f"loop_{mark}": "recurrent layers are written in it" for mark in ("item", "state", "carry", "last", "stack")},
    "quantize": "every model has it",
    "dequantize": "every model has it",
    "requantize": "passes insert it",
    "finely": "it is of float values, in front of a mask",
    "kept": "a mask that is computed in float",
    "added": "a mask that is computed in float",
    "dynamic_linear": "a QConfig asks for it",
    "of_one_magnitude": "a part of norms, on targets that bring items to one magnitude",
    "bounded_inverse": "a part of norms, on targets that bring items to one magnitude",
}


def test_every_operator_has_a_sample() -> None:
    assert {record.name for record in OPERATORS.values()} - {call.operator.name for call in CALLS} == set(UNSAMPLED)


def test_every_registered_call_form_is_in_a_sample() -> None:
    forms = set[Any]().union(*map(declared.forms_written, CALLS))
    canonical = {function for function in FUNCTIONS if function.__module__.startswith("fxquant.ops.")}
    assert not ((set(FUNCTIONS) - canonical) | set(METHODS) | set(MODULES)) - forms


def meaning(value: Any) -> Any:
    """Return the calls that compute a node, without copies: functions and arguments, down to the shapes of inputs and parameters."""
    if isinstance(value, list | tuple):
        return [meaning(each) for each in value]
    if not isinstance(value, fx.Node):
        return value
    if value.op in ("placeholder", "get_attr"):
        return value.op, str(graph.fact(value))
    return meaning(value.args[0]) if value.target is identity else (str(value.target), meaning(value.args))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(4))
def test_every_call_form_becomes_its_operator_with_the_arguments_of_the_sample(part: int) -> None:
    calls = [call for call in CALLS if zlib.crc32(call.operator.name.encode()) % 4 == part]
    samples = [sample_of(call) for call in calls]
    inputs = tuple(x for sample in samples for x in inputs_of(sample, 3))
    traced = fxq.prepare(Pack(samples).eval(), inputs, until="canonical.rewrite")
    results = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    first: dict[int, Any] = {}
    for call, result in zip(calls, results, strict=True):
        if call.sample.text:
            assert first.setdefault(id(call.sample), meaning(result)) == meaning(result), call.form
            continue
        record = call.operator
        node = result if result.target is record.function else next(n for n in result.all_input_nodes if n.target is record.function)
        batches_given = {
            key: value for key, value in call.sample.arguments.items() if not isinstance(value, tuple) or key not in record.operands
        }
        actual = record.arguments(node)
        assert {key: actual[key] for key in batches_given} == batches_given, call
        assert sum(isinstance(value, fx.Node) and value.op != "get_attr" for value in actual.values()) == len(call.shapes), call


# ---- meaning ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("samples", "target", "activation", "weight"), ROWS)
def test_a_spelling_means_the_float_function_and_holds_the_contract(
    samples: list[Sample], target: str, activation: str, weight: str, tmp_path: Path
) -> None:
    model = Pack(samples).eval()
    inputs, others = (tuple(x for sample in samples for x in inputs_of(sample, *size)) for size in ((5, 0), (1, 1)))
    batches = [tuple(factor * x for x in inputs) for factor in (1.1, 0.9)]  # so that nothing saturates
    prepared, integer = compiled(model, batches, target, kept_integer(covering(activation, weight)))
    assert_become_their_operators(samples, prepared)
    contract.assert_alive(integer, *inputs)
    assert_float_function_within_bound(samples, model, integer, inputs, activation)
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [inputs, others])
    contract.assert_train_is_validate(prepared, *inputs)
    if list(prepared.parameters()):
        contract.assert_gradients_reach_every_parameter(prepared, *inputs)


def assert_become_their_operators(samples: list[Sample], prepared: fx.GraphModule) -> None:
    """Each is there, or its composite's parts are, and nothing stays in float."""
    assert "none is left in float" in fxq.explain(prepared), fxq.explain(prepared)
    for index, sample in enumerate(samples):
        inside = [node for node in prepared.graph.nodes if graph.module_path(node).split(".")[:2] == ["models", str(index)]]
        wholes = {str(part.composite) for node in inside if (part := part_of(node)) is not None}
        operators = {resolve(prepared, str(node.target)).operator.name for node in inside if node.op == "call_module"}
        # Several functions of one tensor are one; an operator that breaks a limit is written as another one, under its own name.
        assert sample.operator in {name.split(" in ")[0] for name in wholes} | operators or "curve" in operators, sample


def assert_float_function_within_bound(
    samples: list[Sample], model: nn.Module, integer: fx.GraphModule, inputs: tuple[Tensor, ...], activation: str = "int8"
) -> None:
    """On inputs that lie on their grid, the integer model is as near to the float model as the rows say."""
    placeholders = [node for node in integer.graph.nodes if node.op == "placeholder"]
    values, used = graph_values(integer, *inputs), {node.name: node for node in integer.graph.nodes}
    on_grid = [
        real_of(integer, values, f"{p.name}_quantize") if f"{p.name}_quantize" in used else batches_given
        for p, batches_given in zip(placeholders, inputs, strict=True)
    ]
    with torch.no_grad():
        actual, expected = (contract.flat(form(*on_grid)) for form in (integer, model))
    results = next(node for node in integer.graph.nodes if node.op == "output").all_input_nodes
    for sample, one, other, result in zip(samples, actual, expected, results, strict=True):
        assert one.shape == other.shape
        if sample.bound == EXACT or not one.is_floating_point():
            assert float((one != other).double().mean()) <= sample.share, (sample, float((one != other).double().mean()))
            continue
        grid = qparams(result.all_input_nodes[0])
        assert grid is not None
        fine = SAMPLED_FINE if sample.bound == SAMPLED else COMPOSED_FINE if sample.bound in WIDE_INSIDE else FINE
        sampled = sample.bound
        if integer.meta["target"].name == "bayes-e":
            fine = CHIP_FINE * (COMPOSED_FINE if sample.bound == RECURRENT else fine)
            if sample.operator == "minimum":  # it is found on the larger scale of the two, which rounds the other one (CHIP.md, section 12)
                sampled += HALF_STEP
            if sample.operator == "prelu" and activation == "int8":
                sampled += SLOPED
            if sample.operator.startswith("conv_transpose") and activation == "int16":
                sampled += 256 * HALF_STEP  # it is rounded to 8 bits first (CHIP.md, section 18)
            if sample.operator == "rms_norm" and activation == "int16":
                sampled += 100  # its reciprocal root is six tables of 64 entries (CHIP.md, section 13)
        bound = sampled + {**EXTRA, "int16": fine}.get(activation, 0)
        far = (one.double() - other.double()).abs() / grid.scale
        assert float((far > bound).double().mean()) <= sample.share, (sample, float(far.max()), float((far > bound).double().mean()))
