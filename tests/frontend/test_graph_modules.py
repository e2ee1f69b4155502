"""GraphModules that others made: subclasses whose constructors leave `meta` out, as torchvision's, and modules of exported programs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.written import written


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


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = extractor(), nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        return F.interpolate(self.head(self.backbone(image)["coarse"]), size=image.shape[-2:], mode="bilinear")


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 12, 12)


@pytest.mark.parametrize("make", [extractor, Segmenter])
def test_a_graph_module_without_meta_is_quantized(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make().eval()
    result = fxq.quantize(model, [image(), image()], show_progress=False)
    assert result.verify(result.export(tmp_path / "m.onnx"), [image()])
    assert fxq.verify(result.prepared, result.integer, [image()], show_progress=False)
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


def exported(dynamic: bool = False) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    return torch.export.export(made_backbone().eval(), (image(),), dynamic_shapes=shapes)


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.export.save(exported(), file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize(
    "make",
    [lambda: exported().module(), lambda: exported(dynamic=True).module(), loaded, lambda: torch.export.unflatten(exported())],
    ids=["module", "dynamic", "loaded", "unflattened"],
)
def test_the_module_of_a_program_says_to_pass_the_program(make: Callable[[], nn.Module]) -> None:
    model = make()
    for call in (fxq.prepare, fxq.trace, fxq.check, lambda model, example: fxq.quantize(model, [example])):
        with pytest.raises(fxq.errors.ConfigurationError, match="pass the ExportedProgram itself"):
            call(model, image())


def test_the_program_itself_is_taken() -> None:
    program = exported(dynamic=True)
    result = fxq.quantize(program, [image(), image(4)], show_progress=False)
    assert fxq.verify(result.prepared, result.integer, [image(3)], show_progress=False)
