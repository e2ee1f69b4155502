"""What a model would cost: against sums made by hand, and as a budget."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant import backends
from fxquant.search.bit_widths import Budget


class Mixed(nn.Module):
    """A convolution, a product of activations, a linear layer, and an operator that stays in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2)
        scores = self.head((x @ x.transpose(1, 2)).mean(1))
        return torch.fft.rfft(scores).abs()


@functools.cache
def integer_of(dtype: str = "int8") -> fx.GraphModule:
    activations = fxq.QConfig(fxq.ActivationConfig(dtype))
    return fxq.quantize(Mixed().eval(), [torch.randn(4, 3, 6, 6)], target="nash-e", qconfig=activations).integer


def test_products_and_bytes_are_those_of_the_layers() -> None:
    found = fxq.estimate(integer_of())
    rows = {row.layer: row for row in found}
    assert rows["conv"].macs == 8 * 36 * 27
    assert rows["conv"].bytes == 8 * 27 + 4 * 8 + 3 * 36 + 8 * 36  # weight, bias, operand, result
    assert rows["matmul"].macs == 8 * 8 * 36
    assert rows["matmul"].bytes == 2 * 8 * 36 + 8 * 8  # both operands are tensors of their own
    assert rows["x_quantize"].bytes == (4 + 1) * 3 * 36
    assert (found.macs, found.bytes) == (sum(row.macs for row in found), sum(row.bytes for row in found))


def test_an_operator_takes_the_longer_of_its_times() -> None:
    integer = integer_of()
    slow = fxq.estimate(integer, roofline=fxq.extend.Roofline(1e6, 1e12))
    rows = {row.layer: row for row in slow}
    assert rows["conv"].bound == "compute"
    assert rows["conv"].microseconds == pytest.approx(rows["conv"].macs)  # one product a microsecond; float sums, a few roundings
    narrow = {row.layer: row for row in fxq.estimate(integer, roofline=fxq.extend.Roofline(1e12, 1e6))}
    assert narrow["conv"].bound == "memory"
    assert narrow["conv"].microseconds == pytest.approx(narrow["conv"].bytes)
    assert slow.seconds == pytest.approx(sum(row.microseconds for row in slow if row.bound != "host") / 1e6)
    assert set(slow.on_host) == {row.layer for row in slow if row.bound == "host"} != set()
    assert all(name in str(slow) for name in slow.on_host)


def test_sixteen_bits_take_their_time() -> None:
    roofline = fxq.extend.Roofline(1e6, 1e12)
    narrow, wide = ({row.layer: row for row in fxq.estimate(integer_of(dtype), roofline=roofline)} for dtype in ("int8", "int16"))
    assert wide["matmul"].microseconds == 4 * narrow["matmul"].microseconds  # both factors are twice as wide
    assert wide["head"].microseconds == 2 * narrow["head"].microseconds  # one of them is


def test_every_march_has_rates_that_say_where_they_are_from() -> None:
    integer = integer_of()
    for target in backends.TARGETS.values():
        if target.roofline is not None:
            found = fxq.estimate(integer, target)
            assert "TOPS" in found.roofline.source
            assert ("factor of 2" in found.summary) == found.roofline.assumed
    assert {target.name for target in backends.TARGETS.values() if target.roofline is None} == {"x86", "qnnpack"}
    rates = backends.get("bernoulli2").roofline  # 5 TOPS, of which a multiply-accumulate is two; 32 bits at 3200 MT/s
    assert rates is not None
    assert (rates.macs_per_second, rates.bytes_per_second) == (2.5e12, 12.8e9)


def test_a_page_stands_alone(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = fxq.estimate(integer_of()).to_html(tmp_path / "estimate.html").read_text(encoding="utf-8")
    assert "bound by memory" in page
    assert "conv2d" in page
    assert "<script src" not in page


def test_a_latency_is_estimated_by_the_targets_rates() -> None:
    nash = backends.get("nash-e")
    budget = Budget(latency=1e-6).on(nash)
    assert budget.speed is not None
    assert nash.roofline is not None
    assert (budget.speed.macs_per_second, budget.speed.bytes_per_second) == (nash.roofline.macs_per_second, nash.roofline.bytes_per_second)
    assert Budget(weight_bits=5).on(nash).speed is None
    with pytest.raises(fxq.errors.ConfigurationError, match="a latency on x86"):
        Budget(latency=1e-6).on(backends.get("x86"))
