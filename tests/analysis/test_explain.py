"""Explanations: every reason is true for the operator as the user wrote it, and operators are counted, not the boundary."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.analysis.explain import summary
from fxquant.analysis.layers import layers, left_in_float
from tests.shared.networks import Network

pytestmark = pytest.mark.quick

Body = Callable[[Tensor], Any]


def written(body: Body) -> nn.Module:
    """A layer, and the operators that follow it."""
    return Network(lambda m, x: body(m.conv(x)), conv=nn.Conv2d(3, 8, 3, padding=1))


# What is written, and what explain says of the first operator that stays in float.
REASONS: dict[str, tuple[Body, str]] = {
    "x ** batch": (lambda x: x ** x.shape[0], "its exponent is computed, not a number"),
    "x / 0": (lambda x: x / 0, "it divides by 0"),
    "x / inf": (lambda x: x / float("inf"), "it divides by inf"),
    "x / batch": (lambda x: x / x.shape[0], "it divides by a number that is computed"),
    "x * (1 / batch)": (lambda x: x * (1 / x.shape[0]), "its operand %truediv is not a tensor"),
    "as_strided": (
        lambda x: x.relu().as_strided((2,), (1,)), "it reads the memory of its operand, and only the strides of model inputs are known",
    ),
    "x + nan": (lambda x: x + float("nan"), "one of its numbers is not finite"),
    "max(x)": (lambda x: torch.max(x), "it reduces the batch, whose size is not fixed"),
    "logcumsumexp": (
        lambda x: x.logcumsumexp(1), "no registered operator matches logcumsumexp: its running sums exceed the range of a grid; "
        "where they are small, write exp, cumsum and log",
    ),
    "bessel_j0": (lambda x: torch.special.bessel_j0(x), "no registered operator matches special_bessel_j0"),
    "fft": (lambda x: torch.fft.rfft(x).abs(), "no registered operator matches fft_rfft: a Fourier transform has no integer form"),
    "sum of all": (lambda x: x.sum(), "it sums over the batch, whose size is not fixed"),
    "mean, dtype": (lambda x: x.mean(1, dtype=torch.float64), "a dtype argument has no integer form"),
    "double": (
        lambda x: x.double() * 2, "its operand %double_1 is float64, and only float32 tensors are quantized; convert it to float32",
    ),
    "a list of the batch": (lambda x: x[[0, 1]], "it indexes the batch by a list"),
}  # fmt: skip

# The second operator that stays in float: one that follows from another.
FOLLOWING: dict[str, tuple[Body, str]] = {
    "a piece of mode": (lambda x: x.mode(1)[0], "it selects a result of %mode, which is computed in float"),
    "float64": (lambda x: x.double() * 2 + 1, "its operand %mul is float64, and only float32 tensors are quantized; convert it to float32"),
    "complex": (lambda x: torch.fft.rfft(x).abs(), "its operand %fft_rfft is complex64, and only float32 tensors are quantized"),
    "a pool of what is float": (
        lambda x: F.max_pool2d(x.logcumsumexp(1), 2),
        "it only passes on the values of %logcumsumexp, which is in float",
    ),
}


def example() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def reasons(body: Body) -> list[str]:
    gm = fxq.prepare(written(body), example(), until="specs.annotate")
    result = [layer.reason for layer in left_in_float(layers(gm))]
    assert all(reason in fxq.explain(gm) for reason in result)
    return result


@pytest.mark.parametrize("name", [*REASONS, *FOLLOWING])
def test_the_reason_for_what_was_written_or_for_what_follows(name: str) -> None:
    body, reason = (REASONS | FOLLOWING)[name]
    assert reasons(body)[name in FOLLOWING] == reason


def test_an_int32_output_is_not_computed_with() -> None:
    qconfig = fxq.QConfigMapping().set_module_name("conv", fxq.QConfig(fxq.ActivationConfig("int32"))).set_module_name("sigmoid", None)
    gm = fxq.prepare(written(lambda x: (x * x).sigmoid()), example(), qconfig=qconfig, until="specs.annotate")
    assert [layer.reason for layer in left_in_float(layers(gm))] == [
        "the 32-bit output of %conv is not read by another integer operator",
        "the qconfig keeps it in float",
    ]


def test_the_boundary_is_not_counted_at_any_stage() -> None:
    model = written(lambda x: (x.logcumsumexp(1) * 2, x.relu()))
    for stage in ("boundary.insert", None):
        gm = fxq.prepare(model, example(), until=stage)
        assert summary(layers(gm)).startswith("3 operators are integer, 1 is left in float: 1 because")
    fxq.calibrate(gm, [example()])
    assert summary(layers(fxq.convert(gm))) == summary(layers(gm))


def quantize(x: Tensor) -> Tensor:
    """A user's function of this name, which a graph can call."""
    return x.logcumsumexp(1)


def test_a_function_of_the_users_called_quantize_is_an_operator() -> None:
    traced = fxq.trace(written(lambda x: torch.logcumsumexp(x, 1)), example())
    next(node for node in traced.graph.nodes if node.target is torch.logcumsumexp).target = quantize
    told = summary(layers(fxq.prepare(traced, example(), until="boundary.insert")))
    assert "1 is left in float: 1 because no registered operator matches quantize" in told


def test_what_a_float_operator_holds_is_said() -> None:
    gm = fxq.prepare(written(lambda x: F.relu(x)), example(), qconfig=fxq.QConfigMapping().set_module_name("conv", None))
    assert "the qconfig keeps it in float; holds relu" in fxq.explain(gm)


def test_no_operator_is_in_float_without_a_reason() -> None:
    """A function in front of a float operator that ranks, but reads no mask, is integer; it was in float, and in no row."""
    prepared = fxq.prepare(written(lambda x: F.gumbel_softmax(torch.tanh(x), dim=1)).eval(), (torch.zeros(2, 3, 8, 8),), target="bayes-e")
    assert "%tanh" in fxq.explain(prepared)
    (tanh,) = [layer for layer in layers(prepared) if layer.name == "tanh"]
    assert tanh.integer
