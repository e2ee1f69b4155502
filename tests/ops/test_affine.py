"""Affine activations: uint8 with a zero point, from the arithmetic of one operator to whole networks, held by the slow oracle."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.integer import qparams
from fxquant.numerics.grids import UINT8, FixedWidths, Grid, IntType, grid_from_range
from fxquant.prepared.operators import quantized_operators
from fxquant.primitives import elementwise, quantization
from fxquant.primitives.arithmetic import FixedArithmetic
from fxquant.quantization.observers import Observer
from fxquant.quantization.quantizer import Quantizer
from fxquant.serialization import pack, unpack
from fxquant.target import Target
from tests.quantization.test_observers import observed
from tests.shared import contract, oracle
from tests.shared.contract import compiled, graph_values
from tests.shared.drawn import float32
from tests.shared.networks import descend, members, to_train, to_validate

pytestmark = pytest.mark.usefixtures("default_outputs", "with_vnni")

EXACT = settings(deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow])

exponents = st.integers(-12, 4)
scales = st.builds(lambda m, e: Fraction(m) * Fraction(2) ** (e - 23), st.integers(2**23, 2**24 - 1), exponents)
zero_points = st.one_of(st.sampled_from([0, 1, 127, 128, 255]), st.integers(0, 255))
grids = st.tuples(scales, zero_points)
numbers = st.floats(-1e6, 1e6, width=32)


# ---- grids ----------------------------------------------------------------------------------------------------------
@EXACT
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_the_grid_of_an_interval(intervals: list[tuple[float, float]]) -> None:
    ordered = [sorted(pair) for pair in intervals]
    low, high = (torch.tensor(end, dtype=torch.float32) for end in zip(*ordered, strict=True))
    result = [part.tolist() for part in grid_from_range(low, high, UINT8)]
    expected = [oracle.affine_grid(Fraction(one), Fraction(other)) for one, other in ordered]
    assert list(zip(*result, strict=True)) == [(float(scale), zero_point) for scale, zero_point in expected]


@EXACT
@given(st.lists(numbers, min_size=1, max_size=20), grids)
def test_quantize_and_dequantize(values: list[float], given_grid: tuple[Fraction, int]) -> None:
    """clip(round(x / s) + z, 0, 255), computed on centred integers."""
    scale, zero_point = given_grid
    built = Grid(UINT8, float32(scale), zero_point)
    ties = [float(oracle.float32(Fraction(value) * scale / 2)) for value in range(-300, 300, 7)]
    input = torch.tensor([*values, *ties, math.nan, math.inf, -math.inf])
    expected = [oracle.quantize(x, scale, -zero_point, 255 - zero_point) for x in input.tolist()]
    assert built.quantize(input).tolist() == expected
    stored = quantization.quantize(input, built.scale, *built.bounds, torch.uint8, zero_point)
    assert stored.dtype == torch.uint8
    assert stored.tolist() == [c + zero_point for c in expected]
    real = quantization.dequantize(stored, built.scale, torch.float32, zero_point)
    assert real.tolist() == [float(oracle.dequantize(c, scale)) for c in expected]
    assert torch.equal(built.dequantize(built.quantize(input)), real)
    assert (built.low, built.high, built.magnitude) == (-zero_point, 255 - zero_point, max(zero_point, 255 - zero_point))


@EXACT
@given(st.lists(st.integers(-(2**24), 2**24), min_size=1, max_size=20), scales, grids)
def test_requantization_adds_the_zero_point_after_its_rounding(sums: list[int], step: Fraction, to: tuple[Fraction, int]) -> None:
    scale, zero_point = to
    factor = oracle.real_multiplier(step * Fraction(2) ** -10 / scale)
    centred = [oracle.requantize_real(value, factor, -zero_point, 255 - zero_point) for value in sums]
    arguments = (float32(factor), -zero_point, 255 - zero_point, torch.uint8)
    assert quantization.requantize_real(torch.tensor(sums), *arguments, zero_point).tolist() == [c + zero_point for c in centred]
    assert quantization.requantize_real(torch.tensor(sums, dtype=torch.float32), *arguments).tolist() == centred  # as it trains


# ---- networks -------------------------------------------------------------------------------------------------------
@members(lambda: dict(
    stem=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), left=nn.Conv2d(8, 8, 3, padding=1, groups=2), right=nn.Conv2d(8, 8, 1),
    slope=nn.PReLU(8), up=nn.ConvTranspose2d(16, 4, 2, stride=2), head=nn.Linear(16 * 9, 5),
))  # fmt: skip
def Network(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Most of the ways operators treat a zero point: sums, a residual, tables, pools, padding, concatenation, moving."""
    x = self.norm(self.stem(x)).relu()
    x = self.left(x) + x
    y = torch.cat((self.slope(self.right(x)), torch.sigmoid(x)), 1)
    z = nn.functional.pad(nn.functional.max_pool2d(y.clamp(-0.5, 0.75), 2), (1, 1, 1, 1), value=0.25)
    pooled = nn.functional.avg_pool2d(z - 0.125, 3, 2, 1) * 1.5
    return self.head(pooled.flatten(1)), nn.functional.interpolate(self.up(y), scale_factor=0.5, mode="bilinear") @ y[:, :4].mT


def batch(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + 0.4


@pytest.fixture(scope="module")
def network() -> contract.Compiled:
    torch.manual_seed(0)
    affine = fxq.QConfig(fxq.ActivationConfig("uint8"))  # also of last layers
    return compiled(Network().eval(), [(batch(seed=seed),) for seed in range(3)], "x86", affine)


@pytest.mark.nightly
def test_a_network_holds_the_contract(network: contract.Compiled, tmp_path: Path) -> None:
    prepared, integer = network
    grids = {qparams(node).zero_point for node in integer.graph.nodes if qparams(node) is not None and qparams(node).dtype == "uint8"}
    assert len(grids) > 5
    assert {0} < grids
    contract.assert_alive(integer, batch())
    contract.assert_validate_is_integer(prepared, integer, batch())
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(batch(),), (batch(1, seed=1),)])
    loaded = fxq.load(fxq.save(integer, tmp_path / "integer.fxq"))
    again = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    assert contract.all_equal(loaded(batch()), integer(batch()))
    assert contract.all_equal(fxq.convert(again)(batch()), integer(batch()))
    for style in ("fast", "qdq"):
        path = fxq.export_onnx(integer, tmp_path / f"{style}.onnx", style=style)
        report = fxq.verify(integer, path, [batch()])
        assert report or style == "qdq", str(report)
    kernels = fxq.export.onnx_metadata(tmp_path / "fast.onnx")["kernels"]
    assert len(kernels["integer"]) + len(kernels["refused"]) == 6
    assert kernels["refused"] == [] or not contract.VNNI
    contract.assert_train_is_validate(again, batch())
    contract.assert_gradients_reach_every_parameter(again, batch())


def test_moving_and_comparing_needs_no_centred_integers(network: contract.Compiled) -> None:
    """Centred integers are read by sums, products and alignments alone."""
    readers = {user.target.__name__ for node in network.integer.graph.nodes if node.target is elementwise.centre for user in node.users}
    assert readers
    assert not readers & {"max_pool", "reshape", "permute", "concatenate", "crop", "select", "clamp", "pad", "lookup", "resize_linear"}


def test_what_a_model_says_of_its_zero_points(network: contract.Compiled, tmp_path: Path) -> None:
    scale, zero_point = fxq.qparams(network.prepared)["head"]
    assert f"{scale:.6g}, zero point {zero_point}" in fxq.explain(network.prepared)
    assert f"{scale:.6g}, zero point {zero_point}" in fxq.explain(network.integer)
    assert f"z={zero_point}" in fxq.text(network.prepared)
    for style in ("exact", "fast", "qdq"):
        entry = fxq.export.onnx_metadata(fxq.export_onnx(network.integer, tmp_path / f"{style}.onnx", style=style))["tensors"]["head"]
        assert (entry["dtype"], entry["storage"], entry["scale"], entry["zero_point"]) == ("uint8", "uint8", scale, zero_point)


def test_integers_in_and_out(network: contract.Compiled, tmp_path: Path) -> None:
    values = graph_values(network.integer, batch())
    for style in ("exact", "fast"):
        path = fxq.export_onnx(network.integer, tmp_path / f"{style}.onnx", style=style, io="integer")
        options = onnxruntime.SessionOptions()
        for key, value in fxq.export.onnx_metadata(path).get("session_options", {}).items():
            options.add_session_config_entry(key, value)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        output = session.run(None, {session.get_inputs()[0].name: values["x_quantize"].numpy()})
        assert torch.equal(torch.from_numpy(output[0]), values["head"])


@pytest.mark.parametrize(
    ("primitive", "position", "because"),
    [
        ("centre", 1, "its zero point is 99, and declared as"),
        ("requantize_real", 5, "its zero point is 99, and declared as|does not hold|beyond uint8"),
        ("dequantize", 3, "its zero point is 99, and declared as"),
        ("lookup", 2, "does not cover its operand"),
    ],
)
def test_a_file_with_another_zero_point_is_refused(
    primitive: str, position: int, because: str, network: contract.Compiled, tmp_path: Path
) -> None:
    path = fxq.save(network.integer, tmp_path / "model.fxq")
    document, tensors = unpack(path.read_bytes())
    named = (entry for entry in document["nodes"] if entry["target"] == f"primitive:{primitive}")
    next(entry for entry in named if len(entry["args"]) > position)["args"][position] = 99
    path.write_bytes(pack(document, tensors))
    with pytest.raises(fxq.errors.ExportError, match=because):
        fxq.load(path)


def test_a_prepared_model_with_a_zero_point_beyond_its_dtype_is_refused(network: contract.Compiled, tmp_path: Path) -> None:
    path = fxq.save(network.prepared, tmp_path / "model.fxq")
    document, tensors = unpack(path.read_bytes())
    name = next(name for name in tensors if name.endswith("head.output.zero_point"))
    tensors[name] = tensors[name] + 256
    path.write_bytes(pack(document, tensors))
    with pytest.raises(fxq.errors.ExportError, match="its zero point is"):
        fxq.load(path)


def test_sums_are_proved_for_the_whole_grid() -> None:
    """127·255 of each weight, where int8 activations have 127·128."""
    layer = nn.Linear(66_400, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    fixed = fxq.ActivationConfig("uint8", scale=0.5, zero_point=0)
    config = fxq.QConfig(fixed, input=fixed)
    with pytest.raises(fxq.errors.AccumulatorOverflow, match="is exact up to 2147483647"):
        compiled(layer, [torch.ones(1, 66_400)], "x86", config)


# ---- how a grid is found --------------------------------------------------------------------------------------------
def error(values: Tensor, low: Tensor, high: Tensor) -> float:
    scale, zero_point = grid_from_range(low, high, UINT8)
    built = Grid(UINT8, scale, int(zero_point))
    return float((built.dequantize(built.quantize(values)) - values).double().square().mean())


def test_the_histogram_finds_the_interval_of_least_error_and_a_percentile_covers_its_share() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(3)).exp() - 0.5
    low, high = observed(fxq.observers.MSEObserver(), *values.split(3000)).interval(UINT8)
    best = error(values, low, high)
    assert best <= error(values, values.min(), values.max())
    assert best < 0.5 * error(values, *(torch.tensor(sign) * values.abs().max() for sign in (-1.0, 1.0)))
    for more, less in ((0.97, 1.0), (1.03, 1.0), (1.0, 0.8), (1.0, 1.25)):
        assert best < 1.01 * error(values, low * less, high * more)
    low, high = observed(fxq.observers.PercentileObserver(99.0), values).interval(UINT8)
    assert 0.985 < float(((values >= low) & (values <= high)).float().mean()) <= 0.995
    assert float(low) == pytest.approx(float(values.min()), abs=0.05)


def test_an_observer_that_knows_scales_alone_is_symmetric() -> None:
    class Own(Observer):
        def observe(self, value: Tensor) -> None:
            self.count += 1

        def scale(self, dtype: IntType) -> Tensor:
            return torch.tensor(0.25)

    quantizer = Quantizer(UINT8, Own())
    quantizer.observe(torch.ones(3))
    quantizer.update_scale()
    assert (float(quantizer.grid.scale), quantizer.grid.zero_point) == (0.25, 128)


# ---- training -------------------------------------------------------------------------------------------------------
def layers(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    config = fxq.QConfig(fxq.ActivationConfig("uint8", **settings))
    return to_train(fxq.calibrate(fxq.prepare(model, batch(), "x86", config), [batch(seed=seed) for seed in range(2)]))


def test_statistics_move_the_scale_and_the_zero_point_and_neither_drifts_while_the_range_stays() -> None:
    prepared = layers(observer=fxq.observers.MinMaxObserver)
    before = fxq.qparams(prepared)["input_1_quantize"]
    for _ in range(5):
        prepared(batch())
    assert fxq.qparams(prepared)["input_1_quantize"] == before
    prepared(batch() * 2 + 6)
    scale, zero_point = fxq.qparams(prepared)["input_1_quantize"]
    seen = torch.cat([batch(seed=seed).flatten() for seed in range(2)] + [(batch() * 2 + 6).flatten()])
    wanted = oracle.affine_grid(Fraction(float(seen.min())), Fraction(float(seen.max())))
    assert before != (scale, zero_point) == pytest.approx((float(wanted[0]), wanted[1]), rel=1e-6)


def test_a_learned_scale_holds_its_zero_point() -> None:
    prepared = layers(training="learned")
    before = fxq.qparams(prepared)
    descend(prepared, [batch()] * 2, 0.5, lambda output: output.square().sum())
    after = fxq.qparams(prepared)
    assert all(after[name][1] == zero_point for name, (_, zero_point) in before.items())
    assert any(after[name][0] != scale for name, (scale, _) in before.items())
    contract.assert_train_is_validate(prepared, batch())
    fxq.set_state(prepared, fxq.State.VALIDATE)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batch())


def test_gradients_stop_where_the_grid_ends() -> None:
    config = fxq.ActivationConfig("uint8", scale=1.0, zero_point=100)
    prepared = fxq.prepare(nn.Sequential(nn.Tanh()), torch.zeros(1, 4), "x86", fxq.QConfig(input=config))
    fxq.calibrate(prepared, [torch.zeros(1, 4)])
    fxq.set_state(prepared, fxq.State.TRAIN)
    x = torch.tensor([[-101.0, 0.0, 0.25, 156.0]], requires_grad=True)
    quantize = quantized_operators(prepared)["input_1_quantize"]
    quantize(x).sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0, 1.0, 0.0]]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", ["statistics", "learned", "frozen"])
def test_a_state_dict_holds_zero_points(training: str) -> None:
    prepared, other = layers(training=training), layers(training=training)
    prepared(batch() * 3 - 1)
    fxq.set_qparams(prepared, {"_2": (0.03, 77)})
    assert fxq.qparams(prepared)["_2"] == (pytest.approx(0.03), 77)
    other.load_state_dict(prepared.state_dict())
    assert fxq.qparams(other) == fxq.qparams(prepared)
    assert torch.equal(to_validate(prepared)(batch()), to_validate(other)(batch()))


def test_qparams_are_what_set_qparams_takes() -> None:
    prepared, other = layers(), layers(observer=fxq.observers.MinMaxObserver)
    fxq.set_qparams(other, fxq.qparams(prepared))
    assert fxq.qparams(other) == fxq.qparams(prepared)
    fxq.set_qparams(other, {"_2": 0.5})
    assert fxq.qparams(other)["_2"] == (0.5, fxq.qparams(prepared)["_2"][1])  # a scale alone leaves the zero point
    for wrong in (256, -1):
        with pytest.raises(fxq.errors.ConfigurationError, match="zero point"):
            fxq.set_qparams(other, {"_2": (0.5, wrong)})


# ---- what can be asked for ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("target", "dtype"), [("x86", "uint8"), ("qnnpack", "uint8"), ("nash-e", "int8"), ("bayes-e", "int8")])
@pytest.mark.parametrize(
    "config", [None, fxq.QConfig(), fxq.QConfigMapping().set_module_name("0", fxq.QConfig())], ids=["none", "config", "mapping"]
)
def test_a_dtype_that_is_left_out_is_the_targets(target: str, dtype: str, config: Any) -> None:
    prepared = fxq.prepare(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4), target, config)
    assert {operator.output.dtype.name for operator in quantized_operators(prepared).values()} == {dtype}


def test_a_fixed_grid() -> None:
    config = fxq.QConfig(fxq.ActivationConfig("uint8", scale=0.125, zero_point=3), input=fxq.ActivationConfig(scale=0.25))
    prepared, integer = compiled(nn.Sequential(nn.Linear(4, 4)), [torch.randn(8, 4)], "x86", config)
    assert fxq.qparams(prepared) == {"input_1_quantize": (0.25, 128), "_0": (0.125, 3)}  # 128: what int8 covers
    contract.assert_validate_is_integer(prepared, integer, torch.randn(8, 4))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"zero_point": 3, "scale": 0.5}, "default dtype of the target"),
        ({"dtype": "int8", "zero_point": 0, "scale": 0.5}, "those of other dtypes are symmetric"),
        ({"dtype": "uint8", "zero_point": 3}, "both are observed, or both are fixed"),
        ({"dtype": "uint8", "zero_point": 3, "threshold": 0.5}, "both are observed, or both are fixed"),
        ({"dtype": "uint8", "zero_point": 256, "scale": 0.5}, "0 to 255"),
    ],
)
def test_zero_points_that_make_no_sense(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=reason):
        fxq.ActivationConfig(**settings)


def test_a_target_with_shifts_cannot_be_affine() -> None:
    fixed = FixedArithmetic("fixed", widths={"int8": FixedWidths(16, 15, True)})
    with pytest.raises(ValueError, match="adds no zero point"):
        Target("own", "an example", fixed, ("uint8", "int8"))


def test_two_fixed_zero_points_on_one_grid_are_a_conflict() -> None:
    mapping = fxq.QConfigMapping()
    for name, zero_point in (("0", 3), ("1", 4)):
        mapping = mapping.set_module_name(name, fxq.QConfig(fxq.ActivationConfig("uint8", scale=0.5, zero_point=zero_point)))
    with pytest.raises(fxq.errors.ScaleConflict, match=r"scale 0\.5 and zero point 4"):
        fxq.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(2)), batch(), "x86", mapping)
