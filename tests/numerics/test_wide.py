"""int16 and int32: sums beyond 2^24, operands that give up bits, 48-bit accumulators, and 32-bit outputs."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import resolve
from fxquant.ir.integer import notes, qparams
from fxquant.numerics.grids import INT8, INT16, WEIGHT_INT8, WEIGHT_INT16, Grid, IntType, accumulator_bound, table
from fxquant.ops.core import weighted
from fxquant.ops.elementwise.table import ON_TENSORS, UNARY
from fxquant.primitives import accumulate, elementwise, product, quantization
from fxquant.quantization.observers import MinMaxObserver
from tests.shared import contract
from tests.shared.contract import compiled, graph_values
from tests.shared.networks import Network, members

pytestmark = pytest.mark.nightly

FORMATS = (("bayes-e", "int8"), ("nash-e", "int8"), ("nash-e", "int16"))
every_format = pytest.mark.parametrize(("target", "weight"), FORMATS)


def activations(dtype: str) -> fxq.ActivationConfig:
    return fxq.ActivationConfig(dtype, observer=MinMaxObserver)


def wide_config(weight: str) -> fxq.QConfig:
    return fxq.QConfig(activations("int16"), fxq.WeightConfig(weight))


def with_last(weight: str, activation: str = "int8", last: str = "last") -> fxq.QConfigMapping:
    """Everything in `activation`, and the layer `last` with a 32-bit output."""
    mapping = fxq.QConfigMapping(fxq.QConfig(activations(activation), fxq.WeightConfig(weight)))
    return mapping.set_module_name(last, fxq.QConfig(fxq.ActivationConfig("int32"), fxq.WeightConfig(weight)))


def assert_contract(model: nn.Module, batch: Tensor, target: str, qconfig: Any, tmp_path: Path) -> Any:
    prepared = contract.calibrated(model.eval(), [batch], target, qconfig)
    integer = contract.assert_contract(prepared, tmp_path / "model.onnx", batch)
    contract.assert_gradients_reach_every_parameter(prepared, batch)
    return integer


def said(integer: Any, key: str) -> list[str]:
    return [str(notes(node)[key]) for node in integer.graph.nodes if key in notes(node)]


# ---- sums of parts --------------------------------------------------------------------------------------------------
@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 4000), st.sampled_from([4, 8, 9, 13, 16]), st.sampled_from([WEIGHT_INT8, WEIGHT_INT16]))
def test_a_cut_keeps_every_sum_of_parts_below_2_24_and_is_the_smallest(inputs: int, bits: int, dtype: Any) -> None:
    weight = torch.full((1, inputs), float(dtype.high))
    weight[0, ::3] *= -1
    cut = weighted._cut(weight, 2 ** (bits - 1), dtype)
    parts = accumulate.split(weight, cut.weight_parts, cut.weight_bits)
    assert cut.parts * cut.bits >= bits
    assert cut.weight_parts * cut.weight_bits >= dtype.bits
    assert max(float(accumulator_bound(p, None, 0, 2 ** (cut.bits - 1)).max()) for p in parts) < 2**24
    if cut.parts * cut.weight_parts == 1:
        assert inputs * dtype.high * 2 ** (bits - 1) < 2**24
    else:
        assert inputs * dtype.high * 2 ** (bits - 1) >= 2**24


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("channels", "weight"), [(8, "int8"), (8, "int16"), (1200, "int16")])
def test_a_convolution_of_the_largest_numbers_is_exact(channels: int, weight: str, transpose: bool, tmp_path: Path) -> None:
    """Every operand and every weight at its end: the sums reach 2^22 to 2^40, and are compared with sums in int64."""
    layer = (nn.ConvTranspose2d if transpose else nn.Conv2d)(channels, 2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.where(torch.rand_like(layer.weight) > 0.2, 1.0, -1.0))
    batch = torch.where(torch.rand(2, channels, 3, 3) > 0.3, 1.0, -1.0)
    integer = assert_contract(nn.Sequential(layer), batch, "nash-e", wide_config(weight), tmp_path)
    node = next(n for n in integer.graph.nodes if n.target in (accumulate.convolution_wide, accumulate.transposed_convolution_wide))
    values = graph_values(integer, batch)
    constant, bias = (resolve(integer, n.target) for n in node.args[1:3])
    flat = constant.flatten(1).long() if not transpose else constant.flatten(1).t().long()
    exact = torch.einsum("oc,nchw->nohw", flat, values[node.args[0].name].long()) + bias.long().view(-1, 1, 1)
    assert torch.equal(values[node.name].long(), exact)
    assert int(exact.abs().max()) > 2**20
    assert values[node.name].dtype == (torch.int64 if weight == "int16" else torch.int32)


def test_an_operand_gives_up_the_fewest_bits_that_make_its_sum_fit(tmp_path: Path) -> None:
    """70,000 weights of 127 against 2^15 exceed 2^31 five times over: the operand keeps 13 bits and says so."""
    features = 70_000
    layer = nn.Linear(features, 2)
    nn.init.constant_(layer.weight, 1.0)
    batch = torch.rand(3, features) - 0.5
    integer = assert_contract(nn.Sequential(layer), batch, "bayes-e", wide_config("int8"), tmp_path)
    needed = math.ceil(math.log2(features * 127 * 2**15 / 2**31))
    assert said(integer, "narrowed") == [f"its operand is narrowed by {needed} of its 16 bits, so that the sum fits the accumulator"]
    shift = next(node for node in integer.graph.nodes if node.target is elementwise.shift_right)
    values = graph_values(integer, batch)
    inputs = values[shift.args[0].name].long()
    assert torch.equal(values[shift.name].long(), torch.div(inputs + 2 ** (needed - 1), 2**needed, rounding_mode="floor"))
    with torch.no_grad():
        expected = layer(batch)
    assert float((integer(batch) - expected).abs().max()) < 1e-2 * float(expected.abs().max())


# ---- mixed precision ------------------------------------------------------------------------------------------------
@members(
    lambda: dict(first=nn.Conv2d(3, 8, 3, padding=1), second=nn.Conv2d(8, 8, 3, padding=1), third=nn.Conv2d(16, 8, 1), last=nn.Linear(8, 5))
)
def Mixed(self, x: Tensor) -> Tensor:
    """Layers, a residual, a product, tables and a concatenation, for which every pair of dtypes can meet."""
    x = F.silu(self.first(x))
    y = self.second(x) + x
    y = torch.cat([y, x * torch.sigmoid(y)], 1)
    return self.last(F.max_pool2d(self.third(y), 2).mean((2, 3)))


@pytest.mark.parametrize("wide", [("first",), ("second", "third"), ("last",), ("first", "third")])
@every_format
def test_int8_and_int16_layers_meet(wide: tuple[str, ...], target: str, weight: str, tmp_path: Path) -> None:
    mapping = fxq.QConfigMapping(fxq.QConfig(activations("int8")))
    for name in wide:
        mapping = mapping.set_module_name(name, wide_config(weight))
    integer = assert_contract(Mixed(), torch.randn(4, 3, 8, 8), target, mapping, tmp_path)
    dtypes = {name: qparams(node).dtype for node in integer.graph.nodes if (name := node.name) in ("first", "second", "third", "last")}
    assert dtypes == {name: "int16" if name in wide else "int8" for name in dtypes}


@every_format
def test_int16_is_far_nearer_to_float_than_int8(target: str, weight: str) -> None:
    model, batch = Mixed().eval(), torch.randn(16, 3, 8, 8)
    with torch.no_grad():
        expected = model(batch)
        narrow = compiled(model, [batch], target, fxq.QConfig(activations("int8")))[1](batch)
        wide = compiled(model, [batch], target, wide_config(weight))[1](batch)
    gain = float((narrow - expected).norm() / (wide - expected).norm())
    assert gain > (100 if weight == "int16" else 2)  # int8 weights stay as coarse as they are


@pytest.mark.parametrize("target", contract.TARGETS)
def test_a_product_of_int16_activations_has_48_bits(target: str, tmp_path: Path) -> None:
    model = Network(lambda s, x: s.left(x) @ s.right(x).transpose(1, 2), left=nn.Linear(16, 600), right=nn.Linear(16, 600))
    batch = torch.randn(2, 4, 16)
    integer = assert_contract(model, batch, target, wide_config("int8"), tmp_path)
    assert max(notes(node).get("accumulator_bits", 0) for node in integer.graph.nodes) > 32
    with torch.no_grad():
        expected = model(batch)
    assert float((integer(batch) - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("target", ["bernoulli", "bernoulli2", "x86", "qnnpack"])
def test_a_target_without_int16_says_so(target: str) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=f"{target} has no int16 activations"):
        fxq.prepare(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), target, wide_config("int8"))


# ---- 32-bit outputs --------------------------------------------------------------------------------------------------
def head(last: nn.Module, after: Callable[[Any, Tensor], Tensor] = lambda y, x: y) -> nn.Module:
    """A layer of 32 bits after another one, and what is done with its result and its operand."""
    rows = isinstance(last, nn.Linear)

    def forward(s: Any, x: Tensor) -> Tensor:
        x = F.relu(s.first(x))
        return after(s.last(x.mean((2, 3)) if rows else x), x)

    return Network(forward, first=nn.Conv2d(3, 6, 3, padding=1), last=last)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: head(nn.Linear(6, 4)),
    "convolution": lambda: head(nn.Conv2d(6, 4, 3)),
    "transposed": lambda: head(nn.ConvTranspose2d(6, 4, 2, 2)),
    "relu": lambda: head(nn.Conv2d(6, 4, 1), lambda y, x: torch.relu(y)),
    "bounds": lambda: head(nn.Conv2d(6, 4, 1), lambda y, x: y.clamp(-0.2, 0.3)),
    "residual": lambda: head(nn.Conv2d(6, 6, 1), lambda y, x: y + x),
    "reshaped in float": lambda: head(nn.Conv2d(6, 4, 1), lambda y, x: y.flatten(1)),
}


@pytest.mark.parametrize("name", HEADS)
@every_format
def test_a_32_bit_output_is_the_sum_itself(name: str, target: str, weight: str, tmp_path: Path) -> None:
    model, batch = HEADS[name](), torch.randn(4, 3, 8, 8)
    integer = assert_contract(model, batch, target, with_last(weight, "int16" if weight == "int16" else "int8"), tmp_path)
    assert quantization.accumulator_output in [node.target for node in integer.graph.nodes]
    last = next(node for node in integer.graph.nodes if node.name == "last")
    assert qparams(last).dtype == "int32"
    assert isinstance(qparams(last).scale, tuple)  # one for each channel
    values = graph_values(integer, batch)
    assert values["last"].dtype == torch.int32
    reloaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert torch.equal(reloaded(batch), integer(batch))
    with torch.no_grad():
        coarse = compiled(model, [batch], target, fxq.QConfig(activations("int8")))[1](batch)
        expected = model(batch)
        assert (integer(batch) - expected).norm() < (coarse - expected).norm()


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_32_bit_output_of_more_bits_leaves_out_the_last(sign: int, tmp_path: Path) -> None:
    layer = nn.Linear(512, 2)
    nn.init.constant_(layer.weight, float(sign))
    nn.init.zeros_(layer.bias)
    model = nn.Sequential(nn.Identity(), layer)
    batch = torch.cat([torch.ones(1, 512), -torch.ones(1, 512), torch.randn(2, 512).clamp(-1, 1)])
    integer = assert_contract(model, batch, "nash-e", with_last("int16", "int16", "1"), tmp_path)
    assert "leaves out the last" in said(integer, "narrowed")[0]
    assert torch.allclose(integer(batch), model(batch), rtol=1e-3, atol=1e-2)  # the input is clamped to its scale


def test_a_32_bit_output_has_no_scale_to_set() -> None:
    prepared, _ = compiled(HEADS["linear"](), [torch.randn(4, 3, 8, 8)], "bayes-e", with_last("int8"))
    before = fxq.qparams(prepared)
    with pytest.raises(fxq.errors.ConfigurationError, match="%last has a 32-bit output"):
        fxq.set_qparams(prepared, {"first": 0.5, "last": 0.5})
    assert fxq.qparams(prepared)["first"] == before["first"]
    assert "last" not in before


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("0", "the 32-bit output of %_0 is not read by another integer operator"),
        ("1", "sigmoid has no 32-bit output: it forms no sum of products"),
    ],
)
def test_what_has_or_reads_no_32_bit_output_says_why(layer: str, said: str) -> None:
    qconfig = fxq.QConfigMapping().set_module_name(layer, fxq.QConfig(fxq.ActivationConfig("int32")))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid())
    assert said in fxq.explain(fxq.prepare(model, torch.randn(2, 3, 4, 4), qconfig=qconfig))


# ---- tables ---------------------------------------------------------------------------------------------------------
SETTINGS: dict[str, dict[str, Any]] = {"pow": {"exponent": 2.5}, "threshold": {"threshold": 0.1, "value": -0.3}}
FUNCTIONS = [*((name, SETTINGS.get(name, {})) for name in UNARY if name not in ON_TENSORS), ("gelu", {"approximate": "tanh"})]


@pytest.mark.parametrize(("name", "options"), FUNCTIONS)
@settings(deadline=None, derandomize=True, max_examples=2)
@given(
    st.floats(2.0**-18, 2.0**-10, width=32), st.floats(2.0**-18, 2.0**-6, width=32), st.booleans(),
    st.sampled_from([(INT16, INT16), (INT8, INT16), (INT16, INT8)]),
)  # fmt: skip
def test_a_table_made_from_tensors_is_the_one_made_element_by_element(
    name: str, options: dict[str, Any], s_in: float, s_out: float, powers: bool, types: tuple[IntType, IntType]
) -> None:
    """Powers of two make ties, which the tensor's value must not decide."""
    if powers:
        s_in, s_out = 2.0 ** round(math.log2(s_in)), 2.0 ** round(math.log2(s_out))
    on_tensors, exact = (partial(function, **options) for function in UNARY[name])
    grids = Grid(types[0], torch.tensor(s_in)), Grid(types[1], torch.tensor(s_out))
    assert torch.equal(table(exact, *grids, on_tensors), table(exact, *grids))


@pytest.mark.parametrize("target", ["bernoulli", "nash-e", "x86"])
def test_a_slope_so_steep_that_products_reach_2_23_is_exact(target: str, tmp_path: Path) -> None:
    layer, x = nn.PReLU(init=3e5), torch.randn(8, 4)
    prepared, integer = compiled(layer, [x], target)
    (rectified,) = (node.name for node in integer.graph.nodes if node.target is product.rectify)
    assert int(graph_values(integer, x)[rectified].abs().max()) > 2**23
    contract.assert_validate_is_integer(prepared, integer, x)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(x,)])
    layer.weight.data.fill_(1e8)
    with pytest.raises(fxq.errors.AccumulatorOverflow, match="the product of output channel 0"):
        compiled(layer, [x], target)
