"""Recurrent layers as loops: the bits of all forms at every length, graphs that do not grow with the steps, training, files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import fxquant as fxq
from fxquant.accuracy.measure import Parts
from fxquant.accuracy.walk import Walk
from fxquant.backends.cpu import native
from fxquant.errors import ExportError
from fxquant.frontend.environment import OwnRandomNumbers
from fxquant.ir import loops
from fxquant.ir.graph import fact
from fxquant.ir.integer import qparams, set_qparams
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.primitives import loop
from tests.shared.contract import all_equal, assert_train_is_validate
from tests.shared.networks import Network

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")
compiler = pytest.mark.skipif(isinstance(native.chains_library(), str), reason="a C compiler was not found")
STEPS: Any = ({0: Dim("batch"), 1: Dim("steps", max=40)},)
LENGTHS = [(4, 7), (1, 1), (2, 2), (5, 40), (3, 13)]
# A function of the layer and its input, and the layer.
LAYERS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], nn.Module]]] = {
    "lstm": (lambda m, x: m.layer(x), lambda: nn.LSTM(6, 8, batch_first=True)),
    "stacked": (lambda m, x: m.layer(x)[0], lambda: nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True)),
    "projected": (lambda m, x: m.layer(x)[0], lambda: nn.LSTM(6, 8, proj_size=5, bias=False, batch_first=True)),
    "gru": (lambda m, x: m.layer(x), lambda: nn.GRU(6, 8, bidirectional=True, batch_first=True)),
    "tanh": (lambda m, x: m.layer(x)[0], lambda: nn.RNN(6, 8, batch_first=True)),
    "relu": (lambda m, x: m.layer(x)[0], lambda: nn.RNN(6, 8, nonlinearity="relu", batch_first=True)),
    "state": (lambda m, x: m.layer(x, x.mean(1)[None] * 0.5)[0], lambda: nn.GRU(6, 6, batch_first=True)),
    "last": (lambda m, x: m.layer(x)[1], lambda: nn.GRU(6, 8, batch_first=True)),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    forward, layer = LAYERS[name]
    return Network(forward, layer=layer()).eval()


def sequences(batch: int, steps: int) -> Tensor:
    return torch.randn(batch, steps, 6, generator=torch.Generator().manual_seed(steps))


def compiled(name: str, target: str, dynamic_shapes: Any = None, steps: int = 7) -> tuple[Any, Any]:
    prepared = fxq.prepare(network(name), sequences(4, steps), target=target, options=fxq.Options(dynamic_shapes=dynamic_shapes))
    fxq.calibrate(prepared, [sequences(4, steps), sequences(2, steps)])
    return prepared, fxq.convert(prepared)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "nash-e", "x86"])
def test_one_model_and_one_file_have_equal_bits_at_every_length(name: str, target: str, tmp_path: Path) -> None:
    prepared, integer = compiled(name, target, STEPS)
    loaded = [fxq.load(fxq.save(each, tmp_path / "model.fxq")) for each in (prepared, integer)]
    assert all(loops.bodies(each.graph) for each in (integer, *loaded))
    with pytest.raises(ExportError, match="at_sizes"):
        fxq.export.unrolled(integer)
    files = [fxq.export_onnx(integer, tmp_path / f"{style}.onnx", style=style) for style in ("exact", "fast")]
    sessions = [onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in files]
    for batch, steps in LENGTHS:
        x = sequences(batch, steps)
        result = integer(x)
        assert all_equal(prepared(x), result)
        assert all(all_equal(each(x), result) for each in loaded)
        for session in sessions:
            assert all_equal([torch.from_numpy(each) for each in session.run(None, {session.get_inputs()[0].name: x.numpy()})], result)
        assert all_equal(integer(x), result), "by its kernels"
        one_size = fxq.at_sizes(integer, x)
        assert all_equal(one_size(x), result)
        assert all_equal(fxq.export.unrolled(one_size)(x), result)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_forms_without_loops_write_the_steps_out(name: str, target: str, tmp_path: Path) -> None:
    _, integer = compiled(name, target, steps=4)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "exact.onnx", style="exact"), [(sequences(3, 4),)])
    flat = fxq.export.unrolled(integer)
    assert not loops.bodies(flat.graph)
    assert all_equal(flat(sequences(3, 4)), integer(sequences(3, 4)))
    fxq.export.export_segments(integer, tmp_path / "segments")
    assert all_equal(fxq.export.run_segments(tmp_path / "segments", sequences(3, 4)), tree_leaves(integer(sequences(3, 4))))
    fxq.export.export_c(integer, tmp_path / "model.c", batch_size=2)
    for opset, loops_in_file in ((11, 0), (21, len(loops.bodies(integer.graph)))):
        file = fxq.export_onnx(integer, tmp_path / "qdq.onnx", style="qdq", opset=opset)
        assert [node.op_type for node in onnx.load(str(file)).graph.node].count("Loop") == loops_in_file


def test_states_of_four_bits(tmp_path: Path) -> None:
    qconfig = fxq.QConfig(output=fxq.ActivationConfig(dtype="int4"))
    result = fxq.quantize(network("gru"), [sequences(4, 7)], target="nash-e", qconfig=qconfig)
    assert result.verify(result.export(tmp_path / "model.onnx"), [sequences(3, 7)])
    carry = next(node for node in result.integer.graph.nodes if node.target is loop.carry)
    set_qparams(carry, replace(qparams(carry), dtype="int8"))
    with pytest.raises(ExportError, match="carries another dtype"):
        fxq.save(result.integer, tmp_path / "model.fxq")


def test_nothing_grows_with_the_steps(tmp_path: Path) -> None:
    """The graphs of 5 and of 50 steps have equal nodes, and their files differ by that number and by the table of a cell's scale alone."""
    models = [compiled("lstm", "x86", steps=steps) for steps in (5, 50)]
    for short, long in zip(*models, strict=True):
        assert [node.name for node in short.graph.nodes] == [node.name for node in long.graph.nodes]
    files = [fxq.export_onnx(integer, tmp_path / f"{index}.onnx", style="exact") for index, (_, integer) in enumerate(models)]
    assert abs(files[0].stat().st_size - files[1].stat().st_size) < 1024
    assert [node.op_type for node in onnx.load(str(files[0])).graph.node].count("Loop") == 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("target", ["nash-e", "qnnpack", "x86"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_files_are_smaller_than_those_of_the_float_model(layer: type[nn.Module], target: str, tmp_path: Path) -> None:
    model, x = Network(lambda m, x: m.layer(x)[0], layer=layer(64, 64, batch_first=True)).eval(), torch.randn(2, 20, 64)
    torch.onnx.export(model, (x,), str(tmp_path / "float.onnx"), dynamo=False)
    integer = fxq.quantize(model, [x], target).integer
    for style in ("exact", "fast", "qdq"):
        file = fxq.export_onnx(integer, tmp_path / f"{style}.onnx", style=style)
        assert file.stat().st_size < (tmp_path / "float.onnx").stat().st_size


@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
def test_tracing_calls_as_many_operators_without_values_whatever_the_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, dispatch = list[int](), OwnRandomNumbers.__torch_dispatch__

    def counted(self: OwnRandomNumbers, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts[-1] += any(isinstance(each, FakeTensor) for each in args)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(OwnRandomNumbers, "__torch_dispatch__", counted)
    for steps in (4, 40):
        counts.append(0)
        fxq.trace(network(name), sequences(4, steps))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_calibration_takes_as_many_passes_whatever_the_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator outside of the loop is called equally often, and each one in it once for each further step."""
    counts: list[dict[str, int]] = []
    forward = QuantizedOperator.forward

    def counted(self: QuantizedOperator, *args: Any, **kwargs: Any) -> Tensor:
        counts[-1][self.name] = counts[-1].get(self.name, 0) + 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(QuantizedOperator, "forward", counted)
    for steps in (4, 10):
        counts.append({})
        prepared, _ = compiled(name, "bayes-e", steps=steps)
    inside = {node.name for nodes in loops.bodies(prepared.graph).values() for node in nodes}
    outside = counts[0].keys() - inside
    assert {each: counts[0][each] for each in outside} == {each: counts[1][each] for each in outside}
    assert all(counts[0][each] * 9 == counts[1][each] * 3 for each in counts[0].keys() & inside)
    assert max(counts[0][each] for each in outside) <= 10 * 2, "ten passes of two batches"


@compiler
@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "x86"])
def test_a_prepared_loop_runs_at_once_with_the_bits_of_its_steps(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients its operators are not called; with a hook, or a weight that was changed, they are, or the bits change with it."""
    prepared, _ = compiled(name, target, STEPS)
    fxq.set_state(prepared, "validate")
    x, calls = sequences(3, 33), list[str]()
    with torch.no_grad():
        at_once = prepared(x)
        nodes = next(iter(loops.bodies(prepared.graph).values()))
        carry = quantized_operators(prepared)[next(node.name for node in nodes if node.name in quantized_operators(prepared))]
        handle = carry.register_forward_hook(lambda *_: calls.append("step"))
        assert all_equal(prepared(x), at_once)
        handle.remove()
        assert all_equal(prepared(x), at_once)
        assert len(calls) == 32
        torch._foreach_mul_([*prepared.parameters()], 0.75)
        changed = prepared(x)
        monkeypatch.setattr(loops, "AT_ONCE", [])
        assert all_equal(prepared(x), changed)
        assert not all_equal(changed, at_once)


def test_a_walk_has_the_values_of_all_steps() -> None:
    prepared, _ = compiled("lstm", "bayes-e")
    (nodes,) = loops.bodies(prepared.graph).values()
    linear = next(each for each in nodes if each.op == "call_module" and quantized_operators(prepared)[each.name].operator.name == "linear")
    (values,) = Walk(prepared, [[sequences(4, 7)]], exact=True).at([linear])
    assert values[linear].shape == (4 * 6, fact(linear).shape[-1])
    recorded = next(iter(fxq.inspect.record(prepared, [sequences(4, 7)], [linear.name], real=True, state="validate")))
    assert torch.equal(recorded[linear.name], values[linear])


def test_what_a_loop_gives_is_one_part_of_the_outputs() -> None:
    prepared, _ = compiled("tanh", "bayes-e")
    assert [label.numel() for label in Parts(prepared, [sequences(4, 7)]).labels] == [1]


@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_a_loop_trains(target: str) -> None:
    torch.manual_seed(0)
    head = Network(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=nn.LSTM(6, 12, batch_first=True), head=nn.Linear(12, 1))
    prepared = fxq.prepare(head, sequences(4, 6), target=target, options=fxq.Options(dynamic_shapes=STEPS))
    fxq.calibrate(prepared, [sequences(16, 6)])
    fxq.set_state(prepared.train(), "train")
    optimizer, losses = torch.optim.Adam(prepared.parameters(), 1e-2), []
    for x in [sequences(16, steps) for steps in (4, 5, 6)] * 10:
        losses.append((prepared(x) - x[..., :1].sum(1)).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    assert_train_is_validate(prepared, sequences(3, 9))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_quantized_at_run_time_is_written_out_in_files(name: str, tmp_path: Path) -> None:
    """Results have memory of their own, unlike what a step of the loop alone reads."""
    options = fxq.Options(dynamic_shapes=STEPS)
    prepared = fxq.prepare(network(name), sequences(4, 5), "x86", fxq.QConfig(dynamic=True), options=options)
    integer = fxq.convert(prepared)
    fxq.set_state(prepared, "validate")
    with torch.no_grad():
        assert all_equal(prepared(sequences(4, 20)), integer(sequences(4, 20)))
    one_size = fxq.at_sizes(integer, x := sequences(4, 9))
    first, flat = tree_leaves(integer(x)), fxq.export.unrolled(one_size)
    assert all_equal(tree_leaves(integer(-x)), tree_leaves(flat(-x)))
    assert all_equal(first, tree_leaves(flat(x)))
    assert fxq.verify(one_size, fxq.export_onnx(one_size, tmp_path / "dynamic.onnx"), [(x,)])
