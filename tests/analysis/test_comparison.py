"""Two forms of a model compared: what is measured is right, and for models that were broken on purpose advice names the fault."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.networks import Network, members

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs


class Digits(nn.Module):
    """A classifier of 8×8 digits: convolutions with batch norms, a residual, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.head = nn.Linear(24 * 16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = x + self.body(x)
        return self.head(self.down(x).flatten(1))


@members(lambda hidden, after: dict(
    embed=nn.Linear(8, 16), mix=nn.Linear(16, 16), after=after, head=nn.Linear(16, 10),
    mask=torch.where(torch.arange(8) < 6, 0.0, hidden).reshape(8, 1),
))  # fmt: skip
def Rows(self, image: Tensor) -> Tensor:
    """The rows of a digit as tokens, of which a number that is added hides the last two from the maximum over them."""
    tokens = torch.tanh(self.embed(image.squeeze(1)))
    return self.head(self.after(self.mix(tokens) + self.mask).amax(1))


@members(lambda: dict(
    embed=nn.Linear(8, 16), qkv=nn.Linear(16, 48), norm=nn.LayerNorm(16), head=nn.Linear(16, 10),
    mask=torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -1e9),
))  # fmt: skip
def Attention(self, image: Tensor) -> Tensor:
    """The rows of a digit attend to each other, with a mask in front of the softmax."""
    x = self.embed(image.squeeze(1))
    q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
    return self.head((x + torch.softmax(q @ k.transpose(1, 2) / 4 + self.mask, -1) @ v).mean(1))


@members(
    lambda: dict(embed=nn.Linear(8, 16), head=nn.Linear(16, 10), layer=nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
)
def Encoder(self, image: Tensor) -> Tensor:
    """The rows of a digit through PyTorch's own layer of a transformer, whose attention is one module."""
    return self.head(self.layer(self.embed(image.squeeze(1))).mean(1))


@members(lambda: dict(
    image=nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6()), vector=nn.Linear(5, 8), head=nn.Linear(8, 10),
))  # fmt: skip
def Two(self, image: Tensor, vector: Tensor) -> Tensor:
    """Two inputs, of which the second, a vector, is added to all places of the first one's features."""
    return self.head((self.image(image) + self.vector(vector)[:, :, None, None]).mean((2, 3)))


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    raw = load_digits()
    return torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(raw.target)


def batches(count: int = 2) -> list[Tensor]:
    return list(digits()[0][: 32 * count].split(32))


def trained(model: nn.Module, steps: int = 12) -> nn.Module:
    """The model after some steps of gradient descent: live activations, and batch norms with the statistics of the data."""
    images, labels = digits()
    for step in range(steps):
        at = slice(64 * step, 64 * step + 64)
        F.cross_entropy(model.train()(images[at]), labels[at]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return model.eval()


@functools.cache
def network(kind: Callable[[], nn.Module] = Digits) -> nn.Module:
    torch.manual_seed(0)
    return trained(kind())


@functools.cache
def compiled(kind: Callable[[], nn.Module] = Digits, target: str = "nash-e") -> fxq.results.Result:
    return quantized(network(kind), target=target)


def quantized(model: nn.Module, **options: Any) -> fxq.results.Result:
    """The model in every form, of which the float one is traced already."""
    return fxq.quantize(fxq.trace(model, batches(1)[0], check=False), batches(), **{"target": "nash-e", **options})


def broken(change: Callable[[Any], None]) -> nn.Module:
    """The trained network with something changed."""
    model = copy.deepcopy(network())
    with torch.no_grad():
        change(model)
    return model


def first(comparison: fxq.results.Comparison) -> fxq.results.Advice:
    assert comparison.advice, str(comparison)
    return comparison.advice[0]


# ---- what is measured ------------------------------------------------------------------------------------------------
def test_figures_are_those_of_the_tensors_recorded_in_both_forms(tmp_path: Path) -> None:
    """Against the definitions, from the tensors of all batches at once."""
    result, several = compiled(), batches(3)
    comparison = fxq.compare(result.prepared, result.export(tmp_path / "model.onnx"), several, states=("float", None))
    left = list(fxq.inspect.record(result.prepared, several, "quantized", real=True, state="float"))
    right = list(fxq.inspect.record(tmp_path / "model.onnx", several, "quantized", real=True))
    assert set(comparison) == set(left[0])
    assert comparison.batches == 3
    for name, layer in comparison.items():
        one, other = (torch.cat([values[name] for values in side]).double() for side in (left, right))
        noise = (one - other).square()
        scale = fxq.qparams(result.prepared)[name]
        assert layer.mse == pytest.approx(float(noise.mean()))
        assert layer.sqnr == pytest.approx(float(10 * torch.log10(one.square().sum() / noise.sum())))
        assert layer.cosine == pytest.approx(float(F.cosine_similarity(one.flatten(), other.flatten(), 0)))
        assert layer.steps == pytest.approx(float((one - other).abs().max()) / scale)
        exact = torch.round(one / scale).clamp(-128, 127)
        outside = (one / scale < -128.5) | (one / scale > 127.5)
        assert layer.clipped == float(outside.double().mean())
        assert layer.zeroed == pytest.approx(float(((exact == 0) & (one != 0)).sum() / (one != 0).sum()))
        assert layer.own == pytest.approx(float(10 * torch.log10(one.square().sum() / (exact * scale - one).square().sum())))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Digits, Attention])
def test_every_form_is_matched_with_every_other(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The float model's tensors are found under the names that they have before fusion; equal forms are equal."""
    result = compiled(kind)
    path = result.export(tmp_path / "model.onnx")
    forms = [result.prepared, result.integer, path]
    against_float = [fxq.compare(result.float, form, batches(1), advice=False) for form in forms]
    for actual in against_float:
        assert all(layer.sqnr > 15 for layer in (*actual.values(), *actual.outputs)), str(actual)
        assert {name: layer.sqnr for name, layer in actual.items()} == {name: against_float[1][name].sqnr for name in actual}
    for one, other in zip(forms, [*forms[1:], forms[0]], strict=True):
        actual = fxq.compare(one, other, batches(1))
        assert actual
        assert all(layer.mse == 0 for layer in (*actual.values(), *actual.outputs))
        assert not actual.advice
    if kind is Digits:
        references = {name: layer.reference for name, layer in against_float[2].items()}
        assert references == {"image_quantize": "image", "stem_0": "stem_2", "body_0": "body_2", "add": "add", "down_0": "down_2",
                              "flatten": "flatten", "head": "head"}  # fmt: skip


def test_channels_that_equalization_multiplied_are_multiplied_for_the_comparison(tmp_path: Path) -> None:
    def spread(model: Any) -> None:
        model.body[1].weight[2:5] *= 16
        model.down[0].weight[:, 2:5] /= 16

    class Chain(Digits):
        def forward(self, image: Tensor) -> Tensor:
            return self.head(self.down(self.body(self.stem(image))).flatten(1))

    torch.manual_seed(0)
    model = trained(Chain(), 5)
    with torch.no_grad():
        spread(model)
    result = quantized(model)
    assert "equalized" in fxq.explain(result.prepared)
    loaded = fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))
    for form in (result.prepared, loaded, result.export(tmp_path / "model.onnx")):
        comparison = fxq.compare(result.float, form, batches(1), advice=False)
        assert min(layer.sqnr for layer in comparison.values()) > 20, str(comparison)


# ---- models that are broken on purpose -------------------------------------------------------------------------------
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("kind", "target"), [(Digits, "x86"), (Attention, "nash-e")])
def test_a_healthy_model_has_no_advice(kind: Callable[[], nn.Module], target: str) -> None:
    comparison = compiled(kind, target).compare(batches())
    assert not comparison.advice, str(comparison)
    assert "no advice" in str(comparison)


@pytest.mark.parametrize(
    ("layer", "factor", "rule", "error"),
    [
        ("stem_0", 1 / 8, "scale_too_small", "truncation"),
        ("head", 1 / 8, "scale_too_small", "truncation"),
        ("down_0", 64, "scale_too_large", "rounding"),
    ],
)
def test_a_scale_that_does_not_fit_is_named(layer: str, factor: float, rule: str, error: str) -> None:
    prepared = copy.deepcopy(compiled().prepared)
    fxq.set_qparams(prepared, {layer: fxq.qparams(prepared)[layer] * factor})
    comparison = fxq.compare(compiled().float, fxq.convert(prepared), batches())
    assert (first(comparison).layer, first(comparison).rule, comparison[layer].error) == (layer, rule, error)
    assert "calibrate again" in first(comparison).cure
    assert rule == "scale_too_large" or comparison.worst(1)[0].name in (layer, "flatten")  # which has the scale of what it reads


@pytest.mark.parametrize(("factor", "ends"), [(8, "-8 to 8"), (1 / 32, "-0.03125 to 0.03125")])
def test_inputs_of_another_range_than_calibrations_are_named(factor: float, ends: str) -> None:
    comparison = compiled().compare([factor * batch for batch in batches()])
    assert (first(comparison).layer, first(comparison).rule) == ("image_quantize", "input_range")
    assert f"input image has values from {ends}" in first(comparison).cause


@pytest.mark.sweep(2)
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("factor", [8, 60])
def test_the_one_of_two_inputs_that_is_not_like_calibrations_is_named(wrong: int, factor: float) -> None:
    """Scales after the wrong input come from other inputs: advice names neither their clipping nor more bits."""
    result, pairs = two()
    comparison = result.compare([tuple(value * factor if at == wrong else value for at, value in enumerate(pair)) for pair in pairs])
    expected = ("image_quantize", "vector_quantize")[wrong], "input_range"
    assert (first(comparison).layer, first(comparison).rule) == expected, str(comparison)
    assert len(comparison.advice) == 1


@functools.cache
def two() -> tuple[fxq.results.Result, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    pairs = [(batch, torch.randn(32, 5)) for batch in batches()]
    model = Two()
    for pair in pairs * 4:
        model.train()(*pair)
    return fxq.quantize(model.eval(), pairs, target="nash-e"), pairs


@pytest.mark.sweep(3)
@pytest.mark.parametrize("what", ["running_mean", "running_var", "both"])
@pytest.mark.parametrize("layer", ["stem", "body", "down"])
def test_a_batch_norm_without_statistics_is_named(layer: str, what: str) -> None:
    """One operator is reported: the operators after it read its wrong result."""

    def forget(model: Any) -> None:
        norm = model.get_submodule(layer)[1]
        if what != "running_var":
            norm.running_mean.zero_()
        if what != "running_mean":
            norm.running_var.fill_(1)

    comparison = quantized(broken(forget)).compare(batches())
    about_statistics = [each for each in comparison.advice if each.rule == "batch_norm_statistics"]
    assert [each.layer for each in about_statistics] == [f"{layer}_1"], str(comparison)
    assert comparison.advice[0] is about_statistics[0]
    assert "state_dict" in about_statistics[0].cure


@pytest.mark.nightly
@pytest.mark.parametrize(("after", "hidden"), [(nn.ReLU(), -1e9), (nn.Identity(), -1e6)])
def test_a_mask_that_sets_a_scale_is_named(after: nn.Module, hidden: float) -> None:
    model = trained(Rows(hidden, after))
    comparison = quantized(model).compare(batches())
    assert (first(comparison).layer, first(comparison).rule) == ("add", "masked")
    assert "torch.where" in first(comparison).cure
    cured = trained(Rows(-4.0, after), 0)
    cured.load_state_dict({**model.state_dict(), "mask": cured.mask})
    assert not quantized(cured).compare(batches()).advice


def test_a_tensor_with_nan_is_named() -> None:
    class Rooted(Digits):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(torch.sqrt(image))

    model = Rooted()
    model.load_state_dict(network().state_dict())
    result = fxq.quantize(model.eval(), [batch.abs() + 0.1 for batch in batches()], target="nash-e")
    comparison = result.compare(batches())
    assert (first(comparison).layer, first(comparison).rule) == ("sqrt", "no_numbers")


@members(lambda: dict(stem=nn.Linear(6, 12), up=nn.Linear(12, 24), down=nn.Linear(24, 12), head=nn.Linear(12, 4), added=torch.zeros(8, 1)))
def Residuals(self, x: Tensor) -> Tensor:
    """A stream of 12 channels with two branches, and numbers that are added to it."""
    x = self.stem(x)
    x = torch.tanh(x + self.added)
    x = x + self.down(torch.relu(self.up(x)))
    return self.head(x.mean(1))


def residuals() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Residuals().eval(), [torch.randn(16, 8, 6) for _ in range(2)]


def test_of_outlying_channels_the_first_is_named() -> None:
    model, batches = residuals()
    with torch.no_grad():
        model.down.weight[3] *= 60
    result = fxq.quantize(model, batches, target="nash-e")
    advice = result.compare(batches).advice
    assert (advice[0].layer, advice[0].rule) == ("down", "outlier_channel")
    assert {each.rule for each in advice} == {"outlier_channel"}


def test_a_scale_too_small_beside_a_mask_is_no_mask() -> None:
    model, batches = residuals()
    model.added[-1] = -400.0
    prepared = copy.deepcopy(fxq.quantize(model, batches, target="nash-e").prepared)
    (name,) = (each for each in fxq.qparams(prepared) if each.startswith("add") and "1" not in each)
    fxq.set_qparams(prepared, {name: fxq.qparams(prepared)[name] / 512})
    comparison = first(fxq.compare(model, fxq.convert(prepared), batches))
    assert (comparison.layer, comparison.rule) == (name, "scale_too_small")


@pytest.mark.parametrize("function", [F.silu, F.hardswish])
def test_what_no_reader_tells_apart_is_no_error(function: Callable[[Tensor], Tensor]) -> None:
    layer = nn.Conv2d(1, 4, 1)
    nn.init.constant_(layer.weight, -30.0)
    nn.init.constant_(layer.bias, 5.0)
    model, x = Network(lambda s, x: function(s.layer(x)), layer=layer).eval(), digits()[0][:16]
    prepared = fxq.calibrate(fxq.prepare(model, x, "bayes-e"), [x])
    row = fxq.compare(model, prepared, x)["layer"]
    assert row.clipped == 0
    assert row.own > 35
