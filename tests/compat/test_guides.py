"""The pages for users of other tools: both columns of their programs run, and the names of their tables exist."""

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fxquant as fxq
from fxquant.compat import horizon, torch_ao
from fxquant.compat.horizon import served as march

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
PROGRAM = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[dict[str, str]]:
    """The old and the new program of every block that shows both."""
    blocks = []
    for block in PROGRAM.findall((GUIDE / page).read_text(encoding="utf-8")):
        columns = {}
        for column, mark in (("old", "-"), ("new", "+")):
            columns[column] = "".join(line[1:] + "\n" for line in block.splitlines() if not line or line[0] in (" ", mark))
        blocks.append(columns)
    return blocks


def run(program: str, name: str, folder: Path) -> dict[str, Any]:
    file = folder / f"{name}.py"
    file.write_text(program, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(program, str(file), "exec"), namespace)
    return namespace


def signal(namespace: dict[str, Any]) -> float:
    """Return the SQNR in dB of the outputs of the program's quantized model."""
    exact, outputs = namespace["model"].eval()(namespace["batches"][0]), namespace["outputs"]
    return float(10 * torch.log10(exact.var() / (outputs - exact).square().mean()))


def imported(program: str) -> set[str]:
    """The names that a program imports from a package that is to be replaced."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("horizon_plugin_pytorch", "torch.ao", "torch.quantization")
        ):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore")  # PyTorch's, of its own function
@pytest.mark.parametrize("index", range(3))
def test_a_program_of_torch_ao_and_the_new_one(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("this PyTorch has no quantized kernels for x86")
    monkeypatch.setattr(torch.backends.quantized, "engine", "x86")
    program = programs("from-torch-ao.md")[index]
    old, new = (run(program[column], f"{column}_{index}", tmp_path) for column in ("old", "new"))
    assert "stage" not in old["quantized"].__dict__.get("meta", {})
    assert new["quantized"].meta["stage"] == "FUSED"
    assert [tuple(result["outputs"].shape) for result in (old, new)] == [tuple(new["outputs"].shape)] * 2
    if "optimizer" not in new:  # trained models are apart; calibrated ones are the float model's neighbours
        assert signal(new) > signal(old) - 1
        assert signal(new) > 20
    assert all(hasattr(torch_ao, name) for name in imported(program["old"]))


def test_the_program_of_horizon_runs_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(march, "_march", [])
    (program,) = programs("from-horizon.md")
    output = run(program["new"], "new", tmp_path)
    assert fxq.inspect.layers(output["quantized"])
    names = imported(program["old"])
    assert len(names) >= 11
    for name in names:
        assert hasattr(horizon, name), name
    shared = [line for line in program["old"].splitlines() if line.strip()]
    assert len(set(shared) & set(program["new"].splitlines())) > 0.8 * len(set(shared))  # the program is the same but for what is marked


@pytest.mark.parametrize(
    ("pages", "module"), [(["guide/from-torch-ao.md"], torch_ao), (["guide/from-horizon.md", "horizon-names.md"], horizon)]
)
def test_every_name_is_on_its_page(pages: list[str], module: Any) -> None:
    text = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    assert len(names) >= 15
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
