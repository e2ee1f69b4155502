"""The mirrored modules: every name of the tables is served or refused, every import line of public documents is, and the page is theirs."""

import ast
import importlib
import importlib.machinery
import os
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fxquant as fxq
from benchmarks.horizon_programs.__main__ import PROGRAMS, import_lines, judge, try_import
from benchmarks.horizon_programs.expected import EXPECTED
from fxquant.compat import common, horizon, torch_ao
from fxquant.compat.common import Refusal
from fxquant.compat.horizon import TABLES
from fxquant.compat.mirror import Row, Tables
from fxquant.compat.torch_ao import TABLES as TORCH_AO
from tests.shared.programs import program, run_python

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.startswith(tuple(TABLES.aliases))}
    horizon.install(replace=True)
    yield
    for name in [name for name in sys.modules if name.startswith(tuple(TABLES.aliases))]:
        del sys.modules[name]
    sys.modules.update(before)


def test_every_name_of_the_tables_is_served_or_refused_with_a_remedy() -> None:
    refused = 0
    for path, rows in TABLES.modules.items():
        module = importlib.import_module(".".join(filter(None, ("fxquant.compat.horizon", path))))
        for row in rows.values():
            if not isinstance(row.served, Refusal):
                assert getattr(module, row.name) is not None, (path, row.name)
                continue
            refused += 1
            assert not hasattr(module, row.name), (path, row.name)
            with pytest.raises(ImportError, match=row.name) as caught:
                exec(f"from {module.__name__} import {row.name}", {})
            assert isinstance(caught.value, fxq.errors.ConfigurationError)
            assert caught.value.remedy == row.served.remedy
            assert row.served.because
    assert refused > 40


def test_every_import_line_of_public_documents_is_served_or_refused(installed: None) -> None:
    lines = import_lines()
    result = [try_import(line) for line in lines]
    assert len(lines) == len(set(lines)) > 140
    assert result.count("served") > 0.55 * len(lines)


def test_one_module_has_all_its_names(installed: None) -> None:
    plugin = importlib.import_module("horizon_plugin_pytorch")
    assert plugin is horizon
    setters = importlib.import_module("horizon_plugin_pytorch.quantization.qconfig_setter")
    assert setters is importlib.import_module("fxquant.compat.horizon.quantization.qconfig_setter") is plugin.quantization.qconfig_setter
    assert isinstance(setters, ModuleType)
    assert "ConvDtypeTemplate" in dir(setters)
    with pytest.raises(ImportError, match="no nowhere"):
        importlib.import_module("horizon_plugin_pytorch.nowhere")
    assert not hasattr(plugin, "nonsense")


def test_an_installed_package_is_not_hidden_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horizon_plugin_pytorch", ModuleType("horizon_plugin_pytorch"))
    with pytest.raises(fxq.errors.ConfigurationError, match="is there already"):
        horizon.install()


def page(tables: Tables) -> str:
    """Return the tables as a page: a row for each name, with the module it is imported from."""
    homes: dict[str, list[str]] = {}
    rows: dict[str, Row] = {}
    for path, listed in tables.modules.items():
        for name, row in listed.items():
            rows.setdefault(name, row)
            homes.setdefault(name, []).append(path)
    served = [name for name, row in rows.items() if not isinstance(row.served, Refusal)]
    lines = ["| name | since | meaning | in fxquant |", "|---|---|---|---|"]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(served, key=str.lower):
        row = rows[name]
        groups.setdefault((row.since, row.note or "kept", row.native), []).append(name)
    for (since, note, native), names in groups.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {since} | {note} | {native} |")
    lines += ["", "| refused | because | instead |", "|---|---|---|"]
    refused: dict[Refusal, list[str]] = {}
    for name in sorted(rows, key=str.lower):
        result = rows[name].served
        if isinstance(result, Refusal):
            refused.setdefault(result, []).append(name)
    for refusal, names in refused.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {refusal.because} | {refusal.remedy} |".replace("||", "&#124;&#124;"))
    return "\n".join(lines) + "\n"


def test_the_page_has_the_tables() -> None:
    assert page(TABLES) in (ROOT / "docs" / "horizon-names.md").read_text(encoding="utf-8")


def test_every_program_has_what_it_asks_for(installed: None) -> None:
    names = sorted(importlib.import_module("benchmarks.horizon_programs.programs").PROGRAMS)
    assert names == sorted(EXPECTED)
    assert len(names) >= 40


@pytest.mark.parametrize("name", ["v1_quick_start", "v1_hybrid", "v3_s100", "v3_order", "eager_stub_qconfig", "v1_old_calibration"])
def test_a_program_runs_as_it_is(name: str, tmp_path: Path, installed: None) -> None:
    assert judge(name, tmp_path) == ""


@pytest.mark.parametrize(("name", "code", "words"), [("v3_all_int8", 0, ""), ("v2_auto_calibrate", 1, "fxq.tune")])
def test_the_runner_runs_a_file(name: str, code: int, words: str, tmp_path: Path) -> None:
    done = run_python("-m", "fxquant.compat.horizon", str(PROGRAMS), name, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


PROGRAM = program("mirror_program")

# The rest of PyTorch in an installed process.
OWN_PROGRAM = program("mirror_own_program")
# A package of the name of torchao, with a part that is mirrored and a part that is not.
TORCHAO = {
    "__init__.py": "__version__ = '9'",
    "other.py": "from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e",
    "quantization/__init__.py": "from torchao.quantization.pt2e import quantize_pt2e; own = quantize_pt2e",
    "quantization/pt2e/__init__.py": "from .quantize_pt2e import prepare_pt2e",
    "quantization/pt2e/observer.py": "from . import prepare_pt2e",
    "quantization/pt2e/quantize_pt2e.py": "def prepare_pt2e(): pass\ndef extra(): pass",
}
TORCHAO_PROGRAM = program("mirror_torchao_program")


@pytest.mark.parametrize("program", [PROGRAM, OWN_PROGRAM, TORCHAO_PROGRAM], ids=["mirrored", "PyTorch's own", "an installed torchao"])
def test_a_program_of_torch_ao_runs_as_it_is(program: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    for name, text in TORCHAO.items() if program is TORCHAO_PROGRAM else ():
        path = tmp_path / "torchao" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python("-W", "ignore", "-m", "fxquant.compat.torch_ao", str(file), PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr


def test_the_rows_of_torch_ao_are_served() -> None:
    for path in TORCH_AO.modules:
        module = importlib.import_module(".".join(filter(None, ("fxquant.compat.torch_ao", path))))
        for name in TORCH_AO.names(path):
            assert callable(getattr(module, name)), (path, name)
    assert not hasattr(torch_ao, "convert_to_reference_fx")
    with pytest.raises(fxq.errors.ConfigurationError, match="export_onnx"):
        torch_ao.convert_to_reference_fx  # noqa: B018


def test_every_refusal_has_a_row_with_its_values_and_every_row_a_place() -> None:
    calls: dict[str, set[str]] = {}
    groups: set[str] = set()
    for file in Path(common.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and isinstance(next(iter(call.args), None), ast.Constant):
                key = str(call.args[0].value)  # type: ignore[attr-defined]
                if call.func.id == "refused":
                    calls[key] = {str(keyword.arg) for keyword in call.keywords}
                elif call.func.id == "refusals":
                    groups.add(key)
    rows = {key: texts for key, texts in common.TEXTS.items() if ": " not in key}
    assert {key.partition(": ")[0] for key in common.TEXTS if ": " in key} == groups
    assert {key: {name for text in texts for _, name, *_ in string.Formatter().parse(text) if name} for key, texts in rows.items()} == calls


def test_a_package_of_the_vendor_s_that_is_not_installed_is_refused(installed: None) -> None:
    if importlib.machinery.PathFinder.find_spec("horizon_tc_ui") is None:
        with pytest.raises(ImportError, match=r"fxq\.verify"):
            importlib.import_module("horizon_tc_ui")
