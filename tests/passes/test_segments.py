"""Segments: as few as can be, convex, cut where it is asked for, exported one by one, and together equal to the whole."""

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.cli import main
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, members

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs


def spectrum(x: Tensor) -> Tensor:
    """Compute in another precision, which no target has in integers."""
    return x.double().cos().float()


@members(lambda: dict(
    stem=nn.Conv2d(3, 4, 3, padding=1), left=nn.Conv2d(4, 4, 3, padding=1), right=nn.Conv2d(4, 4, 3, padding=1),
    block=nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), gain=nn.Parameter(torch.randn(4)),
))  # fmt: skip
def Mixed(self, x: Tensor) -> tuple[Tensor, ...]:
    """Integers, float operators on two paths, integers again; a parameter, and a product with the batch size, are returned as well."""
    x = torch.relu(self.stem(x))
    y = spectrum(torch.sigmoid(spectrum(self.left(x)).reshape(x.shape)))
    z = self.right(x).double()
    return self.block(y * 0.1) + x, self.block(z.sin().float() * 0.1), x.size(0) * y, self.gain


@pytest.fixture(scope="module")
def mixed() -> fx.GraphModule:
    torch.manual_seed(0)
    return compiled(Mixed().eval(), [torch.randn(4, 3, 8, 8)]).integer


def assert_convex(model: fx.GraphModule, parts: tuple[fxq.results.Segment, ...]) -> None:
    """Every operator is in one segment, and reads inputs or results of its own segment or an earlier one."""
    place = {name: index for index, part in enumerate(parts) for name in part.nodes}
    assert len(place) == sum(len(part.nodes) for part in parts)
    edges = nx.DiGraph()
    edges.add_nodes_from(range(len(parts)))
    for node in model.graph.nodes:
        for operand in node.all_input_nodes:
            if node.name in place and operand.name in place:
                assert place[operand.name] <= place[node.name]
                edges.add_edge(place[operand.name], place[node.name])
    edges.remove_edges_from(list(nx.selfloop_edges(edges)))
    assert nx.is_directed_acyclic_graph(edges)
    inputs = {node.name for node in model.graph.find_nodes(op="placeholder")}
    for part in parts:
        assert set(part.inputs) <= inputs
        inputs.update(part.outputs)


def changes(model: fx.GraphModule, parts: tuple[fxq.results.Segment, ...]) -> int:
    """How often the device changes on the path where it does so most often: no order of segments has fewer."""
    device = {name: part.device for part in parts for name in part.nodes}
    most: dict[Any, int] = {}
    for node in model.graph.nodes:
        read = [operand for operand in node.all_input_nodes if operand in most]
        if node.name in device:
            most[node] = max((most[o] + (o.name in device and device[o.name] != device[node.name]) for o in read), default=0)
        elif read:
            most[node] = max(most[o] for o in read)
    return max(most.values())


def test_segments_are_few_and_convex(mixed: fx.GraphModule) -> None:
    parts = fxq.inspect.segments(mixed)
    assert [part.device for part in parts] == ["bayes-e", "host", "bayes-e"]
    assert_convex(mixed, parts)
    assert len(parts) == changes(mixed, parts) + 1
    assert {name for part in parts for name in part.nodes} >= {layer.name for layer in fxq.inspect.layers(mixed)}
    for layer in fxq.inspect.layers(mixed):
        (own,) = (part for part in parts if layer.name in part.nodes)
        assert own.device == ("bayes-e" if layer.integer or layer.boundary else "host")


CUTS: list[tuple[Any, int]] = [(("left", "block.1"), 6), (("stem", ["left", "right"]), 4)]


@pytest.mark.nightly
@pytest.mark.parametrize(("cut", "count"), CUTS, ids=lambda value: str(value) if isinstance(value, tuple) else "")
def test_joined_they_are_the_whole(cut: Any, count: int, mixed: fx.GraphModule, tmp_path: Path) -> None:
    parts = fxq.inspect.segments(mixed, cut)
    assert_convex(mixed, parts)
    assert len(parts) == count
    manifest = json.loads(fxq.export.export_segments(mixed, tmp_path / "parts", cut).read_text())
    assert [entry["device"] for entry in manifest["segments"]] == [part.device for part in parts]
    assert len(list((tmp_path / "parts").iterdir())) == count + 1
    whole = fxq.export_onnx(mixed, tmp_path / "whole.onnx")
    for seed in (1, 2):
        x = torch.randn(seed + 2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        joined = fxq.export.run_segments(tmp_path / "parts", x)
        assert contract.all_equal(joined, list(next(fxq.inspect.record(whole, [x], ["outputs"])).values()))


def test_an_integer_model_cut_passes_integers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5)).eval()
    x = torch.randn(3, 3, 8, 8)
    for target in ("nash-e", "x86"):
        integer = compiled(model, [x], target).integer
        manifest = json.loads(fxq.export.export_segments(integer, tmp_path / target, ["_0", "2"]).read_text())
        assert len(manifest["segments"]) == 3
        layer = next(layer for layer in fxq.inspect.layers(integer) if layer.name == "_0")
        passed = manifest["tensors"]["_0"]
        assert (passed["scale"], passed["zero_point"], passed["range"]) == (layer.grid.scale, layer.grid.zero_point, layer.dtype)
        assert contract.all_equal(fxq.export.run_segments(tmp_path / target, x), integer(x))
        for runtime in ("reference", "onnxruntime, no optimisation"):
            assert contract.all_equal(fxq.export.run_segments(tmp_path / target, x, runtime=runtime), integer(x))


def test_the_command_line(mixed: fx.GraphModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fxq.save(mixed, tmp_path / "model.fxq")
    assert main(["segments", str(tmp_path / "model.fxq"), str(tmp_path / "parts"), "--cut", "stem"]) == 0
    told = capsys.readouterr().out
    assert told.count("bayes-e") == 3
    assert (tmp_path / "parts" / "manifest.json").exists()
    assert str(tmp_path / "parts" / "manifest.json") in told
    assert main(["segments", str(tmp_path / "model.fxq"), str(tmp_path / "parts"), "--cut", "stme"]) == 2
    assert "did you mean 'stem'?" in capsys.readouterr().err


def test_what_cannot_be_cut_or_run_is_said(mixed: fx.GraphModule, tmp_path: Path) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match="no tensor 'nowhere' to cut after"):
        fxq.inspect.segments(mixed, ["nowhere"])
    with pytest.raises(fxq.errors.ConfigurationError, match="segments takes a prepared or integer model"):
        fxq.inspect.segments(fxq.trace(Mixed(), torch.randn(4, 3, 8, 8)))
    with pytest.raises(fxq.errors.ExportError, match="not a usable manifest"):
        fxq.export.run_segments(tmp_path, torch.zeros(1))
    path = fxq.export.export_segments(mixed, tmp_path)
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be run with 2 inputs"):
        fxq.export.run_segments(tmp_path, torch.zeros(1), torch.zeros(1))
    manifest = json.loads(path.read_text())
    for wrong, because in (
        ({"format": 2}, "its format is 2"),
        ({"segments": [{**manifest["segments"][0], "file": "../0.onnx"}]}, "is not a file in its folder"),
        ({"segments": manifest["segments"][1:]}, "which no segment before it gives"),
        ({"segments": manifest["segments"][:1]}, "no segment gives"),
        ({"segments": 3}, "not of the form"),
    ):
        path.write_text(json.dumps({**manifest, **wrong}))
        with pytest.raises(fxq.errors.ExportError, match=because):
            fxq.export.run_segments(tmp_path, torch.randn(1, 3, 8, 8))


# ---- what is not worth a crossing -------------------------------------------------------------------------------------
def floats(function: Any, qconfig: Any = None) -> dict[str, str]:
    """Return the float operators of a function of an image, with their reasons."""
    prepared = fxq.prepare(Network(lambda _, x: function(x)), torch.randn(4, 2, 4, 4), qconfig=qconfig)
    return {layer.operator: layer.reason for layer in fxq.inspect.layers(prepared) if not layer.integer and not layer.boundary}


def test_integers_between_float_operators_stay_in_float() -> None:
    result = floats(lambda x: spectrum(torch.sigmoid(spectrum(x)) + 1))
    assert result["sigmoid"] == result["add"] == "it lies between operators in float, and is read only by %cos_1"
    assert "reshape" in floats(lambda x: spectrum(x.flatten(1)))
    assert "sigmoid" not in floats(lambda x: spectrum(torch.sigmoid(x))), "an input is computed with on the target"
    assert "sigmoid" not in floats(lambda x: torch.sigmoid(spectrum(x))), "so is what the model returns"
    assert "matmul" not in floats(lambda x: spectrum(torch.matmul(spectrum(x), spectrum(x)))), "sums of products are worth it"


def test_the_user_forces_either_way() -> None:
    asked = fxq.QConfigMapping().set_object_type(torch.sigmoid, fxq.QConfig())
    assert "sigmoid" not in floats(lambda x: spectrum(torch.sigmoid(spectrum(x))), asked)
    hosted = fxq.QConfigMapping().set_host(torch.sigmoid, "tanh")
    assert hosted == fxq.QConfigMapping().set_object_type(torch.sigmoid, None).set_module_name("tanh", None)
    result = floats(lambda x: torch.tanh(torch.sigmoid(torch.exp(x))), hosted)
    assert result == {"sigmoid": "the qconfig keeps it in float", "tanh": "the qconfig keeps it in float"}


def test_what_a_march_computes_in_float16_is_named_and_crosses_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)).eval()
    x, hosted = torch.randn(5, 6), fxq.QConfigMapping().set_host(nn.LayerNorm)
    half, plain = (compiled(model, [x], target, hosted) for target in ("j6p", "j6e"))
    told = "the qconfig keeps it in float; nash-p computes it in float16, outside the integer contract"
    (norm,) = [layer for layer in fxq.inspect.layers(half.prepared) if layer.operator == "layer_norm"]
    assert (norm.device, norm.reason) == ("nash-p", told)
    assert [len(fxq.inspect.segments(form.integer)) for form in (half, plain)] == [1, 3]
    assert torch.equal(half.integer(x), plain.integer(x))


@pytest.mark.parametrize(("level", "weights"), [(1, False), (2, True)])
def test_consistency_levels_have_powers_of_two(level: int, weights: bool, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 1)).eval(), torch.randn(4, 3, 8, 8)
    prepared, integer = compiled(model, [x], f"j6m-level{level}")
    assert integer.meta["target"].consistency == level
    assert all(torch.tensor(scale).log2().frac() == 0 for scale in fxq.qparams(prepared).values())
    scales = torch.tensor([s for node in integer.graph.nodes if (grid := node.meta.get("operation")) and "weight" in grid.constants
                           for s in grid.constants["weight"].scale])  # fmt: skip
    assert bool((scales.log2().frac() == 0).all()) == weights
    contract.assert_validate_is_integer(prepared, integer, x)
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(x,)])
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    assert loaded.meta["target"].name == f"nash-m-level{level}"
