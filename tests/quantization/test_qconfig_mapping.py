"""QConfigs and mappings are immutable; a QConfig that is an attribute of a module takes precedence over every rule."""

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import annotation
from fxquant.quantization.spec import Call
from tests.shared.contract import assert_validate_is_integer
from tests.shared.networks import written

ACT = fxq.ActivationConfig
WIDE, NARROW = fxq.QConfig(ACT("int16")), fxq.QConfig(ACT("int4"))
SETTERS: dict[str, tuple[Any, Any]] = {  # a key, and another one
    "object_type": (nn.Conv2d, F.relu),
    "module_name_regex": (r"stem\..*", "head"),
    "module_name": ("stem.0", "head"),
    "module_name_object_type_order": (("stem", nn.Conv2d, 0), ("", F.relu, 1)),
}


def full() -> fxq.QConfigMapping:
    """A mapping with a rule of every kind."""
    mapping = fxq.QConfigMapping().set_global(NARROW)
    for name, (key, _) in SETTERS.items():
        mapping = setter(mapping, name)(key, WIDE)
    return mapping


def setter(mapping: fxq.QConfigMapping, name: str) -> Callable[[Any, Any], fxq.QConfigMapping]:
    """The setter of a kind of rule, as a function of its key and what is chosen."""
    result = getattr(mapping, f"set_{name}")
    return lambda key, chosen: result(*(key if isinstance(key, tuple) else (key,)), chosen)


# ---- mappings ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SETTERS)
def test_a_setter_changes_the_mapping_and_returns_it(name: str) -> None:
    before, mapping = full(), full()
    key, other = SETTERS[name]
    assert setter(mapping, name)(other, None) is mapping
    rule = Call(*other) if isinstance(other, tuple) else other
    assert [(each.key, chosen) for each, chosen in mapping.rules() if (each, chosen) not in before.rules()] == [(rule, None)]
    assert len(mapping.rules()) == len(before.rules()) + 1
    mapping = full()
    setter(mapping, name)(key, NARROW)
    assert mapping != before
    assert [rule for rule, _ in mapping.rules()] == [rule for rule, _ in before.rules()]


def test_a_mapping_that_changes_after_the_call_changes_nothing_that_was_prepared() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 2, 1)), torch.randn(2, 2, 4, 4)
    mapping = fxq.QConfigMapping()
    mapping.set_module_name("0", WIDE)  # as PyTorch's pages write it
    prepared = fxq.prepare(model, x, "nash-e", mapping)
    mapping.set_module_name("0", None)
    assert {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}["_0"] == "int16"
    assert {layer.name: layer.dtype for layer in fxq.inspect.layers(fxq.prepare(model, x, "nash-e", mapping))}["_0"] == "float32"
    copied = copy.copy(mapping).set_module_name("0", NARROW)
    assert mapping.names == {"0": None}
    assert copied.names == {"0": NARROW}


def test_the_callers_dicts_are_copied() -> None:
    types, patterns, names = {nn.Linear: WIDE}, {"stem": WIDE}, {"head": WIDE}
    mapping = fxq.QConfigMapping(NARROW, types, patterns, names)
    before = copy.deepcopy(mapping)
    types[nn.Conv2d] = patterns["head"] = names["stem"] = NARROW
    names["head"] = NARROW
    assert mapping == before


def test_equal_mappings_are_those_that_say_the_same() -> None:
    head = fxq.QConfigMapping().set_module_name("head", WIDE).set_module_name("stem", NARROW)
    assert head == fxq.QConfigMapping().set_module_name("stem", NARROW).set_module_name("head", fxq.QConfig(ACT("int16")))
    assert head != copy.copy(head).set_module_name("head", NARROW)
    assert head != head.names
    # Of two patterns that match the first one counts.
    one, other = (("stem", WIDE), ("stem.0", NARROW)), (("stem.0", NARROW), ("stem", WIDE))
    assert fxq.QConfigMapping(patterns=dict(one)) != fxq.QConfigMapping(patterns=dict(other))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda built: pickle.loads(pickle.dumps(built))])
def test_copies_are_equal(copied: Callable[[Any], Any]) -> None:
    built = full().set_global(fxq.QConfig(ACT(observer=fxq.observers.PercentileObserver(99.0))))
    assert copied(built) == built
    assert copied(built).set_global(None) != built


# ---- observers in a config ------------------------------------------------------------------------------------------------------
class Halved(fxq.observers.MinMaxObserver):
    """An observer of a user's, with settings of its own, one of which is a tensor."""

    def __init__(self, factor: float = 0.5, steps: tuple[float, ...] = (1.0, 2.0)) -> None:
        super().__init__()
        self.factor, self._steps = factor, torch.tensor(steps)

    def scale(self, dtype: Any) -> Tensor:
        return super().scale(dtype) * self.factor


SAME: list[list[Any]] = [  # observers that are equal among themselves, and to none of another list
    [
        fxq.observers.HistogramObserver,
        fxq.observers.HistogramObserver(),
        functools.partial(fxq.observers.HistogramObserver, bins=2048),
        lambda: fxq.observers.HistogramObserver(),
    ],
    [fxq.observers.HistogramObserver(bins=64), functools.partial(fxq.observers.HistogramObserver, 64)],
    [fxq.observers.HistogramObserver(sample=64)],
    [fxq.observers.PercentileObserver, fxq.observers.PercentileObserver(99.99)],
    [fxq.observers.PercentileObserver(99.9), lambda: fxq.observers.PercentileObserver(99.9)],
    [fxq.observers.MinMaxObserver, fxq.observers.MinMaxObserver()],
    [fxq.observers.MovingAverageMinMaxObserver, fxq.observers.MovingAverageMinMaxObserver(0.01)],
    [fxq.observers.MovingAverageMinMaxObserver(0.1)],
    [Halved, Halved(0.5)],
    [Halved(0.25)],
    [Halved(steps=(1.0, 3.0)), functools.partial(Halved, steps=(1.0, 3.0))],
]


def test_observers_are_compared_by_class_and_settings() -> None:
    configs = [[ACT(observer=observer) for observer in group] for group in SAME]
    for index, group in enumerate(configs):
        for other, others in enumerate(configs):
            assert {one == two for one in group for two in others} == {index == other}
        assert len({hash(config) for config in group}) == 1
    assert len({config for group in configs for config in group}) == len(SAME)
    assert ACT(observer=fxq.observers.MinMaxObserver) != ACT("int16", observer=fxq.observers.MinMaxObserver)
    assert ACT() != "int8"


def test_an_observer_that_is_given_is_copied() -> None:
    template: Any = fxq.observers.PercentileObserver(99.0)
    config = ACT(observer=template)
    template.observe(torch.randn(64))
    template.percentile = 50.0
    assert config == ACT(observer=fxq.observers.PercentileObserver(99.0))
    assert not config.new_observer().observed


def test_a_qconfig_that_equals_the_default_is_a_rule() -> None:
    """Whether it is the same object, or only equal."""
    model, example = nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2)), torch.randn(2, 2, 4, 4)

    def half() -> fxq.QConfig:
        return fxq.QConfig(ACT(observer=fxq.observers.MinMaxObserver(), scale=0.5))

    default = half()
    for same in (default, half()):
        mapping = fxq.QConfigMapping(default).set_module_name("0", fxq.QConfig(ACT(scale=0.25)))
        assert fxq.qparams(fxq.prepare(model, example, qconfig=mapping))["_1"] == 0.25
        with pytest.raises(fxq.errors.ScaleConflict):
            fxq.prepare(model, example, qconfig=mapping.set_module_name("1", same))


# ---- one call of a type ---------------------------------------------------------------------------------------------------
def block() -> nn.Module:
    return written(lambda m, x: F.hardswish(m.right(F.hardswish(m.left(x)))), left=nn.Conv2d(2, 2, 1), right=nn.Conv2d(2, 2, 1))


def blocks() -> nn.Module:
    return written(
        lambda m, x: (m.last(m.second(F.hardswish(m.first(x)))) + 1).tanh(), first=block(), second=block(), last=nn.Conv2d(2, 2, 1)
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("call", "node"),
    [
        (("first", nn.Conv2d, 0), "first_left"),
        (("first", nn.Conv2d, 1), "first_right"),
        (("second", F.hardswish, 1), "hardswish_4"),
        (("", F.hardswish, 0), "hardswish_2"),
        (("", nn.Conv2d, 0), "last"),
        (("", "tanh", 0), "tanh"),
        (("second", F.hardswish, 2), None),
        (("", nn.Conv2d, 1), None),
    ],
)
def test_a_rule_for_a_call_is_about_that_call_alone(call: Any, node: str | None) -> None:
    module, kind, index = call
    mapping = (
        fxq.QConfigMapping()
        .set_module_name("first", fxq.QConfig(ACT(scale=1.0)))
        .set_module_name_object_type_order(module, kind, index, WIDE)
    )
    prepared = fxq.prepare(blocks().eval(), torch.randn(2, 2, 4, 4), "bayes-e", mapping)
    wide = {layer.name for layer in fxq.inspect.layers(prepared) if layer.dtype == "int16" and not layer.boundary}
    assert wide == ({node} if node else set())
    told = f"this rule of the qconfig matched nothing: call {index} of "
    assert (told in fxq.explain(prepared)) == (node is None)


def test_calls_are_counted_as_pytorch_counts_them() -> None:
    ao: Any = pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization.quantize_fx import prepare_fx

    example, model = (torch.randn(2, 2, 4, 4),), blocks().eval()
    counted = 0
    for module in ("", "first", "second"):
        for kind in (nn.Conv2d, F.hardswish):
            for index in range(3):
                rules = ao.QConfigMapping().set_module_name_object_type_order(module, kind, index, ao.default_qconfig)
                theirs = prepare_fx(model, rules, example)
                observed = {
                    str(node.args[0].target) if node.args[0].op == "call_module" else node.args[0].name
                    for node in theirs.graph.nodes
                    if node.op == "call_module" and "activation_post_process" in str(node.target) and node.args[0].op != "placeholder"
                }
                ours = fxq.QConfigMapping(default=None).set_module_name_object_type_order(module, kind, index, fxq.QConfig())
                prepared = fxq.prepare(model, example, "bayes-e", ours)
                integer = [layer for layer in fxq.inspect.layers(prepared) if layer.integer and not layer.boundary]
                mine = {layer.module if kind is nn.Conv2d else layer.name for layer in integer}
                assert bool(mine) == bool(observed), (module, kind, index)
                assert mine <= observed
                counted += len(mine)
    assert counted == 10


def block_model() -> nn.Module:
    """A layer, then functions that no module stands for."""
    return written(lambda m, x: torch.sigmoid(m.conv(x) * 0.5), conv=nn.Conv2d(4, 4, 3, padding=1))


def network() -> nn.Module:
    return written(
        lambda m, x: m.head(m.blocks(m.stem(x))),
        stem=nn.Conv2d(2, 4, 3),
        blocks=nn.Sequential(block_model(), block_model()),
        head=nn.Conv2d(4, 3, 1),
    )


def shared() -> Any:
    """One layer called from two places: by itself, and inside of a block."""
    model = written(lambda m, x: m.second(m.first(x)), first=block_model(), second=block_model())
    model.second.conv = model.first.conv
    return model


def batch() -> Tensor:
    return torch.randn(4, 2, 8, 8)


def fixed(scale: float) -> fxq.QConfig:
    return fxq.QConfig(output=fxq.ActivationConfig(scale=scale))


def decisions(model: nn.Module, example: Tensor, **options: Any) -> dict[str, str | None]:
    """The dtype of every operator of the user's, None in float."""
    prepared = fxq.prepare(model, example, "bayes-e", until="specs.annotate", **options)
    specs = {node.name: annotation(node) for node in prepared.graph.nodes}
    return {name: spec.dtype for name, spec in specs.items() if spec is not None}


def scales(model: nn.Module, example: Tensor, **options: Any) -> dict[str, float]:
    """The scales that a QConfig fixes, by node; the others are not known before calibration."""
    scale_of = fxq.qparams(fxq.prepare(model, example, "bayes-e", **options))
    return {name: scale for name, scale in scale_of.items() if scale == scale}


def test_the_nearest_counts() -> None:
    model = network()
    model.qconfig = fixed(0.5)
    model.blocks.qconfig = fixed(0.25)
    model.blocks[1].qconfig = fixed(0.125)
    model.blocks[1].conv.qconfig = fixed(0.0625)
    first, second = {"blocks_0_conv": 0.25, "mul": 0.25, "sigmoid": 0.25}, {"blocks_1_conv": 0.0625, "mul_1": 0.125, "sigmoid_1": 0.125}
    assert scales(model, batch()) == pytest.approx({"x_quantize": 0.5, "stem": 0.5, **first, **second, "head": 0.5})


def test_it_goes_before_every_rule() -> None:
    model = network()
    model.blocks[0].qconfig = fixed(0.25)
    mapping = (
        fxq.QConfigMapping()
        .set_global(None)
        .set_object_type(nn.Conv2d, fixed(0.5))
        .set_module_name_regex(r"blocks\..*", fixed(0.5))
        .set_module_name("blocks.0.conv", fixed(0.5))
        .set_module_name("sigmoid", fixed(0.5))
    )
    scale_of = scales(model, batch(), qconfig=mapping)
    assert {scale_of[name] for name in ("blocks_0_conv", "mul", "sigmoid")} == {0.25}
    assert {scale_of[name] for name in ("stem", "blocks_1_conv", "head")} == {0.5}


def test_a_qconfig_brings_back_what_lies_below_a_none() -> None:
    model = network()
    model.qconfig = None
    model.blocks[1].qconfig = fxq.QConfig()
    decisions_now = decisions(model, batch())
    assert {name for name, dtype in decisions_now.items() if dtype is not None} == {"blocks_1_conv", "mul_1", "sigmoid_1"}


def test_a_module_called_from_two_places_has_its_own_qconfig_or_that_of_the_caller() -> None:
    model = shared()
    model.second.qconfig = fixed(0.25)
    example = torch.randn(4, 4, 8, 8)
    assert scales(model, example) == pytest.approx({"first_conv_1": 0.25, "mul_1": 0.25, "sigmoid_1": 0.25})
    model.first.conv.qconfig = fixed(0.5)
    scale_of = scales(model, example)
    assert scale_of["first_conv"] == scale_of["first_conv_1"] == 0.5
    assert scale_of["sigmoid_1"] == 0.25


def test_the_model_is_not_changed_and_need_not_be_traced_at_once(tmp_path: Path) -> None:
    model = network()
    model.blocks[0].qconfig = None
    own = model.blocks[0].qconfig
    example = batch()
    traced = fxq.trace(model, example)
    expected = decisions(model, example)
    assert model.blocks[0].qconfig is own
    assert "qconfig" not in model.stem.__dict__
    del model.blocks[0].qconfig
    assert None not in decisions(model, example).values()
    assert decisions(traced, example) == expected
    assert decisions(fxq.load(fxq.save(traced, tmp_path / "traced.fxq")), example) == expected
    assert decisions(copy.deepcopy(traced), example) == expected


def test_a_traced_model_takes_them_as_well() -> None:
    example = batch()
    model = network()
    model.head.qconfig = None
    traced = fxq.trace(model, example)
    traced.blocks.qconfig = fixed(0.25)
    traced.blocks.get_submodule("1.conv").qconfig = None
    decisions_now = decisions(traced, example)
    assert {name for name, dtype in decisions_now.items() if dtype is None} == {"head", "blocks_1_conv"}
    traced.qconfig = None
    assert decisions(traced, example)["stem"] is None
    assert decisions(traced, example)["sigmoid"] == "int8"


def test_the_whole_way_and_back_from_a_file(tmp_path: Path) -> None:
    model = network()
    model.blocks[0].qconfig = None
    model.head.qconfig = fxq.QConfig(output=fxq.ActivationConfig(threshold=4.0))
    prepared = fxq.calibrate(fxq.prepare(model, batch(), "bayes-e"), [batch()])
    integer = fxq.convert(prepared)
    assert_validate_is_integer(prepared, integer, batch())
    assert fxq.qparams(prepared)["head"] == 4 / 128
    loaded = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    x = batch()
    assert torch.equal(loaded(x), prepared(x))
    assert torch.equal(fxq.convert(loaded)(x), integer(x))
    assert "the qconfig keeps it in float" in fxq.explain(integer)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_model_that_torch_ao_has_prepared(caplog: pytest.LogCaptureFixture) -> None:
    model: fx.GraphModule | nn.Module = network()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")  # type: ignore[assignment]
    torch.ao.quantization.propagate_qconfig_(model)
    assert "qconfig" in model.stem.__dict__
    decisions_now = decisions(model, batch())
    assert None not in decisions_now.values()
    assert len(caplog.records) == 1
