"""Pages, pictures, differences and questions about one model: they show the numbers of the model."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx
import onnx
import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.cli import main
from fxquant.reporting.page import drawing
from tests.shared.networks import members


@members(lambda: dict(conv=nn.Conv2d(3, 6, 3), norm=nn.BatchNorm2d(6), again=nn.Conv2d(6, 6, 1), unused=nn.Linear(2, 2)))
def Network(self, image: Tensor) -> Tensor:
    """Two readers of one convolution, a module called twice, one never, a name that is markup, and an operator left in float."""
    read = self.conv(image)
    x = self.norm(read) + read
    x = self.again(self.again(x).relu())
    return torch.fft.fft(x.mean((2, 3))).abs()  # </script><b> & "quoted"


class Compiled:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.batches = Network().eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]
        self.result = fxq.quantize(self.model, self.batches, target="nash-e")


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled()


def shown(page: str) -> Any:
    """The data of a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(match[1])


# ---- the page ----------------------------------------------------------------------------------------------------------
def test_the_page_holds_what_is_known_of_the_model(compiled: Compiled, tmp_path: Path) -> None:
    result = compiled.result
    page = result.report(tmp_path / "folder" / "report.html", compiled.batches, title="a </script> title").read_text(encoding="utf-8")
    data, comparison = shown(page), result.compare(compiled.batches)
    assert data["title"] == "a </script> title"
    layers = {layer.name: layer for layer in fxq.inspect.layers(result.integer)}
    nodes = {node["name"]: node for node in data["nodes"]}
    assert set(nodes) == {*layers, "image", "output"}
    for name, layer in comparison.items():
        assert nodes[name]["sqnr"] == pytest.approx(layer.sqnr)
        assert nodes[name]["device"] == layers[name].device
        assert layer.grid is None or sum(data["details"][name]["counts"]) == layer.elements
    assert [row[0] for row in data["floats"]] == ["fft_fft", "abs_1"]
    assert data["floats"][0][2] == layers["fft_fft"].reason
    assert {form[0]: form[1] for form in data["forms"]}["integer against prepared"].startswith(f"{len(data['details']) + 1} of ")
    assert len(data["weights"]["conv"]) == 6
    assert ["add", "relu"] not in data["passes"]["fused"]
    assert data["advice"] == [
        {"layer": each.layer, "cause": each.cause, "cure": each.cure, "gain": None if each.gain == float("inf") else each.gain,
         "source": each.source} for each in comparison.advice
    ]  # fmt: skip


def test_the_page_needs_no_network_and_keeps_text_apart_from_markup(compiled: Compiled, tmp_path: Path) -> None:
    page = fxq.report(compiled.result.prepared, tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page)
    assert "url(http" not in page.split("<script>")[0]
    assert any("</script><b>" in node.get("source", "") for node in shown(page)["nodes"])
    assert page.count("<script") - page.split('id="data">')[1].split("<script>", 1)[1].count("<script") == 2


def test_every_stage_has_a_page_and_the_command_writes_one(compiled: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = fxq.trace(compiled.model, compiled.batches[0])
    assert shown(fxq.report(traced, tmp_path / "traced.html").read_text(encoding="utf-8"))["stage"] == "traced"
    float_file, file = fxq.save(compiled.result.prepared, tmp_path / "prepared.fxq"), fxq.save(compiled.result.integer, tmp_path / "m.fxq")
    out = tmp_path / "page.html"
    assert main(["report", str(file), "--reference", str(float_file), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    data = shown(out.read_text(encoding="utf-8"))
    assert data["compared"]
    assert all(node["sqnr"] is not None for node in data["nodes"] if "sqnr" in node)


# ---- pictures ----------------------------------------------------------------------------------------------------------
def test_a_drawing_has_every_operator_and_every_value_once(compiled: Compiled) -> None:
    result = drawing(compiled.result.prepared)
    assert networkx.is_directed_acyclic_graph(result.graph)
    assert all(result.places[one][1] > result.places[other][1] for one, other in result.graph.edges)
    assert len(set(result.places.values())) == len(result.graph)
    assert set(result.graph.successors("conv")) == {"norm", "add"}


# ---- differences -------------------------------------------------------------------------------------------------------
def test_graphs_and_files_are_compared_as_text(compiled: Compiled, tmp_path: Path) -> None:
    prepared, integer = compiled.result.prepared, compiled.result.integer
    file = fxq.save(integer, tmp_path / "model.fxq")
    assert fxq.inspect.diff(integer, file).equal
    assert str(fxq.inspect.diff(file, file)) == "equal: the same graph, scales and tensors"
    difference = fxq.inspect.diff(prepared, integer)
    assert not difference.equal
    assert "stage: prepared | integer" in str(difference)
    assert "background:#dafbe1" in difference._repr_html_()


# ---- questions ---------------------------------------------------------------------------------------------------------
def test_what_is_not_fused_says_why(compiled: Compiled, tmp_path: Path) -> None:
    result = {row.layer: row for row in fxq.inspect.not_fused(compiled.result.prepared)}
    assert result["norm"].because == "%conv has 2 users"
    assert "has other users" in result["add"].because
    loaded = fxq.load(fxq.save(compiled.result.prepared, tmp_path / "model.fxq"))
    assert fxq.inspect.not_fused(loaded) == fxq.inspect.not_fused(compiled.result.prepared)
    assert "not fused" in str(fxq.inspect.not_fused(loaded))
    assert "<pre" in fxq.inspect.not_fused(loaded)._repr_html_()


def test_calls_of_modules_and_memory_that_is_still_to_be_read_are_counted(compiled: Compiled) -> None:
    counts = {row.module: row.times for row in fxq.inspect.call_counts(compiled.model, compiled.batches[0])}
    assert counts == {"conv": 1, "norm": 1, "again": 2, "unused": 0}
    rows = {row.layer: row for row in fxq.inspect.memory(compiled.result.integer)}
    size = 6 * 6 * 6
    assert (rows["conv"].activation, rows["conv"].alive) == (size, size + 3 * 8 * 8)
    assert rows["norm"].alive == 2 * size  # its result, and the convolution's, which the addition reads
    assert rows["add"].alive == 3 * size


def test_weights_of_the_integer_model_are_near_those_that_were_rounded(compiled: Compiled) -> None:
    rows = {row.layer: row for row in fxq.inspect.compare_weights(compiled.result.prepared, compiled.result.integer)}
    assert set(rows) >= {"conv", "again", "again_1"}
    assert all(30 < row.channel_sqnr <= row.sqnr + 1e-6 or row.channel_sqnr < row.sqnr for row in rows.values())
    same = fxq.inspect.compare_weights(compiled.result.integer, compiled.result.integer)
    assert all(row.largest == 0 for row in same)


def test_shared_scales_devices_and_ranges(compiled: Compiled) -> None:
    prepared = compiled.result.prepared
    for row in fxq.inspect.shared_scales(prepared):
        assert len({fxq.qparams(prepared)[name] for name in row.tensors if name in fxq.qparams(prepared)}) <= 1
    rows, layers = fxq.inspect.devices(prepared), fxq.inspect.layers(prepared)
    assert {row.layer: row.device for row in rows} == {layer.name: layer.device for layer in layers}
    image = compiled.batches[0].clone()
    image[0, 0, 0, 0] = 1e9
    rows = {row.tensor: row for row in fxq.inspect.value_ranges(compiled.model, [*compiled.batches, image], spread=20)}
    assert rows["conv"].remarks == "wide range"
    assert {row.remarks for row in fxq.inspect.value_ranges(compiled.model, compiled.batches)} == {""}


def test_suspicious_settings_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    mapping = fxq.QConfigMapping().set_global(fxq.QConfig(weight=fxq.WeightConfig(per_channel=False)))
    mapping = mapping.set_module_name("2", fxq.QConfig(fxq.ActivationConfig(scale=0.5))).set_module_name("nowhere", fxq.QConfig())
    rows = fxq.inspect.suspicious_settings(fxq.prepare(model, torch.randn(2, 3, 4, 4), "nash-e", mapping))
    assert {(row.layer, row.setting) for row in rows} == {("_2", "given scale"), ("_0", "weight per tensor"), ("", "qconfig")}


def test_tensorboard_is_given_every_figure(compiled: Compiled) -> None:
    written: list[tuple[str, ...]] = []

    scalar, text = (lambda tag, *_, kind=kind: written.append((kind, tag)) for kind in ("scalar", "text"))
    writer = SimpleNamespace(add_scalar=scalar, add_text=text)
    comparison = compiled.result.compare(compiled.batches, advice=False)
    comparison.write_tensorboard(writer, step=3)
    assert ("scalar", "sqnr/conv") in written
    assert ("text", "advice") in written
    assert comparison._repr_html_().count("<pre") == 1


# ---- what a file says of where its tensors come from -------------------------------------------------------------------
DAMAGED = ('["conv"]', '{"_0": 5}', '{"_0": {"fused": "bn"}}', '{"_0": {"fused": [5]}}', '{"_0": {"exponents": 3}}',
           '{"_0": {"exponents": [[1], [2, 3]]}}', '{"_0": {"exponents": [0.5]}}', '{"_0": {"exponents": [1000]}}')  # fmt: skip


def test_a_file_whose_provenance_is_damaged_is_refused(tmp_path: Path) -> None:
    path = fxq.quantize(nn.Sequential(nn.Linear(3, 2)), [torch.randn(4, 3)], target="nash-e").export(tmp_path / "model.onnx")
    model = onnx.load(str(path))
    said = {each.key: each.value for each in model.metadata_props}
    for entry in DAMAGED:
        onnx.helper.set_model_props(model, said | {"fxquant.provenance": entry})
        onnx.save(model, str(path))
        with pytest.raises(fxq.errors.ExportError, match=r"fxquant\.provenance"):
            fxq.export.onnx_metadata(path)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--virtual-time-budget=4000", "--dump-dom"),
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_every_layer_of_the_report(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    batches = [torch.randn(4, 3, 8, 8)]
    result = fxq.quantize(model, batches, target="nash-e")
    page = result.report(tmp_path / "report.html", batches)
    settings = (*SETTINGS, f"--user-data-dir={tmp_path / 'browser'}")
    shown = subprocess.run([str(BROWSER), *settings, page.as_uri()], capture_output=True, text=True, timeout=120).stdout
    written = page.read_text(encoding="utf-8")
    body = shown[shown.index("<body") :]
    assert body.count("<tr") > written[written.index("<body") :].count("<tr")  # rows that its script has made
    assert "<svg" in body
    plot = body[body.index('<div id="errors-plot"') : body.index('<section id="drawing"')]
    compared = result.compare(batches)
    assert plot.count('class="point"') == sum(math.isfinite(layer.sqnr) + math.isfinite(layer.own) for layer in compared.layers)
    assert re.findall(r'class="ytick"[^/]*<text[^>]*>([^<]*)<', plot) == list(compared)
    for layer in fxq.inspect.layers(result.integer):
        if layer.macs:
            assert f">{layer.name}<" in body
