"""Differences between versions of PyTorch, onnx and onnxruntime, between the oldest and the newest that are supported."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.contract import VNNI, assert_validate_is_integer, compiled
from tests.shared.networks import Network, held

WIDE = fxq.QConfigMapping().set_global(fxq.QConfig(input=fxq.ActivationConfig("int16"), output=fxq.ActivationConfig("int16")))


def net(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    """A convolution, and what is done with its result."""
    return Network(lambda n, x: function(n, n.conv(x)), conv=nn.Conv2d(3, 8, 1), linear=nn.Linear(8, 5)).eval()


def batch(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 9, 8, generator=torch.Generator().manual_seed(count))


# ---- PyTorch --------------------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    first: Any
    second: Any


def nested(first: Any, second: Any) -> Any:
    return {"pair": Pair(first, Pair(second, None)), "list": [(first,), Other.Pair(second)]}


class Other:
    class Pair(NamedTuple):  # another one of that name
        only: Any


def structure(value: Any) -> Any:
    """Return the value with each tensor replaced by its class, and each container by its class and items."""
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [structure(item) for item in value]
    return type(value)


@pytest.mark.parametrize("returned", [Pair, nested])
def test_named_tuples_are_returned_at_every_stage(returned: Any) -> None:
    model = Network(lambda m, x: returned(m.conv(x), m.conv(x + 1)), conv=nn.Conv2d(3, 4, 1)).eval()
    wanted = structure(model(batch()))
    prepared, integer = compiled(model, [batch()])
    traced = fxq.trace(model, batch())
    for form in (traced, prepared, integer, copy.deepcopy(traced), copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert structure(form(batch())) == wanted
    assert_validate_is_integer(prepared, integer, batch())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("opset", [17, 18, 21])
def test_float_operators_are_exported_with_every_opset(opset: int, tmp_path: Path) -> None:
    """PyTorch's exporter writes opset 18 and later; a file that was asked for in a lower opset differs."""
    integer = compiled(net(lambda n, y: n.conv(torch.logaddexp(y, y.asinh())[:, :3])), [batch()]).integer
    path = fxq.export_onnx(integer, tmp_path / "model.onnx", opset=opset)
    assert [entry.version for entry in onnx.load(str(path)).opset_import if entry.domain == ""] == [opset]
    assert fxq.verify(integer, path, [batch(), batch(1)])


# ---- onnxruntime ----------------------------------------------------------------------------------------------------
@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize(
    "pool",
    [
        lambda n, y: F.avg_pool2d(y, (2, 3), (2, 2), ceil_mode=True),
        lambda n, y: F.avg_pool2d(y, 3, 2, (1, 0)),
        lambda n, y: F.avg_pool2d(y, 3, 2, (0, 1), ceil_mode=True, count_include_pad=False),
    ],
    ids=["after", "before", "left out"],
)
def test_uneven_padding_is_never_counted_by_the_runtime(pool: Any, opset: int, dtype: str, tmp_path: Path) -> None:
    """onnxruntime 1.21 to 1.23 divides by too few elements there from opset 19 on."""
    integer = compiled(net(pool), [batch()], "nash-e", WIDE if dtype == "int16" else None).integer
    for style in ("exact", "fast", "qdq"):
        if style == "qdq" and (not VNNI or (dtype == "int16" and opset < 21)):
            continue  # sums of its kernels saturate, or it has no form there
        path = fxq.export_onnx(integer, tmp_path / "model.onnx", style=style, opset=opset)
        for node in onnx.load(str(path)).graph.node:
            if node.op_type == "AveragePool":
                result = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
                assert len(set(result["pads"])) == 1 or not result["count_include_pad"], style
        report = fxq.verify(integer, path, [batch(), batch(1)])
        if isinstance(report, fxq.results.DeviationReport):
            assert max(output.largest for outputs in report.outputs.values() for output in outputs) <= 1
        else:
            assert report, str(report)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "product",
    [lambda n, y: y @ y.mT, lambda n, y: y.permute(0, 2, 3, 1) @ y.permute(0, 2, 1, 3), lambda n, y: n.linear(y.permute(0, 2, 3, 1))],
    ids=["right", "both", "linear"],
)
def test_a_wide_product_is_not_joined_with_a_transposition(product: Any, tmp_path: Path) -> None:
    """onnxruntime up to 1.23 makes one operator of the two, and then has none for float64."""
    path = tmp_path / "model.onnx"
    held(net(product), [batch(), batch(1)], path, qconfig=WIDE, train=False)
    graph = onnx.load(str(path)).graph
    made_by = {name: node for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    assert products
    for node in products:
        for name in node.input:
            while name in made_by and made_by[name].op_type == "Cast":
                name = made_by[name].input[0]
            assert name not in made_by or made_by[name].op_type != "Transpose"
