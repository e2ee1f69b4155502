"""LSQ+, PACT and TQT beside LSQ: their gradients number by number, the contract after training, and what loads into what."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.numerics.grids import INT4, UINT8, IntType
from fxquant.quantization.learning import LSQ, METHODS, TQT, TrainableScale, learned_step
from fxquant.quantization.quantizer import Quantizer
from tests.prepared.test_training import Net, batches, train
from tests.shared import contract

FAMILY = tuple(METHODS)


def config(dtype: str, training: str, weights: str = "learned") -> fxq.QConfig:
    bits = "int4" if dtype == "int4" else "int8"
    return fxq.QConfig(fxq.ActivationConfig(dtype, training=training), fxq.WeightConfig(bits, training=weights))


@functools.cache
def prepared_once(target: str, qconfig: fxq.QConfig) -> fx.GraphModule:
    torch.manual_seed(3)
    return fxq.prepare(Net(), batches()[0], target, qconfig)


@functools.cache
def calibrated_once(target: str, qconfig: fxq.QConfig) -> fx.GraphModule:
    return fxq.calibrate(copy.deepcopy(prepared_once(target, qconfig)), batches(), show_progress=False)


def calibrated(target: str, qconfig: fxq.QConfig) -> fx.GraphModule:
    return copy.deepcopy(calibrated_once(target, qconfig))


# ---- gradients ----------------------------------------------------------------------------------------------------------


def stepped(dtype: IntType, training: str, value: Tensor, incoming: Tensor) -> Quantizer:
    """A quantizer that has had the gradient `incoming` of the real numbers that the integers of `value` stand for."""
    quantizer = Quantizer(dtype, fxq.observers.MinMaxObserver(), training=training)
    quantizer.observe(value / 4)  # so that much lies beyond the grid
    quantizer.update_scale()
    grid = quantizer.grid
    (learned_step(value, grid.quantize(value), grid.scale, quantizer, grid) * grid.scale * incoming).sum().backward()
    return quantizer


CASES = [(dtype, training) for dtype in (INT4, UINT8) for training in FAMILY]


@pytest.mark.parametrize(("dtype", "training"), CASES, ids=[f"{dtype}-{training}" for dtype, training in CASES])
def test_gradients_are_those_of_the_papers(dtype: IntType, training: str) -> None:
    """Each number's share, as the paper has it, in the units that the methods' parameters have."""
    value, incoming = torch.randn(400, requires_grad=True), torch.randn(400)
    with torch.no_grad():
        value += 0.5
    quantizer = stepped(dtype, training, value, incoming)
    grid = quantizer.grid
    scale = float(grid.scale)
    wanted = {"scale": 0.0, "offset": 0.0, "alpha": 0.0}
    beyond = 0
    for v, g in zip(value.tolist(), incoming.tolist(), strict=True):
        ratio = v / scale
        if grid.low <= ratio <= grid.high:
            wanted["scale"] += g * (round(ratio) - ratio)
            continue
        q = grid.high if ratio > grid.high else grid.low
        beyond += 1
        wanted["scale"] += g * (q - grid.low if training == "lsq+" and dtype.affine else q)
        wanted["offset"] += g
        wanted["alpha"] += g * q / grid.magnitude
    assert beyond > 20
    assert value.grad is not None
    assert int((value.grad == 0).sum()) == beyond
    base = float(quantizer.base_scale)
    found = {name: float(parameter.grad) for name, parameter in quantizer.trained.items()}
    expected = {
        "scale_change": wanted["scale"] * scale,
        "offset_change": wanted["offset"] * 255 * base,
        "alpha": wanted["alpha"],
        "log2_change": wanted["scale"] * scale * math.log(2),
    }
    assert set(found) == {"learned": {"scale_change"}, "pact": {"alpha"}, "tqt": {"log2_change"}}.get(
        training, {"scale_change", "offset_change"} if dtype.affine else {"scale_change"}
    )
    for name, gradient in found.items():
        assert gradient == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_a_channel_whose_scale_another_took_the_place_of_has_no_gradient() -> None:
    value, base = torch.randn(2, 50), torch.tensor([0.1, 0.2])
    for method in (LSQ, TQT):
        trained, step = TrainableScale(base.clone(), method), base.reshape(2, 1)
        exact = torch.round(value / step).clamp(-8, 7)
        (learned_step(value, exact, step, trained, INT4, torch.tensor([1.0, 0.0])) * torch.randn(2, 50)).sum().backward()
        (parameter,) = trained.parameters()
        assert parameter.grad is not None
        assert [bool(value) for value in parameter.grad] == [True, False]


def test_what_saturates_has_a_gradient_whatever_its_scale_rounds_to() -> None:
    """q · s / s is a little more than q for one scale in ten; an integer at the limit is no less inside of its grid for that."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    torch.nn.init.eye_(model[0].weight)
    prepared = fxq.prepare(model, torch.randn(4, 3), "nash-e", fxq.QConfig(fxq.ActivationConfig("int4")))
    over = next(s for s in torch.linspace(0.1, 0.2, 1000) if 7 * s / s > 7)
    fxq.set_qparams(prepared, {"input_1_quantize": float(over), "_0": 4 * float(over)})
    fxq.set_state(prepared, fxq.State.TRAIN)
    (prepared(torch.full((1, 3), 100.0)) * torch.ones(3)).sum().backward()
    gradient = prepared.get_parameter("0.weight").grad
    assert gradient is not None
    assert bool((gradient != 0).all())


# ---- what is learned ----------------------------------------------------------------------------------------------------


def test_alpha_is_the_largest_number_and_decays_to_zero() -> None:
    prepared = calibrated("x86", config("uint8", "pact"))
    quantizer = prepared.quantized.conv1.quantizer
    assert quantizer.grid.zero_point == 0
    assert float(quantizer.alpha.detach()) == pytest.approx(255 * float(quantizer.scale))
    before = float(quantizer.scale)
    train(prepared, 3, optimizer=torch.optim.SGD(prepared.parameters(), 0.1, weight_decay=0.5))
    assert quantizer.scale == quantizer.alpha.detach() / 255 < 0.9 * before
    for value in (-3.0, 0.0):
        quantizer.alpha.data.fill_(value)
        assert 0 < float(quantizer.scale) < 1e-9


def test_a_threshold_that_is_learned_is_rounded_up_to_a_power_of_two() -> None:
    quantizer = Quantizer(INT4, fxq.observers.MinMaxObserver(), training="tqt")
    quantizer.observe(torch.tensor([-0.75, 0.75]))
    quantizer.update_scale()
    assert quantizer.scale == 0.125  # 0.75 / 7.5 = 0.1, rounded up
    found = []
    for change in (0.3, 0.4, 1.4, -0.6, -1.5):
        quantizer.log2_change.data.fill_(change)
        found.append(float(quantizer.scale))
    assert found == [0.125, 0.25, 0.5, 0.125, 0.0625]
    for change in (5000.0, -5000.0):
        quantizer.log2_change.data.fill_(change)
        assert quantizer.scale == 2.0 ** math.copysign(48, change)
    quantizer.log2_change.data.fill_(math.nan)
    with pytest.raises(fxq.errors.NotFinite):
        quantizer.require()


def test_an_offset_that_is_learned_moves_the_zero_point() -> None:
    """Towards an interval that calibration has not seen."""
    quantizer = Quantizer(UINT8, fxq.observers.MinMaxObserver(), training="lsq+")
    quantizer.observe(torch.tensor([-1.0, 1.0]))
    quantizer.update_scale()
    value = torch.linspace(-1.5, 0.5, 200)
    optimizer = torch.optim.Adam(quantizer.parameters(), 0.01)

    def error() -> Tensor:
        grid = quantizer.grid
        return (learned_step(value, grid.quantize(value), grid.scale, quantizer, grid) * grid.scale - value).square().mean()

    before, start = float(error()), quantizer.grid.zero_point
    for _ in range(60):
        optimizer.zero_grad()
        error().backward()
        optimizer.step()
    assert float(error()) < before / 20
    assert quantizer.grid.zero_point > start + 40
    moved = quantizer.grid
    quantizer.freeze()
    assert quantizer.grid.equals(moved)


# ---- the contract ---------------------------------------------------------------------------------------------------------

TRAINED = [("x86", "uint8", "lsq+"), ("bayes-e", "int4", "pact"), ("bernoulli", "int8", "tqt")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype", "training"), TRAINED)
def test_the_contract_holds_after_training(target: str, dtype: str, training: str, tmp_path: Path) -> None:
    qconfig = config(dtype, training, "tqt" if training == "tqt" else "learned")
    prepared = calibrated(target, qconfig)
    before = {name: parameter.detach().clone() for name, parameter in prepared.named_parameters() if name.startswith("quantized.")}
    train(prepared)
    moved = [name for name, value in before.items() if not torch.equal(value, prepared.get_parameter(name))]
    assert len(moved) > len(before) / 2
    integer = fxq.convert(prepared)
    contract.assert_alive(integer, batches()[0])
    contract.assert_validate_is_integer(prepared, integer, batches()[0])
    if training == "lsq+":  # whose zero points have moved
        contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batches()[0],)])
    loaded = fxq.load(fxq.save(prepared, tmp_path / "one.fxq"))
    assert fxq.save(loaded, tmp_path / "two.fxq").read_bytes() == (tmp_path / "one.fxq").read_bytes()
    assert fxq.text(fxq.convert(loaded)) == fxq.text(integer)
    state = {name: value.clone() for name, value in prepared.state_dict().items()}
    fresh = copy.deepcopy(prepared_once(target, qconfig))
    assert fresh.load_state_dict(state) == ([], [])
    assert fxq.text(fxq.convert(fresh)) == fxq.text(integer)
    for model in (loaded, fresh):
        train(model, 2)
    train(prepared, 2)
    wanted = fxq.text(fxq.convert(prepared))
    assert [fxq.text(fxq.convert(model)) for model in (loaded, fresh)] == [wanted, wanted]
    contract.assert_train_is_validate(prepared, batches()[1])


# ---- loading ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["statistics", *(name for name in FAMILY if name != "tqt")])
@pytest.mark.parametrize("loaded", ["statistics", "learned", "lsq+", "pact"])
def test_scales_load_however_either_model_learns_them(saved: str, loaded: str) -> None:
    """Whatever training moved: a scale, a zero point, a clipping value."""

    def moved(training: str, by: float) -> Quantizer:
        quantizer = Quantizer(UINT8, fxq.observers.MinMaxObserver(), training=training)
        quantizer.observe(by * torch.tensor([-1.0, 3.0]))
        quantizer.update_scale()
        with torch.no_grad():
            for parameter in quantizer.trained.values():
                parameter.add_(0.1 * by)
        return quantizer

    one, other = moved(saved, 1.0), moved(loaded, 5.0)
    assert other.load_state_dict(one.state_dict()) == ([], [])
    assert other.grid.zero_point == one.grid.zero_point
    torch.testing.assert_close(other.scale, one.scale, rtol=2e-7, atol=0)
    assert other.learns is (loaded != "statistics")


@pytest.mark.parametrize("weights", ["learned", "tqt"])
def test_a_state_dict_from_before_learning_starts_learned_weights_anew(weights: str) -> None:
    """As those do that are loaded into a model that has just been calibrated."""
    before = calibrated("nash-e", config("int8", "statistics", "statistics"))
    fresh, used = (calibrated("nash-e", config("int8", "learned", weights)) for _ in range(2))
    train(used)
    for model in (fresh, used):
        assert model.load_state_dict(before.state_dict()) == ([], [])
    scale = used.quantized.conv1.weight_quantizer.learned
    assert bool(scale.base_scale.isnan().all())
    for model in (fresh, used):
        train(model, 2)
    assert bool(scale.base_scale.isfinite().all())
    assert fxq.text(fxq.convert(used)) == fxq.text(fxq.convert(fresh))


def test_learned_weight_scales_stay_in_a_model_that_learns_none(tmp_path: Path) -> None:
    learned = calibrated("nash-e", config("int4", "learned", "learned"))
    train(learned)
    plain = calibrated("nash-e", config("int4", "statistics", "statistics"))
    assert plain.load_state_dict(learned.state_dict()) == ([], [])
    assert fxq.text(fxq.convert(plain)) == fxq.text(fxq.convert(learned))
    kept = plain.quantized.conv1.weight_quantizer.learned.current().clone()
    again = fxq.load(fxq.save(plain, tmp_path / "plain.fxq"))
    for model in (plain, again):
        train(model)
        assert torch.equal(model.quantized.conv1.weight_quantizer.learned.current(), kept)
    assert fxq.text(fxq.convert(again)) == fxq.text(fxq.convert(plain))
    contract.assert_train_is_validate(plain, batches()[0])
    plain.load_state_dict(calibrated("nash-e", config("int4", "statistics", "statistics")).state_dict())
    assert plain.quantized.conv1.weight_quantizer.learned is None
