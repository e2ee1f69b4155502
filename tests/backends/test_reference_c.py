"""The integer model as a C program: every primitive and whole models, the bits of PyTorch, without a warning of compiler or sanitizers."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant import backends
from fxquant.backends.c import export_c  # noqa: F401 - it fills the table of forms
from fxquant.backends.c.program import FORMS
from fxquant.ir.graph import TensorFact, set_fact
from fxquant.primitives import PRIMITIVES
from tests.shared.c_cases import Case, cases
from tests.shared.contract import compiled, same_bytes
from tests.shared.networks import Network, members

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-ffp-contract=off"]
SANITIZED = ["-O0", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"]

pytestmark = pytest.mark.skipif(not COMPILERS, reason="a C compiler was not found")


def build(source: Path, compiler: str = COMPILERS[0] if COMPILERS else "", options: Sequence[str] = SANITIZED) -> Path:
    """The program of an exported source, compiled with warnings as errors."""
    files = [source.name, f"{source.stem}_main.c"]
    done = subprocess.run([compiler, *STRICT, *options, *files, "-o", source.stem], cwd=source.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return source.with_suffix("")


def run(program: Path, inputs: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Run a program on inputs; return its results as tensors like `likes`."""
    done = execute(program, inputs, len(likes))
    assert done.returncode == 0, done.stderr.decode()
    raw = [np.fromfile(program.parent / f"out{index}", dtype=like.numpy().dtype) for index, like in enumerate(likes)]
    return [torch.from_numpy(values).reshape(like.shape) for values, like in zip(raw, likes, strict=True)]


def execute(program: Path, inputs: Sequence[Tensor], outputs: int) -> Any:
    for index, value in enumerate(inputs):
        (program.parent / f"in{index}").write_bytes(value.contiguous().numpy().tobytes())
    names = [*(f"in{index}" for index in range(len(inputs))), *(f"out{index}" for index in range(outputs))]
    return subprocess.run([str(program), *names], cwd=program.parent, capture_output=True)


def returned(integer: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [value for value in pytree.tree_leaves(integer(*inputs)) if isinstance(value, Tensor)]


def assert_equal(integer: fx.GraphModule, inputs: Sequence[Tensor], source: Path, batch_size: int, **options: Any) -> None:
    """The program gives the bits of the integer model, for several batches one after another."""
    source = fxq.export.export_c(integer, source, batch_size=batch_size, **options)
    program = build(source, options=SANITIZED if integer.meta["target"].name == "bayes-e" else ["-O1"])  # compiling those takes a second
    likes = returned(integer, inputs)
    for actual, wanted in zip(run(program, inputs, likes), likes, strict=True):
        assert same_bytes(actual, wanted)


# ---- every primitive ------------------------------------------------------------------------------------------------
def graph_of(drawn: Sequence[Case]) -> fx.GraphModule:
    """An integer graph that calls primitives on constants, and returns each result."""
    root, graph, results = nn.Module(), fx.Graph(), []

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = f"tensor_{len(root._buffers)}"
        root.register_buffer(name, value)
        return graph.get_attr(name)

    for case in drawn:
        node = graph.call_function(case.primitive, tuple(pytree.tree_map(operand, case.arguments)))
        result = case.primitive(*case.arguments)
        set_fact(node, TensorFact(tuple(result.shape), result.dtype))
        results.append(node)
    graph.output(tuple(results))
    built = fx.GraphModule(root, graph)
    built.meta.update(stage="INTEGER", target=backends.get("bayes-e"))
    return built


@pytest.mark.nightly
def test_every_primitive_has_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backends.c.export_c", "prepared.sizes"):  # drawn calls have no proof of a lowered model
        monkeypatch.setattr(f"fxquant.{module}.require_integer", lambda model: None)
    drawn = [case for case in cases(0) if case.primitive in FORMS]
    assert {case.primitive for case in drawn} == set(FORMS)
    assert {each.__module__.rpartition(".")[2] for each in set(PRIMITIVES) - set(FORMS)} == {"varying", "loop"}  # C has one size, no loops
    program = build(fxq.export.export_c(graph_of(drawn), tmp_path / "primitives.c"))
    wanted = [case.primitive(*case.arguments) for case in drawn]
    for case, actual, result in zip(drawn, run(program, [], wanted), wanted, strict=True):
        assert same_bytes(actual, result), case


# ---- whole models ---------------------------------------------------------------------------------------------------
@members(lambda: dict(
    stem=nn.Conv2d(3, 8, 3, 2, 1, bias=False), depth=nn.Conv2d(8, 8, 3, padding=1, groups=8), norm=nn.BatchNorm2d(8), slope=nn.PReLU(8),
    up=nn.ConvTranspose2d(8, 4, 2, 2), squeeze=nn.Conv2d(8, 8, 1), head=nn.Linear(12, 5),
))  # fmt: skip
def Convolutions(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layers of networks of images, with two results, one of int64."""
    x = self.slope(self.norm(self.stem(x)))
    x = nn.functional.relu6(self.depth(x) + x)
    x = x * nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))
    low = nn.functional.interpolate(nn.functional.max_pool2d(x, 3, 2, 1), scale_factor=2, mode="bilinear")
    wide = torch.cat((self.up(x), nn.functional.avg_pool2d(nn.functional.pad(low, (1, 1, 1, 1)), 3, 1).repeat(1, 1, 2, 2)), 1)
    scores = self.head(wide.flatten(2).amax(2))
    return scores.softmax(-1), scores.argmax(-1)


@members(lambda: dict(
    embed=nn.Embedding(20, 8), norm=nn.LayerNorm(8), memory=nn.LSTM(8, 6, batch_first=True),
    attention=nn.MultiheadAttention(8, 2, batch_first=True), head=nn.Linear(6, 3),
))  # fmt: skip
def Sequences(self, tokens: Tensor) -> Tensor:
    """Tokens through attention and a recurrence."""
    x = self.embed(tokens)
    y = self.norm(x)
    return self.head(self.memory(x + self.attention(y, y, y)[0])[0][:, -1])


def integer_of(model: nn.Module, batch: Tensor, target: str) -> fx.GraphModule:
    return compiled(model.eval(), [batch], target, integer_tail=True).integer


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bernoulli2", "bayes-e", "nash-e", "x86"])
def test_a_network_of_images_has_the_integer_models_bits(target: str, tmp_path: Path) -> None:
    network, image = Convolutions(), torch.randn(6, 3, 16, 16)
    softened = target in ("bayes-e", "nash-e")  # on the others, without int16, a softmax stays in float
    model = network if softened else nn.Sequential(network.stem, network.norm, network.slope, network.depth, nn.SiLU(), network.up)
    integer = integer_of(model, image, target)
    assert_equal(integer, [image * 1.5], tmp_path / "network.c", 3, external_data=softened)


def test_tokens_are_looked_up_and_refused_where_there_are_none(tmp_path: Path) -> None:
    tokens = torch.randint(0, 20, (4, 2))
    integer = integer_of(Sequences(), tokens, "bayes-e")
    assert_equal(integer, [tokens], tmp_path / "sequences.c", 2, external_data=True)
    done = execute(tmp_path / "sequences", [torch.full((2, 2), 20)], 1)
    assert (done.returncode, done.stderr) == (1, b"an input names an element that does not exist, or divides by 0\n")
    done = execute(tmp_path / "sequences", [torch.zeros(3, 2, dtype=torch.int64)], 1)
    assert done.returncode == 1
    assert b"ends inside of a batch" in done.stderr


@pytest.mark.skipif(len(COMPILERS) < 2, reason="there is one C compiler")
def test_another_compiler_gives_the_same_bits(tmp_path: Path) -> None:
    tokens = torch.randint(0, 20, (4, 2))
    integer = integer_of(Sequences(), tokens, "nash-e")
    program = build(fxq.export.export_c(integer, tmp_path / "sequences.c", batch_size=2), COMPILERS[1], ["-O3"])
    wanted = returned(integer, [tokens])
    assert all(same_bytes(a, b) for a, b in zip(run(program, [tokens], wanted), wanted, strict=True))


# ---- what is refused ------------------------------------------------------------------------------------------------
def test_float_operators_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    integer = integer_of(Network(lambda s, x: torch.fft.rfft(s.layer(x)).abs(), layer=nn.Linear(8, 8)), torch.randn(4, 8), "bayes-e")
    with pytest.raises(fxq.errors.ExportError, match="in float") as caught:
        fxq.export.export_c(integer, tmp_path / "made" / "spectrum.c")
    assert caught.value.at is not None
    assert "torch.fft.rfft" in caught.value.at
    assert not list(tmp_path.iterdir())


def test_a_batch_size_beyond_the_models_is_refused(tmp_path: Path) -> None:
    integer = integer_of(Network(lambda s, x: x[-3:].relu()), torch.randn(6, 4), "bayes-e")
    with pytest.raises(fxq.errors.ConfigurationError, match="batch_size=2"):
        fxq.export.export_c(integer, tmp_path / "last.c", batch_size=2)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_build_whose_float_operations_are_not_ieees_does_not_compile(compiler: str, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 4, 4)
    integer = fxq.quantize(nn.Conv2d(3, 2, 1).eval(), [x], target="bayes-e").integer
    source = fxq.export.export_c(integer, tmp_path / "net.c")
    for flag in ("-ffast-math", "-Ofast", "-ffinite-math-only"):
        done = subprocess.run([compiler, *STRICT, flag, "-c", source.name], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0, flag
        assert "#error" in done.stderr
    for flag in ("-funsafe-math-optimizations", "-freciprocal-math", "-fno-signed-zeros"):
        macros = subprocess.run([compiler, flag, "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True).stdout
        done = subprocess.run([compiler, *STRICT, flag, "-c", source.name], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode != 0) is ("__RECIPROCAL_MATH__" in macros or "__NO_SIGNED_ZEROS__" in macros)  # not every compiler tells
    for flag in ("-O3", "-fno-finite-math-only", "-fno-math-errno"):
        subprocess.run([compiler, *STRICT, flag, "-c", source.name], cwd=tmp_path, check=True)
