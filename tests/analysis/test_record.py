"""Recorded values equal what hooks and a plain interpreter see, in every form, one batch at a time, and recording changes nothing."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives import PRIMITIVES
from tests.shared.contract import all_equal, compiled, graph_values, operator_outputs, quantized_names
from tests.shared.networks import members, written

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs


@members(
    lambda: dict(conv=nn.Conv2d(3, 6, 3, padding=1), bn=nn.BatchNorm2d(6), cut=nn.Threshold(5.0, 1.0, inplace=True), head=nn.Linear(6, 4))
)
def Mixed(self, x: Tensor) -> Any:
    """Two integer segments with float operators between, one of which writes into its operand."""
    y = F.relu(self.bn(self.conv(x)) + self.conv(x))
    z = torch.logsumexp(y, (2, 3))
    z = self.cut(z.cumsum(1))
    return self.head(z), y


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(size + 1, 3, 5, 5) for size in range(count)]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, list[Tensor]]:
    torch.manual_seed(0)
    result = batches()
    prepared, integer = compiled(Mixed().eval(), result, "nash-e")
    return prepared, integer, fxq.export_onnx(integer, tmp_path_factory.mktemp("forms") / "model.onnx", style="exact"), result


@pytest.mark.parametrize("target", ["bayes-e", "nash-e"])
def test_one_name_and_the_same_numbers_in_every_form(target: str, tmp_path: Path) -> None:
    result = batches()
    model = written(lambda m, x: m.head(F.silu(m.conv(x)).mean((2, 3))), conv=nn.Conv2d(3, 6, 3, padding=1), head=nn.Linear(6, 4))
    prepared, integer = compiled(model, result, target)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="exact")
    for real in (False, True):
        kinds = ["quantized", "outputs"]
        recorded = [list(fxq.inspect.record(form, result, kinds, real=real)) for form in (prepared, integer, path)]
        runtimes = [
            list(fxq.inspect.record(path, result, kinds, real=real, runtime=name)) for name in ("reference", "onnxruntime, 2 threads")
        ]
        for others in (*recorded[1:], *runtimes):
            assert len(others) == len(result)
            for one, other in zip(recorded[0], others, strict=True):
                assert one.keys() <= other.keys()  # a prepared operator has no inner tensors
                assert all(torch.equal(one[name], other[name]) for name in one)
        assert [*recorded[0][0]] == ["x_quantize", "conv", "silu", "mean", "head", "output 0"]
        assert {values["conv"].dtype for values, *_ in recorded} == {torch.float32 if real else torch.int64}
    for one, other in zip(
        fxq.inspect.record(integer, result, "accumulators"), fxq.inspect.record(path, result, "accumulators"), strict=True
    ):
        assert all_equal(one, other)
        assert "head_linear" in one


def test_values_are_those_of_hooks_and_of_a_plain_interpreter(forms: Any) -> None:
    prepared, integer, _, result = forms
    fxq.set_state(prepared, fxq.State.VALIDATE)
    everything = ["quantized", "accumulators", "float"]
    for x, recorded, real in zip(
        result, fxq.inspect.record(integer, result, everything), fxq.inspect.record(prepared, result, real=True), strict=True
    ):
        values = graph_values(integer, x)
        wanted = [node.name for node in integer.graph.nodes if node.op.startswith("call_") and node.name in values]
        assert list(recorded) == wanted
        for name, value in recorded.items():
            if name != "cumsum":  # the next operator writes into it, so the plain interpreter shows the result of that write
                assert torch.equal(value, values[name].to(value.dtype)), name
        assert not torch.equal(recorded["cumsum"], recorded["cut"])
        hooked = operator_outputs(prepared, x)
        assert real.keys() == hooked.keys()
        assert all(torch.equal(value, hooked[name]) for name, value in real.items())


def test_the_ends_of_segments_of_a_file_with_float_operators(forms: Any) -> None:
    _, integer, path, result = forms
    for one, other in zip(fxq.inspect.record(integer, result), fxq.inspect.record(path, result), strict=True):
        first = [name for name in other if not name.startswith(("head", "cut"))]  # after them values may be flipped
        assert set(first) == {name for name in quantized_names(integer) if not name.startswith(("head", "cut"))}
        assert all(torch.equal(one[name], other[name]) for name in first)


def test_one_batch_at_a_time(forms: Any) -> None:
    taken: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[Tensor]:
        while True:
            batch = torch.randn(2, 3, 5, 5)
            taken.append(weakref.ref(batch))
            yield batch
            del batch

    for form in forms[:3]:
        taken.clear()
        recorded = fxq.inspect.record(form, stream(), ["quantized", "float"])
        assert not taken
        kept: list[weakref.ref[Tensor]] = []
        for index in range(8):
            values = next(recorded)
            assert len(taken) == index + 1
            kept.append(weakref.ref(values["x_quantize"]))
        assert [reference() is not None for reference in kept] == [False] * 7 + [True]
        assert sum(reference() is not None for reference in taken) <= 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("state", fxq.State)
def test_nothing_is_changed(state: fxq.State) -> None:
    result = batches()
    prepared, integer = compiled(Mixed().eval(), result, "nash-e")
    fxq.set_state(prepared, state)
    prepared.train()
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    modes = {name: module.training for name, module in prepared.named_modules()}
    for values in fxq.inspect.record(prepared, [10 * x for x in result], ["quantized", "float", "outputs"]):
        assert ("conv" in values) == (state in (fxq.State.TRAIN, fxq.State.VALIDATE))
    assert prepared.state_dict().keys() == before.keys()
    assert all(torch.equal(value.nan_to_num(-1), before[name].nan_to_num(-1)) for name, value in prepared.state_dict().items())
    assert {name: module.training for name, module in prepared.named_modules()} == modes
    assert {operator.state for operator in quantized_operators(prepared).values()} == {state}
    for one, other in zip(fxq.inspect.record(prepared, result, state=fxq.State.TRAIN), fxq.inspect.record(integer, result), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_model_that_fails_leaves_its_state_after_as_it_was(forms: Any) -> None:
    fresh = fxq.prepare(Mixed().eval(), forms[3][0])
    with pytest.raises(fxq.errors.NotCalibrated) as caught:
        next(fxq.inspect.record(fresh, forms[3], state="validate"))
    assert "While executing" not in str(caught.value)
    assert {operator.state for operator in quantized_operators(fresh).values()} == {fxq.State.CALIBRATE}


def test_names_and_kinds(forms: Any) -> None:
    prepared, integer, path, result = forms
    for form in (prepared, integer, path):
        assert list(next(fxq.inspect.record(form, result, ["conv", "outputs"]))) == ["conv", "output 0", "output 1"]
        with pytest.raises(fxq.errors.ConfigurationError, match="did you mean 'conv'"):
            fxq.inspect.record(form, result, "covn")
    accumulators = [n.name for n in integer.graph.nodes if n.target in PRIMITIVES and PRIMITIVES[n.target].kind == "accumulator"]
    assert list(next(fxq.inspect.record(integer, result, "accumulators"))) == accumulators
    assert len(accumulators) >= 3


def test_the_real_numbers_of_scales_along_channels() -> None:
    config = fxq.QConfig(fxq.ActivationConfig("int32"))
    x = torch.randn(3, 4)
    prepared, integer = compiled(nn.Linear(4, 5), [x], "nash-e", config)
    one, other = (
        next(fxq.inspect.record(prepared, [x], ["quantized", "outputs"], real=True)),
        next(fxq.inspect.record(integer, [x], ["quantized", "outputs"], real=True)),
    )
    assert all_equal(one, other)
    assert len(other) == 3
    assert len(next(fxq.inspect.record(prepared, [x]))) == 1  # of a sum, only the integer model has integers


def test_batches_that_do_not_fit(forms: Any) -> None:
    prepared, integer, path, result = forms
    for form in (prepared, integer, path):
        recorded = fxq.inspect.record(form, [result[0], []])
        next(recorded)
        with pytest.raises(fxq.errors.CalibrationError, match="batch 1"):
            next(recorded)
    assert all_equal(next(fxq.inspect.record(path, [{"x": result[0]}])), next(fxq.inspect.record(path, [(result[0], torch.zeros(1))])))


@members(lambda: dict(first=nn.Linear(8, 8), second=nn.Linear(8, 4)))
def Drawing(self, x: Tensor) -> Tensor:
    """Reads the places that it draws."""
    y = self.first(x)
    return self.second(y[:, torch.randint(0, y.shape[1], (3,))])


def test_every_form_of_a_model_that_draws_random_numbers_draws_the_same() -> None:
    compiled_model = compiled(Drawing().eval(), [torch.randn(2, 6, 8)], "bayes-e")
    before = torch.get_rng_state()
    report = fxq.verify(compiled_model.prepared, compiled_model.integer, [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))])
    assert report, str(report)
    assert torch.equal(torch.get_rng_state(), before)
    assert "randint: it draws random numbers" in fxq.explain(compiled_model.prepared)
