"""Kernels give the bits of the primitives they stand for, or are not used: on any sizes, at ties and ends, in threads, in copies."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant import backends
from fxquant.backends.cpu import compiled as in_c
from fxquant.backends.cpu import native, tensors
from fxquant.graph import kernel, resolve
from fxquant.kernels.layer import Layer
from fxquant.kernels.record import Kernel, Refused
from fxquant.kernels.runner import Runner
from fxquant.model import RUNNER
from fxquant.stage import Stage
from tests.contract import all_equal, compiled, flat

TARGETS = ("bayes-e", "nash-e", "x86", "bernoulli")


class Everything(nn.Module):
    """An operator for every kernel: sums of all kinds, maxima, tables of one tensor and of two, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.same, self.depthwise = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.wide, self.groups = nn.Conv2d(16, 22, 1), nn.Conv2d(22, 12, 3, 1, 2, dilation=2, groups=2)
        self.scores = nn.Linear(28, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        x = F.relu(self.same(x) + x)
        x = self.depthwise(x) * torch.sigmoid(x.mean((2, 3), keepdim=True)) - x
        y = torch.cat([self.groups(F.silu(self.wide(x))), x], 1)
        return self.scores(y.mean((2, 3))), y


def images(*sizes: int, seed: int = 0) -> Tensor:
    """Live values, with ties of the quantization, zeros of both signs, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(sizes, generator=generator) * 2
    marks = torch.randint(0, 40, sizes, generator=generator)
    for index, number in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 0.5)):
        value[marks == index] = number
    return value


def ordinary(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(7))


def both(model: nn.Module, target: str, *batches: Tensor, qconfig: Any = None) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The integer model with kernels, and without."""
    torch.manual_seed(0)
    prepared, integer = compiled(model.eval(), batches, target, qconfig)
    return integer, fxq.convert(prepared, kernels="reference")


def assert_same(integer: fx.GraphModule, reference: fx.GraphModule, *inputs: Tensor, runs: int = 2) -> None:
    """Bits and strides, in the first run, which is the primitives', and behind it."""
    wanted = reference(*inputs)
    for _ in range(1 + runs):
        found = integer(*inputs)
        assert all_equal(found, wanted)
        assert [tensor.stride() for tensor in flat(found)] == [tensor.stride() for tensor in flat(wanted)]


def chosen(integer: fx.GraphModule) -> dict[str, str | None]:
    """The implementation at each node with a kernel."""
    runner: Runner = integer.__dict__[RUNNER]
    return {name: choice.implementation for name, choice in runner.choices()}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: "there is no C compiler")


# ---- equal bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_network_of_every_kernel_has_the_bits_of_its_primitives(target: str) -> None:
    integer, reference = both(Everything(), target, ordinary(4, 3, 18, 22))
    for batch in (1, 3):  # an odd number, too
        assert_same(integer, reference, images(batch, 3, 18, 22, seed=batch))
    assert_same(integer, reference, images(2, 3, 18, 22).contiguous(memory_format=torch.channels_last))
    assert_same(integer, reference, images(22, 18, 3, 2).permute(3, 2, 1, 0))
    with torch.inference_mode():
        assert_same(integer, reference, images(1, 3, 18, 22))
    report = fxq.verify(reference, integer, [ordinary(2, 3, 18, 22)], show_progress=False)
    assert report
    assert report.pairs == ["integer = integer", "integer = kernels"]


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_without_a_compiler_tensor_operations_give_the_same(target: str, no_compiler: None) -> None:
    integer, reference = both(Everything(), target, ordinary(4, 3, 18, 22))
    assert_same(integer, reference, images(3, 3, 18, 22))
    used = set(chosen(integer).values())
    assert not any(name and name.startswith("native") for name in used)
    assert {"PyTorch's maximum", "PyTorch's table", "joined bytes"} <= used


class Returning(nn.Module):
    """Returns a constant and its input beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.anchors = nn.Buffer(torch.arange(6.0).view(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.anchors, self.conv(x), x, self.anchors


def test_constants_and_inputs_are_returned_by_every_run() -> None:
    integer, reference = both(Returning(), "bayes-e", ordinary(2, 3, 6, 6))
    assert_same(integer, reference, images(2, 3, 6, 6), runs=3)
    x = images(2, 3, 6, 6)
    assert torch.equal(integer(x)[0], Returning().anchors)


def test_a_window_that_can_be_all_padding_is_not_onednns(no_compiler: None) -> None:
    """There it reads outside of the image, which ends the process where that page is not mapped."""
    for padding in (1, 0):
        model = nn.Sequential(nn.Conv2d(8, 4, 1, padding=padding))
        integer, reference = both(model, "bayes-e", ordinary(2, 8, 5, 5))
        assert_same(integer, reference, images(2, 8, 5, 5))
        runner: Runner = integer.__dict__[RUNNER]
        reasons = [choice.refused.get("oneDNN convolution", "") for _, choice in runner.choices()]  # a processor may have others
        assert any("a whole window is padding" in reason for reason in reasons) is (padding == 1)


def test_a_model_without_images_to_run_on_runs_its_primitives() -> None:
    integer, reference = both(Everything(), "nash-e", ordinary(4, 3, 18, 22))
    assert_same(integer, reference, images(0, 3, 18, 22))


@settings(max_examples=12, deadline=None)
@given(
    channels=st.integers(1, 20), out=st.integers(1, 40), size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)), stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    kind=st.sampled_from(("plain", "depthwise", "groups")), target=st.sampled_from(TARGETS), batch=st.integers(1, 3),
    bias=st.booleans(), clamp=st.booleans(),
)  # fmt: skip
def test_sums_of_products(
    channels: int, out: int, size: Any, taps: Any, stride: Any, padding: Any, dilation: Any, kind: str, target: str, batch: int,
    bias: bool, clamp: bool,
) -> None:  # fmt: skip
    reach = [around * 2 + length - spread * (tap - 1) for around, length, spread, tap in zip(padding, size, dilation, taps, strict=True)]
    if min(reach) < 1:
        return
    groups = {"plain": 1, "depthwise": channels, "groups": 2}[kind]
    channels, out = (channels, channels) if kind == "depthwise" else (channels * groups, out * groups)
    conv = nn.Conv2d(channels, out, taps, stride, padding, dilation, groups, bias)
    with torch.no_grad():
        conv.weight[0] = conv.weight[0].sign()  # sums as large as they can be
    model = nn.Sequential(conv, nn.ReLU()) if clamp else nn.Sequential(conv)
    integer, reference = both(model, target, ordinary(2, channels, *size))
    x = images(batch, channels, *size)
    assert_same(integer, reference, x, runs=1)
    assert_same(integer, reference, x.sign() * 100, runs=1)  # every operand at an end of its range


@settings(max_examples=5, deadline=None)
@given(rows=st.integers(1, 7), inner=st.integers(1, 70), outer=st.integers(1, 70), target=st.sampled_from(TARGETS), last=st.booleans())
def test_linear_layers(rows: int, inner: int, outer: int, target: str, last: bool) -> None:
    model = nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, 3))
    qconfig = fxq.QConfigMapping().set_module_name("2", fxq.QConfig(fxq.ActivationConfig("int32"))) if last else None
    integer, reference = both(model, target, ordinary(5, inner), qconfig=qconfig)
    assert_same(integer, reference, images(rows, inner), runs=1)


def test_affine_tensors_and_narrow_ones() -> None:
    for target, dtype in (("x86", "int4"), ("nash-e", "int4"), ("x86", "int8")):
        integer, reference = both(Everything(), target, ordinary(4, 3, 18, 22), qconfig=fxq.QConfig(fxq.ActivationConfig(dtype)))
        assert_same(integer, reference, images(2, 3, 18, 22), runs=1)


def test_what_runs_on_the_host_has_the_strides_it_had() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.erfinv(torch.tanh(self.first(x)) * 0.5).cumsum(3))

    mapping = fxq.QConfigMapping().set_module_name("second", None)
    integer, reference = both(Mixed(), "nash-e", ordinary(2, 3, 9, 9), qconfig=mapping)
    assert_same(integer, reference, ordinary(2, 3, 9, 9))
    assert_same(integer, reference, ordinary(2, 3, 9, 9).contiguous(memory_format=torch.channels_last))


class Pair(NamedTuple):
    """What a model may return."""

    first: Tensor
    rest: dict[str, Any]


def test_what_is_returned_has_the_same_containers() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Pair:
            y = self.conv(x)
            return Pair(y, {"list": [y, x], "tuple": (y, None, 3)})

    integer, reference = both(Returns(), "nash-e", ordinary(2, 3, 5, 5))
    for _ in range(3):
        found, wanted = integer(ordinary(2, 3, 5, 5)), reference(ordinary(2, 3, 5, 5))
        assert type(found) is type(wanted)
        kinds = [[type(part) for part in (each.rest, each.rest["list"], each.rest["tuple"])] for each in (found, wanted)]
        assert kinds[0] == kinds[1] == [dict, list, tuple]
        assert all_equal(found, wanted)


# ---- admission ------------------------------------------------------------------------------------------------------


class Wrong:
    """An implementation that is wrong where an operand is at the end of its range, as sums of 16 bits are."""

    name = "saturating convolution"
    reads_held = True

    def build(self, site: Any) -> Any:
        built = tensors.OneDnn().build(site)

        class Built:
            def bind(self) -> Any:
                bound = built.bind()

                def wrong(inputs: Any, output: Tensor) -> None:
                    bound([inputs[0].clamp(1), *inputs[1:]], output)

                return wrong

        return Built()


def only(*implementations: Any) -> tuple[Kernel, ...]:
    return tuple(Kernel(each.name, each.match, implementations if each.name == "sum of products" else ()) for each in backends.kernels())


def test_an_implementation_that_is_wrong_is_not_admitted_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "KERNELS", only(Wrong()))
    integer, reference = both(nn.Conv2d(3, 8, 3), "nash-e", ordinary(2, 3, 9, 9))
    assert_same(integer, reference, images(2, 3, 9, 9))
    assert set(chosen(integer).values()) == {None}
    assert "runs its primitives, not the kernel for a sum of products: saturating convolution: it differs" in fxq.explain(integer)


def test_a_requantization_is_compared_on_both_sides_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong for one sum of 2^20 alone, which operands at random would not find."""
    model, sites = nn.Conv2d(4, 4, 1), []
    integer, _ = both(model, "bayes-e", ordinary(2, 4, 9, 9))
    honest = in_c.Convolution.build
    monkeypatch.setattr(in_c.Convolution, "build", lambda self, site: (sites.append(site), honest(self, site))[1])
    integer(images(1, 4, 9, 9)), integer(images(1, 4, 9, 9))
    if not sites:
        pytest.skip("no kernel in C here")
    site = sites[0]
    layer, built = Layer.of(site), honest(in_c.Convolution(), site)
    layer.prove_requantization(site, built.requantized)  # type: ignore[attr-defined]

    def off_by_one(sums: Tensor) -> Tensor:
        found = built.requantized(sums).to(torch.int64)  # type: ignore[attr-defined]
        later = built.requantized(sums - 1).to(torch.int64)  # type: ignore[attr-defined]
        return torch.where(found == 200, later, found)  # one step a single sum too late

    with pytest.raises(Refused, match="requantization differs"):
        layer.prove_requantization(site, off_by_one)


def test_a_requantization_with_a_first_shift_is_compared_where_the_shift_moves_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong from a step to the next multiple of the shift's power: nothing within two sums of the quotient shows it."""
    model, sites = nn.Conv2d(4, 4, 1), []
    with torch.no_grad():
        model.weight.mul_(torch.rand_like(model.weight) + 0.5)
    integer, _ = both(model, "bayes-e", ordinary(2, 4, 9, 9))
    honest = in_c.Convolution.build
    monkeypatch.setattr(in_c.Convolution, "build", lambda self, site: (sites.append(site), honest(self, site))[1])
    integer(images(1, 4, 9, 9)), integer(images(1, 4, 9, 9))
    if not sites:
        pytest.skip("no kernel in C here")
    site = sites[0]
    layer, built = Layer.of(site), honest(in_c.Convolution(), site)
    shift = int(site.constant(site.match.root.args[1]).max())
    assert shift > 1
    for late in (1, 2**shift - 1):

        def wrong(sums: Tensor, late: int = late) -> Tensor:
            found = built.requantized(sums).to(torch.int64)  # type: ignore[attr-defined]
            later = built.requantized(sums - late).to(torch.int64)  # type: ignore[attr-defined]
            return torch.where(found == 130, later, found)  # a result that begins that many sums too late

        with pytest.raises(Refused, match="requantization differs"):
            layer.prove_requantization(site, wrong)
    layer.prove_requantization(site, built.requantized)  # type: ignore[attr-defined]


def test_the_compared_sums_stand_on_both_sides_of_every_step_behind_a_first_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all sums there are: wherever the result changes, the sums before and behind it are among them."""
    model, sites = nn.Conv2d(4, 4, 1), []
    integer, _ = both(model, "bayes-e", ordinary(2, 4, 9, 9))
    honest = in_c.Convolution.build
    monkeypatch.setattr(in_c.Convolution, "build", lambda self, site: (sites.append(site), honest(self, site))[1])
    integer(images(1, 4, 9, 9)), integer(images(1, 4, 9, 9))
    if not sites:
        pytest.skip("no kernel in C here")
    site = sites[0]
    layer, root = Layer.of(site), site.match.root
    constants = [site.constant(node) if isinstance(node, fx.Node) else node for node in root.args[1:]]
    largest = int(layer.largest)
    sums = torch.arange(-largest, largest + 1, dtype=torch.int32)[:, None].expand(-1, 4)
    results = root.target(sums[..., None, None], *constants)[..., 0, 0]
    compared = layer._steps(site)
    for channel in range(4):
        changes = torch.nonzero(results[1:, channel] != results[:-1, channel]).flatten()
        assert len(changes) > 100
        below = sums[changes, channel]
        assert bool(torch.isin(below, compared[:, channel]).all())
        assert bool(torch.isin(below + 1, compared[:, channel]).all())


def test_explain_tells_of_the_machine_when_asked() -> None:
    integer, reference = both(Everything(), "nash-e", ordinary(2, 3, 18, 22))
    assert "runs the kernel" not in fxq.explain(integer)
    told = fxq.explain(integer, machine=True)
    told_of = told.count("runs the kernel for a") + told.count("runs its primitives")
    assert told_of == sum(kernel(node) is not None for node in integer.graph.nodes)
    assert "runs the primitives as they stand" in fxq.explain(reference, machine=True)


SCRIPT = """
import torch
from tests.test_kernels import Everything, assert_same, both, images, ordinary
for target in ("bayes-e", "x86"):
    integer, reference = both(Everything(), target, ordinary(4, 3, 18, 22))
    assert_same(integer, reference, images(2, 3, 18, 22))
    assert_same(integer, reference, images(2, 3, 18, 22).sign() * 100)
print("equal")
"""


def test_a_processor_without_dot_products_stays_exact() -> None:
    """oneDNN as on a machine with AVX2 alone, where pairs of products saturate in 16 bits, and no kernels in C."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", native.SWITCH: "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout.endswith("equal\n"), done.stderr


# ---- the graph, files, copies, threads --------------------------------------------------------------------------------


def test_the_stage_and_the_reference_graph() -> None:
    prepared, fused = compiled(Everything().eval(), [ordinary(2, 3, 18, 22)])
    reference = fxq.convert(prepared, kernels="reference")
    assert (fused.meta["stage"], reference.meta["stage"]) == ("FUSED", "INTEGER")
    assert Stage.FUSED > Stage.INTEGER
    assert [node.format_node() for node in fused.graph.nodes] == [node.format_node() for node in reference.graph.nodes]
    assert all(kernel(node) is None for node in reference.graph.nodes)
    known = {each.name for each in backends.kernels()} - {"dynamic layer"}  # which tests/test_dynamic.py holds
    assert {name for node in fused.graph.nodes if (name := (kernel(node) or ("",))[0])} == known
    assert "# kernel: sum of products" in fxq.text(fused)


def test_a_file_holds_the_primitives_and_kernels_are_fused_when_it_is_loaded(tmp_path: Path) -> None:
    integer, reference = both(Everything(), "bayes-e", ordinary(2, 3, 18, 22))
    one, other = fxq.save(integer, tmp_path / "fused.fxq"), fxq.save(reference, tmp_path / "reference.fxq")
    assert one.read_bytes() == other.read_bytes()
    loaded = fxq.load(one)
    assert loaded.meta["stage"] == "FUSED"
    assert_same(loaded, reference, images(2, 3, 18, 22))
    assert set(chosen(loaded).values()) == set(chosen_after(integer, images(2, 3, 18, 22)).values())


def chosen_after(integer: fx.GraphModule, *inputs: Tensor) -> dict[str, str | None]:
    integer(*inputs), integer(*inputs)
    return chosen(integer)


def test_copies_run_on_their_own_and_follow_their_constants() -> None:
    integer, reference = both(Everything(), "nash-e", ordinary(2, 3, 18, 22))
    x = images(2, 3, 18, 22)
    before = integer(x)
    assert_same(integer, reference, x)
    for other in (copy.deepcopy(integer), copy.copy(integer), pickle.loads(pickle.dumps(integer))):
        assert other.__dict__[RUNNER] is not integer.__dict__[RUNNER]
        assert_same(other, reference, x)
    changed = copy.deepcopy(integer)
    changed(x), changed(x)
    node = next(node for node in changed.graph.nodes if node.name == "same_bias")
    resolve(changed, str(node.target)).add_(2000)  # in place
    plain = copy.deepcopy(changed)
    del plain.__dict__[RUNNER]
    assert not all_equal(plain(x), before)
    assert_same(changed, plain, x)
    *path, name = str(node.target).split(".")
    holder = resolve(changed, ".".join(path))
    setattr(holder, name, getattr(holder, name) - 2000)  # another tensor
    assert_same(changed, integer, x)
    assert_same(integer, reference, x)


def test_several_threads_run_one_model_at_once() -> None:
    integer, reference = both(Everything(), "bayes-e", ordinary(2, 3, 18, 22))
    batches = [images(1 + index % 3, 3, 18, 22, seed=index) for index in range(6)]
    wanted = [reference(batch) for batch in batches]
    wrong: list[int] = []

    def run(first: int) -> None:
        for step in range(12):
            index = (first + step) % len(batches)
            if not all_equal(integer(batches[index]), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_any_number_of_threads_gives_the_same() -> None:
    integer, reference = both(Everything(), "nash-e", ordinary(2, 3, 18, 22))
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert_same(integer, reference, images(5, 3, 18, 22))
    finally:
        torch.set_num_threads(1)


def test_what_is_traced_or_transformed_runs_the_primitives() -> None:
    integer, reference = both(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "nash-e", ordinary(2, 3, 9, 9))
    x = ordinary(2, 3, 9, 9)
    assert_same(integer, reference, x)
    assert all_equal(torch.compile(integer, backend="eager")(x), reference(x))
    assert all_equal(torch.func.vmap(integer)(x[None])[0], reference(x))


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = native._folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(OSError, match="others can write"):
        native._folder()


def test_the_switch_leaves_out_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.library.__wrapped__() == "FXQUANT_NATIVE is 0"
    monkeypatch.setenv(native.SWITCH, "1")
    monkeypatch.setenv("PATH", "")
    assert native.library.__wrapped__() == "there is no C compiler"
