"""Cross-layer equalization: which channels may be multiplied, and through what; a change of scales and weights alone, and its gain."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import TensorFact, fact
from fxquant.prepared.channels import Channels, channels, exponents, multiply
from fxquant.prepared.operators import quantized_operators
from tests.shared import contract, networks
from tests.shared.networks import to_train


class Chain(nn.Module):
    """A convolution with a batch norm, what stands after it, and a convolution that reads it."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], inner: int = 8, outer: int = 8, **layers: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, inner, 3, padding=1), nn.BatchNorm2d(inner), nn.Conv2d(outer, 5, 1)
        self.layers, self.between = nn.ModuleDict(layers), between
        with torch.no_grad():
            self.norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        value = self.norm(self.first(x))
        result = self.between(self.layers, value)
        return self.last(result) if result.dim() == 4 else result


def _sliced(m: Any, x: Tensor) -> Tensor:
    one, other = x.relu().chunk(2, 1)
    return torch.cat([other, m["a"](one)], 1)


def _attended(m: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    query, value = (m[name](tokens).reshape(-1, 64, 2, 4).transpose(1, 2) for name in ("q", "v"))
    shares = torch.softmax(query @ query.transpose(-2, -1), -1)
    return m["o"]((shares @ value).transpose(1, 2).reshape(-1, 64, 8))


# By name: the network, and how many labels its channels have besides 0.
PASSES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "nothing between": (lambda: Chain(lambda m, x: x), 8),
    "relu": (lambda: Chain(lambda m, x: F.relu(x)), 8),
    "leaky relu": (lambda: Chain(lambda m, x: F.leaky_relu(x, 0.1)), 8),
    "prelu": (lambda: Chain(lambda m, x: m["p"](x), p=nn.PReLU(8)), 8),
    "poolings": (lambda: Chain(lambda m, x: F.max_pool2d(F.avg_pool2d(F.relu(x), 2), 2)), 8),
    "padding, interpolation and dropout": (
        lambda: Chain(lambda m, x: F.dropout(F.interpolate(F.pad(x, [1, 1, 0, 0]), scale_factor=2), training=False)),
        8,
    ),
    "depthwise": (lambda: Chain(lambda m, x: F.relu(m["d"](F.relu(x))), d=nn.Conv2d(8, 8, 3, groups=8)), 16),
    "grouped": (lambda: Chain(lambda m, x: m["g"](F.relu(x)), g=nn.Conv2d(8, 8, 3, groups=2)), 16),
    "transposed": (lambda: Chain(lambda m, x: m["t"](F.relu(x)), t=nn.ConvTranspose2d(8, 8, 2, 2, groups=4)), 16),
    "residual": (lambda: Chain(lambda m, x: F.relu(x + m["b"](m["a"](F.relu(x)))), a=nn.Conv2d(8, 6, 1), b=nn.Conv2d(6, 8, 1)), 14),
    "several readers": (lambda: Chain(lambda m, x: m["a"](x) - m["b"](x), a=nn.Conv2d(8, 8, 1), b=nn.Conv2d(8, 8, 1)), 16),
    "concatenation": (lambda: Chain(lambda m, x: torch.cat([x, m["a"](x)], 1), outer=12, a=nn.Conv2d(8, 4, 1)), 12),
    "slices": (lambda: Chain(_sliced, a=nn.Conv2d(4, 4, 1)), 12),
    "shuffle": (lambda: Chain(lambda m, x: F.channel_shuffle(x.relu(), 2)), 8),
    "a gate": (lambda: Chain(lambda m, x: x * torch.sigmoid(m["g"](x.mean((2, 3), keepdim=True))), g=nn.Conv2d(8, 8, 1)), 8),
    "flatten": (lambda: Chain(lambda m, x: m["l"](F.adaptive_avg_pool2d(x, 2).flatten(1)), l=nn.Linear(32, 5)), 8),
    "mean": (lambda: Chain(lambda m, x: m["l"](x.relu().mean((2, 3))), l=nn.Linear(8, 5)), 8),
    "layer norm": (
        lambda: Chain(lambda m, x: m["l"](m["n"](x.flatten(2).transpose(1, 2)).relu()), n=nn.LayerNorm(8), l=nn.Linear(8, 5)),
        8,
    ),
    "an attention's values": (lambda: Chain(_attended, q=nn.Linear(8, 8), v=nn.Linear(8, 8), o=nn.Linear(8, 5)), 16),
    "a batch norm alone": (lambda: Chain(lambda m, x: F.relu(m["n"](F.relu(x))), n=nn.BatchNorm2d(8)), 8),
}
STOPS: dict[str, Callable[[], nn.Module]] = {
    "what is summed over": lambda: Chain(lambda m, x: (x.flatten(2) @ x.flatten(2).abs().transpose(1, 2)).unsqueeze(2)),
    "a limit": lambda: Chain(lambda m, x: F.relu6(x)),
    "another function": lambda: Chain(lambda m, x: F.silu(x)),
    "a constant": lambda: Chain(lambda m, x: x + 1),
    "an output": lambda: Chain(lambda m, x: x.flatten(1)),
    "a float operator": lambda: Chain(lambda m, x: torch.fft.fft2(x).real),
    "its own product": lambda: Chain(lambda m, x: x * x),
    "channels that are mixed": lambda: Chain(lambda m, x: x.transpose(1, 2).contiguous().mean(1, keepdim=True).expand(-1, 8, -1, -1)),
}

Body = Callable[[nn.Module, Tensor], Tensor]


class Between(nn.Module):
    """Something between two layers, `a` and `c`, of whose channels the first gives `given`."""

    def __init__(self, body: Body, a: nn.Module, c: nn.Module) -> None:
        super().__init__()
        self.a, self.c, self.body = a, c, body
        with torch.no_grad():
            spread = torch.exp2(torch.arange(float(len(a.weight))) % 7 - 3)  # type: ignore[arg-type]
            a.weight.mul_(spread.reshape(-1, *[1] * (a.weight.dim() - 1)))  # type: ignore[operator,union-attr]
            a.bias.mul_(spread)  # type: ignore[operator,union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.c, self.a(x))


def convs(read: int, written: int = 4, kernel: int = 1) -> Callable[[], tuple[nn.Module, nn.Module]]:
    return lambda: (nn.Conv2d(3, written, 3), nn.Conv2d(read, 8, kernel, padding=kernel // 2))


def lines(read: int) -> Callable[[], tuple[nn.Module, nn.Module]]:
    return lambda: (nn.Linear(12, 6), nn.Linear(read, 3))


IMAGE, TABLE, ROWS, SOUND, VOLUME = (4, 3, 8, 8), (8, 12), (4, 6, 12), (4, 3, 9), (2, 3, 5, 5, 5)
# What lies between, the layers, the shape of the input, and how many labels there are besides 0.
BETWEEN: dict[str, tuple[Body, Callable[[], tuple[nn.Module, nn.Module]], tuple[int, ...], int]] = {
    "option A": (lambda c, h: F.relu(c(h) + F.pad(h, (0, 0, 0, 0, 2, 2))), convs(4, kernel=3), IMAGE, 0),
    "padded channels": (lambda c, h: c(F.pad(h, (0, 0, 0, 0, 1, 1))), convs(6), IMAGE, 4),
    "padded channels and a relu": (lambda c, h: c(F.relu(F.pad(h, (0, 0, 0, 0, 0, 2)))), convs(6), IMAGE, 4),
    "padded everywhere": (lambda c, h: c(F.pad(h, (1, 0, 0, 1, 2, 0))), convs(6), IMAGE, 4),
    "padded by one": (lambda c, h: c(F.pad(h, (0, 0, 0, 0, 1, 1), value=1.0)), convs(6), IMAGE, 0),
    "padded features": (lambda c, h: c(F.pad(h, (0, 2))), lines(8), TABLE, 6),
    "padded steps": (lambda c, h: c(F.pad(h, (0, 0, 1, 0))[:, :-1]), lines(6), ROWS, 6),
    "replicated features": (lambda c, h: c(F.pad(h, (1, 1), "replicate")), lines(8), ROWS, 6),
    "reflected features": (lambda c, h: c(F.pad(h, (2, 1), "reflect")), lines(9), ROWS, 6),
    "features wrapped around": (lambda c, h: c(F.pad(h, (2, 0), "circular")), lines(8), ROWS, 6),
    "pooled features": (lambda c, h: c(F.avg_pool1d(h, 2)), lines(3), ROWS, 0),
    "largest features": (lambda c, h: c(F.max_pool1d(F.relu(h), 2)), lines(3), ROWS, 0),
    "adaptive features": (lambda c, h: c(F.adaptive_avg_pool1d(h, 3)), lines(3), ROWS, 0),
    "resized features": (lambda c, h: c(F.interpolate(h, scale_factor=2)), lines(12), ROWS, 0),
    "cropped channels": (lambda c, h: c(F.pad(h, (0, 0, 0, 0, -1, 0))), convs(3), IMAGE, 4),
    "channels cropped by a slice": (lambda c, h: c(h[:, 1:]), convs(3), IMAGE, 4),
    "a residual of cropped channels": (lambda c, h: c(h)[:, :4] + F.pad(h, (0, 0, 0, 0, 2, -2)), convs(4), IMAGE, 6),
    "pooled channels": (lambda c, h: c(F.max_pool3d(h.unsqueeze(1), (2, 1, 1)).squeeze(1)), convs(2), IMAGE, 0),
    "responses": (lambda c, h: c(F.local_response_norm(h, 3)), convs(4), IMAGE, 0),
    "zeros beside": (lambda c, h: F.relu(c(h) + torch.cat([h, torch.zeros_like(h)], 1)), convs(4), IMAGE, 0),
    "a padded gate": (lambda c, h: c(h) * F.pad(h, (0, 0, 0, 0, 2, 2)), convs(4), IMAGE, 0),
    "turned around": (lambda c, h: c(h.flip(1)), convs(4), IMAGE, 0),
    "rolled": (lambda c, h: c(h.roll(1, 1)), convs(4), IMAGE, 0),
    "shuffled": (lambda c, h: c(F.channel_shuffle(h, 2)), convs(4), IMAGE, 4),
    "padded sound": (lambda c, h: c(F.pad(h, (0, 0, 1, 1))), lambda: (nn.Conv1d(3, 4, 3), nn.Conv1d(6, 2, 1)), SOUND, 4),
    "padded volume": (lambda c, h: c(F.pad(h, (0, 0) * 3 + (2, 0))), lambda: (nn.Conv3d(3, 4, 3), nn.Conv3d(6, 2, 1)), VOLUME, 4),
    "padded pixels": (lambda c, h: c(F.max_pool2d(F.pad(h, (1, 1, 1, 1)), 2)), convs(4), IMAGE, 4),
}


def image(seed: int = 0, items: int = 4) -> Tensor:
    return torch.randn(items, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def made(build: Callable[[], nn.Module], **options: Any) -> fx.GraphModule:
    torch.manual_seed(0)
    return fxq.prepare(build().eval(), image(), **options)


def real(prepared: nn.Module, x: Tensor) -> Tensor:
    fxq.set_state(prepared, "float")
    with torch.no_grad():
        return prepared(x)


def between(name: str, target: str = "nash-e") -> tuple[fx.GraphModule, list[Tensor]]:
    """A network of BETWEEN, prepared, and its batches."""
    body, layers, shape, _ = BETWEEN[name]
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(3)]
    return fxq.prepare(Between(body, *layers()).eval(), batches[0], target), batches


def misshapen(labels: Channels) -> list[str]:
    """Tensors whose labels are not of their shape."""
    shapes = {node: result.shape[1:] for node in labels.tensors if isinstance(result := fact(node), TensorFact)}
    return [
        node.name
        for node, shape in shapes.items()
        if len(shape) != labels.tensors[node].dim()
        or any(label not in (1, size) for label, size in zip(labels.tensors[node].shape, shape, strict=True))
    ]


@pytest.mark.sweep(11)
@pytest.mark.parametrize("name", [*PASSES, *BETWEEN])
def test_factors_of_any_size_leave_the_float_function_its_bits(name: str) -> None:
    if name in PASSES:
        prepared, x, labels = made(PASSES[name][0]), image(1), PASSES[name][1]
    else:
        (prepared, (x, *_)), labels = between(name), BETWEEN[name][3]
    prepared.requires_grad_(False)  # PyTorch's matmul folds a batch for a weight that requires a gradient, and sums in another order
    before = real(prepared, x)
    of_channels = channels(prepared)
    drawn = torch.randint(-5, 6, (of_channels.number,), generator=torch.Generator().manual_seed(2))
    drawn[0] = 0
    multiply(prepared, of_channels, drawn)
    assert not misshapen(of_channels)
    assert of_channels.number - 1 == labels
    assert torch.equal(exponents(prepared, of_channels), drawn)
    assert torch.equal(real(prepared, x), before)
    described = [operator for operator in quantized_operators(prepared).values() if operator.factors and operator.factors.description]
    assert described or name in BETWEEN


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["option A", "padded features", "reflected features", "cropped channels", "padded sound"])
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_networks_with_factors_are_calibrated_and_equal_in_every_form(name: str, target: str) -> None:
    prepared, batches = between(name, target)
    fxq.calibrate(prepared, batches)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batches[0])


@pytest.mark.parametrize("name", STOPS)
def test_factors_stop_where_the_function_would_change(name: str) -> None:
    prepared = made(STOPS[name])
    assert not channels(prepared).given[_first(prepared)].any()


def test_a_scale_that_is_given_is_of_the_channels_as_they_are() -> None:
    config = fxq.QConfigMapping().set_module_name("first", fxq.QConfig(fxq.ActivationConfig(scale=0.05)))
    prepared = made(PASSES["relu"][0], qconfig=config)
    assert not channels(prepared).given[_first(prepared)].any()
    prepared = made(PASSES["relu"][0])
    fxq.set_qparams(prepared, {"first": 0.05})
    fxq.tuning.equalize(prepared, [image()])
    assert not quantized_operators(prepared)["first"].factors.active  # type: ignore[union-attr]


def _first(prepared: fx.GraphModule) -> fx.Node:
    return next(node for node in prepared.graph.nodes if node.name == "first")


# ---- what is chosen ----------------------------------------------------------------------------------------------------
class Rescaled(nn.Module):
    """An inverted residual and a head, with channels of very different ranges, which the layers after them undo."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.stem, self.widen, self.widened = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.filter, self.filtered = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24)
        self.narrow, self.head = nn.Conv2d(24, 8, 1), nn.Linear(8, 5)
        for norm, after in ((self.widened, self.filter), (self.filtered, self.narrow)):
            factors = 2.0 ** torch.randint(-bits, bits + 1, (24,))
            with torch.no_grad():
                norm.weight.mul_(factors)
                norm.bias.uniform_(-0.5, 0.5).mul_(factors)
                after.weight.div_(factors.reshape((-1, 1, 1, 1) if after.groups > 1 else (1, -1, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + self.narrow(F.relu(self.filtered(self.filter(F.relu(self.widened(self.widen(x)))))))
        return self.head(x.mean((2, 3)))


def rescaled(bits: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Rescaled(bits).eval()


def sqnr(model: nn.Module, prepared: nn.Module) -> float:
    with torch.no_grad():
        return networks.sqnr(model(image(5, 32)), prepared(image(5, 32)))


def calibrated(model: nn.Module, target: str = "bayes-e", per_channel: bool = True, **options: Any) -> fx.GraphModule:
    qconfig = fxq.QConfig(weight=fxq.WeightConfig(per_channel=per_channel))
    return contract.calibrated(model, [image(seed) for seed in range(3)], target, qconfig, **options)


@networks.copies
def equalized() -> fx.GraphModule:
    """The rescaled network, calibrated with factors."""
    return calibrated(rescaled())


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "per_channel"), [("bayes-e", True), ("bayes-e", False), ("x86", True)])
def test_channels_of_different_ranges_cost_nothing_any_more(target: str, per_channel: bool) -> None:
    networks = [(rescaled(4, seed), rescaled(0, seed)) for seed in (0, 1)]
    plain = statistics.fmean(sqnr(even, calibrated(even, target, per_channel)) for _, even in networks)
    without = statistics.fmean(sqnr(model, calibrated(model, target, per_channel, equalize=False)) for model, _ in networks)
    decibels = statistics.fmean(sqnr(model, calibrated(model, target, per_channel)) for model, _ in networks)
    assert without < plain - 6
    assert decibels > (plain - 2 if per_channel else without + 12)


def test_channels_of_like_ranges_are_left_alone() -> None:
    model = rescaled(0)
    one, other = calibrated(model), calibrated(model, equalize=False)
    assert fxq.explain(one) == fxq.explain(other)
    assert "equalized" not in fxq.explain(one)


@pytest.mark.parametrize(("reach", "multiplied"), [(0.49, False), (0.3, True)])
def test_factors_are_worth_it_for_channels_that_reach_further_too(reach: float, multiplied: bool) -> None:
    first, last = nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 2, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, reach])).reshape(3, 3, 1, 1))
        last.weight.copy_(torch.tensor([[0.3, 0.3, 1.0], [0.3, 0.3, -1.0]]).reshape(2, 3, 1, 1))
    prepared = fxq.prepare(nn.Sequential(first, nn.ReLU(), last).eval(), image())
    drawn = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    drawn[0, :, 0, 0] = 1
    fxq.tuning.equalize(prepared, [drawn], show_progress=False)
    outputs = quantized_operators(prepared)["_0"].factors.outputs  # type: ignore[union-attr]
    assert (int(outputs[2] - outputs[0]) > 0) == multiplied


@pytest.mark.parametrize("bits", [0, 4], ids=["even", "apart"])
def test_a_few_outliers_do_not_say_how_far_apart_channels_are(bits: int) -> None:
    model, quiet = rescaled(bits), image(0, 16)
    one, other = (fxq.prepare(model, image()) for _ in range(2))
    outlier = quiet.clone()
    outlier[3] *= torch.tensor([64.0, 1.0, 1.0]).reshape(3, 1, 1)  # one input channel alone, which the others follow in their shares
    fxq.tuning.equalize(one, [outlier], show_progress=False)
    fxq.tuning.equalize(other, [torch.cat((quiet[:3], quiet[4:]))], show_progress=False)
    for name, operator in quantized_operators(one).items():
        factors, wanted = operator.factors, quantized_operators(other)[name].factors
        assert (factors is None) == (wanted is None)
        assert factors is None or torch.equal(factors.outputs, wanted.outputs)  # type: ignore[union-attr]
    assert any(operator.factors is not None and operator.factors.active for operator in quantized_operators(one).values()) == bool(bits)


def test_the_contract_holds_with_factors_and_parameters_are_the_users(tmp_path: Path) -> None:
    model, prepared = rescaled(), equalized()
    integer = fxq.convert(prepared)
    assert "equalized" in fxq.explain(prepared)
    assert "equalized" in fxq.explain(integer)
    assert fxq.verify(prepared, integer, [image(7)])
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [image(7)])
    for name, value in model.state_dict().items():
        assert torch.equal(prepared.state_dict()[name], value)
    with torch.no_grad():
        expected = prepared(image(7))
    contract.assert_train_is_validate(prepared, image(7))
    fxq.set_state(prepared, "validate")
    loaded = fxq.load(fxq.save(prepared, tmp_path / "model.fxq"))
    fxq.set_state(loaded, "validate")
    other = fxq.prepare(rescaled(0), image())
    other.load_state_dict(prepared.state_dict())
    fxq.set_state(other, "validate")
    with torch.no_grad():
        assert torch.equal(loaded(image(7)), expected)
        assert torch.equal(other(image(7)), expected)


def test_training_moves_the_users_parameters_and_statistics() -> None:
    model, prepared = rescaled(), equalized()
    to_train(prepared)(image(7, 32)).square().mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in prepared.parameters())
    model.train()
    model(image(7, 32))
    for name in ("widened.running_mean", "widened.running_var", "filtered.running_mean"):
        wanted, actual = model.state_dict()[name], prepared.state_dict()[name]
        assert float((wanted - actual).norm() / wanted.norm()) < 0.3  # a factor of 2 would be 1


def test_observations_bring_their_factors_along(tmp_path: Path) -> None:
    model, first = rescaled(), equalized()
    seen = fxq.load(fxq.save(fxq.observers.observations(first), tmp_path / "seen.fxq"))
    assert seen == fxq.observers.observations(first)
    again = fxq.prepare(model, image(), observations=seen)
    assert fxq.verify(first, fxq.convert(again), [image(7)])
    wide = fxq.prepare(model, image(), "nash-e", fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int16")), observations=seen)
    assert sqnr(model, wide) > sqnr(model, first) + 3
    apart = fxq.prepare(model, image(), qconfig=fxq.QConfigMapping().set_module_name("filter", None), observations=seen)
    with pytest.raises(fxq.errors.NotCalibrated):
        fxq.convert(apart)
    fxq.calibrate(apart, [image()], only_missing=True, show_progress=False)
    assert sqnr(model, apart) > 6


def test_all_batches_may_decide_and_only_before_calibration() -> None:
    model = rescaled()
    prepared = fxq.tuning.equalize(fxq.prepare(model, image()), [image(seed) for seed in range(3)], show_progress=False)
    factors = quantized_operators(prepared)["widen"].factors
    assert factors is not None
    assert factors.active
    before = factors.outputs.clone()
    fxq.calibrate(prepared, [image(seed) for seed in range(3)], show_progress=False)
    assert torch.equal(factors.outputs, before)
    with pytest.raises(fxq.errors.ConfigurationError, match="any more"):
        fxq.tuning.equalize(prepared, [image()])
