"""Observations: gathered in one calibration, they give the scales that another one would have found."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.numerics.rounding import AdaptiveRounding
from fxquant.prepared.operators import quantized_operators
from fxquant.serialization import pack, unpack
from tests.shared.contract import assert_train_is_validate, assert_validate_is_integer, calibrated, same_state
from tests.shared.networks import Network, members, to_train, written

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs

ACT, Mapping = fxq.ActivationConfig, fxq.QConfigMapping
BATCHES = [x * factor for factor, x in enumerate(torch.randn(3, 4, 2, 8, 8, generator=torch.Generator().manual_seed(1)), 1)]


def block() -> Any:
    return written(lambda m, x: m.relu(m.bn(m.conv(x)) + x), conv=nn.Conv2d(4, 4, 3, padding=1), bn=nn.BatchNorm2d(4), relu=nn.ReLU())


@members(lambda: dict(stem=nn.Conv2d(2, 4, 1), block=block(), head=nn.Conv2d(12, 2, 1), limit=nn.Hardtanh(-0.5, 0.5)))
def Fused(self, x: Tensor) -> Tensor:
    """A fused residual, a function, a clamp, a concatenation, and a pooling on its operand's scale."""
    x = self.stem(x)
    y = self.block(x)
    z = F.silu(y)
    return self.head(F.max_pool2d(torch.cat([y, z, self.limit(x)], 1), 2))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Fused().eval()


def fresh(qconfig: Any = None, target: str = "nash-e", **options: Any) -> fx.GraphModule:
    """Prepared and calibrated."""
    return calibrated(network(), BATCHES, target, qconfig, **options)


def restored(seen: fxq.observers.Observations, qconfig: Any = None, target: str = "nash-e", **options: Any) -> fx.GraphModule:
    """Prepared, with scales from what was observed."""
    return fxq.prepare(network(), BATCHES[0], target, qconfig, observations=seen, **options)


@functools.cache
def gathered() -> fxq.observers.Observations:
    return fxq.observers.observations(fresh())


@pytest.fixture
def seen(default_outputs: None) -> fxq.observers.Observations:
    """Return the default configuration's observations, that of the output too."""
    return gathered()


def assert_same_state(one: fx.GraphModule, other: fx.GraphModule) -> None:
    """Assert equal scales, observations and parameters, to the bit, in one state."""
    assert same_state(one, other)
    states = ({name: operator.state for name, operator in quantized_operators(model).items()} for model in (one, other))
    assert next(states) == next(states)


class Halved(fxq.observers.MinMaxObserver):
    """Another choice of a scale, from what fxquant's observer gathers."""

    def scale(self, dtype: Any) -> Tensor:
        return super().scale(dtype) / 2


# ---- one calibration serves others -------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Any, str]] = {
    "int16": (fxq.QConfig(ACT("int16"), fxq.WeightConfig("int16")), "nash-e"),
    "int4": (fxq.QConfig(ACT("int4")), "nash-e"),
    "a percentile": (fxq.QConfig(ACT(observer=fxq.observers.PercentileObserver(99.0))), "nash-e"),
    "the least divergence, by name": (fxq.QConfig(ACT("int4", observer="kl")), "nash-e"),
    "a power of the error": (fxq.QConfig(ACT(observer=fxq.observers.LpObserver(2.4), power_of_two=True), fxq.WeightConfig(p=3)), "nash-e"),
    "smallest and largest": (fxq.QConfig(ACT(observer=fxq.observers.MinMaxObserver)), "nash-e"),
    "the average range": (fxq.QConfig(ACT("int16", observer=fxq.observers.MovingAverageMinMaxObserver)), "nash-e"),
    "a scale of a user's choice": (fxq.QConfig(ACT(observer=Halved)), "nash-e"),
    "learned": (fxq.QConfig(ACT(training="learned"), fxq.WeightConfig(training="learned")), "nash-e"),
    "powers of two": (fxq.QConfig(ACT(power_of_two=True)), "nash-e"),
    "another arithmetic": (None, "nash-e/requantize"),
    "with a zero point": (fxq.QConfig(ACT("uint8")), "x86"),
    "with a zero point that covers everything": (fxq.QConfig(ACT("uint8", observer=fxq.observers.MinMaxObserver)), "x86"),
    "layers of different dtypes": (Mapping(fxq.QConfig(ACT("int16"))).set_module_name("block", fxq.QConfig(ACT("int4"))), "nash-e"),
    "layers in float": (Mapping().set_module_name("block", None).set_module_name("head", None), "nash-e"),
    "a function in float": (Mapping().set_object_type(F.silu, None), "nash-e"),
    "some scales given": (Mapping().set_module_name("stem", fxq.QConfig(ACT(scale=0.5))), "nash-e"),
    "a sum as output": (Mapping().set_module_name("head", fxq.QConfig(ACT("int32"))), "nash-e"),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize(("qconfig", "target"), OTHERS.values(), ids=OTHERS)
def test_what_one_calibration_has_seen_gives_what_another_would(qconfig: Any, target: str, seen: fxq.observers.Observations) -> None:
    assert_same_state(restored(seen, qconfig, target), fresh(qconfig, target))


SATURATING = {
    "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "gelu": F.gelu, "elu of a pool": lambda x: F.elu(F.max_pool2d(x, 2)),
}  # fmt: skip


def before_a_function(function: Any, size: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = Network(lambda s, x: s.last(function(s.first(x))), first=nn.Conv2d(2, 4, 3), last=nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        model.first.weight *= size
    return model


@pytest.mark.sweep(5)
@pytest.mark.parametrize("function", SATURATING)
@pytest.mark.parametrize(
    ("target", "before", "after"),
    [("nash-e", "int8", "int16"), ("nash-e", "int16", "int8"), ("bayes-e", "int8", "int4"), ("x86", "uint8", "int8")],
)
def test_a_tensor_before_a_function_that_saturates_has_a_scale_in_another_dtype(
    function: str, target: str, before: str, after: str
) -> None:
    model, samples = before_a_function(SATURATING[function]), [x / 4 for x in BATCHES]
    observed = fxq.observers.observations(calibrated(model, samples, target, fxq.QConfig(ACT(before))))
    qconfig = fxq.QConfig(ACT(after))
    prepared = fxq.prepare(model, samples[0], target, qconfig, observations=observed)
    assert_same_state(prepared, calibrated(model, samples, target, qconfig, choose_ranges=False))  # samples would narrow an input
    fxq.convert(prepared)


def test_a_tensor_whose_values_reached_where_a_function_saturates_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, qconfig = before_a_function(F.silu, 40.0), fxq.QConfig(ACT("int16"))
    observed = fxq.observers.observations(calibrated(model, BATCHES, "nash-e"))
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = fxq.prepare(model, BATCHES[0], "nash-e", qconfig, observations=observed)
    assert "%first: it was observed from -9.5 to inf, and counts from -15.5 to inf now, and values reached an end" in caplog.text
    assert "fxq.calibrate(prepared, batches, only_missing=True) finds them" in caplog.text
    fxq.calibrate(prepared, BATCHES, only_missing=True, show_progress=False)
    fxq.convert(prepared)


def test_weights_of_few_bits_that_no_samples_round_are_told_of(seen: fxq.observers.Observations, caplog: pytest.LogCaptureFixture) -> None:
    qconfig = fxq.QConfig(weight=fxq.WeightConfig("int4"))
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = restored(seen, qconfig)
    assert "fxq.tuning.round_weights(prepared, batches) rounds them" in caplog.text
    fxq.tuning.round_weights(prepared, BATCHES, show_progress=False)
    assert any(isinstance(operator.weight_quantizer.rounding, AdaptiveRounding) for operator in quantized_operators(prepared).values())
    caplog.clear()
    restored(seen, fxq.QConfig())
    assert not caplog.text


OBSERVERS: dict[str, Any] = {
    "smallest and largest": fxq.observers.MinMaxObserver,
    "the average range": fxq.observers.MovingAverageMinMaxObserver(0.5),
    "a percentile of few bins": fxq.observers.PercentileObserver(90.0, bins=16),
    "a user's choice": Halved,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_whichever_observer_was_asked_for_the_others_are_served(observer: Any) -> None:
    before = fresh(fxq.QConfig(ACT(observer=observer)))
    assert_same_state(restored(fxq.observers.observations(before)), fresh())
    assert_same_state(restored(fxq.observers.observations(before), fxq.QConfig(ACT(observer=observer))), before)


def test_a_restored_model_holds_the_contract_and_goes_on(seen: fxq.observers.Observations) -> None:
    models = restored(seen, OTHERS["layers of different dtypes"][0]), fresh(OTHERS["layers of different dtypes"][0])
    assert_validate_is_integer(models[0], fxq.convert(models[0]), BATCHES[1])
    for model in models:
        to_train(model)(BATCHES[2] * 3)
    assert_same_state(*models)
    for model in models:
        fxq.calibrate(model, [BATCHES[0] * 7], show_progress=False)
    assert_same_state(*models)
    assert_train_is_validate(models[0], BATCHES[0])


def test_what_was_seen_is_what_the_float_model_computes(seen: fxq.observers.Observations) -> None:
    with torch.no_grad():
        values = [network().stem(x) for x in BATCHES]
    stem = seen["stem"]
    assert (stem.low, stem.high, stem.count) == (min(map(float, map(torch.min, values))), max(map(float, map(torch.max, values))), 3)
    assert list(seen) == ["x", "stem", "block_conv", "block_conv.intermediate", "silu", "cat", "head"]


def test_observations_do_not_change() -> None:
    prepared = fresh()
    seen, again = fxq.observers.observations(prepared), fxq.observers.observations(prepared)
    assert seen == again
    to_train(prepared)(BATCHES[0] * 9)
    assert fxq.observers.observations(prepared) == seen  # they hold nothing that training moves
    fxq.calibrate(prepared, [BATCHES[0] * 9], show_progress=False)
    assert seen == again
    assert fxq.observers.observations(prepared) != seen
    assert_same_state(restored(seen), fresh())


# ---- what cannot be given ------------------------------------------------------------------------------------------------------
def test_only_what_is_missing_is_observed(seen: fxq.observers.Observations, caplog: pytest.LogCaptureFixture) -> None:
    qconfig = Mapping().set_module_name("block.relu", None)
    with caplog.at_level(logging.WARNING, "fxquant"):
        prepared = restored(seen, qconfig)
    assert caplog.records[-1].getMessage().splitlines() == [
        "scales that the observations cannot give: 3; fxq.calibrate(prepared, batches, only_missing=True) finds them",
        "  %block_conv: it was observed with block_bn, add, block_relu fused into it, and has block_bn, add now",
        "  %block_conv.intermediate: it was observed with block_bn, add, block_relu fused into it, and has block_bn, add now",
        "  %block_relu: it was not observed",
    ]
    with pytest.raises(fxq.errors.NotCalibrated, match="block_conv"):
        fxq.convert(prepared)
    fxq.calibrate(prepared, BATCHES, only_missing=True, show_progress=False)
    assert_same_state(prepared, fresh(qconfig))


def test_where_nothing_is_missing_no_batch_is_taken(seen: fxq.observers.Observations) -> None:
    def no_more() -> Iterator[Tensor]:
        yield BATCHES[0]
        pytest.fail("a second batch was taken")

    result = fxq.quantize(network(), no_more(), "nash-e", OTHERS["int16"][0], observations=seen, show_progress=False)
    assert_same_state(result.prepared, fresh(*OTHERS["int16"]))
    fxq.calibrate(result.prepared, no_more(), only_missing=True)


def test_values_that_another_reader_tells_apart_are_not_known(seen: fxq.observers.Observations, caplog: pytest.LogCaptureFixture) -> None:
    """In float the clamp shows everything it reads; as an integer operator it lets nothing beyond its limits be seen."""
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(2, 4, 1), "head": nn.Conv2d(4, 2, 1), "limit": nn.Hardtanh(-0.25, 0.5)}
    model, default = Network(lambda s, x: s.head(s.limit(F.max_pool2d(s.conv(x), 2))), **layers), fxq.QConfig()
    before = fxq.calibrate(fxq.prepare(model, BATCHES[0], qconfig=default), BATCHES, show_progress=False)
    qconfig = Mapping().set_module_name("limit", None)
    prepared = fxq.prepare(model, BATCHES[0], qconfig=qconfig, observations=fxq.observers.observations(before))
    assert "%conv: it was observed from -0.25 to 0.5, and counts everywhere now" in caplog.text
    fxq.calibrate(prepared, BATCHES, only_missing=True, show_progress=False)
    expected = fxq.calibrate(fxq.prepare(model, BATCHES[0], qconfig=qconfig), BATCHES, show_progress=False)
    assert_same_state(prepared, expected)
    assert fxq.qparams(prepared)["conv"] > fxq.qparams(before)["conv"]


def test_tensors_that_come_to_share_a_scale_are_observed_anew(seen: fxq.observers.Observations, caplog: pytest.LogCaptureFixture) -> None:
    """On bernoulli a concatenation and its operands have one scale."""
    prepared = restored(seen, target="bernoulli")
    assert "%stem, block_conv, silu, cat: it shares its scale with other tensors" in caplog.text
    fxq.calibrate(prepared, BATCHES, only_missing=True, show_progress=False)
    assert_same_state(prepared, fresh(target="bernoulli"))
    together = fxq.observers.observations(prepared)
    extremes = OTHERS["smallest and largest"][0]
    assert_same_state(restored(together, extremes, "bernoulli"), fresh(extremes, "bernoulli"))


class Own(fxq.observers.Observer):
    """An observer that gathers what fxquant's do not."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def observe(self, value: Tensor) -> None:
        self.total += value.abs().mean()
        self.count += 1

    def scale(self, dtype: Any) -> Tensor:
        return 4 * self.total / self.count / dtype.divisor


def test_an_observer_that_gathers_by_itself_serves_others_and_is_not_served(
    seen: fxq.observers.Observations, caplog: pytest.LogCaptureFixture
) -> None:
    own = fxq.QConfig(ACT(observer=Own))
    before = fresh(own)
    assert_same_state(restored(fxq.observers.observations(before)), fresh())
    prepared = restored(seen, own)
    assert "%stem: its observer Own collects statistics that no other observer collects" in caplog.text
    fxq.calibrate(prepared, BATCHES, only_missing=True, show_progress=False)
    assert_same_state(prepared, before)


def test_settings_that_nothing_was_gathered_with_and_sizes_that_differ_are_told(
    seen: fxq.observers.Observations, caplog: pytest.LogCaptureFixture
) -> None:
    restored(seen, fxq.QConfig(ACT(observer=fxq.observers.HistogramObserver(bins=64, sample=512))))
    told = "%stem: what HistogramObserver(bins=64, sample=512) collects was not collected, since no observer had these settings"
    assert told in caplog.text
    with pytest.raises(fxq.errors.ConfigurationError, match=r"f32.B,2,8,8., and is f32.B,2,16,16. now"):
        fxq.prepare(network(), torch.randn(4, 2, 16, 16), "nash-e", observations=seen)


def test_of_a_value_that_is_quantized_twice_both_are_known() -> None:
    fork = Network(lambda s, x: (s.left(x), s.right(x)), left=nn.Conv2d(2, 2, 1), right=nn.Conv2d(2, 2, 1))
    model, wide = fork, Mapping().set_module_name("left", fxq.QConfig(input=ACT("int16")))
    one, two = (calibrated(model, BATCHES, "nash-e", qconfig) for qconfig in (None, wide))
    assert len(fxq.qparams(two)) == len(fxq.qparams(one)) + 1
    assert fxq.observers.observations(one) == fxq.observers.observations(two)
    assert_same_state(fxq.prepare(model, BATCHES[0], "nash-e", wide, observations=fxq.observers.observations(one)), two)


# ---- files -----------------------------------------------------------------------------------------------------------------------
def test_observations_are_kept_in_a_file(seen: fxq.observers.Observations, tmp_path: Path) -> None:
    path = fxq.save(seen, tmp_path / "seen.fxq")
    loaded = fxq.load(path)
    assert loaded == seen
    assert fxq.save(loaded, tmp_path / "again.fxq").read_bytes() == path.read_bytes()
    assert_same_state(restored(loaded), fresh())


DAMAGE: dict[str, tuple[Any, ...]] = {  # where in the document, and what stands there then
    "version": ("version", 2),
    "no places": ("observed", 0, "places", []),
    "a class other than an observer": ("observed", 0, "gathered", 0, 0, "Conv2d"),
    "another observer": ("observed", 0, "gathered", 1, 0, "HistogramObserver"),
    "one that gathers as another does": ("observed", 0, "gathered", 0, 0, "PercentileObserver"),
    "more bins than there are": ("observed", 0, "gathered", 0, 1, {"bins": 4096, "sample": 2**18}),
    "bins without end": ("observed", 0, "gathered", 0, 1, {"bins": 2**60, "sample": 2**18}),
    "limits the wrong way round": ("observed", 0, "places", 0, 3, {"tuple": [1.0, 0.0]}),
    "a name that is a number": ("observed", 0, "places", 0, 0, 5),
    "an entry less": ("observed", []),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused(change: tuple[Any, ...], seen: fxq.observers.Observations, tmp_path: Path) -> None:
    path = fxq.save(seen, tmp_path / "seen.fxq")
    document, tensors = unpack(path.read_bytes())
    *way, last, value = change
    place: Any = document
    for key in way:
        place = place[key]
    assert place[last] != value
    place[last] = value
    path.write_bytes(pack(document, tensors))
    with pytest.raises(fxq.errors.ExportError, match="can be loaded"):
        fxq.load(path)
