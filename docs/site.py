"""Gather the pages of the documentation and build a site of them: `make docs`.

The texts are README.md, GUIDE.md and the pages of this folder, which the tests run; a chapter of the site is some sections of the guide,
or a page. The reference is made from docstrings, by mkdocstrings. mkdocs runs strictly: a link that leads nowhere is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(sys.argv[1]).resolve() if __name__ == "__main__" and len(sys.argv) > 1 else ROOT / "build" / "docs"

# A chapter of the site: its file, its title, and the sections of the guide that it is made of.
GUIDE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requirements": (
        "Requirements and limits",
        (
            "Batches",
            "What a model may be",
            "Which operators become integers",
            "Operators made of others",
            "A function of your own",
            "An operator and a pass of your own",
            "Python that stays Python",
            "Truth values and indices",
            "Recurrent layers",
            "Quantized at run time",
            "Images read at computed positions",
            "Cameras",
            "Limits of a march",
        ),
    ),
    "qconfig": ("Precision", ("Precision",)),
    "calibration": (
        "Calibration",
        ("Scales", "Channels of different ranges", "What the first samples decide", "Another calibration without batches"),
    ),
    "training": ("Training", ("Training", "Tuning")),
    "heterogeneous": ("Heterogeneous models", ("The host, and segments",)),
    "accuracy": (
        "Accuracy",
        ("The facts of every layer, as values", "Where it goes wrong", "What loses most, and mixed precision", "One tuner"),
    ),
    "deployment": (
        "Deployment",
        ("ONNX", "PyTorch's own programs", "A C program", "How fast it runs", "Files and the command line", "The primitives alone"),
    ),
}
FILES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "backends/bpu/ARITHMETIC.md": "arithmetic.md",
    **{f"docs/{page.name}": page.name for page in (ROOT / "docs").glob("*.md")},
}
NAVIGATION = (
    ("Quick start", "index.md"),
    ("Terms", "terms.md"),
    *((title, f"{name}.md") for name, (title, _) in GUIDE.items()),
    ("What to try", "advice.md"),
    ("Which tool when", "which-tool-when.md"),
    ("To the board", "to-the-board.md"),
    ("Common mistakes", "mistakes.md"),
    ("Questions", "faq.md"),
    ("Coming from Horizon", "from-horizon.md"),
    ("Coming from torch.ao", "from-torch-ao.md"),
    ("Reference", "api.md"),
    ("Operators", "OPERATORS.md"),
    ("Coverage", "COVERAGE.md"),
    ("Arithmetic", "arithmetic.md"),
    ("Architecture", "architecture.md"),
    ("Contributing", "contributing.md"),
    ("Changelog", "changelog.md"),
)
REFERENCE = {
    "From a float model to a file": (
        "trace",
        "prepare",
        "calibrate",
        "convert",
        "quantize",
        "Result",
        "verify",
        "Report",
        "Interrupted",
        "record",
    ),
    "What is said": (
        "QConfig",
        "ActivationConfig",
        "WeightConfig",
        "QConfigMapping",
        "State",
        "set_state",
        "freeze",
        "qparams",
        "set_qparams",
        "wrap",
        "unary",
        "operator",
    ),
    "Ways out": (
        "export_onnx",
        "onnx_metadata",
        "export_segments",
        "run_segments",
        "export_pt2",
        "export_torchscript",
        "export_c",
        "export_horizon",
        "compile_horizon",
        "conformance_kit",
        "check_conformance",
        "simulate_conformance",
        "save",
        "load",
    ),
    "Seeing inside": (
        "explain",
        "text",
        "layers",
        "Layer",
        "check",
        "segments",
        "compare",
        "Comparison",
        "report",
        "draw",
        "plot_errors",
        "plot_sensitivity",
        "plot_pareto",
        "plot_training",
        "diff",
        "estimate",
    ),
    "Making it more exact": (
        "equalize",
        "observations",
        "high_precision_outputs",
        "sensitivity",
        "mixed_precision",
        "search_observers",
        "tune",
    ),
    "Observers": (
        "HistogramObserver",
        "MSEObserver",
        "MinMaxObserver",
        "MovingAverageMinMaxObserver",
        "PercentileObserver",
        "KLObserver",
        "Observer",
    ),
}
QUIET = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
HEADER = """site_name: fxquant
docs_dir: pages
site_dir: site
use_directory_urls: false
extra_css: [wide.css]
theme:
  name: material
  font: false
  features: [navigation.top, content.code.copy, search.highlight, toc.follow]
  palette:
    - {media: "(prefers-color-scheme: light)", scheme: default, primary: indigo}
    - {media: "(prefers-color-scheme: dark)", scheme: slate, primary: indigo}
validation:
  links: {anchors: warn, not_found: warn, unrecognized_links: warn}
markdown_extensions:
  - tables
  - pymdownx.superfences
  - pymdownx.highlight
  - toc:
      permalink: true
      slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: [%s]
          options:
            {show_source: false, show_root_heading: true, heading_level: 3, docstring_style: null, separate_signature: true,
             show_signature_annotations: true, extensions: [%s]}
nav:
"""


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and the site spell it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def sections() -> dict[str, str]:
    """The sections of the guide by their titles; "" is what stands in front of the first."""
    parts = re.split(r"^## (.+)\n", (ROOT / "GUIDE.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def linked(text: str, source: str, homes: Mapping[str, str]) -> str:
    """The text of a page with links that hold on the site: files of the repository that are no pages are named without one."""

    def moved(match: re.Match[str]) -> str:
        words, link = match[1], match[2]
        if link is None or re.match(r"https?:|mailto:|#", link):  # a block of code, or a link that holds everywhere
            return match[0]
        path, _, place = link.partition("#")
        target = (ROOT / source).parent.joinpath(path).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else path
        if name == "GUIDE.md":
            return f"[{words}]({homes.get(place, 'requirements.md')}{'#' + place if place in homes else ''})"
        if name in FILES:
            return f"[{words}]({FILES[name]}{'#' + place if place else ''})"
        if target.suffix == ".png" and target.exists():
            shutil.copy(target, OUT / "pages" / target.name)
            return f"![{words}]({target.name})"
        return words

    code = r"^```.*?^```"
    return re.sub(rf"(?ms:{code})|!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", moved, text)


def gather() -> None:
    """Write the pages and the settings of the site."""
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "pages").mkdir(parents=True)
    package = OUT / "source" / "fxquant"  # as in a wheel, where passes and backends are inside
    package.mkdir(parents=True)
    for part in (*(ROOT / "fxquant").iterdir(), ROOT / "passes", ROOT / "backends"):
        (package / part.name).symlink_to(part)
    known = sections()
    placed = [title for _, titles in GUIDE.values() for title in titles]
    missing = set(known) - {""} ^ set(placed)
    if missing:
        raise SystemExit(
            f"docs/site.py does not place these sections of the guide, or places what there is not: {', '.join(sorted(missing))}"
        )
    homes = {anchor(title): f"{name}.md" for name, (_, titles) in GUIDE.items() for title in titles}
    for source, name in FILES.items():
        (OUT / "pages" / name).write_text(linked((ROOT / source).read_text(encoding="utf-8"), source, homes), encoding="utf-8")
    for name, (title, titles) in GUIDE.items():
        start = (
            known[""].split("\n", 1)[1]
            if name == "requirements"
            else "The code continues that of [the first page](requirements.md), in one program.\n"
        )
        text = f"# {title}\n\n{start}\n" + "\n".join(f"## {one}\n{known[one]}" for one in titles)
        (OUT / "pages" / f"{name}.md").write_text(linked(text, "GUIDE.md", homes), encoding="utf-8")
    reference = [f"## {title}\n\n" + "\n".join(f"::: fxquant.{name}\n" for name in names) for title, names in REFERENCE.items()]
    (OUT / "pages" / "api.md").write_text("# Reference\n\n" + "\n".join(reference), encoding="utf-8")
    (OUT / "pages" / "wide.css").write_text(".md-grid { max-width: 88rem; }\n", encoding="utf-8")  # lines of code have up to 140 columns
    navigation = "".join(f"  - {title}: {page}\n" for title, page in NAVIGATION)
    (OUT / "mkdocs.yml").write_text(HEADER % (package.parent, ROOT / "docs" / "arguments.py") + navigation, encoding="utf-8")


def main() -> int:
    """Build the site in build/docs/site, or in `site` of the folder that is given; the exit status is mkdocs'."""
    gather()
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(OUT / "mkdocs.yml")], cwd=OUT, env=QUIET
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
