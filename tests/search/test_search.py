"""Sensitivity, mixed precision, the search over observers, and the tuner that tries one remedy after the other."""

import copy
import itertools
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.accuracy import measure
from fxquant.accuracy.choices import Choices
from fxquant.search import tune as tuner
from fxquant.search.bit_widths import Widening, costs, fits, optimum
from fxquant.serialization.qconfig import written
from tests.shared import networks as shared
from tests.shared.contract import same_state
from tests.shared.networks import members


@members(lambda: dict(
    stem=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()), mix=nn.Conv2d(8, 8, 3, padding=1),
    up=nn.ConvTranspose2d(8, 6, 2, stride=2), head=nn.Linear(14, 5),
))  # fmt: skip
def Network(self, x: Tensor) -> Tensor:
    """A convolution with batch norm, a residual that is added into one, a pooling that keeps its scale, a classifier."""
    stem = self.stem(x)
    mixed = self.mix(stem) + stem
    raised = self.up(F.max_pool2d(mixed, 2))
    return self.head(torch.cat([raised, mixed], 1).mean((2, 3)))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(5)
    return shared.Network(lambda m, x: m.head(m.conv(x).relu().mean((2, 3))), conv=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3)).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(3)
    network = Network()
    with torch.no_grad():
        network.stem[1].weight.uniform_(-2, 2)
        for _ in range(20):
            network(torch.randn(8, 3, 8, 8))  # running statistics that the stem has
    return network.eval()


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(6, 3, 8, 8, generator=generator) * scale for scale in (1.0, 0.7, 1.3, 1.0)]


@pytest.fixture(scope="module")
def prepared(model: nn.Module, batches: list[Tensor]) -> Any:
    return fxq.calibrate(fxq.prepare(model, batches[0], "nash-e"), batches)


@pytest.fixture(scope="module")
def sensitivity_of_model(prepared: Any, batches: list[Tensor]) -> fxq.results.Sensitivity:
    return fxq.search.sensitivity(prepared, batches)


def noise(wanted: list[Tensor], actual: list[Tensor]) -> float:
    error = sum(float((a.detach().double() - b.detach().double()).square().sum()) for a, b in zip(wanted, actual, strict=True))
    return error / sum(float(a.detach().double().square().sum()) for a in wanted)


# ---- sensitivity ---------------------------------------------------------------------------------------------------------
def test_a_qconfig_beside_a_prepared_model_is_refused(prepared: Any, batches: list[Tensor]) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match="a prepared model has a qconfig already"):
        fxq.search.sensitivity(prepared, batches, qconfig=fxq.QConfig())


def test_the_noise_of_one_tensor_is_that_of_rounding_it_by_hand(
    model: nn.Module, prepared: Any, batches: list[Tensor], sensitivity_of_model: fxq.results.Sensitivity
) -> None:
    wanted = [model(x) for x in batches]
    scale = fxq.qparams(prepared)["x_quantize"]
    rounded = [torch.round(x / scale).clamp(-128, 127) * scale for x in batches]
    assert sensitivity_of_model["x_quantize"].noise["int8"] == pytest.approx(noise(wanted, [model(x) for x in rounded]), rel=1e-4)

    def noise_of_four_bits(layer: str, gain: Tensor) -> float:
        """Of a layer whose weight is rounded as it is with the gain of a batch norm."""
        weight = model.get_submodule(layer).weight
        before, folded = weight.detach().clone(), weight.detach() * gain.reshape(-1, *[1] * (weight.dim() - 1))
        step = folded.abs().flatten(1).amax(1).reshape(-1, *[1] * (weight.dim() - 1)) / 7
        try:
            weight.data.copy_(torch.round(folded / step) * step / gain.reshape(-1, *[1] * (weight.dim() - 1)))
            return noise(wanted, [model(x) for x in batches])
        finally:
            weight.data.copy_(before)

    assert sensitivity_of_model["head.weight"].noise["int4"] == pytest.approx(noise_of_four_bits("head", torch.ones(5)), rel=1e-4)
    norm: Any = model.get_submodule("stem.1")
    gain = norm.weight.detach() * torch.rsqrt(norm.running_var + norm.eps)
    assert sensitivity_of_model["stem_0.weight"].noise["int4"] == pytest.approx(noise_of_four_bits("stem.0", gain), rel=1e-3)


def test_more_bits_lose_less_and_the_estimate_is_of_that_size(sensitivity_of_model: fxq.results.Sensitivity) -> None:
    for tensor in sensitivity_of_model.values():
        losses = [tensor.noise[dtype] for dtype in ("int4", "int8", "int16")]
        assert losses == sorted(losses, reverse=True), tensor
    ratios = [tensor.estimate["int8"] / tensor.noise["int8"] for tensor in sensitivity_of_model.values()]
    assert sum(0.2 < ratio < 5 for ratio in ratios) >= 0.8 * len(ratios), ratios
    assert {"x_quantize", "stem_0", "stem_0.weight", "cat", "mean", "head.weight"} <= set(sensitivity_of_model)
    assert "head" not in sensitivity_of_model  # a sum of 32 bits is not rounded
    assert sensitivity_of_model.ranked(8)[0].noise["int8"] == max(tensor.noise["int8"] for tensor in sensitivity_of_model.values())
    assert sensitivity_of_model.ranked(8)[0].name in str(sensitivity_of_model).splitlines()[2]


def test_a_sensitivity_leaves_the_model_and_the_generators_as_they_were_and_goes_on_after_a_kill(
    prepared: Any, batches: list[Tensor], sensitivity_of_model: fxq.results.Sensitivity, tmp_path: Path
) -> None:
    before, generator = copy.deepcopy(prepared.state_dict()), torch.get_rng_state()
    calls = 0

    def metric(model: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return -float(model(batches[0]).square().mean())

    arguments: dict[str, Any] = {"metric": metric, "options": fxq.Options(widths=(8,), checkpoint=tmp_path / "sensitivity.json")}
    with pytest.raises(KeyboardInterrupt):
        fxq.search.sensitivity(prepared, batches, **arguments)
    resumed = fxq.search.sensitivity(prepared, batches, **arguments)
    assert calls == 1 + len(resumed) + 1  # the float model, each tensor, and the one that was killed
    assert {name: tensor.noise["int8"] for name, tensor in resumed.items()} == {n: t.noise["int8"] for n, t in sensitivity_of_model.items()}
    assert same_state(prepared, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in prepared.parameters())
    with pytest.raises(fxq.errors.ConfigurationError, match="of another call"):
        fxq.search.sensitivity(prepared, batches, **{**arguments, "options": replace(arguments["options"], widths=(4,))})


def test_what_no_rule_of_a_mapping_decides_is_left_out(batches: list[Tensor]) -> None:
    model = shared.Network(lambda m, x: torch.softmax(m.b(m.a(x)).mean((2, 3)), 1), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1))
    model.b.qconfig = fxq.QConfig(fxq.ActivationConfig("int16"))
    prepared = fxq.calibrate(fxq.prepare(model.eval(), batches[0], "bayes-e"), batches)
    assert set(Choices(prepared)) == {"x_quantize", "a", "a.weight", "mean", "softmax"}


# ---- the program ---------------------------------------------------------------------------------------------------------
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "budget",
    [
        fxq.search.Budget(weight_bits=6.1),
        fxq.search.Budget(bit_operations=1.7e6),
        fxq.search.Budget(latency=0.8, speed=fxq.search.Speed(1e5, 1e4)),
        fxq.search.Budget(weight_bytes=1000, bit_operations=2e6),
    ],
    ids=lambda budget: "+".join(budget.limits),
)
def test_the_optimum_is_that_of_all_choices(prepared: Any, budget: fxq.search.Budget) -> None:
    choices, draw = Choices(prepared), random.Random(len(budget.limits))
    names = [name for name in choices if name not in ("x_quantize", "cat", "mean", "head")]
    losses = {name: {dtype: draw.random() / 4**index for index, dtype in enumerate(choices[name].dtypes)} for name in names}
    best = optimum(choices, losses, budget)

    def loss(dtypes: Mapping[str, str]) -> float:
        return sum(losses[name][dtypes[name]] for name in names)

    every = ({**choices.dtypes(), **dict(zip(names, each, strict=True))} for each in itertools.product(*(choices[n].dtypes for n in names)))
    within = [loss(dtypes) for dtypes in every if fits(costs(choices, dtypes, budget.speed), budget)]
    assert fits(costs(choices, best, budget.speed), budget)
    assert 0 < len(within) < 3 ** len(names)
    assert loss(best) == pytest.approx(min(within), rel=1e-9)


def test_costs_are_what_the_layers_cost(prepared: Any) -> None:
    choices = Choices(prepared)
    layers = {layer.name: layer for layer in fxq.inspect.layers(prepared)}
    now = costs(choices, choices.dtypes(), fxq.search.Speed(1e6, 1e4))
    assert now["bit_operations"] == 64 * sum(layer.macs for layer in layers.values())
    assert now["weight_bits"] == 8
    weights = [parameter.numel() for name, parameter in prepared.named_parameters() if name.endswith("weight") and parameter.dim() > 1]
    assert now["weight_bytes"] == sum(weights)
    assert costs(choices, {"head.weight": "int4"})["weight_bytes"] == sum(weights) - 14 * 5 / 2


def test_a_budget_that_nothing_keeps_and_a_missing_solver_are_refused(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Choices(prepared)
    losses = {name: dict.fromkeys(choice.dtypes, 1.0) for name, choice in choices.items()}
    with pytest.raises(fxq.errors.ConfigurationError, match="weight_bits is 4 at least, and 3 is allowed"):
        optimum(choices, losses, fxq.search.Budget(weight_bits=3))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(fxq.errors.ConfigurationError, match="needs SciPy"):
        optimum(choices, losses, fxq.search.Budget(weight_bits=5))


# ---- mappings ------------------------------------------------------------------------------------------------------------
def test_a_layer_that_is_called_twice_has_a_rule_for_each_call(batches: list[Tensor]) -> None:
    model = shared.Network(lambda m, x: m.conv(torch.tanh(m.conv(x))), conv=nn.Conv2d(3, 3, 1)).eval()
    prepared = fxq.calibrate(fxq.prepare(model, batches[0], "nash-e"), batches)
    choices = Choices(prepared)
    mapping = choices.mapping(fxq.QConfigMapping(), {"conv": "int16", "conv.weight": "int4"})
    again = fxq.prepare(model, batches[0], "nash-e", mapping, observations=fxq.observers.observations(prepared))
    assert Choices(again).dtypes() == {**choices.dtypes(), "conv": "int16", "conv.weight": "int4"}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "x86"])
def test_a_mapping_gives_every_tensor_the_dtype_that_was_chosen(
    target: str, model: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    prepared = fxq.calibrate(fxq.prepare(model, batches[0], target), batches)
    choices, draw = Choices(prepared), random.Random(5)
    wanted = {name: draw.choice(choice.dtypes) for name, choice in choices.items()}
    mapping = choices.mapping(fxq.QConfigMapping(), wanted)
    again = fxq.prepare(model, batches[0], target, mapping, observations=fxq.observers.observations(prepared))
    assert Choices(again).dtypes() == wanted
    assert fxq.load_qconfig(fxq.save_qconfig(mapping, tmp_path / "mapping.json")) == mapping


def test_a_mapping_in_a_file_is_read_and_edited(tmp_path: Path) -> None:
    observer = fxq.observers.PercentileObserver(99.9)
    mapping = (
        fxq.QConfigMapping()
        .set_global(fxq.QConfig(weight=fxq.WeightConfig("int4")))
        .set_object_type(F.relu, fxq.QConfig(fxq.ActivationConfig("int16", observer=observer), input=fxq.ActivationConfig()))
        .set_object_type(nn.Conv2d, None)
        .set_object_type("relu", fxq.QConfig())
        .set_module_name_regex("b.*", None)
        .set_module_name_regex("a.*", fxq.QConfig(fxq.ActivationConfig(threshold=6.0)))
        .set_module_name("stem", fxq.QConfig(weight=fxq.WeightConfig("int4", per_channel=False)))
    )
    path = fxq.save_qconfig(mapping, tmp_path / "mapping.json")
    assert fxq.load_qconfig(path) == mapping
    assert list(fxq.load_qconfig(path).patterns) == ["b.*", "a.*"]
    assert written(fxq.load_qconfig(path)) == path.read_text(encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8").replace("99.9", "99.5"), encoding="utf-8")
    edited = fxq.load_qconfig(path).types[F.relu]
    assert edited is not None
    assert edited.output == fxq.ActivationConfig("int16", observer=fxq.observers.PercentileObserver(99.5))


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "fxquant qconfig"),
        ('{"format": "fxquant qconfig", "version": 9}', "version 9"),
        ('{"format": "fxquant qconfig", "version": 1, "nams": {}}', "nams"),
        ('{"format": "fxquant qconfig", "version": 1, "names": {"conv": {"ouput": {}}}}', "ouput"),
        ('{"format": "fxquant qconfig", "version": 1, "names": {"conv": {"output": {"dtype": "int7"}}}}', "int7"),
        ('{"format": "fxquant qconfig", "version": 1, "names": {"conv": {"output": {"observer": "os.system"}}}}', "os.system"),
        ('{"format": "fxquant qconfig", "version": 1, "types": {"os.system": {}}}', "os.system"),
        ('{"format": "fxquant qconfig", "version": 1, "patterns": {"(": {}}}', "regular expression"),
    ],
)
def test_a_file_that_is_no_mapping_says_why(text: str, because: str, tmp_path: Path) -> None:
    path = tmp_path / "mapping.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(fxq.errors.ExportError, match="is not a qconfig") as caught:
        fxq.load_qconfig(path)
    assert because in str(caught.value)


def test_what_a_file_cannot_name_is_not_written(tmp_path: Path) -> None:
    class Own(fxq.observers.MinMaxObserver):
        pass

    for mapping in (
        fxq.QConfigMapping().set_module_name("a", fxq.QConfig(fxq.ActivationConfig(observer=Own))),
        fxq.QConfigMapping().set_object_type(Network, None),
    ):
        with pytest.raises(fxq.errors.ExportError, match="cannot be written"):
            fxq.save_qconfig(mapping, tmp_path / "mapping.json")


# ---- searches ------------------------------------------------------------------------------------------------------------
def test_mixed_precision_keeps_the_budget_the_contract_and_beats_uniform_dtypes(
    model: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    budget, options = fxq.search.Budget(weight_bits=5), fxq.Options(measured=False)
    result = fxq.search.mixed_precision(model, batches, "bayes-e", budget=budget, options=options)
    assert result.chosen.costs["weight_bits"] <= 5
    assert set(result.chosen.dtypes.values()) == {"int4", "int8"}
    four = next(candidate for candidate in result.candidates if candidate.name == "4-bit weights")
    assert result.chosen.noise is not None
    assert four.noise is not None
    assert result.before.noise is not None
    assert result.before.noise < result.chosen.noise < four.noise
    again = fxq.prepare(model, batches[0], "bayes-e", result.qconfig, observations=fxq.observers.observations(result.prepared))
    integer = fxq.convert(result.prepared)
    assert fxq.qparams(again) == fxq.qparams(result.prepared)
    again.load_state_dict(result.prepared.state_dict())  # observations do not hold the rounding of weights
    assert fxq.verify(again, integer, batches)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "mixed.onnx"), batches[:1])
    assert "chosen" in str(result)


def test_an_accuracy_is_reached_by_the_least_costly_of_16_bits(model: nn.Module, batches: list[Tensor]) -> None:
    plain = fxq.quantize(model, batches, "nash-e")
    assert plain.widened is None
    wanted = [model(batch) for batch in batches]
    now = measure.decibels(noise(wanted, [plain.integer(batch) for batch in batches]))
    result = fxq.quantize(model, batches, "nash-e", options=fxq.Options(accuracy=now + 6))
    widened: Any = result.widened
    assert widened.before == pytest.approx(now, abs=0.1)
    assert widened.after >= widened.goal == now + 6
    measured = measure.decibels(noise(wanted, [result.integer(batch) for batch in batches]))
    assert measured == pytest.approx(widened.after, abs=0.1)
    choices, speed = Choices(result.prepared, (16,)), result.prepared.meta["target"].roofline
    assert {name: each.dtype for name, each in choices.items() if each.dtype == "int16"} == widened.dtypes
    wide, narrow = (costs(choices, dict.fromkeys(choices, dtype), speed)["latency"] for dtype in ("int16", "int8"))
    assert 0 < widened.cost < wide / narrow - 1
    assert fxq.verify(result.prepared, result.integer, batches[:1])


def test_an_accuracy_that_is_there_widens_nothing_and_one_out_of_reach_says_so(model: nn.Module, batches: list[Tensor]) -> None:
    there: Any = fxq.quantize(model, batches, "nash-e", options=fxq.Options(accuracy=3)).widened
    assert (there.dtypes, there.cost, there.before) == ({}, 0.0, there.after)
    far: Any = fxq.quantize(model, iter(batches), "bayes-e", options=fxq.Options(accuracy=200, batch_fn=lambda batch: batch)).widened
    assert far.before <= far.after < far.goal
    assert "16 bits reach no more" in str(far)
    for target in ("x86", "bernoulli2"):
        with pytest.raises(fxq.FxQuantError, match=r"(?s)has no int16 activations.*option accuracy.*bayes-e, nash-e"):
            fxq.quantize(model, batches, target, options=fxq.Options(accuracy=30))


def test_the_widest_share_is_chosen_at_no_more_cost_than_needed(prepared: Any, batches: list[Tensor]) -> None:
    plan = Widening(prepared, [[batch] for batch in batches], fxq.Options())
    for share in (0.9, 0.5, 0.2):
        gained = [plan.gains[name][1] for name in plan.choose(share)]
        left = plan.total - sum(gained)
        assert left <= share * plan.total < left + min(gained)  # each is needed
    proposed = plan.proposed(measure.decibels(plan.before) + 3)
    assert proposed.before < proposed.goal <= proposed.after


def test_tune_keeps_what_gains_and_goes_on_after_a_kill(
    small: nn.Module, batches: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, judged, last = fxq.QConfig(fxq.ActivationConfig(observer=fxq.observers.PercentileObserver(90.0))), 0, 0
    wanted = small(batches[-1])

    def metric(model: Any) -> float:
        nonlocal judged
        judged += 1
        if judged == last:
            raise KeyboardInterrupt
        return -100 * float((model(batches[-1]) - wanted).norm() / wanted.norm())

    arguments: dict[str, Any] = {"tolerance": 0, "steps": 4, "target": "nash-e", "qconfig": bad, "metric": metric}
    plain = {"correct_bias": False, "choose_ranges": False}  # so that much is left to gain
    monkeypatch.setattr(tuner, "OBSERVERS", {name: tuner.OBSERVERS[name] for name in ("MinMax", "Percentile 99.9")})
    generator = torch.get_rng_state()
    whole = fxq.tune(small, batches, options=fxq.Options(**plain), **arguments)
    assert torch.equal(torch.get_rng_state(), generator)
    kept = [step.score for step in whole.steps if step.kept]
    assert kept == sorted(kept)
    assert whole.score == kept[-1] > kept[0] + 5
    assert all(step.score <= whole.score for step in whole.steps if not step.kept)
    assert {step.remedy for step in whole.steps} >= {"calibration", "observers", "16 bits"}
    assert fxq.verify(whole.prepared, fxq.convert(whole.prepared), batches[:1])

    last, judged = judged, 0
    with pytest.raises(KeyboardInterrupt):
        fxq.tune(small, batches, options=fxq.Options(checkpoint=tmp_path / "tune.json", **plain), **arguments)
    resumed = fxq.tune(small, batches, options=fxq.Options(checkpoint=tmp_path / "tune.json", **plain), **arguments)
    assert judged == len(whole.steps) + 2  # with the float model's, and the one that was interrupted
    assert resumed.steps == whole.steps
    assert resumed.qconfig == whole.qconfig
    assert fxq.verify(resumed.prepared, whole.prepared, batches[:1])


def test_tune_stops_within_the_tolerance_and_keeps_a_budget(small: nn.Module, batches: list[Tensor]) -> None:
    done = fxq.tune(small, batches, "nash-e", tolerance=50)
    assert [step.remedy for step in done.steps] == ["calibration"]
    assert done.reached
    within = fxq.tune(
        small, batches, "nash-e", budget=fxq.search.Budget(weight_bits=5), tolerance=9, metric=lambda m: -float(m(batches[0]).isnan().sum())
    )
    assert [(step.remedy, step.kept) for step in within.steps] == [("calibration", False), ("mixed precision", True)]
    choices = Choices(within.prepared)
    assert costs(choices, choices.dtypes())["weight_bits"] <= 5
    with pytest.raises(fxq.errors.CalibrationError, match="too little"):
        fxq.tune(small, batches[:1], "nash-e")


@members(lambda: dict(c=nn.Conv2d(3, 4, 3), d=nn.Conv2d(4, 4, 3), l=nn.Linear(4, 2)))
def Averaged(self, x: Tensor) -> Tensor:
    """A mean over an image and a linear layer, whose operands a march computes at 8 bits alone."""
    return self.l(self.d(self.c(x).relu()).reshape(-1, 4, 4, 4).mean((2, 3)))


@pytest.mark.parametrize(("target", "narrow"), [("bayes-e", {"d", "mean"}), ("nash-e", set())])
def test_a_dtype_that_check_refuses_is_no_choice(target: str, narrow: set[str]) -> None:
    x = torch.randn(4, 3, 8, 8)
    prepared = fxq.calibrate(fxq.prepare(Averaged().eval(), x, target), [x], show_progress=False)
    choices = Choices(prepared, (8, 16))
    assert {name for name, choice in choices.items() if choice.kind == "activation" and choice.dtypes == ("int8",)} == narrow
    wide = {name: "int16" for name, choice in choices.items() if "int16" in choice.dtypes}
    widest = fxq.prepare(Averaged().eval(), x, target, choices.mapping(fxq.QConfigMapping(), wide))
    assert set(fxq.check(widest)) <= set(fxq.check(prepared))


def test_a_residual_of_16_bits_is_a_choice_where_layers_read_8(tmp_path: Path) -> None:
    model = shared.Network(
        lambda m, x: m.c((y := m.a(x)) + m.b(y.sigmoid())), a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)
    ).eval()
    x = torch.randn(8, 4)
    assert Choices(fxq.prepare(model, x, "bayes-e"), (16,))["a"].dtypes == ("int8", "int16")
    rules = fxq.QConfigMapping().set_module_name("a", fxq.QConfig(fxq.ActivationConfig("int16")))
    assert not fxq.check(model, x, "bayes-e", rules)
    result = fxq.quantize(model, [x], "bayes-e", rules)
    assert result.verify(result.export(tmp_path / "model.onnx"), [x])
