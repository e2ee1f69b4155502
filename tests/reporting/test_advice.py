"""Advice, followed: every printed rule changes the layers that it names; and the verdict on the outputs, with its causes."""

import copy
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant import ActivationConfig, QConfig, QConfigMapping, WeightConfig
from fxquant.prepared.operators import quantized_operators
from fxquant.reporting.verdict import GOOD, VISIBLE
from tests.analysis.test_comparison import Digits, batches, broken, compiled, network, quantized, residuals
from tests.analysis.test_comparison import batches as digits
from tests.shared import contract
from tests.shared.networks import members, written

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs

RULE = re.compile(
    r"QConfigMapping\(\)(?:\.set_module_name\('[^']*', (?:None|QConfig\((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*\))\))+"
)
NAMES = {
    "QConfigMapping": QConfigMapping, "QConfig": QConfig, "ActivationConfig": ActivationConfig, "WeightConfig": WeightConfig,
    "fxq": fxq,
}  # fmt: skip


@members(lambda: dict(dropped=nn.Dropout(), lstm=nn.LSTM(10, 8, batch_first=True), head=nn.Linear(8, 4), side=nn.Linear(10, 4)))
def Spectrum(self, mels: Tensor) -> Tensor:
    """A recurrent layer over the frames of a power spectrogram, whose mean is read beside it."""
    frames, _ = self.lstm(self.dropped(mels))
    return self.head(frames[:, -1]) + self.side(mels.mean(1))


def spectrograms() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 6, 10, generator=generator) ** 12 * 20 for _ in range(3)]


def spectrum() -> nn.Module:
    torch.manual_seed(0)
    model = Spectrum().eval()
    with torch.no_grad():
        model.lstm.weight_ih_l0 *= 400  # quiet frames are heard
        model.lstm.weight_hh_l0 *= 0.1
        model.side.weight *= 0.001
    return model


def rules(advice: fxq.results.Advice) -> list[QConfigMapping]:
    return [eval(text, dict(NAMES)) for text in RULE.findall(advice.cure)]


def signature(prepared: Any) -> dict[str, tuple[Any, ...]]:
    """Of each operator its dtype, its observer, and the dtype of its weight."""
    by_name: dict[str, tuple[Any, ...]] = {}
    for layer in fxq.inspect.layers(prepared):
        module = quantized_operators(prepared).get(layer.name)
        output = getattr(module, "output", None)
        weight = getattr(getattr(module, "weight_quantizer", None), "dtype", None)
        by_name[layer.name] = (layer.integer, layer.dtype, type(getattr(output, "observer", None)).__name__, getattr(weight, "name", ""))
    return by_name


def applied(model: nn.Module, batch: Any, target: str, mapping: QConfigMapping, caplog: pytest.LogCaptureFixture) -> Any:
    """The model prepared with a rule that advice printed, of which no part is without effect."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "fxquant"):
        prepared = fxq.prepare(model, batch, target, mapping)
    for words in ("matched nothing", "has no effect", "is not used by", "as the graph requires"):
        assert words not in caplog.text, caplog.text
    return prepared


def outlying() -> nn.Module:
    def stretch(model: Any) -> None:
        for parameter in (model.down[1].weight, model.down[1].bias):
            parameter[3] *= 100
        model.head.weight.view(10, 24, 16)[:, 3] /= 100

    return broken(stretch)


def rescaled(layer: str, factor: float) -> Callable[[str], tuple[nn.Module, list[Any], fxq.results.Comparison]]:
    def found(target: str) -> tuple[nn.Module, list[Any], fxq.results.Comparison]:
        result = quantized(network(), target=target)
        prepared = copy.deepcopy(result.prepared)
        fxq.set_qparams(prepared, {layer: fxq.qparams(prepared)[layer] * factor})
        return network(), digits(), fxq.compare(result.float, fxq.convert(prepared), digits())

    return found


def compared(make: Callable[[], nn.Module], batches: Callable[[], list[Any]], **options: Any) -> Callable[[str], Any]:
    def found(target: str) -> tuple[nn.Module, list[Any], fxq.results.Comparison]:
        model, inputs = make(), batches()
        result = fxq.quantize(model, inputs, target, **options)
        return model, inputs, result.compare(inputs)

    return found


def joined() -> nn.Module:
    """Two branches of different ranges in one tensor."""
    torch.manual_seed(0)
    model = written(
        lambda m, x: m.read(torch.cat([m.loud(x), m.quiet(x)], -1)), loud=nn.Linear(6, 8), quiet=nn.Linear(6, 8), read=nn.Linear(16, 4)
    ).eval()
    with torch.no_grad():
        model.loud.weight *= 200
        model.read.weight[:, :8] /= 200
    return model


def noise() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 6, generator=generator) for _ in range(2)]


def coarse_weight() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[1].weight[:, 0], model[0].weight[0], model[0].bias[0] = 400.0, 0.0, 0.0  # a weight that meets nothing sets the scale
    return model


def boxes() -> nn.Module:
    """Boxes in pixels and scores below 1 from one layer, returned in one tensor."""
    torch.manual_seed(0)
    model = written(lambda m, x: m.head(x).reshape(-1, 2, 12), head=nn.Linear(6, 24)).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter[torch.arange(24) % 12 >= 4] *= 0.001
    return model


CASES = {
    "quiet_channels": (compared(boxes, noise, options=fxq.Options(equalize=False)), "head", ("head",)),
    "rounds_to_zero": (compared(spectrum, spectrograms), "mels_quantize", ("dropped",)),
    "outlier_channel": (compared(outlying, digits, options=fxq.Options(equalize=False)), "down_0", ("down_0",)),
    "scale_too_small": (rescaled("stem_0", 1 / 8), "stem_0", ("stem_0",)),
    "scale_too_large": (rescaled("down_0", 64), "down_0", ("down_0",)),
    "held_together": (compared(joined, noise, options=fxq.Options(equalize=False)), "cat", ("cat",)),
    "inside": (compared(coarse_weight, noise, options=fxq.Options(equalize=False)), "_1", ("_1",)),
}

NARROW = ("rounds_to_zero", "inside", "quiet_channels")  # printed for a target without int16


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("rule", "target"), [*((rule, "nash-e") for rule in CASES), *((rule, "bernoulli2") for rule in NARROW)])
def test_every_rule_that_advice_prints_changes_what_it_names(rule: str, target: str, caplog: pytest.LogCaptureFixture) -> None:
    make, layer, named = CASES[rule]
    model, batches, result = make(target)
    told = next((each for each in result.advice if each.rule == rule), None)
    assert told is not None, str(result)
    assert told.layer == layer
    printed = rules(told)
    assert printed, told.cure
    assert told.cure.count("QConfigMapping()") == len(printed)
    before = signature(fxq.prepare(model, batches[0], target))
    for mapping in printed:
        assert {name.split(".")[0] for name in mapping.names} <= {*named, "mean"}
        prepared = applied(model, batches[0], target, mapping, caplog)
        after = signature(prepared)
        changed = {name for name in before if after.get(name) != before[name]}
        assert layer in changed, (mapping, changed)
        if "int16" in str(mapping):
            module = quantized_operators(prepared)[layer]
            assert (module.weight_quantizer.dtype if rule == "inside" else module.output.dtype).name == "int16"


@members(
    lambda: dict(stem=nn.Conv2d(3, 8, 3), first=nn.BatchNorm2d(8), up=nn.Conv2d(8, 16, 3), second=nn.BatchNorm2d(16), head=nn.Linear(16, 5))
)
def Normed(self, x: Tensor) -> Tensor:
    """Two batch norms with initial statistics, as in a model that was never trained."""
    x = self.second(self.up(self.first(self.stem(x)).relu())).relu()
    return self.head(x.mean((2, 3)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("layer", "factor"), [("up", 1 / 10), ("stem", 1 / 10), ("up", 64), ("stem", 64)])
def test_a_wrong_scale_comes_before_statistics_that_the_float_model_has_as_well(layer: str, factor: float) -> None:
    model, batches = Normed().eval(), [torch.randn(8, 3, 12, 12) * 2 + 1 for _ in range(3)]
    prepared = fxq.calibrate(fxq.prepare(model, batches[0], "bayes-e"), batches)
    scale = fxq.qparams(prepared)[layer]
    assert isinstance(scale, float)
    fxq.set_qparams(prepared, {layer: scale * factor})
    advice = fxq.compare(model, fxq.convert(prepared), batches).advice
    assert (advice[0].layer, advice[0].rule) == (layer, "scale_too_small" if factor < 1 else "scale_too_large")
    assert "batch_norm_statistics" in {each.rule for each in advice}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "returned", [lambda y: y, lambda y: y.flip(1), lambda y: y.permute(0, 2, 3, 1).flatten(1, 2), lambda y: (y, y.relu())]
)
def test_channels_of_an_output_that_are_lost_are_told_once(returned: Callable[[Tensor], Any]) -> None:
    """The output as a whole is good: the lost channels are a thousandth of the output."""
    model = written(lambda m, x: returned(m.head(x)), head=nn.Conv2d(3, 12, 3)).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter[4:] *= 0.001
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    for target in ("nash-e", "x86"):
        comparison = fxq.quantize(model, batches, target).compare(batches)
        assert comparison.outputs[0].sqnr > 30
        (advice,) = comparison.advice
        assert (advice.layer, advice.rule) == ("head", "quiet_channels")
        assert "8 of its 12 channels (4, 5, 6, 7, …)" in advice.cause
        assert "return them apart" in advice.cure
    (mapping, _) = rules(fxq.quantize(model, batches, "nash-e").compare(batches).advice[0])
    assert not fxq.quantize(model, batches, "nash-e", mapping).compare(batches).advice


@pytest.mark.nightly
def test_following_the_advice_about_an_input_helps(caplog: pytest.LogCaptureFixture) -> None:
    model, batches, result = compared(spectrum, spectrograms)("bayes-e")
    (line,) = [record.getMessage() for record in caplog.records if "become 0" in record.getMessage()]
    assert re.search(r"\d+ % of the values of input mels that are not 0 become 0 at its scale of ", line)
    assert "test_advice.py:" in line
    assert "QConfig(input=ActivationConfig('int16'))" in line
    (mapping,) = rules(result.advice[0])
    caplog.clear()
    better = fxq.quantize(model, batches, "bayes-e", mapping).compare(batches)
    assert "become 0" not in caplog.text
    assert better.outputs[0].sqnr > result.outputs[0].sqnr + result.advice[0].gain / 2 > result.outputs[0].sqnr + 2


@pytest.mark.nightly
def test_an_input_of_a_target_without_int16_is_warned_of_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    fxq.quantize(spectrum(), spectrograms(), "x86")
    assert "x86 has no int16" in caplog.text
    caplog.clear()
    quantized(network(Digits))
    fxq.quantize(*residuals(), target="bayes-e")
    assert "become 0" not in caplog.text


POOR = fxq.QConfig(fxq.ActivationConfig("int4"), fxq.WeightConfig("int4"))


def test_the_verdict_comes_first_with_its_thresholds() -> None:
    comparison = compiled().compare(batches())
    assert comparison.verdict.grade == "good"
    assert comparison.verdict.sqnr == min(output.sqnr for output in comparison.outputs) >= GOOD
    first = str(comparison).splitlines()[0]
    assert first == comparison.verdict.lines[0]
    assert f"output 0 is {comparison.outputs[0].sqnr:.1f} dB (good from 30 dB on, visible from 15 dB on, poor below)" in first
    equal = fxq.compare(compiled().prepared, compiled().integer, batches(), states=("validate", None)).verdict
    assert (equal.grade, equal.sqnr) == ("good", math.inf)


@pytest.mark.nightly
def test_noise_that_no_layer_explains_is_traced_to_activations_and_to_what_tune_tries() -> None:
    comparison = quantized(network(), target="bayes-e", qconfig=POOR).compare(batches())
    assert not comparison.advice
    assert comparison.verdict.sqnr < GOOD
    assert comparison.verdict.grade == ("poor" if comparison.verdict.sqnr < VISIBLE else "visible")
    share = re.search(r"rounding activations makes about (\d+) % of it", str(comparison))
    assert int(share[1]) > 60
    assert comparison.verdict.tries == ("observers", "16 bits")
    assert "fxq.tune(model, batches) tries observers, bias correction, rounding of weights, equalization" in str(comparison)
    assert "none stands out" in str(comparison)
    silent = quantized(network(), target="bayes-e", qconfig=POOR).compare(batches(), advice=False).verdict
    assert (silent.grade, silent.causes) == (comparison.verdict.grade, ())


@pytest.fixture(scope="module")
def recurrent() -> fxq.results.Result:
    torch.manual_seed(0)
    return quantized(
        written(
            lambda m, image: m.head(m.rnn(image.squeeze(1))[0][:, -1]), rnn=nn.LSTM(8, 12, batch_first=True), head=nn.Linear(12, 10)
        ).eval(),
        target="nash-e",
    )


@pytest.mark.nightly
def test_inside_of_a_recurrent_layer_there_is_a_row_for_each_operator_of_the_cell(recurrent: fxq.results.Result) -> None:
    comparison = recurrent.compare(batches())
    inside = {name: row for name, row in comparison.items() if name.startswith("rnn_")}
    steps = [layer for layer in fxq.inspect.layers(recurrent.integer) if layer.name.startswith("rnn_")]
    assert 20 < len(inside) == len(steps) < 40
    assert comparison.hidden == 0

    want = next(iter(fxq.inspect.record(recurrent.prepared, batches(1), ["rnn_linear"], real=True, state="float")))["rnn_linear"].double()
    have = next(iter(fxq.inspect.record(recurrent.integer, batches(1), ["rnn_linear"], real=True)))["rnn_linear"].double()
    one = recurrent.compare(batches(1))["rnn_linear"]
    assert one.sqnr == pytest.approx(10 * math.log10(float(want.square().sum() / (want - have).square().sum())))
    assert inside["rnn_loop_item"].elements == 7 * inside["rnn_getitem"].elements  # of a loop at all steps
    assert all(math.isfinite(row.sqnr) for row in inside.values())
    alone = fxq.compare(recurrent.float, recurrent.integer, batches(1))
    assert alone.hidden == len(steps) - sum(name.startswith("rnn_") for name in alone)
    assert "pass prepared=" in str(alone)


def test_the_page_of_a_recurrent_layer_has_a_node_for_each_operator_of_the_cell(recurrent: fxq.results.Result, tmp_path: Path) -> None:
    page = recurrent.report(tmp_path / "page.html", batches()).read_text(encoding="utf-8")
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text[1])
    compared = {node["name"] for node in data["nodes"] if "sqnr" in node}
    assert compared == set(recurrent.compare(batches()))
    assert data["verdict"]["lines"][0].startswith("the outputs are ")
    assert len(data["nodes"]) < 60


def test_a_part_of_an_output_is_named_whatever_the_whole_says() -> None:
    layers = {"boxes": nn.Conv2d(3, 4, 1), "scores": nn.Conv2d(3, 4, 1)}
    model = written(lambda m, x: torch.cat([m.boxes(x) * 100, m.scores(x)], 1).flatten(2), **layers).eval()
    inputs = torch.randn(8, 3, 8, 8)
    prepared = contract.calibrated(model, [inputs])
    fxq.set_qparams(prepared, {"scores": 1.0})
    result = fxq.compare(model, fxq.convert(prepared), [inputs])
    assert result["output 0"].sqnr > 30
    assert result.verdict.output == "output 0 (%scores)"
    assert result.verdict.grade == "poor"
