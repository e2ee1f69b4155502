"""The weight quantizer: scales and integers against the oracle, another rounding, and zeros of pruned weights that stay zeros."""

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.accuracy.moments import flipped, flipped_together
from fxquant.numerics.grids import WEIGHT_INT4, WEIGHT_INT8, WEIGHT_INT16, IntType
from fxquant.numerics.rounding import AdaptiveRounding, straight_through
from fxquant.quantization.weights import WeightQuantizer, WeightScale
from tests.shared import contract, oracle
from tests.shared.networks import descend, members, to_train


class Adaptive(fxq.tuning.Rounding):
    """Down or up, as a learned number for each weight says: the shape of AdaRound."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.offset = nn.Parameter(torch.zeros(shape))

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        down, share = torch.floor(real.detach()), torch.sigmoid(self.offset)
        exact = (down + torch.round(share)).clamp(low, high).detach()
        return straight_through((down + (real - real.detach()) + share).clamp(low, high), exact)


# ---- scales and integers ----------------------------------------------------------------------------------------------------
weights = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6).map(lambda row: torch.tensor(row).reshape(3, 2))
least_scales = st.lists(st.floats(0, 0.125, width=32), min_size=3, max_size=3).map(torch.tensor)


def next_power_of_two(value: Fraction) -> Fraction:
    power = Fraction(1)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


@given(weight=weights, least=least_scales, dtype=st.sampled_from([WEIGHT_INT4, WEIGHT_INT8, WEIGHT_INT16]),
       per_channel=st.booleans(), power_of_two=st.booleans())  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=60)
def test_scales_and_integers(weight: Tensor, least: Tensor, dtype: IntType, per_channel: bool, power_of_two: bool) -> None:
    result = WeightQuantizer(dtype, per_channel=per_channel, power_of_two=power_of_two).integers(weight, None, least)
    rows = weight.tolist() if per_channel else [weight.flatten().tolist()]
    needs = least.tolist() if per_channel else [max(least.tolist())]
    scales, own, integers = [], [], []
    for row, need in zip(rows, needs, strict=True):
        largest = max(abs(Fraction(w)) for w in row)
        chosen = max(oracle.float32(largest / dtype.high), Fraction(1, 2**48)) if largest else Fraction(1, 2**23)
        raised = max(chosen, Fraction(need))
        own.append(raised == chosen)
        scales.append(next_power_of_two(raised) if power_of_two else raised)
        integers += [oracle.weight_integer(Fraction(w), scales[-1]) for w in row]
    assert [Fraction(scale) for scale in result.scale.tolist()] == scales
    assert result.own.tolist() == own
    assert result.integers.flatten().tolist() == integers
    assert result.integers.shape == weight.shape


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_a_scale_with_the_least_error_is_found(p: float, per_channel: bool, power_of_two: bool) -> None:
    weight = torch.distributions.StudentT(3.0).sample((4, 400)) * torch.tensor([[0.1], [1.0], [3.0], [0.5]])  # type: ignore[no-untyped-call]
    result = WeightQuantizer(WEIGHT_INT4, per_channel=per_channel, power_of_two=power_of_two, p=p).integers(weight)
    rows = weight if per_channel else weight.reshape(1, -1)
    assert result.integers.abs().max() == 7

    def errors(scale: Tensor) -> Tensor:
        column = scale.unsqueeze(1)
        return ((rows / column).round().clamp(-7, 7) * column - rows).abs().pow(p).sum(1)

    largest = rows.abs().amax(1) / 7
    tried = [2.0**k for k in range(-8, 4)] if power_of_two else [float(largest.max()) * k / 400 for k in range(2, 401)]
    best = torch.stack([errors(torch.full_like(largest, scale)) for scale in tried]).amin(0)
    covering = torch.exp2(largest.log2().ceil()) if power_of_two else largest
    assert bool((errors(result.scale) <= (1.0 if power_of_two else 1.05) * best + 1e-6).all())
    assert bool((errors(result.scale) < errors(covering)).all()) or power_of_two
    assert torch.equal(result.integers.reshape(rows.shape), (rows / result.scale.unsqueeze(1)).round().clamp(-7, 7))


def test_a_learned_scale_starts_where_it_is_kept() -> None:
    weight = torch.randn(4, 9)
    learned = WeightScale(4)
    quantizer = WeightQuantizer(WEIGHT_INT4, learned=learned)
    looked = quantizer.integers(weight)
    assert bool(learned.base_scale.isnan().all())
    kept = quantizer.integers(weight, keep=True)
    assert torch.equal(learned.base_scale, looked.scale)
    assert all(torch.equal(one, other) for one, other in zip(looked, kept, strict=True))
    assert torch.equal(quantizer.integers(3 * weight).scale, looked.scale)


# ---- another rounding ---------------------------------------------------------------------------------------------------------
@members(lambda: dict(
    conv=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6), up=nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), norm=nn.BatchNorm2d(4),
    offset=nn.Parameter(torch.randn(4, 1, 1)), matrix=nn.Parameter(torch.randn(4, 5)), head=nn.Linear(5, 3),
))  # fmt: skip
def Net(self, x: Tensor) -> Tensor:
    """Every kind of weight: of a convolution with a batch norm, transposed in groups, a matrix, a linear layer; and a constant."""
    x = torch.relu(self.bn(self.conv(x)))
    x = self.norm(torch.sigmoid(self.up(x))) + self.offset
    return self.head(x.mean((2, 3)) @ self.matrix)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 3, 6, 6, generator=generator) for _ in range(3)]


def adaptive(training: str = "statistics", target: str = "bayes-e") -> fx.GraphModule:
    torch.manual_seed(1)
    qconfig = fxq.QConfig(weight=fxq.WeightConfig("int4", training=training, rounding=Adaptive))
    return contract.calibrated(Net(), batches(), target, qconfig)


def train(prepared: fx.GraphModule, steps: int = 3) -> None:
    optimizer = torch.optim.Adam(to_train(prepared).parameters(), 0.01)
    descend(prepared, batches()[:steps], loss=lambda output: F.cross_entropy(output, torch.arange(6) % 3), optimizer=optimizer)


def offsets(prepared: fx.GraphModule) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in prepared.named_parameters() if name.endswith(".rounding.offset")}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "bernoulli"])
@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_another_rounding_holds_the_contract_after_training(training: str, target: str, tmp_path: Path) -> None:
    prepared = adaptive(training, target)
    train(prepared)
    assert all(0 < int((offset > 0).sum()) < offset.numel() for offset in offsets(prepared).values())
    integer = contract.assert_contract(prepared, tmp_path / "model.onnx", batches()[0])
    if training == "statistics" and target != "bernoulli":
        weight, offset = prepared.head.weight.tolist(), offsets(prepared)["quantized.head.weight_quantizer.rounding.offset"].tolist()
        expected = []
        for row, moves in zip(weight, offset, strict=True):
            scale = oracle.float32(max(abs(Fraction(w)) for w in row) / 7)
            down = [math.floor(oracle.float32(Fraction(w) / scale)) for w in row]
            expected.append([min(max(q + (move > 0), -7), 7) for q, move in zip(down, moves, strict=True)])
        assert integer.integer.head.weight.tolist() == expected


@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_gradients_reach_weights_scales_and_roundings(training: str) -> None:
    """Gradients of weights and learned scales do not depend on the rounding; the rounding has the gradient of its soft form."""
    torch.manual_seed(4)
    rounding = Adaptive((3, 8))
    with torch.no_grad():
        rounding.offset.uniform_(-2, 2)
    learned = WeightScale(3) if training == "learned" else None
    quantizer = WeightQuantizer(WEIGHT_INT4, learned=learned, rounding=rounding)
    weight, incoming = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    result = quantizer.integers(weight, keep=True)
    result.integers.backward(incoming)
    real = weight.detach() / result.scale.unsqueeze(1)
    inside = (real >= -7) & (real <= 7) if training == "learned" else torch.ones_like(real, dtype=torch.bool)
    share = torch.sigmoid(rounding.offset.detach())
    soft = torch.floor(real) + share
    free = (soft > -7) & (soft < 7)
    torch.testing.assert_close(rounding.offset.grad, incoming * share * (1 - share) * free)
    if learned is None:
        torch.testing.assert_close(weight.grad, incoming * free / result.scale.unsqueeze(1))
        return
    torch.testing.assert_close(weight.grad, incoming * inside / result.scale.unsqueeze(1))
    of_real = incoming / result.scale.unsqueeze(1)  # of the dequantized weights
    of_scale = (of_real * (result.integers.detach() - real * inside)).sum(1)
    error = (result.integers.detach() - real * inside).square().mean(1).clamp_min(1 / 12).sqrt()
    torch.testing.assert_close(learned.scale_change.grad, of_scale / (weight.detach().norm(dim=1) * error))


def test_a_rounding_that_is_not_finite_is_an_error() -> None:
    prepared = adaptive()
    with torch.no_grad():
        offsets(prepared)["quantized.conv.weight_quantizer.rounding.offset"].fill_(float("nan"))
    with pytest.raises(fxq.errors.NotFinite, match="conv") as caught:
        fxq.convert(prepared)
    assert "rounding holds NaN" in str(caught.value)


def test_roundings_load_from_a_state_dict_and_not_from_a_file(tmp_path: Path) -> None:
    prepared = adaptive("learned")
    train(prepared)
    other = adaptive("learned")
    assert other.load_state_dict(prepared.state_dict()) == ([], [])
    assert fxq.text(fxq.convert(other)) == fxq.text(fxq.convert(prepared)) != fxq.text(fxq.convert(adaptive("learned")))
    with pytest.raises(fxq.errors.ExportError, match="its class Adaptive is not one of those a file can name"):
        fxq.save(prepared, tmp_path / "model.fxq")
    qconfig = fxq.QConfig(weight=fxq.WeightConfig(rounding=Adaptive))
    annotated = fxq.prepare(Net(), batches()[0], qconfig=qconfig, until="specs.annotate")
    with pytest.raises(fxq.errors.ExportError, match="the rounding Adaptive cannot be saved"):
        fxq.save(annotated, tmp_path / "model.fxq")
    integer = fxq.convert(prepared)  # its constants are rounded
    assert torch.equal(fxq.load(fxq.save(integer, tmp_path / "integer.fxq"))(batches()[0]), integer(batches()[0]))


Method = Callable[[fx.GraphModule, list[Tensor]], Any]


def network() -> nn.Sequential:
    """Convolutions with and without groups and a batch norm, and a linear layer; many weights are pruned, one channel whole."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, groups=4), nn.ReLU()]
    model = nn.Sequential(*first, nn.Conv2d(12, 6, 1), nn.Flatten(), nn.Linear(96, 5)).eval()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            size = layer.weight.abs()
            with torch.no_grad():
                layer.weight.mul_(size > size.quantile(0.4))
                layer.weight[1] = 0
    return model


def positive_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(8, 3, 8, 8, generator=generator) for _ in range(8)]


def calibrated(method: str, bits: str = "int4", target: str = "bayes-e", **options: Any) -> fx.GraphModule:
    weight = fxq.WeightConfig(bits, **options)
    prepared = fxq.prepare(network(), positive_batches()[0], target, fxq.QConfig(weight=weight))
    by_calibration = {"calibrate": None, "all layers": True}
    rounds = by_calibration.get(method, False)
    fxq.calibrate(prepared, positive_batches(), options=fxq.Options(round_weights=rounds, correct_bias=False))
    if method not in by_calibration:
        METHODS[method](prepared, positive_batches())
    return prepared


METHODS: dict[str, Method] = {
    "round_weights": lambda p, b: fxq.tuning.round_weights(p, b),
    "adaround": lambda p, b: fxq.tuning.adaround(p, b, steps=40),
    "distill": lambda p, b: fxq.tuning.distill(p, b, steps=40),
}


def returned(prepared: fx.GraphModule) -> int:
    """How many weights are 0 in float and another integer."""
    constants = fxq.convert(prepared, kernels="reference").state_dict()
    integers = [value for name, value in constants.items() if name.endswith("weight")]
    weights = [layer.weight for layer in network() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [value.shape for value in integers] == [weight.shape for weight in weights]
    return sum(int(((weight == 0) & (value != 0)).sum()) for weight, value in zip(weights, integers, strict=True))


def roundings(prepared: fx.GraphModule) -> list[AdaptiveRounding]:
    return [module for module in prepared.modules() if isinstance(module, AdaptiveRounding)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", ["calibrate", "all layers", *METHODS])
def test_no_method_moves_a_pruned_weight(method: str) -> None:
    prepared = calibrated(method)
    assert roundings(prepared)
    assert returned(prepared) == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{"target": "x86"}, {"bits": "int8"}, {"per_channel": False}, {"power_of_two": True}], ids=str)
def test_nor_does_any_grid(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.accuracy.measure.is_lower", lambda *_: True)  # whatever the outputs say of roundings of 8 bits
    prepared = calibrated("all layers", **options)
    assert roundings(prepared)
    assert returned(prepared) == 0


def test_a_weight_that_is_pruned_after_calibration_becomes_zero() -> None:
    prepared = calibrated("calibrate")
    weights = [value for value in prepared.parameters() if value.dim() > 1]
    with torch.no_grad():
        for value in weights:
            value.mul_(torch.rand(value.shape, generator=torch.Generator().manual_seed(2)) > 0.5)
    constants = fxq.convert(prepared, kernels="reference").state_dict()
    integers = [value for name, value in constants.items() if name.endswith("weight")]
    assert all(int(integer[weight == 0].count_nonzero()) == 0 for weight, integer in zip(weights, integers, strict=True))


def test_the_rounding_is_chosen_with_the_zeros_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    real = 3 * torch.randn(4, 24, generator=generator)
    real *= torch.rand(4, 24, generator=generator) > 0.5
    rows = torch.rand(200, 24, generator=generator)
    moment, effect = rows.t() @ rows / 200, torch.eye(4)
    alone = flipped(real.unsqueeze(0), moment.unsqueeze(0), -7, 7)[0]
    for result in (alone, flipped_together(torch.round(real).clamp(-7, 7), real, moment, effect, -7, 7)):
        assert not torch.equal(result, torch.round(real).clamp(-7, 7))
        assert int(result[real == 0].count_nonzero()) == 0
