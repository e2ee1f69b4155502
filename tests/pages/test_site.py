"""The site of the documentation: every page and every docstring of the reference is there, and no link leads nowhere."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.reporting.test_report_in_browser import BROWSER, SETTINGS

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_of_the_docs", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip("the extra docs is not installed")
    folder = tmp_path_factory.mktemp("docs")
    built = subprocess.run([sys.executable, str(ROOT / "docs" / "site.py"), str(folder)], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder / "site"


def test_the_site_has_every_page_the_reference_and_every_picture(made: ModuleType, site: Path) -> None:
    shown = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {
        "404.html",
        *(f"api/{name}.html" for name in made.public()),
    }
    assert shown == {re.sub(r"README$", "index", page.removesuffix(".md")) + ".html" for page in [*made.pages(), *made.notebooks()]}
    reference = (site / "api" / "fxquant.html").read_text(encoding="utf-8")
    assert 'id="fxquant.prepare"' in reference
    assert "Observe the batches, set every scale" in reference  # a docstring
    assert (site / "docs" / "report.png").stat().st_size == (ROOT / "docs" / "report.png").stat().st_size
    for page in site.rglob("*.html"):  # every picture is there
        for picture in re.findall(r'<img [^>]*src="(?!data:|https?:)([^"]+)"', page.read_text(encoding="utf-8")):
            assert (page.parent / picture).exists(), f"{page.relative_to(site)}: {picture}"


MEASURE = """
<body><script>
async function measured() {
  const found = [];
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px";
    frame.src = page;
    await new Promise((resolve) => { frame.onload = resolve; document.body.append(frame); });
    found.push([page, width, frame.contentDocument.documentElement.clientWidth, frame.contentDocument.documentElement.scrollWidth]);
    frame.remove();
  }
  document.title = JSON.stringify(found);
}
measured();
</script></body>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_no_page_scrolls_sideways_on_a_desk_or_a_telephone(site: Path, tmp_path: Path) -> None:
    pages, widths = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html")), (390, 1280)
    wide = site / "wide-page.html"
    wide.write_text("<p style='width: 2000px'>too wide</p>", encoding="utf-8")
    frame = site / "measure.html"
    frame.write_text(MEASURE.replace("WIDTHS", str(list(widths))).replace("PAGES", json.dumps([*pages, wide.name])), encoding="utf-8")
    settings = (*SETTINGS, "--virtual-time-budget=120000", "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'browser'}")
    shown = subprocess.run([str(BROWSER), *settings, frame.as_uri()], capture_output=True, text=True, timeout=300).stdout
    found = json.loads(html.unescape(re.findall(r"<title>(.*?)</title>", shown)[0]))
    assert len(found) == len(widths) * (len(pages) + 1)
    assert all(seen > 300 for _, _, seen, _ in found)
    assert [(page, width) for page, width, seen, whole in found if whole > seen] == [(wide.name, width) for width in widths]


def test_every_page_is_in_the_navigation(made: ModuleType) -> None:
    listed = re.findall(r": (\S+\.md)$|- (\S+\.md)$", made.navigation(), re.MULTILINE)
    assert sorted(one or other for one, other in listed) == sorted(
        [*made.pages(), *made.notebooks(), *(f"api/{name}.md" for name in made.public())]
    )


def test_links_to_files_that_are_not_pages_are_words(made: ModuleType) -> None:
    text = (
        "[a](guide/onnx.md#names) [b](../tests/cli/test_cli.py) [e](report.png) [f](missing.md)\n```\n[b](../tests/cli/test_cli.py)\n```\n"
    )
    assert made.linked(text, "docs/terms.md") == text.replace("[b](../tests/cli/test_cli.py) ", "b ")
