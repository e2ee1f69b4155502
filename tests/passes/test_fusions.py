"""The pictures in the classes of fusions: the graph in `before` becomes the one in `after`; and factors of channels after a layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends, passes
from fxquant.api import preparing
from fxquant.passes.activation import Clamp
from fxquant.passes.batchnorm import BatchNorm
from fxquant.passes.layerscale import LayerScale, NormScale
from fxquant.passes.padding import Padding
from fxquant.passes.residual import Residual
from fxquant.passes.rewriting import Fusion
from fxquant.pipeline import Context
from fxquant.quantization.spec import QConfigMapping
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, members

Shapes = dict[str, tuple[int, ...]]
IMAGE, KERNEL = (2, 4, 8, 8), (4, 4, 1, 1)
FUSIONS = (BatchNorm, Clamp, LayerScale, NormScale, Padding, Residual)
INPUTS = {key: {"x": IMAGE} for key in FUSIONS} | {Residual: {"x": IMAGE, "r": IMAGE}}
INPUTS |= {LayerScale: {"x": (2, 4)}, NormScale: {"x": (2, 4), "r": (2, 4)}}
HELD = {key: {name: (4,) for name in "bgt"} | {"w": (4, 4) if key in (LayerScale, NormScale) else KERNEL} for key in FUSIONS}
BATCHES = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(1)).split(8)


def parsed(picture: str, inputs: Shapes, held: Shapes) -> fx.GraphModule:
    """Return the graph that a picture shows, with its inputs and parameters; every result has the shape of the input."""
    first = [f"%{name} = {'input' if name in inputs else f'[{name}]'}  f32{[*shape]}" for name, shape in {**inputs, **held}.items()]
    first += ["%bn = BatchNorm2d[bn]"] if "%bn" in picture else []
    shown = [f"{line}  f32{[*inputs['x']]}" if "(" in line else line for line in picture.splitlines()]
    return fxq.inspect.parse("\n".join([*first, *shown]), {"bn": nn.BatchNorm2d(4)} | {name: torch.rand(held[name]) for name in held})


def result(gm: fx.GraphModule) -> Any:
    """Return what a graph returns, as nested calls, whatever its nodes are called."""

    def value(node: fx.Node) -> Any:
        if node.op != "call_function":
            return node.target
        return node.target, fx.map_arg(node.args, value), tuple(fx.map_arg(node.kwargs, value).items())

    return value(next(iter(gm.graph.find_nodes(op="output"))).args[0])


@pytest.mark.quick
@pytest.mark.parametrize("fusion", INPUTS)
def test_the_graph_before_becomes_the_graph_after(fusion: type[Fusion]) -> None:
    before, after = (parsed(picture, INPUTS[fusion], HELD[fusion]) for picture in (fusion.before, fusion.after))
    assert result(before) != result(after)
    assert fusion(before, Context(backends.get("bayes-e"), QConfigMapping())).run() == 1
    assert result(before) == result(after)


def test_every_fusion_has_a_picture() -> None:
    assert {*Fusion.__subclasses__()} == {*INPUTS}


# ---- zeros before a convolution: they are its padding ----------------------------------------------------------------
PADDED: dict[str, Callable[[], nn.Module]] = {
    "one dimension": lambda: Network(
        lambda s, x: s.b(F.relu(s.a(F.pad(x.flatten(2), (4, 0))))), a=nn.Conv1d(3, 6, 3, dilation=2), b=nn.Conv1d(6, 4, 4, padding=1)
    ),
    "groups": lambda: Network(
        lambda s, x: s.b(F.pad(F.relu(s.a(F.pad(x, (1, 1, 2, 2)))), (0, 1, 2, 3))), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 3, 1, 1, 1, 4)
    ),
    "volumes": lambda: Network(lambda s, x: s.a(F.pad(x.unsqueeze(2), (1, 1, 0, 1, 1, 0))), a=nn.Conv3d(3, 4, (2, 3, 3))),
    "several": lambda: Network(
        lambda s, x: s.a(p := F.pad(F.relu(s.z(x)), (1, 1, 0, 2))) + s.b(p),
        z=nn.Conv2d(3, 4, 1),
        a=nn.Conv2d(4, 4, 3),
        b=nn.Conv2d(4, 4, 3),
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
@pytest.mark.parametrize("name", PADDED)
def test_zeros_before_convolutions_are_their_padding_with_equal_bits(
    name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = PADDED[name]().eval()
    images = [torch.randn(count, 3, 6, 7) for count in (4, 2)]
    prepared, integer = compiled(network, images, target)
    assert "pad(" not in fxq.text(integer)
    contract.assert_contract(prepared, tmp_path / "model.onnx", images[0], integer=integer)
    monkeypatch.setattr(preparing, "PREPARE", tuple(step for step in passes.PREPARE if step.name != "padding.fuse"))
    _, apart = compiled(network, images, target)
    assert "pad(" in fxq.text(apart)
    assert torch.equal(apart(images[1]), integer(images[1]))


APART = {
    "crop": (lambda s, x: s.a(F.pad(x, (1, -1))), {}, "it pads channels or the batch, or crops"),
    "a maximum as well": (
        lambda s, x: (s.a(p := F.pad(x, (1, 1))), F.max_pool2d(p, 3)), {}, "%max_pool2d reads it as well, and has no padding of zeros",
    ),
    "a rule": (lambda s, x: s.a(s.z(x)), {nn.ZeroPad2d: fxq.QConfig()}, "the qconfig has a rule for it that is not about %a"),
    "limit": (lambda s, x: s.a(F.pad(x, (300, 300))), {}, "its padding is 300; bayes allows at most 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_zeros_that_stay_apart_say_why(name: str) -> None:
    forward, rules, because = APART[name]
    network = Network(forward, a=nn.Conv2d(3, 1, 3), z=nn.ZeroPad2d(1)).eval()
    prepared = fxq.prepare(network, torch.randn(2, 3, 6, 7), "bayes", fxq.QConfigMapping(types=rules))
    (row,) = fxq.inspect.not_fused(prepared)
    assert because in row.because


def test_a_pad_without_gradients_passes_none_on() -> None:
    network = Network(lambda s, x: s.b(F.pad(s.a(x).detach(), (1, 1, 1, 1))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 2, 3))
    prepared, _ = compiled(network.eval(), [torch.randn(2, 3, 6, 6)])
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared(torch.randn(2, 3, 6, 6)).sum().backward()
    gradients = {name: parameter.grad is not None for name, parameter in prepared.named_parameters()}
    assert (gradients["a.weight"], gradients["b.weight"]) == (False, True)


# ---- factors of channels after a layer: they are in its weight ------------------------------------------------------
@members(lambda: dict(
    stem=nn.Conv2d(3, 6, 3, padding=1), conv=nn.Conv2d(6, 6, 3, padding=1, groups=2), up=nn.Linear(6, 12),
    down=nn.Linear(12, 6, bias=False), last=nn.Linear(6, 6), normed=nn.Conv2d(6, 6, 1), norm=nn.BatchNorm2d(6), both=nn.Conv2d(6, 6, 1),
    of_conv=nn.Parameter(torch.linspace(-0.7, 1.3, 6).reshape(6, 1, 1)), of_linear=nn.Parameter(torch.linspace(0.2, 1.5, 6)),
    of_columns=nn.Parameter(torch.linspace(0.2, 1.5, 6)),
))  # fmt: skip
def Branches(self, x: Tensor) -> Any:
    """A branch of a convolution and one of linear layers, each with a factor for each channel; products with other operands."""
    x = self.stem(x)
    x = x + self.conv(x) * self.of_conv
    x = x.permute(0, 2, 3, 1)
    x = x + self.of_linear.abs() * self.down(self.up(x).relu())
    x = x.permute(0, 3, 1, 2)
    x = x + self.last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.of_conv
    both = self.both(x)
    return self.norm(self.normed(x)) * self.of_conv, both * self.of_conv + both, self.stem(x[:, :3]) * self.of_columns


def model() -> nn.Module:
    torch.manual_seed(0)
    return Branches().eval()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("bayes-e", "int8"), ("nash-e", "int16"), ("x86", "uint8")])
def test_layers_with_factors_hold_the_contract(target: str, dtype: str, tmp_path: Path) -> None:
    output = model()
    prepared, integer = compiled(output, BATCHES, target, fxq.QConfig(fxq.ActivationConfig(dtype)))
    products = [layer.name for layer in fxq.inspect.layers(prepared) if layer.operator == "mul"]
    assert len(products) == 3, "after a batch norm, of a layer with two users, and of columns"
    # With the factors and the addition.
    assert {"conv", "down"} <= {layer.name for layer in fxq.inspect.layers(prepared) if len(layer.fused) == 2}
    assert prepared.state_dict().keys() >= output.state_dict().keys()
    contract.assert_contract(prepared, tmp_path / "model.onnx", BATCHES[0], integer=integer)


def test_in_float_it_is_the_model_and_layers_are_compared_with_their_products() -> None:
    output = model()
    prepared, _ = compiled(output, BATCHES)
    fxq.set_state(prepared, fxq.State.FLOAT)
    for wanted, actual in zip(output(BATCHES[0]), prepared(BATCHES[0]), strict=True):
        torch.testing.assert_close(actual, wanted)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    actual = fxq.compare(output, prepared, BATCHES, advice=False)
    assert actual["conv"].reference == "add"
    assert actual["conv"].sqnr > 30
    assert actual["down"].sqnr > 30
    (moved,) = [layer.name for layer in fxq.inspect.layers(prepared) if layer.operator == "permute" and layer.fused]
    assert actual[moved].sqnr > 30
    assert "last" not in actual, "after a permutation the factors have been multiplied in already"


def test_both_are_trained_and_kept_in_files(tmp_path: Path) -> None:
    prepared, _ = compiled(model(), BATCHES)
    fxq.set_state(prepared, fxq.State.TRAIN)
    sum(output.square().sum() for output in prepared(BATCHES[0])).backward()
    for name in ("of_conv", "of_linear", "conv.weight", "conv.bias", "down.weight"):
        assert float(prepared.get_parameter(name).grad.abs().min()) > 0, name
    fxq.set_state(prepared, fxq.State.VALIDATE)
    fxq.save(prepared, tmp_path / "model.fxq")
    assert all(map(torch.equal, fxq.load(tmp_path / "model.fxq")(BATCHES[0]), prepared(BATCHES[0])))
    with torch.no_grad():
        prepared.of_conv.mul_(0)
        assert torch.equal(fxq.convert(prepared)(BATCHES[0])[0], prepared(BATCHES[0])[0])


# ---- constants of other columns: they cost no more than a batch norm of the same numbers ------------------------------
GAINS = torch.tensor([600.0, 400.0, 2.0, 1.0])
OF_LAYERS: dict[str, Any] = {  # of a layer's columns, which are 3 · GAINS + about GAINS
    "a quotient": lambda y, k: y / k,
    "normalized": lambda y, k: (y - 3 * k) / k,
    "by a sum": lambda y, k: (-3 * k + y) * k.reciprocal(),
    "addcmul": lambda y, k: torch.addcmul(-3 * k.sign(), y, 1 / k),
    "addcdiv": lambda y, k: torch.addcdiv(-3 * k.sign(), y, k),
    "twice a term": lambda y, k: torch.sub(y / k, k.sign(), alpha=3),
    "detached": lambda y, k: y.detach() / k - 3 * k.sign(),
}
OF_OTHERS: dict[str, Any] = {  # of columns near 1; compared at 16 bits, where the result's scale does not hide the constant's
    "a gain": lambda y, k: (torch.relu(y) + 0.1) * k,
    "a quotient": lambda y, k: (torch.relu(y) + 0.1) / (1 / k),
    "a numerator": lambda y, k: k / (torch.relu(y) + 0.5),
    "addcmul": lambda y, k: torch.addcmul(0 * torch.relu(y), torch.relu(y) + 0.1, k),
    "of two dimensions": lambda y, k: (torch.relu(y).unsqueeze(1) + 0.1) * torch.stack((k, k.flip(0))),
}


class Columns(nn.Module):
    def __init__(self, form: Any, k: Tensor, offset: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.linear = form, nn.Linear(8, 4, bias=bias)
        self.register_buffer("k", k)
        with torch.no_grad():
            self.linear.weight.mul_(GAINS[:, None] if offset else 1)
            if bias:
                self.linear.bias.copy_(offset * GAINS)

    def forward(self, x: Tensor) -> Any:
        return self.form(self.linear(x), self.k)


def least_decibels(network: nn.Module, x: Tensor, target: str, dtype: str, path: Path) -> float:
    """The decibels of the worst column, of a model that holds the contract."""
    prepared, integer = compiled(network, [x], target, fxq.QConfig(fxq.ActivationConfig(dtype)))
    contract.assert_validate_is_integer(prepared, integer, x)
    contract.assert_integer_is_onnx(integer, path, [(x,)])
    with torch.no_grad():
        wanted = network(x)
        error = integer(x) - wanted
    return float((10 * torch.log10(wanted.square().sum(0) / error.square().sum(0))).min())


@pytest.mark.sweep(8)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
@pytest.mark.parametrize("form", OF_LAYERS)
def test_constants_of_channels_after_a_layer_cost_nothing(form: str, target: str, tmp_path: Path) -> None:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    dtype = "uint8" if target == "x86" else "int8"
    assert least_decibels(Columns(OF_LAYERS[form], GAINS, 3.0), x, target, dtype, tmp_path / "model.onnx") > 33


def test_a_layer_without_a_bias_gets_the_term(tmp_path: Path) -> None:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    network = Columns(lambda y, k: y / GAINS + k, GAINS.sign() / 2, 3.0, bias=False)
    assert least_decibels(network, x, "bayes-e", "int8", tmp_path / "model.onnx") > 33


@pytest.mark.sweep(5)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e"])
@pytest.mark.parametrize("form", OF_OTHERS)
def test_a_constant_beside_sixteen_bits_is_as_fine_as_they_are(form: str, target: str, tmp_path: Path) -> None:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    network = Columns(OF_OTHERS[form], torch.tensor([1.0, 0.5, 0.02, 0.01]))
    assert least_decibels(network, x, target, "int16", tmp_path / "model.onnx") > 28


def test_what_the_layers_result_is_multiplied_by_is_not_left_out(tmp_path: Path) -> None:
    """Add constants that cannot be a term for each channel: of the layer's negative, and of its double."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    network = Columns(lambda y, k: (k - y) + torch.add(k, y, alpha=2), torch.ones(4))
    assert least_decibels(network, x, "nash-e", "int8", tmp_path / "model.onnx") > 30
