"""Float operators that are written without PyTorch's exporter: the same numbers, and everything else is still left to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import float_export
from tests.shared.networks import Network
from tests.shared.onnx_files import run

pytestmark = pytest.mark.nightly


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
        with pytest.raises(fxq.errors.ExportError, match="PyTorch's exporter was called"):
            exported(LEFT[name], tmp_path)


def test_the_forms_agree_with_the_float_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of float nodes alone, without a rounding after them, has PyTorch's numbers to the last digits of float32."""
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
    with float_export.quiet():
        assert float_export._exporting.acquire(blocking=False)  # it would wait for itself
        float_export._exporting.release()


# ---- attention, and files that a runtime cannot open ------------------------------------------------------------------------

KEPT = torch.ones(6, 6, dtype=torch.bool).tril()
KEPT[2] = False  # a row that sees nothing gets zeros
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "scale": {"scale": -0.3},
    "biases": {"attn_mask": torch.zeros(6, 6).masked_fill(~KEPT, -9.0)},
    "booleans": {"attn_mask": KEPT},
    "-inf": {"attn_mask": torch.zeros(6, 6).masked_fill(~KEPT, -torch.inf)},
}


def computed_mask(x: Tensor, dtype: torch.dtype) -> Tensor:
    kept = (x[:, :1, :1] > 10).expand(-1, 6, 6)
    return kept if dtype == torch.bool else torch.zeros_like(x[:, :6, :1]).masked_fill(~kept, -torch.inf)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("names", ["aaa", "aba", "abb", "abc"])  # which of three layers makes query, key and value
def test_float_attention_opens_and_computes_what_pytorch_does(names: str, rank: int, tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor) -> list[Tensor]:
        heads = {name: getattr(m, name)(x) for name in dict.fromkeys(names)}
        if rank == 4:
            heads = {name: value.view(-1, 6, 2, 4).transpose(1, 2) for name, value in heads.items()}
        query, key, value = (heads[name] for name in names)
        masks = [
            *MASKS.values(),
            *(
                {"attn_mask": computed_mask(x, dtype)[:, None] if rank == 4 else computed_mask(x, dtype)}
                for dtype in (torch.bool, torch.float32)
            ),
        ]
        return [F.scaled_dot_product_attention(query, key, value, **mask) for mask in masks]

    torch.manual_seed(0)
    batches = [torch.randn(2, 6, 8) for _ in range(2)]
    model = Network(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)).eval()
    result = fxq.quantize(model, batches, target="x86")
    path = result.export(tmp_path / "model.onnx", style="exact")
    assert result.verify(path, batches)
    for wanted, found in zip(result.integer(batches[0]), run(path, batches[0]), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=1e-4, atol=1e-5)


def test_groups_of_queries_share_keys_in_float(tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        query, key = m.a(x).view(-1, 6, 4, 2).transpose(1, 2), m.b(x).view(-1, 6, 2, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, key, attn_mask=KEPT, enable_gqa=True)

    batches = [torch.randn(2, 6, 8)]
    result = fxq.quantize(Network(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 4)).eval(), batches, target="x86")
    assert result.verify(result.export(tmp_path / "model.onnx", style="exact"), batches)


def test_a_file_that_onnxruntime_cannot_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("Node input 'a_dequantize' is not a graph input")

    batches, layers = [torch.randn(2, 6, 8)], {"a": nn.Linear(8, 8), "norm": nn.InstanceNorm1d(6)}
    result = fxq.quantize(Network(lambda m, x: m.norm(m.a(x)), **layers).eval(), batches, target="x86")
    path = result.export(tmp_path / "model.onnx", style="exact")
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime, "InferenceSession", fail)
        for write in (lambda: result.export(path, style="exact"), lambda: fxq.export.export_segments(result.integer, tmp_path / "parts")):
            with pytest.raises(fxq.errors.ExportError, match=r"could not open the file[\s\S]*'a_dequantize' is not[\s\S]*remedy"):
                write()
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("**/parts/*"))
