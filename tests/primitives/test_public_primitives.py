"""Integer primitives by their public names, without a model."""

from __future__ import annotations

import doctest

import pytest
import torch

import fxquant as fxq
from fxquant import primitives
from fxquant.numerics.grids import INT8, Ratio, real_multiplier
from fxquant.primitives import BY_NAME, PRIMITIVES


def test_every_primitive_has_its_public_name() -> None:
    assert len(BY_NAME) == len(PRIMITIVES)
    assert set(BY_NAME) <= set(dir(primitives))
    assert not set(BY_NAME) & set(primitives.__all__), "no module hides a function"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_primitive_has_one_record_and_says_what_it_computes(name: str) -> None:
    function = getattr(fxq.primitives, name)
    record = PRIMITIVES[function]
    assert (record.name, record.function, function.__name__) == (name, function, name)
    assert record.kind in ("quantized", "accumulator", "plain", "float", "dynamic")
    assert function.__doc__
    assert function.__doc__.strip().splitlines()[0].endswith((".", "float64."))


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="no primitive is named 'requantise'"):
        primitives.requantise  # noqa: B018


def test_a_layer_made_of_primitives_is_the_layer_of_a_model() -> None:
    """Quantize, multiply and requantize by hand, with the scales of a model: its own integers come out."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(6, 4), torch.randn(8, 6)
    result = fxq.quantize(model, [x], target="nash-e", qconfig=fxq.QConfig(fxq.ActivationConfig("int8")))
    scales = fxq.qparams(result.prepared)
    s_x, s_y = (torch.tensor(scale) for scale in scales.values())  # of the quantized input, and of the output
    s_w = (model.weight.abs().amax(1) / 127).detach()
    weight = torch.round(model.weight / s_w[:, None]).to(torch.int8)
    bias = torch.round(model.bias.double() / (s_x.double() * s_w.double())).to(torch.int32)
    q = primitives.quantize(x, s_x, INT8.low, INT8.high, torch.int8)
    acc = primitives.linear(q, weight, bias)
    y = primitives.requantize_real(acc, real_multiplier(Ratio((s_x, s_w), (s_y,))), INT8.low, INT8.high, torch.int8)
    assert len(y.unique()) > 10
    assert torch.equal(primitives.dequantize(y, s_y), result.integer(x))


def test_the_example_of_the_documentation() -> None:
    outcome = doctest.testmod(primitives)
    assert outcome.attempted >= 6
    assert outcome.failed == 0
