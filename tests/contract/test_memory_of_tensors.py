"""Functions in C read memory. Tensors whose memory does not hold their values give the same results, or are refused."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxquant as fxq
from fxquant.backends.cpu.native import Count
from fxquant.primitives.runtime_scales import dynamic_linear
from fxquant.support.files import address, point, readable
from tests.shared.contract import all_equal, compiled
from tests.shared.networks import Network


def negated(value: Tensor) -> Tensor:
    """Equal to a tensor, with the opposite in memory."""
    marked = torch._neg_view((-value).contiguous())
    assert marked.is_neg()
    return marked


def imaginary(value: Tensor) -> Tensor:
    """Equal to a tensor, as every second number in memory, with the opposite sign."""
    return torch.complex(torch.zeros_like(value), -value).conj().imag


def expanded(value: Tensor) -> Tensor:
    """The first image, in the place of all."""
    return value[:1].expand_as(value)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "negative bit": negated, "imaginary part of a conjugate": imaginary, "expanded": expanded,
    "transposed": lambda value: value.mT.contiguous().mT, "every second": lambda value: torch.stack((value, -value), -1)[..., 0],
    "all zero without memory": lambda value: torch._efficientzerotensor(value.shape),
}  # fmt: skip


def every_pass(m: Any, x: Tensor) -> Tensor:
    """Sums, statistics of batches, a residual, products of two tensors, tables, and float operators."""
    y = torch.relu(m.norm(m.conv(x)))
    return m.last(y * torch.sigmoid(y) + y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network(every_pass, conv=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), last=nn.Conv2d(8, 4, 1)).eval()


@functools.cache
def shared(target: str) -> tuple[Tensor, Any]:
    """A batch, and the network calibrated by it, which a test leaves as it is."""
    torch.manual_seed(0)
    plain = torch.randn(4, 3, 20, 20)
    return plain, compiled(network(), [plain], target)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", ["nash-e", "x86"])
def test_inputs_whose_memory_does_not_hold_their_values(target: str, form: str) -> None:
    plain, (prepared, integer) = shared(target)
    value = FORMS[form](plain)
    written = torch.empty(value.shape).copy_(value)
    for _ in range(2):
        assert torch.equal(integer(value), integer(written))
    assert torch.equal(prepared(value), prepared(written))
    assert fxq.verify(prepared, integer, [value])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", ["negative bit", "imaginary part of a conjugate"])
@pytest.mark.parametrize("target", ["nash-e", "x86"])
def test_calibration_reads_values(target: str, form: str) -> None:
    plain, (prepared, _) = shared(target)
    assert fxq.qparams(compiled(network(), [FORMS[form](plain)], target).prepared) == fxq.qparams(prepared)


@pytest.mark.parametrize("target", ["nash-e", "bayes-e", "x86"])
def test_gradients_and_parameters_with_the_negative_bit_train_alike(target: str) -> None:
    prepared = copy.deepcopy(shared(target)[1].prepared)
    fxq.set_state(prepared, "train")
    fxq.freeze(prepared)
    x, parameters = torch.randn(4, 3, 20, 20), list(prepared.parameters())
    output = prepared(x)
    gradient = torch.randn_like(output)
    wanted = torch.autograd.grad(output, parameters, gradient)
    outputs = torch.autograd.grad(prepared(negated(x)), parameters, negated(gradient))
    assert all_equal(outputs, wanted)
    for parameter in parameters:
        parameter.data = negated(parameter.data)
    assert all_equal(torch.autograd.grad(prepared(x), parameters, gradient), wanted)


def test_a_tensor_inside_of_a_model_with_the_negative_bit() -> None:
    x = torch.randn(2, 3, 12, 12)
    assert torch.fft.fft2(x).conj().imag.is_neg()
    model = Network(lambda m, x: m.conv(torch.fft.fft2(x).conj().imag), conv=nn.Conv2d(3, 4, 3))
    prepared, integer = compiled(model.eval(), [x])
    assert torch.equal(integer(x), integer(x))
    assert torch.equal(prepared(x), integer(x))


def test_a_layer_that_is_quantized_at_run_time() -> None:
    layer, x = nn.Sequential(nn.Linear(32, 16)).eval(), torch.randn(6, 32)
    integer = fxq.convert(fxq.prepare(layer, x, "x86", fxq.QConfig(dynamic=True)))
    assert any(node.target is dynamic_linear for node in integer.graph.nodes)
    wanted = integer(x)
    for form in (negated, imaginary):
        assert torch.equal(integer(form(x)), wanted)


def test_memory_that_c_cannot_read_is_refused() -> None:
    fake = FakeTensorMode().from_tensor(torch.ones(3))
    for tensor in (torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), fake, negated(torch.ones(3))):
        with pytest.raises(RuntimeError):
            address(tensor)
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda each: each + address(each))(torch.ones(3, 2))
    assert address(torch.empty(0)) == 0
    structure = Count()
    held = point(structure, [("value", negated(torch.arange(3.0))), ("low", None)])
    assert torch.equal(held[0], torch.arange(3.0))
    assert structure.value == held[0].data_ptr()
    assert structure.low is None
    assert readable(held[0]) is held[0]


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": Tensor.to_sparse, "nested": lambda x: torch.nested.nested_tensor(list(x)), "meta": lambda x: x.to("meta"),
    "_mkldnn": Tensor.to_mkldnn,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", SPARSE)
def test_batches_without_dense_values_are_refused_by_every_form(kind: str) -> None:
    x, (prepared, integer) = shared("nash-e")
    batch = SPARSE[kind](x)
    for call in (lambda: fxq.calibrate(prepared, [batch]), lambda: fxq.verify(prepared, integer, [batch])):
        with pytest.raises(fxq.errors.CalibrationError, match=f"is a {kind} tensor"):
            call()
    with pytest.raises(fxq.errors.CalibrationError, match=f"is a {kind} tensor"):
        fxq.quantize(network(), [x, batch])
