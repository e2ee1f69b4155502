"""Every question of speed, one after another, into one page.   python -m benchmarks.speed [--only NAME …]

Runs the benchmarks below, each in a process of its own as its command says, and shows their tables, which RESULTS.md here then has, too.
Peers are measured in the same runs. Exit status 1 if a benchmark failed, whose output is on the page all the same.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from fxquant.support.progress import progress

WRITTEN = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("torch", "onnxruntime", "onnx", "torchao", "transformers")


class Question(NamedTuple):
    """A question, and the benchmark's module with its arguments."""

    asked: str
    command: str


QUESTIONS: dict[str, Question] = {
    "integer": Question("How fast is the integer graph in PyTorch, beside float and torch.ao's?", "integer_speed"),
    "onnx-x86": Question("How fast are files for x86 in onnxruntime, beside float and its own quantized files?", "onnx_speed --target x86"),
    "onnx-nash-e": Question("And those for nash-e?", "onnx_speed --target nash-e/requantize"),
    "onnx-bayes-e": Question("And those for bayes-e, which requantizes by shifts?", "onnx_speed --target bayes-e"),
    "training": Question("What does a step of training or calibration cost, beside float's and torch.ao's?", "training_speed"),
    "export": Question("How long do export and verification take?", "export_speed"),
    "compile": Question("How long does compiling take, and how does it grow?", "compile_time"),
    "memory": Question("How much memory does calibration need?", "calibration_memory"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(QUESTIONS), default=list(QUESTIONS), metavar="NAME", help="of %(choices)s")
    options = parser.parse_args()
    sections, failed = [f"# Speed\n\n{_machine()}\n"], False
    for name in progress(options.only, len(options.only), "benchmarks"):
        asked, command = QUESTIONS[name]
        load = _load()
        result = subprocess.run(
            [sys.executable, "-m", *f"benchmarks.{command}".split()], capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"}
        )
        failed |= result.returncode != 0
        table = result.stdout if result.returncode == 0 else f"{result.stdout}\nexit status {result.returncode}\n{result.stderr[-2000:]}"
        print(table)
        sections.append(
            f"## {asked}\n\n`python -m benchmarks.{command}`; other work at the start: a load of {load}.\n\n```\n{table.strip()}\n```\n"
        )
        WRITTEN.write_text("\n".join(sections), encoding="utf-8")  # what was measured is kept if a later one is interrupted
    return int(failed)


def _machine() -> str:
    """The processor, its cores, the versions and the day."""
    lines = (
        f"{_processor()}, {os.cpu_count()} cores.",
        f"Python {platform.python_version()}, {', '.join(_versions())}; {datetime.now(timezone.utc):%Y-%m-%d}.",
    )
    return "\n".join(lines)


def _load() -> str:
    """How many processes want a processor, on average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line) if file.exists() else {}
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.processor() or platform.machine())} ({', '.join(flags) or 'no vector extension named'})"


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"no {package}"


if __name__ == "__main__":
    sys.exit(main())
