"""Settings of the process that PyTorch's float kernels obey must not reach the integers: reduced precision, dtypes, devices, modes.

Few processors have kernels that round float32 to bfloat16, so one is played here: below autograd, every product of
float32 tensors sees its operands rounded as far as the settings of that moment allow.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxquant as fxq
from fxquant.primitives.record import full_precision
from tests.shared.contract import all_equal, compiled, flat, same_bytes, train_without_noise
from tests.shared.networks import Network, members

NEW = hasattr(torch._C, "_get_fp32_precision_getter")  # one precision for each backend and operator, since PyTorch 2.9
WIDE = fxq.QConfig(fxq.ActivationConfig("int16"), fxq.WeightConfig("int8"))
aten = torch.ops.aten
MATRIX = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default}


# ---- the settings -----------------------------------------------------------------------------------------------------
def precision(operators: str) -> str:
    """Return the format that float32 operands are rounded to now: "ieee", "tf32" or "bf16"."""
    if NEW:
        result = torch._C._get_fp32_precision_getter("mkldnn", operators)
        return "ieee" if result == "none" else str(result)
    return {"highest": "ieee", "high": "tf32", "medium": "bf16"}[torch.get_float32_matmul_precision()]


def all_settings() -> dict[str, str]:
    """Every setting of precision there is, as PyTorch reads it."""
    try:
        result = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    except RuntimeError:  # PyTorch has no one answer where settings of both kinds were made
        result = {"float32_matmul_precision": "mixed"}
    if NEW:
        pairs = [("generic", "all"), *((b, o) for b in ("mkldnn", "cuda") for o in ("all", "matmul", "conv", "rnn"))]
        result.update({f"{backend} {o}": torch._C._get_fp32_precision_getter(backend, o) for backend, o in pairs})
    return result


@contextmanager
def set_to(change: Callable[[], object]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        if NEW:
            for backend, operators in (("generic", "all"), *(("mkldnn", o) for o in ("all", "matmul", "conv", "rnn"))):
                torch._C._set_fp32_precision_setter(backend, operators, "none")
        torch.set_float32_matmul_precision("highest")
        if NEW:
            torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")


def assign(where: Any, value: str) -> Callable[[], None]:
    return lambda: setattr(where, "fp32_precision", value)


BACKENDS: Any = torch.backends  # PyTorch 2.9 made these settings, without types
PRECISIONS: dict[str, Callable[[], object]] = {
    "matmul precision high": lambda: torch.set_float32_matmul_precision("high"),
    "matmul precision medium": lambda: torch.set_float32_matmul_precision("medium"),
}
if NEW:
    PRECISIONS |= {
        "backends": assign(BACKENDS, "bf16"),
        "mkldnn": lambda: torch._C._set_fp32_precision_setter("mkldnn", "all", "bf16"),
        "mkldnn.matmul": assign(BACKENDS.mkldnn.matmul, "bf16"),
        "mkldnn.matmul tf32": assign(BACKENDS.mkldnn.matmul, "tf32"),
        "mkldnn.conv": assign(BACKENDS.mkldnn.conv, "bf16"),
        "mkldnn.conv tf32": assign(BACKENDS.mkldnn.conv, "tf32"),
    }
every_precision = pytest.mark.parametrize("name", PRECISIONS)


class Processor(TorchDispatchMode):
    """One whose products of float32 tensors round their operands as far as they may."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operators = "matmul" if func in MATRIX else "conv" if func is aten.convolution.default else ""
        bits = {"ieee": 0, "tf32": 13, "bf16": 16}[precision(operators)] if operators else 0
        if bits and any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in args):
            self.rounded += 1
            args = tuple(coarse(a, bits) if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args)
            with full_precision(args[0]):  # the processor at hand adds nothing; some that claim to have bfloat16 end the process here
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def coarse(value: Tensor, bits: int) -> Tensor:
    """float32 without its last bits."""
    return (value.contiguous().view(torch.int32) & -(2**bits)).view(torch.float32)


@members(lambda: dict(
    a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 8, 3, padding=1, groups=2), up=nn.ConvTranspose2d(8, 6, 2, 2), head=nn.Linear(64, 10),
))  # fmt: skip
def Products(self, x: Tensor) -> Any:
    """Every kind of sum of products there is, on int16."""
    y = F.relu(self.b(self.a(x)))
    z = F.interpolate(self.up(y), size=[20, 20], mode="bilinear")
    q = self.head(y.flatten(2))
    return z, q @ q.transpose(1, 2), F.adaptive_avg_pool2d(z, 1), y.sum(1)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def forms() -> tuple[fx.GraphModule, fx.GraphModule]:
    torch.manual_seed(0)
    return compiled(Products().eval(), [batch()], "nash-e", WIDE)


def test_the_processor_rounds() -> None:
    x = torch.randint(-30000, 30000, (8, 8)).float()
    with set_to(PRECISIONS["matmul precision medium"]), Processor() as processor:
        result = x @ x
    assert processor.rounded == 1
    assert not torch.equal(result, x @ x)


@pytest.mark.sweep(3)
@every_precision
def test_reduced_precision_changes_no_integer(name: str, forms: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    prepared, integer = forms
    fxq.set_state(prepared, fxq.State.VALIDATE)
    wanted = integer(batch())
    with set_to(PRECISIONS[name]):
        before = all_settings()
        with Processor() as processor:
            assert all_equal(integer(batch()), wanted)
            assert all_equal(prepared(batch()), wanted)
        assert processor.rounded == 0
        assert all_settings() == before


@every_precision
def test_reduced_precision_changes_no_bit_of_training(name: str, forms: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    prepared, integer = forms
    train_without_noise(prepared)
    with set_to(PRECISIONS[name]), Processor():
        output = prepared(batch())
        sum(value.sum() for value in flat(output)).backward()
    assert all_equal(output, integer(batch()))
    assert all(parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()) for parameter in prepared.parameters())


@pytest.mark.skipif(not NEW, reason="settings that inherit came with PyTorch 2.9")
def test_a_setting_goes_on_inheriting() -> None:
    """A setting without a value of its own has none afterwards."""
    x = torch.ones(2, 2)
    with set_to(assign(BACKENDS, "bf16")):
        with full_precision(x):
            assert (precision("matmul"), precision("conv")) == ("ieee", "ieee")
        assert (precision("matmul"), precision("conv")) == ("bf16", "bf16")
        BACKENDS.fp32_precision = "tf32"
        assert (precision("matmul"), precision("conv")) == ("tf32", "tf32")


def test_one_that_leaves_does_not_take_it_from_another() -> None:
    with set_to(PRECISIONS["matmul precision medium"]):
        first, second = full_precision(torch.ones(1)), full_precision(torch.ones(1))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert precision("matmul") == "ieee"
        third = full_precision(torch.ones(1))  # though all seems right, it is by the second's making
        third.__enter__()
        second.__exit__(None, None, None)
        assert precision("matmul") == "ieee"
        third.__exit__(None, None, None)
        assert precision("matmul") == "bf16"


def test_what_is_set_meanwhile_stays() -> None:
    with set_to(PRECISIONS["matmul precision medium"]):
        with full_precision(torch.ones(1)):
            torch.set_float32_matmul_precision("high")
        assert torch.get_float32_matmul_precision() == "high"
        assert precision("matmul") == "tf32"


# ---- other settings ---------------------------------------------------------------------------------------------------
@contextmanager
def between(enter: Callable[[Any], object], inside: Any, outside: Any) -> Iterator[None]:
    enter(inside)
    try:
        yield
    finally:
        enter(outside)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype float64": lambda: between(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: between(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device": lambda: between(torch.set_default_device, "meta", None),
    "deterministic algorithms": lambda: between(torch.use_deterministic_algorithms, True, False),
    "denormals flushed": lambda: between(torch.set_flush_denormal, True, False),
    "inference mode": torch.inference_mode,
    "two threads": lambda: between(torch.set_num_threads, 2, torch.get_num_threads()),
    "three threads": lambda: between(torch.set_num_threads, 3, torch.get_num_threads()),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def plain() -> nn.Module:
    """An example of each kind of arithmetic: tables, sums, means, added and multiplied numbers, joins, padding."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.norm(m.conv(x))
        y = torch.cat([F.silu(y), F.leaky_relu(y) * 0.7 + 0.3], 1)[:, 4:12]
        y = F.pad(F.interpolate(y, scale_factor=2, mode="bilinear") * 2 - 1, (1, 0, 0, 1), value=0.5)
        return m.head(F.avg_pool2d(y, 3, 2).mean((2, 3))), F.max_pool2d(y, 2)

    torch.manual_seed(0)
    return Network(forward, conv=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 5)).eval()


def run_all(model: nn.Module, target: str) -> tuple[fx.GraphModule, fx.GraphModule, Any]:
    prepared, integer = compiled(model, [batch()], target)
    with torch.no_grad():
        return prepared, integer, integer(batch())


BATCHES = {seed: batch(seed) for seed in (1, 2)}  # made before a setting could reach them


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_no_bit(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a finished model, of calibration, of conversion, of the file."""
    model = plain()
    monkeypatch.setitem(globals(), "batch", lambda seed=1: BATCHES[seed].clone())
    target = "bayes-e" if name == "two threads" else "nash-e"
    prepared, integer, wanted = run_all(model, target)
    wanted_file = fxq.export_onnx(integer, tmp_path / "wanted.onnx").read_bytes()
    with SETTINGS[name]():
        with torch.no_grad():
            assert all_equal(integer(batch()), wanted)
            assert all_equal(prepared(batch()), wanted)
        if name != "autocast":  # which prepare refuses by an error of its own
            again_prepared, again, result = run_all(model, target)
            assert all_equal(result, wanted)
            assert fxq.verify(again_prepared, again, [batch()])
            assert fxq.export_onnx(again, tmp_path / "found.onnx").read_bytes() == wanted_file
        assert fxq.verify(integer, tmp_path / "wanted.onnx", [batch()])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("state", ["VALIDATE", "TRAIN"])
@pytest.mark.parametrize("target", ["nash-e", "bayes-e"])
def test_vmap_gives_the_same_bytes(target: str, state: str) -> None:
    prepared, integer, _ = run_all(plain(), target)
    images = torch.stack([batch(1), batch(2)])
    with torch.no_grad():
        wanted = [torch.stack(values) for values in zip(integer(batch(1)), integer(batch(2)), strict=True)]
        assert all(same_bytes(a, b) for a, b in zip(torch.func.vmap(integer)(images), wanted, strict=True))
    train_without_noise(prepared) if state == "TRAIN" else fxq.set_state(prepared, fxq.State.VALIDATE)
    with torch.set_grad_enabled(state == "TRAIN"):
        assert all(same_bytes(a, b) for a, b in zip(torch.func.vmap(prepared)(images), wanted, strict=True))


@pytest.mark.parametrize("training", ["statistics", "learned"])
def test_gradients_of_functional_training(training: str) -> None:
    """torch.func.grad gives what backward gives, for each sample at once as well."""
    config = fxq.QConfig(fxq.ActivationConfig(training=training), fxq.WeightConfig(training=training))
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval(), torch.randn(4, 6)
    prepared = compiled(model, [x], "nash-e", config).prepared
    train_without_noise(prepared)
    prepared(x)  # where learned scales start
    parameters = {name: value.detach().clone() for name, value in prepared.named_parameters() if value.requires_grad}

    def loss(parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
        return torch.func.functional_call(prepared, parameters, (rows,)).square().sum()

    result = torch.func.grad(loss)(parameters, x)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.unsqueeze(1))
    prepared(x).square().sum().backward()
    for name, parameter in prepared.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(result[name], parameter.grad, rtol=1e-5, atol=1e-6), name
            assert torch.allclose(each[name].sum(0), parameter.grad, rtol=1e-4, atol=1e-5), name
