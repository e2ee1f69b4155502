"""The HTML report in a real browser, where one is installed: its scripts run without the network, and draw what the page is about."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import fxquant as fxq

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--virtual-time-budget=4000", "--dump-dom"),
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_every_layer_of_the_report(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    batches = [torch.randn(4, 3, 8, 8)]
    result = fxq.quantize(model, batches, target="nash-e", show_progress=False)
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
