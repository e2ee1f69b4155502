"""The exactness contract, held by whole models: E1 integer = ONNX, E2 validate = integer, E3 train = validate, E4 proved, E5 located."""

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks import zoo
from examples.demo import build_demo_network, load_digits_dataset
from fxquant.backends.onnx.runtime import OnnxModel
from fxquant.ir.graph import resolve
from fxquant.ir.integer import notes
from fxquant.primitives import PRIMITIVES, accumulate
from tests.shared import contract
from tests.shared.contract import Compiled, all_equal, flat, graph_values, primitive_kind
from tests.shared.networks import Network, held, sqnr

MODELS = ("demo network", "ResNet-18", "MobileNetV2")


@cache
def entry(name: str) -> zoo.ZooEntry:
    """The networks of the zoo, made cheaper where the contract is the same: one is not trained, one narrow, one on small images."""
    if name == "demo network":
        digits = load_digits_dataset()
        model, calibration, test = build_demo_network(seed=0), digits.train_images[:64], digits.test_images[:64]
        zoo.make_alive(model, digits.train_images[:256])
    else:
        model = zoo.build_resnet18(image_size=32) if name == "ResNet-18" else zoo.build_mobilenet_v2(width=0.5)
        calibration, test = zoo.photographs(32, 32, seed=1), zoo.photographs(32, 32, seed=2)
    return zoo.ZooEntry(model, (calibration[:1],), list(torch.split(calibration, 16)), list(torch.split(test, 16)))


every_target = pytest.mark.parametrize("target", contract.TARGETS)
PAIRS = [*((MODELS[0], target) for target in contract.TARGETS), *zip(MODELS[1:], contract.TARGETS, strict=True)]
every_pair = pytest.mark.parametrize(  # one network on both targets, and nightly the large ones on one each
    ("name", "target"), [pytest.param(*pair, marks=pytest.mark.nightly if pair[0] != MODELS[0] else ()) for pair in PAIRS]
)


@cache
def compiled(name: str, target: str) -> Compiled:
    """One compilation for all tests that only look; a test that changes anything takes a copy by `fresh`."""
    return contract.compiled(entry(name).model, entry(name).calibration_batches, target)


def fresh(name: str, target: str) -> Compiled:
    """A compilation that a test may change."""
    return copy.deepcopy(compiled(name, target))


def images(name: str, count: int, batch: int = 0) -> Tensor:
    return entry(name).test_batches[batch][:count]


# ---- E1, E2, E3 on whole models ---------------------------------------------------------------------------------------
@every_pair
def test_validate_is_integer_and_integer_is_onnx_at_two_batch_sizes(name: str, target: str, tmp_path: Path) -> None:
    contract.assert_alive(compiled(name, target).integer, images(name, 8))
    contract.assert_validate_is_integer(*compiled(name, target), images(name, 8))
    contract.assert_integer_is_onnx(compiled(name, target).integer, tmp_path / "model.onnx", [(images(name, 3),), (images(name, 1, 1),)])


@every_pair
def test_train_is_validate_and_every_parameter_learns(name: str, target: str) -> None:
    prepared, integer = fresh(name, target)
    contract.assert_train_is_validate(prepared, images(name, 4))
    contract.assert_gradients_reach_every_parameter(prepared, images(name, 4))
    assert all_equal(prepared(images(name, 4)), integer(images(name, 4)))


@every_pair
def test_a_batch_of_one_gives_the_bits_of_the_same_image_among_others(name: str, target: str) -> None:
    integer, batch = compiled(name, target).integer, images(name, 4)
    assert torch.equal(integer(batch), torch.cat([integer(image.unsqueeze(0)) for image in batch]))


@pytest.mark.nightly  # every network on every target: benchmarks.exactness
@pytest.mark.parametrize(("name", "target"), [("U-Net", "bayes-e"), ("signal network (1-d)", "x86"), ("clip network (3-d)", "x86")])
def test_other_networks_of_the_zoo(name: str, target: str, tmp_path: Path) -> None:
    model, _, calibration, test = zoo.zoo()[name]()
    zoo.check_alive(model, torch.cat(test))
    prepared, integer = held(model, calibration[:2], tmp_path / "model.onnx", target)
    assert "none is left in float" in fxq.explain(prepared)
    assert sqnr(flat(model(test[0]))[0], flat(integer(test[0]))[0]) > 5


# ---- E3: statistics and gradients -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("default_outputs")
def test_gradients_stop_where_a_value_saturates() -> None:
    prepared = contract.compiled(nn.Sequential(nn.Conv2d(1, 1, 1)), [torch.randn(4, 1, 2, 2)]).prepared
    fxq.set_qparams(prepared, {"input_1_quantize": 0.01, "_0": 1.0})
    contract.train_without_noise(prepared)
    batch = torch.tensor([0.5, 1.26, 1.5, -1.5]).reshape(1, 1, 2, 2).requires_grad_()  # 127 · 0.01 is the largest
    prepared(batch).sum().backward()
    assert (batch.grad.flatten() != 0).tolist() == [True, True, False, False]


# ---- E4: proved accumulators ------------------------------------------------------------------------------------------
def accumulators(integer: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Every accumulator with the quantized node whose notes bound it."""
    nodes = {node.name: node for node in integer.graph.nodes}
    return [
        (node, nodes[node.meta["origin"]])
        for node in nodes.values()
        if primitive_kind(node) == "accumulator" and "accumulator_bits" in notes(nodes[node.meta["origin"]])
    ]


SUMS_OF_PRODUCTS = (accumulate.convolution, accumulate.convolution_wide, accumulate.linear, accumulate.linear_wide)


def constants(integer: fx.GraphModule, node: fx.Node) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a sum of products."""
    weight, bias = node.args[1], node.args[2]
    return resolve(integer, weight.target), None if bias is None else resolve(integer, bias.target)


def exact_patch_sums(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Σ x·w + b in int64 for patches (channel, K), each for the output channel of its row."""
    total = (patches.long() * weight.flatten(1).long()).sum(1)
    return total if bias is None else total + bias.long()


def worst_patches(weight: Tensor, sign: int) -> Tensor:
    """For every output channel the int8 inputs that make its sum largest (sign 1) or smallest (sign -1)."""
    return torch.where(weight.flatten(1).sign() * sign > 0, 127, -128).to(torch.int8)


def primitive_sum(node: fx.Node, patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the primitive's result for a patch per output channel, at that channel."""
    extra = node.args[3:] if node.target in (accumulate.linear, accumulate.linear_wide) else node.args[7:]
    if weight.dim() == 2:
        return node.target(patches, weight, bias, *extra).diagonal()
    groups = node.args[6]
    channels, inside = weight.shape[0], weight.shape[1]
    owner = torch.arange(channels) // (channels // groups)
    full = torch.zeros(channels, groups, *weight.shape[1:], dtype=torch.int8)
    full[torch.arange(channels), owner] = patches.view(weight.shape)
    rank = weight.dim() - 2
    full = full.view(channels, groups * inside, *weight.shape[2:])
    return node.target(full, weight, bias, [1] * rank, [0] * rank, [1] * rank, groups, *extra).flatten(1).diagonal()


@every_pair
def test_no_input_exceeds_the_proved_accumulator(name: str, target: str) -> None:
    integer = compiled(name, target).integer
    looked_at = 0
    for node, holder in accumulators(integer):
        if node.target not in SUMS_OF_PRODUCTS:
            continue
        limit = 2 ** (notes(holder)["accumulator_bits"] - 1)
        weight, bias = constants(integer, node)
        largest = 0
        for sign in (1, -1):
            patches = worst_patches(weight, sign)
            exact = exact_patch_sums(patches, weight, bias)
            assert torch.equal(primitive_sum(node, patches, weight, bias).long(), exact)
            largest = max(largest, int(exact.abs().max()))
        assert largest < limit
        if "residual" not in notes(holder):
            assert largest >= limit // 4, "the bound is far from what can happen"
        looked_at += 1
    assert looked_at == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in entry(name).model.modules())


@every_pair
def test_accumulators_of_real_images_are_exact_and_within_their_bound(name: str, target: str) -> None:
    integer = compiled(name, target).integer
    values = graph_values(integer, images(name, 2))
    for node, holder in accumulators(integer):
        assert int(values[node.name].long().abs().max()) < 2 ** (notes(holder)["accumulator_bits"] - 1), node.name
        if node.target is accumulate.convolution:  # in float64, whose integers are exact up to 2^53
            weight, bias = (None if each is None else each.double() for each in constants(integer, node))
            assert torch.equal(values[node.name].double(), F.conv2d(values[node.args[0].name].double(), weight, bias, *node.args[3:7]))


def large_weights(layer: nn.Module) -> nn.Module:
    """The layer with weights that are all the largest there are."""
    with torch.no_grad():
        layer.weight.copy_(torch.where(torch.randn_like(layer.weight) > 0, 1.0, -1.0))
    return layer


@every_target
def test_a_sum_beyond_24_bits_takes_the_wide_path_and_is_exact(target: str, tmp_path: Path) -> None:
    model = nn.Sequential(large_weights(nn.Linear(2048, 3)))
    batch = torch.cat([model[0].weight.detach().sign(), torch.rand(5, 2048) * 2 - 1])  # the first make each output largest
    prepared, integer = held(model, [batch, batch[:1]], tmp_path / "model.onnx", target)
    (node, holder), *_ = accumulators(integer)
    assert node.target is accumulate.linear_wide
    assert "beyond 2^24" in notes(holder)["wide"]
    values = graph_values(integer, batch)
    weight, bias = constants(integer, node)
    exact = values[node.args[0].name].long() @ weight.t().long() + bias.long()
    assert torch.equal(values[node.name].long(), exact)
    assert int(exact.abs().max()) > 2**24
    contract.assert_gradients_reach_every_parameter(prepared, batch)


@every_target
def test_a_wide_convolution_is_exact(target: str, tmp_path: Path) -> None:
    model = nn.Sequential(large_weights(nn.Conv2d(128, 2, 4, stride=2, padding=1)), nn.ReLU())
    batch = torch.cat([model[0].weight.detach(), torch.rand(3, 128, 4, 4) * 2 - 1])
    _, integer = held(model, [batch, batch[:1]], tmp_path / "model.onnx", target)
    assert accumulators(integer)[0][0].target is accumulate.convolution_wide


@every_target
def test_a_sum_that_may_not_fit_is_refused(target: str) -> None:
    features = 140_000
    with pytest.raises(fxq.errors.AccumulatorOverflow, match="the accumulator of %_0 cannot be proved to fit"):
        contract.compiled(nn.Sequential(large_weights(nn.Linear(features, 3))), [torch.rand(2, features)], target)


@pytest.mark.parametrize(("pool", "size"), [(nn.AvgPool2d(182), (182, 182)), (nn.AdaptiveAvgPool2d(1), (256, 512))], ids=["window", "mean"])
@every_target
def test_a_mean_whose_sum_may_not_fit_stays_in_float(pool: nn.Module, size: tuple[int, int], target: str) -> None:
    prepared = fxq.prepare(nn.Sequential(pool), torch.rand(2, 1, *size), target)
    assert re.search(r"%_0 +float +its sum of \d+ terms may exceed", fxq.explain(prepared))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(16_000, 2), (16_000,)), (nn.AvgPool2d(181), (1, 181, 181)), (nn.AdaptiveAvgPool2d(1), (1, 362, 362))],
    ids=["halves", "window", "mean"],
)
@every_target
def test_the_largest_sums_that_fit_are_exact(model: nn.Module, shape: tuple[int, ...], target: str, tmp_path: Path) -> None:
    if isinstance(model, nn.Linear):
        nn.init.ones_(model.weight)
    batch = torch.cat([torch.rand(2, *shape) + 0.5, torch.full((1, *shape), -2.0), torch.full((1, *shape), 1.98)])
    _, integer = held(nn.Sequential(model), [batch, batch[:1]], tmp_path / "model.onnx", target, train=False)
    if not isinstance(model, nn.Linear):
        (node, _), *_ = accumulators(integer)
        values = graph_values(integer, batch)
        sums = values["input_1_quantize"].long().flatten(1).sum(1)
        if node.target in (accumulate.convolution, accumulate.convolution_wide):  # a pooling as a layer (CHIP.md, section 15)
            weight, bias = constants(integer, node)
            assert weight.unique().tolist() == [127]
            sums = 127 * sums + bias.long()
        assert torch.equal(values[node.name].long().flatten(), sums)


def test_the_noted_bits_hold_every_sum_of_a_layer() -> None:
    """The residual is so fine beside the products that it is added after a requantization."""
    model = Network(lambda m, x: m.conv(x) + x, conv=large_weights(nn.Conv2d(64, 64, 3, padding=1)))
    integer = contract.compiled(model, [torch.rand(2, 64, 4, 4) * 2 - 1], "nash-e").integer
    (node, holder), *others = accumulators(integer)
    assert others
    assert notes(holder)["residual"].startswith("added after a requantization")
    weight, bias = constants(integer, node)
    largest = int(exact_patch_sums(worst_patches(weight, 1), weight, bias).abs().max())
    assert 2**23 < largest < 2 ** (notes(holder)["accumulator_bits"] - 1)


@pytest.mark.usefixtures("default_outputs")
def test_a_bias_beyond_the_accumulator_raises_the_scale_of_its_channel_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[1] *= 1e-6
        model[0].bias[1] = 50.0
    batch = torch.randn(8, 4)
    prepared, integer = contract.compiled(model, [batch])
    weight, bias = (resolve(integer, f"integer._0.{role}") for role in ("weight", "bias"))
    assert weight.abs().amax(1).tolist() == [127, 0, 127]
    half_step = fxq.qparams(prepared)["_0"] / 100.0  # as a share of 50: the bias holds it (CHIP.md, section 5)
    assert 2**22 < round(int(bias[1]) / (1 + half_step)) < 2**23
    contract.assert_validate_is_integer(prepared, integer, batch)


# ---- nothing but integers between the boundary nodes --------------------------------------------------------------------
@every_pair
def test_no_float_stands_between_the_boundary_nodes(name: str, target: str) -> None:
    integer = compiled(name, target).integer
    values = graph_values(integer, images(name, 1))
    for node in integer.graph.nodes:
        if node.op != "call_function":
            assert node.op in ("placeholder", "get_attr", "output")
            continue
        assert node.target in PRIMITIVES, node.name
        real = primitive_kind(node) == "float"
        assert values[node.name].dtype.is_floating_point == real, node.name
        assert not real or all(user.op == "output" for user in node.users), node.name


@every_pair
def test_every_onnx_value_is_a_whole_number_of_its_declared_type(name: str, target: str, tmp_path: Path) -> None:
    path = fxq.export_onnx(compiled(name, target).integer, tmp_path / "model.onnx", style="exact")
    model = OnnxModel(path)
    inferred = onnx.shape_inference.infer_shapes(model.model, check_type=True, strict_mode=True)
    types = {info.name: info.type.tensor_type.elem_type for info in (*inferred.graph.value_info, *inferred.graph.output)}
    for value, entry_ in model.tensors.items():
        if entry_["kind"] == "quantized":
            assert types[value] == (TensorProto.INT32 if entry_["dtype"] == "int32" else TensorProto.INT8), value
    whole = model.names(("quantized", "accumulator"))
    output = model.runner("onnxruntime", whole)({model.input_names[0]: images(name, 1)})
    for value in whole:
        assert torch.equal(output[value].double(), output[value].double().round()), value
    assert not {node.op_type for node in inferred.graph.node} & {"BatchNormalization", "Sigmoid"}
    assert all(np.issubdtype(array.dtype, np.integer) for array in weights_of_layers(inferred))


def weights_of_layers(model: onnx.ModelProto) -> list[np.ndarray]:
    """The constants that reach a Conv or MatMul as weights, before they are cast."""
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {output: node for node in model.graph.node for output in node.output}
    weights = []
    for node in model.graph.node:
        if node.op_type in ("Conv", "MatMul"):
            source = node.input[1]
            while source in producers:
                source = producers[source].input[0]
            weights.append(numpy_helper.to_array(initializers[source]))
    assert weights
    return weights


# ---- E5: located --------------------------------------------------------------------------------------------------------
LAYER = "block4_project_0"  # in the middle of the demo network: the tests below spoil its constants

LAST_OF_15_BITS = np.float32(2.0**-14)
"""The step of a multiplier of 15 bits, relative to it. Of the 24 bits that nash-e's have, the last decides too rarely."""


def layer_nodes(integer: fx.GraphModule) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The layer's input, accumulator and result."""
    nodes = {node.name: node for node in integer.graph.nodes}
    result = nodes[LAYER]
    accumulator = next(node for node in nodes.values() if node.target is accumulate.convolution and node.meta["origin"] == LAYER)
    return accumulator.args[0], accumulator, result


def assert_located(report: fxq.results.Report, name: str, *inputs: str) -> None:
    """The report names this node first, with its inputs, which were equal, and two values one step apart."""
    assert not report
    assert report.mismatches > 0
    assert (report.first.name, report.first.inputs) == (name, inputs)
    assert report.first.inputs_equal
    one, other = report.first.values
    assert abs(one - other) == 1


def replace_input(model: onnx.ModelProto, node: onnx.NodeProto, index: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Give one node another constant; others that share the old one keep it."""
    constant = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[index])
    changed = numpy_helper.from_array(change(numpy_helper.to_array(constant).copy()), "spoiled")
    model.graph.initializer.append(changed)
    node.input[index] = "spoiled"


def onnx_node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def add_one(array: np.ndarray) -> np.ndarray:
    return (array + 1).astype(array.dtype)


ROLES = [(role, target) for role in ("bias", "multiplier") for target in contract.TARGETS]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("role", "target"), [*ROLES, ("zero point", "nash-e")])  # that of bayes-e is within the function
def test_a_constant_of_the_file_that_is_off_by_one_is_located(role: str, target: str, tmp_path: Path) -> None:
    integer = compiled("demo network", target).integer
    before, accumulator, result = layer_nodes(integer)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="exact", functions=True)  # a call has its constants as inputs
    model = onnx.load(str(path))
    call = onnx_node(model, result.name)
    if role == "bias":
        replace_input(model, onnx_node(model, onnx_node(model, accumulator.name).input[2]), 0, add_one)
    elif role == "multiplier":  # after the accumulator, and the first shift where there is one
        replace_input(model, call, 2 if target == "bayes-e" else 1, lambda multiplier: multiplier * (1 + LAST_OF_15_BITS))
    else:
        replace_input(model, call, len(call.input) - 1, add_one)
    onnx.save(model, str(path))
    report = fxq.verify(integer, path, entry("demo network").test_batches)
    spoiled, inputs = (accumulator, before) if role == "bias" else (result, accumulator)
    assert_located(report, spoiled.name, inputs.name)


@pytest.mark.sweep(1)
@every_target
@pytest.mark.parametrize("role", ["bias", "multiplier"])
def test_a_constant_of_the_integer_graph_that_is_off_by_one_is_located(target: str, role: str, tmp_path: Path) -> None:
    prepared, integer = fresh("demo network", target)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", style="exact")
    before, accumulator, result = layer_nodes(integer)
    constant = resolve(integer, f"integer.{LAYER}.{role}")
    constant.copy_(constant * (1 + LAST_OF_15_BITS) if constant.is_floating_point() else constant + 1)
    batches = entry("demo network").test_batches[:1]
    spoiled, inputs = (accumulator, before) if role == "bias" else (result, accumulator)
    assert_located(fxq.verify(integer, path, batches), spoiled.name, inputs.name)
    assert_located(fxq.verify(prepared, integer, batches), result.name, before.name)


@pytest.mark.usefixtures("default_outputs")
def test_verifying_leaves_a_prepared_model_as_it_was() -> None:
    """The modes of its modules, each its own; and a batch norm that is left in float is not moved by the batches."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.BatchNorm2d(4, track_running_stats=True), nn.Conv2d(4, 2, 1))
    qconfig = fxq.QConfigMapping().set_module_name("2", None)
    batch = torch.randn(4, 3, 8, 8)
    prepared, integer = contract.compiled(model.eval(), [batch], qconfig=qconfig)
    prepared.train()
    for index, module in enumerate(prepared.modules()):
        module.training = index % 3 != 0
    fxq.set_state(prepared, fxq.State.TRAIN)
    flags = [module.training for module in prepared.modules()]
    before = copy.deepcopy(prepared.state_dict())
    assert fxq.verify(prepared, integer, [batch, 2 * batch])
    assert [module.training for module in prepared.modules()] == flags
    assert contract.same_state(prepared, before)
