"""The benchmark of accuracy on networks that nobody has trained: checkpoints, results, comparisons and the printed table."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.accuracy import floats, methods, networks, rows, table
from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.rows import OURS, Result, Row
from benchmarks.accuracy.settings import CALIBRATION
from benchmarks.accuracy.tasks import TASKS, Data, Task
from fxquant.support import seeded

EDSR_ROW = Row(CALIBRATION, "W8A8", "tiny", "edsr")


def tiny(seed: int) -> Data:
    """Eight patches of a wave under noise."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.rand(8, 3, 1, 1, generator=generator) * torch.linspace(0, 6, 8).sin().view(1, 1, 1, 8).expand(8, 3, 8, 8).abs()
    noisy = clean + 0.1 * torch.randn(clean.shape, generator=generator)
    return Data(noisy, clean, noisy.flip(0), clean.flip(0))


@pytest.fixture(autouse=True)
def tiny_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "tiny", Task("tiny", "dB", 3, 8, 3, tiny, "eight patches"))


def test_a_row_goes_through_the_benchmark_and_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "--task", "tiny", "--network", "edsr", "--setting", "W8A8", "--method", OURS, "torch.ao", "--seeds", "0", "--mode", CALIBRATION
    ]  # fmt: skip
    main([*arguments, "--cache", str(tmp_path)])
    printed = capsys.readouterr().out
    result = rows.measure(EDSR_ROW, OURS, 0, tmp_path)
    assert f"{result.unquantized:.2f}" in printed
    assert f"{result.score:.2f}" in printed
    assert 10 < result.sqnr < rows.STILL_FLOAT
    monkeypatch.setattr(methods, "quantize", lambda *_: pytest.fail("measured again"))
    assert rows.measure(EDSR_ROW, OURS, 0, tmp_path) == result


def test_a_checkpoint_is_trained_once_and_from_its_seed_alone(tmp_path: Path) -> None:
    first = floats.checkpoint("tiny", "edsr", 0, tmp_path / "one")
    again = floats.checkpoint("tiny", "edsr", 0, tmp_path / "other")
    other = floats.checkpoint("tiny", "edsr", 1, tmp_path / "other")
    weights = [torch.load(result.path, weights_only=True)["head.weight"] for result in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    written = first.path.stat().st_mtime_ns
    assert floats.checkpoint("tiny", "edsr", 0, tmp_path / "one").path.stat().st_mtime_ns == written


def test_rescaling_keeps_the_function_and_not_the_weights() -> None:
    with seeded(0):
        plain = networks.mobilenet_relu(1, 16, 10)
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 2.0)
                nn.init.normal_(module.bias)
                module.running_mean.normal_()
        x = torch.randn(4, 1, 16, 16)
    plain.eval()
    rescaled = networks.rescale(plain, 0)
    assert plain(x).abs().max() > 0
    assert torch.equal(plain(x), rescaled(x))
    ratio = rescaled.blocks[2].depthwise[1].weight / plain.blocks[2].depthwise[1].weight
    assert ratio.min() == 2**-3
    assert ratio.max() == 2**3


def test_a_score_is_percent_right_or_the_mean_psnr() -> None:
    assert TASKS["digits"].score(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 75
    clean = torch.full((2, 3, 4, 4), 0.5)
    noisy = torch.stack((clean[0] + 0.1, clean[1] - 0.01))
    assert TASKS["denoising"].score(noisy, clean) == pytest.approx((20 + 40) / 2, abs=1e-4)


def results(method: str, *scores: float) -> list[Result]:
    return [Result(method, seed, 90.0, score, 30.0) for seed, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((89.9, 89.9), (89.5, 89.3), table.WON),
        ((89.4, 89.2), (89.5, 89.3), table.TIED),
        ((88.0, 88.0), (89.5, 89.3), table.LOST),
        ((89.0,), (89.0,), table.TIED),
        ((89.01,), (89.0,), table.WON),
    ],
)
def test_a_row_is_won_tied_or_lost_by_the_spread_of_the_smaller_drop(
    ours: tuple[float, ...], theirs: tuple[float, ...], expected: str
) -> None:
    result = [*results(OURS, *ours), *results("far", *(score - 5 for score in theirs)), *results("near", *theirs)]
    summary, best = table.summary(result, OURS), table.best_peer(result)
    assert isinstance(summary, table.Summary)
    assert best.method == "near"
    assert table.verdict(summary, best) == expected


def test_a_peer_that_cannot_do_a_row_or_stayed_in_float_says_so(tmp_path: Path) -> None:
    result = floats.checkpoint("tiny", "edsr", 0, tmp_path)
    wanted = rows.float_outputs(result)
    assert "was not quantized" in rows.judged("peer", result, wanted, wanted.clone()).reason
    refused = Result("peer", 0, 30.0, reason="no such row")
    page = table.markdown({EDSR_ROW: [*results(OURS, 89.0), refused]}, [0])
    assert "- peer: no such row" in page
    assert "1 alone" in page
