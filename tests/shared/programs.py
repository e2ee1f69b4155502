"""Programs that tests run in processes of their own, or write into files: the texts of tests/programs."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "programs"


def program(name: str) -> str:
    """The text of a program by its name."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
