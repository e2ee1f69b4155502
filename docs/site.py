"""Gather the pages of the documentation and build a site of them: `make docs`.

The site has the folders of the repository: README.md is its front page, docs/guide/README.md says the order of the guide, and notebooks
become pages. The reference is made from docstrings, by mkdocstrings. mkdocs runs strictly: a link that leads nowhere is an error.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(sys.argv[1]).resolve() if __name__ == "__main__" and len(sys.argv) > 1 else ROOT / "build" / "docs"
FOLDERS = (".", "docs", "docs/guide", "docs/notebooks", "backends/bpu")  # of pages and pictures
CHAPTERS = (  # of the navigation: a title, and pages in their order; a page with a title of its own names it
    ("Measurements", ("docs/measurements.md",)),
    ("Operators", ("docs/OPERATORS.md", "docs/COVERAGE.md", "docs/horizon-names.md")),
    ("Inside", ("ARCHITECTURE.md", "backends/bpu/ARITHMETIC.md", "backends/bpu/CHIP.md", "CONTRIBUTING.md", "CHANGELOG.md")),
)  # fmt: skip
FIRST = (
    "quantize",
    "prepare",
    "calibrate",
    "convert",
    "export_onnx",
    "verify",
    "compare",
    "check",
    "explain",
    "report",
    "estimate",
    "tune",
)
MODULES = ("board", "errors", "export", "extend", "inspect", "nn", "observers", "primitives", "results", "search", "tuning")
sys.path.insert(0, str(ROOT))  # the names of this checkout
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
  - offline
  - mkdocstrings:
      handlers:
        python:
          paths: [%s]
          options:
            {show_source: false, show_root_heading: true, heading_level: 3, docstring_style: null, separate_signature: true,
             show_signature_annotations: true, merge_init_into_class: true, members_order: source, extensions: [%s]}
nav:
"""

WIDE = """.md-grid { max-width: 88rem; }  /* lines of code have up to 140 columns */
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.4em 0.6em; }
.md-typeset table:not([class]) th { white-space: nowrap; }
.md-typeset table:not([class]) td code { word-break: normal; overflow-wrap: break-word; }
"""


def pages() -> list[str]:
    """Return all pages, as paths in the repository."""
    return [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]


def title(page: str) -> str:
    """Return the first heading of a page."""
    return re.findall(r"^# (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)[0]


def guide() -> list[str]:
    """Return the pages of the guide in the order in which its first page lists them. Raises SystemExit if it leaves one out."""
    listed = re.findall(r"\]\(([\w-]+\.md)\) \|$", (ROOT / "docs/guide/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = {path.name for path in (ROOT / "docs" / "guide").glob("*.md")} - {"README.md"}
    if names ^ set(listed):
        raise SystemExit(f"docs/guide/README.md does not list these pages, or lists missing ones: {', '.join(sorted(names ^ set(listed)))}")
    return [f"docs/guide/{name}" for name in listed]


def notebooks() -> list[str]:
    """Return the notebooks, as the pages that they become."""
    return [path.relative_to(ROOT).with_suffix(".md").as_posix() for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))]


def navigation() -> str:
    """Return the navigation of the site, in mkdocs' form."""
    chapters = (("Guide", ["docs/guide/README.md", *guide()]), ("Notebooks", notebooks()), *CHAPTERS)
    lines = ["  - Quick start: README.md", "  - Terms: docs/terms.md"]
    for name, entries in chapters:
        lines += [f"  - {name}:"] if entries else []
        lines += [f"    - {page}" if page in notebooks() else f'    - "{title(page)}": {page}' for page in entries]
        if name == "Notebooks":
            lines += ["  - Reference:", "    - fxquant: api/fxquant.md", *(f"    - fxquant.{name}: api/{name}.md" for name in MODULES)]
    return "\n".join(lines) + "\n"


def linked(text: str, source: str) -> str:
    """Return the text of a page without links to files of the repository that are not pages; their words are kept."""

    def text_of(match: re.Match[str]) -> str:
        words, link = match[1], match[2]
        if link is None or re.match(r"https?:|mailto:|#|data:", link):  # a block of code, or a link that holds everywhere
            return match[0]
        target = (ROOT / source).parent.joinpath(link.partition("#")[0]).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else link
        if target.suffix == ".ipynb":
            return f"[{words}]({link.replace('.ipynb', '.md')})"
        return match[0] if name in pages() or target.suffix == ".png" or not target.exists() else words

    code = r"^```.*?^```"
    return re.sub(rf"(?ms:{code})|!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", text_of, text)


def notebook(path: Path, folder: Path) -> str:
    """Return a notebook as a page; its pictures become files in the folder."""
    parts = []
    for index, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = folder / f"{path.stem}-{index}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![The picture that the code above draws]({picture.name})")
            elif "text" in output or "text/plain" in data:
                parts.append(f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def public() -> dict[str, list[str]]:
    """Return the public functions and classes of each page of the reference: of the package, and of each public module."""
    package = importlib.import_module("fxquant")
    homes = {"fxquant": package, **{name: getattr(package, name) for name in MODULES}}
    names = {name: [each for each in module.__all__ if not each.startswith("__") and each not in MODULES] for name, module in homes.items()}
    for name, module in homes.items():  # what is called before what is returned
        classes = {each: inspect.isclass(getattr(module, each)) for each in names[name]}
        names[name].sort(key=lambda each: (classes[each], FIRST.index(each) if each in FIRST else len(FIRST)))
    primitives = package.primitives.PRIMITIVES  # the functions, by their modules
    return {**names, "primitives": sorted(f"{each.__module__.rpartition('.')[2]}.{each.__name__}" for each in primitives)}


def reference(name: str, names: list[str]) -> str:
    """Return the reference page of a module: its docstring, and a directive for each public name."""
    module = "fxquant" if name == "fxquant" else f"fxquant.{name}"
    head = f"# {module}\n\n{inspect.getdoc(importlib.import_module(module)) or ''}\n\n" if name != "fxquant" else "# fxquant\n\n"
    return head + "\n".join(f"::: {module}.{each}\n" for each in names)


def gather() -> None:
    """Write the pages and the settings of the site."""
    shutil.rmtree(OUT, ignore_errors=True)
    package = OUT / "source" / "fxquant"  # as in a wheel, where passes and backends are inside
    package.mkdir(parents=True)
    for part in (*(ROOT / "fxquant").iterdir(), ROOT / "passes", ROOT / "backends"):
        (package / part.name).symlink_to(part)
    for folder in FOLDERS:
        (OUT / "pages" / folder).mkdir(parents=True, exist_ok=True)
        for picture in (ROOT / folder).glob("*.png"):
            shutil.copy(picture, OUT / "pages" / folder / picture.name)
    for page in pages():
        (OUT / "pages" / page).write_text(linked((ROOT / page).read_text(encoding="utf-8"), page), encoding="utf-8")
    for page in notebooks():
        text = notebook((ROOT / page).with_suffix(".ipynb"), (OUT / "pages" / page).parent)
        (OUT / "pages" / page).write_text(linked(text, page), encoding="utf-8")
    (OUT / "pages" / "api").mkdir()
    for name, names in public().items():
        (OUT / "pages" / "api" / f"{name}.md").write_text(reference(name, names), encoding="utf-8")
    (OUT / "pages" / "wide.css").write_text(WIDE, encoding="utf-8")
    (OUT / "mkdocs.yml").write_text(HEADER % (package.parent, ROOT / "docs" / "arguments.py") + navigation(), encoding="utf-8")


def main() -> int:
    """Build the site in build/docs/site, or in `site` of the folder that is given; the exit status is mkdocs'."""
    gather()
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(OUT / "mkdocs.yml")], cwd=OUT, env=QUIET
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
