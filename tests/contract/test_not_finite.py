"""Parameters and scales that are NaN, infinite or no float32 numbers are met by an error that names the layer, in every state."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.numerics.grids import Ratio, real_multiplier
from fxquant.ops.sampling.resize import _nearest, _neighbours
from tests.shared.contract import assert_train_is_validate, assert_validate_is_integer, compiled, same_state
from tests.shared.networks import Network, copies, descend, members, to_train

BATCH = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@members(lambda: dict(
    conv=nn.Conv2d(3, 4, 3, padding=1), norm=nn.BatchNorm2d(4), slope=nn.PReLU(4), alone=nn.BatchNorm2d(4),
    offset=nn.Parameter(torch.randn(4, 1, 1)), least=nn.Parameter(torch.randn(4, 1, 1)), factor=nn.Parameter(torch.randn(6)),
    matrix=nn.Parameter(torch.randn(4, 4)), head=nn.Linear(4, 5),
))  # fmt: skip
def Layers(self, x: Tensor) -> Tensor:
    x = self.slope(self.norm(self.conv(x)))
    x = F.max_pool2d(self.alone(x + self.offset) * self.factor, 2)
    x = torch.maximum(x, self.least).mean((2, 3))
    return self.head(x @ self.matrix)


@copies
def prepared(qconfig: fxq.QConfig | None = None) -> fx.GraphModule:
    torch.manual_seed(0)
    return fxq.calibrate(fxq.prepare(Layers().eval(), BATCH, "nash-e", qconfig), [BATCH])


PLACES = {  # a parameter, the node and the module that the error names, what it says
    "conv.weight": ("conv", "conv", "its weight holds"),
    "conv.bias": ("conv", "conv", "its bias holds"),
    "norm.running_var": ("conv", "conv", "the running_var of its batch norm holds"),
    "norm.weight": ("conv", "conv", "the weight of its batch norm holds"),
    "slope.weight": ("slope", "slope", "its weight holds"),
    "alone.running_mean": ("alone", "alone", "the running_mean of its batch norm holds"),
    "matrix": ("matmul", None, "its constant 'other' holds"),
    "head.weight": ("head", "head", "its weight holds"),
}
CONSTANTS = {
    "offset": ("add", None, "its constant 'other' holds"),
    "factor": ("mul", None, "its constant 'other' holds"),
    "least": ("maximum", None, "its constant 'other' holds"),
}


def actions(model: fx.GraphModule) -> dict[str, Callable[[], object]]:
    def run(state: fxq.State, training: bool) -> object:
        fxq.set_state(model, state)
        return model.train(training)(BATCH)

    return {
        "validate": lambda: run(fxq.State.VALIDATE, False),
        "train": lambda: run(fxq.State.TRAIN, True),
        "evaluate": lambda: run(fxq.State.TRAIN, False),
        "convert": lambda: fxq.convert(model),
        "calibrate": lambda: fxq.calibrate(model, [BATCH]),
    }


@pytest.mark.sweep(9)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [*PLACES, *CONSTANTS])
def test_a_parameter_that_is_not_finite_is_named_by_whatever_meets_it(place: str, value: float) -> None:
    if place in ("least", "norm.running_var") and math.isinf(value):
        pytest.skip("an infinite bound saturates, and an infinite variance makes a channel constant")
    model = prepared()
    node, module, because = {**PLACES, **CONSTANTS}[place]
    with torch.no_grad():
        dict((*model.named_parameters(), *model.named_buffers()))[place].view(-1)[1] = value
    for name, action in actions(model).items():
        with pytest.raises(fxq.FxQuantError) as caught:
            action()
        error = caught.value
        if name == "calibrate" and not isinstance(error, fxq.errors.NotFinite):  # seen after another operator first
            assert isinstance(error, fxq.errors.CalibrationError)
            continue
        assert isinstance(error, fxq.errors.NotFinite), name
        assert f"the parameters of %{node} cannot become integers" in error.what, name
        assert (error.at or "").startswith("test_not_finite.py:"), name
        assert module is None or error.module == module
        assert error.because.startswith(because) or "its weight holds" in error.because
        assert ("NaN" if math.isnan(value) else "infinite") in error.because
        assert "checkpoint" in error.remedy


@pytest.mark.sweep(6)
@pytest.mark.parametrize("batch_norm", ["live", "folded"])
@pytest.mark.parametrize("place", PLACES)
def test_prepare_refuses_parameters_that_are_not_finite(place: str, batch_norm: str) -> None:
    model = Layers().eval()
    with torch.no_grad():
        dict((*model.named_parameters(), *model.named_buffers()))[place].view(-1)[1] = math.nan
    with pytest.raises(fxq.errors.NotFinite, match=f"the parameters of %{PLACES[place][0]} cannot become integers"):
        fxq.prepare(model, BATCH, options=fxq.Options(batch_norm=batch_norm))


def test_a_batch_norm_that_gives_nothing_finite() -> None:
    model = prepared()
    model.norm.running_var[0] = -1.0
    with pytest.raises(fxq.errors.NotFinite, match="are finite, but their product"):
        fxq.convert(model)


def test_a_learned_scale_that_is_not_finite() -> None:
    learned = fxq.QConfig(fxq.ActivationConfig(training="learned"), fxq.WeightConfig(training="learned"))
    model = prepared(qconfig=learned)
    fxq.set_state(model, fxq.State.TRAIN)
    model(BATCH)
    for scale_change, what in (
        (model.quantized.conv.quantizer.scale_change, "the scale of %conv is nan"),
        (model.quantized.conv.weight_quantizer.learned.scale_change, "the parameters of %conv cannot become integers"),
    ):
        kept = scale_change.detach().clone()
        with torch.no_grad():
            scale_change.view(-1)[0] = math.nan
        for name, action in actions(model).items():
            if name != "calibrate":
                with pytest.raises(fxq.errors.NotFinite, match=what):
                    action()
        with torch.no_grad():
            scale_change.copy_(kept)
    fxq.set_state(model, fxq.State.VALIDATE)
    assert_validate_is_integer(model, fxq.convert(model), BATCH)


# ---- scales -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [1e-60, 1e-45, 1e-39, 1e39, 1e300])
def test_a_scale_is_a_float32_number(scale: float) -> None:
    model = prepared()
    before = fxq.qparams(model)
    with pytest.raises(fxq.errors.ConfigurationError, match="is not usable"):
        fxq.set_qparams(model, {"conv": scale})
    assert fxq.qparams(model) == before
    for name, value in (("scale", scale), ("threshold", scale * 128)):
        with pytest.raises(fxq.errors.ConfigurationError, match=f"{name}=.* is not usable"):
            fxq.ActivationConfig(**{name: value})


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scales", [(1e-37, 3e38), (3e38, 1e-37), (1e-37, 1e-37), (3e38, 3e38)])
@pytest.mark.parametrize("target", ["nash-e", "bayes-e"])
def test_extreme_scales_saturate_alike_everywhere(scales: tuple[float, float], target: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1))
    ready = fxq.prepare(model, BATCH, target)
    names = list(fxq.qparams(ready))
    fxq.set_qparams(ready, {name: scales[index % 2] for index, name in enumerate(names)})
    assert_validate_is_integer(ready, fxq.convert(ready), BATCH)


def test_a_multiplier_beyond_float32_is_the_largest_one() -> None:
    multiplier = real_multiplier(Ratio((torch.tensor(3e38), torch.tensor(3e38)), (torch.tensor(1e-37),)))
    assert float(multiplier) == torch.finfo(torch.float32).max


# ---- batches that are too small ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "what"), [(1, "1 value for each"), (0, "0 values for each")])
def test_a_live_batch_norm_needs_two_values(count: int, what: str) -> None:
    config = fxq.QConfig(input=fxq.ActivationConfig(scale=0.02))  # so that the input does not refuse an empty batch itself
    model = fxq.prepare(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(8, 4), qconfig=config)
    fxq.calibrate(model, [torch.randn(8, 4)])
    to_train(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fxq.errors.ConfigurationError, match=what):
        model(torch.randn(count, 4))
    assert same_state(model, before)
    fxq.freeze(model, scales=False)
    if count:
        model(torch.randn(count, 4))


# ---- what is kept between calls ------------------------------------------------------------------------------------------
RESIZE = {"nearest": {}, "bilinear": {"align_corners": False}}


@pytest.mark.parametrize("mode", RESIZE)
def test_what_inference_mode_evaluated_can_be_trained(mode: str) -> None:
    x = torch.randn(2, 3, 5, 7)

    def model() -> fx.GraphModule:
        ready = fxq.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode=mode)), x)
        return fxq.calibrate(ready, [x])

    _nearest.cache_clear()
    _neighbours.cache_clear()
    with torch.inference_mode():
        made_inside = model()
        made_inside(x)
        integer_inside = fxq.convert(made_inside)
    for ready in (model(), made_inside):
        assert not any(tensor.is_inference() for tensor in (*ready.parameters(), *ready.buffers()))
        descend(to_train(ready), [x], 0.1, torch.sum)
        assert_train_is_validate(ready, x)
    assert not any(tensor.is_inference() for tensor in integer_inside.buffers())


POLES: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "log": torch.log, "reciprocal": torch.reciprocal, "pow": lambda x: x**0.3,
    "log of what is clamped": lambda x: torch.log(x.clamp_min(1e-6)),
}  # fmt: skip


@pytest.mark.parametrize("name", POLES)
def test_a_pole_that_the_grid_holds_leaves_training_alive(name: str) -> None:
    """Small values are rounded to 0, where these functions have no finite value or slope."""
    x = torch.linspace(0.3, 3, 16).reshape(4, 4)
    prepared = compiled(Network(lambda m, x: POLES[name](x * m.weight), weight=nn.Parameter(torch.ones(4))), [x]).prepared
    to_train(prepared)
    small = x.clone()
    small[0] = 1e-9
    before = list(fxq.qparams(prepared).values())[-1]
    result = prepared(small.requires_grad_())
    result.sum().backward()
    assert bool(torch.isfinite(result).all())
    for gradient in (small.grad, prepared.weight.grad):
        assert bool(torch.isfinite(gradient).all())
    assert bool((small.grad[0] == 0).all())
    assert bool((small.grad[1:] != 0).any())
    assert list(fxq.qparams(prepared).values())[-1] <= 1.5 * before, "the pole is observed"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_passes_over_memory_make_integers_of_is_named_as_well(value: float) -> None:
    x = torch.randn(4, 128)
    model = fxq.calibrate(fxq.prepare(nn.Sequential(nn.Linear(128, 64)), x, "nash-e"), [x])
    with torch.no_grad():
        model.get_parameter("0.weight")[3, 5] = value
    fxq.set_state(model, fxq.State.VALIDATE)
    for action in (lambda: model.eval()(x), lambda: fxq.convert(model)):
        with pytest.raises(fxq.errors.NotFinite, match="its weight holds"):
            action()
