"""The verdict on the outputs, what it says the noise is made of, and what is shown of the inside of a recurrent layer."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.weights import BiasCorrection
from fxquant.reporting.verdict import GOOD, VISIBLE
from tests.analysis.test_comparison import batches, compiled, network, quantized
from tests.shared import contract
from tests.shared.written import written

POOR = fxq.QConfig(fxq.ActivationConfig("int4"), fxq.WeightConfig("int4"))


def test_the_verdict_comes_first_with_its_thresholds() -> None:
    found = compiled().compare(batches())
    assert found.verdict is not None
    assert found.verdict.grade == "good"
    assert found.verdict.sqnr == min(output.sqnr for output in found.outputs) >= GOOD
    first = str(found).splitlines()[0]
    assert first == found.verdict.lines[0]
    assert f"output 0 is {found.outputs[0].sqnr:.1f} dB (good from 30 dB on, visible from 15 dB on, poor below)" in first
    equal = fxq.compare(compiled().prepared, compiled().integer, batches(), states=("validate", None)).verdict
    assert equal is not None
    assert (equal.grade, equal.sqnr) == ("good", math.inf)


@pytest.mark.nightly
def test_noise_that_no_layer_explains_is_traced_to_activations_and_to_what_tune_tries() -> None:
    found = quantized(network(), target="bayes-e", qconfig=POOR).compare(batches())
    assert not found.advice
    assert found.verdict is not None
    assert found.verdict.sqnr < GOOD
    assert found.verdict.grade == ("poor" if found.verdict.sqnr < VISIBLE else "visible")
    share = re.search(r"rounding activations makes about (\d+) % of it", str(found))
    assert share is not None
    assert int(share[1]) > 60
    assert found.verdict.tries == ("observers", "16 bits")
    assert "fxq.tune(model, batches) tries observers, bias correction, rounding of weights, equalization" in str(found)
    assert "none stands out" in str(found)
    silent = quantized(network(), target="bayes-e", qconfig=POOR).compare(batches(), advice=False).verdict
    assert silent is not None
    assert (silent.grade, silent.causes) == (found.verdict.grade, ())


def test_a_correction_that_costs_is_named_with_what_is_without_it() -> None:
    result = quantized(network(), target="bayes-e")
    for operator in quantized_operators(result.prepared).values():
        operator.weight_quantizer.correct(None)
    before = fxq.compare(result.float, result.prepared, batches()).outputs[0].sqnr
    operators = [each for each in quantized_operators(result.prepared).values() if each.operator.name == "conv2d"]
    assert len(operators) == 3
    for operator, count, size in zip(operators, (12, 12, 24), (0.057, 0.06, 0.065), strict=True):  # too small for one layer to stand out
        added = BiasCorrection(count)
        added.value.copy_(size * (-1.0) ** torch.arange(count))
        operator.weight_quantizer.correct(added)
    found = fxq.compare(result.float, result.prepared, batches())
    assert found.verdict is not None
    if found.advice:
        pytest.fail(str(found))
    (line,) = [line for line in found.verdict.causes if line.startswith("bias correction costs")]
    without = re.search(r"without it the outputs are at ([\d.]+) dB", line)
    assert without is not None
    assert float(without[1]) == pytest.approx(before, abs=1.0)
    assert "bias correction" in found.verdict.tries
    assert all(operator.weight_quantizer.correction is not None for operator in operators)  # it was put back


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
    found = recurrent.compare(batches())
    inside = {name: row for name, row in found.items() if name.startswith("rnn_")}
    steps = [layer for layer in fxq.inspect.layers(recurrent.integer) if layer.name.startswith("rnn_")]
    assert sum(row.times for row in inside.values()) == len(steps) > 100
    assert len(inside) < 40
    assert found.hidden == 0
    linear = inside["rnn_linear"]
    want = next(iter(fxq.inspect.record(recurrent.prepared, batches(1), ["rnn_linear"], real=True, state="float")))["rnn_linear"].double()
    have = next(iter(fxq.inspect.record(recurrent.integer, batches(1), ["rnn_linear"], real=True)))["rnn_linear"].double()
    one = recurrent.compare(batches(1))["rnn_linear"]
    assert one.sqnr == pytest.approx(10 * math.log10(float(want.square().sum() / (want - have).square().sum())))
    assert linear.times == 1
    assert max(row.times for row in inside.values()) == 8
    assert all(math.isfinite(row.sqnr) for row in inside.values())
    assert "(at 8 steps)" in str(found)
    alone = fxq.compare(recurrent.float, recurrent.integer, batches(1))
    assert alone.hidden == len(steps) - sum(name.startswith("rnn_") for name in alone)
    assert "pass prepared=" in str(alone)


def test_the_page_of_a_recurrent_layer_has_a_node_for_each_operator_of_the_cell(recurrent: fxq.results.Result, tmp_path: Path) -> None:
    page = recurrent.report(tmp_path / "page.html", batches(), show_progress=False).read_text(encoding="utf-8")
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    data = json.loads(text[1])
    compared = {node["name"] for node in data["nodes"] if "sqnr" in node}
    assert compared == set(recurrent.compare(batches()))
    assert any("at 8 steps" in node.get("why", "") for node in data["nodes"])
    assert data["verdict"]["lines"][0].startswith("the outputs are ")
    assert len(data["nodes"]) < 60


def test_a_part_of_an_output_is_named_whatever_the_whole_says() -> None:
    torch.manual_seed(0)
    layers = {"boxes": nn.Conv2d(3, 4, 1), "scores": nn.Conv2d(3, 4, 1)}
    model = written(lambda m, x: torch.cat([m.boxes(x) * 100, m.scores(x)], 1).flatten(2), **layers).eval()
    inputs = torch.randn(8, 3, 8, 8)
    prepared = contract.calibrated(model, [inputs])
    fxq.set_qparams(prepared, {"scores": 1.0})
    result = fxq.compare(model, fxq.convert(prepared), [inputs])
    assert result["output 0"].sqnr > 30
    assert result.verdict is not None
    assert result.verdict.output == "output 0 (%scores)"
    assert result.verdict.grade == "poor"
