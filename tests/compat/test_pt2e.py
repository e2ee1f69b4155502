"""PT2E: exported programs, quantizers of PyTorch's kind and of the user's own, and a target as a quantizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.ao import quantization as ao

import fxquant as fxq
from fxquant.compat import torch_ao
from fxquant.prepared.operators import quantized_operators
from tests.shared.networks import members

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
ATEN: Any = torch.ops.aten


# ---- what torchao's annotations are: dataclasses with these names and fields ------------------------------------------------------
@dataclass(frozen=True)
class QuantizationSpec:
    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False


@dataclass(frozen=True)
class FixedQParamsQuantizationSpec:
    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None


@dataclass(frozen=True)
class SharedQuantizationSpec:
    edge_or_node: Any


@dataclass(frozen=True)
class DerivedQuantizationSpec:
    derived_from: list[Any]
    derive_qparams_fn: Any
    dtype: torch.dtype


@dataclass
class QuantizationAnnotation:
    input_qspec_map: dict[fx.Node, Any] = field(default_factory=dict)
    output_qspec: Any = None
    _annotated: bool = False


ACT = QuantizationSpec(torch.int8, ao.HistogramObserver, -128, 127, torch.per_tensor_affine)
NARROW = QuantizationSpec(torch.int8, ao.MinMaxObserver, -8, 7, torch.per_tensor_symmetric)
SYMMETRIC = QuantizationSpec(torch.int8, ao.MinMaxObserver, -128, 127, torch.per_tensor_symmetric)
WEIGHT = QuantizationSpec(torch.int8, ao.PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0)
DYNAMIC = QuantizationSpec(torch.int8, ao.PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True)
FIXED = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)


class Mine:
    """A quantizer of a user's own: `rules` are functions from a call to its annotation, by ATen operator."""

    def __init__(self, rules: dict[Any, Callable[[fx.Node], QuantizationAnnotation | None]]) -> None:
        self.rules = rules

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            annotation = self.rules.get(node.target, lambda _: None)(node)
            if annotation is not None:
                node.meta["quantization_annotation"] = annotation
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


def layer(act: Any = ACT, weight: Any = WEIGHT, out: Any = ACT, bias: Any = None) -> Callable[[fx.Node], QuantizationAnnotation]:
    """Annotate a layer; with a ReLU or batch norm after it, that has the annotation of the output."""

    def annotate(node: fx.Node) -> QuantizationAnnotation:
        read: Any = {node.args[0]: act, node.args[1]: weight, node.args[2]: bias}
        follows = next(iter(node.users))
        if follows.target not in (ATEN.relu.default, ATEN.batch_norm.default):
            return QuantizationAnnotation(read, out, _annotated=True)
        follows.meta["quantization_annotation"] = QuantizationAnnotation({}, out, _annotated=True)
        return QuantizationAnnotation(read, None, _annotated=True)

    return annotate


def all_inputs(spec: Any, out: Any) -> Callable[[fx.Node], QuantizationAnnotation]:
    return lambda node: QuantizationAnnotation(dict.fromkeys(node.all_input_nodes, spec), out, _annotated=True)


@members(lambda: dict(conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8), skip=nn.Conv2d(8, 8, 1), last=nn.Conv2d(8, 4, 1)), seed=0)
def Net(self, x: Tensor) -> Tensor:
    x = torch.relu(self.bn(self.conv(x)))
    x = torch.max_pool2d(x + self.skip(x), 2)
    return torch.sigmoid(self.last(x))


def program(model: nn.Module | None = None, example: Tensor = BATCHES[0]) -> Any:
    return torch.export.export(model or Net().eval(), (example,))


def found(prepared: nn.Module) -> dict[str, str]:
    return {each.name: each.dtype for each in fxq.inspect.layers(prepared)}


def calibrated(prepared: Any) -> Any:
    for batch in BATCHES:
        prepared(batch)
    return prepared


def shared(node: fx.Node) -> QuantizationAnnotation:
    return QuantizationAnnotation({node.args[0]: ACT}, SharedQuantizationSpec((node.args[0], node)))  # type: ignore[dict-item]


def sum_of_two(node: fx.Node) -> QuantizationAnnotation:
    first, second = node.args
    return QuantizationAnnotation({first: ACT, second: SharedQuantizationSpec((first, node))}, ACT)  # type: ignore[dict-item]


def test_annotations_are_rules_by_node() -> None:
    derived = DerivedQuantizationSpec([], None, torch.int32)
    rules = {
        ATEN.conv2d.default: layer(bias=derived), ATEN.add.Tensor: sum_of_two, ATEN.max_pool2d.default: shared,
        ATEN.sigmoid.default: all_inputs(ACT, FIXED),
    }  # fmt: skip
    model = Net().eval()
    prepared = calibrated(torch_ao.prepare_pt2e(program(model), Mine(rules), target="x86"))
    names = {"conv2d", "conv2d_1", "max_pool2d", "conv2d_2", "sigmoid"}  # the addition is fused
    assert {name: dtype for name, dtype in found(prepared).items() if name in names} == dict.fromkeys(names, "uint8")
    assert fxq.qparams(prepared)["sigmoid"] == (1 / 256, 0)
    weights = {operator.weight_quantizer.per_channel for operator in quantized_operators(prepared).values() if operator.name == "conv2d"}
    assert weights == {True}
    integer = torch_ao.convert_pt2e(prepared)
    assert fxq.verify(prepared, integer, BATCHES[:1])
    noise = (integer(BATCHES[0]) - model(BATCHES[0])).square().mean() / model(BATCHES[0]).var()
    assert noise < 1e-3


def test_what_is_not_annotated_is_float_and_what_readers_ask_for_is_the_output() -> None:
    only = {ATEN.conv2d.default: lambda node: layer(NARROW, WEIGHT, None)(node) if "last" not in str(node.args[1]) else None}
    prepared = torch_ao.prepare_pt2e(program(), Mine(only), target="nash-e")
    dtypes = found(prepared)
    assert (dtypes["sigmoid"], dtypes["conv2d_2"]) == ("float32", "float32")
    assert dtypes["conv2d"] == "int4"  # its reader asks for that
    wide = {ATEN.conv2d.default: layer(SYMMETRIC, WEIGHT, None)}
    assert found(torch_ao.prepare_pt2e(program(), Mine(wide), target="nash-e"))["conv2d_2"] == "int32"  # the sum, which is dequantized


def test_operators_in_place_have_the_rules_of_their_annotations(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1)).eval()
    last = {ATEN.silu_.default: all_inputs(ACT, ACT), ATEN.silu.default: all_inputs(ACT, FIXED), ATEN.conv2d.default: layer()}
    prepared = torch_ao.prepare_pt2e(program(model), Mine(last), target="x86")
    assert not [line for line in caplog.messages if "matched nothing" in line]
    assert [name for name, operator in quantized_operators(prepared).items() if operator.output.given] == ["silu_1"]


def test_scales_that_are_not_shared_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rules = {ATEN.conv2d.default: layer(), ATEN.sigmoid.default: shared, ATEN.max_pool2d.default: shared}
    torch_ao.prepare_pt2e(program(), Mine(rules), target="x86")
    (said,) = [line for line in caplog.messages if "SharedQuantizationSpec" in line]
    assert said.endswith("%sigmoid and %conv2d_2")  # a pooling has the scale of its operand


class Own(ao.MinMaxObserver):
    """An observer of a user's own."""


def test_an_observer_of_the_user_s_own_is_one_grid_for_writers_and_readers() -> None:
    own = QuantizationSpec(torch.int8, Own, -128, 127, torch.per_tensor_symmetric)
    rules = {ATEN.conv2d.default: layer(own, WEIGHT, own), ATEN.sigmoid.default: all_inputs(own, own)}
    prepared = calibrated(torch_ao.prepare_pt2e(program(), Mine(rules), target="nash-e"))
    assert [str(node.target) for node in prepared.graph.nodes if "requantize" in str(node.target)] == []
    assert fxq.verify(prepared, torch_ao.convert_pt2e(prepared), BATCHES[:1])


def test_a_program_is_trained_by_annotations() -> None:
    rules = {ATEN.conv2d.default: layer()}
    prepared = torch_ao.prepare_qat_pt2e(program(Net().train()), Mine(rules), target="x86")
    calibrated(prepared)
    torch_ao.move_exported_model_to_eval(prepared)
    assert found(prepared)["conv2d"] == "uint8"
    assert "batch_norm" not in found(prepared)
    assert fxq.verify(prepared, torch_ao.convert_pt2e(prepared), BATCHES[:1])


def test_a_layer_is_dynamic() -> None:
    rules = {ATEN.linear.default: lambda node: QuantizationAnnotation({node.args[0]: DYNAMIC, node.args[1]: WEIGHT})}
    prepared = torch_ao.prepare_pt2e(program(nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval()), Mine(rules), target="x86")
    assert [each.name for each in fxq.inspect.layers(torch_ao.convert_pt2e(prepared)) if each.dynamic] == ["linear"]
    config = torch_ao.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    rules_of_ours = torch_ao.XNNPACKQuantizer().set_module_type(nn.Linear, config)
    prepared = torch_ao.prepare_pt2e(program(nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval()), rules_of_ours)
    assert [each.name for each in fxq.inspect.layers(torch_ao.convert_pt2e(prepared)) if each.dynamic] == ["linear"]


def test_a_class_is_the_function_that_its_modules_call() -> None:
    quantizer = torch_ao.X86InductorQuantizer().set_global(fxq.QConfig()).set_module_type(nn.Sigmoid, None).set_module_type(nn.Conv2d, None)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(256, 2)).eval()
    dtypes = found(torch_ao.prepare_pt2e(program(model), quantizer))
    assert (dtypes["conv2d"], dtypes["sigmoid"], dtypes["linear"]) == ("float32", "float32", "int32")


class Transforming(Mine):
    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        (output,) = model.graph.find_nodes(op="output")
        with model.graph.inserting_before(output):
            model.graph.call_function(ATEN.relu.default, (output.args[0][0],))
        return model


def two_grids(node: fx.Node) -> QuantizationAnnotation:
    return QuantizationAnnotation({node.args[0]: SYMMETRIC, node.args[1]: NARROW}, SYMMETRIC)  # type: ignore[dict-item]


REFUSED: dict[str, tuple[Any, str]] = {
    "derived": (Mine({ATEN.sigmoid.default: all_inputs(DerivedQuantizationSpec([], None, torch.int8), ACT)}), "DerivedQ.* on %sigmoid"),
    "two grids": (Mine({ATEN.add.Tensor: two_grids}), "%add"),
    "a grid that the target has not": (Mine({ATEN.conv2d.default: layer(ACT)}), "uint8"),
    "an affine weight": (Mine({ATEN.conv2d.default: layer(weight=ACT)}), "the weight of %conv2d"),
    "a graph that is changed": (Transforming({}), "transform_for_annotation"),
    "no quantizer": (7, "quantizer"),
    "a method that rules have not": (lambda: torch_ao.XNNPACKQuantizer().set_filter_function(None), "set_filter_function"),
    "ranges": (lambda: torch_ao.get_symmetric_quantization_config(weight_qmin=0, weight_qmax=62), "4 or 8 bits"),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    quantizer, words = REFUSED[name]
    with pytest.raises(fxq.FxQuantError, match=words) as caught:
        torch_ao.prepare_pt2e(program(), quantizer() if callable(quantizer) else quantizer, target="bayes-e")
    assert caught.value.because
    assert caught.value.remedy


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_weight_for_xnnpack_has_the_scales_that_the_config_says(per_channel: bool) -> None:
    quantizer = torch_ao.XNNPACKQuantizer().set_global(torch_ao.get_symmetric_quantization_config(is_per_channel=per_channel))
    operators = quantized_operators(torch_ao.prepare_pt2e(program(), quantizer))
    assert {operators[name].weight_quantizer.per_channel for name in ("conv2d", "conv2d_1", "conv2d_2")} == {per_channel}


def test_ranges_of_weights_are_read() -> None:
    config = torch_ao.get_symmetric_quantization_config(is_per_channel=True, weight_qmin=-8, weight_qmax=7)
    assert config == fxq.QConfig(weight=fxq.WeightConfig("int4"))


# ---- a target as a quantizer --------------------------------------------------------------------------------------------
def test_a_target_is_a_quantizer() -> None:
    quantizer = torch_ao.BpuQuantizer("x5")
    prepared = calibrated(torch_ao.prepare_pt2e(program(), quantizer))
    assert prepared.meta["target"].name == "bayes-e"
    assert {each.dtype for each in fxq.inspect.layers(prepared) if each.integer} == {"int8"}
    assert found(prepared)["sigmoid"] == "int8"
    assert fxq.verify(prepared, torch_ao.convert_pt2e(prepared), BATCHES[:1])
    with pytest.raises(fxq.errors.ConfigurationError, match="BpuQuantizer has no annotate"):  # which torchao calls
        quantizer.annotate(program().module())
