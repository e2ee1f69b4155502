"""Functions in C read memory. Tensors whose memory does not hold their values give the same results, or are refused."""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxquant as fxq
from fxquant.backends.cpu.joining import NativeMarks
from fxquant.backends.cpu.native import Count
from fxquant.backends.cpu.training import NativeCounting, NativePasses
from fxquant.primitives.runtime_scales import dynamic_linear
from fxquant.support.files import address, point, readable
from fxquant.training import fused_elementwise, fused_layers
from fxquant.training.fused_layers import Accumulator, Form, Passes
from tests.shared.contract import all_equal, compiled
from tests.shared.networks import Network

ROOT = Path(__file__).parents[2]


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
    assert fxq.verify(prepared, integer, [value], show_progress=False)


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
    found = torch.autograd.grad(prepared(negated(x)), parameters, negated(gradient))
    assert all_equal(found, wanted)
    for parameter in parameters:
        parameter.data = negated(parameter.data)
    assert all_equal(torch.autograd.grad(prepared(x), parameters, gradient), wanted)


def test_a_tensor_inside_of_a_model_with_the_negative_bit() -> None:
    x = torch.randn(2, 3, 12, 12)
    assert torch.fft.fft2(x).conj().imag.is_neg()
    model = Network(lambda m, x: m.conv(torch.fft.fft2(x).conj().imag), conv=nn.Conv2d(3, 4, 3))
    prepared, integer = compiled(model.eval(), [x])
    wanted = integer(x)
    assert torch.equal(integer(x), wanted)
    assert torch.equal(prepared(x), wanted)


def test_an_onnx_file_is_verified_with_marked_inputs(tmp_path: Path) -> None:
    x, (_, integer) = shared("nash-e")
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [negated(x), imaginary(x)], show_progress=False)


OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "kl", "histogram", "mix", "clip_std", "lp")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_observers_count_values(observer: str) -> None:
    x = torch.randn(4, 3, 20, 20).abs()  # its opposite has another range
    scales = []
    for value in (x, negated(x)):
        qconfig = fxq.QConfig(fxq.ActivationConfig(observer=observer))
        scales.append(fxq.qparams(compiled(nn.Sequential(nn.ReLU()), [value], "x86", qconfig).prepared))
    assert scales[0] == scales[1]


SUMS = torch.randint(-500, 500, (4, 8, 16, 16)).float()
FORM = Form(4, 8, 256, (8, 1, 1))


@pytest.mark.parametrize("marked", [negated, imaginary], ids=["negative bit", "imaginary part"])
def test_every_pass_reads_values(marked: Callable[[Tensor], Tensor]) -> None:
    native, tensors, value = NativePasses(), Passes(), marked(SUMS).contiguous()
    assert native.takes([value]), "there is no compiler"
    assert all_equal(native.collect(value, FORM), tensors.collect(SUMS, FORM))
    assert torch.equal(native.ends(Accumulator(value, FORM)), tensors.ends(Accumulator(SUMS, FORM)))
    assert torch.equal(native.weight_ends(value), tensors.weight_ends(SUMS))
    assert all_equal(native.weigh(value, None, torch.ones(4), -8, 7), tensors.weigh(SUMS, None, torch.ones(4), -8, 7))
    one = torch.ones(8)
    found = native.centre(value, SUMS, FORM, one, one, one, False)
    assert torch.equal(found, tensors.centre(SUMS, SUMS, FORM, one, one, one, False))
    counting = NativeCounting()
    assert all_equal(counting.ends(value.view(4, -1)), counting.ends(SUMS.view(4, -1)))
    assert all_equal(counting.magnitudes(value.flatten(), None, 64, 500.0), counting.magnitudes(SUMS.flatten(), None, 64, 500.0))
    assert torch.equal(*(counting.signed(each.view(4, -1), [0, 2], 1, 64, 500.0) for each in (value, SUMS)))
    join = fused_elementwise.offered(SUMS)
    assert join is not None
    assert torch.equal(join.occurs(value, -500, 500), join.occurs(SUMS, -500, 500))
    assert torch.equal(join.to_bytes(marked(SUMS % 100)), join.to_bytes(SUMS % 100))  # type: ignore[arg-type]
    assert all_equal(*(join.look_up(each, torch.arange(1001.0), -500, torch.ones(()), True) for each in (value, SUMS)))


def test_marks_of_expanded_tensors() -> None:
    flags = (torch.arange(64) % 9 != 0).to(torch.uint8)
    assert NativeMarks().takes(flags)
    assert torch.equal(
        NativeMarks().places(flags.repeat(2)[::1], int((flags == 0).sum()) * 2), torch.nonzero(flags.repeat(2) == 0).flatten().int()
    )
    assert fused_layers.kept_mask(flags, 0) is None


def test_a_layer_that_is_quantized_at_run_time() -> None:
    layer, x = nn.Sequential(nn.Linear(32, 16)).eval(), torch.randn(6, 32)
    integer = fxq.convert(fxq.prepare(layer, x, "x86", fxq.QConfig(dynamic=True)))
    assert any(node.target is dynamic_linear for node in integer.graph.nodes)
    wanted = integer(x)
    for form in (negated, imaginary):
        assert torch.equal(integer(form(x)), wanted)
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
    assert readable(SUMS) is SUMS
    assert ctypes.sizeof(structure)


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": Tensor.to_sparse, "nested": lambda x: torch.nested.nested_tensor(list(x)), "meta": lambda x: x.to("meta"),
    "_mkldnn": Tensor.to_mkldnn,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", SPARSE)
def test_batches_without_dense_values_are_refused_by_every_form(kind: str) -> None:
    x, (prepared, integer) = shared("nash-e")
    batch = SPARSE[kind](x)
    for form in (prepared, integer):
        with pytest.raises(fxq.errors.ConfigurationError, match=f"it is a {kind} tensor"):
            form(batch)
    for call in (lambda: fxq.calibrate(prepared, [batch], show_progress=False), lambda: fxq.verify(prepared, integer, [batch])):
        with pytest.raises(fxq.errors.CalibrationError, match=f"is a {kind} tensor"):
            call()
    with pytest.raises(fxq.errors.CalibrationError, match=f"is a {kind} tensor"):
        fxq.quantize(network(), [x, batch])


def test_one_module_takes_addresses() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("fxquant", "passes", "backends")
        for path in (ROOT / folder).rglob("*.py")
        if ".data_ptr" in path.read_text(encoding="utf-8")
    }
    # The others give C nothing: one counts bytes, one compares inputs.
    assert found == {"fxquant/support/files.py", "fxquant/tuning/walk.py", "fxquant/ir/model.py"}
