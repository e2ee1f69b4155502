"""Gradients at limits, held to their definition: no version of PyTorch decides on them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.numerics.grids import INT4, Grid
from fxquant.numerics.rounding import AdaptiveRounding, clamped
from fxquant.ops.core.record import operator_named
from fxquant.prepared.operators import take_integers
from fxquant.primitives import elementwise, product, quantization
from fxquant.primitives.record import PRIMITIVES
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.weights import WeightQuantizer, WeightScale
from fxquant.training import fused_layers
from tests.shared.contract import compiled
from tests.shared.networks import Network

LOW, HIGH = -0.5, 1.25


def around(low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Both limits, the numbers next to them on either side, what is far beyond, and what is between."""
    limits = torch.tensor([low, high], dtype=dtype)
    far = torch.tensor([-math.inf, math.inf], dtype=dtype)
    near = [torch.nextafter(limits, end) for end in far]
    return torch.cat([limits, *near, limits * 10, torch.linspace(low, high, 5, dtype=dtype)])


def slope(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    value = value.clone().requires_grad_()
    return torch.autograd.grad(function(value).sum(), value)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (0, None), (None, 0.1), (-8, 7), (0.1, 0.1), (None, None)])
def test_the_gradient_is_one_up_to_the_limits(low: float | None, high: float | None, dtype: torch.dtype) -> None:
    value = around(-1.0 if low is None else low, 1.0 if high is None else high, dtype)
    limits = [None if limit is None else torch.tensor(limit, dtype=dtype) for limit in (low, high)]
    wanted = torch.ones_like(value)
    for limit, beyond in zip(limits, (torch.lt, torch.gt), strict=True):
        wanted = wanted if limit is None else wanted * ~beyond(value, limit)
    assert torch.equal(slope(lambda x: clamped(x, low, high), value), wanted)
    assert torch.equal(slope(lambda x: clamped(x, *limits), value), wanted)
    exact = value if low is high is None else value.clamp(low, high)
    for result in (clamped(value, low, high), clamped(value.clone().requires_grad_(), low, high)):
        assert torch.equal(result, exact)
        assert result.dtype == dtype


def test_it_can_be_transformed_and_differentiated_twice() -> None:
    value = around(LOW, HIGH, torch.float64)
    wanted = ((value >= LOW) & (value <= HIGH)).double()
    assert torch.equal(torch.func.grad(lambda x: clamped(x, LOW, HIGH).sum())(value), wanted)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: clamped(x, LOW, HIGH)))(value), wanted)
    leaf = value.clone().requires_grad_()
    (first,) = torch.autograd.grad((clamped(leaf, LOW, HIGH) ** 3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.equal(second, 6 * value * wanted)


def test_what_traces_a_graph_meets_clamp() -> None:
    limited = Network(lambda s, x: clamped(x * s.weight, 0.0, 1.0), weight=nn.Parameter(torch.ones(3)))
    program = torch.export.export(limited, (torch.ones(3),))
    assert torch.ops.aten.clamp.default in {node.target for node in program.graph.nodes}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("clamp", (LOW, HIGH)), ("add", (0.0,)), ("mul", (1.0,)), ("div", (1.0,)), ("mean", (-1, True)), ("sum", (-1, True)),
        ("prelu", (torch.ones(1),)),
    ],
)  # fmt: skip
def test_float_functions_have_it(name: str, arguments: tuple[Any, ...]) -> None:
    value = around(LOW, HIGH, torch.float32).unsqueeze(1)
    fused = {} if name == "clamp" else {"clamp": (LOW, HIGH)}
    result = slope(lambda x: operator_named(name).function(x, *arguments, **fused), value)
    assert torch.equal(result, ((value >= LOW) & (value <= HIGH)).float())


GRID = Grid(INT4, torch.tensor(0.5), 0)
STEPS = torch.tensor([-20.0, -8.5, -8.01, -8.0, -7.9, 0.0, 6.9, 7.0, 7.01, 7.5, 20.0])
WITHIN = ((STEPS >= -8) & (STEPS <= 7)).float()
ACTS_ON = {
    "quantize": (lambda x: PRIMITIVES[quantization.quantize].surrogate(x, GRID.scale, -8, 7, torch.int8), STEPS / 2, 2 * WITHIN),
    "clamp": (lambda x: elementwise.clamp(x, -8, 7), STEPS, WITHIN),
    "clamp_accumulator": (lambda x: quantization.clamp_accumulator(x, torch.tensor(-8.0), torch.tensor(7.0)), STEPS, WITHIN),
    "rectify": (lambda x: product.rectify(x, 4, torch.tensor(-1)), STEPS, torch.where(STEPS > 0, 4.0, -1.0)),
    "adaptive rounding": (lambda x: _soft().integers(x, -8, 7), STEPS, torch.where(STEPS == 0, 0.0, WITHIN)),  # zeros stay zeros
    "a weight whose scale covers less": (lambda x: _weight().integers(x.reshape(1, -1)).integers, None, None),
}


def _soft() -> AdaptiveRounding:
    rounding = AdaptiveRounding((len(STEPS),))
    rounding.soft = lambda real: real
    return rounding


def _weight() -> WeightQuantizer:
    learned = WeightScale(1, None)
    learned.assign(torch.tensor([0.5]))
    return WeightQuantizer(INT4, per_channel=False, learned=learned)


@pytest.mark.parametrize("name", ACTS_ON)
def test_what_has_limits_has_it(name: str) -> None:
    function, value, wanted = ACTS_ON[name]
    assert torch.equal(slope(function, STEPS / 2 if value is None else value), 2 * WITHIN if wanted is None else wanted)


@pytest.mark.parametrize("fused", [True, False])
def test_integers_of_a_real_tensor_have_it(fused: bool) -> None:
    """Half a step wider, so that what was rounded to a limit is within, however its quotient was rounded."""
    quantizer = Quantizer(INT4, None, scale=0.5)
    with fused_layers.unfused() if not fused else torch.enable_grad():
        result = slope(lambda x: take_integers(x, quantizer).value, STEPS / 2)
    assert torch.equal(result, ((STEPS >= -8.5) & (STEPS <= 7.5)) * 2.0)


@pytest.mark.parametrize("training", ["statistics", "learned", "pact", "tqt"])
@pytest.mark.parametrize("target", ["nash-e", "x86"])
def test_gradients_of_a_model_with_elements_on_its_limits_are_exact(target: str, training: str) -> None:
    """x → int4 → times 1 → clamp(-1, 1): integers are -8 … 7 of half a step; at the limits of both the gradient passes."""
    x = torch.tensor([[-9.0, -4.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.5, 4.0, 9.0]])
    qconfig = fxq.QConfig(fxq.ActivationConfig("int4", training=training))
    prepared = fxq.prepare(Network(lambda s, x: (x * 2.0).clamp(-2.0, 2.0)), x, target, qconfig)
    fxq.set_qparams(prepared, {"x_quantize": 0.5, "mul": 0.5})
    fxq.set_state(prepared, fxq.State.TRAIN)
    wanted = ((x >= -1.0) & (x <= 1.0)) * 2.0
    for fused in (True, False):
        with torch.enable_grad() if fused else fused_layers.unfused():
            assert torch.equal(slope(prepared, x), wanted)


# ---- limits that cross, or are infinite, NaN or tensors --------------------------------------------------------------------
def limited(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A convolution, and what is done with its output."""
    low, high = (nn.Buffer(torch.full((8, 1, 1), value)) for value in (1.0, -0.5))
    return Network(lambda s, x: function(s, s.conv(x)), conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1), low=low, high=high)


CROSSING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda model, x: torch.clamp(x, 1.0, -1.0), "positive": lambda model, x: x.clip(0.5, 0.2),
    "in place, read by a layer": lambda model, x: model.last(x.clamp_(0.9, -0.9)),
    "two clamps": lambda model, x: x.clamp(min=1.0).clamp(max=-1.0), "after relu": lambda model, x: torch.relu(x).clamp(3.0, 2.0),
    "before relu": lambda model, x: torch.relu(x.clamp(1.0, -1.0)), "tensors": lambda model, x: torch.clamp(x, model.low, model.high),
    "of a mean": lambda model, x: x.mean((2, 3)).clamp(0.3, 0.1), "of a sum": lambda model, x: (x + x).clamp(0.3, 0.1),
    "of a product": lambda model, x: (x * x.sigmoid()).clamp(0.3, 0.1), "of a pooling": lambda model, x: F.avg_pool2d(x, 2).clamp(0.3, 0.1),
    "alone": lambda model, x: x.flip(1).clamp(0.3, -0.1), "integers": lambda model, x: x.argmax(1).clamp(5, 2) + x.argmin(1).clamp(3, 1),
    "equal limits": lambda model, x: x.clamp(0.25, 0.25), "hardtanh": lambda model, x: F.hardtanh(x, -1.0, 0.8),
    "no limits": lambda model, x: x.clamp(-math.inf, math.inf),
}  # fmt: skip


@pytest.mark.sweep(8)
@pytest.mark.parametrize("form", CROSSING)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli", "x86"])
def test_limits_that_cross_leave_the_upper_one(target: str, form: str, tmp_path: Path) -> None:
    model, x = limited(CROSSING[form]).eval(), torch.randn(2, 3, 8, 8)
    prepared, integer = compiled(model, [x], target)
    wanted = integer(x)  # by its primitives
    assert torch.equal(integer(x), wanted)
    assert torch.equal(integer(x), wanted)
    assert torch.equal(prepared(x), wanted)
    assert (wanted - model(x)).abs().max() <= 0.05 * model(x).abs().max() + 128 * 2.0**-23  # the scale of what is 0 everywhere
    if target == "bayes-e" or form == "function":
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [x])
        assert fxq.export.export_c(integer, tmp_path / "model.c").exists()


@pytest.mark.parametrize("name", ["min", "max"])
def test_a_bound_that_is_nan_leaves_the_clamp_in_float(name: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared, integer = compiled(limited(lambda model, x: x.clamp(**{name: math.nan})).eval(), [x])
    assert f"its bound '{name}' is NaN" in fxq.explain(integer)
    for form in (integer, integer, prepared):
        assert bool(torch.isnan(form(x)).all())


@pytest.mark.parametrize("bounds", [(math.inf, None), (None, -math.inf), (math.inf, 1.0), (-1.0, -math.inf)])
def test_infinite_bounds_on_the_wrong_side(bounds: tuple[float | None, float | None]) -> None:
    model, x = limited(lambda model, x: x.clamp(*bounds)).eval(), torch.randn(2, 3, 8, 8)
    if bounds == (math.inf, 1.0):  # they cross, and leave 1
        assert (compiled(model, [x]).integer(x) - 1.0).abs().max() < 0.01
        return
    with pytest.raises(fxq.errors.CalibrationError, match="infinite values"):
        compiled(model, [x])


def test_training_with_limits_that_cross() -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared, _ = compiled(limited(lambda model, x: model.last(x.clamp(1.0, -1.0))).eval(), [x])
    fxq.set_state(prepared, "train")
    fxq.freeze(prepared)
    output = prepared(x)
    output.sum().backward()
    fxq.set_state(prepared, "validate")
    assert torch.equal(output, prepared(x))
    assert float(prepared.get_parameter("conv.weight").grad.abs().sum()) == 0  # type: ignore[union-attr]
    assert float(prepared.get_parameter("last.bias").grad.abs().sum()) > 0  # type: ignore[union-attr]
