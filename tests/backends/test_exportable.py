"""Float operators beside integer layers, by PyTorch's exporter and without it: the file computes what PyTorch does."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx import float_export, replacements
from fxquant.backends.onnx.float_export import FloatRegions, split
from tests.shared.contract import compiled
from tests.shared.networks import Network, members
from tests.shared.onnx_files import assert_verified, batch, integer_of, rows, run

pytestmark = pytest.mark.nightly

Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "cdist": torch.cdist,
    "cdist, 3-norm": lambda x, y: torch.cdist(x, y, p=3.0, compute_mode="donot_use_mm_for_euclid_dist"),
    "cumprod": lambda x, y: torch.cumprod(x + y, -1),
}


@members(lambda function: dict(one=nn.Linear(4, 4), other=nn.Linear(4, 4), head=nn.Linear(4, 3), function=function))
def Beside(self, rows: Tensor, others: Tensor) -> Tensor:
    """A function of two quantized layers in front of a third."""
    return self.head(self.function(self.one(rows), self.other(others)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_exported_between_integer_layers(name: str, tmp_path: Path) -> None:
    batches = [(torch.randn(3, 4, 4), torch.randn(3, 4, 4)) for _ in range(2)]
    mapping = fxq.QConfigMapping()
    for kind in (torch.cdist, torch.cumprod):
        mapping = mapping.set_object_type(kind, None)
    result = fxq.quantize(Beside(FUNCTIONS[name]).eval(), batches, "nash-e", mapping)
    assert sum(not layer.integer and not layer.boundary for layer in fxq.inspect.layers(result.integer)) == 1
    report = result.verify(result.export(tmp_path / "m.onnx", style="exact"), batches)
    assert report
    assert (report.tensors >= 5, report.flips) == (True, 0)


WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(),
    "mean of None": lambda x: x / x.mean(None, keepdim=True),
    "mean after a float operator": lambda x: torch.fft.fft(x).real.mean(),
    "nanmean": torch.nanmean,
    "amax": torch.amax,
    "amin": lambda x: x.amin(),
    "max": torch.max,
    "aminmax": torch.aminmax,
    "cummax and cummin": lambda x: torch.cummax(x, -1)[0] * x.cummin(1).values,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_reduction_over_everything_is_exported(name: str, tmp_path: Path) -> None:
    """The batch is one of its dimensions, so it stays in float."""
    batches = [torch.randn(3, 4) for _ in range(2)]
    result = fxq.quantize(Network(lambda s, x: WHOLE[name](s.one(x)), one=nn.Linear(4, 4)).eval(), batches, "bayes-e")
    assert result.verify(result.export(tmp_path / "m.onnx"), batches)


def test_what_is_called_instead_computes_the_same() -> None:
    torch.testing.assert_close(replacements.cumprod(torch.arange(1.0, 12), 0), torch.cumprod(torch.arange(1.0, 12), 0), rtol=1e-6, atol=0)
    one, other = torch.randn(2, 5, 4), torch.randn(3, 1, 6, 4).round()
    for p in (0.0, 0.5, 1.0, 2.0, 3.0, math.inf):
        torch.testing.assert_close(replacements.cdist(one, other, p), torch.cdist(one, other, p), rtol=1e-5, atol=1e-6)


# ---- float operators in the file --------------------------------------------------------------------------------------
def between(function: Callable[[Tensor], Tensor], outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Network(lambda s, x: s.b(function(s.a(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(outputs, 4, 1))


@members(lambda: dict(
    features=nn.Conv2d(3, 8, 3, 2, 1), context=nn.Conv2d(3, 8, 3, 2, 1), motion=nn.Conv2d(11, 8, 3, padding=1),
    head=nn.Conv2d(8, 2, 3, padding=1),
))  # fmt: skip
def Flow(self, x: Tensor) -> Tensor:
    """A correlation volume that a loop samples at moving places, as in RAFT."""
    one, two = torch.chunk(self.features(torch.cat([x, x.flip(3)], 0)), 2, 0)
    batch, channels, height, width = one.shape
    volume = torch.matmul(one.view(batch, channels, -1).transpose(1, 2), two.view(batch, channels, -1))
    volume = volume.view(batch, height, width, 1, height, width).reshape(-1, 1, height, width)
    rows_, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    start = torch.stack([columns, rows_], 0).float()[None].repeat(batch, 1, 1, 1)
    steps = torch.linspace(-1, 1, 3)
    around = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).view(1, 3, 3, 2)
    place, state = start, torch.tanh(self.context(x))
    for _ in range(2):
        centre = place.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) + around
        across, down = centre.split([1, 1], dim=-1)
        grid = torch.cat([2 * across / (width - 1) - 1, 2 * down / (height - 1) - 1], -1)
        sampled = F.grid_sample(volume, grid, align_corners=True).view(batch, height, width, -1).permute(0, 3, 1, 2)
        state = F.relu(self.motion(torch.cat([sampled, place - start], 1))) + state
        place = place + self.head(state)
    return place - start


FLOAT_MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "joins": (lambda: between(lambda y: torch.hstack([torch.dstack([y, y])[:, :, 4:12], torch.vstack([y, -y]).chunk(2)[0]])[:, 2:6]), None),
    "a join of float tensors": (lambda: between(lambda y: torch.column_stack([y.asinh(), y])[:, 2:6]), None),
    "embedding bag": (
        lambda: Network(lambda s, i: s.b(s.e(i)), e=nn.EmbeddingBag(10, 8, mode="sum"), b=nn.Linear(8, 4)),
        torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(0)),
    ),
    "flow": (Flow, None),
}


@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float_operators_beside_integer_parts(name: str, tmp_path: Path) -> None:
    make, inputs = FLOAT_MODELS[name]
    inputs = batch(2) if inputs is None else inputs
    prepared, integer = compiled(make().eval(), [inputs], "nash-e")
    assert fxq.verify(prepared, integer, [inputs])
    report = assert_verified(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [inputs, inputs[:1]])
    assert all(difference.largest < 1e-3 for difference in report.floats.values()), str(report)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda y: y.clamp(-1, 1.5) + torch.clamp(y, min=-0.5, max=1) + torch.clip(y, 0, 0.5) + y.clip(min=0, max=0.75) + y.clamp(0, 1),
    "clamp in place": lambda y: (y * 1).clamp_(0, 0.5),
    "clamp of integers": lambda y: y.long().clamp(0, 2.5) * y + y.long().clamp(0, 2),
    "mean of everything": lambda y: y - y.mean() + y.mean(None, keepdim=True) + torch.mean(y.abs().sqrt()),
    "extremes of everything": lambda y: y.amax() - y.amin((), keepdim=True) + y.max() - torch.min(y) + y,
    "constants of integers": lambda y: y * torch.arange(8) + torch.arange(8),
    "numbers of both kinds": lambda y: F.threshold(y, 0, 0.5) + torch.where(y > 0, 1, 0.5) + torch.lerp(y, y * 2, 1) + F.softplus(y, 2, 10),
    "bounds that are tensors": lambda y: y.clamp(y - 1, y + 1) + y.clamp(torch.tensor(-1.0), torch.tensor(1)) + torch.where(y > 0, y, 1),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_in_float_are_exported(name: str, tmp_path: Path) -> None:
    layers = {"layer": nn.Linear(8, 8), "norm": nn.InstanceNorm1d(4)}
    model = Network(lambda m, x: SPELLINGS[name](m.norm(m.layer(x))), **layers).eval()
    inputs = torch.randn(3, 4, 8)
    result = fxq.quantize(model, [inputs], target="bernoulli2")
    assert result.verify(result.export(tmp_path / "model.onnx", style="exact"), [inputs])
    fxq.export_onnx(model, tmp_path / "float.onnx", example_inputs=inputs)  # which compares the file with PyTorch


def test_joins_by_their_other_names_are_integer() -> None:
    integer = integer_of(between(lambda y: torch.hstack([y, y])[:, :4]), batch(2))
    assert "none is left in float" in fxq.explain(integer)


def test_a_float_operator_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    integer = integer_of(between(torch.special.bessel_j0), batch(2))
    with pytest.raises(fxq.errors.ExportError, match="bessel_j0") as caught:
        fxq.export_onnx(integer, tmp_path / "model.onnx")
    text = str(caught.value)
    assert "test_exportable.py" in text
    assert "\x1b" not in text
    assert "bessel_j0" in text.split("because")[1]


def islands(last: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """Three parts between linear layers that bernoulli2, without 16-bit tensors, leaves in float; the second reads parameters."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8) for name in "abc"}
    net = Network(lambda s, x: last(s.c(s.norm(s.b(s.a(x).log_softmax(1))))), norm=nn.GroupNorm(2, 8), **layers)
    return integer_of(net, rows(), "bernoulli2")


def test_all_float_parts_are_written_by_one_call_of_the_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = list[object](), torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *arguments, **named: (calls.append(arguments), original(*arguments, **named))[1])
    integer = islands(lambda y: y.log_softmax(1))
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert len(calls) == 1
    assert len(FloatRegions(integer, 18).regions) == 3
    assert_verified(integer, path, [rows(), rows(1)])


def test_of_several_float_parts_the_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(fxq.errors.ExportError, match="bessel_j0"):
        fxq.export_onnx(islands(torch.special.bessel_j0), tmp_path / "model.onnx")


def test_a_model_of_parts_is_cut_also_where_graphs_inside_of_nodes_read_values() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 18]>
    parts (float[2] x, bool flag, float[2] y) => (float[2] one, float[2] two) <float[2] c = {1, 2}> {
        one = Abs(x)
        two = If (flag) <
            then_branch = then () => (float[2] r) { r = Add(c, OPERAND) },
            else_branch = other () => (float[2] r) { r = Neg(c) }>
    }
    """
    one, two = split(onnx.parser.parse_model(text.replace("OPERAND", "y")), [(1, 1), (2, 1)])
    assert [node.op_type for node in one.graph.node] == ["Abs"]
    assert [tensor.name for tensor in two.graph.initializer] == ["c"]
    onnx.checker.check_model(two)
    with pytest.raises(ValueError, match="'x', which is an input of another"):
        split(onnx.parser.parse_model(text.replace("OPERAND", "x")), [(1, 1), (2, 1)])


@members(lambda function, width=16: dict(
    first=nn.Linear(12, 16), function=function, last=nn.Linear(width, 5), norm=nn.LayerNorm(16), table=nn.Parameter(torch.randn(8, 4)),
    index=torch.randint(0, 8, (36,)),
))  # fmt: skip
def Between(self, x: Tensor) -> Tensor:
    """A function between two layers that are integers for bernoulli2; two tokens of the sequence carry most of the sequence's norm."""
    return self.last(self.function(self, self.norm(self.first(x))))


def attended(x: Tensor, mask: Tensor) -> Tensor:
    heads = F.layer_norm(x, [16]).reshape(x.shape[0], 6, 4, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).reshape(x.shape[0], 6, 16)


def biased(model: Any, x: Tensor) -> Tensor:
    """With Swin's table of relative positions, which depends on parameters alone."""
    return attended(x, model.table[model.index].view(6, 6, 4).permute(2, 0, 1).contiguous().unsqueeze(0))


def masked_by_batch(model: Any, x: Tensor) -> Tensor:
    """With a mask that is expanded over the batch, by a size that is computed."""
    batch = (x.shape[0] * 2) // 2
    return attended(x, torch.tril(torch.ones(6, 6)).log().clamp(-9.0)[None, None].expand(batch, 4, -1, -1))


IN_FLOAT: dict[str, Callable[..., Tensor]] = {
    "norm": lambda model, x: x,
    "norm without factors": lambda model, x: F.layer_norm(x, [6, 16]),
    "softmax": lambda model, x: F.layer_norm(torch.softmax(F.layer_norm(x, [16]), 1), [16]),
    "attention with biases": biased,
    "attention with a mask": masked_by_batch,
    "roll": lambda model, x: F.layer_norm(torch.roll(F.layer_norm(x, [16]), (-2, 5), (1, 2)), [16]),
    "arithmetic": lambda model, x: F.layer_norm(F.layer_norm(x, [16]) * 1.5 + F.layer_norm(x, [16]) - 0.25, [16]),
    "a group norm": lambda model, x: F.layer_norm(F.instance_norm(F.layer_norm(x, [16])), [16]),
}


@pytest.mark.parametrize("name", IN_FLOAT)
def test_float_operators_of_transformers_are_exported_between_integer_layers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, 6, 12) for _ in range(3)]
    result = fxq.quantize(Between(IN_FLOAT[name]).eval(), batches, target="bernoulli2")
    path = result.export(tmp_path / "model.onnx")
    for count in (1, 3):
        inputs = batches[0][:count]
        assert result.verify(path, [inputs])
        (actual,), wanted = run(path, inputs), result.integer(inputs)
        assert float((actual - wanted).abs().max()) < 0.1 * float(wanted.std())  # a float that rounds otherwise is a step


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
        computed = [computed_mask(x, dtype) for dtype in (torch.bool, torch.float32)]
        masks = [*MASKS.values(), *({"attn_mask": mask[:, None] if rank == 4 else mask} for mask in computed)]
        return [F.scaled_dot_product_attention(query, key, value, **mask) for mask in masks]

    batches = [torch.randn(2, 6, 8) for _ in range(2)]
    model = Network(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)).eval()
    result = fxq.quantize(model, batches, target="x86")
    path = result.export(tmp_path / "model.onnx", style="exact")
    assert result.verify(path, batches)
    for wanted, actual in zip(result.integer(batches[0]), run(path, batches[0]), strict=True):
        torch.testing.assert_close(torch.as_tensor(actual), wanted, rtol=1e-4, atol=1e-5)


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
