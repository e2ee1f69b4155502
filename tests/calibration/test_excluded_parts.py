"""Calibration, with its choice of ranges, rounding and bias correction, does not change parts that `set_state` has excluded."""

import copy
import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from tests.shared.contract import same_state
from tests.shared.networks import copies

FOUR_BITS = fxq.QConfig(weight=fxq.WeightConfig("int4", per_channel=False))
GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [torch.rand(16, 3, 8, 8, generator=GENERATOR) for _ in range(4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.dw = nn.Sequential(OrderedDict(one=nn.Conv2d(8, 8, 3, padding=1), act=nn.ReLU(), two=nn.Conv2d(8, 8, 3), last=nn.ReLU()))
        with torch.no_grad():
            for layer in (self.stem, self.dw.one, self.dw.two):
                layer.weight.mul_(torch.exp2(torch.arange(8.0) % 7 - 3).reshape(-1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dw(F.relu(self.stem(x))))


@copies
def fresh() -> fx.GraphModule:
    torch.manual_seed(0)
    return fxq.prepare(Net().eval(), BATCHES[0], "nash-e", FOUR_BITS)


def calibrate(prepared: fx.GraphModule, batches: list[Tensor] = BATCHES, **options: Any) -> fx.GraphModule:
    return fxq.calibrate(prepared, batches, options=fxq.Options(**options), show_progress=False)


@functools.cache
def whole() -> fx.GraphModule:
    """Calibrated in all its parts; whoever changes it changes a copy."""
    return calibrate(fresh())


def part(prepared: fx.GraphModule, name: str = "dw") -> dict[str, QuantizedOperator]:
    operators = quantized_operators(prepared)
    return {node: each for node, each in operators.items() if each.path == name or each.path.startswith(name + ".") or node == name}


def numbers(prepared: fx.GraphModule, name: str = "dw", without: str = "") -> dict[str, Tensor]:
    """Return all numbers of a part's operators, without the observations of `without`."""
    by_name = {}
    for node, operator in part(prepared, name).items():
        kept = [(key, value) for key, value in operator.state_dict().items() if node != without or key[:10] != "quantizer."]
        by_name.update({f"{node}.{key}": value for key, value in kept})
    return by_name


METHODS: dict[str, Callable[[fx.GraphModule], Any]] = {
    "calibrate": calibrate,
    "all weights": lambda p: calibrate(p, round_weights=True, correct_bias=True),
    "twice": lambda p: calibrate(calibrate(p)),
    "equalize first": lambda p: calibrate(fxq.tuning.equalize(p, BATCHES, show_progress=False)),
    "round_weights": lambda p: fxq.tuning.round_weights(calibrate(p), BATCHES, show_progress=False),
    "correct_bias": lambda p: fxq.tuning.correct_bias(calibrate(p), BATCHES, show_progress=False),
    "adaround": lambda p: fxq.tuning.adaround(calibrate(p), BATCHES, steps=20, show_progress=False),
    "reconstruct": lambda p: fxq.tuning.reconstruct(calibrate(p), BATCHES, steps=20, show_progress=False),
    "distill": lambda p: fxq.tuning.distill(calibrate(p), BATCHES, steps=20, show_progress=False),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", METHODS)
def test_a_part_in_float_stays_as_it_is(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """An excluded part keeps all but the grid of its output, which is its reader's."""
    caplog.set_level(logging.INFO, "fxquant")
    prepared = fresh()
    fxq.set_state(prepared, "float", "dw")
    last = list(part(prepared))[-1]
    before = numbers(copy.deepcopy(prepared), without=last)
    METHODS[name](prepared)
    assert same_state(numbers(prepared, without=last), before)
    states = {node: each.state for node, each in quantized_operators(prepared).items()}
    assert {state for node, state in states.items() if node in part(prepared)} == {fxq.State.FLOAT}
    assert {state for node, state in states.items() if node not in part(prepared)} == {fxq.State.VALIDATE}
    scales = fxq.qparams(prepared)
    assert [math.isnan(scales[node]) for node in part(prepared)] == [True] * (len(part(prepared)) - 1) + [False]  # type: ignore[arg-type]
    assert any("left out of calibration" in record.getMessage() and "%dw_one" in record.getMessage() for record in caplog.records)
    assert not any(each.left_out for each in quantized_operators(prepared).values())


def test_the_model_runs_with_that_part_in_float() -> None:
    """An excluded part computes the float model's function, between integers."""
    prepared = fresh()
    fxq.set_state(prepared, "float", "dw")
    calibrate(prepared)
    seen: dict[str, Tensor] = {}
    operators = quantized_operators(prepared)
    first, *_, last = part(prepared).values()
    handles = [
        first.register_forward_pre_hook(lambda _, args: seen.update(read=args[0])),
        last.register_forward_hook(lambda *args: seen.update(given=args[-1])),
    ]
    with torch.no_grad():
        prepared(BATCHES[0])
        torch.manual_seed(0)
        assert torch.allclose(seen["given"], Net().dw(seen["read"]), atol=1e-5)
    for handle in handles:
        handle.remove()
    assert operators["head"].output.calibrated


@pytest.mark.sweep(2)
@pytest.mark.parametrize("state", ["validate", "train"])
@pytest.mark.parametrize("mode", [False, True])
def test_a_part_with_scales_computes_with_them(state: str, mode: bool) -> None:
    prepared = fresh()
    fxq.set_qparams(prepared, {"stem": 0.125, **dict.fromkeys(part(prepared), 0.25), "dw": 0.25})
    fxq.set_state(prepared, state, "dw")
    prepared.train(mode)
    before = numbers(copy.deepcopy(prepared))
    calibrate(prepared)
    assert same_state(numbers(prepared), before)
    assert {each.state for each in part(prepared).values()} == {fxq.State(state)}
    fxq.set_state(prepared, "validate")
    assert fxq.verify(prepared, fxq.convert(prepared), BATCHES[:1], show_progress=False)


def test_one_part_alone_is_calibrated_again() -> None:
    prepared = copy.deepcopy(whole())
    others = [name for name in quantized_operators(prepared) if name not in part(prepared)]
    before = {name: quantized_operators(copy.deepcopy(prepared))[name].state_dict() for name in others}
    seen = {name: each.output.observer.count.item() for name, each in part(prepared).items() if each.output.observer is not None}
    fxq.set_state(prepared, "calibrate", "dw")
    calibrate(prepared)
    assert all(same_state(quantized_operators(prepared)[name], before[name]) for name in others)
    for name, count in seen.items():
        observer = part(prepared)[name].output.observer
        assert observer is not None
        assert observer.count.item() == 2 * count


@pytest.mark.parametrize("where", [("float",), ("validate", "dw")], ids=["float as a whole", "a part without scales"])
def test_what_is_calibrated_all_the_same(where: tuple[str, ...]) -> None:
    """A model that is float as a whole, and a part without scales in any state but float."""
    prepared = fresh()
    fxq.set_state(prepared, *where)  # type: ignore[arg-type]
    assert same_state(calibrate(prepared), whole())


def test_what_is_left_out_is_left_out_where_calibration_fails() -> None:
    prepared = fresh()
    fxq.set_state(prepared, "float", "dw")
    with pytest.raises(fxq.FxQuantError):
        calibrate(prepared, [BATCHES[0], BATCHES[1] * math.nan])
    assert {each.state for each in part(prepared).values()} == {fxq.State.FLOAT}
    calibrate(prepared, BATCHES[1:])
    wanted = fresh()
    fxq.set_state(wanted, "float", "dw")
    calibrate(wanted)
    assert same_state(prepared, wanted)
