"""PyTorch's torch.ao.quantization over fxquant: its own objects read into ours, its functions, and what has no equal here."""

import copy
import sys
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.ao.quantization import quantize_fx
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import fxquant as fxq
from fxquant.compat import torch_ao
from fxquant.compat.torch_ao.reading import read
from fxquant.prepared.operators import quantized_operators
from tests.shared.networks import descend, dtypes, members, stored, written

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in ("Please use quant_min", "torch.ao.quantization is deprecated")]

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@members(lambda: dict(
    conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8), relu=nn.ReLU(), up=nn.ConvTranspose2d(8, 8, 2, stride=2), act=nn.PReLU(8),
    fc=nn.Linear(8, 5),
), seed=0)  # fmt: skip
def Net(self, x: Tensor) -> Tensor:
    """A layer with batch norm and ReLU, a transposed convolution, and a sigmoid, which PyTorch gives a scale."""
    x = self.act(self.up(self.relu(self.bn(self.conv(x)))))
    return torch.sigmoid(4 * self.fc(x.mean((2, 3))))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 2, 1).eval()


@members(lambda: dict(
    quant=ao.QuantStub(), dequant=ao.DeQuantStub(), sum=torch.ao.nn.quantized.FloatFunctional(), conv=nn.Conv2d(3, 8, 3, padding=1),
    bn=nn.BatchNorm2d(8), relu=nn.ReLU(), skip=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 5),
), seed=0)  # fmt: skip
def Eager(self, x: Tensor) -> Tensor:
    """The network above with quantization stubs and a third layer."""
    x = self.quant(x)
    x = self.sum.add(self.relu(self.bn(self.conv(x))), self.skip(x))
    return self.head(self.dequant(x).mean((2, 3)))


def calibrated(prepared: nn.Module) -> nn.Module:
    with torch.no_grad():
        for batch in BATCHES:
            prepared(batch)
    return prepared


def signal(integer: nn.Module, model: nn.Module) -> float:
    """SQNR in dB."""
    with torch.no_grad():
        exact = torch.cat([model(batch) for batch in BATCHES])
        noise = torch.cat([integer(batch) for batch in BATCHES]) - exact
    return 10 * torch.log10(exact.var() / noise.square().mean()).item()


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_a_model_is_calibrated_by_calling_it(backend: str, tmp_path: Any) -> None:
    model = Net().eval()
    prepared = torch_ao.prepare_fx(model, torch_ao.get_default_qconfig_mapping(backend), (BATCHES[0],), target=backend)
    integer = torch_ao.convert_fx(calibrated(prepared))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx") if backend == "x86" else prepared, BATCHES[:1])
    assert signal(integer, model) > 25
    assert fxq.qparams(prepared)["sigmoid"] == (1 / 256, 0)  # as PyTorch's default mapping says
    assert not [line for line in fxq.explain(prepared).splitlines() if "matched nothing" in line]
    weights = {operator.weight_quantizer.per_channel for operator in quantized_operators(prepared).values() if operator.name == "conv"}
    assert weights == {backend == "x86"}


def test_a_line_of_the_log_says_where_weights_and_scales_are_that_a_loop_over_modules_does_not_find(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    prepared = torch_ao.prepare_fx(copy.deepcopy(model), torch_ao.get_default_qconfig_mapping("x86"), (torch.randn(2, 4),))
    prepared(torch.randn(8, 4))
    with caplog.at_level("INFO", "fxquant"):
        integer = torch_ao.convert_fx(prepared)
    assert "fxq.text(integer) shows its weights, scales and zero points" in caplog.text
    assert "weight" in fxq.text(integer)
    assert fxq.qparams(prepared)


def test_a_prepared_model_goes_on_after_it_was_converted() -> None:
    prepared = torch_ao.prepare_fx(small(), ao.get_default_qconfig_mapping(), (BATCHES[0],))
    prepared(BATCHES[0] / 8)
    first = torch_ao.convert_fx(prepared)
    prepared(BATCHES[0])
    second = torch_ao.convert_fx(prepared)
    assert not torch.equal(first(BATCHES[0]), second(BATCHES[0]))


def test_a_model_is_trained_and_its_observers_are_switched_off() -> None:
    prepared = torch_ao.prepare_qat_fx(Net().train(), torch_ao.get_default_qat_qconfig_mapping("x86"), (BATCHES[0],))
    before = {name: value.clone() for name, value in prepared.named_parameters()}
    descend(prepared, BATCHES, 0.05, lambda output: output.square().sum())
    still = [name for name, value in prepared.named_parameters() if torch.equal(value, before[name])]
    assert still == ["conv.bias"]  # which a batch norm of the batch takes away again
    prepared.apply(torch_ao.disable_observer)
    prepared.apply(torch_ao.freeze_bn_stats)
    scales, mean = fxq.qparams(prepared), prepared.state_dict()["bn.running_mean"].clone()
    trained = prepared(BATCHES[0] * 3)
    assert fxq.qparams(prepared) == scales
    assert torch.equal(prepared.state_dict()["bn.running_mean"], mean)
    prepared.eval()
    assert torch.equal(torch_ao.convert_fx(prepared)(BATCHES[0] * 3), trained)
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot follow"):
        prepared.apply(torch_ao.enable_observer)


def test_switches_are_states() -> None:
    def states() -> set[fxq.State]:
        return {operator.state for operator in quantized_operators(prepared).values()}

    prepared = torch_ao.prepare_qat_fx(small().train(), torch_ao.get_default_qat_qconfig("x86"), (BATCHES[0],))
    torch_ao.disable_fake_quant(prepared)
    assert states() == {fxq.State.CALIBRATE}
    calibrated(prepared)
    torch_ao.enable_fake_quant(prepared)
    assert states() == {fxq.State.TRAIN}
    assert fxq.verify(prepared, torch_ao.convert_fx(prepared), BATCHES[:1])
    fxq.set_state(prepared, "validate")
    torch_ao.disable_fake_quant(prepared)
    assert states() == {fxq.State.FLOAT}
    torch_ao.enable_observer(prepared)
    assert states() == {fxq.State.CALIBRATE}
    torch_ao.disable_observer(prepared)
    assert states() == {fxq.State.FLOAT}


def test_observers_are_found_under_their_names() -> None:
    """Each observer observes: it saw the values that passed; operators with the scale of another have no observer."""
    prepared = torch_ao.prepare_fx(Net().eval(), ao.get_default_qconfig_mapping("x86"), (BATCHES[0],), target="x86")
    empty: dict[str, nn.Module] = {}
    torch_ao.get_observer_dict(prepared, empty)
    assert not any(observer.observed for observer in empty.values())
    calibrated(prepared)
    by_name: dict[str, nn.Module] = {"kept": nn.Identity()}
    torch_ao.get_observer_dict(prepared, by_name, "backbone")
    assert {"kept", *(f"backbone.{name}" for name in empty)} == set(by_name)
    owners = {name for name, operator in quantized_operators(prepared).items() if operator.owns_output and not operator.plain}
    assert {name.removesuffix(".activation_post_process") for name in empty} <= owners
    for name, observer in empty.items():
        assert observer is by_name[f"backbone.{name}"]
        assert observer.observed
    values = torch.cat([record["fc"] for record in fxq.inspect.record(prepared, BATCHES, ["fc"], real=True, state="float")])
    assert float(empty["fc.activation_post_process"].largest) == float(values.abs().max())
    with pytest.raises(fxq.errors.ConfigurationError, match="prepared"):
        torch_ao.get_observer_dict(nn.Linear(2, 2), {})


def test_a_state_dict_of_an_integer_model_loads_where_its_graph_is_equal() -> None:
    mapping, example = ao.get_default_qconfig_mapping("x86"), (BATCHES[0],)
    prepared = calibrated(torch_ao.prepare_fx(small(), mapping, example))
    first, second = (torch_ao.convert_fx(prepared) for _ in range(2))
    second.load_state_dict(first.state_dict())
    shifted = torch_ao.prepare_fx(small(), mapping, example)
    shifted(BATCHES[0] + 3)
    with pytest.raises(fxq.errors.ConfigurationError, match="zero points"):
        torch_ao.convert_fx(shifted).load_state_dict(first.state_dict())


def test_a_weight_has_the_scales_that_its_qconfig_asks_for_whatever_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "quantized", types.SimpleNamespace(engine="qnnpack"))
    of_layer = ao.get_default_qconfig_mapping("qnnpack")
    of_channel = ao.QConfigMapping().set_global(ao.QConfig(ao.HistogramObserver, ao.default_per_channel_weight_observer))
    for mapping, per_channel in ((of_layer, False), (of_channel, True)):
        prepared = torch_ao.prepare_fx(small(), mapping, (BATCHES[0],))
        quantizers = [each.weight_quantizer for each in quantized_operators(prepared).values() if each.weight_quantizer]
        assert {each.per_channel for each in quantizers} == {per_channel}


@pytest.mark.parametrize("fused", [False, True])
def test_an_eager_model_has_integers_between_its_stubs(fused: bool) -> None:
    model = Eager().eval()
    if fused:  # by PyTorch itself: its modules are what they compute
        model = ao.fuse_modules(model, [["conv", "bn", "relu"]])
    model.qconfig = ao.get_default_qconfig("x86")
    prepared = torch_ao.prepare(torch_ao.fuse_modules(model, [["conv", "bn", "relu"]]), example_inputs=(BATCHES[0],))
    integer = torch_ao.convert(calibrated(prepared))
    devices = {layer.name: layer.device for layer in fxq.inspect.layers(integer)}
    assert (devices["conv_0" if fused else "conv"], devices["skip"], devices["head"]) == ("x86", "x86", "host")
    assert fxq.verify(prepared, integer, BATCHES[:1])
    assert signal(integer, model) > 25
    assert isinstance(model.qconfig, ao.QConfig)  # the caller's model is as it was


def trained_eager(optimizer: str) -> tuple[nn.Module, nn.Module]:
    """Train an eager model as PyTorch's pages write it; return its prepared and its integer form.

    optimizer   "example": after prepare_qat with example inputs; "before" and "after" prepare_qat in place; "copy": after one that is not
    """
    model = Eager().train()
    model.qconfig = ao.get_default_qat_qconfig("x86")
    early = torch.optim.SGD(model.parameters(), 0.1)
    inplace = optimizer in ("before", "after")
    prepared = torch_ao.prepare_qat(model, inplace=inplace, example_inputs=(BATCHES[0],) if optimizer == "example" else None)
    assert (prepared is model) == inplace
    late = torch.optim.SGD(prepared.parameters(), 0.1)
    for step, batch in enumerate(BATCHES):
        if step == 2:
            prepared.apply(torch_ao.disable_observer)
            prepared.apply(torch_ao.freeze_bn_stats)
        prepared(batch).square().mean().backward()
        (early if optimizer == "before" else late).step()
        prepared.zero_grad()
    kept = copy.deepcopy(prepared.eval())
    integer = torch_ao.convert(prepared, inplace=inplace)
    assert (integer is model) == inplace
    return kept, integer


@pytest.mark.sweep(1)
@pytest.mark.parametrize("optimizer", ["before", "after", "copy"])
def test_an_eager_model_is_prepared_in_place_and_by_its_first_batch(optimizer: str) -> None:
    (expected, _), (prepared, integer) = trained_eager("example"), trained_eager(optimizer)
    assert torch.equal(prepared(BATCHES[0]), expected(BATCHES[0]))
    assert torch.equal(integer(BATCHES[0]), expected(BATCHES[0]))
    assert not torch.equal(expected.conv.weight, Eager().conv.weight)
    # A checkpoint goes into another object that is not prepared yet.
    other = Eager().train()
    other.qconfig = ao.get_default_qat_qconfig("x86")
    torch_ao.prepare_qat(other, inplace=True)
    other.load_state_dict(stored(prepared.state_dict(), weights_only=True))
    assert torch.equal(other.eval()(BATCHES[0]), expected(BATCHES[0]))
    other.load_state_dict(prepared.state_dict())


def test_switches_wait_for_the_first_batch() -> None:
    model = Eager().train()
    model.qconfig = ao.get_default_qat_qconfig("x86")
    prepared = torch_ao.prepare_qat(model)
    prepared.apply(torch_ao.disable_fake_quant)
    prepared = stored(prepared)  # before the first batch, too
    prepared(BATCHES[0])
    assert {operator.state for operator in quantized_operators(prepared).values()} == {fxq.State.CALIBRATE}
    assert torch.equal(stored(prepared)(BATCHES[0]), prepared(BATCHES[0]))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_is_dynamic_from_its_first_batch_on(inplace: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    expected = torch_ao.quantize_dynamic(model, {nn.Linear}, example_inputs=(x,))
    quantized = torch_ao.quantize_dynamic(model, {nn.Linear}, inplace=inplace)
    assert (quantized is model) == inplace
    assert torch.equal(quantized(x), expected(x))
    assert fxq.inspect.layers(quantized)


def test_a_batch_size_that_forward_needs_is_fixed(caplog: pytest.LogCaptureFixture) -> None:
    model = written(lambda m, x: m.conv(x).squeeze(0).permute(1, 2, 0), conv=nn.Conv2d(3, 4, 1)).eval()
    x = torch.randn(1, 3, 4, 5)
    prepared = torch_ao.prepare_fx(model, ao.get_default_qconfig("x86"), (x,))
    assert prepared(x).shape == (4, 5, 4)
    assert "the batch size is fixed" in caplog.text
    integer = torch_ao.convert_fx(prepared)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    assert torch.equal(integer(x), prepared(x))


# ---- checkpoints, branches of training, shapes ------------------------------------------------------------------------------
@members(lambda: dict(
    conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8), relu=nn.ReLU(), pool=nn.MaxPool2d(2), skip=nn.Conv2d(3, 8, 1),
    head=nn.Linear(8, 5),
), seed=0)  # fmt: skip
def Pooled(self, x: Tensor, other: Tensor) -> Tensor:
    """A fused layer, a pool that keeps its grid, and two inputs, the second of which is read first."""
    y = self.skip(other)
    x = self.relu(self.bn(self.conv(x))) * y
    return self.head(self.pool(x).mean((2, 3)))


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_a_checkpoint_of_pytorch_s_graphs_loads(backend: str) -> None:
    inputs = (BATCHES[0], 3 * BATCHES[1])
    mapping = ao.get_default_qat_qconfig_mapping(backend)
    theirs = quantize_fx.prepare_qat_fx(Pooled().train(), mapping, inputs)
    for batch in BATCHES:
        theirs(batch, 2 * batch)
    mine = torch_ao.prepare_qat_fx(Pooled().train(), mapping, inputs, target=backend)
    told = mine.load_state_dict(theirs.state_dict(), strict=False)
    assert told.unexpected_keys == []
    scales = {
        str(node.args[0]): (float(getattr(theirs, str(node.target)).scale), int(getattr(theirs, str(node.target)).zero_point))
        for node in theirs.graph.nodes
        if node.op == "call_module" and str(node.target).startswith("activation_post_process")
    }
    scale_of = fxq.qparams(mine)
    names = {"x_quantize": "x", "other_quantize": "other", "skip": "skip", "conv": "conv", "mul": "mul", "mean": "mean", "head": "head"}
    for name, theirs_name in names.items():
        assert scale_of[name] == scales[theirs_name], name
    assert torch.equal(mine.bn.running_mean, theirs.conv.bn.running_mean)
    assert torch.equal(mine.conv.weight, theirs.conv.weight)
    fxq.set_state(mine.eval(), "validate")
    assert fxq.verify(mine, torch_ao.convert_fx(mine), [inputs])


def test_a_checkpoint_of_pytorch_s_eager_training_loads() -> None:
    def fused() -> nn.Module:
        model = Eager().train()
        model.qconfig = ao.get_default_qat_qconfig("qnnpack")
        return ao.fuse_modules_qat(model, [["conv", "bn", "relu"]])

    theirs = ao.prepare_qat(fused())
    for batch in BATCHES:
        theirs(batch)
    plain = Eager().train()
    plain.qconfig = ao.get_default_qat_qconfig("qnnpack")
    mine = torch_ao.prepare_qat(plain, example_inputs=(BATCHES[0],), target="qnnpack")
    mine.load_state_dict(theirs.state_dict(), strict=False)
    scales = fxq.qparams(mine)
    for name, module in {"conv": theirs.conv, "skip": theirs.skip, next(iter(scales)): theirs.quant}.items():
        assert scales[name] == (float(module.activation_post_process.scale), int(module.activation_post_process.zero_point))
    assert torch.equal(mine.bn.running_var, theirs.conv.bn.running_var)


def test_a_checkpoint_of_another_graph_gives_no_scale() -> None:
    mapping = ao.get_default_qat_qconfig_mapping("x86")
    theirs = quantize_fx.prepare_qat_fx(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)).train(), mapping, (BATCHES[0],))
    theirs(BATCHES[0])
    mine = torch_ao.prepare_qat_fx(nn.Sequential(nn.Conv2d(3, 4, 1)).train(), mapping, (BATCHES[0],))
    before = fxq.qparams(mine)
    told = mine.load_state_dict(theirs.state_dict(), strict=False)
    unexpected = [key for key in told.unexpected_keys if key.startswith("activation_post_process")]
    assert unexpected == [f"activation_post_process_{index}.scale" for index in range(3)]
    assert str(fxq.qparams(mine)) == str(before)


def test_zero_points_of_signed_integers_count_from_the_least() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).train()
    mine = torch_ao.prepare_qat_fx(model, ao.get_default_qat_qconfig_mapping("x86"), (BATCHES[0],))
    checkpoint = dict(model.state_dict())
    for index, zero_point in enumerate((-5, 7)):
        checkpoint[f"activation_post_process_{index}.scale"] = torch.tensor([0.25])
        checkpoint[f"activation_post_process_{index}.zero_point"] = torch.tensor([zero_point], dtype=torch.int32)
    mine.load_state_dict(checkpoint, strict=False)
    assert list(fxq.qparams(mine).values()) == [(0.25, 123), (0.25, 135)]


def with_auxiliary(model: Any, x: Tensor) -> Any:
    x = model.conv(x)
    return (x, model.aux(x)) if model.training else x


@pytest.mark.parametrize("eager", [False, True])
def test_what_forward_computes_only_in_train_mode_is_kept(eager: bool) -> None:
    def prepared(**options: Any) -> Any:
        model = written(with_auxiliary, conv=nn.Conv2d(3, 4, 1), aux=nn.Conv2d(4, 2, 1))
        model.qconfig = ao.get_default_qat_qconfig("x86")
        if eager:
            return torch_ao.prepare_qat(model, example_inputs=(BATCHES[0],), **options)
        return torch_ao.prepare_qat_fx(model, ao.get_default_qat_qconfig_mapping("x86"), (BATCHES[0],), **options)

    trained = prepared()
    assert [tuple(each.shape) for each in trained(BATCHES[0])] == [(4, 4, 8, 8), (4, 2, 8, 8)]
    assert isinstance(trained.eval()(BATCHES[0]), Tensor)
    assert isinstance(prepared(training_branch=False)(BATCHES[0]), Tensor)


def test_sizes_are_those_that_are_asked_for() -> None:
    model, mapping = nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), ao.get_default_qconfig_mapping("x86")
    fixed = calibrated(torch_ao.prepare_fx(model, mapping, (BATCHES[0],), dynamic_shapes={}))
    with pytest.raises(fxq.FxQuantError):
        fixed(BATCHES[0][:2])
    free = calibrated(torch_ao.prepare_fx(model, mapping, (BATCHES[0],)))
    assert free(BATCHES[0][:2]).shape == (2, 4, 8, 8)


# ---- what PyTorch's objects mean ----------------------------------------------------------------------------------------
A, W = fxq.ActivationConfig, fxq.WeightConfig
HIST, MIN_MAX, MOVING = fxq.observers.HistogramObserver, fxq.observers.MinMaxObserver, fxq.observers.MovingAverageMinMaxObserver
SIGNED = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
WEIGHT = ao.default_weight_observer


def activation(observer: Any, **arguments: Any) -> ao.QConfig:
    return ao.QConfig(observer.with_args(**arguments), WEIGHT)


MEANINGS = {
    "affine": (activation(ao.HistogramObserver), A("uint8", HIST)),
    "affine and signed": (activation(ao.HistogramObserver, dtype=torch.qint8), A("uint8", HIST)),
    "symmetric": (activation(ao.MinMaxObserver, **SIGNED), A("int8", MIN_MAX)),
    "symmetric and unsigned": (activation(ao.MinMaxObserver, qscheme=torch.per_tensor_symmetric), A("int8", MIN_MAX)),
    "reduced": (activation(ao.MinMaxObserver, reduce_range=True), A("uint8", MIN_MAX)),
    "moving": (activation(ao.MovingAverageMinMaxObserver, averaging_constant=0.25), A("uint8", MOVING(0.25))),
    "bins": (activation(ao.HistogramObserver, bins=512), A("uint8", fxq.observers.HistogramObserver(512))),
    "four bits": (activation(ao.MinMaxObserver, **SIGNED, quant_min=-8, quant_max=7), A("int4", MIN_MAX)),
    "sixteen bits": (
        activation(ao.MinMaxObserver, dtype=torch.int16, qscheme=torch.per_tensor_symmetric, quant_min=-(2**15), quant_max=2**15 - 1),
        A("int16", MIN_MAX),
    ),
    "fixed": (
        activation(ao.FixedQParamsObserver, scale=2 / 256, zero_point=128, dtype=torch.quint8, quant_min=0, quant_max=255),
        A("uint8", scale=2 / 256, zero_point=128),
    ),
    "fake quantize": (ao.default_qat_qconfig, A("uint8", MOVING(0.01))),
    "ours inside": (ao.QConfig(fxq.observers.PercentileObserver, WEIGHT), A(observer=fxq.observers.PercentileObserver)),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_an_activation_means(name: str) -> None:
    qconfig, expected = MEANINGS[name]
    assert read(qconfig).output == expected


def test_a_weight_means_and_a_learnable_fake_quantize_is_a_learned_scale() -> None:
    def weight(observer: Any) -> fxq.WeightConfig:
        return read(ao.QConfig(ao.default_observer, observer)).weight

    assert weight(ao.default_weight_observer) == W("int8", per_channel=False)
    assert weight(ao.default_per_channel_weight_observer) == W("int8")
    assert weight(ao.default_per_channel_weight_fake_quant) == W("int8")
    assert weight(ao.weight_observer_range_neg_127_to_127) == W("int8", per_channel=False)
    assert weight(ao.default_per_channel_weight_observer.with_args(quant_min=-8, quant_max=7)) == W("int4")
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

    learnable = _LearnableFakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    by_weight = _LearnableFakeQuantize.with_args(observer=ao.MinMaxObserver, quant_min=-128, quant_max=127, **SIGNED)
    qconfig = read(ao.QConfig(learnable, by_weight))
    assert (qconfig.output.training, qconfig.weight.training) == ("learned", "learned")


REFUSED = {
    "dynamic and half": (ao.float16_dynamic_qconfig, "dynamic"),
    "half": (ao.float16_static_qconfig, "PlaceholderObserver"),
    "weights alone": (ao.default_weight_only_qconfig, "Identity"),
    "activations alone": (ao.default_activation_only_qconfig, "weight Identity"),
    "what it reads": (ao.default_reuse_input_qconfig, "ReuseInput"),
    "recorded": (ao.default_debug_qconfig, "RecordingObserver"),
    "unsigned weight": (ao.default_quint8_weight_qconfig, "weight"),
    "embeddings": (ao.float_qparams_weight_only_qconfig, "Placeholder"),
    "affine weight": (ao.QConfig(ao.default_observer, ao.MinMaxObserver.with_args(dtype=torch.qint8)), "weight"),
    "channels of an activation": (ao.QConfig(ao.default_per_channel_weight_observer, WEIGHT), "activation"),
    "another axis": (ao.QConfig(ao.default_observer, ao.default_per_channel_weight_observer.with_args(ch_axis=1)), "weight"),
    "six bits": (activation(ao.MinMaxObserver, quant_min=0, quant_max=63), "activation"),
    "affine in four bits": (activation(ao.MinMaxObserver, quant_min=0, quant_max=15), "activation"),
    "histogram of a weight": (ao.QConfig(ao.default_observer, ao.HistogramObserver.with_args(**SIGNED)), "weight"),
    "an observer without scales": (ao.QConfig(type("Mine", (nn.Module,), {}), WEIGHT), "Mine"),
    "channels of one's own": (activation(type("Mine", (ao.PerChannelMinMaxObserver,), {})), "Mine"),
    "none": ("int8", "qconfig"),
    "broken": (ao.QConfig(lambda: 1 / 0, WEIGHT), "activation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_qconfig_that_has_no_equal_is_refused(name: str) -> None:
    qconfig, expected = REFUSED[name]
    with pytest.raises(fxq.errors.ConfigurationError, match=expected) as caught:
        read(qconfig)
    assert caught.value.because
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["default_dynamic_qconfig", "per_channel_dynamic_qconfig", "default_dynamic_qat_qconfig"])
def test_a_dynamic_qconfig(name: str) -> None:
    result = read(getattr(ao, name))
    assert result.dynamic
    assert result.weight == fxq.WeightConfig(per_channel=name.startswith("per_channel"))


SPECIFICATIONS: dict[str, Any] = {
    "what is usual": (None, ["fc", "head"]),
    "a class": ({nn.Linear}, ["fc", "head"]),
    "a name": ({"head"}, ["head"]),
    "a dict": ({nn.Linear: ao.per_channel_dynamic_qconfig, "fc": None}, ["head"]),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch says that its own function is deprecated
@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_quantize_dynamic(name: str, caplog: pytest.LogCaptureFixture) -> None:
    specification, expected = SPECIFICATIONS[name]
    model = nn.Sequential(OrderedDict(fc=nn.Linear(6, 8), act=nn.Tanh(), head=nn.Linear(8, 4))).eval()
    x = torch.randn(16, 6)
    ours = torch_ao.quantize_dynamic(model, specification, example_inputs=(x,))
    assert not caplog.records, "no rule is about what the model has not"
    assert [layer.name for layer in fxq.inspect.layers(ours) if layer.dynamic] == expected
    with torch.no_grad():
        wanted, theirs = model(x), ao.quantize_dynamic(model, specification)(x)
    assert float((ours(x) - wanted).square().mean()) < float((theirs - wanted).square().mean())  # theirs have seven bits


class Mine(ao.ObserverBase):
    """An observer of a user's own, which covers 3/4 of the largest magnitude."""

    def __init__(self, dtype: torch.dtype = torch.qint8, **settings: Any) -> None:
        super().__init__(dtype)
        self.qscheme, self.most = torch.per_tensor_symmetric, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.most = torch.maximum(self.most, x.abs().max())
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.most * 0.75 / 128, torch.zeros((), dtype=torch.int64)


@pytest.mark.parametrize("derived", [Mine, type("Narrow", (ao.MinMaxObserver,), {})])
def test_an_observer_of_the_user_s_own_gives_the_scale(derived: Any) -> None:
    prepared = torch_ao.prepare_fx(small(), ao.QConfig(derived, WEIGHT), (BATCHES[0],))
    assert fxq.verify(calibrated(prepared), torch_ao.convert_fx(prepared), BATCHES[:1])
    theirs = derived()
    for batch in BATCHES:
        theirs(batch)
    (scales, *_) = fxq.qparams(prepared).values()
    scale, zero_point = scales if isinstance(scales, tuple) else (scales, 0)
    assert scale == pytest.approx(float(theirs.calculate_qparams()[0]), rel=1e-6)
    assert zero_point == int(theirs.calculate_qparams()[1])


def test_functions_that_quantize_whole() -> None:
    model = Eager().eval()
    model.qconfig = ao.get_default_qconfig("x86")
    integer = torch_ao.quantize(model, lambda m, data: [m(batch) for batch in data], [BATCHES])
    assert signal(integer, model) > 25
    model.qconfig = ao.get_default_qat_qconfig("x86")
    trained = torch_ao.quantize_qat(model, lambda m, data: [m(batch).sum().backward() for batch in data], [BATCHES], inplace=True)
    assert trained is model
    assert fxq.inspect.layers(trained)


def test_a_rule_for_a_function_of_a_float_functional() -> None:
    model = nn.Sequential(Eager()).eval()
    rules = ao.QConfigMapping().set_global(ao.get_default_qconfig("x86")).set_object_type(torch.add, None)
    rules.set_object_type(torch.ao.nn.quantized.FloatFunctional, None)
    layers = {layer.name: layer.integer for layer in fxq.inspect.layers(torch_ao.prepare_fx(model, rules, (BATCHES[0],)))}
    assert not layers["add"]
    assert layers["_0_conv"]


def test_a_model_that_is_prepared_is_not_traced_again() -> None:
    prepared = torch_ao.prepare_fx(small(), ao.get_default_qconfig("x86"), (BATCHES[0],))
    for model in (prepared, torch_ao.convert_fx(calibrated(prepared))):
        with pytest.raises(fxq.errors.ExportError, match="cannot trace"):
            torch.fx.symbolic_trace(model)


# ---- mappings -------------------------------------------------------------------------------------------------------------
SYMMETRIC = activation(ao.MinMaxObserver, **SIGNED)


@pytest.mark.parametrize("form", ["mapping", "dict", "fxq"])
def test_every_kind_of_rule(form: str) -> None:
    default = ao.get_default_qconfig("x86")
    mapping: Any = ao.QConfigMapping().set_global(default).set_object_type(nn.ConvTranspose2d, SYMMETRIC)
    mapping = mapping.set_module_name_regex("f.", SYMMETRIC).set_module_name("act", None)
    if form == "dict":
        mapping = mapping.to_dict()
    if form == "fxq":
        wanted = read(SYMMETRIC)
        mapping = fxq.QConfigMapping().set_object_type(nn.ConvTranspose2d, wanted).set_module_name_regex("f.", wanted)
        mapping = mapping.set_module_name("act", None)
    dtype_of = dtypes(torch_ao.prepare_fx(Net().eval(), mapping, (BATCHES[0],)))
    assert (dtype_of["conv"], dtype_of["up"], dtype_of["act"], dtype_of["fc"]) == ("uint8", "int8", "float32", "int8")


def test_a_mapping_without_a_global_rule_leaves_the_rest_in_float_and_a_rule_for_one_call_of_a_type_is_read() -> None:
    mapping = dtypes(torch_ao.prepare_fx(Net().eval(), ao.QConfigMapping().set_module_name("fc", SYMMETRIC), (BATCHES[0],)))
    assert (mapping["conv"], mapping["fc"]) == ("float32", "int8")
    rules = ao.QConfigMapping().set_global(SYMMETRIC).set_module_name_object_type_order("", nn.Conv2d, 0, None)
    prepared = torch_ao.prepare_fx(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)).eval(), rules, (torch.randn(1, 3, 4, 4),))
    assert {layer.module: layer.integer for layer in fxq.inspect.layers(prepared) if layer.macs} == {"0": False, "1": True}
    written = {"": SYMMETRIC, "module_name_object_type_order": [("", nn.Conv2d, 0, None)]}
    again = torch_ao.prepare_fx(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)).eval(), written, (torch.randn(1, 3, 4, 4),))
    assert fxq.text(again) == fxq.text(prepared)


def test_a_module_that_is_not_traced_stays_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), written(lambda m, x: x * 2 + 1), nn.Conv2d(4, 2, 1)).eval()
    custom = PrepareCustomConfig().set_non_traceable_module_names(["1"])
    custom.set_preserved_attributes(["names"])
    prepared = torch_ao.prepare_fx(model, ao.get_default_qconfig_mapping(), (BATCHES[0],), custom)
    assert [node.target for node in prepared.graph.nodes if node.op == "call_module" and node.target == "1"] == ["1"]
    assert fxq.verify(calibrated(prepared), torch_ao.convert_fx(prepared), BATCHES[:1])


# ---- what is refused, and where PyTorch's objects come from -------------------------------------------------------------
CALLS = {
    "backend_config": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), backend_config=ao.backend_config.BackendConfig("mine")),
    "equalization": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), _equalization_config={}),
    "standalone": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), {"standalone_module_names": ["conv"]}),
    "quantized inputs": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), {"input_quantized_indexes": [0]}),
    "unknown custom": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), {"nonsense": [0]}),
    "no mapping": lambda m: torch_ao.prepare_fx(m, 5, (BATCHES[0],)),
    "unknown rule": lambda m: torch_ao.prepare_fx(m, {"nonsense": []}, (BATCHES[0],)),
    "unknown argument": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), **{"nonsense": 1}),
    "unknown target": lambda m: torch_ao.prepare_fx(m, None, (BATCHES[0],), target="x87"),
    "a dtype that the target has not": lambda m: torch_ao.prepare_fx(m, ao.get_default_qconfig("x86"), (BATCHES[0],), target="bayes-e"),
    "no batch": lambda m: torch_ao.convert_fx(torch_ao.prepare_fx(m, ao.get_default_qconfig("x86"))),
    "quantize without a batch": lambda m: torch_ao.quantize(m, lambda m, data: None, [()]),
    "integers before the first batch": lambda m: torch_ao.convert(torch_ao.prepare(m)),
    "a state_dict before the first batch": lambda m: torch_ao.prepare(m).state_dict(),
    "a flag that is none": lambda m: torch_ao.prepare(m, "yes", example_inputs=(BATCHES[0],)),
    "not prepared": lambda m: torch_ao.convert_fx(m),
    "not calibrated": lambda m: torch_ao.convert_fx(torch_ao.prepare_fx(m, ao.get_default_qconfig("x86"), (BATCHES[0],))),
    "another mapping": lambda m: torch_ao.convert_fx(m, qconfig_mapping=ao.QConfigMapping()),
    "reference": lambda m: torch_ao.convert(m, is_reference=True),
    "fuser": lambda m: torch_ao.fuse_modules(m, [], fuser_func=copy.copy),
    "fuse config": lambda m: torch_ao.fuse_fx(m, {"additional_fuser_method_mapping": {1: 2}}),
    "dynamic and static": lambda m: torch_ao.quantize_dynamic(m, {nn.Linear: ao.default_qconfig}, example_inputs=(BATCHES[0],)),
    "dynamic of what": lambda m: torch_ao.quantize_dynamic(m, {5}, example_inputs=(BATCHES[0],)),
    "dynamic of a name": lambda m: torch_ao.quantize_dynamic(m, "fc", example_inputs=(BATCHES[0],)),
    "dynamic half": lambda m: torch_ao.quantize_dynamic(m, dtype=torch.float16, example_inputs=(BATCHES[0],)),
    "dynamic on a march": lambda m: torch_ao.quantize_dynamic(m, {nn.Linear}, example_inputs=(BATCHES[0],), target="bayes-e"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_done(name: str) -> None:
    with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
        CALLS[name](small())


def test_a_model_is_fused_when_it_is_prepared() -> None:
    model = Net().eval()
    assert torch_ao.fuse_fx(model) is model
    prepared = torch_ao.prepare_fx(model, ao.get_default_qconfig("x86"), (BATCHES[0],))
    assert "bn" not in dtypes(prepared)
    assert "relu" not in dtypes(prepared)


def test_a_pytorch_without_torch_ao(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.ao", "torch.quantization"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch.ao", None)
    monkeypatch.setitem(sys.modules, "torch.quantization", None)
    with pytest.raises(fxq.errors.ConfigurationError, match="get_default_qconfig_mapping is not supported") as caught:
        _ = torch_ao.get_default_qconfig_mapping
    assert "this PyTorch does not have it" in caught.value.because
    assert "fxq.QConfig" in caught.value.remedy
    prepared = torch_ao.prepare_fx(small(), fxq.QConfig(), (BATCHES[0],))
    assert fxq.verify(calibrated(prepared), torch_ao.convert_fx(prepared), BATCHES[:1])
