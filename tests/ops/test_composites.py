"""Composites: operators that are written as calls of others, with grids that are demanded and tied."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation, part
from fxquant.ir.integer import qparams
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract
from tests.shared.contract import compiled, needs_vnni

WIDE_TARGETS = ("bayes", "bayes-e", "nash-e", "nash-m")  # with int16 activations
NARROW_TARGETS = ("bernoulli2", "x86", "qnnpack")


class Head(nn.Module):
    """A linear layer, a layer norm with a clamp behind it, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 6)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(3 * self.last(F.relu(self.norm(self.first(x)))), -1)


def rows(count: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, 12, generator=torch.Generator().manual_seed(seed))


def head() -> Head:
    torch.manual_seed(0)
    return Head().eval()


def roles(graph: fx.GraphModule) -> list[str]:
    return [str(part(node)) for node in graph.graph.nodes if part(node) is not None]


# ---- the contract -------------------------------------------------------------------------------------------------------


# Inside they are the same in both dtypes, and on targets of one arithmetic.
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("dtype", "target"), [*(("int8", target) for target in WIDE_TARGETS), ("int16", "bayes-e"), ("int16", "nash-e")])
def test_composites_hold_the_contract(target: str, dtype: str, tmp_path: Path) -> None:
    prepared, integer = compiled(head(), [rows()], target, fxq.QConfig(fxq.ActivationConfig(dtype)))
    contract.assert_alive(integer, rows())
    contract.assert_validate_is_integer(prepared, integer, rows())
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(rows(),), (rows(1, seed=1),)])
    contract.assert_train_is_validate(prepared, rows())
    contract.assert_gradients_reach_every_parameter(prepared, rows())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", WIDE_TARGETS)
def test_inner_tensors_are_wide_and_the_result_is_what_was_asked_for(target: str) -> None:
    _, integer = compiled(head(), [rows()], target)
    dtypes = {str(part(node)): known.dtype for node in integer.graph.nodes if (known := qparams(node)) and part(node)}
    by_items = target.startswith("nash")
    norm = ("mean", "sub", "mul", "shifted", *(("of_one_magnitude", "add", "rsqrt") if by_items else ()))
    extents = ("amax", "amin") if by_items else ()
    assert dtypes == {
        **{f"layer_norm: {name}": "int16" for name in norm}, **{f"layer_norm: {name}": "int8" for name in extents},
        "layer_norm: scale_channels": "int8", "softmax: amax": "int8", "softmax: sub": "int16", "softmax: exp": "int16",
        "softmax: sum": "int16", "softmax: reciprocal": "int16", "softmax: mul": "int8",
    }  # fmt: skip
    (exponential,) = [qparams(node) for node in integer.graph.nodes if node.name == "softmax_exp"]
    assert exponential is not None
    assert exponential.scale == 2.0**-15


@pytest.mark.nightly
@needs_vnni
@pytest.mark.parametrize("style", ["fast", "qdq"])
def test_every_style_writes_them(style: str, tmp_path: Path) -> None:
    _, integer = compiled(head(), [rows()], "nash-e")
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, opset=21)  # int16 in QuantizeLinear
    report = fxq.verify(integer, path, [rows()])
    assert style == "qdq" or bool(report), str(report)
    if style == "qdq":
        assert isinstance(report, fxq.results.DeviationReport)
        assert all(output.sqnr > 20 for outputs in report.outputs.values() for output in outputs), str(report)


# ---- what they are made of ------------------------------------------------------------------------------------------------


def norms(shape: tuple[int, ...], affine: tuple[bool, bool]) -> nn.Module:
    norm = nn.LayerNorm(shape, elementwise_affine=affine[0], bias=affine[1])
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return norm


SPELLED: dict[str, nn.Module] = {
    "softmax": nn.Softmax(-1),
    "softmax of rows": nn.Softmax(1),
    "log_softmax": nn.LogSoftmax(-1),
    **{
        f"layer_norm of {shape} with {affine}": norms(shape, affine)
        for shape, affine in itertools.product(((12,), (5, 12)), ((True, True), (True, False), (False, False)))
    },
}


@pytest.mark.parametrize("name", SPELLED)
def test_the_parts_together_are_the_float_function(name: str) -> None:
    model = SPELLED[name].eval()
    expanded = fxq.prepare(nn.Sequential(model), rows(4), "bayes-e", until="composite.expand")
    assert len(roles(expanded)) > 3
    for scale in (0.01, 1.0, 30.0):
        torch.testing.assert_close(expanded(scale * rows(4, seed=3)), model(scale * rows(4, seed=3)), atol=1e-5, rtol=1e-4)


def test_parts_are_told_under_the_operator_they_came_from() -> None:
    prepared, integer = compiled(head(), [rows()], "bayes-e")
    for told in (fxq.explain(prepared), fxq.explain(integer)):
        assert "%softmax_exp" in told
        assert "test_composites.py" in told
    lines = {line.split()[0]: line for line in fxq.explain(prepared).splitlines() if line.startswith("%")}
    assert "softmax: exp, on a scale of 3.05176e-05" in lines["%softmax_exp"]
    assert "torch.softmax(3 *" in lines["%softmax_exp"]
    assert "layer_norm: scale_channels" in lines["%norm"]
    assert "holds relu" in lines["%norm"]
    assert "5 operators are integer, none is left in float" in fxq.explain(prepared)
    assert {"softmax_sum", "softmax", "norm_mean"} <= set(fxq.qparams(prepared))


def test_a_difference_is_located_at_the_part() -> None:
    prepared, integer = compiled(head(), [rows()], "bayes-e")
    table = integer.get_submodule("integer.softmax_exp").table
    table[: table.numel() // 2] -= 1
    report = fxq.verify(prepared, integer, [rows()])
    assert not report
    assert report.mismatches > 0
    assert "%softmax_exp" in str(report).split("first")[1], str(report)


def test_a_saved_model_knows_its_parts(tmp_path: Path) -> None:
    prepared, integer = compiled(head(), [rows()], "nash-e")
    for model in (prepared, integer):
        fxq.save(model, tmp_path / "model.fxq")
        loaded = fxq.load(tmp_path / "model.fxq")
        assert roles(loaded) == roles(model) != []
        assert fxq.explain(loaded) == fxq.explain(model)
        assert torch.equal(loaded(rows()), model(rows()))


def test_training_moves_inner_scales_but_not_a_given_one() -> None:
    prepared, _ = compiled(head(), [rows()], "bayes-e")
    before = fxq.qparams(prepared)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    prepared(4 * rows(seed=2)).square().sum().backward()
    after = fxq.qparams(prepared)
    assert after["softmax_exp"] == before["softmax_exp"] == 2.0**-15
    assert after["softmax_sub"] != before["softmax_sub"]


# ---- what stays whole -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", NARROW_TARGETS)
def test_without_int16_they_stay_whole_and_in_float(target: str, tmp_path: Path) -> None:
    prepared, integer = compiled(head(), [rows()], target)
    assert roles(prepared) == []
    assert f"softmax: sub: {target} computes with" in fxq.explain(prepared)
    assert "and it needs int16" in fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, rows())
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [rows()])


def whole(model: nn.Module, example: Any, name: str, qconfig: Any = None) -> str:
    """Why the node of this name stays in float; the graph holds no part of it."""
    prepared = fxq.prepare(model, example, "bayes-e", qconfig, options=fxq.Options(integer_tail=True))
    (node,) = [node for node in prepared.graph.nodes if node.name == name]
    spec = annotation(node)
    assert spec is not None
    assert spec.dtype is None
    assert not [other for other in prepared.graph.nodes if other.name.startswith(f"{name}_") and part(other) is not None]
    return spec.because


class Masked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(12, 12), kind
        self.register_buffer("mask", torch.triu(torch.full((5, 12), -1e9), 1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        if self.kind == "added":
            scores = (scores + self.mask).reshape(-1, 5, 12)
        elif self.kind == "filled":
            scores = scores.masked_fill(self.mask < 0, -torch.inf)
        return torch.log_softmax(scores, -1)


@pytest.mark.parametrize(("kind", "because"), [("added", "holds an attention mask"), ("filled", "%masked_fill is computed in float")])
def test_the_logarithm_of_a_masked_softmax_stays_whole(kind: str, because: str) -> None:
    """It has no values for what a mask hides."""
    assert because in whole(Masked(kind), rows(), "log_softmax")


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "along the dimension": lambda x: F.cosine_similarity(x[:, :1], x, 1),
    "last": lambda x: F.cosine_similarity(x, x[:, :, :1], -1),
    "by a dimension more": lambda x: F.cosine_similarity(x, torch.tensor([1.0, -2.0, 3.0, 4.0]), -1),
    "beside the dimension": lambda x: F.cosine_similarity(x, x[:, :, :1], 1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_similarity_counts_what_is_repeated_along_its_dimension(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return REPEATED[name](x)

    x = torch.rand(8, 3, 4) + 0.5
    prepared, integer = compiled(Model(), [x])
    with torch.no_grad():
        assert float((integer(x) - Model()(x)).abs().max()) < 0.03
        fxq.set_state(prepared, fxq.State.FLOAT)
        assert torch.allclose(prepared(x), Model()(x), atol=1e-5)


class AcrossTheBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.flatten(1), x, x)


def test_what_has_two_sizes_of_the_batch_stays_whole_and_leaves_nothing_behind() -> None:
    example = torch.randn(2, 1, 4)
    assert whole(AcrossTheBatch(), example, "scaled_dot_product_attention") == "more than one of its sizes depends on the batch size"
    assert [node.name for node in fxq.prepare(AcrossTheBatch(), example).graph.nodes if "attention" in node.name] == [
        "scaled_dot_product_attention"
    ]


def test_a_rule_keeps_it_whole_and_one_for_its_result_is_about_the_result_alone() -> None:
    keep = fxq.QConfigMapping().set_object_type(nn.LayerNorm, None)
    assert whole(head(), rows(), "norm", keep) == "the qconfig keeps it in float"
    fixed = fxq.QConfigMapping().set_object_type(torch.softmax, fxq.QConfig(fxq.ActivationConfig("int16", scale=2.0**-15)))
    prepared, _ = compiled(head(), [rows()], "bayes-e", fixed)
    scales = fxq.qparams(prepared)
    assert scales["softmax"] == 2.0**-15
    assert scales["softmax_sum"] != 2.0**-15


def test_a_32_bit_tensor_is_no_operand_and_no_result() -> None:
    wide = fxq.QConfig(fxq.ActivationConfig("int32"))
    assert "no 32-bit output" in whole(head(), rows(), "softmax", fxq.QConfigMapping().set_object_type(torch.softmax, wide))
    assert "32-bit output of %first" in whole(head(), rows(), "norm", fxq.QConfigMapping().set_module_name("first", wide))


# ---- ties, and outputs that are nests ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(12, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, last = self.rnn(x)
        return self.out(steps), last


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
def test_a_recurrence_has_one_grid_for_its_state(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Recurrent().eval(), rows()[:, :3]
    prepared, integer = compiled(model, [example], target)
    contract.assert_validate_is_integer(prepared, integer, example)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(example,), (example[:1],)])
    contract.assert_train_is_validate(prepared, example)
    operators = quantized_operators(prepared)
    states = [operator for name, operator in operators.items() if operator.operator.name == "tanh"]
    assert len(states) == 3
    assert len({id(state.output) for state in states}) == 1
    assert "on the scale that it shares" in fxq.explain(prepared)
    assert "none is left in float" in fxq.explain(prepared)
    for found, expected in zip(integer(example), model(example), strict=True):
        assert (found - expected).abs().max() < 0.05
    weights = [node for node in integer.graph.nodes if node.op == "get_attr" and shape_of_constant(integer, node) == (8, 12)]
    assert len(weights) == 1, "the weight of the inputs is one constant, read at three steps"
    hidden = [node for node in integer.graph.nodes if node.op == "get_attr" and shape_of_constant(integer, node) == (8, 8)]
    assert len(hidden) == 1


@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_a_shared_grid_trains(training: str) -> None:
    """Each step moves the scale that the one before has used."""
    torch.manual_seed(0)
    config = fxq.QConfig(fxq.ActivationConfig("int8", training=training))
    prepared = fxq.prepare(Recurrent().eval(), rows()[:, :3], "nash-e", config)
    fxq.calibrate(prepared, [rows()[:, :3]], show_progress=False)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    steps, last = prepared(2 * rows(seed=4)[:, :3])
    (steps.square().mean() + last.square().mean()).backward()
    assert all(parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()) for parameter in prepared.parameters())


def shape_of_constant(integer: fx.GraphModule, node: fx.Node) -> tuple[int, ...]:
    return tuple(integer.get_buffer(str(node.target)).shape)


# ---- a last part that only moves values ---------------------------------------------------------------------------------------

MOVED_AT_THE_END: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.log((x.unsqueeze(-1) * torch.tensor([0.5, -2.0])).flatten(-2).abs() + 0.5),
    lambda x: 1 / (torch.nn.functional.group_norm(x, 2).square().mean(1) + 0.1),
    lambda x: torch.log(x.abs().prod(1) + 0.3),
)


def test_what_leads_to_a_pole_is_wide_where_it_is_made_and_where_it_is_moved(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [function(x) for function in MOVED_AT_THE_END]

    x = torch.randn(4, 4, 6)
    prepared, integer = compiled(Model(), [x], "bayes-e")
    dtypes = {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}
    assert dtypes["flatten"] == dtypes["mul"] == "int16"
    contract.assert_validate_is_integer(prepared, integer, x)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(x,)])
    for wanted, found in zip(Model()(x), integer(x), strict=True):
        assert 10 * torch.log10(wanted.square().sum() / (wanted - found).square().sum()) > 30
