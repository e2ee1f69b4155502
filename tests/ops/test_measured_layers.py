"""Layers of the measured targets: half a step in their bias, their residuals and changes of scale, in every form and against the oracle."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.graph import resolve
from fxquant.ir.integer import qparams
from fxquant.primitives import accumulate, elementwise, product
from fxquant.primitives.quantization import quantize, requantize_fixed
from tests.shared import contract, oracle
from tests.shared.contract import graph_values
from tests.shared.networks import members, written

RULES = {"bayes-e": oracle.Rules("fixed", measured=True), "bernoulli2": oracle.Rules("fixed", resize_bits=8, measured=True, by_layers=True)}
SUMS = (accumulate.convolution, accumulate.convolution_wide, accumulate.transposed_convolution, accumulate.transposed_convolution_wide)
every_target = pytest.mark.parametrize("target", RULES)


@members(lambda: dict(
    first=nn.Conv2d(3, 6, 3, padding=1, bias=False), norm=nn.BatchNorm2d(6), second=nn.Conv2d(6, 6, 1),
    third=nn.Conv2d(6, 4, 1, bias=False),
))  # fmt: skip
def Layers(self, x: Tensor) -> Tensor:
    """A convolution that is normalized, a layer with a residual, one without a bias, and a join of two scales."""
    x = torch.relu(self.norm(self.first(x)))
    x = self.second(x) + x
    return torch.cat((torch.relu(self.third(x)), x), 1)


def weights(**options: Any) -> fxq.QConfig:
    return fxq.QConfig(weight=fxq.WeightConfig(**options))


WEIGHTS = {"channels": weights(), "one scale": weights(per_channel=False), "int4": weights(dtype="int4", per_channel=False)}


@pytest.mark.sweep(2)
@every_target
@pytest.mark.parametrize("qconfig", WEIGHTS.values(), ids=WEIGHTS)
def test_every_form_of_a_layer_holds_half_a_step(target: str, qconfig: fxq.QConfig, tmp_path: Path) -> None:
    batch = torch.randn(2, 3, 6, 6)
    prepared, integer = contract.compiled(Layers(), [batch], target, qconfig)
    contract.assert_contract(prepared, tmp_path / "model.onnx", batch, integer=integer)


@pytest.mark.usefixtures("default_outputs")
@every_target
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_a_layer_is_the_oracles(target: str, bias: bool, per_channel: bool) -> None:
    torch.manual_seed(1)
    layer, batch = nn.Conv2d(3, 4, 3, bias=bias), torch.randn(2, 3, 5, 5)
    _, integer = contract.compiled(nn.Sequential(layer), [batch], target, weights(per_channel=per_channel))
    (node,) = [node for node in integer.graph.nodes if node.target in (accumulate.convolution, accumulate.convolution_wide)]
    values = graph_values(integer, batch)
    (result,) = node.users
    x, to = (
        oracle.Grid(Fraction(float(grid.scale)), -128, 127, 8) for grid in (qparams(node.args[0]), qparams(result)) if grid is not None
    )
    rules = RULES[target] if per_channel else oracle.replace(RULES[target], per_channel=False)
    real = layer.bias.tolist() if bias else [0.0] * 4
    output = oracle.layer(layer.weight.tolist(), real, x, rules)
    held = [
        oracle.lifted_bias(own, rules.product_step(x.scale, scale), to.scale, rules.bias_bits)
        for own, scale in zip(output.bias, output.scales, strict=True)
    ]
    assert resolve(integer, node.args[1].target).tolist() == output.weight
    assert resolve(integer, node.args[2].target).tolist() == held
    inputs, weight, held = map(oracle.array, (values[node.args[0].name].tolist(), output.weight, output.bias))
    sums = oracle.convolution(inputs, weight, held, [1, 1], [0, 0], [1, 1], 1)
    assert values[result.name].tolist() == oracle.finished(sums, output, x, to, rules)


def test_a_tensor_is_brought_to_another_scale_by_a_layer_on_bernoulli2() -> None:
    torch.manual_seed(2)
    model = written(lambda m, x, y: (torch.cat((x, y), 1), torch.sigmoid(x), torch.sigmoid(y)))
    batch = torch.randn(4, 3, 40), 0.3 * torch.randn(4, 2, 40)
    kept = fxq.QConfigMapping(default=fxq.QConfig()).set_object_type(torch.cat, fxq.QConfig())
    _, integer = contract.compiled(model, [batch], "bernoulli2", kept)
    layers = [node for node in integer.graph.nodes if node.target is product.scale_channels]
    assert layers
    values = graph_values(integer, *batch)
    for node in layers:
        (result,) = node.users
        x, to = (oracle.Grid(Fraction(float(qparams(each).scale)), -128, 127, 8) for each in (node.args[0], result))  # type: ignore[union-attr]
        expected = [oracle.rescaled(q, x, to, RULES["bernoulli2"]) for q in values[node.args[0].name].flatten().tolist()]
        assert values[result.name].flatten().tolist() == expected
        assert len(set(expected)) > 20


@pytest.mark.parametrize(("factor", "by_layer"), [(1.0, True), (0.02, True), (60.0, True), (2.0**-10, False), (2.0**10, False)])
def test_images_are_added_by_a_layer_on_bernoulli2_unless_one_vanishes(factor: float, by_layer: bool) -> None:
    torch.manual_seed(3)
    x, y = torch.randn(4, 3, 4, 4), factor * torch.randn(4, 3, 4, 4)
    _, integer = contract.compiled(written(lambda m, x, y: torch.relu(x + y)), [(x, y)], "bernoulli2", choose_ranges=False)
    added = [node for node in integer.graph.nodes if node.target in (accumulate.add_residual, elementwise.add)]
    assert [node.target is accumulate.add_residual for node in added] == [by_layer]
    values, by_name = graph_values(integer, x, y), {node.name: node for node in integer.graph.nodes}
    first, second, result = (by_name[name] for name in ("x_quantize", "y_quantize", "add"))
    a, b, to = (oracle.Grid(Fraction(float(qparams(node).scale)), -128, 127, 8) for node in (first, second, result))  # type: ignore[union-attr]
    pairs = zip(*(values[node.name].flatten().tolist() for node in (first, second)), strict=True)
    assert values[result.name].flatten().tolist() == [
        oracle.added(q, r, a, b, to, RULES["bernoulli2"], clamp=(0.0, None)) for q, r in pairs
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("slopes", [[0.25], [0.3, -0.9, 1.0], [0.3, 2.0, -7.0]])
def test_a_prelu_keeps_the_contract_whether_steep_or_not(slopes: list[float], tmp_path: Path) -> None:
    built = nn.PReLU(len(slopes))
    built.weight.data = torch.tensor(slopes)
    torch.manual_seed(4)
    batch = torch.randn(4, 3, 5)
    prepared, integer = contract.compiled(nn.Sequential(built), [batch], "bayes-e")
    contract.assert_contract(prepared, tmp_path / "model.onnx", batch, integer=integer)
    with torch.no_grad():
        near = bool((integer(batch) - built(batch)).square().mean() < 0.001 * built(batch).var())
    assert near == (max(map(abs, slopes)) <= 1)  # a steeper product saturates on the operand's grid, as the chip's does


@pytest.mark.parametrize("layer", [nn.PReLU(), nn.LeakyReLU(0.1)], ids=["prelu", "leaky relu"])
def test_explain_says_whose_scale_a_slope_has(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.Conv2d(4, 4, 1)).eval()
    for target, said in (("bernoulli2", "on its operand's scale"), ("bayes-e", "with its own scale")):
        prepared = fxq.prepare(model, torch.randn(2, 3, 4, 4), target)
        assert next(each for each in fxq.inspect.layers(prepared) if "relu" in each.operator).reason.startswith(said)


def test_a_concatenation_shares_its_scale_with_what_it_alone_reads() -> None:
    @members(lambda: dict(**{name: nn.Conv2d(3, 3, 1) for name in ("one", "two", "again")}, head=nn.Conv2d(12, 2, 1)))
    def Branches(self, x: Tensor) -> Tensor:
        again = self.again(x)
        return self.head(torch.cat((self.one(x), 0.3 * self.two(x), again, torch.relu(again)), 1))

    torch.manual_seed(3)
    batch = torch.randn(4, 3, 6, 6)
    for target, together in (("bayes-e", {"mul"}), ("bernoulli2", {"mul"}), ("nash-e", set())):
        scales = fxq.qparams(contract.compiled(Branches(), [batch], target).prepared)
        assert {name for name in ("mul", "again") if scales[name] == scales["cat"]} == together


@every_target
def test_a_bias_beyond_16_bits_is_rounded_as_the_chip_does(target: str) -> None:
    torch.manual_seed(4)
    layers = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.ReLU(), nn.Conv2d(4, 16, 1))
    for layer in (layers[0], layers[2]):
        layer.bias.data.mul_(300)  # type: ignore[union-attr, operator]
    qconfig = fxq.QConfigMapping().set_module_name("2", fxq.QConfig(fxq.ActivationConfig("int32")))
    _, integer = contract.compiled(layers, [torch.randn(2, 3, 5, 5)], target, qconfig)
    first, last = (resolve(integer, node.args[2].target).tolist() for node in integer.graph.nodes if node.target in SUMS)
    assert all(bias == oracle.lifted_bias(bias, Fraction(1), Fraction(0), 16) for bias in first)
    assert max(map(abs, first)) > 2**15
    assert max(map(abs, last)) > 2**15
    assert all(bias == oracle.lifted_bias(bias, Fraction(1), Fraction(0), 16) for bias in last) == (target == "bernoulli2")


def test_the_first_shift_of_a_mean_over_an_image_rounds_half_up_on_bayes() -> None:
    torch.manual_seed(5)
    batch = torch.rand(2, 3, 64, 64)
    _, integer = contract.compiled(written(lambda m, x: x.mean((2, 3))), [batch], "bayes-e")
    values = graph_values(integer, batch)
    image = next(node for node in integer.graph.nodes if node.target is quantize)
    result = next(node for node in integer.graph.nodes if node.target is requantize_fixed)
    half = resolve(integer, "integer.mean.first_half")
    x, to = (oracle.Grid(Fraction(float(qparams(each).scale)), -128, 127, 8) for each in (image, result))  # type: ignore[union-attr]
    planes = values[image.name].flatten(2).tolist()
    expected = [[oracle.averaged(plane, len(plane), x, to, RULES["bayes-e"], image=True) for plane in sample] for sample in planes]
    assert values[result.name].tolist() == expected
    assert int(half) > 0
