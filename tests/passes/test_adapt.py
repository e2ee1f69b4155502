"""Operators that break a limit become others that keep it and mean the same: which operators, how exactly, and with which message."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends import TARGETS
from fxquant.ir.loops import bodies
from fxquant.ops import OPERATORS
from fxquant.remedies import REMEDIES
from tests.analysis.test_check import FAMILIES, ROWS, Row, check
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, members

# What is broken where no remedy keeps the meaning in this case: that row's operator runs on the host.
HOSTED = {
    ("bernoulli2", "add", "rank"), ("bernoulli2", "amax", "reduced size"), ("bernoulli2", "sum", "reduced dimension"),
    ("bayes", "conv2d", "output channels"), ("bayes", "linear", "features"), ("bayes", "avg_pool2d", "padding"),
    ("bayes", "avg_pool2d", "kernel"), ("bayes", "adaptive_avg_pool2d", "kernel"), ("bayes", "max_pool2d", "kernel"),
    ("bernoulli2", "", "bounds"), ("bernoulli2", "avg_pool2d", "count_include_pad"), ("bernoulli2", "pad", "padding mode"),
    *(("bayes", name, "number of operands that are broadcast") for name in ("add", "sub", "mul")),
}  # fmt: skip
MENDED = [row for row in ROWS if (row.operator or "*", row.measure) in REMEDIES and (row.family, row.operator, row.measure) not in HOSTED]


def test_every_remedy_is_about_what_exists() -> None:
    names = {record.name for record in OPERATORS.values()} | {"*"}
    limits = {(name, limit.measure) for target in TARGETS.values() for limit in target.limits for name in limit.operators or ("*",)}
    assert {operator for operator, _ in REMEDIES} <= names
    measures = {measure for _, measure in limits}
    assert {measure for _, measure in REMEDIES} <= measures
    assert len(MENDED) > 40


def adapted(row: Row) -> fxq.results.Findings:
    return check(row.model(row.outside), FAMILIES[row.family][0], options=fxq.Options(adapt=True))


def test_what_breaks_a_limit_keeps_it_once_it_is_adapted() -> None:
    assert [(row.family, row.operator, row.measure, str(result)) for row in MENDED if len(result := adapted(row))] == []


def test_what_breaks_a_limit_computes_the_same_once_it_is_adapted() -> None:
    for row in MENDED:
        target, one = FAMILIES[row.family][0], row.model(row.outside)
        if sum(torch.Size(shape).numel() for shape in one.shapes) <= 2**18:
            inputs = tuple(map(torch.randn, one.shapes))
            prepared = fxq.prepare(one.model, inputs, target, options=fxq.Options(adapt=True, dynamic_shapes={}))
            fxq.set_state(prepared, fxq.State.FLOAT)
            with torch.no_grad():
                for mine, theirs in zip(contract.flat(prepared(*inputs)), contract.flat(one.model(*inputs)), strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=f"{row.operator}: {row.measure}")


def test_a_linear_layer_of_many_input_features_is_split_and_of_many_output_features_runs_on_the_host() -> None:
    model, x = nn.Linear(8193, 1), torch.randn(4, 8193)
    prepared = fxq.prepare(model, x, "bayes-e", options=fxq.Options(adapt=True))
    assert "linear split by features, since its features is 8193" in fxq.explain(prepared)
    fxq.set_state(prepared, fxq.State.FLOAT)
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-4)
    (finding,) = fxq.check(nn.Linear(1, 8193), torch.randn(4, 1), "bayes-e", options=fxq.Options(adapt=True))
    assert finding.kind == "host"


@pytest.mark.parametrize("place", range(4))
def test_what_no_remedy_mends_runs_on_the_host(place: int) -> None:
    rest = [row for row in ROWS if row not in MENDED and row.measure not in ("batch", "bytes")]
    for row in rest[place::24]:
        result = adapted(row)
        assert result
        assert {finding.kind for finding in result} <= {"host"}, str(result)


# ---- the contract ---------------------------------------------------------------------------------------------------
def test_what_a_composite_demands_of_a_pool_is_on_the_grid_of_the_pool_in_two_dimensions() -> None:
    model, x = Network(lambda self, x: F.lp_pool1d(x, 2.0, 3, 2)).eval(), torch.randn(5, 3, 9)
    prepared, integer = compiled(model, [x], "bayes-e", fxq.QConfig(fxq.ActivationConfig("int16")))
    assert len({float(fxq.qparams(prepared)[name]) for name in ("lp_pool1d_avg_pool1d_avg_pool2d", "lp_pool1d_avg_pool1d")}) == 1  # type: ignore[arg-type]
    contract.assert_validate_is_integer(prepared, integer, x)


@members(lambda: dict(
    stem=nn.Conv2d(2, 6, 9, padding=4, bias=False), norm=nn.BatchNorm2d(6), wide=nn.Conv2d(6, 6, 3, padding=3, dilation=3),
    shift=nn.Parameter(torch.randn(6, 1, 1)), gain=nn.Parameter(torch.rand(1, 6, 1, 1) + 0.5), hidden=nn.Linear(24, 8),
    head=nn.Linear(8, 3),
))  # fmt: skip
def Camera(self, x: Tensor) -> Tensor:
    """For bernoulli2: a large kernel, a dilation of 3, constants, a division, a pooling too large, linear layers."""
    x = F.relu6(self.norm(self.stem(x)))
    x = F.relu(self.wide(x) + x)
    x = (self.shift - x) * self.gain / 3
    x = F.max_pool2d(x, (1, 64), (1, 2))
    x = F.avg_pool2d(x, (8, 1)) + F.avg_pool2d(x, (16, 8), 1).mean((2, 3), keepdim=True)
    return self.head(F.relu(self.hidden(F.max_pool2d(x, (1, 4)).flatten(1))))


@members(lambda: dict(conv=nn.Conv2d(2, 4, 3, padding=2, dilation=2), up=nn.ConvTranspose2d(4, 3, 2, stride=2), head=nn.Linear(8, 3)))
def Wide(self, x: Tensor) -> Tensor:
    """For bayes-e: int16 where it has 8 bits, a dilated int16 result, a mean that counts what is there, reflection."""
    x = F.pad(F.interpolate(self.conv(x), scale_factor=2), (1, 1, 1, 1), "reflect")
    x = F.avg_pool2d(self.up(x), 3, 2, 1, count_include_pad=False)
    return self.head(torch.amax(torch.cat([x[..., :8]] * 25, 1), 1))


@members(lambda: dict(up=nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), pool=nn.AvgPool1d(3, 2, 1)))
def Long(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """For nash-e: layers of one dimension, and reductions of several."""
    x = self.pool(F.relu(self.up(x)))
    images = F.gelu(x.reshape(-1, 4, 4, 4), approximate="tanh")
    return images.mean((2, 3)), images.sum((1, 3))


INT16 = fxq.QConfig(output=fxq.ActivationConfig("int16"))
WHOLE = {"bernoulli2": (Camera, (4, 2, 16, 80), None), "bayes-e": (Wide, (4, 2, 8, 8), INT16), "nash-e": (Long, (4, 3, 16), None)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", WHOLE)
def test_an_adapted_model_is_held_to_the_contract(target: str, tmp_path: Path) -> None:
    build, shape, qconfig = WHOLE[target]
    model = build().eval()
    batches = [torch.randn(shape) for _ in range(2)]
    assert any(finding.kind == "limit" for finding in fxq.check(model, batches[0], target, qconfig))
    prepared, integer = compiled(model, batches, target, qconfig, adapt=True)
    assert fxq.check(prepared), str(fxq.check(prepared))

    fxq.set_state(prepared, fxq.State.FLOAT)
    with torch.no_grad():
        for mine, theirs in zip(contract.flat(prepared(batches[0])), contract.flat(model(batches[0])), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(contract.flat(integer(batches[0])), contract.flat(model(batches[0])), strict=True):
        assert 10 * torch.log10(theirs.pow(2).sum() / (mine - theirs).pow(2).sum()) > 20
    contract.assert_validate_is_integer(prepared, integer, batches[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batch,) for batch in batches])
    contract.assert_alive(integer, batches[0])
    contract.assert_train_is_validate(prepared, batches[0])
    contract.assert_gradients_reach_every_parameter(prepared, batches[0])
    assert set(model.state_dict()) <= set(prepared.state_dict()), "parameters keep their names"
    loaded = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    assert contract.all_equal(fxq.convert(loaded)(batches[0]), fxq.convert(prepared)(batches[0]))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("target", "model", "shape"),
    [("bernoulli2", nn.Conv2d(2, 3, 3, dilation=3), (2, 2, 9, 9)), ("bayes-e", nn.ReflectionPad2d(2), (2, 2, 5, 5))],
    ids=lambda value: getattr(type(value), "__name__", "") if isinstance(value, nn.Module) else "",
)
def test_what_is_only_moved_or_summed_alike_has_the_bits_of_the_whole(target: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    chained = nn.Sequential(model, nn.Sigmoid()).eval()
    x, observed = torch.randn(shape), fxq.QConfig(fxq.ActivationConfig(observer=fxq.observers.MinMaxObserver))
    whole, parts = (compiled(chained, [x], target, observed, adapt=adapt) for adapt in (False, True))
    assert not fxq.check(whole.prepared)
    assert fxq.check(parts.prepared)
    assert contract.all_equal(whole.integer(x), parts.integer(x))


@pytest.mark.parametrize(("model", "shape", "parts"), [
    (nn.ConvTranspose2d(3, 4, 5, 3, 1, 1), (3, 5, 6), "conv_transpose2d getitem"),
    (nn.ConvTranspose2d(3, 4, 5, 4, 1, 2), (3, 5, 6), "conv_transpose2d getitem"),
    (nn.Sequential(nn.Conv1d(3, 4, 3), nn.ConstantPad1d((2, 0), 0.0), nn.ReLU()), (3, 9), "conv1d reshape pad clamp"),
    (Network(lambda m, x: torch.relu(F.pad(x, (1, 0, 2, 1)))), (3, 9), "reshape pad clamp"),
    (nn.Upsample(size=13, mode="linear"), (3, 9), "reshape interpolate"),
])  # fmt: skip
def test_what_the_compiler_refuses_is_replaced_without_the_option(model: nn.Module, shape: Any, parts: str, tmp_path: Path) -> None:
    batches = [torch.randn(2, *shape) for _ in range(2)]
    prepared, integer = compiled(model.eval(), batches, "bayes-e")
    assert {layer.operator for layer in fxq.inspect.layers(prepared) if layer.integer and not layer.boundary} == {*parts.split()}
    assert not [finding for finding in fxq.check(prepared) if "padding" in finding.limit or "rank" in finding.limit]
    contract.assert_contract(prepared, tmp_path / "model.onnx", batches[0], integer=integer)
    expected = model(batches[0]).detach()
    assert 10 * torch.log10(expected.pow(2).sum() / (integer(batches[0]) - expected).pow(2).sum()) > 30


# ---- what is said ---------------------------------------------------------------------------------------------------
def test_each_remedy_is_named_with_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    prepared = fxq.prepare(Camera(), torch.randn(4, 2, 16, 80), "bernoulli2", options=fxq.Options(adapt=True))
    told = fxq.explain(prepared)
    for sentence in (
        "conv2d split by kernel, since its kernel is 9; bernoulli2 allows 1 to 7",
        "conv2d without dilation, since its dilation is 3",
        "mul as a depthwise convolution, since its number of constant operands is 1",
        "linear as a 1×1 convolution, since its area of an image that is flattened before it is",
        "the batch norm of %stem keeps its running statistics while training, since the layer is conv2d split by kernel",
    ):
        assert sentence in told
    assert "limits of bernoulli2 that are broken" not in caplog.text


def test_what_is_on_the_host_is_said_by_check() -> None:
    findings = fxq.check(nn.Hardtanh(0, 4), torch.randn(2, 2, 4, 4), "bernoulli2", options=fxq.Options(adapt=True))
    assert findings
    assert findings.summary == "within every limit of bernoulli2 that is known, 1 operator runs on the host"
    assert [finding.kind for finding in findings] == ["host"]


def test_a_loop_stays_whole_beside_an_operator_that_is_rewritten() -> None:
    model = Network(lambda m, x: m.rows(m.pool(x).transpose(1, 2))[0], pool=nn.AvgPool1d(2), rows=nn.LSTM(4, 3, batch_first=True))
    prepared = fxq.prepare(model.eval(), torch.randn(2, 4, 10), "bayes-e", options=fxq.Options(adapt=True))
    assert "avg_pool1d(" not in fxq.text(prepared)
    assert [len(body) > 5 for body in bodies(prepared.graph).values()] == [True]
