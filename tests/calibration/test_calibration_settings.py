"""Calibration and the methods of tuning have the same bits under any autocast, default dtype, default device and number of threads."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from tests.shared.contract import same_state

FOUR_BITS = fxq.QConfig(weight=fxq.WeightConfig("int4", per_channel=False))


def network() -> nn.Module:
    """Channels of different ranges, and a kernel of one pixel, whose sums PyTorch orders by the number of threads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 2, 1))
    with torch.no_grad():
        model[0].weight.mul_(torch.exp2(torch.arange(32.0) % 7 - 3).reshape(-1, 1, 1, 1))  # type: ignore[operator,union-attr]
    return model.eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 16, 16, generator=generator) for _ in range(8)]


MODEL, BATCHES = network(), batches()  # made before a setting could reach them
EXAMPLE = BATCHES[0][:1]


def state(prepared: fx.GraphModule) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in prepared.state_dict().items()}


def prepared() -> fx.GraphModule:
    return fxq.prepare(MODEL, EXAMPLE, "nash-e", FOUR_BITS)


def calibrated(**options: Any) -> fx.GraphModule:
    return fxq.calibrate(prepared(), BATCHES, options=fxq.Options(**options), show_progress=False)


PLAIN = calibrated(round_weights=False, correct_bias=False)


def after(method: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        tuned = copy.deepcopy(PLAIN)
        result = method(tuned, BATCHES, show_progress=False, **options)
        rows = [(row.before, row.after) for row in result] if isinstance(result, Iterable) else result.before
        return rows, state(tuned)

    return call


def searched(method: Callable[..., Any], **options: Any) -> Callable[[], str]:
    few = [batch[:2, :, :7, :7].clone() for batch in BATCHES[:4]]
    return lambda: str(method(MODEL, few, "nash-e", show_progress=False, **options))


ALIKE_IN_THREADS: dict[str, Callable[[], Any]] = {
    "calibrate": lambda: state(calibrated()),
    "equalize": lambda: state(fxq.tuning.equalize(prepared(), BATCHES[:2], show_progress=False)),
    "round_weights": after(fxq.tuning.round_weights),
    "correct_bias": after(fxq.tuning.correct_bias),
}
LEARNED = {name: after(getattr(fxq.tuning, name), steps=3) for name in ("adaround", "reconstruct", "distill")}
SEARCHED = {
    "sensitivity": searched(fxq.search.sensitivity),
    "mixed_precision": searched(fxq.search.mixed_precision, budget=fxq.search.Budget(weight_bytes=700)),
    "tune": searched(fxq.tune, steps=2),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


@contextmanager
def everything() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), default_dtype(torch.float64), torch.device("meta"):
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "all at once": everything,
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return same_state(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", [*ALIKE_IN_THREADS, *LEARNED])
def test_settings_of_the_process_change_nothing(name: str) -> None:
    compute = (ALIKE_IN_THREADS | LEARNED)[name]
    wanted = compute()
    for setting, entered in SETTINGS.items():
        with entered():
            result = compute()
        assert equal(result, wanted), setting


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_finds_the_same_under_autocast(name: str) -> None:
    wanted = SEARCHED[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert SEARCHED[name]() == wanted


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ALIKE_IN_THREADS)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(ALIKE_IN_THREADS[name]())
    assert equal(*results)


@pytest.mark.nightly
def test_autocast_reaches_the_users_batches_alone() -> None:
    """The user's iterator of batches runs under the user's autocast, and calibration does not."""
    seen = []

    def stream() -> Iterator[Tensor]:
        for batch in BATCHES:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_num_threads()))
            yield batch

    model = prepared()
    with threads(2), torch.autocast("cpu", dtype=torch.bfloat16):
        fxq.calibrate(model, stream(), show_progress=False)
    assert seen == [(True, 2)] * len(BATCHES)
    assert same_state(model, calibrated())
