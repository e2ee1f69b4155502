"""Every form of a model refuses an input or computes it exactly, for every input that can be given: floats, integers, booleans."""

import copy
import functools
import itertools
import operator
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
from fxquant.ops import OPERATORS
from tests.shared import contract
from tests.shared.contract import all_equal, compiled, flat, graph_values
from tests.shared.networks import Network, held, members, sqnr

SHAPE = (3, 6, 8)


@members(lambda norm: dict(
    left=nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()), right=nn.Conv2d(3, 4, 1),
    up=nn.Upsample(scale_factor=2, mode="bilinear"), norm=norm, head=nn.Linear(4, 5),
))  # fmt: skip
def Pair(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two images in; convolutions, a table, an interpolation, a float operator between integer ones, two results out."""
    both = self.up(self.left(x) + self.right(y))
    return self.head(self.norm(both).mean((2, 3))), both


def images(batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed))


@functools.cache
def result() -> fxq.results.Result:
    torch.manual_seed(0)
    return fxq.quantize(Pair(nn.CELU()).eval(), [(images(), images(seed=1))])


@functools.cache
def session() -> Any:
    """Run the model in onnxruntime, without its second result, which does not depend on the float operator."""
    torch.manual_seed(0)
    integer = fxq.quantize(Pair(nn.Identity()).eval(), [(images(), images(seed=1))]).integer
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
    """The bits equal the integer model's, and up to the float operator also the exported file's in onnxruntime."""
    x = {**ACCEPTED, **NOT_FINITE}[kind]()
    y = images(len(x), seed=2)
    plain = x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    actual = form(name)(x, y)
    with torch.no_grad():
        assert all_equal(actual, result().integer(plain, y))
    assert all(bool(torch.isfinite(value).all()) for value in flat(actual))
    if len(x):
        both = session().run(None, {"x": plain.numpy(), "y": y.numpy()})[1]
        assert torch.equal(torch.from_numpy(both), actual[1])


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("name", IN_FLOAT)
def test_an_input_in_float_is_computed_as_by_the_float_model(name: str, kind: str) -> None:
    x = ACCEPTED[kind]()
    y = images(len(x), seed=2)
    if name == "calibrate" and (len(x) == 0 or kind == "huge"):
        with pytest.raises(fxq.errors.CalibrationError):
            FORMS[name]()(x, y)
        return
    for actual, expected in zip(flat(form(name)(x, y)), flat(result().float(x, y)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)  # 1e38 overflows in the float model


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
    "batches": (lambda: (images(4), images(1)), "its batch is 1\n  because  input x has a batch of 4, and all inputs share one\n"),
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
    x = torch.randn(4, 6)
    integer = fxq.quantize(nn.Linear(6, 3), [x], "nash-e").integer
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
    model = Network(lambda _, x: OVER_THE_BATCH[name](x))
    outcome = fxq.quantize(model, [torch.randn(8, 6)], "nash-e")
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
    model = Network(lambda m, x: function(m.layer(x)), layer=nn.Linear(6, 6)).eval()
    outcome = fxq.quantize(model, [torch.randn(8, 6)], "nash-e")
    for batch in (1, 2, 3, 5, 20, 21, 40):
        x = torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch))
        if smallest <= batch <= (largest or batch):
            with torch.no_grad():
                expected, actual = model(x), outcome.prepared(x)
            assert torch.equal(actual, outcome.integer(x))
            assert actual.shape == expected.shape
            assert actual.numel() == 0 or float((actual - expected).abs().max()) < 0.2
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
    model = Network(lambda m, x: m.layer(x)[-20:].relu(), layer=nn.Linear(6, 6)).eval()
    outcome = fxq.quantize(model, [torch.randn(8, 6)], "nash-e")
    fxq.save(outcome.integer, tmp_path / "model.fxq")
    with pytest.raises(fxq.errors.ConfigurationError, match="up to a batch of 20"):
        fxq.load(tmp_path / "model.fxq")(torch.randn(21, 6))
    fxq.export_onnx(outcome.integer, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x = torch.randn(30, 6)
    output = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert torch.equal(torch.from_numpy(output), outcome.integer(x[-20:]))


Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # of numbers, of others, of narrow ones, and of booleans

# By the operator that each becomes.
OF_WHOLE_NUMBERS: dict[str, list[Function]] = {
    "whole_add": [lambda x, y, n, m: x + y, lambda x, y, n, m: torch.add(x, 3, alpha=2), lambda x, y, n, m: n + n],
    "whole_sub": [lambda x, y, n, m: 1 - x, lambda x, y, n, m: -y, lambda x, y, n, m: ~x, lambda x, y, n, m: torch.rsub(n, 7)],
    "whole_mul": [lambda x, y, n, m: x * y, lambda x, y, n, m: n * 5, lambda x, y, n, m: x.square(), lambda x, y, n, m: m * 3],
    "whole_floor_divide": [lambda x, y, n, m: x // 3, lambda x, y, n, m: torch.div(x, y.abs() + 1, rounding_mode="floor")],
    "whole_trunc_divide": [lambda x, y, n, m: torch.div(x, -3, rounding_mode="trunc")],
    "whole_remainder": [lambda x, y, n, m: x % -3, lambda x, y, n, m: x % (y.abs() + 1), lambda x, y, n, m: n % 7],
    "whole_maximum": [lambda x, y, n, m: torch.maximum(x, y)],
    "whole_minimum": [lambda x, y, n, m: torch.minimum(n, n * 2)],
    "whole_and": [lambda x, y, n, m: x & y, lambda x, y, n, m: n & -4, lambda x, y, n, m: torch.bitwise_and(x, 6)],
    "whole_or": [lambda x, y, n, m: x | y, lambda x, y, n, m: n | 3],
    "whole_xor": [lambda x, y, n, m: x ^ y, lambda x, y, n, m: x.bitwise_xor(-5)],
    "whole_abs": [lambda x, y, n, m: x.abs()],
    "whole_clamp": [lambda x, y, n, m: x.clamp(-2, 5), lambda x, y, n, m: torch.clamp(x, max=y), lambda x, y, n, m: x.relu()],
    "whole_pow": [lambda x, y, n, m: x**3],
    **{
        f"whole_{side}": [
            lambda x, y, n, m, side=side: getattr(operator, side)(x, 2),
            lambda x, y, n, m, side=side: getattr(operator, f"i{side}")(x.clone(), 3),
            lambda x, y, n, m, long=long: getattr(torch, f"bitwise_{long}")(n, 1),
            *[
                lambda x, y, n, m, method=method: getattr(x * 3, method)(1)
                for method in (f"__{side}__", f"__i{side}__", f"bitwise_{long}", f"bitwise_{long}_")
            ],
        ]
        for side, long in (("lshift", "left_shift"), ("rshift", "right_shift"))
    },
    **{
        f"whole_{name}": [
            lambda x, y, n, m, name=name: getattr(torch, name)(x, y),
            lambda x, y, n, m, name=name: getattr(torch, name)(n, 2.5),
        ]
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "whole_where": [lambda x, y, n, m: torch.where(x > 2, x, 0), lambda x, y, n, m: n.masked_fill(m, 9)],
    "whole_sum": [lambda x, y, n, m: x.sum(1), lambda x, y, n, m: m.sum((1, 2)), lambda x, y, n, m: n.sum(-1, keepdim=True)],
    "whole_cumsum": [lambda x, y, n, m: x.cumsum(-1), lambda x, y, n, m: m.long().cumsum(1) - 1],
    "whole_argmax": [lambda x, y, n, m: x.argmax(-1)],
    "whole_cat": [lambda x, y, n, m: torch.cat((x, y), 1), lambda x, y, n, m: torch.stack((m, x > 0), -1)],
    "to_integer": [
        *[lambda x, y, n, m, cast=cast: getattr(x * 40, cast)() for cast in ("int", "short", "char", "byte", "long")],
        *[lambda x, y, n, m: m.long(), lambda x, y, n, m: n.transpose(1, 2), lambda x, y, n, m: n.flatten(1)[:, ::2]],
    ],
    "logical_and": [lambda x, y, n, m: torch.logical_and(x, n), lambda x, y, n, m: m * (x > 0)],
    "logical_or": [lambda x, y, n, m: torch.logical_or(m, y), lambda x, y, n, m: m | True],
    "logical_not": [lambda x, y, n, m: torch.logical_not(x), lambda x, y, n, m: ~m],
    "ne": [],
    "any": [lambda x, y, n, m: x.any(1)],
}
LARGE = 2**40


def exact() -> nn.Module:
    functions = [function for functions in OF_WHOLE_NUMBERS.values() for function in functions]
    return Network(lambda _, *inputs: [function(*inputs) for function in functions]).eval()


def inputs_of(count: int, large: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    most = LARGE if large else 9
    numbers = [torch.randint(-most, most + 1, (count, 3, 4), generator=generator) for _ in range(2)]
    narrow = torch.randint(-128, 128, (count, 3, 4), generator=generator, dtype=torch.int8)
    return *numbers, narrow, torch.rand(count, 3, 4, generator=generator) < 0.5


@pytest.mark.nightly
def test_arithmetic_on_whole_numbers_is_pytorchs_in_every_form(tmp_path: Path) -> None:
    model, batches = exact(), [inputs_of(4), inputs_of(2), inputs_of(3, large=True)]
    prepared, integer = compiled(model, batches[:1])
    assert not [layer.name for layer in fxq.inspect.layers(prepared) if not layer.integer]
    for batch in batches:
        wanted = model(*batch)
        for form in (prepared, integer):
            results = form(*batch)
            assert all(one.dtype == other.dtype for one, other in zip(contract.flat(wanted), contract.flat(results), strict=True))
            assert all_equal(wanted, results)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", batches)
    before = fxq.export_onnx(integer, tmp_path / "before.onnx", opset=17)  # without operators on bits
    report = fxq.verify(integer, before, batches)
    assert report, str(report)


def test_each_becomes_its_operator() -> None:
    prepared = fxq.prepare(exact(), inputs_of(4), until="canonical.rewrite")
    result = {OPERATORS[node.target].name for node in prepared.graph.nodes if node.target in OPERATORS}
    assert result >= OF_WHOLE_NUMBERS.keys() - {"ne"}


def casts(_: Any, x: Tensor, image: Tensor) -> Any:
    """Bytes become floats, and floats integers."""
    pixels = image.permute(0, 3, 1, 2).float() / 255 - 0.5
    rounded = [cast(x.round()) for cast in (Tensor.long, Tensor.int, Tensor.short, Tensor.char)]
    real = [x.half(), x.to(torch.float64), x.half().float() * 2, x.bfloat16().float() + 1, (x > 0).sum(1, keepdim=True) * x]
    return [pixels, x.long(), x.abs().byte(), x.bool(), x.sign().long(), *rounded, *real, (x > 0).sum(1).float() / 6]


def integer_contract(model: nn.Module, batches: list[tuple[Tensor, ...]], path: Path, target: str = "bayes-e", qconfig: Any = None) -> Any:
    """Hold a model of integer operators alone to the contract; return the float results and the integer model's of the second batch."""
    prepared, integer = held(model, batches, path, target, qconfig)
    assert not [layer.name for layer in fxq.inspect.layers(prepared) if not layer.integer and not layer.boundary]
    return zip(model(*batches[1]), integer(*batches[1]), strict=True)


def peaks(_: Any, x: Tensor) -> Any:
    """Places of the largest elements, decoded to columns and rows as by HRNet and CenterNet, and otherwise."""
    width, place, best = x.shape[3], x.flatten(2).argmax(2), torch.topk(x.flatten(1), 3)[1]
    inside, real = best % (x.shape[2] * width), place.float()
    return [
        torch.stack((real % width, torch.floor(real / width)), -1) * 4,
        torch.cat((torch.stack(((inside % width).int().float(), (inside / width).int().float()), 2), best[..., None].float()), 2),
        *(
            place / width,
            torch.fmod(real, width),
            real // width,
            place.to(torch.float32) * 2.0 - 0.5,
            x.flatten(2).max(2)[1].float().trunc(),
        ),
        *(torch.where(x.amax((2, 3)) > 0.5, real, -1.0) * 1.5, (-x).flatten(2).argmin(2).type(torch.float32).clamp(max=70) / width),
    ]


@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
def test_an_index_that_becomes_a_number_stays_exact(target: str, tmp_path: Path) -> None:
    x = torch.rand(4, 3, 16, 12, generator=torch.Generator().manual_seed(0)) * 0.1
    for item, channel in itertools.product(range(4), range(3)):
        x[item, channel, (5 * item + channel) % 16, (7 * channel + 3 * item) % 12] = 1 + channel + 0.1 * item
    model = Network(peaks)
    _, integer = held(model, [(x,), (x,)], tmp_path / "model.onnx", target)
    assert all(map(torch.equal, integer(x), model(x)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("bayes-e", "int8"), ("nash-e", "int16"), ("x86", "uint8")])
def test_casts_hold_the_contract(target: str, dtype: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def batch(count: int) -> tuple[Tensor, ...]:
        images = torch.randint(0, 256, (count, 6, 6, 3), generator=generator, dtype=torch.uint8)
        return torch.randn(count, 3, 6, 6, generator=generator) * 3, images

    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype))
    for wanted, actual in integer_contract(Network(casts), [batch(4), batch(3)], tmp_path / "model.onnx", target, qconfig):
        assert wanted.dtype == actual.dtype
        if wanted.dtype.is_floating_point:
            assert sqnr(wanted, actual) > 22
        else:
            assert float((wanted == actual).double().mean()) > 0.93


def buckets(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Distances of positions that are given, in buckets that grow with them: the logarithm of 0 is passed over."""
    apart = (positions.unsqueeze(-2) - positions.unsqueeze(-1)).abs()
    far = 4 + (torch.log(apart.float() / 4) / 3.0 * 4).to(torch.long)
    far = torch.min(far, torch.full_like(far, 7))
    return model.linear(x) + model.biases(torch.where(apart < 4, apart, far)).sum(2)


def test_whole_numbers_computed_from_whole_ones_are_those_of_the_model(tmp_path: Path) -> None:
    model = Network(buckets, biases=nn.Embedding(8, 4), linear=nn.Linear(4, 4)).eval()
    batches = [(torch.randn(3, 5, 4), torch.randint(0, 200, (3, 5))) for _ in range(2)]
    prepared, integer = contract.compiled(model, batches)
    assert fxq.verify(prepared, integer, batches)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), batches)
    wanted, actual = model(*batches[0]), integer(*batches[0])
    assert sqnr(wanted, actual) > 30.5  # in another bucket it would be the whole of an embedding
    assert "before they are truncated" in fxq.explain(prepared)
