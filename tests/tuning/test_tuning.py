"""Methods of tuning: nearer to the float model on samples not seen, equal bits in every form, repeatable, resumable, all or nothing."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from examples.demo import load_digits_dataset
from fxquant.accuracy import distill, learn, measure
from fxquant.accuracy.learn import block_units
from fxquant.accuracy.walk import layer_units
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract
from tests.shared.contract import compiled, same_state
from tests.shared.networks import copies, members, to_train, written

Method = Callable[..., Any]
STEPS = 20
FOUR_BITS = fxq.QConfig(weight=fxq.WeightConfig("int4"))


def block_model(channels: int) -> Any:
    """A residual block."""
    model = written(lambda m, x: F.relu(x + m.norm(m.b(F.relu(m.a(x))))))
    model.a, model.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
    model.norm = nn.BatchNorm2d(channels)
    return model


@members(lambda: dict(
    stem=nn.Conv2d(1, 6, 3, padding=1), block=block_model(6), up=nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2),
    matrix=nn.Parameter(torch.randn(4, 5)), head=nn.Linear(5, 3),
))  # fmt: skip
def Net(self, x: Tensor) -> Tensor:
    """Every kind of weight: with a batch norm and a residual, without a bias, transposed in groups, a matrix, a linear layer."""
    x = F.hardswish(self.up(self.block(F.relu6(self.stem(x)))))
    return self.head(F.adaptive_avg_pool2d(x, 2).flatten(2).transpose(1, 2) @ self.matrix)


def images(first: int, count: int) -> Tensor:
    """Digits of 8 × 8 pixels."""
    return F.avg_pool2d(load_digits_dataset().train_images[first : first + count], 4)


LEARNED, SEEN_BY_NOBODY = list(torch.split(images(0, 32), 8)), images(100, 32)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """With the batch norm statistics that it has on the digits."""
    torch.manual_seed(3)
    model = Net().train()
    for _ in range(30):
        model(images(0, 32))
    return model.eval()


@copies
def calibrated(
    network: nn.Module, target: str = "bayes-e", activation: str | None = "int8", rounding: type[fxq.tuning.Rounding] = fxq.tuning.Nearest
) -> fx.GraphModule:
    qconfig = fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig("int4", rounding=rounding))
    return compiled(network, LEARNED, target, qconfig, choose_ranges=False, correct_bias=False).prepared


def error(prepared: fx.GraphModule, network: nn.Module) -> float:
    """On images that nothing was learned from, chosen by or calibrated with."""
    with torch.no_grad():
        return float((prepared(SEEN_BY_NOBODY) - network(SEEN_BY_NOBODY)).square().mean())


def bits(prepared: fx.GraphModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prepared.state_dict().items()}


# ---- better, and exact ------------------------------------------------------------------------------------------------------

SHORT, LONG = ({"steps": steps, "options": fxq.Options(batch_size=8)} for steps in (STEPS, 3 * STEPS))
WORKS: dict[str, tuple[str, str | None, Callable[[fx.GraphModule], Any]]] = {
    "adaround, 16 bits": ("bayes-e", "int16", lambda p: fxq.tuning.adaround(p, LEARNED, **SHORT)),
    "reconstruct, affine": ("x86", "int4", lambda p: fxq.tuning.reconstruct(p, LEARNED, **LONG)),
    "reconstruct, 4 bits": ("bayes-e", "int4", lambda p: fxq.tuning.reconstruct(p, LEARNED, **LONG)),
    "distill, 4 bits": ("bayes-e", "int8", lambda p: fxq.tuning.distill(p, LEARNED, **LONG)),
    "distill, affine": ("x86", None, lambda p: fxq.tuning.distill(p, LEARNED, **LONG)),
    "distill, powers of two": ("bernoulli", "int8", lambda p: fxq.tuning.distill(p, LEARNED, **LONG)),
    "one after the other": (
        "bernoulli2",
        "int8",
        lambda p: (fxq.tuning.adaround(p, LEARNED, **SHORT), fxq.tuning.correct_bias(p, LEARNED))[1],
    ),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", WORKS)
def test_nearer_to_the_float_model_and_equal_in_every_form(name: str, network: nn.Module, tmp_path: Path) -> None:
    target, activation, tune = WORKS[name]
    prepared = calibrated(network, target, activation)
    before = error(prepared, network)
    result = tune(prepared)
    assert any(layer.kept for layer in result)
    assert all(layer.after < layer.before for layer in result if layer.kept)
    assert all(layer.name in str(result) for layer in result)
    assert error(prepared, network) < before
    fxq.set_state(prepared, fxq.State.FLOAT)
    with torch.no_grad():
        assert torch.allclose(prepared(SEEN_BY_NOBODY), network(SEEN_BY_NOBODY), atol=1e-4)
    integer, few = fxq.convert(prepared), [SEEN_BY_NOBODY[:2]]
    contract.assert_validate_is_integer(prepared, integer, SEEN_BY_NOBODY)
    for style in ("exact", "fast", "qdq") if target == "x86" else ():
        report = fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style=style), few, show_progress=False)
        if isinstance(report, fxq.results.DeviationReport):
            assert not contract.VNNI or max(output.largest for outputs in report.outputs.values() for output in outputs) <= 4  # steps
        assert bool(report) == (style != "qdq")
    contract.assert_train_is_validate(prepared, SEEN_BY_NOBODY)


JUDGED: dict[str, Callable[[fx.GraphModule], Any]] = {
    "round_weights": lambda p: fxq.tuning.round_weights(p, LEARNED),
    "correct_bias": lambda p: fxq.tuning.correct_bias(p, LEARNED),
    "adaround": lambda p: fxq.tuning.adaround(p, LEARNED, **SHORT),
    "reconstruct": lambda p: fxq.tuning.reconstruct(p, LEARNED, **SHORT),
    "distill": lambda p: fxq.tuning.distill(p, LEARNED, **SHORT),
    "adaround of one batch": lambda p: fxq.tuning.adaround(p, LEARNED[0], **SHORT),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("config", [FOUR_BITS, fxq.QConfig(), fxq.QConfig(weight=fxq.WeightConfig("int4", training="learned"))])
def test_a_method_that_makes_the_outputs_worse_is_undone(
    name: str, config: fxq.QConfig, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = fxq.prepare(network, LEARNED[0], "bayes-e", config)
    fxq.calibrate(prepared, LEARNED, options=fxq.Options(round_weights=False, correct_bias=False), show_progress=False)
    prepared(LEARNED[0])  # sets the learned scales of weights
    before, noise = bits(prepared), itertools.count(1)
    monkeypatch.setattr(measure.FloatOutputs, "noise", lambda self, *_: measure.Noise((next(noise),), (1.0,)))
    result = JUDGED[name](prepared)
    assert len(result)
    assert not result.kept
    assert same_state(prepared, before)
    fxq.convert(prepared)


def test_the_scales_of_a_calibration_stay_if_a_method_is_undone(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is called in state CALIBRATE sets the scales first."""
    prepared, noise = fxq.prepare(network, LEARNED[0], "bayes-e"), itertools.count(1)
    fxq.set_state(prepared, fxq.State.CALIBRATE)
    prepared(LEARNED[0])
    monkeypatch.setattr(measure.FloatOutputs, "measure", lambda self: measure.Noise((next(noise),), (1.0,)))
    assert not fxq.tuning.adaround(prepared, LEARNED, **SHORT).kept
    fxq.convert(prepared)


# ---- repeatable, resumable, all or nothing ------------------------------------------------------------------------------------

# The steps, where progress is made, at which step the call is killed, what is counted then, and how often it is called by the next call.
KILLED: dict[str, tuple[Method, int, Any, int, tuple[Any, str], Callable[[fx.GraphModule], int]]] = {
    "adaround": (fxq.tuning.adaround, 12, learn, 26, (learn, "_taught"), lambda p: len(layer_units(p)) - 2),
    "reconstruct": (fxq.tuning.reconstruct, 16, learn, 34, (learn, "_taught"), lambda p: len(block_units(p)) - 2),
    "distill": (fxq.tuning.distill, 20, distill, 11, (distill._Pupil, "_step"), lambda p: 20 - 12),  # six tenths were kept
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "undoes"), [*((name, False) for name in KILLED), ("adaround", True)])
def test_a_call_that_was_killed_continues_and_ends_with_the_same_bits(
    name: str, undoes: bool, network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, steps, module, stop, (owner, counted), rest = KILLED[name]
    path, losses = str(tmp_path / "checkpoint"), []
    if not undoes:  # so few steps are undone for their small gain
        monkeypatch.setattr(learn, "judged", lambda outputs, before, rows, *_: tuple(rows))
        monkeypatch.setattr(learn, "is_lost", lambda after, before: False)

    def tune(prepared: fx.GraphModule, path: str | None = None, seed: int = 7) -> fx.GraphModule:
        result = method(prepared, LEARNED, steps=steps, options=fxq.Options(batch_size=8, seed=seed, checkpoint=path))
        losses.append(getattr(result, "losses", ()))
        return prepared

    state = torch.get_rng_state()
    whole = tune(calibrated(network))
    other = tune(calibrated(network), seed=8)
    assert name == "adaround" or not same_state(other, whole)  # it decides about so few weights alike, in any order of the samples
    assert torch.equal(torch.get_rng_state(), state)

    def killed(items: Iterator[None], *_: Any) -> Iterator[None]:
        for index, item in enumerate(items):
            if index == stop:
                raise KeyboardInterrupt
            yield item

    prepared = calibrated(network)
    with monkeypatch.context() as patch:
        patch.setattr(module, "progress", killed)
        with pytest.raises(KeyboardInterrupt):
            tune(prepared, path)
    assert same_state(prepared, calibrated(network))

    calls, original = [], getattr(owner, counted)
    monkeypatch.setattr(owner, counted, lambda *arguments: calls.append(0) or original(*arguments))
    assert same_state(tune(prepared, path), whole)
    assert len(calls) == rest(prepared)
    assert losses[-1] == losses[0]
    assert name != "distill" or (len(losses[0]) == steps and losses[0] != losses[1])
    calls.clear()
    again = calibrated(network)
    assert same_state(tune(again, path), whole)
    assert not calls

    with pytest.raises(fxq.errors.ConfigurationError, match="seed is 7, and 9 here"):
        tune(calibrated(network), path, seed=9)
    Path(path).write_bytes(b"no checkpoint")
    with pytest.raises(fxq.errors.ConfigurationError, match="is not a checkpoint"):
        tune(again, path)
    assert same_state(again, whole)


@pytest.mark.nightly
def test_distillation_says_what_the_outputs_have_and_keeps_nothing_else(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are of the integer model on held out samples; nothing is kept unless it is better."""
    monkeypatch.setattr(distill, "COPIES", 0)  # of what is held out, moved by ways that nobody else knows
    prepared = calibrated(network)
    (row,) = fxq.tuning.distill(prepared, LEARNED, **LONG)
    assert row.layers == ("stem", "block_a", "block_b", "up", "matmul", "head")
    held_out = torch.cat(LEARNED).split(8)[3::4]
    with torch.no_grad():
        shares = [float((prepared(x).double() - network(x).double()).square().sum() / network(x).double().square().sum()) for x in held_out]
    assert row.kept
    # the float model's sums depend on how its batch norms are folded
    assert sum(shares) / len(shares) == pytest.approx(row.after, rel=1e-3)
    learned = bits(prepared)
    (again,) = fxq.tuning.distill(prepared, [torch.zeros(8, 1, 8, 8), *LEARNED[:1]], steps=1, options=fxq.Options(batch_size=8))
    assert again.kept or same_state(prepared, learned)


def test_images_are_moved_each_by_its_own_way_and_reflected() -> None:
    several = torch.randn(5, 3, 17, 24)
    ways = torch.tensor([[0.0, 0.0], [1.0, -1.0], [-1.0, 0.4], [0.2, 1.0], [-0.3, -0.6]])
    moved = distill._shifted(several, ways)
    padded = torch.nn.functional.pad(several, (3, 3, 2, 2), mode="reflect")
    for index, (down, right) in enumerate([(0, 0), (2, -3), (-2, 1), (0, 3), (-1, -2)]):
        assert torch.equal(moved[index], padded[index, :, 2 + down : 19 + down, 3 + right : 27 + right])
    videos = torch.randn(2, 3, 8, 9, 16)
    moved = distill._shifted(videos, torch.tensor([[1.0, -1.0, 0.5], [0.0, 0.0, -1.0]]))
    padded = torch.nn.functional.pad(videos, (2, 2, 1, 1, 1, 1), mode="reflect")
    assert torch.equal(moved[0], padded[0, :, 2:10, 0:9, 3:19])
    assert torch.equal(moved[1], padded[1, :, 1:9, 1:10, 0:16])
    tiny = torch.randn(2, 3, 1, 7)
    assert torch.equal(distill._shifted(tiny, torch.ones(2, 2)), tiny)


@members(lambda: dict(inputs=nn.Linear(16, 48), outputs=nn.Linear(16, 16), head=nn.Linear(16, 10)))
def Masked(self, x: Tensor, mask: Tensor) -> Tensor:
    """An attention with a mask that is given."""
    query, key, value = self.inputs(x).reshape(len(x), -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return self.head(self.outputs(attended.transpose(1, 2).reshape(x.shape)))


def test_distillation_of_whole_numbers_and_shared_weights() -> None:
    """Inputs of other dtypes than float are not mixed; shared inputs are left out; an integer model teaches nothing."""
    words = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    numbers = [torch.randint(12, (16, 5)) for _ in range(4)]
    prepared = fxq.prepare(words, numbers[0], "bayes-e", FOUR_BITS)
    fxq.calibrate(prepared, numbers, options=fxq.Options(correct_bias=False, round_weights=False), show_progress=False)
    (row,) = fxq.tuning.distill(prepared, numbers, **LONG)
    assert row.kept
    assert row.gain > 0.5  # dB
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), numbers[0])
    rows = list(torch.split(images(0, 32)[:, 0, 0], 8))
    prepared = compiled(shared(), rows, "bayes-e", FOUR_BITS).prepared
    result = fxq.tuning.distill(prepared, rows, steps=2)
    assert not result.layers
    assert {name for name, _ in result.skipped} == {"twice", "twice_1"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", [fxq.tuning.correct_bias, fxq.tuning.adaround, fxq.tuning.distill])
def test_what_raises_changes_nothing(method: Method, network: nn.Module) -> None:
    prepared = calibrated(network)
    fxq.tuning.correct_bias(prepared, LEARNED)
    to_train(prepared)
    before, states = bits(prepared), {name: o.state for name, o in quantized_operators(prepared).items()}
    with pytest.raises(fxq.errors.CalibrationError, match="batch 1"):
        method(prepared, [LEARNED[0], LEARNED[1][:, :, :5]])
    with pytest.raises(fxq.errors.NotCalibrated):
        method(fxq.prepare(network, LEARNED[0]), LEARNED)
    assert same_state(prepared, before)
    assert {name: o.state for name, o in quantized_operators(prepared).items()} == states
    assert all(module.training for module in prepared.modules())
    assert all(parameter.requires_grad for parameter in prepared.parameters())


# ---- what each does to the model ------------------------------------------------------------------------------------------------
def test_what_was_tuned_is_saved_and_loaded(network: nn.Module, tmp_path: Path) -> None:
    prepared = calibrated(network)
    fxq.tuning.adaround(prepared, LEARNED, **SHORT)
    fxq.tuning.correct_bias(prepared, LEARNED)
    file = fxq.save(prepared, tmp_path / "tuned.fxq")
    loaded = fxq.load(file)
    assert fxq.save(loaded, tmp_path / "again.fxq").read_bytes() == file.read_bytes()
    fresh, copied = calibrated(network), copy.deepcopy(prepared)
    plain = bits(fresh)
    wanted = fxq.convert(prepared)
    untuned = fxq.convert(fresh)
    fresh.load_state_dict(prepared.state_dict())
    with torch.no_grad():
        for other in (loaded, fresh, copied):
            assert contract.all_equal(other(SEEN_BY_NOBODY), wanted(SEEN_BY_NOBODY))
        prepared.load_state_dict(plain)
        assert contract.all_equal(prepared(SEEN_BY_NOBODY), untuned(SEEN_BY_NOBODY))
        assert not contract.all_equal(prepared(SEEN_BY_NOBODY), wanted(SEEN_BY_NOBODY))


def test_offsets_move_along_with_weights(network: nn.Module) -> None:
    """Training after AdaRound starts from its roundings, and a weight that moves by a step moves its integer by one."""
    rounding = fxq.tuning.AdaptiveRounding((3,))
    real = torch.tensor([0.4, 1.5, -2.2], requires_grad=True)
    rounding.settle(real.detach(), torch.tensor([1.0, 1.0, -3.0]))
    assert rounding.integers(real, -8, 7).tolist() == [1, 1, -3]
    assert rounding.integers(real + 1, -8, 7).tolist() == [2, 2, -2]
    assert rounding.integers(real + 0.4, -8, 7).tolist() == [1, 1, -3]
    rounding.integers(real, -8, 7).sum().backward()
    assert real.grad is not None
    assert real.grad.tolist() == [1, 1, 1]
    prepared = calibrated(network)
    fxq.tuning.adaround(prepared, LEARNED, **SHORT)
    contract.train_without_noise(prepared)
    contract.assert_gradients_reach_every_parameter(prepared, SEEN_BY_NOBODY)


def test_a_rounding_of_the_users_own_is_left_out(network: nn.Module) -> None:
    class Down(fxq.tuning.Rounding):
        def integers(self, real: Tensor, low: int, high: int) -> Tensor:
            return torch.floor(real).clamp(low, high)

    prepared = calibrated(network, rounding=Down)
    result = fxq.tuning.adaround(prepared, LEARNED, steps=2)
    assert not result.layers
    assert {name for name, _ in result.skipped} == {"stem", "block_a", "block_b", "up", "matmul", "head"}
    assert all(type(o.weight_quantizer.rounding) in (Down, fxq.tuning.Nearest) for o in quantized_operators(prepared).values())


@pytest.mark.parametrize("per_channel", [True, False], ids=["per channel", "per tensor"])
def test_scales_cover_less_of_a_weight_where_that_is_better(per_channel: bool) -> None:
    """A weight with one number far from the others, which meets an operand that is always nearly 0."""
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight[:, 3] = 2.0
    rows = [row * (1 - 0.999 * (torch.arange(16) == 3)) for row in torch.split(torch.randn(64, 16), 16)]
    prepared = compiled(model, rows, "bayes-e", fxq.QConfig(weight=fxq.WeightConfig("int4", per_channel=per_channel))).prepared
    result = fxq.tuning.adaround(prepared, rows, **SHORT)
    first = quantized_operators(prepared)[result.layers[0].name].weight_quantizer
    assert first.coverage is not None
    assert bool((first.coverage.share < 1).all())
    assert result.layers[0].gain > 3  # dB: less than a step of 0.7 is worth
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), rows[0])


def shared() -> Any:
    """A weight that two operators read, and an int64 result."""
    return written(lambda m, x: m.head(F.relu(m.twice(F.relu(m.twice(x))))).argmax(-1), twice=nn.Linear(8, 8), head=nn.Linear(8, 4))


def test_a_weight_that_several_operators_read_stays_one_constant() -> None:
    rows = [row for row in torch.split(images(0, 32)[:, 0, 0], 8)]
    prepared = compiled(shared(), rows, "bayes-e", FOUR_BITS).prepared
    result = fxq.tuning.reconstruct(prepared, rows, steps=20)
    assert [layer.layers for layer in result] == [("head",)]
    assert {name for name, _ in result.skipped} == {"twice", "twice_1"}
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), rows[0])


def test_a_layer_that_is_no_better_on_what_is_held_out_is_left_as_it_was(network: nn.Module) -> None:
    """Training samples say nothing of held out ones, whose images are black."""
    prepared = calibrated(network)
    before = bits(prepared)
    black = -torch.ones(8, 1, 8, 8)
    result = fxq.tuning.correct_bias(prepared, [black, black, black, LEARNED[0]], options=fxq.Options(batch_size=8))
    left = [layer.name for layer in result if not layer.kept]
    assert left
    corrections = {name: o.weight_quantizer.correction for name, o in quantized_operators(prepared).items()}
    assert all(corrections[name] is None for name in left)
    assert all(corrections[layer.name] is not None for layer in result.kept)
    assert same_state({name: value for name, value in bits(prepared).items() if "correction" not in name}, before)


@pytest.mark.parametrize("method", [fxq.tuning.correct_bias, functools.partial(fxq.tuning.adaround, steps=STEPS)])
def test_channels_that_are_equalized_are_tuned_as_they_act(method: Method) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).eval()
    with torch.no_grad():
        factors = 2.0 ** torch.randint(-4, 5, (8, 1, 1, 1))
        model[0].weight *= factors
        model[0].bias *= factors.flatten()
        model[2].weight /= factors.transpose(0, 1)
    prepared = compiled(model, LEARNED, "bayes-e", FOUR_BITS).prepared
    assert any(each.factors is not None and each.factors.active for each in quantized_operators(prepared).values())
    before = error(prepared, model)
    method(prepared, LEARNED, show_progress=False)
    assert error(prepared, model) < 1.05 * before
    with torch.no_grad():
        assert torch.equal(prepared(SEEN_BY_NOBODY), fxq.convert(prepared)(SEEN_BY_NOBODY))


def test_live_statistics_take_the_place_of_a_correction(network: nn.Module) -> None:
    prepared = calibrated(network)
    fxq.tuning.correct_bias(prepared, LEARNED)
    corrections = {name: o.weight_quantizer.correction for name, o in quantized_operators(prepared).items()}
    normed = corrections.pop("block_b")
    others = [correction for correction in corrections.values() if correction is not None]
    assert normed is not None
    assert bool(normed.value.any())
    to_train(prepared)(LEARNED[0])
    assert not bool(normed.value.any())
    assert others
    assert all(bool(other.value.any()) for other in others)


# ---- blocks ---------------------------------------------------------------------------------------------------------------------
def blocks(model: nn.Module, *inputs: Tensor) -> list[list[str]]:
    prepared = fxq.prepare(model.eval(), inputs)
    return [[node.name for node in unit.weighted] for unit in block_units(prepared)]


def test_blocks_lie_between_what_all_paths_pass() -> None:
    image = torch.randn(2, 3, 8, 8)
    row = nn.Sequential(*(layer for _ in range(7) for layer in (nn.Conv2d(3, 3, 1), nn.ReLU())))
    assert blocks(row, image) == [["_0", "_2", "_4"], ["_6", "_8"], ["_10", "_12"]]
    residual = nn.Sequential(nn.Conv2d(3, 4, 1), *(block_model(4) for _ in range(2)), nn.Conv2d(4, 3, 1))
    assert [unit for unit in blocks(residual, image) if len(unit) == 2] == [["_1_a", "_1_b"], ["_2_a", "_2_b"]]
