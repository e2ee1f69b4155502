"""The site of the documentation: every page and every docstring of the reference is there, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_of_the_docs", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(bool(MISSING), reason="the extra docs is not installed")
def test_the_site_is_built_without_a_warning(made: ModuleType, tmp_path: Path) -> None:
    built = subprocess.run([sys.executable, str(ROOT / "docs" / "site.py"), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    site = tmp_path / "site"
    shown = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html", "api.html"}
    assert shown == {re.sub(r"README$", "index", page.removesuffix(".md")) + ".html" for page in [*made.pages(), *made.notebooks()]}
    reference = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="fxquant.prepare"' in reference
    assert "Observe the batches, set every scale" in reference  # a docstring
    assert (site / "docs" / "report.png").stat().st_size == (ROOT / "docs" / "report.png").stat().st_size
    for page in site.rglob("*.html"):  # every picture is there
        for picture in re.findall(r'<img [^>]*src="(?!data:|https?:)([^"]+)"', page.read_text(encoding="utf-8")):
            assert (page.parent / picture).exists(), f"{page.relative_to(site)}: {picture}"


def test_every_page_is_in_the_navigation(made: ModuleType) -> None:
    listed = re.findall(r": (\S+\.md)$|- (\S+\.md)$", made.navigation(), re.MULTILINE)
    assert sorted(one or other for one, other in listed) == sorted([*made.pages(), *made.notebooks(), "api.md"])


def test_links_to_files_that_are_not_pages_are_words(made: ModuleType) -> None:
    text = (
        "[a](guide/onnx.md#names) [b](../tests/cli/test_cli.py) [e](report.png) [f](missing.md)\n```\n[b](../tests/cli/test_cli.py)\n```\n"
    )
    assert made.linked(text, "docs/terms.md") == text.replace("[b](../tests/cli/test_cli.py) ", "b ")
