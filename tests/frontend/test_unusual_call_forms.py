"""Spellings that are seldom: what is traced as other calls, layers without a batch, bags, masks of padding, tensors without elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network
from tests.shared.written import written

TORCH: Any = torch  # whose stubs do not know NumPy's names of arguments


def live(function: Callable[[Tensor], Any]) -> nn.Module:
    """A function of a live tensor of shape (4, 3, 6, 6)."""
    return Network(lambda m, x: function(m.layer(x)), layer=nn.Conv2d(3, 3, 1))


def batch(seed: int = 1, *shape: int) -> Tensor:
    return torch.randn(shape or (4, 3, 6, 6), generator=torch.Generator().manual_seed(seed))


def many(x: Any) -> tuple[Any, ...]:
    """Functions that are others, called, and NumPy's names of arguments."""
    a, b = x[0, 0], x[1, 0]
    return (
        torch.block_diag(a, b[:2]), torch.cartesian_prod(a[0], b[0]), torch.combinations(a[0]), torch.atleast_3d(a, b)[1],
        nn.utils.rnn.pad_sequence([a, b[:3]], batch_first=True, padding_value=0.5), torch.cov(a), torch.corrcoef(a + b),
        x.conj() + torch.real(x).real, torch.slice_copy(x, 1, 0, 2), torch.narrow_copy(x, 2, 1, 3), torch.unbind_copy(x, 1)[0], x.roll(7),
        (a + 3).median(), a.argmax(), (x > 0).any(), x.put(torch.tensor([0, 7]), torch.ones(2)),
        x.index_put((torch.tensor([0, 1, 0]), torch.tensor([0, -1, 0])), x[:3, 0], accumulate=True), x.new_tensor([0.5] * 6) * x,
        torch.sum(x, axis=1, keepdims=True), x.amax(axis=(1, 2)), TORCH.cat([x, x], axis=1), TORCH.stack((x, x), axis=2),
        torch.ops.aten.relu(x), torch.ops.aten.mean.dim(x, [2, 3]), torch.cat([x, x[:, :0]], 1), F.max_pool2d(x.mean(1), 2),
        x[:, [True, False, True]], torch.ops.aten.index_put(x, [None, torch.tensor([1])], x[:, :1]),
    )  # fmt: skip


def test_what_is_other_calls_is_integer_and_holds_the_contract(tmp_path: Path) -> None:
    model, batches = live(many).eval(), [batch(seed) for seed in (1, 2)]
    prepared, integer = compiled(model, batches, dynamic_shapes={})
    contract.assert_all_is_integer(prepared)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert fxq.verify(integer, path, [(each,) for each in batches])
    contract.assert_validate_is_integer(prepared, integer, batches[1])
    contract.assert_train_is_validate(prepared, batches[1])
    for wanted, found in zip(model(batches[0]), integer(batches[0]), strict=True):
        assert wanted.shape == found.shape
        assert wanted.dtype == found.dtype
        if wanted.is_floating_point():  # noise of int8, 20 dB below the signal: a correlation divides by deviations
            assert (wanted - found).square().mean() < wanted.square().mean() / 100


def slopes(x: Tensor) -> Tensor:
    """Assignments to what masks select, in place and not, through a view, and of what was selected before a change."""
    y, m = x.clone(), x > 0.3
    y[y < 0] *= 0.1
    before = y[m]
    y[m] = torch.tanh(y[m] * 2) - 0.5
    y[~m] /= 2
    y[:, 1:][y[:, 1:] > 0] = -y[:, 1:][y[:, 1:] > 0]
    y[m] = before.clamp(max=0.7) + y[m]
    z = x * 0.5
    z[m] **= 2
    return y + z


def slopes_in_full(x: Tensor) -> Tensor:
    """The same, written with `where`."""
    m = x > 0.3
    before = torch.where(x < 0, x * 0.1, x)
    y = torch.where(m, torch.tanh(before * 2) - 0.5, before)
    y = torch.where(~m, y / 2, y)
    y = torch.cat([y[:, :1], torch.where(y[:, 1:] > 0, -y[:, 1:], y[:, 1:])], 1)
    y = torch.where(m, before.clamp(max=0.7) + y, y)
    z = x * 0.5
    return y + torch.where(m, z**2, z)


def test_what_a_mask_selects_is_assigned_by_where(tmp_path: Path) -> None:
    model, batches = live(slopes).eval(), [batch(seed) for seed in (1, 2)]
    full = live(slopes_in_full).eval()
    full.load_state_dict(model.state_dict())
    assert torch.equal(model(batches[0]), full(batches[0]))
    prepared, integer = compiled(model, batches)
    assert "none is left in float" in fxq.explain(prepared)
    contract.assert_validate_is_integer(prepared, integer, batches[1])
    contract.assert_train_is_validate(prepared, batches[1])
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [(each,) for each in batches])
    fxq.set_state(prepared, fxq.State.FLOAT)
    assert all(torch.equal(prepared(each[:3]), model(each[:3])) for each in batches)


def assigned_elsewhere(x: Tensor) -> Tensor:
    y = x.clone()
    y[x < 0] = y[x > 0]
    return y


def assigned_after_a_change(x: Tensor) -> Tensor:
    y = x.clone()
    found = y[y < 0]
    y += 1
    y[y < 0] = found
    return y


SELECTED: tuple[Callable[[Tensor], Any], ...] = (
    assigned_elsewhere, assigned_after_a_change, lambda x: x[x > 0], lambda x: x[x > 0].sum(), lambda x: x + x[x > 0].mean(),
    lambda x: x[x > 0].sqrt(), lambda x: 1 / x[x > 0], lambda x: x[x > 0] / x[x > 0], lambda x: x[x > 0] + x[x < 0],
    lambda x: x[x > 0] * math.inf, lambda x: x[x > 0] ** -1, lambda x: len(x[x > 0]), lambda x: x[x > 0] == 0,
    lambda x: x * x[x > 0], lambda x: {"found": [x[x > 0]]}, lambda x: torch.cat([x[x > 0], x[x > 1]]),
    lambda x: x[x > 0].shape[0] * x, lambda x: x if x[x > 0] else -x,
)  # fmt: skip


@pytest.mark.parametrize("function", SELECTED)
def test_what_a_mask_selects_is_nothing_else(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(fxq.errors.FxQuantError):
        fxq.trace(live(function).eval(), (batch(),))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1), "transposed": lambda: nn.ConvTranspose2d(3, 4, 2), "max": lambda: nn.MaxPool2d(3, 2, 1),
    "mean": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), "adaptive": lambda: nn.AdaptiveAvgPool2d((2, 5)),
    "norm": lambda: nn.InstanceNorm2d(3, affine=True),
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", LAYERS)
def test_a_sample_without_a_batch_has_the_bits_of_a_batch_of_one(name: str) -> None:
    layer, x = LAYERS[name]().eval(), batch(3, 3, 6, 6)
    prepared, alone = compiled(layer, [x], dynamic_shapes={})
    assert "none is left in float" in fxq.explain(prepared)
    _, batched = compiled(layer, [x[None]])
    assert torch.equal(alone(x), batched(x[None])[0])
    assert alone(x).shape == layer(x).shape


@pytest.mark.parametrize("function", [torch.acos, torch.asin, torch.atanh, torch.erfinv], ids=lambda function: function.__name__)
def test_a_grid_that_reaches_beyond_where_a_function_has_values_trains(function: Callable[[Tensor], Tensor]) -> None:
    """The grid of a tanh: 127 steps are 1.003."""
    x = torch.linspace(-4, 4, 3 * 4 * 36).reshape(4, 3, 6, 6)
    model, options = live(lambda y: function(y.tanh())).eval(), fxq.Options(integer_tail=True)
    prepared = fxq.calibrate(fxq.prepare(model, (x,), options=options), [x], show_progress=False)
    fxq.set_qparams(prepared, {"tanh": 0.0079})
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared(x * 9).sum().backward()
    gradients = [parameter.grad for parameter in prepared.parameters() if parameter.grad is not None]
    assert gradients
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True, "add_bias_kv": True}], ids=["plain", "added"])
def test_what_a_mask_of_padding_hides_changes_no_bit(options: dict[str, bool]) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()  # type: ignore[arg-type]

    hidden = torch.tensor([[False, False, True, True], [False, True, False, True]])
    q, x = batch(1, 2, 3, 8), batch(2, 2, 4, 8)
    prepared, integer = compiled(
        written(lambda m, q, x, hidden: m.layer(q, x, x, key_padding_mask=hidden, need_weights=False)[0], layer=layer), [(q, x, hidden)]
    )
    assert "none is left in float" in fxq.explain(prepared)
    other = torch.where(hidden[..., None], -x, x)
    assert torch.equal(integer(q, x, hidden), integer(q, other, hidden))
    assert not torch.equal(integer(q, x, hidden), integer(q, x, ~hidden))


def test_tensors_without_elements_stay_on_the_host() -> None:
    model, x = live(lambda x: (x[..., 6:].sum(-1), x[:, :0].flatten(1), torch.cat([x[:, 3:], x, x[:, :0]], 1))).eval(), batch()
    prepared, integer = compiled(model, [x])
    assert "has no elements" in fxq.explain(prepared)
    for wanted, found in zip(model(x), integer(x), strict=True):
        assert wanted.shape == found.shape
    assert not integer(x)[0].any()


def test_a_packed_sequence_is_refused_by_name() -> None:

    with pytest.raises(fxq.FxQuantError, match="packed sequences cannot be traced") as raised:
        fxq.prepare(
            written(
                lambda m, x: m.layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True))[1],
                layer=nn.GRU(8, 6, batch_first=True),
            ),
            batch(0, 2, 5, 8),
            options=fxq.Options(dynamic_shapes={}),
        )
    assert "padded tensor" in str(raised.value)
