"""The pictures in the classes of fusions: the graph in `before` becomes the one in `after`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxquant import backends
from fxquant.ir.graph import TensorFact, mark_parameter, set_fact, set_matched_rules
from fxquant.ops import BY_NAME
from fxquant.ops.core import parameters
from fxquant.passes.activation import Clamp
from fxquant.passes.batchnorm import BatchNorm
from fxquant.passes.layerscale import LayerScale
from fxquant.passes.residual import Residual
from fxquant.passes.rewriting import Fusion
from fxquant.pipeline import Context
from fxquant.quantization.spec import DEFAULT, QConfig, QConfigMapping

pytestmark = pytest.mark.quick

IMAGE, KERNEL = (2, 4, 8, 8), (4, 4, 1, 1)
INPUTS = {Clamp: {"x": IMAGE}, Residual: {"x": IMAGE, "r": IMAGE}, BatchNorm: {"x": IMAGE}, LayerScale: {"x": (2, 4)}}
HELD = {Clamp: {"w": KERNEL}, Residual: {"w": KERNEL}, BatchNorm: {"w": KERNEL}, LayerScale: {"w": (4, 4), "b": (4,), "g": (4,)}}


def parsed(picture: str, inputs: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]]) -> fx.GraphModule:
    """Return the graph that a picture shows: lines `%name = operator(arguments)`, and `return %name`."""
    root, graph = nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {name: graph.placeholder(name) for name in inputs}
    for name, shape in held.items():
        root.register_parameter(name, nn.Parameter(torch.rand(shape)))
        nodes[name] = graph.create_node("get_attr", name, name=name)
    if "%bn" in picture:
        root.add_module("bn", nn.BatchNorm2d(4))
        nodes["bn"] = graph.create_node("get_attr", "bn", name="bn")
    for name, shape in {**inputs, **held}.items():
        set_fact(nodes[name], TensorFact(shape, torch.float32))
    for line in filter(None, map(str.strip, picture.splitlines())):
        name, call, arguments = re.fullmatch(r"(?:%(\w+) = (\w+)|return )(?:\((.*)\)|%\w+)", line).groups()  # type: ignore[union-attr]
        if name is None:
            graph.output(nodes[line.removeprefix("return %")])
            continue
        args, kwargs = eval(re.sub(r"%(\w+)", r"nodes['\1']", f"(lambda *a, **k: (a, k))({arguments})"), {"nodes": nodes})
        if call in BY_NAME:
            record = BY_NAME[call]
            fused = {key: kwargs.pop(key) for key in [*kwargs] if key in record.absorbs}
            nodes[name] = graph.create_node("call_function", record.function, tuple(record.bind(args, kwargs).values()), fused, name=name)
            set_fact(nodes[name], TensorFact(inputs["x"], torch.float32))
        else:
            nodes[name] = graph.create_node("call_function", getattr(parameters, call), args, name=name)
            mark_parameter(nodes[name])
    for node in graph.nodes:
        set_matched_rules(node, ((DEFAULT, QConfig()),))
    return fx.GraphModule(root, graph)


def result(gm: fx.GraphModule) -> Any:
    """Return what a graph returns, as nested calls, whatever its nodes are called."""

    def value(node: fx.Node) -> Any:
        if node.op != "call_function":
            return node.target
        return node.target, fx.map_arg(node.args, value), tuple(fx.map_arg(node.kwargs, value).items())

    return value(next(iter(gm.graph.find_nodes(op="output"))).args[0])


@pytest.mark.parametrize("fusion", INPUTS)
def test_the_graph_before_becomes_the_graph_after(fusion: type[Fusion]) -> None:
    before, after = (parsed(picture, INPUTS[fusion], HELD[fusion]) for picture in (fusion.before, fusion.after))
    assert result(before) != result(after)
    assert fusion(before, Context(backends.get("bayes-e"), QConfigMapping())).run() == 1
    assert result(before) == result(after)


def test_every_fusion_has_a_picture() -> None:
    assert {*Fusion.__subclasses__()} == {*INPUTS}
