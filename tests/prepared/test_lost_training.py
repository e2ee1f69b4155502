"""Parameters that do not train as in the float model are named with their line; a model's own errors come through as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ops import BY_NAME, FUNCTIONS, OPERATORS
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import members, written

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Edited(nn.Linear):
    """A linear layer whose forward edits its weight before it computes."""

    def __init__(self, edit: Callable[[nn.Linear], Any]) -> None:
        super().__init__(6, 4)
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        self.edit(self)
        return super().forward(x)


def decayed(layer: nn.Linear) -> None:
    if layer.training:
        with torch.no_grad():
            layer.weight.mul_(0.5)


class Cached(nn.Module):
    """Keeps in eval mode the elements that it gathers from a parameter, as LeViT and EfficientFormer do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.bias = kind, nn.Linear(6, 4), nn.Parameter(torch.randn(5))
        self.register_buffer("index", torch.tensor([0, 3, 1, 4]))

    @torch.no_grad()
    def train(self, mode: bool = True) -> Cached:
        super().train(mode)
        gathered: Any = self.bias[self.index]  # type: ignore[index]
        if self.kind == "buffer":
            self.register_buffer("kept", gathered, persistent=False)
        else:
            self.kept = {"cpu": gathered} if self.kind == "dict" else gathered
        return self

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = self.kept["cpu"] if self.kind == "dict" else self.kept  # type: ignore[index]
        return self.layer(x) + (self.bias[self.index] if self.training else kept)  # type: ignore[index, no-any-return]


class Merged(nn.Linear):
    """A low rank that is merged into the weight in eval mode, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.down, self.up, self.merged = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(4, 2)), False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + F.linear(F.linear(x, self.down), self.up)


@members(lambda: dict(layer=nn.Linear(6, 6), auxiliary=nn.Linear(6, 2)))
def Head(self, x: Tensor) -> Any:
    y = self.layer(x)
    return (y, self.auxiliary(y)) if self.training else y


LOST = "parameters that train in the float model and have no gradient here"
MOVED = "forward moves tensors in train mode that training here does not move"


def warnings(model: nn.Module, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    prepared = fxq.calibrate(fxq.prepare(model.eval(), X, options=fxq.Options(**settings)), [X])
    fxq.set_state(prepared, "train")
    result = prepared.train()(X)
    sum(each.square().mean() for each in (result if isinstance(result, tuple) else (result,))).backward()
    without = [name for name, parameter in prepared.named_parameters() if parameter.grad is None]
    told = [line.split()[0] for line in caplog.text.partition(LOST)[2].splitlines()[1:] if line.startswith("  ")]
    assert sorted(without) == sorted(told)  # the warning is true
    return caplog.text


@pytest.mark.parametrize("kind", ["attribute", "buffer", "dict"])
def test_a_parameter_whose_gathered_values_are_kept_in_eval_mode(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    text = warnings(Cached(kind), caplog)
    assert f"{LOST}: 1; compute with the parameter itself in eval mode too" in text
    assert "bias (test_lost_training.py:" in text
    assert "self.bias[self.index] if self.training else kept" in text


def test_parameters_that_are_merged_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = Merged().eval()
    before = model.weight.detach().clone()
    text = warnings(model, caplog)
    assert torch.equal(model.weight, before)
    assert f"{LOST}: 2" in text
    assert "up (test_lost_training.py:" in text
    assert "F.linear(F.linear(x, self.down), self.up)" in text


@pytest.mark.parametrize("edit", [lambda weight: weight.copy_(torch.renorm(weight, 2, 0, 0.25)), lambda weight: weight.clamp_(-0.1, 0.1)])
def test_a_parameter_that_forward_edits(edit: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture) -> None:
    text = warnings(Edited(torch.no_grad()(lambda layer: edit(layer.weight))), caplog)
    assert f"{LOST}: 1" in text
    assert f"{MOVED}: 1; move them in your training loop" in text
    assert text.count("weight (test_lost_training.py:") == 2


@pytest.mark.parametrize("edit", [lambda layer: layer.weight.data.clamp_(-0.1, 0.1), decayed])
def test_a_parameter_that_forward_moves_trains_and_is_told(edit: Callable[[nn.Linear], Any], caplog: pytest.LogCaptureFixture) -> None:
    text = warnings(Edited(edit), caplog)
    assert f"{MOVED}: 1" in text
    assert "weight (test_lost_training.py:" in text
    assert "layer.weight" in text


def test_a_head_of_train_mode_trains_with_a_training_branch(caplog: pytest.LogCaptureFixture) -> None:
    assert f"{LOST}: 2" in warnings(Head(), caplog)
    caplog.clear()
    assert LOST not in warnings(Head(), caplog, training_branch=True)


def test_what_does_not_train_in_the_float_model_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    with torch.no_grad():
        fxq.prepare(model.eval(), X)
    assert not caplog.text


# ---- what has no gradient, or raises by itself -----------------------------------------------------------------------------
@members(lambda rounded: dict(
    rounded=rounded, layer=nn.Linear(8, 8), scale=nn.Parameter(torch.tensor([0.05])), scales=nn.Parameter(torch.full((8,), 0.05)),
    zero=nn.Parameter(torch.zeros(1)), zeros=nn.Parameter(torch.zeros(8)),
))  # fmt: skip
def RoundedWeight(self, x: Tensor) -> Tensor:
    """A linear layer whose weight goes through PyTorch's fake quantization, with scales that are parameters."""
    return F.linear(x, self.rounded(self), self.layer.bias)


ROUNDED: dict[str, Callable[[Any], Tensor]] = {
    "per channel": lambda m: torch.fake_quantize_per_channel_affine(m.layer.weight, m.scales, m.zeros.int(), 0, -128, 127),
    "per tensor": lambda m: torch.fake_quantize_per_tensor_affine(m.layer.weight, m.scale, m.zero.int(), -128, 127),
    "computed": lambda m: torch.fake_quantize_per_channel_affine(m.layer.weight, m.scales.abs() + 0.01, m.zeros.int(), 0, -128, 127),
    "learned": lambda m: torch._fake_quantize_learnable_per_channel_affine(m.layer.weight, m.scales, m.zeros, 0, -128, 127, 1.0),
    "without a gradient": lambda m: torch.fake_quantize_per_channel_affine(
        m.layer.weight, m.scales.detach(), m.zeros.detach().int(), 0, -128, 127
    ),
}


@pytest.mark.parametrize("form", ROUNDED)
def test_a_weight_with_fake_quantization_is_compiled_whatever_its_scale_is(form: str) -> None:
    batches = [torch.randn(8, 8) for _ in range(3)]
    prepared, integer = compiled(RoundedWeight(ROUNDED[form]).eval(), batches)
    assert fxq.explain(prepared).count("none is left in float") == 1
    contract.assert_validate_is_integer(prepared, integer, batches[0])


class OutOfReachError(Exception):
    """An error of the user's own."""


def raises(function: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    """A model that can be traced, and that raises when it is called on numbers."""
    return written(lambda m, x: m.function(m, m.layer(x)), layer=nn.Linear(8, 8), function=function)


def own(model: nn.Module, y: Tensor) -> Tensor:
    if type(y) is Tensor:
        raise OutOfReachError("the lidar is off")
    return y


RAISED: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "its own": (own, OutOfReachError, "raise OutOfReachError"),
    "an index": (lambda m, y: F.embedding((y * 1000).long(), m.layer.weight), IndexError, "F.embedding"),
    "a singular matrix": (lambda m, y: torch.linalg.inv(torch.zeros_like(y.t() @ y)), RuntimeError, "linalg.inv"),
    "a class": (lambda m, y: F.cross_entropy(y, (y[:, 0] * 0).long() + 99), IndexError, "cross_entropy"),
    "a gather": (lambda m, y: y.gather(1, (y * 0).long() + 8), RuntimeError, "gather"),
    "no such row": (lambda m, y: y.index_select(0, (y[:, 0] * 0).long() + 8), IndexError, "index_select"),
}


@pytest.mark.parametrize("form", RAISED)
def test_an_error_of_the_float_model_comes_through_as_it_is_with_a_note_where(form: str, caplog: pytest.LogCaptureFixture) -> None:
    function, kind, line = RAISED[form]
    with pytest.raises(kind) as raised, caplog.at_level(logging.ERROR, "fxquant"):
        fxq.prepare(raises(function).eval(), torch.rand(4, 8))
    (note,) = getattr(raised.value, "__notes__", None) or caplog.messages  # Python 3.10 has no notes
    assert "raised by the float model, which fxquant calls on the example inputs" in note
    assert "test_lost_training.py" in note
    assert line in note


@pytest.fixture
def declared() -> Iterator[list[Callable[..., Tensor]]]:
    """Functions that are operators as long as a test runs."""
    functions: list[Callable[..., Tensor]] = []
    yield functions
    for function in functions:
        del BY_NAME[OPERATORS[function].name]
        for table in (OPERATORS, FUNCTIONS):
            del table[function]


@pytest.mark.parametrize("function", [torch.tanh, F.mish, nn.Tanh(), nn.Softplus(2.0)], ids=["torch", "functional", "module", "settings"])
def test_a_function_of_pytorchs_may_be_a_table_of_another_name(function: Any, declared: list[Any]) -> None:
    table = fxq.extend.unary("bent_elsewhere", function)
    declared.append(table)
    batches = [torch.randn(8, 8) for _ in range(2)]
    prepared, integer = compiled(raises(lambda m, y: table(y)).eval(), batches)
    assert "bent_elsewhere" in fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, batches[0])
