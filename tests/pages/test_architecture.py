"""ARCHITECTURE.md: its dumps, its pass names, its packages and its paths agree with the code."""

import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.passes import PIPELINE
from fxquant.prepared.stage import Stage
from tests.pages.test_layers import PACKAGES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
SKIPPED = "…"  # lines of a dump that the page leaves out


@functools.cache
def page() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


@functools.cache
def prose() -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```", "", page())


def section(title: str) -> str:
    """Return the text of a section of the page."""
    return page().split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def shortened(text: str) -> list[str]:
    """Return the lines of a graph's text, with two spaces between columns."""
    return [re.sub(r"(?<=\S) {2,}", "  ", line.rstrip()) for line in text.strip().splitlines()]


def shown() -> dict[str, list[str]]:
    """Return the lines of each dump on the page, by the step that the dump follows."""
    dumps: dict[str, list[str]] = {}
    for block in re.findall(r"^```text\n(.*?)^```", section("One convolution, in nine files"), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            begins = re.fullmatch(r"(\S.*), after (\S+)", line)
            if begins:
                lines = dumps[begins[2]] = [begins[1]]
            else:
                lines.append(line)
    return dumps


def equals(written: list[str], lines: list[str]) -> bool:
    """Return whether lines of the page equal a dump's lines, apart from the lines that the page leaves out."""
    pattern = "".join(r"(?:.*\n)+" if line.strip() == SKIPPED else re.escape(line) + r"\n" for line in written)
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, list[str]]:
    """Compile the walk's model as the page says; return the lines of each dump by the step that it follows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXQUANT_DUMP", str(tmp_path / "dump"))
    names: dict[str, Any] = {"torch": torch, "nn": nn, "fxq": fxq}
    blocks = re.findall(r"^```python\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
    exec(compile("".join(blocks), "ARCHITECTURE.md", "exec"), names)
    dumps = {file.stem.split("-", 1)[1]: shortened(file.read_text(encoding="utf-8")) for file in (tmp_path / "dump").glob("*.txt")}
    dumps["calibrate"] = shortened(fxq.text(names["prepared"]))
    nodes = onnx.load(names["path"]).graph.node
    lines = [f"  {', '.join(node.output)} = {node.op_type}({', '.join(node.input)})" for node in nodes]
    dumps["export_onnx"] = ["nodes of the file", *lines]
    return dumps


def test_the_dumps_are_what_the_compiler_writes(compiled: Mapping[str, list[str]]) -> None:
    dumps = shown()
    assert [*dumps] == ["trace", "batchnorm.fold", "activation.fuse", "specs.annotate", "calibrate", "integer.lower", "export_onnx"]
    for name, written in dumps.items():
        assert equals(written, compiled[name]), f"after {name} the compiler writes\n" + "\n".join(compiled[name])


def test_the_diagram_has_the_passes_and_stages_in_their_order() -> None:
    diagram = section("The pipeline")
    assert re.findall(r"^  │  (\w+\.\w+)", diagram, re.MULTILINE) == [step.name for step in PIPELINE]
    stages = [stage.name for stage in Stage]
    assert re.findall(r"^([A-Z]+) ─", diagram, re.MULTILINE) == stages
    assert re.findall(r"^\| `([A-Z]+)`", section("Stages"), re.MULTILINE) == stages
    below, reached = {}, "TRACED"
    for name, stage in re.findall(r"^  │  (\w+\.\w+)|^([A-Z]+) ─", diagram, re.MULTILINE):
        reached = stage or reached
        if name:
            below[name] = reached
    first = {step.name for i, step in enumerate(PIPELINE) if i and step.reaches != PIPELINE[i - 1].reaches}
    assert below == {step.name: Stage(step.reaches - (step.name in first)).name for step in PIPELINE}


def test_the_packages_are_those_of_the_layer_test_and_each_table_has_their_order() -> None:
    tables = [re.findall(r"^\| `(\w+)`", part, re.MULTILINE) for part in section("The packages").split("Around them:")]
    places = [[PACKAGES.index(package.replace("fxquant", "")) for package in table] for table in tables]
    assert [sorted(table) for table in places] == places
    assert sorted(place for table in places for place in table) == list(range(len(PACKAGES)))


def test_the_paths_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose())
    paths = {*links, *re.findall(r"\b(?:[\w-]+/)+[\w-]+\.(?:py|md|c|txt)\b", page())}
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


MOST_FILES = 99  # of the library, which a reader may have to open to follow one convolution


def test_one_convolution_enters_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run of the page's program is counted: the first one imports modules and fills caches."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
    program = compile("".join(blocks), "ARCHITECTURE.md", "exec")
    entered: set[str] = set()
    for hook in (None, lambda frame, event, _: entered.add(frame.f_code.co_filename)):
        sys.setprofile(hook)
        try:
            exec(program, {"torch": torch, "nn": nn, "fxq": fxq})
        finally:
            sys.setprofile(None)
    files = {Path(name).resolve() for name in entered if not name.startswith("<")}
    library = [file for file in files if any(file.is_relative_to(ROOT / part) for part in ("fxquant", "passes", "backends"))]
    assert 50 < len(library) <= MOST_FILES, sorted(map(str, library))
