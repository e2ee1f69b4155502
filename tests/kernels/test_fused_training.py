"""Fused training gives what the primitives give, one by one: bits forward, gradients backward; and it keeps fewer bits."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.accuracy.walk import real_result
from fxquant.backends.cpu import native
from fxquant.backends.cpu.training import SMALLEST, NativePasses
from fxquant.numerics.grids import INT8, Grid
from fxquant.numerics.rounding import straight_through
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives.accumulate import linear
from fxquant.primitives.product import matrix_product
from fxquant.quantization.observers import HistogramObserver, MinMaxObserver, ranges
from fxquant.quantization.observers.histogram import observe_together
from fxquant.training import fused_elementwise, fused_layers
from fxquant.training.fused_layers import Accumulator, Gradients, Passes, Rounded, form_of
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import copies, members, to_train

TOLERANCE = 2e-6  # of the largest gradient: float32 sums of a few thousand terms in another order
IN_C = pytest.mark.skipif(isinstance(native.training_library(), str), reason="a C compiler was not found")


@members(lambda: dict(
    stem=nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(), nn.MaxPool2d(3, 2, 1)),
    deep=nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
    flat=nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)),
    head=nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.25), nn.Linear(24, 5)),
))  # fmt: skip
def Network(self, x: Tensor) -> Tensor:
    """Fused operators: batch norms, clamps, residuals, channels of their own; pooling, a sum beside them, a layer of rows."""
    x = self.stem(x)
    x = torch.relu(self.flat(self.deep(x)) + x)
    return self.head((x + self.deep(x)).mean((2, 3)))


def images(seed: int = 0) -> Tensor:
    return torch.randn(8, 3, 28, 24, generator=torch.Generator().manual_seed(seed))


@copies
def prepared_on(target: str) -> fx.GraphModule:
    torch.manual_seed(0)
    model = Network()
    with torch.no_grad():
        for _ in range(20):
            model(images())
    prepared = compiled(model.eval(), [images()], target).prepared
    return to_train(prepared)


@contextmanager
def without_c() -> Iterator[None]:
    with mock.patch.object(fused_layers.OFFERS, "known", []), mock.patch.object(ranges.OFFERS, "known", []):
        yield


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)  # of the dropout
    model.zero_grad()
    output = model(x)
    (output * torch.arange(float(output.shape[-1]))).sum().backward()
    return output.detach(), [parameter.grad for parameter in model.parameters()]


def assert_same_step(own: nn.Module, reference: nn.Module, x: Tensor, in_c: bool = True) -> None:
    """The bits of the primitives, and their gradients."""
    with nullcontext() if in_c else without_c():
        result, gradients = step(own, x)
    with fused_layers.unfused():
        wanted, expected = step(reference, x)
    assert torch.equal(result, wanted)
    assert_alike(gradients, expected)


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    largest = max(float(each.abs().max()) for each in other)
    assert largest > 0
    for a, b in zip(one, other, strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE * largest


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("target", "frozen", "in_c"),
    [
        *(pytest.param(target, frozen, True, marks=IN_C) for target in ("bayes-e", "nash-e", "x86") for frozen in (False, True)),
        ("bayes-e", False, False),
        ("x86", True, False),
    ],
)
def test_a_fused_step_is_the_primitives(target: str, frozen: bool, in_c: bool) -> None:
    own = prepared_on(target)
    if frozen:
        fxq.freeze(own)
    reference = copy.deepcopy(own)
    for x in (images(0), images(1).contiguous(memory_format=torch.channels_last)):  # the second finds what the first has moved
        assert_same_step(own, reference, x, in_c)
        for (name, one), other in zip(own.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), name


@pytest.mark.sweep(5)
@pytest.mark.parametrize("in_c", [pytest.param(True, marks=IN_C), False])
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
@pytest.mark.parametrize("convolution", [True, False])
def test_a_batch_norm_may_have_one_channel(convolution: bool, target: str, in_c: bool) -> None:
    norm, x = nn.BatchNorm2d(1), torch.randn(6, 3 if convolution else 1, 20, 16)
    model = nn.Sequential(nn.Conv2d(3, 1, 3), norm, nn.ReLU()) if convolution else nn.Sequential(norm)
    own = compiled(model.eval(), [x], target).prepared
    fxq.set_state(own, "train")
    assert_same_step(own.train(), copy.deepcopy(own), x, in_c)


@IN_C
def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    sums = torch.randint(-1000, 1000, (4, 32, 40, 40)).float()
    form = form_of(sums, 2)
    how = Rounded((torch.full((32,), 0.1),), 0, 0.0, -128, 127, (-128, 127), (0.0, 6.0), torch.tensor(0.05))
    accumulator = Accumulator(sums, form, None, sums, torch.ones(32))
    gradients = Gradients(sums, None)
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            passes = fused_layers.OFFERS.known[0]
            results.append(passes.finish_back(accumulator, torch.full((32,), 0.005), how, gradients))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@IN_C
def test_a_clamp_between_two_steps_has_gradients_up_to_itself() -> None:
    sums = torch.arange(-64.0, 4032.0).reshape(1, 1, 64, 64)
    how = Rounded((torch.full((1,), 0.1),), 0, 0.0, 0, 120, (-128, 127), (0.0, 6.02), torch.tensor(0.05))
    form, ratio = form_of(sums, 2), torch.full((1,), 0.005)
    inputs = Accumulator(sums, form), ratio, how, Gradients(torch.ones_like(sums), None)
    actual, wanted = fused_layers.OFFERS.known[0].finish_back(*inputs)[0], Passes().finish_back(*inputs)[0]
    assert torch.equal(actual, wanted)
    assert int((actual[sums > 1200] != 0).sum()) == 4  # 1201 to 1204: beyond 120 steps of 0.05, and not beyond 6.02


@pytest.mark.parametrize("largest", [1000, 2**24 - 1, 2**31 - 129])
def test_statistics_of_a_batch_are_exact(largest: int) -> None:
    """Mean and variance as fractions give them, rounded once."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-largest, largest, (3, 4, 30, 20), generator=generator).double() + 0.0
    sums = sums.float() if largest < 2**24 else sums
    form = form_of(sums, 2)
    result = fused_layers.collected(sums, form)
    for channel in range(4):
        values = [int(value) for value in sums[:, channel].flatten().tolist()]
        mean = Fraction(sum(values), len(values))
        variance = Fraction(sum(value * value for value in values), len(values)) - mean * mean
        assert float(result.mean[channel]) == float(torch.tensor(float(mean), dtype=torch.float64).float())
        assert float(result.variance[channel]) == pytest.approx(float(variance), rel=2**-23)
        assert result.ends[:, channel].tolist() == [min(values), max(values)]
    with without_c():
        again = fused_layers.collected(sums, form)
    assert torch.equal(result.mean, again.mean)
    assert torch.equal(result.variance, again.variance)


def test_whoever_watches_a_tensor_is_told_of_its_gradient() -> None:
    """Integers are kept next to dequantized tensors, unless a dequantized tensor has a hook or keeps its gradient."""
    own = prepared_on("bayes-e")
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, arguments: object, result: Tensor) -> None:
        if result.requires_grad:
            result.retain_grad()
            kept[module.name] = result

    operators = quantized_operators(own)
    hooks = [operator.register_forward_hook(keep) for operator in operators.values() if operator.owns_output]
    watched = step(own, images())[1]
    for hook in hooks:
        hook.remove()
    assert len(kept) > 6
    assert all(value.grad is not None and bool((value.grad != 0).any()) for value in kept.values())
    reference = prepared_on("bayes-e")
    assert_alike(watched, step(reference, images())[1])


def test_what_is_written_on_a_real_tensor_is_read() -> None:
    """The integers kept with a float tensor are not used after a write: they belong to its former values."""
    own = prepared_on("bayes-e")
    fxq.set_state(own, "validate")
    first = next(iter(quantized_operators(own).values()))

    def after(hook: Callable[..., Tensor]) -> Tensor:
        handle = first.register_forward_hook(lambda module, arguments, result: hook(result))
        actual: Tensor = own(images())
        handle.remove()
        return actual

    with torch.no_grad():
        before, written, inputs = own(images()), after(lambda result: result.mul_(-1)), after(lambda result: -result)
    assert not torch.equal(before, written)
    assert torch.equal(written, inputs)


def test_gradients_can_be_differentiated() -> None:
    own = prepared_on("nash-e")
    fxq.freeze(own)
    parameters = [parameter for parameter in own.parameters() if parameter.requires_grad]

    def penalty() -> list[Tensor]:
        torch.manual_seed(1)
        output = own(images())
        (gradient,) = torch.autograd.grad(output.square().sum(), parameters[:1], create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), parameters, allow_unused=True))

    result = penalty()
    with fused_layers.unfused():
        wanted = penalty()
    assert [each is None for each in result] == [each is None for each in wanted]
    assert_alike([each for each in result if each is not None], [each for each in wanted if each is not None])


@pytest.mark.parametrize("channels", [1200, 2400])
def test_wide_sums_are_formed_once(channels: int) -> None:
    """Sums that could exceed 2^24 for some operand do not exceed it for this operand, or not in parts."""
    layer, x = nn.Linear(channels, 8), torch.rand(4, channels) + 0.2
    nn.init.uniform_(layer.weight, 0.5, 1.0)  # all of a sign, so that sums are as large as they can be
    prepared = compiled(layer, [x], "nash-e").prepared
    fxq.set_state(prepared.train(), "train")
    fxq.freeze(prepared)
    assert_same_step(prepared, copy.deepcopy(prepared), x)


@pytest.mark.parametrize(("kernel", "padding", "ceil_mode"), [(3, 1, False), (2, 1, True), (3, 0, True), (5, 2, False)])
def test_maxima_of_padded_windows(kernel: int, padding: int, ceil_mode: bool) -> None:
    x = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0)) - 3  # below zero: padding must not win
    layer = nn.MaxPool2d(kernel, 2, padding, ceil_mode=ceil_mode)
    prepared = compiled(nn.Sequential(layer), [x]).prepared
    with torch.no_grad():
        grid = next(iter(quantized_operators(prepared).values())).output.grid
        assert torch.equal(prepared(x), layer(grid.quantize(x)) * grid.scale)


@IN_C
@pytest.mark.parametrize("shape", [(8, 3, 40, 40), (8, 300), (5, 7, 13, 17), (4, 16, 200, 200)])
def test_observers_count_the_same_in_c(shape: tuple[int, ...]) -> None:
    """Halves, as quantized tensors have them, lie on the edges of bins; items differ in their norm; the second batch is larger."""
    seen = []
    for context in (nullcontext(), without_c()):
        generator = torch.Generator().manual_seed(0)
        observers = [HistogramObserver(sample=2**16), MinMaxObserver()]
        with context:
            for loud in (1.0, 3.0):
                value = torch.randn(shape, generator=generator) * loud
                value[0] *= 30
                value[1] = value[1].mul(4).round().div(4)
                observe_together(observers, value, items=True)
        seen.append([buffer for observer in observers for buffer in observer.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize(("number", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_nothing_is_counted_of_what_is_not_finite(number: float, word: str) -> None:
    value = torch.randn(4, 1000)
    value[2, 500] = number
    with pytest.raises(ValueError, match=word):
        observe_together([HistogramObserver()], value, items=True)


def test_a_product_with_one_number_of_tensors_with_one_column() -> None:
    """Their last dimension has one element, as the number has; kernels for a number in each column must not read more than one."""
    scaled = nn.Sequential(nn.Conv2d(8, 1024, 1), Times(0.167), nn.Conv2d(1024, 4, 1))
    x = torch.randn(4, 8, 1, 1, generator=torch.Generator().manual_seed(0))
    prepared, integer = compiled(scaled.eval(), [x], "bayes-e")
    with fused_layers.unfused():
        wanted = prepared(x)
    assert torch.equal(prepared(x), wanted)
    assert torch.equal(integer(x), wanted)


@members(lambda number: dict(number=number))
def Times(self, x: Tensor) -> Tensor:
    return x * self.number


def whole(*shape: int, low: int = -128, high: int = 127, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def kept_by(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """Return the narrow operands that a product keeps; its first and second gradients equal PyTorch's own."""

    def gradients(narrowed: bool) -> list[Tensor]:
        inputs = [operand.clone(memory_format=torch.preserve_format).requires_grad_() for operand in operands]
        arguments = (*inputs, None) if function is linear else tuple(inputs)
        if narrowed:
            with fused_elementwise.kept_narrow(function, arguments):
                result = function(*arguments)
        else:
            result = function(*arguments)
        once = torch.autograd.grad((result * torch.cos(result.detach())).sum(), inputs, create_graph=True)
        return [result, *once, *torch.autograd.grad(sum((each.sin()).sum() for each in once), inputs)]

    for actual, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(actual, wanted)
        assert float(wanted.detach().abs().max()) > 0
    return [fused_elementwise._narrow(operand) for operand in operands]


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(-128, 127, torch.int8), (0, 255, torch.uint8), (-129, 5, torch.int16), (-32768, 32767, torch.int16), (0, 32768, torch.float32)],
)
def test_operands_are_kept_in_the_bits_they_need(low: int, high: int, dtype: torch.dtype) -> None:
    x, weight = whole(2, 48, 64, low=low, high=high), whole(80, 64, low=-2, high=2, seed=1)
    x.view(-1)[:2] = torch.tensor((low, high))
    kept, of_weight = kept_by(linear, x, weight)
    assert (kept.dtype, of_weight.dtype) == (dtype, torch.int8)
    assert torch.equal(kept.float(), x)


def test_operands_lie_as_they_did_and_little_is_kept_as_it_is() -> None:
    x, other = whole(4, 64, 3, 32).permute(0, 2, 1, 3), whole(4, 64, 3, 32, seed=1).permute(0, 2, 3, 1)
    for kept, value in zip(kept_by(matrix_product, x, other), (x, other), strict=True):
        assert kept.dtype == torch.int8
        assert kept.stride() == value.stride()
        assert torch.equal(kept.float(), value)
    repeated = whole(1, 64, 128).expand(3, 64, 128)
    assert torch.equal(fused_elementwise._wide(fused_elementwise._narrow(repeated)), repeated)
    little = whole(8, 64)
    assert fused_elementwise._narrow(little) is little


@pytest.mark.parametrize("reach", [0.9, 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1001, pytest.param(5001, marks=IN_C)])
def test_gradients_end_where_the_grid_does(reach: float, count: int) -> None:
    value, scale, bounds = torch.linspace(-1, 1, count), torch.tensor(0.37), (-128.0, 127.0)
    value *= (reach if reach < 2 else 0.9) * 128 * scale
    value[count // 3] *= reach
    integers = Grid(INT8, scale).quantize(value)
    one, other, third = (value.clone().requires_grad_() for _ in range(3))
    results = [fused_layers.on_grid(one, integers, scale, bounds), straight_through((other / scale).clamp(*bounds), integers)]
    with mock.patch.object(NativePasses, "quantize", autospec=True, side_effect=NativePasses.quantize) as in_c:
        results.append(fused_layers.quantized(third, Grid(INT8, scale), bounds))
    assert in_c.called == (count > SMALLEST)
    weights = torch.cos(value.nan_to_num())
    gradients = [torch.autograd.grad((result * weights).sum(), of)[0] for result, of in zip(results, (one, other, third), strict=True)]
    assert all(torch.equal(result, integers) for result in results)
    assert all(torch.equal(gradients[0], each) for each in gradients)


@IN_C
@pytest.mark.parametrize("shape", [(64, 65), (33, 128), (16, 32, 3, 3), (16, 31, 3, 3), (500, 1, 3, 3), (24, 200, 1, 1)])
def test_pairs_of_weights_are_those_of_tensors(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for gain in (None, torch.linspace(-2, 3, len(weight)).index_fill(0, torch.tensor(1), float("nan"))):
        assert torch.equal(*(passes.weight_pairs(weight, gain).nan_to_num(-1) for passes in (NativePasses(), Passes())))


def test_operands_that_are_not_rounded_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    x, layer = torch.randint(-64, 65, (128, 64), generator=generator) / 16, nn.Linear(64, 64)  # their sums are exact
    qconfig = fxq.QConfig(fxq.ActivationConfig(power_of_two=True), fxq.WeightConfig(power_of_two=True))
    prepared = contract.calibrated(layer, [x], "nash-e", qconfig)
    (operator,) = (each for each in quantized_operators(prepared).values() if each.operator.name == "linear")
    result = real_result(operator, {"input": x, "weight": layer.weight, "bias": layer.bias})
    weights = torch.randint(-8, 9, result.shape, generator=generator).float()
    (actual,) = torch.autograd.grad((result * weights).sum(), layer.weight)
    assert torch.equal(actual, weights.t() @ x)
