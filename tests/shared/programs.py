"""Programs that tests run in processes of their own, or write into files: the texts of tests/programs."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "programs"


def program(name: str) -> str:
    """The text of a program by its name."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def run_python(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, in a folder, for at most ten minutes; `environment` has further variables."""
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
