"""One model for inputs of many sizes: the bits of the prepared model, of the integer model and of its file are equal at each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import fxquant as fxq
from fxquant.analysis.explain import operator_runs
from fxquant.analysis.layers import left_in_float
from fxquant.errors import CalibrationError, ConfigurationError, ExportError, TraceError
from fxquant.frontend.tracer import record
from fxquant.ir.graph import fact
from fxquant.ops.sampling import resize
from fxquant.primitives import varying
from fxquant.primitives.varying import COUNTED
from tests.counts.networks import built
from tests.shared.contract import assert_train_is_validate, flat
from tests.shared.networks import Network, members, written

BATCH, HEIGHT, WIDTH, LENGTH = Dim("batch"), Dim("height", max=96), Dim("width", max=80), Dim("length", max=64)
IMAGES: Any = ({0: BATCH, 2: HEIGHT, 3: WIDTH},)
WORDS: Any = ({0: BATCH, 1: LENGTH},)
ODD = [(2, 3, 24, 40), (1, 3, 33, 17), (1, 3, 96, 80), (3, 3, 9, 12), (1, 3, 50, 31)]
EVEN = [(2, 3, 24, 40), (1, 3, 32, 16), (1, 3, 96, 80), (3, 3, 8, 12), (1, 3, 48, 28)]
SENTENCES = [(2, 12), (1, 1), (3, 7), (1, 64), (2, 33)]


@members(
    lambda: dict(first=nn.Conv2d(3, 8, 3, 2, 1), gate=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1)), head=nn.Linear(8, 4))
)
def Scaled(self, x: Tensor) -> Any:
    """Squeeze and excitation, pools and a head over the mean."""
    x = F.max_pool2d(torch.relu(self.first(x)), 3, 2, 1)
    x = F.avg_pool2d(x * self.gate(x).sigmoid(), 3, 1, 1)
    return self.head(x.mean((2, 3))), F.pixel_shuffle(x, 2)


@members(
    lambda mode, factor=None: dict(
        first=nn.Conv2d(3, 8, 3, 1, 1), second=nn.Conv2d(8, 8, 3, 2, 1), head=nn.Conv2d(16, 2, 1), mode=mode, factor=factor
    )
)
def Decoder(self, x: Tensor) -> Tensor:
    """Features that are enlarged to the size of others, by a factor, or to the input's size."""
    fine = torch.relu(self.first(x))
    size = None if self.factor else fine.shape[2:]
    return self.head(torch.cat([fine, F.interpolate(self.second(fine), size, self.factor, self.mode)], 1))


@members(lambda causal: dict(
    words=nn.Embedding(50, 16), places=nn.Parameter(torch.randn(1, 64, 16)), causal=causal, project=nn.Linear(16, 48),
    norm=nn.LayerNorm(16), head=nn.Linear(16, 3),
))  # fmt: skip
def Attention(self, ids: Tensor) -> Tensor:
    """Embedded words with positions, attention that may look ahead or not, and a part of the result."""
    x = self.words(ids) + self.places[:, : ids.shape[1]]
    items, length, _ = x.shape
    query, key, value = self.project(x).view(items, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2)
    return self.head(self.norm(x + mixed))[:, -1]


def square(model: Any, x: Tensor) -> Tensor:
    """A square of an image, as wide as its smaller side."""
    side = min(x.shape[2:])
    assert max(side, x.shape[2], 1) > 1
    return model.first(x[:, :, :side, :side])


def edges(model: Any, ids: Tensor) -> Tensor:
    """Words whose last ones are found by comparing their places with a size."""
    places = torch.arange(ids.shape[1])
    parts = (places >= ids.shape[1] - 3).long() + (places >= ids.shape[1] - 1).long()
    return model.head(model.words(ids)).masked_fill((parts == 1)[:, None], -1.0)


def normed(model: Any, x: Tensor) -> Tensor:
    """Norms of groups of channels, and of each channel."""
    return F.instance_norm(torch.relu(model.groups(model.first(x))))


class Case(NamedTuple):
    """A network, the sizes that vary, and shapes; the first is the example's."""

    make: Callable[[], nn.Module]
    shapes: list[tuple[int, ...]]
    dynamic_shapes: Any


CASES = {
    "gated": Case(Scaled, ODD, IMAGES),
    **{mode: Case(lambda mode=mode: Decoder(mode), ODD, IMAGES) for mode in ("nearest", "nearest-exact", "bilinear")},  # type: ignore[misc]
    "normed": Case(lambda: written(normed, first=nn.Conv2d(3, 8, 3), groups=nn.GroupNorm(2, 8)), ODD, IMAGES),
    "square": Case(lambda: written(square, first=nn.Conv2d(3, 8, 3)), ODD, IMAGES),
    "edges": Case(lambda: written(edges, words=nn.Embedding(50, 8), head=nn.Linear(8, 4)), SENTENCES, WORDS),
    "by a factor": Case(lambda: Decoder("bilinear", 2.0), EVEN, IMAGES),
    **{f"causal {causal}": Case(lambda causal=causal: Attention(causal), SENTENCES, WORDS) for causal in (False, True)},  # type: ignore[misc]
}


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) if len(shape) == 4 else torch.randint(0, 50, shape)


def compiled(case: Case, target: str) -> tuple[Any, Any]:
    batches = [drawn(shape) for shape in case.shapes[:2]]
    prepared = fxq.prepare(case.make().eval(), batches[0], target, options=fxq.Options(dynamic_shapes=case.dynamic_shapes))
    fxq.calibrate(prepared, batches)
    return prepared, fxq.convert(prepared)


@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86", pytest.param("bernoulli2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_equal_at_every_size(name: str, target: str, tmp_path: Path) -> None:
    prepared, integer = compiled(CASES[name], target)
    session = onnxruntime.InferenceSession(fxq.export_onnx(integer, tmp_path / "model.onnx"))
    assert all(isinstance(session.get_inputs()[0].shape[dim], str) for dim in CASES[name].dynamic_shapes[0])
    fxq.set_state(prepared, fxq.State.VALIDATE)
    for shape in CASES[name].shapes:
        x = drawn(shape)
        outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for result, other, of_file in zip(flat(integer(x)), flat(prepared(x)), outputs, strict=True):
            assert torch.equal(result, other)
            if name != "normed" or target.endswith("-e"):  # without int16 a norm is in float, and runtimes round it differently
                assert torch.equal(result, torch.from_numpy(of_file))
    for shape in CASES[name].shapes[2:4]:
        assert_train_is_validate(prepared, drawn(shape))


@pytest.mark.parametrize("name", ["gated", "normed"])
def test_a_network_of_means_is_integer_and_takes_its_constants_from_tables(name: str) -> None:
    prepared, integer = compiled(CASES[name], "bayes-e")
    assert not left_in_float(fxq.inspect.layers(prepared))
    assert any(node.target in COUNTED.values() for node in integer.graph.nodes)


@pytest.mark.parametrize("name", ["gated", "bilinear", "nearest", "normed", "causal True"])
def test_a_model_of_one_size_has_the_bits_of_that_of_many(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    prepared, integer = compiled(case, "bayes-e")
    x = drawn(case.shapes[4])
    fixed = fxq.at_sizes(integer, x), fxq.convert(fxq.at_sizes(prepared, x))
    example = case.shapes[0][1:]
    file = fxq.export_onnx(integer, tmp_path / "model.onnx", batch_size=1)
    assert onnxruntime.InferenceSession(file).get_inputs()[0].shape == [1, *example]  # a form of one size has the example's
    if name != "causal True":  # which has float operators
        fxq.export.export_c(integer, tmp_path / "model.c")
        assert "float[1]" + "".join(f"[{size}]" for size in example) in (tmp_path / "model.h").read_text()
    for model in fixed:
        for result, expected in zip(flat(model(x)), flat(integer(x)), strict=True):
            assert torch.equal(result, expected)
        with pytest.raises(ConfigurationError, match="is fixed"):
            model(drawn(case.shapes[0]))
        if name != "causal True":
            fxq.export.export_c(model, tmp_path / "model.c")


# ---- what varies where a model leaves it open -------------------------------------------------------------------------
ALL_OPEN = fxq.Options(dynamic_shapes=True)
OPEN: dict[str, tuple[str, list[tuple[int, ...]], int]] = {
    "ResNet": ("3,16≤512,16≤512", [(1, 3, 20, 36)], 6),
    "U-Net": ("3,16≤512,16≤512", [(3, 3, 24, 32)], 9),
    "detector": ("3,32≤512,32≤512", [(1, 3, 40, 32)], 9),
    "signals": ("3,256≤1024", [(1, 3, 264)], 8),
    "recurrent": ("1,4≤512,16", [(3, 1, 7, 16)], 11),
    "ViT": ("3,64,64", [], 11),
}


@pytest.mark.parametrize("name", OPEN)
def test_every_size_that_a_model_leaves_open_varies(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes, others, traces = OPEN[name]
    model, batch = built(name)
    batches = [batch[:2], *map(torch.randn, others)]
    with mock.patch("fxquant.frontend.record", wraps=record) as recorded:
        prepared = fxq.prepare(model, batches[0], "x86", options=ALL_OPEN)
    assert recorded.call_count == traces
    assert str(fact(next(iter(prepared.graph.nodes)))) == f"f32[B,{sizes}]"
    assert "is fixed to" not in caplog.text  # nobody asked, so nothing warns
    fxq.calibrate(prepared, batches)
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, batches)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx", style="exact"), batches)
    for x in batches[1:]:
        assert_train_is_validate(prepared, x)
    (reason,) = (line for line in fxq.explain(integer).splitlines() if f"size_1 of the inputs is fixed to {batch.shape[1]}: " in line)
    assert ".py:" in reason
    with pytest.raises(ConfigurationError, match=f"dimension 1 is fixed: (.|\n)*remedy   pass an input of size {batch.shape[1]} there"):
        integer(torch.cat([batch, batch], 1))


@pytest.mark.parametrize("name", ["ResNet", "detector", "layer scales"])
def test_kernels_take_the_constants_of_the_sizes_that_they_run_at(name: str) -> None:
    model, batch = built(name)
    x = batch[:, :, :24, :16]
    integer = fxq.convert(fxq.calibrate(fxq.prepare(model, batch, "x86", options=ALL_OPEN), [batch, x]))
    fixed = fxq.convert(fxq.calibrate(fxq.prepare(model, x, "x86", options=fxq.Options(dynamic_shapes={})), [x]))
    integer(x), fixed(x)
    alone = [[each.layer.name for each in operator_runs(model) if not each.fast] for model in (integer, fixed)]
    assert alone[0] == alone[1]


WORSE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, int, str]] = {
    "many elements": (lambda m, x: m.first(x).mean((2, 3)), "nash-e", 300, "mean would stay in float"),
    "last windows": (lambda m, x: F.max_pool2d(m.first(x), 3, 2, ceil_mode=True), "x86", 16, "max_pool2d would stay in float"),
    "a layer": (lambda m, x: m.first(x).mean((2, 3)), "bernoulli2", 16, "mean is a layer of its size on bernoulli2"),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_size_is_fixed_where_an_operator_would_be_worse(name: str) -> None:
    body, target, size, because = WORSE[name]
    prepared = fxq.prepare(Network(body, first=nn.Conv2d(3, 4, 3)).eval(), torch.randn(1, 3, size, size), target, options=ALL_OPEN)
    assert not left_in_float(fxq.inspect.layers(prepared))
    assert f"size_2 of the inputs is fixed to {size}: {because}" in fxq.explain(prepared)
    with pytest.raises(ConfigurationError, match=f"dimension 3 is fixed: {because}"):
        prepared(torch.randn(1, 3, size, size + 8))


def test_files_keep_the_sizes(tmp_path: Path) -> None:
    _, integer = compiled(CASES["bilinear"], "x86")
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    x = drawn(ODD[1])
    assert torch.equal(loaded(x), integer(x))
    with pytest.raises(ConfigurationError, match="height goes from 1 to 96"):
        loaded(torch.randn(1, 3, 97, 8))
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [drawn(shape) for shape in ODD])


def test_a_model_that_halves_takes_multiples() -> None:
    model = Network(lambda _, x: torch.cat([x, F.interpolate(F.max_pool2d(x, 4), scale_factor=4)], 1))
    traced = fxq.trace(model, torch.randn(1, 3, 16, 32), options=fxq.Options(dynamic_shapes=IMAGES))
    assert traced(torch.randn(2, 3, 24, 40)).shape == (2, 6, 24, 40)
    with pytest.raises(ConfigurationError, match="in steps of 4"):
        traced(torch.randn(1, 3, 18, 32))
    few: Any = ({0: BATCH, 1: Dim.AUTO, 2: Dim("height", min=16, max=20)},)
    assert fxq.trace(model, torch.randn(1, 3, 16, 32), options=fxq.Options(dynamic_shapes=few))(torch.randn(1, 3, 20, 32)).shape[2] == 20


def small_features(model: Any, x: Tensor) -> Tensor:
    """Features of a 16th of an image's sides, whose sizes are read, enlarged to the size of others."""
    y = model.first(x)
    z = F.max_pool2d(F.max_pool2d(y, 5, 4, 2), 5, 4, 2)
    _, _, height, width = z.shape
    return y + F.interpolate(z.flatten(2).relu().unflatten(2, (height, width)), y.shape[2:])


@pytest.mark.parametrize("example", [(64, 48), (96, 80), (33, 33)])
def test_small_features_have_another_size_at_each_size_of_the_trace(example: tuple[int, int]) -> None:
    sizes: Any = ({0: BATCH, 2: Dim("height", min=32, max=96), 3: Dim("width", min=32, max=80)},)
    model = Network(small_features, first=nn.Conv2d(3, 4, 3)).eval()
    traced = fxq.trace(model, torch.randn(1, 3, *example), options=fxq.Options(dynamic_shapes=sizes))
    for shape in ((1, 3, 32, 33), (2, 3, 51, 80), (1, 3, 96, 32)):
        x = torch.randn(shape)
        assert torch.equal(traced(x), model(x))


def test_a_size_that_is_written_down_is_fixed_or_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    model = Network(lambda _, x: x + torch.ones(16, 1))
    x = torch.randn(2, 3, 16, 8)
    with pytest.raises(TraceError, match="does not hold for every height"):
        fxq.trace(model, x, options=fxq.Options(dynamic_shapes=({0: BATCH, 2: HEIGHT},)))
    traced = fxq.trace(model, x, options=fxq.Options(dynamic_shapes=({0: BATCH, 2: Dim.AUTO, 3: Dim.AUTO},)))
    assert "size_2 of the inputs is fixed to 16" in caplog.text
    assert traced(torch.randn(1, 3, 16, 24)).shape == (1, 3, 16, 24)
    with pytest.raises(ConfigurationError, match="dimension 2 is fixed"):
        traced(torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize("example", [10, 60, 100])
def test_a_length_varies_up_to_the_end_of_a_table_of_positions(example: int) -> None:
    table = nn.Embedding(100, 4)
    model = Network(lambda _, x: x + table.weight[: x.shape[1]])
    traced = fxq.trace(model, torch.randn(2, example, 4), options=fxq.Options(dynamic_shapes=True))
    assert all(torch.equal(traced(x), model(x)) for x in (torch.randn(3, length, 4) for length in (1, 33, 64)))
    with pytest.raises(ConfigurationError, match=f"goes from 1 to {max(64, example)}"):
        traced(torch.randn(3, 101, 4))


def padded(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The mean of a sentence's words after a layer whose attention leaves out the padding."""
    seen = model.layer(model.words(ids), src_key_padding_mask=mask == 0)
    return model.head((seen * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def test_sizes_that_differ_in_a_list_of_batches_vary(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = written(padded, words=nn.Embedding(50, 8), layer=layer, head=nn.Linear(8, 3)).eval()
    batches = [dict(ids=drawn((2, length)), mask=torch.ones(2, length).tril(length - 4)) for length in (8, 5, 13)]
    result = fxq.quantize(model, [tuple(batch.values()) for batch in batches], "x86")
    assert result.verify(result.export(tmp_path / "words.onnx", style="exact"), batches)
    images = [torch.randn(2, 3, 16, width) for width in (16, 40, 600)]
    widths = fxq.quantize(nn.Conv2d(3, 4, 3), images, "bayes-e").integer
    assert widths(torch.randn(5, 3, 16, 600)).shape == (5, 4, 14, 598)  # up to the largest of the batches at least
    with pytest.raises(ConfigurationError, match="dimension 2 is fixed"):
        widths(torch.randn(5, 3, 8, 40))
    scaled = written(lambda model, x, factors: model.layer(x) * factors, layer=nn.Linear(4, 3))
    several = [(torch.randn(rows, steps, 4), torch.randn(3)) for rows, steps in ((3, 5), (2, 7))]  # the second has no batch, but 3 elements
    assert fxq.quantize(scaled, several, "x86").integer(*several[1]).shape == (2, 7, 3)
    with pytest.raises(CalibrationError, match="batch 1 does not fit"):
        fxq.quantize(nn.Conv2d(3, 4, 3), images, "bayes-e", options=fxq.Options(dynamic_shapes={}))


BODIES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a corner": (lambda m, x: m.first(x)[:, :, -1, -1], ""),
    "half": (lambda m, x: m.first(x)[:, :, : x.shape[2] // 2], ""),
    "concatenated": (lambda m, x: torch.cat([m.first(x), m.first(x).relu()], 2).tanh(), ""),
    "spread": (lambda m, x: m.first(x).std((2, 3)), "its number of elements varies"),
    "one mean": (lambda m, x: m.first(x).mean(), "over the batch"),
    "several windows": (lambda m, x: F.adaptive_max_pool2d(m.first(x), 2), "would run along the batch"),
}


@pytest.mark.parametrize("name", BODIES)
def test_parts_of_sizes_that_vary_are_integer_or_stay_in_float_with_a_reason(name: str, tmp_path: Path) -> None:
    body, because = BODIES[name]
    _, integer = compiled(Case(lambda: Network(body, first=nn.Conv2d(3, 4, 3)), ODD, IMAGES), "bayes-e")
    assert [layer.reason for layer in left_in_float(fxq.inspect.layers(integer)) if because not in layer.reason] == []
    if name == "several windows":
        with pytest.raises(ExportError, match=r"fix the sizes with fxq\.at_sizes"):
            fxq.export_onnx(integer, tmp_path / "model.onnx")
    else:
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [drawn(shape) for shape in ODD])


@pytest.mark.parametrize("length", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("size", [1, 3, 16, 31, 66])
def test_weights_of_sizes_that_vary_are_those_of_fixed_sizes(length: int, size: int) -> None:
    places = torch.arange(length).reshape(1, 1, -1)
    for mode in resize.NEAREST:
        nearest = varying.resize_nearest_to(places, [size], [None], mode != "nearest")
        assert tuple(nearest.flatten().tolist()) == resize._nearest(length, size, None, mode)
    for align_corners in (False, True):
        for bits, stepped in ((16, 0), (8, 16), (8, 8)):
            neighbours = (resize._stepped_neighbours if stepped else resize._neighbours)(length, size, None, align_corners, stepped or bits)
            weights = varying._matrix(length, size, None, align_corners, bits, stepped, torch.device("cpu"))
            assert torch.equal(weights, resize._weights(neighbours, length, bits, torch.device("cpu")))
