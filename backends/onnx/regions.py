"""Regions: runs of consecutive float nodes of an integer graph, and what determines their export."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fxquant.ir.graph import fact, resolve


class Region(NamedTuple):
    """A run of consecutive float nodes of an integer graph: no value leaves it and returns.

    key  what determines its export besides names; the first node itself if the region reads parameters or buffers
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    key: Any


def region_of(integer: fx.GraphModule, nodes: list[fx.Node]) -> Region:
    """Return a region of these nodes, with what it reads and what others read of it."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in inside and o.op != "get_attr"))
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    key = _key(integer, nodes, inputs, outputs)
    return Region(nodes, inputs, outputs, nodes[0] if key is None else key)


def _key(integer: fx.GraphModule, region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Any:
    """Return the key that determines a region's export besides names; None for a region that reads parameters or buffers."""
    index = {node: position for position, node in enumerate([*inputs, *region])}
    modules = {node: resolve(integer, str(node.target)) for node in region if node.op == "call_module"}
    settings = {node: settings_of(module) for node, module in modules.items()}
    if None in settings.values() or any(o not in index for node in region for o in node.all_input_nodes):
        return None
    calls = [
        (node.op, settings.get(node, node.target), fx.map_arg((node.args, node.kwargs), lambda operand: index[operand])) for node in region
    ]
    return repr([calls, [str(fact(node)) for node in inputs], [index[node] for node in outputs]])


def settings_of(module: torch.nn.Module) -> Any:
    """Return a module's class and attributes if it computes by these alone; None if it has tensors, modules or hooks."""
    if any((module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks)):
        return None
    return type(module), sorted((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training")
