"""Files of `save` were loaded and compared, and results of `convert` are proved: by one function, for every file."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.files.check import check, compiled
from fxquant import backends, serialization
from fxquant.ir.integer import operation, set_operation
from fxquant.lowering import lowering
from fxquant.primitives import accumulate, product
from fxquant.serialization import pack
from fxquant.serialization.document import write_model
from tests.shared.networks import Network, members

Forward = Callable[[Any, Tensor], Tensor]


@members(lambda run: dict(
    token=nn.Parameter(torch.randn(1, 1, 8)), places=nn.Parameter(torch.randn(1, 5, 8)), start=torch.randn(1, 1, 8), layer=nn.Linear(8, 4),
    run=run,
))  # fmt: skip
def Tokens(self, x: Tensor) -> Tensor:
    """A parameter, a buffer and a layer, for a forward that is written in the test."""
    return self.layer(self.run(self, x))


READS_THE_BATCH: dict[str, Forward] = {
    "expand(x.shape[0], -1, -1)": lambda s, x: torch.cat([s.token.expand(x.shape[0], -1, -1), x], 1) + s.places,
    "expand(x.size(0), …)": lambda s, x: torch.cat([s.token.expand(x.size(0), -1, -1), x], 1),
    "expand((…))": lambda s, x: torch.cat([s.token.expand((x.shape[0], 1, 8)), x], 1),
    "expand_as": lambda s, x: x + s.token.expand_as(x),
    "broadcast_to": lambda s, x: torch.cat([s.start.broadcast_to(x.shape[0], 1, 8), x], 1),
    "repeat": lambda s, x: torch.cat([s.start.repeat(x.shape[0], 1, 1), x], 1),
    "new_zeros": lambda s, x: torch.cat([x.new_zeros(x.shape[0], 1, 8), x], 1),
    "twice the batch": lambda s, x: torch.cat([s.token.expand(2 * x.shape[0], -1, -1), torch.cat([x, -x])], 1),
    "reshape": lambda s, x: x.reshape(x.shape[0], 2, 16).reshape(x.shape[0], 4, 8),
    "unflatten": lambda s, x: x.flatten(0, 1).view(x.shape[0], 4, 8) + s.places[:, :4].expand(x.shape[0], 4, 8),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("target", ["nash-e", "x86"])
@pytest.mark.parametrize("name", READS_THE_BATCH)
def test_a_model_that_reads_the_batch_size_is_loaded_as_it_was_saved(name: str, target: str, tmp_path: Path) -> None:
    batches = [torch.randn(3, 4, 8) for _ in range(2)]
    result = fxq.quantize(Tokens(READS_THE_BATCH[name]).eval(), batches, target)
    for model in (fxq.trace(result.float, batches[0]), result.prepared, result.integer):
        loaded = fxq.load(fxq.save(model, tmp_path / "model.fxq"))
        for x in (batches[0], batches[1][:2], batches[1][:1]):
            assert torch.equal(loaded(x), model(x))


# ---- what is put in place ------------------------------------------------------------------------------------------------
def small(target: str = "nash-e") -> fxq.results.Result:
    return fxq.quantize(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), [torch.randn(4, 8)], target)


def _other_node(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["nodes"] = [node for node in document["nodes"] if node["op"] != "output"]


def _other_name(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    document["name"] = "Another"


def _other_bit(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = next(name for name, tensor in tensors.items() if tensor.numel() > 1)
    changed = tensors[name].clone()
    changed.view(-1)[0] += 1
    tensors[name] = changed


def _lost_tensor(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors.pop(next(iter(tensors)))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("stage", ["prepared", "integer", "observations"])
@pytest.mark.parametrize("fault", [_other_node, _other_name, _other_bit, _lost_tensor])
def test_a_file_that_would_not_give_the_model_back_is_not_put_in_place(
    fault: Callable[..., None], stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = small()
    saved: Any = fxq.observers.observations(result.prepared) if stage == "observations" else getattr(result, stage)
    if stage == "observations" and fault is not _lost_tensor:
        fault = _other_bit

    def faulty(document: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
        document, tensors = dict(document), dict(tensors)
        fault(document, tensors)
        return pack(document, tensors)

    path = fxq.save(saved, tmp_path / "model.fxq")
    before = path.read_bytes()
    monkeypatch.setattr(serialization, "pack", faulty)
    with pytest.raises(fxq.errors.ExportError, match=r"cannot be saved[\s\S]*because[\s\S]*the previous file is kept[\s\S]*remedy"):
        fxq.save(saved, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def named(name: str) -> nn.Module:
    """A layer of this name."""
    return Network(lambda m, x: m.parts[name](x).relu(), parts=nn.ModuleDict({name: nn.Linear(4, 4)})).eval()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["skip connect", 'a"b', "a'b", "a\\b", "a\tb", "a\rb", "é", "a(b)", "#a", "'''", "a{b}", '")or("'])
def test_a_module_may_have_any_name_without_a_line_break(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    result = fxq.quantize(named(name), [x])
    for model in (fxq.trace(result.float, x), result.prepared, result.integer):
        assert torch.equal(fxq.load(fxq.save(model, tmp_path / "model.fxq"))(x), model(x))
    assert result.verify(result.export(tmp_path / "model.onnx"), [x])


def test_a_line_break_in_a_name_is_refused_by_save_alone(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    result = fxq.quantize(named("a\nb"), [x])
    assert fxq.verify(result.prepared, result.integer, [x])
    assert torch.equal(fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))(x), result.integer(x))
    with pytest.raises(fxq.errors.ExportError, match=r"the path 'parts.a\\nb.weight' cannot be saved[\s\S]*remedy"):
        fxq.save(result.prepared, tmp_path / "prepared.fxq")


# ---- one proof -----------------------------------------------------------------------------------------------------------
FAR_APART: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([y := F.relu(x * 1e-4), x * 1e3, torch.tanh(y)], 1)[:, :6] * torch.arange(1.0, 7.0).view(1, 6, 1, 1),
    "stack": lambda x: torch.stack([y := x * 1e-5, x * 1e3, torch.tanh(y)], 1) * 2.5,
    "maximum": lambda x: torch.maximum(x * 1e-4, x * 1e3) * 0.5,
    "where": lambda x: torch.where(x > 0, x * 1e-4, x * 1e4) * 0.5,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("name", FAR_APART)
def test_a_sum_beyond_24_bits_between_two_scales_is_formed_in_float64(name: str, dtype: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6, 6)
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype))
    result = fxq.quantize(Network(lambda _, x: FAR_APART[name](x)), [x], "bernoulli2", qconfig)
    assert fxq.verify(result.prepared, result.integer, [x])
    assert torch.equal(fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))(x), result.integer(x))
    assert result.verify(result.export(tmp_path / "model.onnx"), [x])


def test_what_is_not_proved_is_neither_converted_nor_saved_nor_loaded_nor_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 6, 6)
    prepared = fxq.calibrate(fxq.prepare(Network(lambda _, x: FAR_APART["maximum"](x)), x, "bernoulli2"), [x])
    monkeypatch.setattr(lowering, "scale_channels_wide", product.scale_channels)
    with pytest.raises(fxq.errors.StageViolation, match=r"its sum can reach \d+, and is exact below 16777216"):
        fxq.convert(prepared)
    monkeypatch.undo()
    integer = fxq.convert(prepared)
    for node in integer.graph.nodes:
        if node.target is product.scale_channels_wide:
            node.target = product.scale_channels
    said = r"%\w+: its sum can reach \d+, and is exact below 16777216"
    writers: dict[str, Callable[[fx.GraphModule, Path], Any]] = {
        "model.fxq": fxq.save, "model.onnx": fxq.export_onnx, "model.c": fxq.export.export_c, "model.pt2": fxq.export.export_pt2,
    }  # fmt: skip
    for name, write in writers.items():
        with pytest.raises(fxq.errors.ExportError, match=said):
            write(integer, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model.fxq").write_bytes(pack(*write_model(integer, backends.get)))
    with pytest.raises(fxq.errors.ExportError, match=said):
        fxq.load(tmp_path / "model.fxq")


def test_an_edited_graph_is_refused_with_its_node(tmp_path: Path) -> None:
    integer = small().integer
    node = next(node for node in integer.graph.nodes if node.target is accumulate.linear)
    node.args = (node.args[0], node.args[2], node.args[2])
    with pytest.raises(fxq.errors.ExportError, match=rf"cannot be exported[\s\S]*%{node.name}: [\s\S]*remedy"):
        fxq.export_onnx(integer, tmp_path / "model.onnx")


CASTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cat": lambda s, x: (torch.cat([s.first(x), s.second(x)], 1) * 4).int().float() / 4,
    "cat of a relu and an input": lambda s, x: (torch.cat([F.relu(x), x], 1) * 4).int().float() / 4,
    "stack": lambda s, x: (torch.stack([s.first(x), s.second(x)], 1) * 4).short().float() / 4,
    "cat, reshaped": lambda s, x: (torch.cat([s.first(x), s.second(x)], 1).flatten(1) * 4).long().float() / 4,
    "cat alone": lambda s, x: torch.cat([s.first(x), s.second(x)], 1).int().float() * 0.5,
    "cat of int32": lambda s, x: torch.cat([s.first(x).round(), s.second(x).floor()], 1).int().float() * 0.5,
    "index": lambda s, x: torch.arange(50.0)[(torch.cat([s.first(x), s.second(x)], 1) * 4).clamp(0, 30).long()],
    "integers of the host": lambda s, x: torch.bucketize(s.first(x), torch.arange(-2.0, 2.0), out_int32=True).float() * 0.5,
    "moved integers of the host": lambda s, x: torch.bucketize(s.first(x), torch.arange(3.0), out_int32=True).flatten(1) + 1,
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_to_integers_is_converted_and_saved(name: str, target: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = Network(CASTS[name], first=nn.Conv2d(3, 4, 1), second=nn.Conv2d(3, 4, 1)).eval()
    result = fxq.quantize(model, [x], target)
    assert "has no integer form" not in fxq.explain(result.prepared)
    assert fxq.verify(result.prepared, result.integer, [x])
    assert torch.equal(fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))(x), result.integer(x))
    assert torch.equal(fxq.load(fxq.save(result.prepared, tmp_path / "prepared.fxq"))(x), result.prepared(x))


@pytest.mark.parametrize(("alpha", "whole"), [(0.5, False), (2, True), (1.0, True)])
def test_a_sum_of_integers_times_a_fraction_is_truncated_and_not_rounded(alpha: float, whole: bool) -> None:
    model = Network(lambda _, x: torch.add(x.round(), x.floor(), alpha=alpha).int())
    canonical = fxq.prepare(model, torch.randn(2, 3), until="canonical.rewrite")
    assert ("truncated(%add, whole=True)" in fxq.text(canonical)) == whole


# ---- damaged files of other kinds ------------------------------------------------------------------------------------------
def test_an_operator_that_nobody_knows_is_told_without_its_cost(tmp_path: Path) -> None:
    """As a function of the user's that another process has declared, or a damaged name."""
    loaded = fxq.load(fxq.save(compiled()[0].integer, tmp_path / "integer.fxq"))
    head = next(node for node in loaded.graph.nodes if (result := operation(node)) is not None and result.name == "linear")
    set_operation(head, replace(operation(head), name="undeclared"))
    layer = next(layer for layer in fxq.inspect.layers(loaded) if layer.name == head.name)
    assert (layer.operator, layer.macs) == ("undeclared", 0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("kind", "mutations"), [("qconfig", 120), ("onnx", 16), ("manifest", 120), ("data-npy", 200)])
def test_damage_is_an_error_and_nothing_else(kind: str, mutations: int, tmp_path: Path) -> None:
    findings = check(kind, range(mutations), tmp_path, limit_memory=False)
    assert not [outcome for outcome in findings if outcome.result not in ("refused", "read")]
    results = Counter(outcome.result for outcome in findings)
    assert results["refused"] > mutations / 4  # the damage is seen
    assert results["read"] > 0  # and is not all there is
