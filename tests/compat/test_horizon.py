"""Horizon's names over fxquant: its flow, its qconfigs and setters, its tools, and what has no equal here."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.compat import horizon
from fxquant.compat.horizon import served as march
from fxquant.ops import Trait
from fxquant.prepared.operators import quantized_operators
from tests.shared.networks import descend, dtypes, members, stored, written

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
STATE = horizon.FakeQuantState


@members(lambda: dict(
    quant=horizon.QuantStub(scale=None), dequant=horizon.DeQuantStub(), sum=horizon.FloatFunctional(), conv=nn.Conv2d(3, 8, 3, padding=1),
    bn=nn.BatchNorm2d(8), relu=nn.ReLU(), skip=nn.Conv2d(3, 8, 1), head=nn.Conv2d(8, 5, 1),
), seed=0)  # fmt: skip
def Net(self, x: Tensor) -> Tensor:
    """A residual block between stubs, with the sum of a last layer."""
    x = self.quant(x)
    x = self.relu(self.sum.add(self.bn(self.conv(x)), self.skip(x)))
    return self.dequant(self.head(x))


@pytest.fixture(autouse=True)
def _bayes_e() -> Iterator[None]:
    horizon.set_march(horizon.March.BAYES_E)
    yield
    march._march.clear()
    horizon.set_qat_mode(horizon.QATMode.FuseBN)


def calibrated(prepared: nn.Module) -> nn.Module:
    prepared.eval()
    horizon.set_fake_quantize(prepared, STATE.CALIBRATION)
    for batch in BATCHES:
        prepared(batch)
    horizon.set_fake_quantize(prepared, STATE.VALIDATION)
    return prepared


def prepared_as(qconfig: Any, model: nn.Module | None = None) -> Any:
    return horizon.prepare_qat_fx(Net().eval() if model is None else model, {"": qconfig}, example_inputs=BATCHES[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("chip", "trained"),
    [
        ("bernoulli2", "default_qat_8bit_fake_quant_qconfig"),
        ("bayes-e", "default_qat_8bit_weight_16bit_act_fake_quant_qconfig"),
        ("nash-e", "default_qat_8bit_fixed_act_fake_quant_qconfig"),
    ],
)
def test_the_flow_from_calibration_to_a_proved_model(chip: str, trained: str) -> None:
    horizon.set_march(chip)
    calibration = trained.replace("qat", "calib").replace("fixed_act_", "")
    calib = calibrated(prepared_as(getattr(horizon, calibration)))
    student = prepared_as(getattr(horizon, trained), Net().train())
    student.load_state_dict(calib.state_dict())
    assert fxq.qparams(student) == fxq.qparams(calib)
    descend(student, BATCHES, 0.01)
    assert (fxq.qparams(student) == fxq.qparams(calib)) == ("fixed_act" in trained)
    student.eval()
    horizon.set_fake_quantize(student, STATE.VALIDATION)
    assert fxq.verify(student, horizon.convert_fx(student), BATCHES)


def test_a_model_whose_scales_are_learned_takes_over_those_of_calibration() -> None:
    calib = calibrated(prepared_as(horizon.get_default_qconfig(activation_observer="percentile", activation_qkwargs={"percentile": 99})))
    student = prepared_as(horizon.default_qat_8bit_lsq_quant_qconfig)
    assert set(fxq.qparams(student).values()) != set(fxq.qparams(calib).values())
    horizon.load_observer_params(calib, student)
    assert fxq.qparams(student) == fxq.qparams(calib)
    student.train()(BATCHES[0]).square().mean().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for name, p in student.named_parameters() if "scale_change" in name)
    moving = prepared_as(horizon.get_default_qconfig())
    horizon.load_observer_params(calib, moving)
    moving.train()(BATCHES[0])  # what training follows was taken over with the scale: one batch among four
    assert all(0.9 < scale / fxq.qparams(calib)[name] < 1.1 for name, scale in fxq.qparams(moving).items())
    wide = prepared_as(horizon.default_qat_8bit_weight_16bit_act_fake_quant_qconfig)
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be copied"):
        horizon.load_observer_params(calib, wide)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("observer", ["mse", "kl", "mix", "clip_std"])
def test_roundings_are_learned_of_a_model_that_any_observer_calibrated(observer: str) -> None:
    prepared = calibrated(prepared_as(horizon.get_default_qconfig(activation_observer=observer)))
    settings = {"num_batches": len(BATCHES), "num_steps": 20}
    assert horizon.weight_reconstruction(prepared, BATCHES, custom_config_dict=settings) is prepared
    integer = horizon.convert_fx(prepared)
    assert torch.equal(prepared(BATCHES[0]), integer(BATCHES[0]))


def test_states_are_those_of_operators_and_a_part_has_its_own() -> None:
    prepared = prepared_as(horizon.default_qat_8bit_fake_quant_qconfig)
    for state in STATE:
        horizon.set_fake_quantize(prepared, state)
        assert {operator.state for operator in quantized_operators(prepared).values()} == {state.value}
    horizon.set_fake_quantize(prepared.quantized, STATE.VALIDATION)
    assert {operator.state for operator in quantized_operators(prepared).values()} == {fxq.State.VALIDATE}
    horizon.set_fake_quantize(prepared.skip, STATE._FLOAT)
    states = {name: operator.state for name, operator in quantized_operators(prepared).items()}
    assert {name for name, state in states.items() if state is fxq.State.FLOAT} == {"skip"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("chip", "fixed"), [("bernoulli2", True), ("bayes", True), ("bayes-e", True), ("nash-e", False)])
def test_the_scale_of_a_stub_is_that_of_the_release(chip: str, fixed: bool, caplog: pytest.LogCaptureFixture) -> None:
    horizon.set_march(chip)
    model = Net().eval()
    model.quant = horizon.QuantStub()
    with caplog.at_level("INFO", "fxquant"):
        old = prepared_as(horizon.default_calib_8bit_fake_quant_qconfig, model)
    lines = [record.getMessage() for record in caplog.records if "QuantStub quant" in record.getMessage()]
    assert len(lines) == 1
    assert ("0.0078125" in lines[0]) == fixed
    assert (next(iter(fxq.qparams(old).values())) == 1 / 128) == fixed
    new = calibrated(horizon.prepare(model, BATCHES[0], horizon.default_calibration_qconfig_setter))
    assert next(iter(fxq.qparams(new).values())) != 1 / 128
    model.quant = horizon.QuantStub(scale=1 / 32)
    assert next(iter(fxq.qparams(horizon.prepare(model, BATCHES[0], horizon.default_qat_qconfig_setter)).values())) == 1 / 32


def test_a_stub_is_an_operator_for_the_rules() -> None:
    wide = horizon.default_qat_8bit_weight_16bit_act_fake_quant_qconfig
    narrow = horizon.default_qat_8bit_fake_quant_qconfig
    own = Net().eval()
    own.quant = horizon.QuantStub(scale=None, qconfig=wide)
    built = [
        prepared_as(narrow, own),
        horizon.prepare_qat_fx(Net().eval(), {"": narrow, "module_name": {"quant": wide}}, example_inputs=BATCHES[0]),
        horizon.prepare(Net().eval(), BATCHES[0], horizon.QconfigSetter(templates=[horizon.ModuleNameTemplate({"quant": "qint16"})])),
    ]
    for prepared in built:
        dtype_of = dtypes(prepared)
        assert (next(iter(dtype_of.values())), dtype_of["skip"]) == ("int16", "int8")


@pytest.mark.parametrize("example", [{}, {"example_inputs": BATCHES[0]}])
def test_a_model_is_stored_as_an_object(example: dict[str, Any]) -> None:
    model = horizon.prepare_qat_fx(Net().eval(), {"": horizon.default_calib_8bit_fake_quant_qconfig}, **example)
    horizon.set_fake_quantize(model, STATE.CALIBRATION)
    model = stored(model)
    model(BATCHES[0])
    horizon.set_fake_quantize(model, STATE.VALIDATION)
    expected = model(BATCHES[0])
    for other in (stored(model), copy.deepcopy(model)):
        assert torch.equal(other(BATCHES[0]), expected)
        assert torch.equal(stored(horizon.convert_fx(other))(BATCHES[0]), expected)
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("example", [{}, {"example_inputs": BATCHES[0]}])
def test_an_optimizer_made_before_a_model_is_prepared_in_place_trains_it(example: dict[str, Any]) -> None:
    model = Net().train()
    model.qconfig = horizon.default_qat_8bit_fake_quant_qconfig
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    horizon.prepare_qat(model, inplace=True, **example)
    model(BATCHES[0]).square().mean().backward()
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert all(id(value) in held for name, value in model.named_parameters() if name in before)
    assert model(BATCHES[0]).shape == Net()(BATCHES[0]).shape
    model.load_state_dict(model.state_dict())


def test_inplace_makes_the_object_itself_the_prepared_and_the_integer_model() -> None:
    model = Net().eval()
    model.qconfig = horizon.default_qat_8bit_fake_quant_qconfig
    assert horizon.prepare_qat(model, inplace=True, example_inputs=BATCHES[0]) is model
    prepared = calibrated(model)
    expected = prepared(BATCHES[0])
    assert horizon.convert(model, inplace=True) is model
    assert torch.equal(model(BATCHES[0]), expected)
    assert fxq.inspect.layers(model)


def test_a_functional_is_an_operator_for_the_rules() -> None:
    wide = horizon.default_qat_8bit_weight_16bit_act_fake_quant_qconfig
    rules = {"": horizon.default_qat_8bit_fake_quant_qconfig, "module_name": {"sum": wide}}
    for sums in (horizon.FloatFunctional(), torch.ao.nn.quantized.FloatFunctional(), horizon.FloatFunctional(qconfig=wide)):
        model = Net().eval()
        model.sum = sums
        dtype_of = dtypes(horizon.prepare_qat_fx(model, {"": rules[""]} if hasattr(sums, "qconfig") else rules, example_inputs=BATCHES[0]))
        assert (dtype_of["skip"], dtype_of["conv"], dtype_of["head"]) == ("int16", "int8", "int8"), dtype_of  # the sum is fused into skip


def test_scales_of_a_model_in_calibration_are_taken_over() -> None:
    calib = prepared_as(horizon.default_calib_8bit_fake_quant_qconfig)
    horizon.set_fake_quantize(calib, STATE.CALIBRATION)
    for batch in BATCHES:
        calib(batch)
    student = prepared_as(horizon.default_qat_8bit_lsq_quant_qconfig)
    horizon.load_observer_params(calib, student)
    assert fxq.qparams(student) == fxq.qparams(calib)
    assert {operator.state for operator in quantized_operators(calib).values()} == {fxq.State.CALIBRATE}


def auxiliary() -> nn.Module:
    """A layer, and one more that acts in train mode alone."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.conv(x)
        return (x, m.aux(x)) if m.training else x

    return written(forward, conv=nn.Conv2d(3, 4, 1), aux=nn.Conv2d(4, 2, 1))


def test_what_forward_computes_only_in_train_mode_is_kept() -> None:
    prepared = horizon.prepare(auxiliary(), BATCHES[0], horizon.default_qat_qconfig_setter)
    horizon.set_fake_quantize(prepared, STATE.CALIBRATION)
    prepared.eval()(BATCHES[0])
    horizon.set_fake_quantize(prepared, STATE.QAT)
    output = prepared.train()(BATCHES[0])
    assert [tuple(each.shape) for each in output] == [(4, 4, 8, 8), (4, 2, 8, 8)]
    output[1].sum().backward()
    assert prepared.aux.weight.grad is not None
    without = horizon.prepare(auxiliary(), BATCHES[0], horizon.default_qat_qconfig_setter, training_branch=False)
    horizon.set_fake_quantize(without, STATE.CALIBRATION)
    assert isinstance(without.train()(BATCHES[0]), Tensor)


# ---- the plugin's checkpoints ---------------------------------------------------------------------------------------------------
def test_a_checkpoint_of_the_plugin_loads(caplog: pytest.LogCaptureFixture) -> None:
    student = prepared_as(horizon.default_qat_8bit_lsq_quant_qconfig, Net().train())
    folded = {name: value for name, value in student.state_dict().items() if not name.startswith("quantized.")}
    scales = {"quant": 0.03, "skip": 0.02, "conv": 0.01, "head": 0.05}
    checkpoint: dict[str, Any] = dict(folded)
    for name, scale in scales.items():
        checkpoint[f"{name}.activation_post_process.scale"] = torch.tensor([scale])
        checkpoint[f"{name}.activation_post_process.zero_point"] = torch.tensor([0])
        checkpoint[f"{name}.activation_post_process.fake_quant_enabled"] = torch.tensor([1])
        checkpoint[f"{name}.activation_post_process.activation_post_process.min_val"] = torch.tensor(-1.0)
    checkpoint["head.weight_fake_quant.scale"] = torch.full((5,), 0.004)
    with caplog.at_level("INFO", "fxquant"):
        student.load_state_dict(checkpoint, strict=False)
    scale_of = fxq.qparams(student)
    assert scale_of["skip"] == pytest.approx(0.02)
    assert scale_of["head"] == pytest.approx(0.05)
    assert next(iter(scale_of.values())) == pytest.approx(0.03)
    learned = quantized_operators(student)["head"].weight_quantizer.learned
    assert torch.equal(learned.base_scale, torch.full((5,), 0.004))
    assert any("of 4 scales of the checkpoint 4 were taken" in record.getMessage() for record in caplog.records)
    with pytest.raises(RuntimeError, match=r"nowhere\.activation_post_process\.scale"):
        student.load_state_dict({**checkpoint, "nowhere.activation_post_process.scale": torch.tensor([1.0])})
    again = prepared_as(horizon.default_qat_8bit_lsq_quant_qconfig, Net().train())
    again.load_state_dict(student.state_dict())
    assert str(fxq.qparams(again)) == str(scale_of)  # NaN, of what the checkpoint says nothing of, included


def test_a_checkpoint_of_a_wrapped_model_and_of_another_head_loads(caplog: pytest.LogCaptureFixture) -> None:
    calib = calibrated(prepared_as(horizon.default_calib_8bit_fake_quant_qconfig))
    wrapped = {f"module.{name}": value for name, value in calib.state_dict().items()}
    again = prepared_as(horizon.default_qat_8bit_fake_quant_qconfig)
    again.load_state_dict(wrapped)
    assert fxq.qparams(again) == fxq.qparams(calib)
    other = Net().eval()
    other.head = nn.Conv2d(8, 7, 1)
    tuned = prepared_as(horizon.default_qat_8bit_fake_quant_qconfig, other)
    before = tuned.head.weight.clone()
    left = tuned.load_state_dict(wrapped, strict=False)
    assert {"head.weight", "head.bias"} <= set(left.missing_keys)
    assert left.unexpected_keys == ["head.weight (5, 8, 1, 1) in place of (7, 8, 1, 1)", "head.bias (5,) in place of (7,)"]
    assert any("head.weight (5, 8, 1, 1) in place of (7, 8, 1, 1)" in record.getMessage() for record in caplog.records)
    assert torch.equal(tuned.head.weight, before)
    assert torch.equal(tuned.conv.weight, calib.conv.weight)
    mine, theirs = ({name: scale for name, scale in fxq.qparams(each).items() if name != "head"} for each in (tuned, calib))
    assert mine == theirs
    with pytest.raises(RuntimeError, match=r"head\.weight \(5, 8, 1, 1\) in place of \(7, 8, 1, 1\)"):
        tuned.load_state_dict(wrapped)


def test_batch_norms_of_a_checkpoint_are_not_left_out_of_folded_weights() -> None:
    floats = Net().train()
    floats(BATCHES[0])
    checkpoint = floats.state_dict()
    fused = {name.replace("bn.", "conv.bn."): value for name, value in checkpoint.items()}  # as PyTorch's fused layers name them
    for held in (checkpoint, {**fused, "conv.weight_fake_quant.scale": torch.ones(8)}):
        with pytest.raises(fxq.errors.ConfigurationError, match="WithBN"):
            prepared_as(horizon.default_qat_8bit_fake_quant_qconfig).load_state_dict(held, strict=False)
        horizon.set_qat_mode(horizon.QATMode.WithBN)
        live = prepared_as(horizon.default_qat_8bit_fake_quant_qconfig)
        horizon.set_qat_mode(horizon.QATMode.FuseBN)
        assert not live.load_state_dict(held, strict=False).unexpected_keys
        assert torch.equal(live.bn.running_mean, floats.bn.running_mean)
    part = prepared_as(horizon.default_qat_8bit_fake_quant_qconfig)
    left = part.load_state_dict({**part.state_dict(), "auxiliary.bn.running_mean": torch.zeros(3)}, strict=False)
    assert left.unexpected_keys == ["auxiliary.bn.running_mean"]


# ---- what is quantized how ------------------------------------------------------------------------------------------------
A, W, Q = fxq.ActivationConfig, fxq.WeightConfig, fxq.QConfig
MOVING = fxq.observers.MovingAverageMinMaxObserver(0.01)
FAKE = horizon.FakeQuantize


def default(activation_observer: str, /, **settings: Any) -> Callable[[], fxq.QConfig]:
    """A call of get_default_qconfig with this observer of activations, and settings of it."""
    return lambda: horizon.get_default_qconfig(activation_observer=activation_observer, activation_qkwargs=settings)


MEANINGS = {
    "8 bits": (lambda: horizon.default_qat_8bit_fake_quant_qconfig, Q(A("int8"), W("int8"))),
    "16 bits": (lambda: horizon.default_calib_8bit_weight_16bit_act_fake_quant_qconfig, Q(A("int16"), W("int8"))),
    "32 bits": (lambda: horizon.default_qat_8bit_weight_32bit_out_fake_quant_qconfig, Q(A("int32"), W("int8"))),
    "an older name": (lambda: horizon.default_qat_out_8bit_fake_quant_qconfig, Q(A("int32"), W("int8"))),
    "frozen": (lambda: horizon.default_qat_8bit_fixed_act_fake_quant_qconfig, Q(A("int8", training="frozen"))),
    "learned": (lambda: horizon.default_qat_8bit_lsq_quant_qconfig, Q(A("int8", training="learned"), W(training="learned"))),
    "default": (horizon.get_default_qconfig, Q(A("int8", MOVING))),
    "lsq": (lambda: horizon.get_default_qconfig("lsq", "lsq"), Q(A("int8", MOVING, training="learned"), W(training="learned"))),
    "pact": (lambda: horizon.default_qat_8bit_pact_quant_qconfig, Q(A("int8", training="pact"))),
    "pact by its name": (lambda: horizon.get_default_qconfig("pact", "lsq"), Q(A("int8", MOVING, training="pact"), W(training="learned"))),
    "not a fake quantize": (lambda: horizon.get_default_qconfig(None), Q(A("int32"))),
    "percentile": (default("percentile", percentile=99.9, dtype="qint16"), Q(A("int16", fxq.observers.PercentileObserver(99.9)))),
    "averaging": (default("min_max", averaging_constant=0.5), Q(A("int8", fxq.observers.MovingAverageMinMaxObserver(0.5)))),
    "no averaging": (lambda: horizon.get_default_qconfig(activation_qkwargs={"averaging_constant": 0}).output.training, "frozen"),
    "an observer among the settings": (
        default("min_max", observer=horizon.MinMaxObserver, averaging_constant=0.5),
        Q(A("int8", fxq.observers.MovingAverageMinMaxObserver(0.5))),
    ),
    "fixed": (default("fixed_scale", scale=0.5), Q(A("int8", scale=0.5))),
    "clip": (default("clip", xmin=-2, xmax=1), Q(A("int8", threshold=2.0))),
    "per tensor": (
        lambda: horizon.get_default_qconfig(weight_qkwargs={"qscheme": torch.per_tensor_symmetric}).weight,
        W(per_channel=False),
    ),
    "dtypes": (
        lambda: horizon.get_qconfig(in_dtype="qint16", weight_dtype=torch.qint8, out_dtype=torch.int16),
        Q(A("int16"), W("int8"), A("int16")),
    ),
    "fixed scales": (lambda: horizon.get_qconfig(fix_scale=True).output, A("int8", training="frozen")),
    "by parts": (
        lambda: horizon.QConfig(
            activation=FAKE.with_args(observer=horizon.MSEObserver, dtype="qint16"), weight=horizon.default_weight_4bit_fake_quant
        ),
        Q(A("int16"), W("int4")),
    ),
    "an observer of ours": (
        lambda: horizon.QConfig(FAKE.with_args(observer=fxq.observers.MinMaxObserver)),
        Q(A("int8", fxq.observers.MinMaxObserver)),
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_qconfig_means(name: str) -> None:
    model, expected = MEANINGS[name]
    assert model() == expected


def test_rules_of_a_dict_and_what_stays_on_the_host() -> None:
    wide, sums = horizon.default_qat_8bit_weight_16bit_act_fake_quant_qconfig, horizon.default_qat_8bit_weight_32bit_out_fake_quant_qconfig
    rules = {"": horizon.default_qat_8bit_fake_quant_qconfig, "module_type": [(nn.Conv2d, wide)], "module_name": [("head", sums)]}
    model = Net().eval()
    dtype_of = dtypes(horizon.prepare_qat_fx(model, rules, example_inputs=BATCHES[0]))
    assert (dtype_of["conv"], dtype_of["head"]) == ("int16", "int32")
    hybrid = horizon.prepare_qat_fx(model, rules, None, False, True, {"module_name": ["head"]}, example_inputs=BATCHES[0])
    assert {layer.name: layer.device for layer in fxq.inspect.layers(hybrid)}["head"] == "host"
    model.head.qconfig = None
    assert dtypes(horizon.prepare_qat_fx(model, rules, example_inputs=BATCHES[0]))["head"] == "float32"
    eager = Net().eval()
    eager.conv.qconfig = eager.skip.qconfig = wide
    dtype_of = dtypes(horizon.prepare_qat(eager, example_inputs=BATCHES[0]))
    assert (dtype_of["skip"], dtype_of["head"]) == ("int16", "float32")


def test_templates_are_merged_operand_by_operand_in_the_order_of_their_list() -> None:
    horizon.set_march("nash-e")
    first = [horizon.ModuleNameTemplate({"": "qint16"}), horizon.ConvDtypeTemplate("qint8", "qint8")]
    wide = horizon.prepare(Net().eval(), BATCHES[0], horizon.QconfigSetter(templates=first))
    dtype_of = dtypes(wide)
    assert (dtype_of["conv"], dtype_of["skip"], dtype_of["head"]) == ("int16",) * 3
    sums = [each for each in quantized_operators(wide).values() if Trait.SUMS in each.operator.traits]
    reads = {each.inputs["input"].dtype.name for each in sums}
    assert reads == {"int8"}
    assert fxq.verify(calibrated(wide), horizon.convert_fx(wide), BATCHES[:1])
    templates = [
        horizon.GEMMToGridSampleGridInt16Template(),
        horizon.ConvDtypeTemplate(None, "qint16"),
        horizon.ModuleNameTemplate({"skip": {"dtype": "qint16", "threshold": 4.0}, "conv": {"weight": "qint8"}}),
        horizon.SensitivityTemplate([("head", "activation", 0.1), ("conv", "weight", 0.05)], 0.5, "activation"),
    ]
    prepared = horizon.prepare(Net().eval(), BATCHES[0], horizon.QconfigSetter(horizon.get_qconfig(), templates))
    outputs, operators = dtypes(prepared), quantized_operators(prepared)
    built = {name: (outputs[name], operators[name].weight_quantizer.dtype.name) for name in ("skip", "conv", "head")}
    assert built == {"skip": ("int16", "int16"), "conv": ("int8", "int8"), "head": ("int16", "int16")}  # weights stay 16 bits
    assert fxq.qparams(prepared)["skip"] == 4.0 / 32768
    assert fxq.verify(calibrated(prepared), horizon.convert_fx(prepared), BATCHES[:1])


def test_products_read_what_the_template_says() -> None:
    horizon.set_march("nash-e")
    wide = horizon.TemplateQconfigSetter(Q(A("int16")), [horizon.GEMMInt8Template()])
    prepared = horizon.prepare(Net().eval(), BATCHES[0], wide)
    reads = {name: {each.dtype.name for each in operator.inputs.values() if each is not None and not isinstance(each, list)}
             for name, operator in quantized_operators(prepared).items() if Trait.SUMS in operator.operator.traits}  # fmt: skip
    assert all("int8" in result for result in reads.values()), reads
    assert fxq.verify(calibrated(prepared), horizon.convert_fx(prepared), BATCHES[:1])


def test_of_several_setters_the_first_that_speaks_of_a_place_decides() -> None:
    first = (horizon.ModuleNameQconfigSetter({"head": Q(A("int16"))}), horizon.TemplateQconfigSetter(Q(A("int8"))), Q(A("int4")))
    dtype_of = dtypes(horizon.prepare(Net().eval(), BATCHES[0], first))
    assert (dtype_of["head"], dtype_of["skip"]) == ("int16", "int8")
    sensitive = horizon.sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter([["skip", "activation"], ["conv", "weight"]], topk=1)
    dtype_of = dtypes(horizon.prepare(Net().eval(), BATCHES[0], (sensitive, horizon.default_qat_qconfig_setter)))
    assert (dtype_of["skip"], dtype_of["conv"], dtype_of["head"]) == ("int16", "int8", "int32")


def test_floats_are_the_host_s_but_for_marches_that_have_them() -> None:
    templates = [horizon.ModuleNameTemplate({"": torch.float16}), horizon.ConvDtypeTemplate("qint8", "qint8")]
    horizon.set_march("nash-p")
    prepared = horizon.prepare(Net().eval(), BATCHES[0], horizon.QconfigSetter(templates=templates))
    layers = {layer.name: layer for layer in fxq.inspect.layers(prepared)}
    assert {layers[name].dtype for name in ("conv", "skip", "head")} == {"int32"}
    assert all(not layer.integer for name, layer in layers.items() if layer.operator in ("add", "relu"))
    assert fxq.verify(calibrated(prepared), horizon.convert_fx(prepared), BATCHES[:1])
    horizon.set_march("nash-e")
    with pytest.raises(fxq.errors.ConfigurationError, match="float"):
        horizon.prepare(Net().eval(), BATCHES[0], horizon.QconfigSetter(templates=templates))


def test_the_template_for_high_precision_outputs_finds_the_last_layer() -> None:
    template = horizon.HighPrecisionOutputTemplate()
    for setter in (horizon.QconfigSetter(templates=[template]), (horizon.TemplateQconfigSetter(Q(A("int8")), [template]),)):
        prepared = horizon.prepare(Net().eval(), BATCHES[0], setter)
        assert dtypes(prepared)["head"] == "int32"
        assert {dtypes(prepared)[name] for name in ("conv", "skip")} == {"int8"}
        assert fxq.verify(calibrated(prepared), horizon.convert_fx(prepared), BATCHES[:1])


# ---- tools ------------------------------------------------------------------------------------------------------------------
def test_a_model_is_checked_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert horizon.check_model(Net().eval(), BATCHES[0]) == 0
    assert horizon.check_model(nn.Conv2d(3, 4, 3, dilation=3), BATCHES[0], "bernoulli2") == 1
    assert "dilation" in capsys.readouterr().out
    prepared = calibrated(prepared_as(horizon.default_calib_8bit_fake_quant_qconfig))
    integer = horizon.convert_fx(prepared)
    path = horizon.export_quantized_onnx(integer, (BATCHES[0],), tmp_path / "model.onnx")
    assert fxq.verify(integer, path, BATCHES[:1])
    horizon.export_to_onnx(prepared, (BATCHES[0],), tmp_path / "view.onnx", input_names=["image"])
    assert [one["name"] for one in fxq.export.onnx_metadata(tmp_path / "view.onnx")["inputs"]] == ["image"]


# ---- what is refused --------------------------------------------------------------------------------------------------------
def with_template(template: Any) -> Any:
    return horizon.prepare(Net().eval(), BATCHES[0], horizon.QconfigSetter(templates=[template]))


CALLS = {
    "parameters before a batch": lambda: list(horizon.prepare_qat_fx(Net(), {"": Q()}).parameters()),
    "a state_dict before a batch": lambda: horizon.prepare_qat_fx(Net(), {"": Q()}).state_dict(),
    "integers before a batch": lambda: horizon.convert_fx(horizon.prepare_qat_fx(Net(), {"": Q()})),
    "no march": lambda: (march._march.clear(), horizon.prepare_qat_fx(Net(), {"": Q()}, example_inputs=BATCHES[0])),
    "a family of marches": lambda: horizon.set_march(horizon.March.NASH),
    "no march of this name": lambda: horizon.set_march("bayes-f"),
    "a march that is none": lambda: horizon.set_march(5),
    "hybrid_dict alone": lambda: horizon.prepare_qat_fx(Net(), {"": Q()}, hybrid_dict={"module_name": ["head"]}, example_inputs=BATCHES[0]),
    "an unknown hybrid rule": lambda: horizon.prepare_qat_fx(
        Net(), {"": Q()}, hybrid=True, hybrid_dict={"x": []}, example_inputs=BATCHES[0]
    ),
    "an unknown rule": lambda: horizon.prepare_qat_fx(Net(), {"nonsense": []}, example_inputs=BATCHES[0]),
    "a custom config": lambda: horizon.prepare_qat_fx(Net(), {"": Q()}, {"nonsense": 1}, example_inputs=BATCHES[0]),
    "an unknown argument": lambda: horizon.prepare_qat_fx(Net(), {"": Q()}, **{"nonsense": 1}),
    "a flag that is none": lambda: horizon.prepare_qat_fx(Net(), {"": Q()}, hybrid="yes", example_inputs=BATCHES[0]),
    "16-bit weights on bayes-e": lambda: prepared_as(Q(weight=W("int16")), nn.Conv2d(3, 2, 1)),
    "not prepared": lambda: horizon.convert_fx(Net()),
    "no state": lambda: horizon.set_fake_quantize(prepared_as(Q(), nn.Conv2d(3, 2, 1)), "qat"),
    "nothing to put into a state": lambda: horizon.set_fake_quantize(Net(), STATE.QAT),
    "no mode": lambda: horizon.set_qat_mode("WithBN"),
    "a zero point": lambda: horizon.QuantStub(zero_point=3),
    "a scale of 0": lambda: horizon.QuantStub(scale=0),
    "a functional that is called": lambda: horizon.FloatFunctional()(BATCHES[0]),
    "affine": lambda: horizon.get_default_qconfig(activation_qkwargs={"qscheme": torch.per_tensor_affine}),
    "a float dtype": lambda: horizon.get_qconfig(out_dtype=torch.float16),
    "an unknown dtype": lambda: horizon.get_qconfig(out_dtype="qint7"),
    "an unknown observer": lambda: horizon.get_default_qconfig(activation_observer="nonsense"),
    "an unknown fake quantize": lambda: horizon.get_default_qconfig("nonsense"),
    "an unknown setting": lambda: horizon.get_default_qconfig(activation_qkwargs={"nonsense": 1}),
    "a fixed scale without one": lambda: horizon.get_default_qconfig(activation_observer="fixed_scale"),
    "pact of a weight": lambda: horizon.get_default_qconfig("pact", "pact"),
    "no fake quantize of a weight": lambda: horizon.get_default_qconfig(weight_fake_quant=None),
    "an observer of a weight": lambda: horizon.get_default_qconfig(weight_observer="mse"),
    "an axis": lambda: horizon.get_default_qconfig(weight_qkwargs={"ch_axis": 1}),
    "not a fake quantize": lambda: horizon.QConfig(activation=5),
    "what is sensitive": lambda: with_template(horizon.SensitivityTemplate(["a"], 1, "x")),
    "a template's key": lambda: with_template(horizon.ModuleNameTemplate({"": {"outputs": "qint8"}})),
    "two dtypes of a product": lambda: horizon.prepare(
        written(lambda m, x: torch.matmul(x, x)).eval(),
        BATCHES[0],
        horizon.QconfigSetter(templates=[horizon.MatmulDtypeTemplate(["qint8", "qint16"])]),
    ),
    "a part of a copy": lambda: horizon.set_fake_quantize(copy.deepcopy(prepared_as(Q())).conv, STATE.VALIDATION),
    "nothing to take over": lambda: horizon.load_observer_params(prepared_as(Q()), prepared_as(Q())),
    "an option of a file": lambda: horizon.export_to_onnx(
        calibrated(prepared_as(Q())), BATCHES[0], "x.onnx", dynamic_axes={"x": {2: "height"}}
    ),
    "an option that there is not": lambda: horizon.export_to_onnx(calibrated(prepared_as(Q())), BATCHES[0], "x.onnx", **{"nonsense": 1}),
    "a setting of reconstruction": lambda: horizon.weight_reconstruction(Net(), BATCHES, None, {"b_range": [20, 2]}),
    "a folder as a file": lambda: horizon.export_quantized_onnx(Net(), BATCHES[0], "/"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_done(name: str) -> None:
    with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
        CALLS[name]()


def test_names_that_examples_read_from_the_top_module_and_the_remedy_for_a_float_dtype_is_one() -> None:
    assert horizon.March.Bayes == horizon.March.BAYES == "bayes"
    assert horizon.Tracer is horizon.fx.Tracer
    assert horizon.qconfig is horizon.quantization.qconfig
    with pytest.raises(fxq.errors.ConfigurationError, match=r"fxq\.QConfigMapping\(names=\{name: None\}\) as the qconfig_setter"):
        horizon.quantization.qconfig.get_qconfig(out_dtype=torch.float32)
    horizon.set_march("nash-e")
    model = nn.Sequential(horizon.quantization.QuantStub(), nn.Linear(4, 4), nn.Linear(4, 2))
    prepared = horizon.quantization.prepare(model.eval(), torch.randn(3, 4), fxq.QConfigMapping(names={"2": None}))
    assert "the qconfig keeps it in float" in fxq.explain(prepared)
