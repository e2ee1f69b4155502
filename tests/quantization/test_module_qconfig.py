"""A QConfig as an attribute of a module: it goes before every rule, covers what is below, and the nearest counts."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.ir.graph import annotation
from tests.shared.contract import assert_validate_is_integer
from tests.shared.written import written


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
    found = fxq.qparams(fxq.prepare(model, example, "bayes-e", **options))
    return {name: scale for name, scale in found.items() if scale == scale}


def test_the_nearest_counts() -> None:
    model = network()
    model.qconfig = fixed(0.5)
    model.blocks.qconfig = fixed(0.25)
    model.blocks[1].qconfig = fixed(0.125)
    model.blocks[1].conv.qconfig = fixed(0.0625)
    assert scales(model, batch()) == pytest.approx(
        {
            "x_quantize": 0.5,
            "stem": 0.5,
            "blocks_0_conv": 0.25,
            "mul": 0.25,
            "sigmoid": 0.25,
            "blocks_1_conv": 0.0625,
            "mul_1": 0.125,
            "sigmoid_1": 0.125,
            "head": 0.5,
        }
    )


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
    found = scales(model, batch(), qconfig=mapping)
    assert {found[name] for name in ("blocks_0_conv", "mul", "sigmoid")} == {0.25}
    assert {found[name] for name in ("stem", "blocks_1_conv", "head")} == {0.5}


def test_a_qconfig_brings_back_what_lies_below_a_none() -> None:
    model = network()
    model.qconfig = None
    model.blocks[1].qconfig = fxq.QConfig()
    found = decisions(model, batch())
    assert {name for name, dtype in found.items() if dtype is not None} == {"blocks_1_conv", "mul_1", "sigmoid_1"}


def test_a_module_called_from_two_places_has_its_own_qconfig_or_that_of_the_caller() -> None:
    model = shared()
    model.second.qconfig = fixed(0.25)
    example = torch.randn(4, 4, 8, 8)
    assert scales(model, example) == pytest.approx({"first_conv_1": 0.25, "mul_1": 0.25, "sigmoid_1": 0.25})
    model.first.conv.qconfig = fixed(0.5)
    found = scales(model, example)
    assert found["first_conv"] == found["first_conv_1"] == 0.5
    assert found["sigmoid_1"] == 0.25


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
    found = decisions(traced, example)
    assert {name for name, dtype in found.items() if dtype is None} == {"head", "blocks_1_conv"}
    traced.qconfig = None
    assert decisions(traced, example)["stem"] is None
    assert decisions(traced, example)["sigmoid"] == "int8"


def test_the_whole_way_and_back_from_a_file(tmp_path: Path) -> None:
    model = network()
    model.blocks[0].qconfig = None
    model.head.qconfig = fxq.QConfig(output=fxq.ActivationConfig(threshold=4.0))
    prepared = fxq.calibrate(fxq.prepare(model, batch(), "bayes-e"), [batch()], show_progress=False)
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
    with caplog.at_level(logging.WARNING, "fxquant"):
        found = decisions(model, batch())
    assert None not in found.values()
    assert len(caplog.records) == 1
