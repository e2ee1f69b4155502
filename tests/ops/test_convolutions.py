"""Convolutions in one to three dimensions: every padding, and weights that are computed from parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.graph import is_parameter
from tests.ops.test_weighted_operators import COVERING, Case, assert_contract, built, layer, left_in_float, weights
from tests.shared import contract

LINE, IMAGE, VOLUME = (4, 3, 9), (3, 3, 6, 7), (2, 2, 4, 5, 4)

PADDINGS: dict[str, Callable[[], Case]] = {
    "reflect, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 5, padding=3, padding_mode="reflect"), nn.BatchNorm1d(4)),
    "replicate, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 4, 2, padding=5, padding_mode="replicate")),
    "circular, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 3, padding=2, dilation=2, padding_mode="circular")),
    "reflect, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), nn.BatchNorm2d(4)),
    "replicate, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 6, 3, 2, padding=1, groups=3, padding_mode="replicate", bias=False)),
    "circular, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 4, (2, 3), padding=(0, 4), padding_mode="circular")),
    "reflect, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, 3, padding=(1, 2, 0), padding_mode="reflect"), nn.BatchNorm3d(3)),
    "replicate, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, 2, padding=1, padding_mode="replicate")),
    "circular, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular")),
    "same, even, 1d": lambda: layer(LINE, nn.Conv1d(3, 4, 4, padding="same"), nn.BatchNorm1d(4)),
    "same, even, 2d": lambda: layer(IMAGE, nn.Conv2d(3, 4, (2, 5), padding="same", dilation=(3, 1)), nn.BatchNorm2d(4)),
    "same, even, 3d": lambda: layer(VOLUME, nn.Conv3d(2, 3, (2, 3, 4), padding="same")),
    "same, even, reflect": lambda: layer(IMAGE, nn.Conv2d(3, 4, (4, 2), padding="same", padding_mode="reflect")),
    "same, odd, circular": lambda: layer(IMAGE, nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular")),
    "valid, reflect": lambda: layer(IMAGE, nn.Conv2d(3, 4, 3, padding="valid", padding_mode="reflect")),
    "function, same": lambda: Case(LINE, lambda s, x: F.conv1d(x, s.w, s.b, padding="same"), w=weights(4, 3, 4), b=weights(4)),
    "function, same, 2d": lambda: Case(IMAGE, lambda s, x: F.conv2d(x, s.w, None, 1, "same", (1, 2)).relu(), w=weights(4, 3, 2, 3)),
    "function, valid": lambda: Case(VOLUME, lambda s, x: F.conv3d(x, s.w, padding="valid"), w=weights(4, 2, 2, 2, 2)),
    "function, same, odd": lambda: Case(VOLUME, lambda s, x: F.conv3d(x, s.w, padding="same", groups=2), w=weights(4, 1, 3, 1, 3)),
    "residual": lambda: Case(
        IMAGE,
        lambda s, x: F.relu(s.a(x) + s.b(x)),
        a=nn.Conv2d(3, 4, 2, padding="same"),
        b=nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    ),
}

COMPUTED: dict[str, Callable[[], Case]] = {
    "linear, transposed": lambda: Case((4, 8), lambda s, x: F.linear(x, s.w.t()), w=weights(8, 5)),
    "linear, product": lambda: Case(
        (4, 8), lambda s, x: F.linear(x, s.w * s.gain, s.b * 2 + 1), w=weights(5, 8), gain=weights(5, 1),
        b=weights(5),
    ),
    "conv, reshaped": lambda: Case(
        IMAGE, lambda s, x: s.norm(F.conv2d(x, s.w.reshape(4, 3, 2, 2))), w=weights(12, 4),
        norm=nn.BatchNorm2d(4),
    ),
    "conv, standardised": lambda: Case(
        IMAGE, lambda s, x: F.conv2d(x, standardised(s.w), s.b, padding="same"), w=weights(4, 3, 2, 3),
        b=weights(4),
    ),
    "conv transpose, permuted": lambda: Case(
        IMAGE, lambda s, x: F.conv_transpose2d(x, s.w.permute(1, 0, 2, 3), s.w.sum((1, 2, 3)), 2),
        w=weights(4, 3, 2, 2),
    ),
    "matmul": lambda: Case(
        (4, 6, 8), lambda s, x: x @ (s.w.T * 0.5) + torch.matmul(x, s.v.view(8, 5)), w=weights(5, 8),
        v=weights(40),
    ),
    "addmm": lambda: Case((4, 8), lambda s, x: torch.addmm(-s.b, x, s.w.t()), w=weights(5, 8), b=weights(5)),
    "matrix on the left": lambda: Case((4, 6, 8), lambda s, x: s.w.t() @ x, w=weights(6, 5)),
    "added": lambda: Case((4, 6), lambda s, x: x + (s.w + s.v) * x, w=weights(6), v=weights(6)),
    "prelu": lambda: Case((4, 6), lambda s, x: F.prelu(x, s.w.abs() / 4), w=weights(6)),
    "batch norm": lambda: Case(
        (4, 6), lambda s, x: F.batch_norm(x, s.mean[0], s.var.exp(), s.gain * 0.5, s.b.neg()), mean=torch.randn(2, 6), var=torch.randn(6),
        gain=weights(6), b=weights(6),
    ),
    "two parts": lambda: Case(
        (4, 8), lambda s, x: F.linear(x, s.w.split(3)[1]) + F.linear(x, s.w.chunk(2)[0]),
        w=weights(6, 8),
    ),
}  # fmt: skip


def standardised(weight: Tensor) -> Tensor:
    mean = weight.mean((1, 2, 3), keepdim=True)
    return (weight - mean) / (weight.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()


# A case's geometry has nothing to do with the arithmetic: one target after the other.
@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "target"), zip([*PADDINGS, *COMPUTED], itertools.cycle(contract.TARGETS), strict=False))
def test_contract(name: str, target: str, tmp_path: Path) -> None:
    model, batches = built({**PADDINGS, **COMPUTED}[name])
    compiled = contract.compiled(model, batches, target, COVERING)
    assert left_in_float(compiled.prepared) == []
    assert not any(map(is_computed, compiled.integer.graph.nodes)), "the integer model computes with floats"
    expected, found = model(*batches[0]), compiled.integer(*batches[0])
    assert found.shape == expected.shape
    assert (found - expected).square().mean() < 0.005 * expected.var(), "far from the float model"
    fxq.set_state(compiled.prepared, fxq.State.FLOAT)
    torch.testing.assert_close(compiled.prepared(*batches[0]), expected, rtol=1e-5, atol=1e-5)
    assert_contract(compiled, tmp_path / "model.onnx", batches)


def is_computed(node: torch.fx.Node) -> bool:
    return is_parameter(node) and node.op != "get_attr"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["reflect, 2d", "same, even, 1d"])
@pytest.mark.parametrize("target", ["bernoulli", "nash-m"])
def test_padding_with_int16(name: str, target: str, tmp_path: Path) -> None:
    model, batches = built(PADDINGS[name])
    dtype = "int8" if target == "bernoulli" else "int16"
    compiled = contract.compiled(model, batches, target, fxq.QConfig(fxq.ActivationConfig(dtype)))
    assert_contract(compiled, tmp_path / "model.onnx", batches)


def test_padded_zeros_are_zeros_and_no_other_number() -> None:
    """With a kernel that picks the last element of its window, the padding behind "same" is seen by itself."""
    conv = nn.Conv1d(1, 1, 2, padding="same", bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[0.0, 1.0]]]))
    batch = torch.randn(4, 1, 6)
    integer = contract.compiled(conv, [batch], qconfig=COVERING).integer
    assert torch.equal(integer(batch)[:, :, -1], torch.zeros(4, 1))
    assert torch.equal(integer(batch)[:, :, :-1].sign(), batch[:, :, 1:].sign())


def test_a_computed_weight_is_trained_and_is_the_one_of_the_moment() -> None:
    model, batches = built(COMPUTED["linear, product"])
    prepared, _ = contract.compiled(model, batches)
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared.train()
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    before = prepared.gain.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        prepared(*batches[0]).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, prepared.gain)
    fxq.set_state(prepared, fxq.State.VALIDATE)
    prepared.eval()
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, batches)
    assert not torch.equal(integer(*batches[0]), model(*batches[0]))


def test_a_weight_with_noise_is_no_parameter() -> None:
    """What is random must not become a constant, nor must dropout of a weight, which acts while training."""
    drawn = {
        "randn_like": lambda w: w + torch.randn_like(w),
        "dropout": lambda w: F.dropout(w, 0.5, False),
        "bernoulli": lambda w: torch.bernoulli(w.sigmoid()),
    }
    for name, noise in drawn.items():
        model, batches = built(lambda noise=noise: Case((4, 8), lambda s, x: F.linear(x, noise(s.w)), w=weights(5, 8)))
        assert name in left_in_float(fxq.prepare(model, batches[0]))


def test_a_model_with_computed_weights_is_saved(tmp_path: Path) -> None:
    model, batches = built(COMPUTED["conv, standardised"])
    prepared, integer = contract.compiled(model, batches)
    for name, kept in (("prepared", prepared), ("integer", integer)):
        loaded = fxq.load(fxq.save(kept, tmp_path / f"{name}.fxq"))
        assert torch.equal(loaded(*batches[0]), kept(*batches[0]))
    assert torch.equal(fxq.convert(fxq.load(tmp_path / "prepared.fxq"))(*batches[0]), integer(*batches[0]))


def test_a_margin_is_an_operator_of_its_own() -> None:
    """It is explained, follows the rules for its layer, and has the limits of a pad."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")).eval()
    batch = torch.randn(2, 3, 6, 6)
    prepared = fxq.prepare(model, (batch,))
    assert [node.name for node in prepared.graph.nodes if node.op == "call_module"] == ["input_1_quantize", "_0_pad", "_0"]
    assert "%_0_pad" in fxq.explain(prepared)
    for rule in (fxq.QConfigMapping().set_module_name("0", None), fxq.QConfigMapping().set_object_type(nn.Conv2d, None)):
        in_float = fxq.prepare(model, (batch,), qconfig=rule)
        assert {"_0_pad", "_0"} <= set(left_in_float(in_float))
        assert torch.equal(fxq.set_state(in_float, fxq.State.FLOAT) or in_float(batch), model(batch))
