"""Weights rounded together: what layers are sums of, errors that cancel, equal bits."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from examples.demo import load_digits_dataset
from fxquant.accuracy import measure, walk, weights
from fxquant.accuracy.moments import flipped, flipped_together, joint_noise
from fxquant.accuracy.walk import Samples, Walk, bound_arguments, real_result, weight_of, weighted_nodes
from fxquant.accuracy.weights import ALONE, FLOOR, WINDOW, _Layer, output_effects
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract
from tests.shared.networks import Network, copies

FOUR_BITS = fxq.QConfig(weight=fxq.WeightConfig("int4"))


def images(first: int, count: int) -> Tensor:
    """Digits of 8 × 8 pixels, from 0 on, as images are."""
    return (F.avg_pool2d(load_digits_dataset().train_images[first : first + count], 4) + 1) / 2


BATCHES, UNSEEN = list(torch.split(images(0, 48), 16)), images(100, 64)


def product() -> nn.Module:
    """A matrix parameter on the right."""
    return Network(lambda s, x: x @ s.matrix, matrix=nn.Parameter(torch.randn(8, 5)))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 6)).eval()


@copies
def prepared_of(target: str = "bayes-e", round_weights: bool | None = None) -> fx.GraphModule:
    """The network, calibrated; weights are rounded by samples unless told."""
    alone = {"choose_ranges": False, "correct_bias": False}
    return contract.calibrated(network(), BATCHES, target, FOUR_BITS, round_weights=round_weights, **alone)


def by_itself(layer: nn.Module, x: Tensor) -> tuple[fx.GraphModule, fx.Node]:
    """A layer of few bits, calibrated by one batch, and its node."""
    prepared = contract.calibrated(layer.eval(), [x], qconfig=FOUR_BITS)
    return prepared, next(iter(weighted_nodes(prepared)))


def error(prepared: nn.Module, model: nn.Module) -> float:
    with torch.no_grad():
        return float((prepared(UNSEEN) - model(UNSEEN)).square().mean())


# ---- what an output is a sum of -------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 5), (4, 3, 8)),
    "matrix": (product, (4, 3, 8)),
    "strided, dilated": (lambda: nn.Conv2d(4, 6, 3, 2, 1, dilation=2), (4, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 8, (3, 1), groups=4), (4, 4, 6, 6)),
    "one dimension": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 4, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (4, 4, 5, 5)),
    "a kernel larger than what is looked at of an image": (lambda: nn.Conv1d(1, 3, 2 * WINDOW), (4, 1, 3 * WINDOW)),
    "a dilated one": (lambda: nn.Conv1d(1, 3, 5, dilation=WINDOW), (4, 1, 6 * WINDOW)),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_product_with_what_is_found_for_it(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make().eval()
    if isinstance(bias := getattr(layer, "bias", None), nn.Parameter):
        nn.init.zeros_(bias)
    x = torch.randn(shape)
    prepared, node = by_itself(layer, x)
    operator, samples = quantized_operators(prepared)[node.name], Samples([[x]])
    with torch.no_grad():
        result = _Layer.of(node, operator, Walk(prepared, samples.chunks, exact=False).at(node.all_input_nodes))
        assert result is not None
        rows = result._rows(0, 10**6)
        assert rows is not None
        weight = weight_of(operator, result.operands[0])
        assert weight is not None
        products = rows @ weight.flatten(1).unflatten(0, (result.groups, -1)).transpose(1, 2)  # (groups, places, outputs)
        wanted = layer(x)
        axis = wanted.dim() - 1 - max(weight.dim() - 2, 0)
        wanted = wanted.movedim(axis, 0).flatten(1).unflatten(0, (result.groups, -1)).transpose(1, 2)
    assert torch.allclose(products, wanted, atol=1e-5)  # sums in another order


def test_of_large_images_parts_are_looked_at() -> None:
    layer, x = nn.Conv2d(1, 2, 3, padding=1), torch.rand(2, 1, 2 * WINDOW, WINDOW)
    prepared, node = by_itself(layer, x)
    with torch.no_grad():
        operands = Walk(prepared, [[x]], exact=False).at(node.all_input_nodes)
        result = _Layer.of(node, quantized_operators(prepared)[node.name], operands)
        assert result is not None
        rows = result._rows(0, 10**6)
    assert rows is not None
    assert rows.shape[2] == 9
    assert rows.shape[1] == 2 * WINDOW * WINDOW


# ---- errors that cancel -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [5, 600])  # in one part, and in several
def test_no_single_step_leaves_less(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.accuracy.moments.SWEEPS", 10**4)
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, 3 * columns, columns, generator=generator, dtype=torch.float64)
    moment = rows.transpose(1, 2) @ rows / rows.shape[1]
    real = 3 * torch.randn(2, 4, columns, generator=generator, dtype=torch.float64)
    result, nearest = flipped(real, moment, -8, 7), torch.round(real).clamp(-8, 7)

    def left(integers: Tensor) -> Tensor:
        return (((integers - real) @ moment) * (integers - real)).sum(2)

    assert bool((left(result) <= left(nearest)).all())
    assert float(left(result).mean()) < 0.8 * float(left(nearest).mean())
    assert torch.equal(result, result.round().clamp(-8, 7))
    for place, step in itertools.product(range(0, columns, max(1, columns // 20)), (-1, 1)):
        moved = result.clone()
        moved[:, :, place] = (moved[:, :, place] + step).clamp(-8, 7)
        assert bool((left(moved) >= left(result) - 1e-5 * moment.amax()).all())  # what is not worth a step is left


def test_no_single_step_of_outputs_together_leaves_less() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, gradients = (torch.randn(90, size, generator=generator, dtype=torch.float64) for size in (30, 8))
    moment, effect = rows.t() @ rows / 90, gradients.t() @ gradients / 90
    real = 3 * torch.randn(8, 30, generator=generator, dtype=torch.float64)
    start = torch.round(real).clamp(-8, 7)
    result = flipped_together(start, real, moment, effect, -8, 7)

    def left(integers: Tensor) -> float:
        error = integers - real
        return float(sum(effect[o, p] * (error[o] @ moment @ error[p]) for o in range(8) for p in range(8)))

    assert left(result) == pytest.approx(joint_noise([(result - real, moment)], effect))
    assert left(result) < 0.8 * left(start)
    assert torch.equal(result, result.round().clamp(-8, 7))
    for output, place, step in itertools.product(range(8), range(0, 30, 7), (-1, 1)):
        moved = result.clone()
        moved[output, place] = (moved[output, place] + step).clamp(-8, 7)
        assert left(moved) >= left(result) - 1e-5 * left(start)


def test_the_effect_of_outputs_is_that_of_what_reads_them() -> None:
    """One output minus another, one that nobody reads, and one that is always cut off."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)).eval()
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([50.0, 50.0, 0.0, -50.0]))
        model[2].weight.copy_(torch.tensor([[1.0, -1.0, 0.0, 1.0]]))
    x = torch.randn(16, 6)
    prepared, first = by_itself(model, x)
    result = output_effects(prepared, [[x]], [first])[first]
    whole = torch.zeros(4, 4)
    whole[:2, :2] = torch.tensor([[2.0, -2.0], [-2.0, 2.0]])  # with a mean of 1 on the diagonal
    wanted = (1 - ALONE) * whole + ALONE * torch.diag(whole.diagonal()) + FLOOR * torch.eye(4)
    assert torch.allclose(result, wanted, atol=1e-6)  # sums of squares in another order


class Stairs(torch.autograd.Function):
    """A function without a gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.floor()


def test_vectors_inference_mode_and_functions_without_a_gradient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    odd, square = Network(lambda s, x: s.last(x.mean(1) @ x), last=nn.Linear(3, 2)), torch.randn(3, 3)  # a product of vectors
    vectors, _ = by_itself(odd, square)
    contract.assert_validate_is_integer(vectors, fxq.convert(vectors), square)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "fxquant"):
        batches = [batch.clone() for batch in BATCHES]
        inferred = contract.calibrated(network(), batches, qconfig=FOUR_BITS, choose_ranges=False, correct_bias=False)
    with torch.no_grad():
        assert torch.equal(inferred(UNSEEN), prepared_of()(UNSEEN))
    assert not [record for record in caplog.records if "layer by layer" in record.message]
    original = walk.run

    def without_gradient(*arguments: Any, **settings: Any) -> Any:
        result = original(*arguments, **settings)
        return Stairs.apply(result) if isinstance(result, Tensor) else result  # type: ignore[no-untyped-call]

    monkeypatch.setattr(weights, "run", without_gradient)
    with caplog.at_level(logging.WARNING, "fxquant"):
        alone = contract.calibrated(network(), BATCHES, qconfig=FOUR_BITS)
    assert [record for record in caplog.records if "layer by layer" in record.message]
    contract.assert_validate_is_integer(alone, fxq.convert(alone), UNSEEN)


def test_results_are_as_large_as_in_float() -> None:
    plain, prepared = prepared_of(round_weights=False), prepared_of()
    beyond = {}
    for name, each in (("plain", plain), ("prepared", prepared)):
        (values,) = Walk(each, [[torch.cat(BATCHES)]], exact=False).at(node for node in each.graph.nodes if node.op != "output")
        with torch.no_grad():
            for node in weighted_nodes(each):
                operator = quantized_operators(each)[node.name]
                actual, wanted = real_result(operator, bound_arguments(node, operator, values)), values[node]
                axes = [axis for axis in range(wanted.dim()) if axis != 1]
                beyond[name, node.name] = ((actual * wanted).sum(axes) / wanted.square().sum(axes).clamp_min(1e-12) - 1).abs().median()
    names = [name for which, name in beyond if which == "plain"]
    assert all(beyond["prepared", name] < 0.01 for name in names)
    assert all(beyond["plain", name] > 0.02 for name in names)


def assert_trains_and_loads(prepared: fx.GraphModule, integer: fx.GraphModule, tmp_path: Path) -> None:
    contract.assert_train_is_validate(prepared, UNSEEN)
    loaded = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    with torch.no_grad():
        assert torch.equal(loaded(UNSEEN), integer(UNSEEN))


@pytest.mark.parametrize("target", ["bernoulli", "x86"])
def test_calibration_rounds_weights_of_few_bits(target: str, tmp_path: Path) -> None:
    model = network()
    plain, prepared = prepared_of(target, round_weights=False), prepared_of(target)
    assert error(prepared, model) < 0.7 * error(plain, model)
    integer = fxq.convert(prepared)
    contract.assert_validate_is_integer(prepared, integer, UNSEEN)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [UNSEEN[:4]], show_progress=False)
    assert_trains_and_loads(prepared, integer, tmp_path)


def test_with_8_bits_only_where_asked_for() -> None:
    by_name = {}
    for asked in (None, True, False):
        prepared = contract.calibrated(network(), BATCHES, round_weights=asked)
        by_name[asked] = {type(operator.weight_quantizer.rounding) for operator in quantized_operators(prepared).values()}
    assert by_name[None] == by_name[False] == {fxq.tuning.Nearest}
    assert fxq.tuning.AdaptiveRounding in by_name[True]


@pytest.mark.parametrize("worse", [False, True])
def test_8_bits_are_judged_by_the_outputs(worse: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    prepared = contract.calibrated(network(), BATCHES, correct_bias=False)
    noise = iter([1.0, 2.0] if worse else [2.0, 1.0])  # without the new roundings, and with them
    monkeypatch.setattr("fxquant.accuracy.measure.FloatOutputs.measure", lambda self: measure.Noise((next(noise),), (1.0,)))
    with caplog.at_level("INFO", "fxquant"):
        result = fxq.tuning.round_weights(prepared, BATCHES, show_progress=False)
    kinds = {type(operator.weight_quantizer.rounding) for operator in quantized_operators(prepared).values()}
    assert (fxq.tuning.AdaptiveRounding in kinds) == bool(result.kept) == (not worse)
    told = "8-bit weights are not rounded by samples" if worse else "8-bit weights are rounded by samples"
    assert any(told in message for message in caplog.messages)


def test_the_figures_are_those_of_what_is_held_out() -> None:
    prepared = prepared_of(round_weights=False)
    result = fxq.tuning.round_weights(prepared, BATCHES, show_progress=False)
    assert result.kept
    assert all((layer.after < layer.before) == layer.kept for layer in result)
    again = fxq.tuning.round_weights(prepared, BATCHES, show_progress=False)
    for layer, before in zip(again, result, strict=True):  # it starts from the first roundings, with scales that were levelled after them
        assert layer.gain < before.gain
    assert sum(layer.gain for layer in again) < sum(layer.gain for layer in result) / 10  # dB
    assert "round_weights" in str(result)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", ["learned", "tqt"])
def test_weights_whose_scale_is_learned_are_rounded_as_well(training: str, tmp_path: Path) -> None:
    """The scale with the least error cuts some weights off, and training starts from what the samples have found."""
    model, qconfig = network(), fxq.QConfig(weight=fxq.WeightConfig("int4", training=training))

    def calibrated(round_weights: bool | None, *parts: list[Tensor]) -> fx.GraphModule:
        prepared = fxq.prepare(model, BATCHES[0], qconfig=qconfig)
        for part in parts:
            fxq.calibrate(prepared, part, options=fxq.Options(round_weights=round_weights, correct_bias=False), show_progress=False)
        return prepared

    plain, prepared = calibrated(False, BATCHES), calibrated(None, BATCHES)
    assert contract.same_state(prepared, calibrated(None, BATCHES[:2], BATCHES[2:]))
    assert error(prepared, model) < 0.7 * error(plain, model)
    integer = fxq.convert(prepared)
    contract.assert_validate_is_integer(prepared, integer, UNSEEN)
    assert_trains_and_loads(prepared, integer, tmp_path)
