"""Float operators that are written without PyTorch's exporter: the same numbers, and everything else is still left to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import quiet
from tests.shared.networks import Network
from tests.shared.onnx_files import run


class Between(nn.Module):
    """A function between two layers that are integers for bernoulli2; two tokens of the sequence carry most of it."""

    def __init__(self, function: Callable[..., Tensor], width: int = 16) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(12, 16), function, nn.Linear(width, 5)
        self.norm, self.table = nn.LayerNorm(16), nn.Parameter(torch.randn(8, 4))
        self.register_buffer("index", torch.randint(0, 8, (36,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.norm(self.first(x))))


def attended(model: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    heads = F.layer_norm(x, [16]).reshape(x.shape[0], 6, 4, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, **options).transpose(1, 2).reshape(x.shape[0], 6, 16)


def biased(model: Any, x: Tensor) -> Tensor:
    """With Swin's table of relative positions, which depends on parameters alone."""
    return attended(model, x, model.table[model.index].view(6, 6, 4).permute(2, 0, 1).contiguous().unsqueeze(0))


def masked_by_batch(model: Any, x: Tensor) -> Tensor:
    """With a mask that is expanded over the batch, by a size that is computed."""
    batch = (x.shape[0] * 2) // 2
    return attended(model, x, torch.tril(torch.ones(6, 6)).log().clamp(-9.0)[None, None].expand(batch, 4, -1, -1))


def rolled(model: Any, x: Tensor) -> Tensor:
    return F.layer_norm(torch.roll(F.layer_norm(x, [16]), (-2, 5), (1, 2)), [16])


DIRECT: dict[str, Callable[..., Tensor]] = {
    "norm": lambda model, x: x,
    "norm without factors": lambda model, x: F.layer_norm(x, [6, 16]),
    "softmax": lambda model, x: F.layer_norm(torch.softmax(F.layer_norm(x, [16]), 1), [16]),
    "attention": attended,
    "attention with a scale": lambda model, x: attended(model, x, scale=0.3),
    "attention with biases": biased,
    "attention with a mask": masked_by_batch,
    "roll": rolled,
    "arithmetic": lambda model, x: F.layer_norm(F.layer_norm(x, [16]) * 1.5 + F.layer_norm(x, [16]) - 0.25, [16]),
}
LEFT: dict[str, Callable[..., Tensor]] = {
    "causal attention": lambda model, x: attended(model, x, is_causal=True),
    "a group norm": lambda model, x: F.layer_norm(F.instance_norm(F.layer_norm(x, [16])), [16]),
}


def exported(function: Callable[..., Tensor], tmp_path: Path, opset: int = 21) -> tuple[Any, Path, list[Tensor]]:
    torch.manual_seed(0)
    batches = [torch.randn(3, 6, 12) for _ in range(3)]
    result = fxq.quantize(Between(function).eval(), batches, target="bernoulli2")
    return result, result.export(tmp_path / "model.onnx", opset=opset), batches


def refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("PyTorch's exporter was called")


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("name", DIRECT)
def test_nothing_of_these_is_left_to_the_exporter(
    name: str, opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.onnx, "export", refuse)
    with caplog.at_level(logging.WARNING):
        result, path, batches = exported(DIRECT[name], tmp_path, opset)
    assert any(node.op_type in ("LayerNormalization", "Softmax") for node in onnx.load(path).graph.node)
    for count in (1, 3):
        given = batches[0][:count]
        assert result.verify(path, [given])
        (found,), wanted = run(path, given), result.integer(given)
        assert float((found - wanted).abs().max()) < 0.1 * float(wanted.std())  # a float that rounds otherwise is a step


@pytest.mark.parametrize("name", LEFT)
def test_what_there_is_no_form_for_is_left_to_the_exporter(name: str, tmp_path: Path) -> None:
    result, path, batches = exported(LEFT[name], tmp_path)
    assert result.verify(path, batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", refuse)
        with pytest.raises(fxq.ExportError, match="PyTorch's exporter was called"):
            exported(LEFT[name], tmp_path)


def test_the_forms_agree_with_the_float_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float nodes alone, nothing rounded behind them: the numbers are those of PyTorch to float32's last digits."""
    monkeypatch.setattr(torch.onnx, "export", refuse)

    torch.manual_seed(0)
    tail, x = (
        Network(lambda s, x: attended(None, s.norm(s.first(x))), first=nn.Linear(12, 16), norm=nn.LayerNorm(16)),
        torch.randn(3, 6, 12),
    )
    result = fxq.quantize(tail.eval(), [x], target="bernoulli2")
    (found,) = run(result.export(tmp_path / "model.onnx"), x)
    assert torch.allclose(found, result.integer(x), rtol=1e-5, atol=1e-5)  # float sums, in another order


def test_a_module_that_the_exporter_imports_may_export() -> None:
    with quiet.quiet():
        assert quiet._exporting.acquire(blocking=False)  # it would wait for itself
        quiet._exporting.release()
