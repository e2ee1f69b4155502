"""Small networks of images for tests of ONNX files, and what such a test asks of a file."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.contract import VNNI, assert_alive, compiled, graph_values
from tests.shared.networks import Network


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def residual(layer: nn.Module, y: Tensor) -> Tensor:
    return F.relu(layer(y) + y)


def batch(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def rows(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def integer_of(model: nn.Module, inputs: Any = None, target: str = "nash-e", qconfig: Any = None) -> fx.GraphModule:
    inputs = batch() if inputs is None else inputs
    integer = compiled(model.eval(), [inputs], target, qconfig).integer
    assert_alive(integer, *(inputs if isinstance(inputs, tuple) else (inputs,)))
    return integer


def linear_of(function: Callable[..., Any]) -> fx.GraphModule:
    """A function of rows, by a linear layer `l` and a buffer of integers `i`."""
    torch.manual_seed(0)
    model = Network(function, l=nn.Linear(8, 4), i=nn.Buffer(torch.arange(3)))
    return integer_of(model, rows(), qconfig=fxq.QConfig(fxq.ActivationConfig("int8")))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Network(lambda s, x: F.relu(s.a(x)), a=conv(3, 8, stride=2)),
    "depthwise": lambda: Network(lambda s, x: F.relu6(s.b(s.a(x))), a=conv(3, 8, 1), b=conv(8, 8, groups=8)),
    "grouped": lambda: Network(lambda s, x: s.b(F.relu(s.a(x))), a=conv(3, 8), b=conv(8, 12, groups=4, dilation=2, bias=False)),
    "linear": lambda: Network(lambda s, x: s.b(F.relu(s.a(x.flatten(1)))), a=nn.Linear(192, 16), b=nn.Linear(16, 5, bias=False)),
    "rows": lambda: Network(lambda s, x: s.a(x.flatten(2)), a=nn.Linear(64, 9)),
    "residual": lambda: Network(lambda s, x: residual(s.b, F.relu(s.a(x))), a=conv(3, 8), b=conv(8, 8)),
    "addition": lambda: Network(lambda s, x: F.relu(s.a(x).sigmoid() - 2 * x[:, :1]), a=conv(3, 8)),
    "concatenation": lambda: Network(lambda s, x: torch.cat([F.relu(s.a(x)), s.a(x), x], 1)[:, 2:14], a=conv(3, 8)),
    "pooling": lambda: Network(
        lambda s, x: F.adaptive_avg_pool2d(F.avg_pool2d(F.max_pool2d(s.a(x), 3, 2, 1), 3, 1, 1, count_include_pad=False), 1), a=conv(3, 8)
    ),
    "resizing": lambda: Network(
        lambda s, x: F.interpolate(s.a(x), scale_factor=2) + F.interpolate(s.a(x), size=[16, 16], mode="bilinear"), a=conv(3, 4)
    ),
    "silu": lambda: Network(lambda s, x: F.silu(s.b(F.silu(s.a(x)))), a=conv(3, 8), b=conv(8, 8)),
    "transposed": lambda: Network(lambda s, x: s.b(F.relu(s.a(x))), a=conv(3, 8), b=nn.ConvTranspose2d(8, 6, 3, 2, 1, 1)),
    "transposed in groups": lambda: Network(lambda s, x: s.b(s.a(x)), a=conv(3, 8), b=nn.ConvTranspose2d(8, 6, 2, 2, groups=2)),
    "products": lambda: Network(lambda s, x: s.a(x).flatten(2) @ s.b(x).flatten(2).transpose(1, 2), a=conv(3, 8), b=conv(3, 6)),
    "margins": lambda: Network(
        lambda s, x: s.b(F.relu(s.a(x))),
        a=nn.Conv2d(3, 8, (2, 3), padding="same"),
        b=nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=2),
    ),
    "padding": lambda: Network(lambda s, x: s.a(F.pad(F.pad(x, (1, 2, 0, 1), value=0.5), (1, 1, 1, 1), "reflect")), a=nn.Conv2d(3, 8, 3)),
}


@functools.cache
def known(name: str, target: str = "nash-e", activation: str = "int8", weight: str = "int8") -> fx.GraphModule:
    """One of the models as integers; whoever changes it changes a copy."""
    torch.manual_seed(0)
    return integer_of(MODELS[name](), None, target, fxq.QConfig(fxq.ActivationConfig(activation), fxq.WeightConfig(weight)))


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


def run(path: Path, *inputs: Tensor, options: Any = None) -> list[Tensor]:
    """The outputs of a file in onnxruntime."""
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, feeds)]


def assert_verified(integer: fx.GraphModule, path: Path, batches: Sequence[Any] | None = None) -> fxq.results.Report:
    """Every runtime gives the bits of the integer model; without batches on two sizes, of which much of the second saturates."""
    inputs = [batch(3, seed=3), 40 * batch(1, seed=2)] if batches is None else batches
    report = fxq.verify(integer, path, inputs)
    assert report, str(report)
    return report


def exported(integer: fx.GraphModule, path: Path, batches: Sequence[Any] | None = None, **options: Any) -> Path:
    """A file that every runtime computes with the bits of the integer model."""
    path = fxq.export_onnx(integer, path, **options)
    assert_verified(integer, path, batches)
    return path


def kernels_of(path: Path) -> tuple[int, int]:
    """How many kernels a file of style "fast" has, and how many were refused: none with VNNI."""
    kernels = fxq.export.onnx_metadata(path)["kernels"]
    assert not kernels["refused"] or not VNNI
    return len(kernels["integer"]), len(kernels["refused"])


def assert_takes_integers(integer: fx.GraphModule, path: Path) -> None:
    """A file that takes and returns int8 gives the integers of the model."""
    taken, returned = (fxq.export.onnx_metadata(path)[side][0] for side in ("inputs", "outputs"))
    assert (taken["dtype"], returned["dtype"]) == ("int8", "int8")
    values = graph_values(integer, batch())
    assert torch.equal(run(path, values["x_quantize"])[0], values[returned["tensor"].removesuffix("_output")])
