"""Scales in training: LSQ's gradients, statistics that go on from calibration, powers of two, freezing, loading."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.numerics.grids import INT4, INT8, WEIGHT_INT4, WEIGHT_INT8, IntType, least_error_scale, weight_scale
from fxquant.quantization.learning import LSQ, TrainableScale, learned_step
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightScale
from tests.shared import contract
from tests.shared.contract import assert_contract
from tests.shared.written import to_train, to_validate, written

MODES = ("statistics", "learned", "frozen")


class Net(nn.Module):
    """Convolutions with and without batch norm, a residual, a pooled tail and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 2, 6, 6, generator=generator) for _ in range(count)]


def config(activations: str = "statistics", weights: str = "statistics", bits: int = 8, **options: Any) -> fxq.QConfig:
    return fxq.QConfig(
        fxq.ActivationConfig(f"int{bits}", training=activations, **options), fxq.WeightConfig(f"int{bits}", training=weights, **options)
    )


@functools.cache
def once_calibrated(qconfig: fxq.QConfig, target: str, **options: Any) -> fx.GraphModule:
    torch.manual_seed(3)
    return fxq.calibrate(fxq.prepare(Net(), batches()[0], target, qconfig, options=fxq.Options(**options)), batches(), show_progress=False)


def calibrated(qconfig: fxq.QConfig, target: str = "bayes-e", **options: Any) -> fx.GraphModule:
    return copy.deepcopy(once_calibrated(qconfig, target, **options))


def train(prepared: fx.GraphModule, steps: int = 4, learning_rate: float = 0.02, optimizer: Any = None) -> None:
    """A few steps towards arbitrary labels, in state TRAIN."""
    to_train(prepared)
    optimizer = optimizer or torch.optim.SGD(prepared.parameters(), learning_rate, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(prepared(batches()[step % 3]), torch.arange(8) % 4).backward()
        optimizer.step()


def scales(prepared: fx.GraphModule) -> dict[str, Tensor]:
    """Every scale of the moment: of tensors, and of weights where they are learned."""
    found = {name: module.scale.clone() for name, module in prepared.named_modules() if isinstance(module, Quantizer)}
    found.update({name: module.current().clone() for name, module in prepared.named_modules() if isinstance(module, WeightScale)})
    return found


def growths(prepared: fx.GraphModule) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in prepared.named_parameters() if name.endswith(".scale_change")}


# ---- LSQ --------------------------------------------------------------------------------------------------------------------


def slow_lsq(values: list[float], gradient: list[float], scale: float, dtype: IntType) -> tuple[list[float], float]:
    """The gradients of the values and of their one scale, number by number, from the paper; `gradient` is that of the real numbers.

    Without the paper's factor, which is no part of the derivative.
    """
    of_values, of_scale = [], 0.0
    for value, incoming in zip(values, gradient, strict=True):
        ratio = value / scale
        if ratio < dtype.low:
            of_values.append(0.0)
            of_scale += incoming * dtype.low
        elif ratio > dtype.high:
            of_values.append(0.0)
            of_scale += incoming * dtype.high
        else:
            of_values.append(incoming)
            of_scale += incoming * (round(ratio) - ratio)
    return of_values, of_scale


@pytest.mark.parametrize("dtype", [INT4, INT8, WEIGHT_INT4], ids=["int4", "int8", "weight int4"])
@pytest.mark.parametrize("channels", [0, 3])
def test_the_gradients_are_those_of_the_paper(dtype: IntType, channels: int) -> None:
    value = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    base = torch.rand(channels or ()) * 2 / dtype.high + 0.5 / dtype.high
    trained = TrainableScale(base.clone(), LSQ)
    scale = base.reshape(-1, 1) if channels else base
    exact = torch.round(value.detach() / scale).clamp(dtype.low, dtype.high)
    result = learned_step(value, exact, scale, trained, dtype)
    assert torch.equal(result, exact)
    incoming = torch.randn(3, 40, dtype=torch.float64)
    (result * scale.double() * incoming).sum().backward()  # the integers stand for result · scale
    assert int((exact == dtype.high).sum()) > 3
    assert value.grad is not None
    assert trained.scale_change is not None
    rows = range(3) if channels else [slice(None)]
    for row in rows:
        one = float(base[row]) if channels else float(base)
        of_values, of_scale = slow_lsq(value[row].flatten().tolist(), incoming[row].flatten().tolist(), one, dtype)
        torch.testing.assert_close(value.grad[row].flatten(), torch.tensor(of_values, dtype=torch.float64))
        found = trained.scale_change.grad[row] if channels else trained.scale_change.grad
        torch.testing.assert_close(float(found) / one, of_scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("unit", [1.0, 2.0**10, 2.0**-10])
def test_a_step_is_a_part_of_the_scale_whatever_the_unit_of_the_tensor(unit: float) -> None:
    """Of an activation, and of a weight beside its own step: in another unit, both move by as much of themselves."""
    generator = torch.Generator().manual_seed(0)
    value, incoming = (torch.randn(3, 64, generator=generator) for _ in range(2))
    found = []
    for one in (1.0, unit):
        activation, weight = TrainableScale(torch.tensor(0.1 * one), LSQ), TrainableScale(torch.full((3,), 0.1 * one), LSQ)
        numbers = nn.Parameter(value * one)
        for trained, limits, factor in ((activation, INT4, None), (weight, WEIGHT_INT4, torch.ones(3))):
            scale = trained.current().reshape(-1, 1) if factor is not None else trained.current()
            exact = torch.round(numbers.detach() / scale).clamp(limits.low, limits.high)
            (learned_step(numbers, exact, scale, trained, limits, factor) * scale * incoming / one).sum().backward()
            assert trained.scale_change.grad is not None
        torch.optim.SGD([activation.scale_change], lr=1e-3).step()
        torch.optim.SGD([weight.scale_change], lr=1e-3 * one**2).step()  # as the weight itself has to be trained, in this unit
        found.append([float(activation.current()) / one, *(weight.current() / one).tolist()])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert all(abs(scale - 0.1) > 1e-5 for scale in found[0])


@pytest.mark.parametrize("dtype", [WEIGHT_INT4, WEIGHT_INT8], ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.3], ids=["covered", "clipped"])
def test_a_weights_scale_moves_in_proportion_to_the_weight(dtype: IntType, fraction: float) -> None:
    """For gradients that know nothing of roundings, also where many numbers are clipped: the aim of the paper's factor."""
    generator = torch.Generator().manual_seed(0)
    value = nn.Parameter(torch.randn(500, 64, generator=generator))
    scale = fraction * value.detach().abs().amax(1, keepdim=True) / dtype.high
    trained = TrainableScale(scale.flatten(), LSQ)
    exact = torch.round(value.detach() / scale).clamp(dtype.low, dtype.high)
    incoming = torch.randn(500, 64, generator=generator)
    (learned_step(value, exact, scale, trained, dtype, torch.ones(500)) * scale * incoming).sum().backward()
    assert trained.scale_change.grad is not None
    ratio = trained.scale_change.grad / (incoming.norm(dim=1) / value.detach().norm(dim=1))
    assert float(ratio.square().mean().sqrt()) == pytest.approx(1, abs=0.1)


def test_the_input_of_a_model_has_the_gradient_of_the_paper() -> None:
    """Through a whole prepared model: the gradient of the loss, taken back to the quantized input by hand."""
    model = nn.Sequential(nn.Linear(5, 3))
    qconfig = fxq.QConfig(fxq.ActivationConfig(scale=0.1), input=fxq.ActivationConfig("int4", training="learned"))
    prepared = contract.compiled(model, [torch.randn(16, 5)], qconfig=qconfig).prepared
    to_train(prepared)
    batch, incoming = 3 * torch.randn(16, 5), torch.randn(16, 3)
    quantize = prepared.quantized.input_1_quantize.output
    (prepared(batch) * incoming).sum().backward()
    weight = model[0].weight.detach()
    steps = weight.abs().amax(1, keepdim=True) / 127
    of_input = incoming @ (torch.round(weight / steps) * steps)
    _, expected = slow_lsq(batch.flatten().tolist(), of_input.flatten().tolist(), float(quantize.scale), INT4)
    assert int(((batch / quantize.scale).abs() > 8).sum()) > 3
    torch.testing.assert_close(float(quantize.scale_change.grad) / float(quantize.scale), expected, rtol=1e-4, atol=1e-6)


def test_gradients_reach_every_parameter_and_every_scale() -> None:
    prepared = calibrated(config("learned", "learned", bits=4), batch_norm="frozen")  # a live one takes the gradient from conv2.bias
    train(prepared, steps=0)
    unused = prepared.quantized.conv2.intermediate
    del unused.scale_change
    unused.method = None  # the residual is added in the accumulator, so nothing is quantized before it
    assert len(growths(prepared)) == 5 + 3  # of the input, two convolutions, mean and linear layer; of three weights
    contract.assert_gradients_reach_every_parameter(prepared, batches()[1])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli", "nash-e", "qnnpack"])
@pytest.mark.parametrize("bits", [8, 4])
def test_learned_scales_hold_the_contract_after_training(target: str, bits: int, tmp_path: Path) -> None:
    prepared = calibrated(config("learned", "learned", bits=bits), target)
    before = scales(prepared)
    train(prepared)
    still = {name for name, scale in scales(prepared).items() if torch.equal(scale, before[name])}
    # On bayes-e a residual is added in the accumulator, so that nothing is on the scale of the sum of products.
    assert still == ({"quantized.conv2.intermediate"} if target == "bayes-e" else set()) or target == "bernoulli"
    integer = fxq.convert(prepared)
    contract.assert_alive(integer, batches()[0])
    contract.assert_validate_is_integer(prepared, integer, batches()[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batch,) for batch in batches()])
    contract.assert_train_is_validate(prepared, batches()[1])


def test_learned_scales_need_no_freezing_to_train_on_what_is_validated() -> None:
    prepared = calibrated(config("learned", "learned", bits=4), batch_norm="frozen")
    for _ in range(3):
        train(prepared, steps=1)
        trained = contract.operator_outputs(prepared, batches()[2])
        validated = contract.operator_outputs(to_validate(prepared), batches()[2])
        assert trained.keys() == validated.keys()
        assert all(torch.equal(value, validated[name]) for name, value in trained.items())


@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_have_one_learned_scale_or_one_for_each_channel(per_channel: bool, tmp_path: Path) -> None:
    weight = fxq.WeightConfig("int4", per_channel=per_channel, training="learned")
    prepared = calibrated(fxq.QConfig(weight=weight))
    assert prepared.quantized.conv1.weight_quantizer.learned.scale_change.shape == (6 if per_channel else 1,)
    train(prepared)
    assert_contract(prepared, tmp_path / "model.onnx", batches()[0])


def test_a_transposed_convolution_and_a_matrix_product_learn_the_scales_of_their_weights() -> None:

    batch = torch.randn(3, 4, 4, 4)
    prepared, integer = contract.compiled(
        written(
            lambda m, x: (m.up(x).mean((2, 3)) @ m.matrix).unsqueeze(0).expand(2, -1, -1) @ m.stack,
            up=nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),
            matrix=nn.Parameter(torch.randn(6, 5)),
            stack=nn.Parameter(torch.randn(2, 5, 3)),
        ),
        [batch],
        qconfig=config("learned", "learned"),
    )
    shapes = {name: tuple(scale_change.shape) for name, scale_change in growths(prepared).items() if ".weight_quantizer." in name}
    assert sorted(shapes.values()) == [(5,), (6,)]
    assert_contract(prepared, None, batch, integer=integer)


def test_a_learned_scale_stays_positive() -> None:
    prepared = calibrated(config("learned", "learned"))
    train(prepared, steps=1)
    for value in (-5.0, -1e9):
        with torch.no_grad():
            for scale_change in growths(prepared).values():
                scale_change.fill_(value)
        assert all(0 < float(scale.min()) < 0.1 for scale in scales(prepared).values())
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batches()[0])


def test_a_scale_raised_for_a_bias_is_not_the_learned_one_and_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[0] *= 1e-9
        model[0].bias.fill_(1.0)
    prepared, integer = contract.compiled(model, [torch.randn(8, 4)], qconfig=config("frozen", "learned"))
    contract.assert_validate_is_integer(prepared, integer, torch.randn(8, 4))
    (to_train(prepared)(torch.randn(8, 4)) * torch.randn(8, 2)).sum().backward()
    (scale_change,) = growths(prepared).values()
    assert scale_change.grad[0] == 0
    assert scale_change.grad[1] != 0


@pytest.mark.parametrize("dtype", [WEIGHT_INT4, WEIGHT_INT8], ids=str)
def test_a_weights_scale_starts_where_the_squared_error_is_least(dtype: IntType) -> None:
    weight = torch.randn(5, 200) ** 3

    def error(scale: Tensor) -> Tensor:
        step = scale.unsqueeze(1)
        return (torch.round(weight / step).clamp(dtype.low, dtype.high) * step - weight).square().sum(1)

    found, largest = least_error_scale(weight, 0, dtype), weight_scale(weight, 0, dtype)
    assert bool((error(found) <= error(largest)).all())
    grid = torch.stack([error(largest * fraction) for fraction in torch.linspace(0.3, 1, 200)])
    assert bool((error(found) <= 1.1 * grid.amin(0)).all())
    if dtype is WEIGHT_INT4:
        assert float(error(found).sum()) < 0.97 * float(error(largest).sum())


# ---- statistics -------------------------------------------------------------------------------------------------------------


def test_the_first_training_batch_continues_where_calibration_ended() -> None:
    """A histogram's threshold lies below the largest value, and training does not pull it there."""
    batch = torch.randn(64, 2, 6, 6)
    batch[0, 0, 0, 0] = 12.0
    prepared = fxq.calibrate(fxq.prepare(Net(), batch, qconfig=config(bits=4)), [batch], show_progress=False)
    quantizer = prepared.quantized.x_quantize.output
    calibrated = float(quantizer.scale)
    assert calibrated < 0.8 * 12 / 7.5
    assert float(quantizer.range.largest) == 12.0
    to_train(prepared)
    for _ in range(5):
        prepared(batch)
    assert float(quantizer.scale) == calibrated
    prepared(2 * batch)  # the seventh batch: the average becomes (6 · 12 + 24) / 7
    torch.testing.assert_close(float(quantizer.range.largest), 96 / 7)
    torch.testing.assert_close(float(quantizer.scale), calibrated * 8 / 7)


def test_a_tensor_that_was_all_zeros_gets_a_scale_when_it_comes_to_life() -> None:
    prepared = fxq.calibrate(fxq.prepare(Net(), batches()[0], qconfig=config()), [torch.zeros(8, 2, 6, 6)], show_progress=False)
    quantizer = prepared.quantized.x_quantize.output
    assert quantizer.scale == 2.0**-23
    to_train(prepared)(torch.full((8, 2, 6, 6), 3.0))
    torch.testing.assert_close(float(quantizer.scale), 3 / 127.5)  # the zeros of calibration are no part of an average
    prepared(torch.full((8, 2, 6, 6), 6.0))
    torch.testing.assert_close(float(quantizer.scale), 6 / 127.5)  # what grows is covered at once
    prepared(torch.full((8, 2, 6, 6), 3.0))
    torch.testing.assert_close(float(quantizer.scale), 4 / 127.5)  # and otherwise the average of what was not 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", MODES)
def test_training_without_calibration_starts_from_the_first_batch_unless_scales_are_frozen(mode: str) -> None:
    prepared = fxq.prepare(Net(), batches()[0], qconfig=config(mode, "learned" if mode == "learned" else "statistics"))
    to_train(prepared)
    if mode == "frozen":
        with pytest.raises(fxq.errors.NotCalibrated):
            prepared(batches()[0])
        return
    prepared(batches()[0])
    reference = contract.calibrated(Net(), batches()[:1], qconfig=config())
    assert fxq.qparams(prepared)["x_quantize"] == fxq.qparams(reference)["x_quantize"]
    contract.assert_validate_is_integer(prepared, fxq.convert(to_validate(prepared)), batches()[1])


def test_a_batch_that_is_not_finite_moves_nothing() -> None:
    prepared = to_train(calibrated(config()))
    before = {name: value.clone() for name, value in prepared.state_dict().items() if "x_quantize" in name}
    with pytest.raises(fxq.errors.CalibrationError, match="%x_quantize cannot be observed"):
        prepared(torch.full((8, 2, 6, 6), float("nan")))
    assert all(torch.equal(prepared.state_dict()[name], value) for name, value in before.items())


# ---- powers of two ------------------------------------------------------------------------------------------------------------


def is_power_of_two(scale: Tensor) -> bool:
    return bool((torch.frexp(scale).mantissa == 0.5).all())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", MODES)
def test_power_of_two_scales_stay_powers_of_two_through_training(mode: str, tmp_path: Path) -> None:
    qconfig = config(mode, "learned" if mode == "learned" else "statistics", power_of_two=True)
    prepared = calibrated(qconfig, "nash-e")
    for _ in range(3):
        train(prepared, steps=1, learning_rate=0.1)
        assert all(is_power_of_two(scale) for name, scale in scales(prepared).items() if "weight_quantizer" not in name)
    named = fxq.convert(prepared).named_buffers()
    multipliers = [value for name, value in named if name.endswith("multiplier") and "pool" not in name and "mean" not in name]
    assert multipliers
    assert all(is_power_of_two(value) for value in multipliers if value.dtype == torch.float32)
    assert_contract(prepared, tmp_path / "model.onnx", batches()[0])


def test_a_power_of_two_that_is_learned_moves_when_enough_steps_add_up() -> None:
    quantizer = Quantizer(INT8, fxq.observers.MinMaxObserver(), training="learned", power_of_two=True)
    quantizer.observe(torch.tensor([-12.0, 12.0]))
    quantizer.update_scale()
    assert quantizer.scale == 0.125  # 12 / 127.5 = 0.094, rounded up
    assert quantizer.scale_change is not None
    found = []
    for scale_change in (0.1, 0.3, 0.4, -0.4, -0.6):
        quantizer.scale_change.data.fill_(scale_change)
        found.append(float(quantizer.scale))
    assert found == [0.125, 0.125, 0.25, 0.125, 0.0625]


# ---- freezing and fixing ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", MODES)
def test_freezing_stops_every_scale_even_under_an_optimizer_in_motion(mode: str) -> None:
    prepared = calibrated(config(mode, "learned"))
    fxq.set_state(prepared, fxq.State.TRAIN)
    optimizer = torch.optim.AdamW(prepared.parameters(), 0.01, weight_decay=0.1)
    train(prepared, 3, optimizer=optimizer)
    before, weight = scales(prepared), prepared.conv1.weight.detach().clone()
    fxq.freeze(prepared)
    assert all(torch.equal(scale, before[name]) for name, scale in scales(prepared).items())
    train(prepared, 3, optimizer=optimizer)
    assert not torch.equal(prepared.conv1.weight, weight)
    assert all(torch.equal(scale, before[name]) for name, scale in scales(prepared).items())
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batches()[0])


def test_freezing_after_training_keeps_what_training_found() -> None:
    """Not what calibration had found: its histogram is still there."""
    prepared = to_train(calibrated(config()))
    for _ in range(3):
        prepared(3 * batches()[0])
    moved = fxq.qparams(prepared)
    fxq.freeze(prepared)
    assert fxq.qparams(prepared) == moved != fxq.qparams(calibrated(config()))


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_that_is_set_stays_through_training(mode: str) -> None:
    prepared = calibrated(config(mode, "learned"))
    fxq.set_qparams(prepared, {"conv1": 0.07})
    train(prepared)
    assert fxq.qparams(prepared)["conv1"] == pytest.approx(0.07, rel=1e-7)


def test_scales_of_one_model_set_in_another_give_the_same_bits() -> None:
    trained = calibrated(config("learned"))
    train(trained)
    other = fxq.prepare(Net(), batches()[0], qconfig=config("frozen"))
    other.load_state_dict({name: value for name, value in trained.state_dict().items() if not name.startswith("quantized.")}, strict=False)
    fxq.set_qparams(other, fxq.qparams(to_validate(trained)))
    other.quantized.conv2.intermediate.set_scale(float(trained.quantized.conv2.intermediate.scale))
    assert torch.equal(to_validate(other)(batches()[0]), trained(batches()[0]))


# ---- loading --------------------------------------------------------------------------------------------------------------------


SAVED: dict[str, fxq.QConfig] = {**{mode: config(mode) for mode in MODES}, "learned weights": config("learned", "learned", bits=4)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("saved", "loaded"), [*itertools.product(MODES, MODES), ("learned weights", "learned weights")])
def test_calibrated_and_trained_scales_load_into_a_new_model_whatever_either_does_in_training(saved: str, loaded: str) -> None:
    one, other, file = calibrated(SAVED[saved]), fxq.prepare(Net(), batches()[0], qconfig=SAVED[loaded]), io.BytesIO()
    train(one)
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert fxq.text(fxq.convert(other)) == fxq.text(fxq.convert(one))
    assert torch.equal(to_validate(other)(batches()[0]), to_validate(one)(batches()[0]))
    assert fxq.qparams(other) == fxq.qparams(one) != fxq.qparams(calibrated(SAVED[saved])) or saved == "frozen"
    train(other)
    assert (fxq.qparams(to_validate(other)) != fxq.qparams(one)) is (loaded != "frozen")
    contract.assert_validate_is_integer(other, fxq.convert(other), batches()[0])


def test_calibrating_again_starts_learned_scales_anew() -> None:
    prepared = calibrated(config("learned", "learned"))
    train(prepared)
    fxq.calibrate(prepared, batches(), show_progress=False)
    assert all(bool((scale_change == 0).all()) for scale_change in growths(prepared).values())
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batches()[0])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_with_learned_scales_is_saved_and_loaded_whole(frozen: bool, tmp_path: Path) -> None:
    prepared = calibrated(config("learned", "learned", bits=4))
    train(prepared)
    if frozen:
        fxq.freeze(prepared)
    loaded = fxq.load(fxq.save(prepared, tmp_path / "one.fxq"))
    fxq.save(loaded, tmp_path / "two.fxq")
    assert (tmp_path / "one.fxq").read_bytes() == (tmp_path / "two.fxq").read_bytes()
    assert fxq.text(fxq.convert(loaded)) == fxq.text(fxq.convert(prepared))
    for model in (prepared, loaded):
        train(model)
    assert torch.equal(to_validate(loaded)(batches()[0]), to_validate(prepared)(batches()[0]))
    assert all(torch.equal(scale, scales(loaded)[name]) for name, scale in scales(prepared).items())


def test_a_model_saved_between_observing_and_setting_its_scales_goes_on(tmp_path: Path) -> None:
    prepared = calibrated(config())
    fxq.set_state(prepared, fxq.State.CALIBRATE)
    prepared(4 * batches()[0])
    loaded = fxq.load(fxq.save(prepared, tmp_path / "model.fxq"))
    assert fxq.qparams(to_validate(loaded)) == fxq.qparams(to_validate(prepared)) != fxq.qparams(calibrated(config()))


def test_a_copy_learns_on_its_own() -> None:
    prepared = calibrated(config("learned", "learned"))
    copied, before = copy.deepcopy(prepared), scales(prepared)
    train(copied)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    assert all(torch.equal(scale, before[name]) for name, scale in scales(prepared).items() if "weight_quantizer" not in name)
    assert any(not torch.equal(scale, before[name]) for name, scale in scales(copied).items())


# ---- live batch norms -----------------------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    model = written(lambda m, x: m.bn(m.conv(x)), conv=nn.Conv2d(2, 5, 3), bn=nn.BatchNorm2d(5))
    model.bn.weight.data.copy_(torch.tensor([1.0, -0.5, 2.0, 0.0, 0.3]))
    model.bn.bias.data.uniform_(-1, 1)
    model.bn.running_var.uniform_(0.2, 2)
    model.bn.running_mean.uniform_(-1, 1)
    return model


@pytest.mark.parametrize("weights", ["statistics", "learned"])
def test_a_live_batch_norm_normalises_what_the_quantized_weights_compute(weights: str) -> None:
    """TRAIN is PyTorch's batch norm behind a convolution with the deployed integer weights, in values and gradients."""
    model, batch = normalised(), torch.randn(6, 2, 9, 9)
    qconfig = fxq.QConfig(fxq.ActivationConfig("int8", training="frozen"), fxq.WeightConfig(training=weights))
    prepared = fxq.calibrate(fxq.prepare(model, batch, qconfig=qconfig), [batch], show_progress=False)
    fxq.set_qparams(prepared, {"x_quantize": 1 / 32, "conv": 1 / 32})
    fxq.set_state(prepared, fxq.State.TRAIN)
    integers = fxq.convert(prepared).integer.conv.weight.float()
    grid = (torch.round(32 * batch).clamp(-128, 127) / 32).requires_grad_()
    alive = torch.tensor([0, 1, 2, 4])  # the channel whose gain is zero shows no statistics

    reference = nn.BatchNorm2d(5).train()
    reference.load_state_dict(model.bn.state_dict())
    largest = model.conv.weight.detach().abs().amax((1, 2, 3))
    scale = largest / 127 if weights == "statistics" else least_error_scale(model.conv.weight, 0, WEIGHT_INT8)
    weight = (integers * (scale * model.bn.weight.detach().sign()).reshape(-1, 1, 1, 1)).requires_grad_()
    expected = reference(F.conv2d(grid, weight, model.conv.bias))
    found = prepared.train()(batch)
    inside = (expected.abs() < 3.9).detach()
    assert float(inside[:, alive].float().mean()) > 0.9
    assert float(((found - expected).abs() * inside).detach()[:, alive].max()) <= 0.52 / 32
    assert torch.equal(found[:, 3].unique(), torch.round(model.bn.bias[3] * 32).div(32).detach().reshape(1))
    for now, then in ((prepared.bn.running_mean, reference.running_mean), (prepared.bn.running_var, reference.running_var)):
        torch.testing.assert_close(now[alive], then[alive], rtol=1e-4, atol=1e-5)
    assert prepared.bn.running_var[3] == model.bn.running_var[3]

    incoming = torch.randn(found.shape) * inside
    incoming[:, 3] = 0
    (found * incoming).sum().backward()
    (expected * incoming).sum().backward()
    cut = (model.conv.weight.detach().abs() / scale.reshape(-1, 1, 1, 1) > 126.999)[alive]  # what is cut off has no gradient
    assert int(cut.sum()) <= 8
    for now, then in ((prepared.bn.bias, reference.bias), (prepared.conv.weight, weight)):
        left = ~cut if now.dim() > 1 else torch.ones(4, dtype=torch.bool)
        torch.testing.assert_close(now.grad[alive][left], then.grad[alive][left], rtol=0.01, atol=0.05)
    # The gain's passes through the weights: it is that of the weights before rounding, and of those that are not cut off.
    torch.testing.assert_close(
        prepared.bn.weight.grad[alive], reference.weight.grad[alive], rtol=0.03 if weights == "statistics" else 0.15, atol=0.1
    )
    assert bool(torch.isfinite(prepared.conv.weight.grad).all())


# ---- what stands still stays so ---------------------------------------------------------------------------------------


ON_SCALES = fxq.QConfig(fxq.ActivationConfig("int8"))  # the output too


class Skips(nn.Module):
    """A residual that is too fine to be added in the accumulator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.second.weight.data.mul_(100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) + 0.001 * x


@functools.cache
def skipping(qconfig: fxq.QConfig) -> fx.GraphModule:
    torch.manual_seed(0)
    return contract.calibrated(Skips(), [images()], "nash-e", qconfig)


def skips(qconfig: fxq.QConfig = ON_SCALES) -> fx.GraphModule:
    return copy.deepcopy(skipping(qconfig))


def images(factor: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)) * factor


def train_on(prepared: fx.GraphModule, value: torch.Tensor, steps: int = 3) -> None:
    to_train(prepared)
    for _ in range(steps):
        prepared(value)
    to_validate(prepared)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stop", ["set", "freeze", "learned", "given"])
def test_scales_that_stand_still_do_so_through_a_checkpoint(stop: str) -> None:
    given = fxq.QConfig(fxq.ActivationConfig(scale=0.03))
    qconfig = {"learned": config("learned", "learned"), "given": given}.get(stop, ON_SCALES)
    prepared = skips(qconfig=qconfig)
    train_on(prepared, images(2.0), 1)
    if stop == "set":
        fxq.set_qparams(prepared, {"second": 0.5})
    elif stop != "given":
        fxq.freeze(prepared)
    loaded = skips(qconfig=qconfig)
    assert loaded.load_state_dict(prepared.state_dict()) == ([], [])
    scales = fxq.qparams(prepared)
    assert fxq.qparams(to_validate(loaded)) == scales
    train_on(loaded, images(5.0))
    after = fxq.qparams(loaded)
    assert after["second"] == scales["second"]
    assert (after == scales) == (stop != "set")
    scales_of = [module for module in loaded.modules() if isinstance(module, TrainableScale)]
    assert not any(module.frozen and any(parameter.requires_grad for parameter in module.trained.values()) for module in scales_of)
    assert fxq.verify(loaded, fxq.convert(loaded), [images()], show_progress=False)


def test_a_given_scale_loads_where_scales_are_observed_and_an_observed_one_takes_no_given_ones_place() -> None:
    given, observed = skips(qconfig=fxq.QConfig(fxq.ActivationConfig(scale=0.03))), skips()
    scales = fxq.qparams(given)
    missing, unexpected = given.load_state_dict(observed.state_dict(), strict=False)
    assert missing == []
    assert all(".observer." in name or ".range." in name or ".others." in name for name in unexpected)
    assert fxq.qparams(given) == scales
    observed.load_state_dict(given.state_dict())
    assert fxq.qparams(observed) == scales
    train_on(observed, images(5.0))
    assert fxq.qparams(observed) == scales


def test_what_moved_in_a_checkpoint_moves_again() -> None:
    moving, frozen = skips().state_dict(), skips()
    fxq.freeze(frozen)
    frozen.load_state_dict(moving)
    before = fxq.qparams(frozen)
    train_on(frozen, images(5.0))
    assert all(after > before[name] for name, after in fxq.qparams(frozen).items())


def test_a_state_dict_works_with_functional_call() -> None:
    prepared = skips()
    found = torch.func.functional_call(prepared, prepared.state_dict(), (images(),))
    assert torch.equal(found, prepared(images()))


# ---- what a residual is added to -----------------------------------------------------------------------------------------


def test_what_a_residual_is_added_to_follows_its_own_statistics() -> None:
    prepared = skips()
    assert "second.intermediate" in fxq.qparams(prepared)
    fxq.set_qparams(prepared, {"second": 0.5})
    before = fxq.qparams(prepared)
    train_on(prepared, images(3.0))
    after = fxq.qparams(prepared)
    assert after["second"] == 0.5
    assert after["second.intermediate"] > 1.02 * before["second.intermediate"]
    assert fxq.verify(prepared, fxq.convert(prepared), [images()], show_progress=False)
    fxq.freeze(prepared)
    train_on(prepared, images(9.0))
    assert fxq.qparams(prepared) == after


def test_setting_what_a_residual_is_added_to_leaves_the_output_alone() -> None:
    prepared = skips()
    fxq.set_qparams(prepared, {"second.intermediate": 0.75})
    before = fxq.qparams(prepared)
    train_on(prepared, images(3.0))
    after = fxq.qparams(prepared)
    assert after["second.intermediate"] == before["second.intermediate"] == 0.75
    assert after["second"] > 1.02 * before["second"]


def test_scales_that_are_read_and_set_again_give_the_same_bits_with_a_residual_too() -> None:
    prepared = skips()
    fresh = fxq.prepare(Skips(), images()[:1], "nash-e", ON_SCALES)
    with torch.no_grad():
        for mine, theirs in zip(fresh.parameters(), prepared.parameters(), strict=True):
            mine.copy_(theirs)
    scales = fxq.qparams(prepared)
    fxq.set_qparams(fresh, {name: scale for name, scale in scales.items() if name != "second.intermediate"})
    with pytest.raises(fxq.errors.NotCalibrated, match=r"%second\.intermediate has no scale yet"):
        fxq.convert(fresh)
    fxq.set_qparams(fresh, scales)
    assert torch.equal(to_validate(fresh)(images()), prepared(images()))
    assert fxq.verify(prepared, fxq.convert(fresh), [images()], show_progress=False)
