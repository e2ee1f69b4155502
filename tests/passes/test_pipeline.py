"""The pipeline's laws and dumps, and the prepared model: states, copies, checkpoints, configuration, batches and outputs."""

import copy
import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxquant as fxq
from fxquant.backends import get as get_target
from fxquant.ir.graph import copy_parameters
from fxquant.ir.integer import is_inner, qparams
from fxquant.ir.model import Model
from fxquant.passes import CONVERT, PIPELINE, PREPARE
from fxquant.pipeline import Context, Dial, Pass, run
from fxquant.prepared.operators import quantized_operators
from fxquant.prepared.stage import Stage
from fxquant.primitives import shape
from fxquant.quantization.spec import DEFAULT, QConfigMapping
from tests.conftest import Golden
from tests.shared import contract
from tests.shared.contract import calibrated, compiled
from tests.shared.networks import members, to_train, written

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs

SHAPE = (2, 8, 8)


@members(lambda: dict(
    conv1=nn.Conv2d(2, 4, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(4), conv2=nn.Conv2d(4, 4, 3, padding=1, bias=False),
    bn2=nn.BatchNorm2d(4), relu=nn.ReLU(inplace=True), pool=nn.MaxPool2d(2), head=nn.Linear(64, 3),
))  # fmt: skip
def Tiny(self, x: Tensor) -> Tensor:
    """Every pass has something to do: conv-bn-relu, conv-bn-add-relu, pool, flatten, linear."""
    x = self.relu(self.bn1(self.conv1(x)))
    x = F.relu(x + self.bn2(self.conv2(x)))
    x = self.pool(x).flatten(1)
    return self.head(x)


def tiny() -> nn.Module:
    """In eval mode, with statistics that make folding no trivial matter."""
    torch.manual_seed(1)
    model = Tiny()
    for norm in (model.bn1, model.bn2):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean, std=0.2)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.eval()


def batch(count: int = 4, seed: int = 2) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


@functools.cache
def once_compiled(target: str = "bayes-e") -> contract.Compiled:
    """Of which tests take copies, or change nothing."""
    return compiled(tiny(), [batch()], target)


@pytest.fixture
def prepared() -> fx.GraphModule:
    return copy.deepcopy(once_compiled().prepared)


# ---- the laws of passes -------------------------------------------------------------------------------------------------
FLOAT_PASSES = [step for step in PREPARE if step.reaches < Stage.PREPARED]
by_pass = pytest.mark.parametrize("step", FLOAT_PASSES, ids=lambda step: step.name)


class Reversed(torch.autograd.Function):
    """Turns the sign of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@members(lambda: dict(
    stub=torch.ao.quantization.QuantStub(), tiny=tiny(), first=nn.Conv2d(2, 2, 3), mix=nn.Linear(3, 3),
    factors=nn.Parameter(torch.tensor([0.5, -1.0, 2.0])), mask=torch.tensor([0.0, -1e9, 0.0]),
))  # fmt: skip
def Around(self, x: Tensor) -> Tensor:
    """Before the tiny network zeros, and what bayes-e pads in another way; then factors, a composite, and integers between floats."""
    x = self.first(F.pad(F.pad(self.stub(x)[..., 1:-1, 1:-1], (1, 1, 1, 1), "reflect"), (1, 1, 1, 1)))
    x = self.tiny(x)
    x = self.mix(x) * self.factors
    x = torch.relu(Reversed.apply(self.mix(x))) + x.detach()
    x = torch.cat((x, 2 * x), 1)[:, :3] + x
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)  # squares, which are to be wide
    parts = torch.cat((x, 100 * x), 1)
    x = torch.fft.fft(torch.softmax(x + self.mask, 1)).real
    x = torch.fft.fft(x.abs() + x).real
    return torch.cat((torch.fft.fft(torch.sigmoid(torch.where(x > 0, x.sqrt(), x))).real, parts, self.mix(x).tanh()), 1)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    return Model.of(copy_parameters(gm), copy.deepcopy(gm.graph))


@functools.cache
def traced_model() -> fx.GraphModule:
    return fxq.trace(Around(), batch())


def context(step: Pass | None = None) -> Context:
    """Of which every pass has something to do: a pool that is to have another dtype than the layer before it; a dynamic layer."""
    if step is not None and step.name == "composite.choose_dynamic":
        return Context(get_target("x86"), QConfigMapping().set_object_type(nn.Linear, fxq.QConfig(dynamic=True)))
    mapping = QConfigMapping().set_object_type(nn.MaxPool2d, fxq.QConfig(fxq.ActivationConfig("int16")))
    return Context(get_target("bayes-e"), mapping, fxq.Options(adapt=True, integer_tail=False), open={DEFAULT})


@functools.cache
def reached(step: Pass) -> fx.GraphModule:
    gm = copied(traced_model())
    run(gm, PREPARE[: PREPARE.index(step)], context(step), Dial(0, None))
    return gm


def run_up_to(step: Pass) -> fx.GraphModule:
    """Return a copy of the graph as it is when the pass `step` begins."""
    gm = copied(reached(step))
    gm.recompile()
    return gm


# These compute the same in other steps.
ROUNDED_ANEW = ("padding.fuse", "batchnorm.fold", "layerscale.fold", "composite.expand", "adapt.apply")


@by_pass
def test_a_pass_changes_something_and_keeps_the_outputs(step: Pass) -> None:
    gm, image = run_up_to(step), batch()
    before = gm(image)
    assert step.function(gm, context(step)) > 0
    gm.recompile()
    after = gm(image)
    if step.name in ROUNDED_ANEW:
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(after, before)


FUSIONS = ("padding", "batchnorm", "layerscale", "residual", "activation")


@by_pass
def test_a_second_run_of_a_pass_changes_no_text_and_of_a_fusion_nothing(step: Pass) -> None:
    gm = run_up_to(step)
    step.function(gm, context(step))
    text = fxq.text(gm)
    changes = step.function(gm, context(step))
    assert changes == 0 or not step.name.startswith(FUSIONS)
    assert fxq.text(gm) == text


HELD = {"fft_fft": torch.fft.fft, "getattr": getattr}  # functions that the host calls


@pytest.mark.parametrize("step", FLOAT_PASSES[2:], ids=lambda step: step.name)
def test_a_text_is_read_back(step: Pass) -> None:
    gm = run_up_to(step)
    gm.meta["stage"] = PREPARE[PREPARE.index(step) - 1].reaches.name
    held = {**HELD, **dict(gm.named_modules()), **dict(gm.named_parameters()), **dict(gm.named_buffers())}
    text = fxq.text(gm)
    assert fxq.text(fxq.inspect.parse(text, held)) == text


def test_a_text_of_an_integer_graph_is_a_graph_with_its_bits() -> None:
    integer = fxq.convert(compiled(Around(), [batch()]).prepared, kernels="reference")
    text = fxq.text(integer)
    graph = fxq.inspect.parse(text, {**HELD, **dict(integer.named_parameters()), **dict(integer.named_buffers())})
    assert fxq.text(graph) == text
    assert torch.equal(graph(batch()), integer(batch()))


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("%x = input  f32[B,3]\n%y = neg(%z)  f32[B,3]", "line 2 cannot be read: %y = neg.*'z' is not known"),
        ("%bn = BatchNorm2d[bn]", "line 1 cannot be read.*'bn' is not known.*`attributes`"),
        ("%x = input  f32[B,3]\n%y = nought(%x)", "line 2 cannot be read.*nought"),
        ("%y = neg()", "line 1 cannot be read.*neg is missing its argument 'input'"),
        ("graph   # prepared", "line 1 cannot be read.*a prepared graph calls modules"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str, because: str) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=f"(?s){because}"):
        fxq.inspect.parse(text)


def test_the_pipeline_climbs_the_stages() -> None:
    reached = [step.reaches for step in PIPELINE]
    assert reached == sorted(reached)
    assert PREPARE + CONVERT == PIPELINE
    assert len({step.name for step in PIPELINE}) == len(PIPELINE)


# ---- the caller's model -------------------------------------------------------------------------------------------------
def portrait(model: nn.Module) -> list[Any]:
    """Everything a user could notice a change of."""
    return [
        (path, type(module), module.training, sorted(vars(module)), [len(getattr(module, kind)) for kind in HOOKS])
        for path, module in model.named_modules()
    ]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


@pytest.mark.parametrize("training", [False, True])
def test_the_callers_model_is_left_untouched(training: bool) -> None:
    model = tiny().train(training)
    model.bn1.eval()
    called: list[int] = []
    model.conv1.register_forward_hook(lambda *_: called.append(1))
    looks, tensors = portrait(model), {name: value.clone() for name, value in model.state_dict().items()}
    memory = {name: value.data_ptr() for name, value in model.state_dict().items()}

    prepared = to_train(fxq.calibrate(fxq.prepare(model, batch()), [batch()]))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1.0)
    prepared(batch()).sum().backward()
    optimizer.step()
    fxq.convert(prepared)

    assert portrait(model) == looks
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == memory
    assert all(parameter.grad is None for parameter in model.parameters())


def test_converting_leaves_the_prepared_model_as_it_was(prepared: fx.GraphModule) -> None:
    text, tensors = fxq.text(prepared), {name: value.clone() for name, value in prepared.state_dict().items()}
    prepared.conv2.train()
    modes = [module.training for module in prepared.modules()]
    expected = prepared(batch())
    first, second = fxq.convert(prepared), fxq.convert(prepared)
    assert fxq.text(prepared) == text
    assert [module.training for module in prepared.modules()] == modes
    assert list(prepared.state_dict()) == list(tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in prepared.state_dict().items())
    assert torch.equal(prepared(batch()), expected)
    assert fxq.text(first) == fxq.text(second)


# ---- until, dumps, the dial -----------------------------------------------------------------------------------------------
@pytest.mark.quick
def test_the_graphs_read_as_they_should_after_each_pass_that_changes_them(tmp_path: Path, golden: Golden) -> None:
    fxq.prepare(tiny(), batch(), options=fxq.Options(dump=tmp_path))
    shown = [(file.stem[3:], file.read_text(encoding="utf-8")) for file in sorted(tmp_path.iterdir())]
    changed = [(name, text) for (_, before), (name, text) in itertools.pairwise([("", ""), *shown]) if text != before]
    golden("\n".join(f"after {name}\n{text}" for name, text in changed), "graphs.txt")


@pytest.mark.quick
@pytest.mark.parametrize("target", contract.TARGETS)
def test_the_integer_graph_reads_as_it_should(target: str, golden: Golden) -> None:
    integer = compiled(tiny(), [batch()], target, qconfig=fixed(1 / 32)).integer
    golden(re.sub(r"#[0-9a-f]{8}", "#", fxq.text(integer)), f"integer-{target}.txt")  # without the fingerprints of weights
    golden(re.sub(r"\.py:\d+", ".py:N", fxq.explain(integer)), f"explain-{target}.txt")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.ANNOTATED, Stage.BOUNDED, Stage.PREPARED], ids=lambda stage: stage.name)
def test_until_a_stage_stops_at_its_last_pass(stage: Stage) -> None:
    last = [step for step in PREPARE if step.reaches is stage][-1]
    assert fxq.text(fxq.prepare(tiny(), batch(), until=stage)) == fxq.text(fxq.prepare(tiny(), batch(), until=last.name))


def test_convert_until_its_pass(prepared: fx.GraphModule) -> None:
    assert fxq.text(fxq.convert(prepared, until="integer.lower")) == fxq.text(fxq.convert(prepared, kernels="reference"))
    assert fxq.text(fxq.convert(prepared, until="integer.find_kernels")) == fxq.text(fxq.convert(prepared))


def test_dumps_are_the_graphs_after_every_pass(tmp_path: Path) -> None:
    prepared = fxq.calibrate(fxq.prepare(tiny(), batch(), options=fxq.Options(dump=tmp_path)), [batch()])
    integer = fxq.convert(prepared, options=fxq.Options(dump=tmp_path))
    files = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert sorted(files) == ["00-trace.txt", *(f"{index:02d}-{step.name}.txt" for index, step in enumerate(PIPELINE, start=1))]
    assert files["00-trace.txt"] == fxq.text(fxq.trace(tiny(), batch()))
    assert files[f"{len(PIPELINE):02d}-integer.find_kernels.txt"] == fxq.text(integer)
    reference = fxq.text(fxq.convert(prepared, kernels="reference"))
    assert files[f"{len(PIPELINE) - 1:02d}-integer.lower.txt"] == reference


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_debug_dial(level: int, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    fxq.prepare(tiny(), batch(), options=fxq.Options(debug=level))
    shown = capsys.readouterr()
    assert shown.out == ""
    golden(re.sub(r" +\d+\.\d ms", " N ms", shown.err), f"debug-{level}.txt")


def test_the_dial_by_environment_and_by_keyword(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_DEBUG", "1")
    fxq.prepare(tiny(), batch())
    assert len(capsys.readouterr().err.splitlines()) == len(PREPARE)
    fxq.prepare(tiny(), batch(), options=fxq.Options(debug=0))
    assert capsys.readouterr().err == ""


def test_every_node_knows_the_pass_and_the_line_it_came_from() -> None:
    for node in once_compiled().integer.graph.nodes:
        if node.op == "call_function" and node.name not in ("x_quantize",):
            assert node.meta["made_by"] == "integer.lower", node.name
            assert node.meta["source"].startswith("test_pipeline.py:"), node.name


# ---- copies and checkpoints -------------------------------------------------------------------------------------------------
def test_the_keys_are_the_float_models_and_the_quantizers(prepared: fx.GraphModule) -> None:
    float_keys, keys = set(tiny().state_dict()), set(prepared.state_dict())
    assert float_keys <= keys
    quantizer = r"(quantizer|intermediate)\.(base_scale|stopped|batches_used|(observer|range|others\.\w+)\.\w+)"
    pattern = rf"quantized\.\w+\.({quantizer}|factors\.(inputs|outputs))"
    assert all(re.fullmatch(pattern, key) for key in keys - float_keys)
    assert {f"quantized.{name}.quantizer.base_scale" for name in ("x_quantize", "conv1", "conv2", "head")} <= keys


def test_float_weights_load_into_a_prepared_model() -> None:
    prepared = fxq.prepare(Tiny(), batch())
    missing, unexpected = prepared.load_state_dict(tiny().state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("quantized.") for name in missing)
    fxq.set_state(prepared, fxq.State.FLOAT)
    torch.testing.assert_close(prepared(batch()), tiny()(batch()), rtol=1e-5, atol=1e-6)


# ---- states -----------------------------------------------------------------------------------------------------------------
def observed(prepared: fx.GraphModule) -> dict[str, int]:
    return {name: int(value) for name, value in prepared.state_dict().items() if name.endswith("range.count")}


@pytest.mark.parametrize("training", [False, True])
def test_calibrate_observes_in_both_modes(training: bool) -> None:
    prepared = fxq.prepare(tiny(), batch()).train(training)
    prepared(batch())
    assert set(observed(prepared).values()) == {1}
    assert torch.equal(prepared.bn1.running_mean, tiny().bn1.running_mean)


def test_float_state_neither_observes_nor_quantizes(prepared: fx.GraphModule) -> None:
    before = observed(prepared)
    fxq.set_state(prepared, fxq.State.FLOAT)
    torch.testing.assert_close(prepared.train()(batch()), tiny()(batch()), rtol=1e-5, atol=1e-6)
    assert observed(prepared) == before


def test_eval_in_train_validates_and_stops_the_observers(prepared: fx.GraphModule) -> None:
    expected, before = prepared(batch()), observed(prepared)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.eval()
    assert torch.equal(prepared(batch()), expected)
    assert observed(prepared) == before
    prepared.train()
    prepared(3 * batch())
    moved = observed(prepared)
    assert all(moved[name] == before[name] + 1 for name in before if ".intermediate." not in name)
    assert fxq.qparams(prepared) != fxq.qparams(once_compiled().prepared)


def test_states_by_name_and_below(prepared: fx.GraphModule) -> None:
    fxq.set_state(prepared, fxq.State.TRAIN, "conv2")
    fxq.set_state(prepared, fxq.State.FLOAT, ["head", "pool"])
    assert {name: operator.state.name for name, operator in quantized_operators(prepared).items()} == {
        "x_quantize": "VALIDATE", "conv1": "VALIDATE", "conv2": "TRAIN", "pool": "FLOAT", "flatten": "VALIDATE", "head": "FLOAT"
    }  # fmt: skip
    assert prepared(batch()).shape == (4, 3)


@pytest.mark.parametrize("alone", ["conv1", "conv2", "head"])
def test_one_layer_in_float_computes_the_float_function_of_quantized_inputs(prepared: fx.GraphModule, alone: str) -> None:
    with torch.no_grad():
        quantized = prepared(batch())
        fxq.set_state(prepared, fxq.State.FLOAT, alone)
        mixed = prepared(batch())
    assert not torch.equal(mixed, quantized)
    scale = fxq.qparams(prepared)["head"]
    assert float((mixed - quantized).abs().max()) < 8 * scale  # a few steps of rounding, no other function


def test_leaving_calibrate_sets_the_scales_and_returning_continues(prepared: fx.GraphModule) -> None:
    fxq.set_state(prepared, fxq.State.CALIBRATE)
    prepared(5 * batch())
    before = fxq.qparams(prepared)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    after = fxq.qparams(prepared)
    assert all(after[name] > before[name] for name in ("x_quantize", "conv1", "head"))


def test_operators_that_share_a_scale_report_it(prepared: fx.GraphModule) -> None:
    fxq.set_qparams(prepared, {"pool": 0.125})
    scales = fxq.qparams(prepared)
    assert scales["conv2"] == scales["pool"] == scales["flatten"] == 0.125


# ---- configuration ----------------------------------------------------------------------------------------------------------
def fixed(scale: float) -> fxq.QConfig:
    return fxq.QConfig(output=fxq.ActivationConfig(scale=scale))


def test_precedence_is_name_over_pattern_over_type_over_default() -> None:
    mapping = (
        fxq.QConfigMapping()
        .set_global(fixed(0.5))
        .set_object_type(nn.Conv2d, fixed(0.25))
        .set_module_name_regex(r"conv\d", fixed(0.125))
        .set_module_name("conv2", fixed(0.0625))
        .set_object_type(nn.Linear, fixed(2.0))
    )
    scales = fxq.qparams(calibrated(tiny(), [batch()], qconfig=mapping))
    assert {name: scales[name] for name in ("conv1", "conv2", "head")} == {"conv1": 0.125, "conv2": 0.0625, "head": 2.0}


def test_a_name_covers_everything_below_it_and_the_nearest_wins() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))
    mapping = fxq.QConfigMapping().set_module_name("0", fixed(0.25)).set_module_name("0.1", fixed(0.125))
    scales = fxq.qparams(calibrated(model, [torch.randn(8, 4)], qconfig=mapping))
    assert (scales["_0_0"], scales["_0_1"]) == (0.25, 0.125)
    assert scales["_1"] not in (0.25, 0.125)


INT16 = fxq.QConfig(output=fxq.ActivationConfig("int16"))
NASH = "nash-e, nash-m, nash-b, nash-p, nash-h"
WIDE = f"bayes, bayes-e, {NASH}"  # the targets with int16 activations


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("target", "qconfig", "kind", "asker", "able"),
    [
        ("bernoulli2", INT16, "int16 activations", "its default", WIDE),
        ("bernoulli2", fxq.QConfig(input=INT16.output), "int16 activations", "its default", WIDE),
        ("x86", fxq.QConfigMapping().set_module_name("head", INT16), "int16 activations", "name head", WIDE),
        ("x86", fxq.QConfigMapping().set_object_type(F.relu, INT16), "int16 activations", "type relu", WIDE),
        ("bayes-e", fxq.QConfigMapping().set_module_name_regex("conv", fxq.QConfig(weight=fxq.WeightConfig("int16"))), "int16 weights",
         "pattern conv", NASH),
    ],
)  # fmt: skip
def test_a_dtype_the_target_lacks_is_an_error_that_names_those_that_have_it(
    target: str, qconfig: Any, kind: str, asker: str, able: str
) -> None:
    for action in (fxq.prepare, fxq.check):
        with pytest.raises(fxq.errors.ConfigurationError, match=f"^{target} has no {kind}") as caught:
            action(tiny(), batch(), target, qconfig)
        assert f"({asker})" in caught.value.because
        assert caught.value.remedy.endswith(f"{kind}: {able}")


# ---- batches ----------------------------------------------------------------------------------------------------------------
def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.cat([batch(seed=2), batch(seed=3)]), torch.arange(8)), batch_size=4)


def test_quantize_does_all_of_it_in_one_call(tmp_path: Path) -> None:
    model = tiny()
    result = fxq.quantize(model, loader(), target="nash-e")
    assert result.float is model
    assert fxq.text(result.integer) == fxq.text(compiled(tiny(), [batch(seed=2), batch(seed=3)], "nash-e").integer)
    assert result.verify(result.export(tmp_path / "model.onnx"), loader())


# ---- models ----------------------------------------------------------------------------------------------------------------
def test_a_batch_norm_over_another_dimension_is_not_folded() -> None:
    model = written(lambda m, x: m.norm(m.linear(x)), linear=nn.Linear(6, 5), norm=nn.BatchNorm1d(3))
    model(torch.randn(64, 3, 6))  # running statistics that differ from channel to channel
    model.eval()
    x = torch.randn(4, 3, 6)
    prepared = fxq.prepare(model, (x,))
    fxq.set_state(prepared, fxq.State.FLOAT)
    # Folding, where it is right, multiplies in another order than the float model: hence a tolerance.
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_model_may_use_the_names_the_passes_use() -> None:
    model = written(lambda m, x: m.integer(m.quantized(x)), quantized=nn.Conv2d(3, 4, 3), integer=nn.Softmax(1)).eval()
    x = torch.randn(2, 3, 6, 6)
    prepared = fxq.calibrate(fxq.prepare(model, (x,)), [x])
    before = list(prepared.state_dict())
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, [x])
    assert torch.equal(integer(x), prepared(x))
    assert list(prepared.state_dict()) == before
    assert prepared.graph.owning_module is prepared


# ---- what an operator is lowered to -----------------------------------------------------------------------------------------
class Skipping(nn.Module):
    """A residual that is too fine to be added in the accumulator, tensors that are concatenated, and channels that are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.second.weight.data.mul_(100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x) + 0.001 * x
        return nn.functional.channel_shuffle(torch.cat((y, x), 1), 2).tanh()


@pytest.mark.parametrize("target", ["bernoulli2", "nash-e"])
def test_inner_tensors_say_which_scale_they_are_on(target: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 5, 5)
    torch.manual_seed(0)
    prepared, integer = compiled(Skipping(), [x], target)
    inner = [node for node in integer.graph.nodes if contract.primitive_kind(node) == "quantized" and is_inner(node)]
    assert len(inner) >= 4
    assert all(qparams(node) is not None for node in inner)
    between = next(node for node in inner if node.meta["origin"] == "second")
    scale = fxq.qparams(prepared)["second.intermediate"]
    assert qparams(between).scale == pytest.approx(scale)
    assert f"%{between.name}  " in fxq.explain(integer)
    assert "inside of %second" in fxq.explain(integer)
    assert sum("inside of" in line for line in fxq.explain(integer).splitlines()) == 1, "the others are on their result's scale"
    assert fxq.explain(integer).count("operators are integer") == 1
    assert f"{len(fxq.qparams(prepared)) - 2} operators are integer" in fxq.explain(integer)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    entry = fxq.export.onnx_metadata(path)["tensors"][between.name]
    assert (entry["kind"], entry["dtype"], entry["scale"]) == ("quantized", "int8", qparams(between).scale)
    report = fxq.verify(integer, path, [x])
    assert report
    assert between.name in report.names
    for style in ("qdq", "fast") if target == "nash-e" else ("qdq",):
        fxq.verify(integer, fxq.export_onnx(integer, tmp_path / f"{style}.onnx", style), [x])


def test_two_constants_of_one_role_are_a_defect_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(lowering: Any, input: Any, **_: Any) -> Any:
        for index in (torch.arange(8), torch.arange(8).flip(0)):
            value = lowering.call(shape.select, input.value, 1, lowering.constant("indices", index, torch.int64))
        return input.with_value(value)

    prepared, _ = compiled(nn.Sequential(nn.Linear(4, 8), nn.MaxPool1d(2)), [torch.randn(4, 8, 4)])
    pool = next(operator for operator in quantized_operators(prepared).values() if operator.operator.name == "max_pool1d")
    monkeypatch.setattr(pool, "operator", dataclasses.replace(pool.operator, lower=lower))
    with pytest.raises(fxq.errors.StageViolation, match="two constants of one operator have the role 'indices'"):
        fxq.convert(prepared)
