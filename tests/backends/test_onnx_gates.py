"""Products of two tensors of bytes as one kernel: every pair of bytes, in every runtime."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx.fast_parts import exact_divisor, multiply
from fxquant.backends.onnx.runtime import RUNTIMES, Runner
from fxquant.backends.onnx.writer import Emitter, value_info
from fxquant.ir.integer import qparams
from fxquant.primitives.quantization import requantize_real

# Multiplier, zero points of both operands and of the result: small and large, powers of two with ties, and such as saturate.
GATES = {
    "a gate": (0.0043219, 128, 128, 128),
    "affine": (0.00712771, 3, 0, 17),
    "odd zero point": (0.0371313, 128, 0, 129),
    "saturating": (0.9013771, 128, 128, 128),
    "small": (3.1337e-5, 0, 0, 0),
    "a power of two, even zero point": (2.0**-7, 128, 0, 128),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("broadcast", [False, True])
def test_every_pair_of_bytes_in_every_runtime(name: str, broadcast: bool) -> None:
    multiplier, left_zero, right_zero, zero = GATES[name]
    divisor = exact_divisor(float(torch.tensor(multiplier)), left_zero, right_zero, zero)
    assert divisor is not None
    left, right = torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    shape = (1, 256, 16, 16), (1, 256, 1, 1) if broadcast else (1, 256, 16, 16)
    a = left.reshape(1, 1, 16, 16).expand(shape[0]).contiguous()
    b = right.reshape(1, 256, 1, 1).expand(shape[1]).contiguous()
    emitter = Emitter({}, 21)
    found = multiply(
        emitter,
        ("a", emitter.constant(left_zero, torch.uint8)),
        ("b", emitter.constant(right_zero, torch.uint8)),
        divisor,
        emitter.constant(zero, torch.uint8),
    )
    infos = [value_info("a", torch.uint8, a.shape), value_info("b", torch.uint8, b.shape)]
    output = helper.make_tensor_value_info(found, onnx.TensorProto.UINT8, None)
    graph = helper.make_graph(emitter.nodes, "gate", infos, [output], emitter.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sums = (a.int() - left_zero) * (b.int() - right_zero)
    wanted = requantize_real(sums, torch.tensor(multiplier), -zero, 255 - zero, torch.uint8, zero)
    for _, level, threads in RUNTIMES:
        assert torch.equal(Runner(model, level, threads, None, {})({"a": a, "b": b})[found], wanted)


def test_ties_that_a_zero_point_would_move_have_no_divisor() -> None:
    """2.5 becomes 2, and with an odd zero point added first 2.5 + 1 = 3.5 becomes 4: it would stand for 3."""
    assert exact_divisor(2.0**-7, 128, 0, 129) is None


class Gated(nn.Module):
    """A squeeze, and SiLU as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.squeeze = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * torch.sigmoid(x)
        return self.last(x * F.hardsigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1))))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["x86", "nash-e"])
def test_gates_are_one_kernel_and_exact(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    integer = fxq.quantize(Gated(), batches, target=target, show_progress=False).integer
    path = fxq.export_onnx(integer, tmp_path / "gated.onnx", style="fast")
    assert fxq.verify(integer, path, batches, show_progress=False)
    gated = {node.name for node in integer.graph.nodes if qparams(node) is not None and node.name.startswith("mul")}
    assert gated & set(fxq.export.onnx_metadata(path)["kernels"]["integer"])
