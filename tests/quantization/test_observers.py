"""Observers: ranges that cover their values, from batches that are not kept."""

import functools
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.numerics.grids import INT4, INT8, INT16, UINT8, IntType, grid_from_range, round_up_to_power_of_two, scale_from_range
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers import (
    ClipObserver,
    ClipStdObserver,
    HistogramObserver,
    KLObserver,
    LpObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
    ranges,
)
from fxquant.quantization.observers.ranges import CLASSES, SETTINGS
from fxquant.quantization.quantizer import Quantizer
from tests.shared.networks import to_train, written

HISTOGRAMS: list[Any] = [kind for kind in SETTINGS if issubclass(kind, HistogramObserver)]
EVERY = (MinMaxObserver, MovingAverageMinMaxObserver, *HISTOGRAMS, functools.partial(ClipObserver, -4.0, 4.0))


def observed(observer: Observer, *batches: torch.Tensor) -> Observer:
    for batch in batches:
        observer.observe(batch)
    return observer


def test_min_max_covers_everything_seen() -> None:
    observer = observed(MinMaxObserver(), torch.tensor([-3.0, 1.0]), torch.tensor([2.0]))
    assert observer.scale(INT8) == torch.tensor(3.0) / torch.tensor(127.5)


@pytest.mark.parametrize("dtype", [INT4, INT8, INT16, UINT8], ids=str)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (-0.3, 1.0), (-6.0, 0.0), (0.0, 6.0)])
def test_an_end_of_the_range_at_which_many_values_lie_is_on_a_step(low: float, high: float, dtype: IntType) -> None:
    values = torch.cat((low + (high - low) * torch.rand(4000), torch.full((500,), low), torch.full((500,), high)))
    of_extremes = MinMaxObserver, MovingAverageMinMaxObserver
    for kind in (*of_extremes, HistogramObserver, LpObserver, MSEObserver, PercentileObserver, ClipStdObserver):
        quantizer = Quantizer(dtype, kind())
        for batch in values[torch.randperm(5000)].split(1000):
            quantizer.observe(batch)
        quantizer.update_scale()
        grid, ends = quantizer.grid, torch.tensor([low, high])
        steps = torch.round(ends / grid.scale)
        assert torch.equal(grid.quantize(ends), steps)  # neither is clipped, so that training has its gradient
        if not dtype.affine:  # an affine grid is exact at the end that its zero point would have clipped
            assert torch.equal(grid.scale, ends.abs().max() / torch.tensor(float(dtype.high)))


def test_an_end_without_a_step_on_its_side_changes_no_scale() -> None:
    """Many values less than half a step below 0, as after a SiLU on an affine grid: the zero point is the lowest integer."""
    low, high = torch.tensor(-0.001), torch.tensor(6.0)
    scale, zero_point = grid_from_range(low, high, UINT8, (True, True))
    assert zero_point == UINT8.low
    assert torch.equal(scale, grid_from_range(low, high, UINT8)[0])


def test_an_end_with_few_values_keeps_the_whole_range() -> None:
    for kind in (MinMaxObserver, HistogramObserver, PercentileObserver):
        quantizer = Quantizer(INT8, kind())
        quantizer.observe(torch.rand(5000))
        quantizer.update_scale()
        assert torch.equal(quantizer.scale, quantizer.chooser(quantizer.observer).scale(INT8))  # type: ignore[arg-type]


def test_the_first_batches_count_equally_and_later_ones_by_the_constant() -> None:
    observer = observed(MovingAverageMinMaxObserver(averaging_constant=0.25), *(torch.tensor([0.0, v]) for v in (1.0, 3.0, 5.0, 7.0)))
    assert torch.equal(observer.high, torch.tensor(4.0))
    assert torch.equal(observed(observer, torch.tensor([0.0, 8.0])).high, torch.tensor(5.0))


def test_a_histogram_counts_the_same_whatever_the_order_its_reach_grew_in() -> None:
    values = torch.randn(4096)
    values[0] = 8.0
    at_once = observed(HistogramObserver(bins=256), values)
    in_steps = observed(HistogramObserver(bins=256), torch.full((1,), 2.0), values)
    # The reach starts at 2 and doubles to 8, where the other one starts: equal bins, and one value more.
    assert torch.equal(in_steps.reach, at_once.reach)
    assert in_steps.counts.sum() == at_once.counts.sum() + 1
    assert int(torch.ne(in_steps.counts, at_once.counts).sum()) <= 1


@pytest.mark.parametrize(("observer", "p"), [(MSEObserver(), 2.0), (LpObserver(p=3.0), 3.0), (LpObserver(p=1.5), 1.5)], ids=str)
@pytest.mark.parametrize("dtype", [INT4, INT8], ids=str)
def test_the_smallest_error_of_a_power_is_found(observer: HistogramObserver, p: float, dtype: IntType) -> None:
    values = torch.randn(20_000)
    values[0] = 40.0
    threshold = float(observed(observer, values).threshold(dtype))
    observer.reset()

    def error(limit: float) -> float:
        step = limit / dtype.divisor
        return float(((values / step).round().clamp(dtype.low, dtype.high) * step - values).abs().pow(p).mean())

    assert error(threshold) < error(40.0) or threshold == 40.0
    assert error(threshold) <= 1.05 * min(error(40.0 * i / 400) for i in range(10, 401))


def slope(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.leaky_relu(x, 0.1)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("read", [(slope,), (nn.functional.silu,), (slope, torch.tanh)], ids=["leaky_relu", "silu", "two"])
@pytest.mark.parametrize("dtype", [INT4, INT8, UINT8], ids=str)
def test_of_what_functions_read_the_range_has_the_smallest_error_after_them(read: tuple[Any, ...], dtype: IntType) -> None:
    """Against an exhaustive search of both ends, within the range of the values' own smallest error."""
    values = torch.cat((2 * torch.randn(3000) - 2, -8 * torch.rand(300)))
    observer = observed(MSEObserver(), values)
    assert isinstance(observer, MSEObserver)

    def ends(observer: HistogramObserver) -> tuple[torch.Tensor, torch.Tensor]:
        threshold = observer.scale(dtype) * dtype.divisor
        return observer.interval(dtype) if dtype.affine else (-threshold, threshold)

    def error(low: torch.Tensor, high: torch.Tensor) -> float:
        scale, zero = grid_from_range(low, high, dtype) if dtype.affine else (scale_from_range(low, high, dtype), torch.tensor(0))
        quantized = ((values / scale).round().clamp(dtype.low - zero, dtype.high - zero)) * scale
        return sum(float((f(quantized) - f(values)).square().mean()) for f in read)

    low, high = ends(observer)
    shares = torch.arange(1, 65) / 64
    tried = [(low * a, high * b) for a in shares for b in (shares if dtype.affine else [a])]
    least = min(error(*each) for each in tried)
    chosen = ends(observer.read_by(read))
    assert low <= chosen[0] <= chosen[1] <= high
    assert error(*chosen) <= 1.1 * least
    assert error(*chosen) < 0.9 * error(low, high)


@pytest.mark.parametrize("observer", [PercentileObserver, KLObserver, ClipStdObserver, MinMaxObserver], ids=lambda o: o.__name__)
def test_an_observer_that_weighs_no_errors_does_not_ask_what_reads_the_tensor(observer: type[Observer]) -> None:
    filled = observed(observer(), 2 * torch.randn(3000) - 2)
    assert torch.equal(filled.read_by((slope,)).scale(INT8), filled.scale(INT8))


@pytest.mark.parametrize("dtype", [INT8, UINT8], ids=str)
def test_the_noise_of_samples_is_weighed_after_the_functions_too(dtype: IntType) -> None:
    """Half of the samples are large below zero, where the function is nearly flat: the range is that of the other half."""
    quantizers = [Quantizer(dtype, HistogramObserver(), items=True) for _ in range(2)]
    values = torch.randn(8, 1000)
    values[:4] = -30 * values[:4].abs()
    for quantizer, read in zip(quantizers, ((), (nn.functional.elu,)), strict=True):
        quantizer.read, quantizer.balanced = read, True
        quantizer.observe(values)
        quantizer.update_scale()
    plain, weighed = (float(each.scale) for each in quantizers)
    assert weighed < 0.5 * plain


def reads_model(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A convolution whose result one function reads, or also others."""
    return written(lambda m, x: m.function(m.conv(x)).mean((2, 3)), conv=nn.Conv2d(4, 8, 3), function=function)


def sloped() -> nn.PReLU:
    built = nn.PReLU(8)
    built.weight.data.copy_(torch.linspace(-0.2, 0.2, 8))
    return built


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_the_operand_of_a_prelu_is_covered_for_what_is_left_of_it(target: str, tmp_path: Path) -> None:
    """For a leaky ReLU with the mean square of its slopes; files and pickles hold the function."""
    batches = [torch.randn(8, 4, 8, 8) for _ in range(2)]
    prepared = fxq.calibrate(fxq.prepare(reads_model(sloped()).eval(), batches[0], target), batches)
    x = torch.linspace(-3, 3, 7)
    wanted = nn.functional.leaky_relu(x, float(torch.linspace(-0.2, 0.2, 8).square().mean().sqrt()))
    loaded = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    for model in (prepared, loaded, pickle.loads(pickle.dumps(prepared))):
        (function,) = quantized_operators(model)["conv"].output.read
        assert torch.allclose(function(x), wanted)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (nn.functional.silu, True),
        (lambda x: nn.functional.silu(x) + torch.sigmoid(x), True),
        (lambda x: torch.where(x > 0, x * 2, x * 0.1), True),
        (lambda x: nn.functional.silu(x) * x.sum(1, keepdim=True), False),  # the sum reads the values themselves
        (lambda x: x.clamp(min=1e-3).log(), False),  # there is no finite slope at 0
    ],
    ids=["one", "two", "curve", "a sum", "a pole"],
)
def test_only_functions_of_one_element_weigh(function: Callable[[torch.Tensor], torch.Tensor], reads: bool) -> None:
    prepared = fxq.prepare(reads_model(function).eval(), torch.randn(2, 4, 8, 8), "x86")
    assert bool(quantized_operators(prepared)["conv"].output.read) is reads


def test_the_default_loses_less_on_what_comes_later_than_what_is_best_or_whole_on_the_sample() -> None:
    """Samples of 256, of a normal and of a long-tailed distribution: the error of each scale on many more values."""
    lost: dict[type[Observer], float] = {MinMaxObserver: 0.0, MSEObserver: 0.0, HistogramObserver: 0.0}
    for trial in range(20):
        shape = torch.distributions.Normal(0.0, 1.0) if trial % 2 else torch.distributions.StudentT(4.0)
        seen, later = shape.sample((256,)), shape.sample((20_000,))  # type: ignore[no-untyped-call]
        for kind in lost:
            scale = observed(kind(), seen).scale(INT8)
            error = ((later / scale).round().clamp(INT8.low, INT8.high) * scale - later).square().mean()
            lost[kind] += float(error / later.square().mean())
    assert lost[HistogramObserver] < lost[MinMaxObserver]
    assert lost[HistogramObserver] < lost[MSEObserver]


def test_a_histogram_goes_beyond_what_it_saw_unless_many_values_lie_at_the_end() -> None:
    values = torch.randn(50_000)

    def threshold(seen: torch.Tensor) -> float:
        return float(observed(HistogramObserver(), seen).threshold(INT8))

    assert threshold(values.clamp(-1, 1)) == 1.0
    assert threshold((3 * values).clamp(0, 6)) == 6.0
    assert 1.03 < threshold(2 * torch.rand(50_000)) / 2 <= 1.1
    assert threshold(torch.rand(50_000)) <= 1.0
    low, high = observed(HistogramObserver(), values.clamp(min=-1, max=20)).interval(UINT8)
    assert float(low) == pytest.approx(-1.0, abs=2e-3)
    assert 0.8 < float(high) / float(values.max()) <= 1.1


@pytest.mark.parametrize("observer", HISTOGRAMS)
def test_sixteen_bits_cover_everything(observer: type[HistogramObserver]) -> None:
    """Bins are wider than their steps, and nothing is gained by cutting off."""
    values = torch.randn(10_000)
    values[0] = 10.0
    covered = float(observed(observer(), values).scale(INT16)) * INT16.divisor
    if observer in (PercentileObserver, ClipStdObserver):  # which are about the values alone
        assert covered < 10.0
    else:
        assert covered == pytest.approx(11.0 if observer is HistogramObserver else 10.0)


def test_a_percentile_leaves_out_its_share() -> None:
    values = torch.arange(1, 10_001).float()
    threshold = float(observed(PercentileObserver(percentile=99.0), values).threshold(INT8))
    assert 9_890 <= threshold <= 9_910


@pytest.mark.parametrize("observer", EVERY)
def test_an_observer_holds_as_much_after_many_batches_as_after_one(observer: type[Observer]) -> None:
    def size(batches: int) -> int:
        filled = observed(observer(), *(torch.randn(64) * (i + 1) for i in range(batches)))
        return sum(tensor.numel() * tensor.element_size() for tensor in filled.state_dict().values())

    assert size(1) == size(64)


@pytest.mark.parametrize("observer", EVERY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_and_changes_nothing(observer: type[Observer], bad: float) -> None:
    filled = observed(observer(), torch.randn(16))
    before = {name: tensor.clone() for name, tensor in filled.state_dict().items()}
    with pytest.raises(ValueError, match="the tensor holds"):
        filled.observe(torch.tensor([1.0, bad]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in filled.state_dict().items())


@pytest.mark.parametrize("observer", EVERY)
def test_zeros_alone_give_the_smallest_scale(observer: type[Observer]) -> None:
    assert observed(observer(), torch.zeros(8)).scale(INT8) == 2.0**-23


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_an_outlier_that_calibration_cut_off_does_not_take_the_scale_with_it(target: str) -> None:
    """The range falls when the outlier does not come again; the threshold was about the other values, which are as large as before."""
    model, example = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.randn(2, 3, 8, 8)
    qconfig = fxq.QConfig(output=fxq.ActivationConfig(observer=PercentileObserver(97)))
    prepared = fxq.prepare(model, (example,), qconfig=qconfig, target=target)
    fxq.calibrate(prepared, [torch.cat((torch.randn(63, 3, 8, 8), 40 * torch.randn(1, 3, 8, 8)))])
    (name,) = (name for name in fxq.qparams(prepared) if "quantize" not in name)

    def scale() -> float:
        scales = fxq.qparams(prepared)[name]
        return float(scales[0] if isinstance(scales, tuple) else scales)

    before = scale()
    to_train(prepared)
    for _ in range(300):
        prepared(torch.randn(8, 3, 8, 8))
    assert scale() > 0.6 * before


# ---- what a histogram sees of a large tensor ------------------------------------------------------------------------------
SAMPLE = 2**10  # so small that every tensor here is sampled
SHAPES = ((2048, 3), (SAMPLE * 8, 1), (4, 64, 16, 16), (128, 64, 4), (1, 8192), (7, 11, 13, 17), (2, 3, 32, 33), (5, 4099))
ERRORS = 5  # standard deviations of a sample in which every element is as likely as any other


def histogram(values: torch.Tensor, sample: int) -> torch.Tensor:
    """The share of the values in each bin."""
    counts = observed(HistogramObserver(bins=64, sample=sample), values).counts
    return counts / counts.sum()


def assert_sampled_fairly(values: torch.Tensor) -> None:
    whole, seen = histogram(values, 2 * values.numel()), histogram(values, SAMPLE)
    deviation = (whole * (1 - whole) / SAMPLE).sqrt()
    assert bool(((seen - whole).abs() <= ERRORS * deviation + 1 / SAMPLE).all()), (seen - whole).abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sample_sees_every_index_of_every_dimension(shape: tuple[int, ...]) -> None:
    """Values that depend on the index along one dimension alone: one column, one channel or one row has its own magnitude."""
    for dim, size in enumerate(shape):
        along = torch.arange(size).reshape(-1, *[1] * (len(shape) - dim - 1))
        for special in {0, size // 2, size - 1}:
            assert_sampled_fairly(torch.where(along == special, 0.1, 10.0).expand(shape))
        assert_sampled_fairly((along % 7 + 1).float().expand(shape))


@pytest.mark.parametrize("size", [2 * SAMPLE, 2 * SAMPLE + 1, 8 * SAMPLE, 12 * SAMPLE, 16 * SAMPLE - 1, 10_007])
def test_a_sample_sees_every_element_of_a_period(size: int) -> None:
    """Where a fixed distance between samples divides the period, or is a multiple of it, one element of the period would be seen alone."""
    position = torch.arange(size)
    for period in (2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 64, 100, size // SAMPLE, size // SAMPLE + 1):
        for special in {0, 1, period - 1}:
            assert_sampled_fairly(torch.where(position % period == special, 8.0, 1.0))


@pytest.mark.parametrize("observer", [HistogramObserver, PercentileObserver])
def test_the_same_values_give_the_same_scale_in_every_layout(observer: type[HistogramObserver]) -> None:
    torch.manual_seed(1)
    image = torch.randn(8, 6, 24, 25)
    image[:, 2] *= 4
    wide = torch.randn(8, 6, 24, 50)
    wide[..., ::2] = image
    before = torch.get_rng_state()
    forms = (image, image.contiguous(memory_format=torch.channels_last), wide[..., ::2], image.transpose(1, 2).contiguous().transpose(1, 2))
    observers = [observed(observer(sample=SAMPLE), form) for form in forms]
    assert len({form.stride() for form in forms}) == len(forms)
    assert all(torch.equal(other.counts, observers[0].counts) and other.scale(INT8) == observers[0].scale(INT8) for other in observers)
    assert torch.equal(torch.get_rng_state(), before)  # the random numbers of the user's are left alone
    torch.manual_seed(2)
    assert torch.equal(observed(observer(sample=SAMPLE), image).counts, observers[0].counts)  # and take no part


# ---- the others -----------------------------------------------------------------------------------------------------------
def test_what_lies_beyond_the_bounds_counts_as_the_bound() -> None:
    observer = observed(ClipObserver(-1.0, 2.0), torch.tensor([-0.5, 1.0]), torch.tensor([9.0]))
    assert observer.scale(INT8) == torch.tensor(2.0) / torch.tensor(127.5)
    assert [float(end) for end in observer.interval(UINT8)] == [-0.5, 2.0]


def test_deviations_from_the_mean_bound_the_range() -> None:
    values = 2 + torch.randn(100_000)
    low, high = observed(ClipStdObserver(1.5), values).interval(UINT8)
    assert float(low) == 0.0  # 0 has an integer
    assert float(high) == pytest.approx(float(values.mean() + 1.5 * values.std(correction=0)), rel=2e-3)
    wide = observed(ClipStdObserver(50.0), values)
    assert float(wide.scale(INT8)) * INT8.divisor == pytest.approx(float(values.max()), rel=1e-3)


@pytest.mark.parametrize(("dtype", "bins"), [(INT4, 256), (INT8, 256), (UINT8, 512)], ids=str)
def test_the_divergence_is_that_of_the_formula(dtype: IntType, bins: int) -> None:
    """The smallest of all ends that the formula, written out slowly, gives."""
    observer = observed(KLObserver(bins=bins), torch.distributions.Laplace(0.0, 1.0).sample((20_000,)))  # type: ignore[no-untyped-call]
    counts = observer.counts.tolist()
    counts[0] = counts[1]
    levels = dtype.high + 1 if dtype.low < 0 else (dtype.high + 1) // 2  # of magnitudes: half of the integers are for negative values

    def divergence(end: int) -> float:
        seen, inside = counts[:end], counts[:end]
        seen[-1] += sum(counts[end:])
        shown = [0.0] * end
        for level in range(levels):
            these = [i for i in range(end) if i * levels // end == level]
            there = [i for i in these if inside[i] > 0]
            for i in there:
                shown[i] = sum(inside[j] for j in these) / len(there)
        total, whole = sum(seen), sum(shown)
        terms = [(p / total, q / whole) for p, q in zip(seen, shown, strict=True) if p > 0]
        return math.inf if any(q == 0 for _, q in terms) else sum(p * math.log(p / q) for p, q in terms)

    result = round(float(observer.threshold(dtype)) / float(observer.reach) * bins)
    ends = range(levels, bins + 1, max(1, (bins - levels) // 64))
    assert divergence(result) == pytest.approx(min(divergence(end) for end in ends))


@pytest.mark.parametrize("observer", [HistogramObserver, MSEObserver, LpObserver])
def test_of_powers_of_two_the_one_is_chosen_that_loses_least(observer: type[HistogramObserver]) -> None:
    """The best threshold, just above a power of two, would be rounded up to twice that."""
    values = torch.randn(50_000)
    largest = float(values.abs().max())
    for factor in (1.05, 1.4, 1.9):
        scaled = values / largest * 127.5 * factor  # in steps of 1, the largest just beyond the range
        filled = observed(observer(), scaled)
        chosen = round_up_to_power_of_two(filled.scale_before_rounding(INT8))

        def lost(scale: torch.Tensor, seen: torch.Tensor = scaled, filled: HistogramObserver = filled) -> float:
            both = torch.cat((seen, seen * filled.ahead))
            return float(filled.loss(((both / scale).round().clamp(-128, 127) * scale - both).abs()).mean())

        assert lost(chosen) <= 1.01 * min(lost(torch.tensor(2.0**k)) for k in (-2, -1, 0, 1))


def test_a_fixed_scale_is_the_scale_of_the_config() -> None:
    scale, threshold = fxq.observers.FixedScaleObserver(scale=0.5), fxq.observers.FixedScaleObserver(threshold=4.0)
    assert fxq.ActivationConfig(observer=scale) == fxq.ActivationConfig(scale=0.5)
    assert fxq.ActivationConfig("int16", observer=threshold) == fxq.ActivationConfig("int16", threshold=4.0)
    with pytest.raises(fxq.errors.ConfigurationError, match="are both given"):
        fxq.ActivationConfig(scale=1.0, observer=scale)


def test_observers_with_settings_go_through_a_file(tmp_path: Path) -> None:
    observers = [LpObserver(2.5), ClipObserver(-1.5, 2.0), ClipStdObserver(2.5), KLObserver()]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in observers))
    mapping = fxq.QConfigMapping()
    for index, observer in enumerate(observers):
        mapping = mapping.set_module_name(str(index), fxq.QConfig(fxq.ActivationConfig(observer=observer), fxq.WeightConfig("int4", p=2.5)))
    example = torch.randn(64, 4)
    prepared = fxq.calibrate(fxq.prepare(model, example, "nash-e", mapping), [example])
    loaded = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    for one in (prepared, loaded):
        fxq.calibrate(one, [2 * example], options=fxq.Options(round_weights=False, correct_bias=False))  # no file holds samples
    assert fxq.qparams(loaded) == fxq.qparams(prepared)
    assert torch.equal(loaded(example), prepared(example))


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "x86"])
def test_probabilities_stay_probabilities(target: str) -> None:
    x = torch.linspace(-4, 3.5, 400).reshape(50, 8)
    result = fxq.quantize(nn.Sigmoid(), [x], target)
    with torch.no_grad():
        assert float(result.integer(4 * x).max()) <= 1
        nn.functional.binary_cross_entropy(result.integer(4 * x), torch.ones(50, 8))


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_numbers_have_the_bits_of_scalar_tensors(observer: type[MinMaxObserver], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.randn(64) * torch.randn(()).exp() + torch.randn(()) for _ in range(200)]

    def seen() -> dict[str, torch.Tensor]:
        used = observer()
        for batch in batches:
            used.observe(batch)
        return used.state_dict()

    numbers = seen()
    monkeypatch.setattr(ranges, "in_numbers", lambda *_: False)
    scalars = seen()
    assert float(numbers["low"]) < 0 < float(numbers["high"])
    assert all(torch.equal(numbers[name], scalars[name]) for name in scalars)


@pytest.fixture
def _own_observers() -> Iterator[None]:
    """Observers that a test declares are gone after it."""
    tables: list[dict[Any, Any]] = [ranges.NAMED, CLASSES, SETTINGS]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("_own_observers")
def test_an_observer_of_the_users_with_a_name_is_given_by_it_and_is_in_files(tmp_path: Path) -> None:
    class PartObserver(MinMaxObserver, names="part"):
        def __init__(self, part: float = 0.5) -> None:
            super().__init__()
            self.part = part

        def scale(self, dtype: IntType) -> torch.Tensor:
            return super().scale(dtype) * self.part

    batches = [torch.tensor([[1.0, -2.0, 4.0]])]
    for observer, part in (("part", 0.5), (PartObserver(0.25), 0.25)):
        qconfig = fxq.QConfig(fxq.ActivationConfig("int8", observer=observer))
        prepared = fxq.quantize(nn.Linear(3, 2), batches, "bayes-e", qconfig).prepared
        assert torch.equal(next(iter(quantized_operators(prepared).values())).output.scale, torch.tensor(4.0) / torch.tensor(127.5) * part)
        loaded = fxq.load(fxq.save(prepared, tmp_path / "own.fxq"))
        assert {module.part for module in loaded.modules() if isinstance(module, PartObserver)} == {part}


@pytest.mark.usefixtures("_own_observers")
def test_an_observer_takes_no_name_of_another_one_and_may_be_declared_again() -> None:
    for kind, names in (("Own", "mse"), ("MSEObserver", "own")):
        with pytest.raises(fxq.errors.ConfigurationError, match=r"histogram\.MSEObserver has that name"):
            type(kind, (MinMaxObserver,), {}, names=names)
    assert ranges.NAMED["mse"] is MSEObserver
    again = [type("Own", (MinMaxObserver,), {}, names="own") for _ in range(2)]
    assert ranges.NAMED["own"] is again[1]
