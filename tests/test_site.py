"""The site of the documentation: every page and every docstring of the reference is there, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason="the extra docs is not installed")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run([sys.executable, str(ROOT / "docs" / "site.py"), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "site"
    pages = {page.name for page in site.glob("*.html")}
    assert {"index.html", "calibration.html", "deployment.html", "api.html", "faq.html"} <= pages
    reference = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="fxquant.prepare"' in reference
    assert "Observe the batches, set every scale" in reference  # a docstring
    assert (site / "report.png").stat().st_size == (ROOT / "docs" / "report.png").stat().st_size
