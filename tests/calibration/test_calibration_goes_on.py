"""A calibration that goes on in another call ends with the bits that one call with all batches has, or names the steps it left out."""

import copy
import functools
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.accuracy import weights
from fxquant.prepared.operators import quantized_operators
from tests.shared.contract import same_state
from tests.shared.networks import copies

pytestmark = pytest.mark.nightly

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [torch.rand(10, 3, 8, 8, generator=GENERATOR) for _ in range(10)]  # of which the first seven are kept as samples


@copies
def fresh(bits: str) -> fx.GraphModule:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    return fxq.prepare(nn.Sequential(*layers).eval(), BATCHES[0], "bayes-e", fxq.QConfig(weight=fxq.WeightConfig(bits)))


@functools.cache
def begun(bits: str, count: int) -> fx.GraphModule:
    """Calibrated with the first batches; whoever goes on does with a copy."""
    return calibrate(fresh(bits), BATCHES[:count])


def calibrate(prepared: fx.GraphModule, batches: list[Tensor], only_missing: bool = False, **options: bool) -> fx.GraphModule:
    return fxq.calibrate(prepared, batches, only_missing=only_missing, options=fxq.Options(**options), show_progress=False)


def done(prepared: fx.GraphModule) -> str:
    return " ".join(operator.weight_quantizer.description for operator in quantized_operators(prepared).values())


class Ways:
    """Ways to calibrate with all batches."""

    def interrupted(prepared: fx.GraphModule) -> None:
        def stream() -> Iterator[Tensor]:
            yield from BATCHES[:6]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate(prepared, stream())  # type: ignore[arg-type]
        calibrate(prepared, BATCHES[6:])

    def refused(prepared: fx.GraphModule) -> None:
        with pytest.raises(fxq.FxQuantError):
            calibrate(prepared, [*BATCHES[:6], BATCHES[6] * float("nan")])
        calibrate(prepared, BATCHES[6:])

    def in_two(prepared: fx.GraphModule) -> None:
        calibrate(prepared, BATCHES[:5])
        calibrate(prepared, BATCHES[5:])

    def in_three(prepared: fx.GraphModule) -> None:
        for first, last in ((0, 7), (7, 8), (8, 10)):
            calibrate(prepared, BATCHES[first:last])

    def in_an_older_copy(prepared: fx.GraphModule) -> None:
        """Which goes on elsewhere first, and here afterwards."""
        calibrate(prepared, BATCHES[:7])
        calibrate(copy.deepcopy(prepared), BATCHES[:3])
        calibrate(prepared, BATCHES[7:])

    def with_the_first_left_alone(prepared: fx.GraphModule) -> None:
        calibrate(prepared, BATCHES[:3], round_weights=False)
        calibrate(prepared, BATCHES[3:])


WAYS = {name: way for name, way in vars(Ways).items() if not name.startswith("__")}


@pytest.fixture(scope="module", params=["int8", "int4"])
def whole(request: pytest.FixtureRequest) -> tuple[str, fx.GraphModule]:
    result = begun(request.param, 10)
    assert ("bias corrected" in done(result), "rounded" in done(result)) == (True, request.param == "int4")
    return request.param, result


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_as_one_call_does(way: str, whole: tuple[str, fx.GraphModule], caplog: pytest.LogCaptureFixture) -> None:
    bits, wanted = whole
    prepared = fresh(bits)
    WAYS[way](prepared)
    assert same_state(prepared, wanted)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.startswith("calibration was stopped after 6 batches") for text in warnings] == [True] * (way in ("interrupted", "refused"))


def test_a_copy_goes_on_as_its_original_does(whole: tuple[str, fx.GraphModule]) -> None:
    bits, wanted = whole
    half = copy.deepcopy(begun(bits, 5))
    assert same_state(calibrate(copy.deepcopy(half), BATCHES[5:]), wanted)
    assert same_state(calibrate(half, BATCHES[5:]), wanted)


def test_stopped_while_weights_are_rounded_it_has_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    prepared = copy.deepcopy(begun("int4", 7))
    before = done(prepared)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_level", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrate(prepared, BATCHES[7:9])
    assert done(prepared) == before
    assert same_state(calibrate(prepared, BATCHES[9:]), begun("int4", 10))


def test_what_was_tuned_meanwhile_stays() -> None:
    """A method of tuning gives a layer a rounding that is not calibration's."""
    prepared = copy.deepcopy(begun("int4", 7))
    weights = [operator.weight_quantizer for operator in quantized_operators(prepared).values()]
    rounded = [weight for weight in weights if isinstance(weight.rounding, fxq.tuning.AdaptiveRounding)]
    assert len(rounded) > 1
    rounded[0].rounding = tuned = copy.deepcopy(rounded[0].rounding)
    calibrations = rounded[1].rounding
    calibrate(prepared, BATCHES[7:])
    assert rounded[0].rounding is tuned
    assert rounded[1].rounding is not calibrations


def test_a_call_that_has_nothing_to_observe_changes_nothing(whole: tuple[str, fx.GraphModule]) -> None:
    _, wanted = whole
    assert same_state(calibrate(copy.deepcopy(wanted), BATCHES[:3], only_missing=True), wanted)


@pytest.mark.parametrize("way", ["saved", "pickled", "by hand"])
def test_where_samples_are_not_there_any_more_it_says_so(way: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Samples are the user's data, and in no file."""
    if way == "by hand":
        prepared = fresh("int8")
        for batch in BATCHES[:5]:
            prepared(batch)
    else:
        prepared = copy.deepcopy(begun("int8", 5))
        alone = len(pickle.dumps(fresh("int8")))
        assert len(pickle.dumps(prepared)) < alone + BATCHES[0].nbytes
        prepared = fxq.load(fxq.save(prepared, tmp_path / "half.fxq")) if way == "saved" else pickle.loads(pickle.dumps(prepared))
    caplog.clear()
    calibrate(prepared, BATCHES[5:])
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "samples are not there any more" in said
