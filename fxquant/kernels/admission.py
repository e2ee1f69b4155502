"""Admission by proof: an implementation runs where it was shown to give the primitives' bits, on this machine, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxquant.graph import fact, qparams, resolve
from fxquant.kernels.record import Built, Implementation, Match, Refused, Site
from fxquant.numerics import ACTIVATION_TYPES
from fxquant.primitives import PRIMITIVES

EXTREMES = 6  # of so many elements one is the smallest there is, and one the largest


def whole_range(node: fx.Node, sizes: tuple[int, ...], non_negative: bool, generator: torch.Generator) -> Tensor:
    """Integers of every size, a third of them the smallest and the largest there are, where sums in too few bits saturate."""
    described = qparams(node)
    assert described is not None
    dtype = ACTIVATION_TYPES[described.dtype]
    low = described.zero_point if non_negative else dtype.low
    values = torch.randint(low, dtype.high + 1, sizes, generator=generator, device="cpu")
    choice = torch.randint(0, EXTREMES, sizes, generator=generator, device="cpu")
    return values.masked_fill_(choice == 0, low).masked_fill_(choice == 1, dtype.high).to(dtype.storage)


def evaluate(model: fx.GraphModule, match: Match, given: dict[fx.Node, Tensor]) -> Tensor:
    """The reference: the primitives that a kernel stands for, on these operands."""
    known: dict[fx.Node, Any] = dict(given)

    def value(node: fx.Node) -> Any:
        if node not in known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            known[node] = resolve(model, str(node.target)) if node.op == "get_attr" else node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    with torch.no_grad():
        found: Tensor = value(match.root)
    return found


def operands(site: Site, generator: torch.Generator) -> dict[fx.Node, Tensor]:
    """Operands of the whole range for what a kernel reads; real ones reach beyond that of the quantization, NaN and ±∞ among them."""
    given = {}
    for node in site.match.reads:
        if fact(node).dtype.is_floating_point:
            given[node] = _real(site, node, generator)
        else:
            given[node] = whole_range(node, site.sizes[node], node in site.non_negative, generator)
    return given


def _real(site: Site, node: fx.Node, generator: torch.Generator) -> Tensor:
    root = site.match.root
    arguments: Any = root.args
    scale, low, high = site.constant(arguments[1]), int(arguments[2]), int(arguments[3])
    assert scale is not None
    steps = torch.randint(2 * (low - 2), 2 * (high + 3), site.sizes[node], generator=generator, device="cpu")
    value = steps.to(torch.float32) / 2 * scale  # whole steps, and ties
    noise = torch.rand(site.sizes[node], generator=generator, device="cpu") * scale
    value = torch.where(torch.randint(0, 2, steps.shape, generator=generator, device="cpu") == 0, value, value + noise)
    special = torch.randint(0, 64, steps.shape, generator=generator, device="cpu")
    for index, number in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 3.4e38)):
        value.masked_fill_(special == index, number)
    return value


def run(site: Site, implementation: Implementation, built: Built, given: dict[fx.Node, Tensor]) -> Tensor:
    """What an implementation gives for these operands, as it is held."""
    inputs = []
    for node in site.match.reads:
        if implementation.reads_held and not fact(node).dtype.is_floating_point:
            form = site.held(node)
            tensor = form.memory()
            form.hold(given[node], tensor)
            inputs.append(tensor)
        else:
            inputs.append(given[node])
    result = site.result()
    output = result.memory()
    built.bind()(inputs, output)
    return output


def prove(site: Site, implementation: Implementation, built: Built) -> None:
    """Raises Refused if an implementation differs from the primitives for operands of the whole range."""
    given = operands(site, torch.Generator().manual_seed(0))
    wanted = evaluate(site.model, site.match, given)
    try:
        found = run(site, implementation, built, given)
    except RuntimeError as error:
        raise Refused(f"it does not run here: {str(error).splitlines()[0]}") from error
    zero = qparams(site.match.root).zero_point if site.result().dtype == torch.uint8 else 0  # type: ignore[union-attr]
    apart = site.result().centred(found) != wanted.to(torch.int64) - zero
    if bool(apart.any()):
        raise Refused(f"it differs from the primitives in {int(apart.sum())} of {apart.numel()} elements on this machine")


def is_primitive(node: fx.Node) -> bool:
    """Whether a node is a call of a primitive."""
    return node.op == "call_function" and node.target in PRIMITIVES
