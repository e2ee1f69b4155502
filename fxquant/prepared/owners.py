"""Which of the user's modules each operator of a prepared model obeys, and which draws its noise.

`module.eval()` holds for what was computed in that module.
"""

from __future__ import annotations

from torch import fx, nn

from fxquant.ir.graph import batch_norm_path, module_path, noise
from fxquant.prepared.operators import QuantizedOperator


def link_owners(prepared: nn.Module, graph: fx.Graph) -> None:
    """Set for every operator the modules whose `training` flag it obeys (its own, its batch norm) and the module that draws its noise."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    for node in graph.find_nodes(op="call_module"):
        operator = modules.get(str(node.target))
        if isinstance(operator, QuantizedOperator):
            batch_norm = operator.operator.arguments(node).get("batch_norm")
            path = str(batch_norm.target) if isinstance(batch_norm, fx.Node) else batch_norm_path(node)
            operator.owners = _owner(modules, module_path(node)), _owner(modules, path)
            operator.noise = (_owner(modules, noise(node) or ""),)


def _owner(modules: dict[str, nn.Module], path: str) -> nn.Module | None:
    """Return the module at a path; None for the model itself, whose flag an operator shares, and where no module exists."""
    return modules.get(path) if path else None
