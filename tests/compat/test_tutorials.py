"""Whole programs for torch.ao and PT2E, and the lines of the guide: each runs, or is refused by a remedy that works."""

import ast
import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.shared.programs import program, run_python

pytestmark = pytest.mark.nightly

WITHOUT = "" if importlib.util.find_spec("torchao") else "pip install torchao"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "from-torch-ao.md"
START = program("tutorials_start")

# By name: the program, the words of its refusal (empty: it runs), and the edit that its remedy asks for.
PROGRAMS: dict[str, tuple[str, str, tuple[str, str]]] = {}
for text in program("tutorials").split("==== ")[1:]:
    head, _, code = text.partition("\n")
    name, words, edit = ast.literal_eval(head)
    PROGRAMS[name] = code, WITHOUT if words == "WITHOUT" else words, edit


def lines() -> list[tuple[str, str]]:
    """Return the rows of the guide's table: a line of code, and what happens."""
    table = PAGE.read_text(encoding="utf-8").split("## Line by line\n")[1].split("\n## ")[0]
    return [(code.replace("\\|", "|"), told) for code, told in re.findall(r"^\| `(.+?)` \| (.+?) \|$", table, re.MULTILINE)]


def _run(code: str, namespace: dict[str, Any]) -> str:
    """Run code; return "" if it ran, the error of fxquant, or what was raised instead."""
    from fxquant.errors import FxQuantError

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "program", "exec"), namespace)
    except FxQuantError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"raw {type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Run all programs, and then the lines of the table, in this installed process; print what each did, as JSON."""
    said: dict[str, Any] = {}
    for name, (code, _, (before, after)) in PROGRAMS.items():
        said[name] = [_run(START + each, {"__name__": name}) for each in (code, code.replace(before, after) if before else "")]
    namespace: dict[str, Any] = {"__name__": "lines"}
    exec(START, namespace)
    namespace.update(x=namespace["images"][0], model=namespace["Classifier"]().eval(), eager=namespace["Stubbed"]().eval())
    said["lines"] = [_run(code, namespace) for code, _ in lines()]
    print(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    arguments, folder = ("-W", "ignore", "-m", "fxquant.compat.torch_ao", __file__), tmp_path_factory.mktemp("tutorials")
    done = run_python(*arguments, folder=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_or_says_what_to_write(name: str, said: Any) -> None:
    _, words, _ = PROGRAMS[name]
    first, followed = said[name]
    assert followed == ""
    if words:
        assert first.startswith("refused: ")
        assert words in first.split("remedy")[1]
    else:
        assert first == ""


def test_every_line_of_the_guide_does_what_it_says(said: Any) -> None:
    rows = lines()
    assert len(rows) >= 40
    for (code, told), result in zip(rows, said["lines"], strict=True):
        refused = told.startswith("refused") and (bool(WITHOUT) or not told.startswith("refused without torchao"))
        assert result.startswith("refused: ") if refused else result == "", (code, result)


if __name__ == "__main__":
    main()
