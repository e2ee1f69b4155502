"""The effect of errors of a layer's sums on the model's outputs: second moments of gradients.

    B = E[g gᵀ],   g = ∂(Σ u · y) / ∂z,   u ~ N(0, 1)

z are the sums of a layer at one place, with bias and what is fused into the layer but before its limits. y are the outputs of the model,
and the mean is over places, samples and u. To first order E[Σ (Δy)²] is Σ Δzᵀ B Δz over places, if these are independent of each other.
Outputs of the layer that nothing reads count nothing, and errors of two may cancel after it. Together with M = E[x xᵀ] it is the
approximation of Martens, Grosse: Optimizing Neural Networks with Kronecker-factored Approximate Curvature, ICML 2015. Rounding by it is in
Tseng, Sun, Hou, De Sa: Model-Preserving Adaptive Rounding, 2025.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from fxquant.tuning.effects import real_outputs
from fxquant.tuning.real import weight_of
from fxquant.tuning.units import bound_arguments, operator_at
from fxquant.tuning.walk import Values, run

logger = logging.getLogger("fxquant")

DRAWN = 4  # u of each chunk
ELEMENTS = 2**20  # of a model's inputs that are looked at, about: of large images a few have places enough
ALONE = 0.1  # how much of what joins outputs is left out, since a mean over few samples joins what has nothing to do with each other
FLOOR = 0.02  # of the mean effect, that an output has at least: one that is cut off everywhere is not with other numbers


def output_effects(prepared: fx.GraphModule, chunks: Sequence[Sequence[object]], nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    """B of nodes with weights, (outputs, outputs), with a mean diagonal of 1; of those alone on which the model's real outputs depend.

    The model is run in its float form, with gradients.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[fx.Node, Tensor] = {}
    seen = 0
    for chunk in chunks:
        try:
            moments = _of_chunk(prepared, chunk, set(nodes), generator)
        except RuntimeError as error:  # PyTorch's, of a function that has no gradient
            logger.warning("weights are rounded layer by layer, without regard to what the model returns: %s", error)
            return {}
        for node, moment in moments.items():
            found[node] = found[node] + moment if node in found else moment
        seen += sum(value.numel() for value in chunk if isinstance(value, Tensor))
        if seen >= ELEMENTS:
            break
    scaled = {node: moment / moment.diagonal().mean() for node, moment in found.items() if bool(moment.diagonal().mean() > 0)}
    return {node: _moderate(moment) for node, moment in scaled.items() if bool(torch.isfinite(moment).all())}


def _moderate(moment: Tensor) -> Tensor:
    own = torch.diag(moment.diagonal())
    return (1 - ALONE) * moment + ALONE * own + FLOOR * torch.eye(len(moment), device=moment.device, dtype=torch.float32)


def _of_chunk(
    prepared: fx.GraphModule, chunk: Sequence[object], nodes: set[fx.Node], generator: torch.Generator
) -> Mapping[fx.Node, Tensor]:
    inputs = (value.clone() if isinstance(value, Tensor) and value.is_inference() else value for value in chunk)
    values: Values = dict(zip(prepared.graph.find_nodes(op="placeholder"), inputs, strict=True))
    sums: dict[fx.Node, tuple[Tensor, Tensor, int]] = {}  # the result of each, where it is not limited, and the dimension of its channels
    with torch.enable_grad():
        for node in prepared.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            result = run(prepared, node, values, exact=False)
            if node in nodes and isinstance(result, Tensor):
                result = result if result.requires_grad else result.detach().requires_grad_()
                values[node] = result
                held = _held(prepared, node, values)
                if held is not None:
                    sums[node] = (result, *held)
            values[node] = result
        outputs = [y for y in real_outputs(fx.map_arg(prepared.graph.output_node().args, values.__getitem__)) if y.requires_grad]
        if not outputs or not sums:
            return {}
        found: dict[fx.Node, Tensor] = {}
        for draw in range(DRAWN):
            drawn = [torch.randn(y.shape, generator=generator, device="cpu", dtype=torch.float32).to(y) for y in outputs]
            total = torch.stack([(u * y).sum() for u, y in zip(drawn, outputs, strict=True)]).sum()
            gradients = torch.autograd.grad(total, [each[0] for each in sums.values()], retain_graph=draw < DRAWN - 1, allow_unused=True)
            for (node, (_, within, axis)), gradient in zip(sums.items(), gradients, strict=True):
                if gradient is not None:
                    rows = (gradient * within).movedim(axis, -1).reshape(-1, gradient.shape[axis])
                    found[node] = found.get(node, 0) + rows.t() @ rows
    return found


def _held(prepared: fx.GraphModule, node: fx.Node, values: Values) -> tuple[Tensor, int] | None:
    """Return where the result of a node is within its limits, and its dimension of channels; None if these are not its weight's."""
    operator = operator_at(prepared, node)
    assert operator is not None
    arguments, result = bound_arguments(node, operator, values), values[node].detach()
    weight = weight_of(operator, arguments)
    assert weight is not None
    axis = result.dim() - 1 - max(weight.dim() - 2, 0)
    if axis < 0 or result.shape[axis] != len(weight):
        return None
    low, high = arguments.get("clamp") or (None, None)
    within = torch.ones_like(result)
    if low is not None:
        within *= result > low
    if high is not None:
        within *= result < high
    return within, axis
