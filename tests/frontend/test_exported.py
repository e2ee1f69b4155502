"""A program of `torch.export` compiles to the bits of the module it was exported from; GraphModules that others made."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat import torch_ao
from fxquant.errors import TraceError
from tests.shared.contract import all_equal
from tests.shared.networks import members, written


@members(lambda: dict(
    conv=nn.Conv2d(3, 8, 3, 2, 1), bn=nn.BatchNorm2d(8), act=nn.ReLU(inplace=True), up=nn.ConvTranspose2d(8, 8, 2, 2, groups=2),
    pool=nn.MaxPool2d(2), head=nn.Linear(8, 4),
))  # fmt: skip
def Vision(self, x: torch.Tensor) -> Any:
    y = F.avg_pool2d(self.pool(self.act(self.bn(self.conv(x)))), 2)
    y = F.interpolate(F.hardswish(self.up(y)), scale_factor=2, mode="bilinear", align_corners=False)
    y = F.leaky_relu(F.pad(y, (1, 0, 0, 1)), 0.1)[:, ::2].repeat(1, 2, 1, 1)
    return {"classes": F.softmax(self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)), -1), "map": F.silu(y, inplace=True)}


@members(lambda: dict(
    embed=nn.Embedding(20, 8), norm=nn.LayerNorm(8), drop=nn.Dropout(0.1), token=nn.Parameter(torch.randn(1, 1, 8)), out=nn.Linear(8, 8),
))  # fmt: skip
def Text(self, ids: torch.Tensor) -> torch.Tensor:
    x = torch.cat([self.token.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)
    scores = self.norm(x) @ x.transpose(1, 2) / 8**0.5
    return self.out(self.drop(F.gelu(scores.softmax(-1) @ x))).view(ids.shape[0], -1, 4).contiguous().mean(1)


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "vision": (Vision, lambda batch: torch.randn(batch, 3, 16, 16)),
    "text": (Text, lambda batch: torch.randint(0, 20, (batch, 5))),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_the_bits_of_its_module(case: str, tmp_path: Path) -> None:
    kind, draw = CASES[case]
    model, batches = kind().eval(), [draw(4) for _ in range(3)]
    program = torch.export.export(model, (batches[0],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    results = [fxq.quantize(source, batches, options=fxq.Options(integer_tail=True)) for source in (model, program)]
    mine, theirs = (result.integer for result in results)
    assert all_equal(mine(batches[0]), theirs(batches[0]))
    kinds = [{layer.operator for layer in fxq.inspect.layers(result.prepared)} for result in results]
    assert kinds[0] == kinds[1]
    assert all(layer.integer or layer.boundary for layer in fxq.inspect.layers(results[1].prepared))
    lines = {layer.source.partition(" ")[0].partition(":")[0] for layer in fxq.inspect.layers(results[1].prepared)}
    assert lines - {""} == {"test_exported.py"}  # an input has no line
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(results[1].prepared.named_parameters()).keys() & parameters.keys()
    assert fxq.verify(theirs, results[1].export(tmp_path / "model.onnx"), [draw(3)])


def test_a_program_with_a_fixed_batch() -> None:
    x = torch.randn(2, 3, 16, 16)
    program = torch.export.export(Vision().eval(), (x,))
    with pytest.raises(TraceError, match="the batch size of the example, 2, is written into forward"):
        fxq.trace(program, (x,))
    assert fxq.trace(program, (x,), options=fxq.Options(dynamic_shapes={}))(x)["map"].shape[0] == 2


@members(lambda *layers, function=lambda model, x: x: dict(layers=nn.Sequential(*layers), function=function))
def Mode(self, x: torch.Tensor) -> torch.Tensor:
    """Layers, and a function of the model and their result."""
    return self.function(self, self.layers(x))


def conv(*rest: nn.Module, function: Any = lambda model, x: x) -> nn.Module:
    return Mode(nn.Conv2d(3, 4, 3), *rest, function=function)


IMAGE = (4, 3, 6, 6)
# Models of train mode, each with the shape of its input.
MODES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv, norm and dropout": (lambda: conv(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)), IMAGE),
    "linear and norm": (lambda: Mode(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), (4, 6)),
    "transposed conv and norm": (lambda: Mode(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)), IMAGE),
    "norm before a layer": (lambda: Mode(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3)), IMAGE),
    "norm without weight": (lambda: conv(nn.BatchNorm2d(4, affine=False)), IMAGE),
    "norm without statistics": (lambda: conv(nn.BatchNorm2d(4, track_running_stats=False)), IMAGE),
    "instance norm with statistics": (lambda: conv(nn.InstanceNorm2d(4, track_running_stats=True)), IMAGE),
    "dropout in place": (lambda: conv(nn.Dropout2d(0.4, inplace=True)), IMAGE),
    "a function of dropout": (lambda: conv(function=lambda model, x: F.dropout(x, 0.4, model.training)), IMAGE),
    "a function of dropout2d": (lambda: conv(function=lambda model, x: F.dropout2d(x, 0.4, model.training)), IMAGE),
    "alpha dropout": (lambda: conv(nn.AlphaDropout(0.4)), IMAGE),
    "feature alpha dropout": (lambda: conv(nn.FeatureAlphaDropout(0.4)), IMAGE),
}


def trained(source: Any, batches: list[torch.Tensor], move: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the outputs in train mode, in eval mode and of the integer model, and the running statistics."""
    prepared = fxq.prepare(source, (batches[0],), "x86", options=fxq.Options(dynamic_shapes={}))
    fxq.set_state(prepared, fxq.State.TRAIN)
    optimizer, outputs = torch.optim.SGD(prepared.parameters(), 0.05), []
    torch.manual_seed(1)
    for batch in batches:
        outputs.append(move["train"](prepared)(batch))
        outputs[-1].square().mean().backward()
        optimizer.step()
        outputs.append(move["eval"](prepared)(batch))
    integer = fxq.convert(move["train"](prepared))
    assert torch.equal(integer(batches[0]), move["eval"](prepared)(batches[0]))
    outputs += [integer(batch) for batch in batches]
    return outputs, {name: value.clone() for name, value in prepared.named_buffers() if ".running_" in name}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("case", MODES)
def test_a_program_exported_in_train_mode_follows_the_mode_of_the_model(case: str) -> None:
    kind, shape = MODES[case]
    torch.manual_seed(0)
    model, batches = kind(), [torch.randn(shape) for _ in range(3)]
    program = torch.export.export(model, (batches[0],))
    own = {"train": nn.Module.train, "eval": nn.Module.eval}
    moved = {mode: getattr(torch_ao, f"move_exported_model_to_{mode}") for mode in own}
    expected, statistics = trained(model, batches, own)
    outputs, moved_statistics = trained(program, batches, moved)
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    assert statistics.keys() == moved_statistics.keys()
    assert all(torch.equal(statistics[name], moved_statistics[name]) for name in statistics)


def test_slopes_that_a_program_draws_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A function's slopes are eval mode's here, for the graph does not say that the module of the call was a RReLU."""
    model, batch = conv(nn.RReLU()), torch.randn(IMAGE)
    prepared = fxq.prepare(torch.export.export(model, (batch,)), (batch,), "x86", options=fxq.Options(dynamic_shapes={}))
    fxq.set_state(prepared, "train")
    assert "forward is random in train mode where training here is not: 1" in caplog.text
    assert "in forward:  " in caplog.text
    assert "eval_with_key" not in caplog.text
    caplog.clear()
    model = conv(nn.Dropout(0.5))  # acts here, as in the program
    fxq.set_state(fxq.prepare(torch.export.export(model, (batch,)), (batch,), "x86", options=fxq.Options(dynamic_shapes={})), "train")
    assert "forward is random" not in caplog.text


def test_attention_and_dropouts_of_a_program_drop_nothing_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True))
    batches = [torch.randn(4, 5, 8) for _ in range(2)]
    prepared = fxq.prepare(torch.export.export(model, (batches[0],)), (batches[0],), "x86", options=fxq.Options(dynamic_shapes={}))
    fxq.calibrate(prepared, batches)
    integer = fxq.convert(prepared)
    assert torch.equal(integer(batches[0]), integer(batches[0]))
    fxq.set_state(prepared, fxq.State.TRAIN)
    assert "Monte Carlo" in caplog.text
    assert "scaled_dot_product_attention" in caplog.text


# ---- GraphModules that others made: subclasses without meta, and modules of exported programs ------------------------
def made_backbone() -> nn.Module:
    return written(
        lambda m, image: m.head(m.layer(m.stem(image)).mean((2, 3))),
        stem=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        layer=nn.Conv2d(8, 8, 3),
        head=nn.Linear(8, 4),
    )


class DualGraphModule(fx.GraphModule):
    """One graph for train mode and one for eval mode, made as torchvision's `create_feature_extractor` makes them."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super(fx.GraphModule, self).__init__()  # so there is no `meta`
        for name, child in root.named_children():
            setattr(self, name, child)
        self.train_graph, self.eval_graph, self._tracer_cls = graph, copy.deepcopy(graph), None
        self.graph = self.train_graph

    def train(self, mode: bool = True) -> DualGraphModule:
        if mode != self.training:
            self.graph = self.train_graph if mode else self.eval_graph
        return super().train(mode)


def extractor() -> nn.Module:
    """The features in front of the head, by name."""
    backbone = made_backbone()
    graph = fx.Tracer().trace(backbone)
    nodes = {str(node.target): node for node in graph.nodes}
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or (not node.users and node.target not in ("stem.2", "layer")):
            graph.erase_node(node)
    graph.output({"fine": nodes["stem.2"], "coarse": nodes["layer"]})
    return DualGraphModule(backbone, graph).eval()


@members(lambda: dict(backbone=extractor(), head=nn.Conv2d(8, 2, 1)))
def Segmenter(self, image: Tensor) -> Tensor:
    return F.interpolate(self.head(self.backbone(image)["coarse"]), size=image.shape[-2:], mode="bilinear")


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 12, 12)


@pytest.mark.parametrize("make", [extractor, Segmenter])
def test_a_graph_module_without_meta_is_quantized(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make().eval()
    result = fxq.quantize(model, [image(), image()])
    assert result.verify(result.export(tmp_path / "m.onnx"), [image()])
    assert fxq.verify(result.prepared, result.integer, [image()])
    assert result.compare([image()])
    assert all(layer.integer for layer in fxq.inspect.layers(result.integer) if layer.operator == "conv2d")


def test_functions_that_show_graphs_take_it(tmp_path: Path) -> None:
    model = extractor()
    assert not hasattr(model, "meta")
    assert fxq.text(model).startswith("graph   # traced")
    assert fxq.check(model, image()) is not None
    fxq.explain(model), fxq.inspect.layers(model), fxq.inspect.diff(model, model), fxq.dump(model, tmp_path)
    for call in (fxq.convert, fxq.observers.observations, fxq.inspect.segments, fxq.estimate, fxq.export.export_pt2):
        with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
            call(*((model,) if call is not fxq.export.export_pt2 else (model, tmp_path / "m")))


def exported_program(dynamic: bool = False) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    return torch.export.export(made_backbone().eval(), (image(),), dynamic_shapes=shapes)


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.export.save(exported_program(), file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize(
    "make",
    [
        lambda: exported_program().module(),
        lambda: exported_program(dynamic=True).module(),
        loaded,
        lambda: torch.export.unflatten(exported_program()),
    ],
    ids=["module", "dynamic", "loaded", "unflattened"],
)
def test_the_module_of_a_program_says_to_pass_the_program(make: Callable[[], nn.Module]) -> None:
    model = make()
    for call in (fxq.prepare, fxq.trace, fxq.check, lambda model, example: fxq.quantize(model, [example])):
        with pytest.raises(fxq.errors.ConfigurationError, match="pass the ExportedProgram itself"):
            call(model, image())
