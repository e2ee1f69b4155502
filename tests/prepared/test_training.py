"""Scales in training: LSQ, LSQ+, PACT and TQT number by number, statistics, powers of two, freezing, loading, and the contract after it."""

import io
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.numerics.grids import INT4, INT8, UINT8, WEIGHT_INT4, WEIGHT_INT8, IntType
from fxquant.quantization.learning import LSQ, METHODS, TrainableScale, learned_step
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightScale
from tests.shared import contract
from tests.shared.contract import assert_contract
from tests.shared.networks import copies, descend, members, to_train, to_validate, written

MODES = ("statistics", "learned", "frozen")
BATCHES = list(torch.randn(3, 8, 2, 6, 6, generator=torch.Generator().manual_seed(1)))


@members(lambda: dict(
    conv1=nn.Conv2d(2, 6, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(6), conv2=nn.Conv2d(6, 6, 3, padding=1), bn2=nn.BatchNorm2d(6),
    head=nn.Linear(6, 4),
))  # fmt: skip
def Net(self, x: Tensor) -> Tensor:
    """Convolutions with and without batch norm, a residual, a pooled tail and a linear layer."""
    x = F.relu(self.bn1(self.conv1(x)))
    x = F.relu(x + self.bn2(self.conv2(x)))
    return self.head(x.mean((2, 3)))


def config(
    activations: str = "statistics", weights: str = "statistics", bits: int = 8, dtype: str | None = None, **options: Any
) -> fxq.QConfig:
    """How activations and weights are trained; `dtype` of activations is that of the bits unless told."""
    return fxq.QConfig(
        fxq.ActivationConfig(dtype or f"int{bits}", training=activations, **options),
        fxq.WeightConfig(f"int{bits}", training=weights, **options),
    )


@copies
def calibrated(qconfig: fxq.QConfig, target: str = "bayes-e", **options: Any) -> fx.GraphModule:
    torch.manual_seed(3)
    return fxq.calibrate(fxq.prepare(Net(), BATCHES[0], target, qconfig, options=fxq.Options(**options)), BATCHES)


def train(prepared: fx.GraphModule, steps: int = 4, learning_rate: float = 0.02, optimizer: Any = None) -> None:
    """A few steps towards arbitrary labels, in state TRAIN."""
    optimizer = optimizer or torch.optim.SGD(prepared.parameters(), learning_rate, momentum=0.9)
    images = (BATCHES * steps)[:steps]
    descend(to_train(prepared), images, loss=lambda output: F.cross_entropy(output, torch.arange(8) % 4), optimizer=optimizer)


def scales(prepared: fx.GraphModule) -> dict[str, Tensor]:
    """Every scale of the moment: of tensors, and of weights where they are learned."""
    result = {name: module.scale.clone() for name, module in prepared.named_modules() if isinstance(module, Quantizer)}
    result.update({name: module.current().clone() for name, module in prepared.named_modules() if isinstance(module, WeightScale)})
    return result


def growths(prepared: fx.GraphModule) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in prepared.named_parameters() if name.endswith(".scale_change")}


# ---- LSQ --------------------------------------------------------------------------------------------------------------------
def slow_lsq(values: list[float], gradient: list[float], scale: float, dtype: IntType) -> tuple[list[float], float]:
    """The gradients of the values and of their one scale, number by number, from the paper; `gradient` is that of the dequantized values.

    Without the paper's factor, which the derivative does not have.
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


def test_learned_scales_need_no_freezing_to_train_on_what_is_validated() -> None:
    prepared = calibrated(config("learned", "learned", bits=4), batch_norm="frozen")
    for _ in range(3):
        train(prepared, steps=1)
        trained = contract.operator_outputs(prepared, BATCHES[2])
        validated = contract.operator_outputs(to_validate(prepared), BATCHES[2])
        assert trained.keys() == validated.keys()
        assert all(torch.equal(value, validated[name]) for name, value in trained.items())


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
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), BATCHES[0])


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


# ---- statistics -------------------------------------------------------------------------------------------------------------
def test_the_first_training_batch_continues_where_calibration_ended() -> None:
    """A histogram's threshold lies below the largest value, and training does not pull it there."""
    batch = torch.randn(64, 2, 6, 6)
    batch[0, 0, 0, 0] = 12.0
    prepared = fxq.calibrate(fxq.prepare(Net(), batch, qconfig=config(bits=4)), [batch])
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
    prepared = fxq.calibrate(fxq.prepare(Net(), BATCHES[0], qconfig=config()), [torch.zeros(8, 2, 6, 6)])
    quantizer = prepared.quantized.x_quantize.output
    assert quantizer.scale == 2.0**-23
    to_train(prepared)(torch.full((8, 2, 6, 6), 3.0))
    torch.testing.assert_close(float(quantizer.scale), 3 / 127.5)  # an average does not include the zeros of calibration
    prepared(torch.full((8, 2, 6, 6), 6.0))
    torch.testing.assert_close(float(quantizer.scale), 6 / 127.5)  # what grows is covered at once
    prepared(torch.full((8, 2, 6, 6), 3.0))
    torch.testing.assert_close(float(quantizer.scale), 4 / 127.5)  # and otherwise the average of what was not 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", MODES)
def test_training_without_calibration_starts_from_the_first_batch_unless_scales_are_frozen(mode: str) -> None:
    prepared = fxq.prepare(Net(), BATCHES[0], qconfig=config(mode, "learned" if mode == "learned" else "statistics"))
    to_train(prepared)
    if mode == "frozen":
        with pytest.raises(fxq.errors.NotCalibrated):
            prepared(BATCHES[0])
        return
    prepared(BATCHES[0])
    reference = contract.calibrated(Net(), BATCHES[:1], qconfig=config())
    assert fxq.qparams(prepared)["x_quantize"] == fxq.qparams(reference)["x_quantize"]
    contract.assert_validate_is_integer(prepared, fxq.convert(to_validate(prepared)), BATCHES[1])


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
    assert_contract(prepared, tmp_path / "model.onnx", BATCHES[0])


def test_a_power_of_two_that_is_learned_moves_when_enough_steps_add_up() -> None:
    quantizer = Quantizer(INT8, fxq.observers.MinMaxObserver(), training="learned", power_of_two=True)
    quantizer.observe(torch.tensor([-12.0, 12.0]))
    quantizer.update_scale()
    assert quantizer.scale == 0.125  # 12 / 127.5 = 0.094, rounded up
    assert quantizer.scale_change is not None
    steps = []
    for scale_change in (0.1, 0.3, 0.4, -0.4, -0.6):
        quantizer.scale_change.data.fill_(scale_change)
        steps.append(float(quantizer.scale))
    assert steps == [0.125, 0.125, 0.25, 0.125, 0.0625]


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
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), BATCHES[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_that_is_set_stays_through_training(mode: str) -> None:
    prepared = calibrated(config(mode, "learned"))
    fxq.set_qparams(prepared, {"conv1": 0.07})
    fxq.calibrate(prepared, [3 * x for x in BATCHES])
    train(prepared)
    assert fxq.qparams(prepared)["conv1"] == pytest.approx(0.07, rel=1e-7)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), BATCHES[0])


# ---- loading --------------------------------------------------------------------------------------------------------------------
GRIDS = (("bayes-e", "int8", MODES), ("x86", "uint8", ("statistics", "learned", "lsq+", "pact")))


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("target", "dtype", "saved", "loaded"), [(*grid, *two) for *grid, how in GRIDS for two in itertools.product(how, how)]
)
def test_scales_load_into_a_new_model_whatever_either_does_in_training(target: str, dtype: str, saved: str, loaded: str) -> None:
    qconfigs = [config(training, dtype=dtype) for training in (saved, loaded)]
    one, other, file = calibrated(qconfigs[0], target), fxq.prepare(Net(), BATCHES[0], target, qconfigs[1]), io.BytesIO()
    train(one)
    with torch.no_grad():
        for parameter in (each for name, each in one.named_parameters() if name.endswith("offset_change")):
            parameter.add_(0.1)  # so that zero points move
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    scales = fxq.qparams(to_validate(one))
    assert all(value == pytest.approx(scales[name], rel=2e-7) for name, value in fxq.qparams(to_validate(other)).items())
    if "pact" not in (saved, loaded):  # whose parameter is a multiple of the scale
        assert fxq.text(fxq.convert(other)) == fxq.text(fxq.convert(one))
        assert torch.equal(other(BATCHES[0]), one(BATCHES[0]))
    assert scales != fxq.qparams(calibrated(qconfigs[0], target)) or saved == "frozen"
    train(other)
    assert (fxq.qparams(to_validate(other)) != scales) is (loaded != "frozen")
    contract.assert_validate_is_integer(other, fxq.convert(other), BATCHES[0])


def test_calibrating_again_starts_learned_scales_anew() -> None:
    prepared = calibrated(config("learned", "learned"))
    train(prepared)
    fxq.calibrate(prepared, BATCHES)
    assert all(bool((scale_change == 0).all()) for scale_change in growths(prepared).values())
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), BATCHES[0])


def test_a_model_saved_between_observing_and_setting_its_scales_goes_on(tmp_path: Path) -> None:
    prepared = calibrated(config())
    fxq.set_state(prepared, fxq.State.CALIBRATE)
    prepared(4 * BATCHES[0])
    loaded = fxq.load(fxq.save(prepared, tmp_path / "model.fxq"))
    assert fxq.qparams(to_validate(loaded)) == fxq.qparams(to_validate(prepared)) != fxq.qparams(calibrated(config()))


# ---- what stands still stays so ---------------------------------------------------------------------------------------
ON_SCALES = fxq.QConfig(fxq.ActivationConfig("int8"))  # the output too


@copies
def skips(qconfig: fxq.QConfig = ON_SCALES) -> fx.GraphModule:
    torch.manual_seed(0)
    return contract.calibrated(skip_model(), [images()], "nash-e", qconfig)


def skip_model() -> nn.Module:
    """A residual that is too fine to be added in the accumulator."""
    model = written(lambda m, x: m.second(y := m.first(x)) + 0.001 * y, first=nn.Conv2d(3, 3, 1), second=nn.Conv2d(3, 3, 1))
    model.second.weight.data.mul_(100)
    return model


def images(factor: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)) * factor


def train_on(prepared: fx.GraphModule, value: torch.Tensor, steps: int = 3) -> None:
    to_train(prepared)
    for _ in range(steps):
        prepared(value)
    to_validate(prepared)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stop", ["set", "freeze", "learned", "inputs"])
def test_scales_that_stand_still_do_so_through_a_checkpoint(stop: str) -> None:
    fixed = fxq.QConfig(fxq.ActivationConfig(scale=0.03))
    qconfig = {"learned": config("learned", "learned"), "given": fixed}.get(stop, ON_SCALES)
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
    assert fxq.verify(loaded, fxq.convert(loaded), [images()])


def test_a_given_scale_loads_where_scales_are_observed_and_an_observed_one_takes_no_given_ones_place() -> None:
    fixed, observed = skips(qconfig=fxq.QConfig(fxq.ActivationConfig(scale=0.03))), skips()
    scales = fxq.qparams(fixed)
    missing, unexpected = fixed.load_state_dict(observed.state_dict(), strict=False)
    assert missing == []
    assert all(".observer." in name or ".range." in name or ".others." in name for name in unexpected)
    assert fxq.qparams(fixed) == scales
    observed.load_state_dict(fixed.state_dict())
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


@pytest.mark.parametrize("name", ["second", "second.intermediate"])
def test_an_output_and_what_a_residual_is_added_to_have_scales_of_their_own(name: str) -> None:
    prepared = skips()
    fxq.set_qparams(prepared, {name: 0.75})
    before = fxq.qparams(prepared)
    train_on(prepared, images(3.0))
    after = fxq.qparams(prepared)
    (other,) = {"second", "second.intermediate"} - {name}
    assert after[name] == 0.75
    assert after[other] > 1.02 * before[other]
    assert fxq.verify(prepared, fxq.convert(prepared), [images()])
    fxq.freeze(prepared)
    train_on(prepared, images(9.0))
    assert fxq.qparams(prepared) == after


def test_scales_that_are_read_and_set_again_give_the_same_bits_with_a_residual_too() -> None:
    prepared = skips()
    fresh = fxq.prepare(skip_model(), images()[:1], "nash-e", ON_SCALES)
    with torch.no_grad():
        for mine, theirs in zip(fresh.parameters(), prepared.parameters(), strict=True):
            mine.copy_(theirs)
    scales = fxq.qparams(prepared)
    fxq.set_qparams(fresh, {name: scale for name, scale in scales.items() if name != "second.intermediate"})
    with pytest.raises(fxq.errors.NotCalibrated, match=r"%second\.intermediate has no scale yet"):
        fxq.convert(fresh)
    fxq.set_qparams(fresh, scales)
    assert torch.equal(to_validate(fresh)(images()), prepared(images()))
    assert fxq.verify(prepared, fxq.convert(fresh), [images()])


FAMILY = tuple(METHODS)


# ---- gradients ----------------------------------------------------------------------------------------------------------
def stepped(dtype: IntType, training: str, value: Tensor, incoming: Tensor) -> Quantizer:
    """A quantizer that has had the gradient `incoming` of the dequantized `value`."""
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
    result = {name: float(parameter.grad) for name, parameter in quantizer.trained.items()}
    expected = {
        "scale_change": wanted["scale"] * scale,
        "offset_change": wanted["offset"] * 255 * base,
        "alpha": wanted["alpha"],
        "log2_change": wanted["scale"] * scale * math.log(2),
    }
    assert set(result) == {"learned": {"scale_change"}, "pact": {"alpha"}, "tqt": {"log2_change"}}.get(
        training, {"scale_change", "offset_change"} if dtype.affine else {"scale_change"}
    )
    for name, gradient in result.items():
        assert gradient == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_what_saturates_has_a_gradient_whatever_its_scale_rounds_to() -> None:
    """q · s / s is a little more than q for one scale in ten; an integer at the limit is inside of its grid all the same."""
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
    prepared = calibrated(config("pact", "learned", dtype="uint8"), "x86")
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
    steps = []
    for change in (0.3, 0.4, 1.4, -0.6, -1.5):
        quantizer.log2_change.data.fill_(change)
        steps.append(float(quantizer.scale))
    assert steps == [0.125, 0.25, 0.5, 0.125, 0.0625]
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
TRAINED: dict[str, tuple[str, fxq.QConfig]] = {
    "learned": ("bayes-e", config("learned", "learned")),
    "learned, 4 bits": ("nash-e", config("learned", "learned", 4)),
    "learned, powers of two": ("bernoulli", config("learned", "learned", 4)),
    "learned, float multipliers": ("qnnpack", config("learned", "learned")),
    "one scale for a weight": ("bayes-e", fxq.QConfig(weight=fxq.WeightConfig("int4", per_channel=False, training="learned"))),
    "lsq+": ("x86", config("lsq+", "learned", dtype="uint8")),
    "pact": ("bayes-e", config("pact", "learned", 4)),
    "tqt": ("bernoulli", config("tqt", "tqt")),
    "least errors": ("bayes-e", fxq.QConfig(fxq.ActivationConfig(observer="lp"), fxq.WeightConfig("int4", p=3.0))),
    "least errors, learned": (
        "nash-e",
        fxq.QConfig(fxq.ActivationConfig(observer="lp"), fxq.WeightConfig("int4", p=2.4, training="learned")),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", TRAINED)
def test_the_contract_holds_after_training(name: str, tmp_path: Path) -> None:
    target, qconfig = TRAINED[name]
    prepared = calibrated(qconfig, target)
    before = {name: parameter.detach().clone() for name, parameter in prepared.named_parameters() if name.startswith("quantized.")}
    train(prepared)
    moved = [name for name, value in before.items() if not torch.equal(value, prepared.get_parameter(name))]
    assert len(moved) >= len(before) / 2
    integer = fxq.convert(prepared)
    contract.assert_alive(integer, BATCHES[0])
    contract.assert_validate_is_integer(prepared, integer, BATCHES[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(BATCHES[0],)])
    loaded = fxq.load(fxq.save(prepared, tmp_path / "one.fxq"))
    assert fxq.save(loaded, tmp_path / "two.fxq").read_bytes() == (tmp_path / "one.fxq").read_bytes()
    assert fxq.text(fxq.convert(loaded)) == fxq.text(integer)
    state = {name: value.clone() for name, value in prepared.state_dict().items()}
    fresh = fxq.prepare(Net(), BATCHES[0], target, qconfig)
    assert fresh.load_state_dict(state) == ([], [])
    assert fxq.text(fxq.convert(fresh)) == fxq.text(integer)
    contract.assert_train_is_validate(prepared, BATCHES[1])


@pytest.mark.parametrize("weights", ["learned", "tqt"])
def test_a_state_dict_from_before_learning_starts_learned_weights_anew(weights: str) -> None:
    """As a state dict does that is loaded into a model that has just been calibrated."""
    before = calibrated(config(), "nash-e")
    fresh, used = (calibrated(config("learned", weights), "nash-e") for _ in range(2))
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
    learned = calibrated(config("learned", "learned", 4), "nash-e")
    train(learned)
    plain = calibrated(config(bits=4), "nash-e")
    assert plain.load_state_dict(learned.state_dict()) == ([], [])
    assert fxq.text(fxq.convert(plain)) == fxq.text(fxq.convert(learned))
    kept = plain.quantized.conv1.weight_quantizer.learned.current().clone()
    again = fxq.load(fxq.save(plain, tmp_path / "plain.fxq"))
    for model in (plain, again):
        train(model)
        assert torch.equal(model.quantized.conv1.weight_quantizer.learned.current(), kept)
    assert fxq.text(fxq.convert(again)) == fxq.text(fxq.convert(plain))
    contract.assert_train_is_validate(plain, BATCHES[0])
    plain.load_state_dict(calibrated(config(bits=4), "nash-e").state_dict())
    assert plain.quantized.conv1.weight_quantizer.learned is None
