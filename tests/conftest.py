"""Settings of every test: fixed seeds, few threads, a clean environment, and golden files."""

import difflib
import gc
import logging
import os
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fxquant import support
from fxquant.backends.onnx import runtime
from fxquant.kernels import runner
from fxquant.quantization.spec import ActivationConfig

pytest.register_assert_rewrite("tests.shared.contract")

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden with what the tests see")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # the networks are small, and threads that wait for each other cost more than they bring


# Two processes share the files, and the last one to begin decides how long they wait for each other: those of long tests begin first.
LONG = ("test_operators", "test_random_graphs", "test_kernels", "test_readme", "test_distributed", "test_counts", "test_contract")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep") is not None:
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        for item in further_cases(cases):
            item.add_marker(pytest.mark.nightly)
    rank = {name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


def further_cases(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases of a sweep beyond a choice, at most the mark's number, in which each value of each parameter occurs."""
    (number,) = cases[0].get_closest_marker("sweep").args or (len(cases),)
    further = sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))  # a new case leaves the order of the others as it is
    values = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in further}
    for _ in range(number):
        chosen = max(further, key=lambda item: (item.get_closest_marker("quick") is not None, len(values[item])), default=None)
        if chosen is None or not values[chosen]:
            break
        further.remove(chosen)
        for item in further:
            values[item] -= values[chosen]
    return further


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # PyTorch's and the tests' own objects live to the end: looking at them again and again costs a tenth of the suite's time
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def _reproducible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts from the same seeds and the same log level, without the debug dial of the shell, and does not wait for the disk."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    monkeypatch.setattr(runner, "PROOFS", [])  # a test that plants a fault in a kernel has to see its proof fail
    for name in ("FXQUANT_DEBUG", "FXQUANT_DUMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    logger = logging.getLogger("fxquant")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _every_implementation_agrees(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where an implementation computed other bits than its reference, the library goes on without it; a test without a mark fails."""
    before = len(support.RECORDED)
    yield
    result = [each for _, each in support.RECORDED[before:]]
    del support.RECORDED[before:]
    planted = request.node.get_closest_marker("disagrees") is not None
    if not planted and not torch.cpu._is_vnni_supported():  # there onnxruntime adds pairs of products in 16 bits
        result = [each for each in result if not each.implementation.startswith("onnxruntime")]
    if bool(result) != planted:
        told = "; ".join(f"{each.implementation} at {each.place}: {each.because}" for each in result)
        pytest.fail(told or "no implementation disagreed, though the test is marked `disagrees`", pytrace=False)


@pytest.fixture
def default_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Last layers have the target's default dtype, as if every rule gave it: for tests that read scales, and are not about outputs."""
    monkeypatch.setattr(ActivationConfig, "is_open", False)


Golden = Callable[[str, str], None]


@pytest.fixture
def with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights have the scales of a processor whose kernels add no products two by two."""
    monkeypatch.setattr(runtime, "adds_pairs", lambda: False)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(text, "name.txt")`: the text is that of tests/golden/<test file>/name.txt; --update-golden rewrites the file."""
    path: Path = request.path
    command = f"pytest {path.relative_to(request.config.rootpath)} --update-golden"

    def check(text: str, name: str) -> None:
        file = GOLDEN / path.stem / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        if not file.is_file():
            pytest.fail(f"there is no golden file {file.name}; look at the text and keep it with:  {command}\n\n{text}", pytrace=False)
        expected = file.read_text(encoding="utf-8")
        if text != expected:
            difference = "".join(difflib.unified_diff(expected.splitlines(True), text.splitlines(True), "golden", "now"))
            pytest.fail(f"{file.name} has changed; if that is right, keep it with:  {command}\n\n{difference}", pytrace=False)

    return check
