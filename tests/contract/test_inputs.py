"""Every form of a model refuses an input or computes it exactly, for every input that can be given."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.ir.integer import notes
from tests.shared.contract import all_equal, flat, graph_values
from tests.shared.networks import Network

SHAPE = (3, 6, 8)


class Pair(nn.Module):
    """Two images in; convolutions, a table, an interpolation, a float operator between integer ones, two results out."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
        self.right = nn.Conv2d(3, 4, 1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.norm = norm
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        both = self.up(self.left(x) + self.right(y))
        return self.head(self.norm(both).mean((2, 3))), both


def images(batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


@functools.cache
def result() -> fxq.results.Result:
    torch.manual_seed(0)
    return fxq.quantize(Pair(nn.CELU()).eval(), [(images(), images(seed=1))], show_progress=False)


@functools.cache
def session() -> Any:
    """The same model in onnxruntime; its second result does not depend on the float operator, so it is left out."""
    torch.manual_seed(0)
    integer = fxq.quantize(Pair(nn.Identity()).eval(), [(images(), images(seed=1))], show_progress=False).integer
    with tempfile.TemporaryDirectory() as directory:
        path = fxq.export_onnx(integer, Path(directory) / "model.onnx")
        return onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])


def in_state(state: fxq.State, training: bool = False) -> fx.GraphModule:
    prepared = copy.deepcopy(result().prepared)
    fxq.set_state(prepared, state)
    if training:
        fxq.freeze(prepared)
    return prepared.train(training)


def loaded(model: fx.GraphModule) -> fx.GraphModule:
    with tempfile.TemporaryDirectory() as directory:
        return fxq.load(fxq.save(model, Path(directory) / "model.fxq"))


FORMS: dict[str, Callable[[], fx.GraphModule]] = {
    "traced": lambda: fxq.trace(result().float, (images(), images())),
    "until": lambda: fxq.prepare(result().float, (images(), images()), until="activation.fuse"),
    "float": lambda: in_state(fxq.State.FLOAT),
    "calibrate": lambda: in_state(fxq.State.CALIBRATE),
    "validate": lambda: in_state(fxq.State.VALIDATE),
    "evaluated": lambda: in_state(fxq.State.TRAIN),
    "training": lambda: in_state(fxq.State.TRAIN, training=True),
    "integer": lambda: result().integer,
    "loaded traced": lambda: loaded(fxq.trace(result().float, (images(), images()))),
    "loaded prepared": lambda: loaded(in_state(fxq.State.VALIDATE)),
    "loaded integer": lambda: loaded(result().integer),
    "copied prepared": lambda: copy.copy(in_state(fxq.State.VALIDATE)),
    "copied integer": lambda: copy.deepcopy(result().integer),
    "pickled prepared": lambda: pickle.loads(pickle.dumps(in_state(fxq.State.VALIDATE))),
    "pickled integer": lambda: pickle.loads(pickle.dumps(result().integer)),
    "replica": lambda: result().integer._replicate_for_data_parallel(),
}
COMPUTES = ("validate", "evaluated", "training", "integer", "loaded prepared", "loaded integer", "copied prepared")
IN_FLOAT = ("traced", "until", "float", "calibrate", "loaded traced")


@functools.cache
def form(name: str) -> fx.GraphModule:
    return FORMS[name]()


# ---- what is computed ---------------------------------------------------------------------------------------------------


def strided() -> Tensor:
    return images(8)[::2, :, :, :].transpose(2, 3).contiguous().transpose(2, 3)


def with_values(*values: float) -> Tensor:
    value = images()
    for index, number in enumerate(values):
        value[index % 4, 0, index, 1] = number
    return value


ACCEPTED: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: images().to(memory_format=torch.channels_last),
    "strided": strided,
    "every second column": lambda: torch.randn(4, 3, 6, 16)[..., ::2],
    "permuted": lambda: torch.randn(8, 6, 3, 4).permute(3, 2, 1, 0),
    "expanded": lambda: images(1).expand(4, *SHAPE),
    "expanded over channels": lambda: torch.randn(4, 1, 6, 8).expand(4, *SHAPE),
    "overlapping": lambda: torch.randn(400).as_strided((4, *SHAPE), (24, 12, 3, 1)),
    "offset": lambda: torch.randn(5 + 4 * 3 * 6 * 8)[5:].view(4, *SHAPE),
    "negated": lambda: torch.randn(4, *SHAPE, dtype=torch.complex64).conj().imag,
    "flipped": lambda: torch.from_numpy(images().numpy()[:, :, ::-1].copy()),
    "requires a gradient": lambda: images().requires_grad_(),
    "a parameter": lambda: nn.Parameter(images()),
    "one": lambda: images(1),
    "seven": lambda: images(7),
    "none": lambda: images(0),
    "huge": lambda: with_values(1e38, -1e38, 3e-42, -0.0),
}
NOT_FINITE: dict[str, Callable[[], Tensor]] = {
    "NaN": lambda: with_values(float("nan")),
    "infinite": lambda: with_values(float("inf"), float("-inf")),
    "NaN of another pattern": lambda: with_values(0.0).view(torch.int32).bitwise_or(0x7FC12345).view(torch.float32),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [*ACCEPTED, *NOT_FINITE])
@pytest.mark.parametrize("name", COMPUTES)
def test_an_input_is_computed_exactly(name: str, kind: str) -> None:
    """The bits are the integer model's, and up to the float operator those of the exported file in onnxruntime."""
    x = {**ACCEPTED, **NOT_FINITE}[kind]()
    y = images(len(x), seed=2)
    plain = x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    found = form(name)(x, y)
    with torch.no_grad():
        assert all_equal(found, result().integer(plain, y))
    assert all(bool(torch.isfinite(value).all()) for value in flat(found))
    if len(x):
        both = session().run(None, {"x": plain.numpy(), "y": y.numpy()})[1]
        assert torch.equal(torch.from_numpy(both), found[1])


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("name", IN_FLOAT)
def test_an_input_in_float_is_computed_as_by_the_float_model(name: str, kind: str) -> None:
    x = ACCEPTED[kind]()
    y = images(len(x), seed=2)
    if name == "calibrate" and (len(x) == 0 or kind == "huge"):
        with pytest.raises(fxq.errors.CalibrationError):
            FORMS[name]()(x, y)
        return
    for found, expected in zip(flat(form(name)(x, y)), flat(result().float(x, y)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)  # 1e38 overflows in the float model


@pytest.mark.parametrize("kind", [*NOT_FINITE, "none"])
@pytest.mark.parametrize("state", [fxq.State.CALIBRATE, fxq.State.TRAIN])
def test_what_observes_refuses_what_is_not_finite_or_empty(state: fxq.State, kind: str) -> None:
    prepared = copy.deepcopy(result().prepared).train()
    fxq.set_state(prepared, state)
    x = {**NOT_FINITE, **ACCEPTED}[kind]()
    statistics = prepared.get_submodule("left.1").running_mean.clone()
    with pytest.raises(fxq.errors.CalibrationError):
        prepared(x, images(len(x)))
    assert torch.equal(prepared.get_submodule("left.1").running_mean, statistics)


def test_a_strided_input_has_the_gradient_of_a_contiguous_one() -> None:
    gradients = []
    for x in (strided(), strided().contiguous()):
        x.requires_grad_()
        sum(value.sum() for value in flat(form("training")(x, images()))).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


# ---- what is refused ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "rank": (lambda: (images()[0], images()), "input x does not fit the graph: it has 3 dimensions"),
    "scalar": (lambda: (torch.tensor(1.0), images()), "it has 0 dimensions"),
    "height": (lambda: (images()[:, :, :4], images()), "dimension 2 has size 4"),
    "width": (lambda: (torch.cat([images()] * 4, 3), images()), "dimension 3 has size 32"),
    "channels": (lambda: (images()[:, :1], images()), "dimension 1 has size 1"),
    "no height": (lambda: (images()[:, :, :0], images()), "dimension 2 has size 0"),
    "batches": (lambda: (images(4), images(1)), "input y does not fit the graph: its batch is 1"),
    **{
        str(dtype).removeprefix("torch."): (lambda dtype=dtype: (images().to(dtype), images()), f"its type is {dtype}")
        for dtype in (
            torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64
        )
    },
    "meta": (lambda: (images().to("meta"), images()), "it is a meta tensor"),
    "sparse": (lambda: (images().to_sparse(), images()), "it is a sparse_coo tensor"),
    "nested": (lambda: (torch.nested.nested_tensor([images()[0], images()[1]]), images()), "it is a nested tensor"),
    "quantized": (lambda: (torch.quantize_per_tensor(images(), 0.1, 0, torch.qint8), images()), "it is a quantized tensor"),
    "numpy": (lambda: (images().numpy(), images()), "it is a numpy.ndarray"),
    "number": (lambda: (1.0, images()), "it is a float"),
    "nothing": (lambda: (None, images()), "it is a NoneType"),
    "list": (lambda: (images().tolist(), images()), "it is a list"),
    "too few": (lambda: (images(),), "missing a required argument: 'y'"),
    "too many": (lambda: (images(), images(), images()), "too many positional arguments"),
    "none at all": (lambda: (), "missing a required argument: 'x'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_an_input_is_refused(kind: str) -> None:
    make, text = REFUSED[kind]
    for name in FORMS:
        with pytest.raises(fxq.errors.ConfigurationError) as caught:
            form(name)(*make())
        assert text in str(caught.value), name
        assert caught.value.because
        assert caught.value.remedy


@pytest.mark.parametrize("name", FORMS)
def test_inputs_by_name(name: str) -> None:
    model, x, y = form(name), images(), images(seed=1)
    assert all_equal(model(x, y=y), model(x, y))
    assert all_equal(model(y=y, x=x), model(x, y))
    wrong = (({"z": x}, "missing a required argument"), ({"x": x, "y": y}, "multiple values for argument 'x'"))
    for arguments, text in wrong:
        with pytest.raises(fxq.errors.ConfigurationError, match=text):
            model(x, **arguments)


@pytest.mark.filterwarnings("ignore")
def test_an_input_on_another_device_is_refused() -> None:
    """There is one device here, so the model is put on the one without values."""
    for name in ("validate", "integer", "traced"):
        moved = copy.deepcopy(form(name)).to("meta")
        with pytest.raises(fxq.errors.ConfigurationError, match="it is on cpu") as caught:
            moved(images(), images())
        assert caught.value.remedy == "move one to the other: x.to('meta'), or model.to('cpu')"


def test_a_compiled_model_checks_its_inputs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    integer = fxq.quantize(nn.Linear(6, 3), [x], "nash-e", show_progress=False).integer
    with torch.no_grad():
        assert torch.equal(torch.compile(integer, backend="eager", fullgraph=True)(x), integer(x))
        with pytest.raises(fxq.errors.ConfigurationError, match="dimension 1 has size 5"):
            torch.compile(integer, backend="eager")(x[:, :5])
    torch._dynamo.reset()


# ---- E4: what is proved is proved for every batch size -------------------------------------------------------------------


OVER_THE_BATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0), "sum": lambda x: x.sum((0, 1)), "mean of everything": lambda x: x.mean(),
    "sum of everything": lambda x: x.sum(), "product": lambda x: x.t() @ x, "bmm": lambda x: torch.bmm(x.t()[None], x[None]),
    "einsum": lambda x: torch.einsum("bi,bj->ij", x, x), "linear": lambda x: nn.functional.linear(x.t(), x.t()),
    "flattened": lambda x: x.reshape(1, -1).sum(1), "halves": lambda x: x.reshape(2, -1, 6).sum(1),
    "moved": lambda x: x.unsqueeze(0).transpose(1, 2).mean(-1), "window": lambda x: nn.functional.avg_pool1d(x.t().unsqueeze(0), 2),
    "all windows": lambda x: nn.functional.adaptive_avg_pool1d(x.t().unsqueeze(0), 1), "cumulated": lambda x: x.cumsum(0),
    "largest": lambda x: x.amax(0), "norm": lambda x: x.norm(dim=0),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_what_reduces_the_batch_is_not_integer_or_is_proved_for_every_batch(name: str) -> None:
    """An accumulator is proved before the batch is known: one that grows with it must stay in float."""
    torch.manual_seed(0)
    model = Network(lambda _, x: OVER_THE_BATCH[name](x))
    outcome = fxq.quantize(model, [torch.randn(8, 6)], "nash-e", show_progress=False)
    integer = outcome.integer
    proved = {node.name: notes(node)["accumulator_bits"] for node in integer.graph.nodes if "accumulator_bits" in notes(node)}
    large = torch.full((200_000, 6), 100.0)
    values = graph_values(integer, large)
    for node in integer.graph.nodes:
        bits = proved.get(node.meta.get("origin"))
        if bits is not None and node.name in values and not values[node.name].is_floating_point():
            assert int(values[node.name].long().abs().max()) < 2 ** (bits - 1), f"{node.name} exceeds what was proved"
    with torch.no_grad():
        assert all_equal(outcome.prepared(large[:1000]), integer(large[:1000]))


# ---- what cuts the batch off at a fixed place ----------------------------------------------------------------------------

CUT: dict[str, tuple[Callable[[Tensor], Tensor], int, int | None]] = {
    "first": (lambda x: x[:2].relu(), 2, None), "without the first": (lambda x: x[1:].relu(), 1, None),
    "all but three": (lambda x: x[3:].relu(), 3, None), "at most twenty": (lambda x: x[:20].relu(), 1, 20),
    "the last twenty": (lambda x: x[-20:].sum(0), 1, 20), "between": (lambda x: x[2:20].relu(), 2, 20),
    "narrow": (lambda x: x.narrow(0, 1, 2).relu(), 3, None), "split": (lambda x: x.split(20)[0].relu(), 1, 20),
    "halves": (lambda x: x.chunk(2)[0].relu(), 1, None), "diagonal": (lambda x: torch.diagonal(x[:, :3]).relu(), 3, None),
    "topk": (lambda x: x.topk(3, 0)[0], 3, None), "everything": (lambda x: x[:].relu(), 1, None),
    "window": (lambda x: nn.functional.max_pool1d(x.t()[None], 3, 1), 3, None), "a column": (lambda x: x[:, :2].relu(), 1, None),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", CUT)
def test_a_batch_that_is_cut_off_is_computed_where_its_shapes_hold_and_refused_elsewhere(name: str) -> None:
    function, smallest, largest = CUT[name]
    torch.manual_seed(0)
    model = Network(lambda m, x: function(m.layer(x)), layer=nn.Linear(6, 6)).eval()
    outcome = fxq.quantize(model, [torch.randn(8, 6)], "nash-e", show_progress=False)
    for batch in (1, 2, 3, 5, 20, 21, 40):
        x = torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch))
        if smallest <= batch <= (largest or batch):
            with torch.no_grad():
                expected, found = model(x), outcome.prepared(x)
            assert torch.equal(found, outcome.integer(x))
            assert found.shape == expected.shape
            assert found.numel() == 0 or float((found - expected).abs().max()) < 0.2
        else:
            for form in (outcome.prepared, outcome.integer, copy.deepcopy(outcome.integer)):
                with pytest.raises(fxq.errors.ConfigurationError, match="its batch is"):
                    form(x)


def test_an_example_beyond_what_the_shapes_allow_is_refused_with_its_line() -> None:
    with pytest.raises(fxq.errors.TraceError, match="too small") as error:
        fxq.trace(Network(lambda _, x: x[:2].relu()), torch.randn(1, 6))
    assert "x[:2]" in str(error.value)
    with pytest.raises(fxq.errors.TraceError, match="too large"):
        fxq.trace(Network(lambda _, x: x[:20].relu()), torch.randn(30, 6))
    fxq.trace(Network(lambda _, x: x[:2].relu()), torch.randn(1, 6), options=fxq.Options(dynamic_shapes={}))


def test_limits_of_the_batch_are_saved_and_the_file_cuts_off_like_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Network(lambda m, x: m.layer(x)[-20:].relu(), layer=nn.Linear(6, 6)).eval()
    outcome = fxq.quantize(model, [torch.randn(8, 6)], "nash-e", show_progress=False)
    fxq.save(outcome.integer, tmp_path / "model.fxq")
    with pytest.raises(fxq.errors.ConfigurationError, match="up to a batch of 20"):
        fxq.load(tmp_path / "model.fxq")(torch.randn(21, 6))
    fxq.export_onnx(outcome.integer, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x = torch.randn(30, 6)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert torch.equal(torch.from_numpy(found), outcome.integer(x[-20:]))
