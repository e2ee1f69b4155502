"""Every operator on bernoulli2, whose rules differ most from other targets', and on a GPU, which computes the bits of the processor."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.primitives.record import PRIMITIVES
from fxquant.quantization.weights import running_gain
from tests.ops.test_operators import FIRST, FORMATS, NAMED, ROWS, Pack, Sample, covering, inputs_of, kept_integer, quick_format
from tests.shared import contract
from tests.shared.contract import compiled

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOGETHER = 12  # samples of one model


def packs() -> Iterator[Any]:
    """Every sample in its first format, and the first sample of each operator in all."""
    for format in FORMATS:
        rows = [(name, sample) for name, sample in NAMED if quick_format(sample) == format]
        rows += [(name, sample) for name, sample in FIRST if quick_format(sample) != format]
        for start in range(0, len(rows), TOGETHER):
            names, samples = zip(*rows[start : start + TOGETHER], strict=True)
            yield pytest.param(list(samples), *format, id="-".join([f"{names[0]} to {names[-1]}", *format]))


def constants(integer: fx.GraphModule) -> dict[str, Tensor]:
    """Return the constants of the integer graph: weights, multipliers, biases, tables."""
    return {name: value.cpu() for name, value in (*integer.named_buffers(), *integer.named_parameters())}


def integers(model: fx.GraphModule, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the integer values of primitives by name, on the CPU; float tensors are left out: they may differ between devices."""
    result = contract.graph_values(model, *inputs)
    nodes = {node.name: node for node in model.graph.nodes}
    held = {
        name for name, node in nodes.items() if node.target in PRIMITIVES and PRIMITIVES[node.target].kind in ("quantized", "accumulator")
    }
    return {name: value.cpu() for name, value in result.items() if name in held}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, str]:
    assert one.keys() == other.keys()
    names = [name for name in one if not torch.equal(one[name], other[name])]
    return {name: f"{int((one[name] != other[name]).sum())} of {one[name].numel()}" for name in names}


@cuda
@pytest.mark.parametrize(("samples", "target", "activation", "weight"), packs())
def test_a_gpu_computes_the_same_integers(samples: list[Sample], target: str, activation: str, weight: str) -> None:
    """Converted there, and run there, in the forms prepared and integer."""
    model = Pack(samples).eval()
    inputs = tuple(x for sample in samples for x in inputs_of(sample, 5, 0))
    prepared, integer = compiled(model, [inputs], target, kept_integer(covering(activation, weight)))
    there, moved = copy.deepcopy(prepared).cuda(), tuple(x.cuda() for x in inputs)
    converted = fxq.convert(there)
    assert not differing(constants(integer), constants(converted))
    assert not differing(integers(integer, inputs), integers(converted, moved))
    with torch.no_grad():
        assert contract.all_equal(there(*moved), converted(*moved))


class Normalized(nn.Module):
    """Layers with batch norms of uneven statistics, whose folded weights are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for index, (inputs, outputs) in enumerate(((3, 64), (64, 256), (256, 64))):
            self.layers.append(nn.Conv2d(inputs, outputs, 3 if index == 0 else 1, bias=index == 1))
            norm = nn.BatchNorm2d(outputs)
            generator = torch.Generator().manual_seed(index)
            for tensor, low, high in ((norm.running_var, 1e-3, 9.0), (norm.running_mean, -1.0, 1.0), (norm.weight, 0.1, 3.0)):
                tensor.data.uniform_(low, high, generator=generator)  # type: ignore[union-attr]
            self.layers.append(norm)
            self.layers.append(nn.ReLU6())

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


@cuda
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "bernoulli", "nash-e", "x86"])
def test_folded_batch_norms_are_the_same_on_a_gpu(target: str) -> None:
    image = torch.randn(4, 3, 24, 24)
    prepared, integer = compiled(Normalized().eval(), [image], target)
    there = copy.deepcopy(prepared).cuda()
    assert not differing(constants(integer), constants(fxq.convert(there)))
    with torch.no_grad():
        assert torch.equal(there(image.cuda()).cpu(), integer(image))


@pytest.mark.parametrize("count", [1, 7, 8, 1000])
def test_the_gain_of_a_batch_norm_is_rounded_twice(count: int) -> None:
    """A correctly rounded root, and a correctly rounded division: what every device can compute."""
    norm = nn.BatchNorm1d(count, affine=False)
    norm.running_var.data.uniform_(1e-4, 50.0, generator=torch.Generator().manual_seed(count))  # type: ignore[union-attr]
    variance = (norm.running_var + norm.eps).numpy()  # type: ignore[operator]
    assert running_gain(norm).numpy().tolist() == (1 / numpy.sqrt(variance)).tolist()


# ---- bernoulli2 ------------------------------------------------------------------------------------------------------------
PACKS = [row.values[0] for row in ROWS if row.values[1:] == ("bayes-e", "int8", "int8")]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("samples", PACKS, ids=range(len(PACKS)))
def test_every_spelling_holds_the_contract(samples: list[Sample], tmp_path: Path) -> None:
    inputs, others = (tuple(x for sample in samples for x in inputs_of(sample, *size)) for size in ((5, 0), (1, 1)))
    batches = [tuple(factor * x for x in inputs) for factor in (1.1, 0.9)]
    prepared, integer = contract.compiled(Pack(samples).eval(), batches, "bernoulli2", kept_integer(covering()))
    contract.assert_alive(integer, *inputs)
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    if "none is left in float" in fxq.explain(prepared):
        contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [inputs, others])
    else:  # bernoulli2 has no int16, of which composites are made: runtimes round what is in float in their own ways
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [inputs, others])
    contract.assert_train_is_validate(prepared, *inputs)
