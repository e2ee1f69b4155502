"""The float functions of contractions, and equations of einsum in their canonical form."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact, is_parameter
from fxquant.ops.core.record import Instead


def einsum(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """Compute torch.einsum, its equation with one letter for every dimension, and its result after an arrow."""
    return torch.einsum(equation, *operands)


def added_product(input: Tensor, one: Tensor, other: Tensor, equation: str, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute beta · input + alpha · the contraction of two operands; what is multiplied by 0 is not read."""
    product = alpha * torch.einsum(equation, one, other)
    return product if beta == 0 else beta * input + product


def computed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer with a weight that the model computes."""
    return torch.nn.functional.linear(input, weight, bias)


def is_computed(weight: Any) -> bool:
    """Return whether the model computes a weight from more than parameters."""
    return isinstance(weight, fx.Node) and not is_parameter(weight) and weight.op != "get_attr"


def spelled(equation: str, *operands: Any) -> dict[str, Any] | str:
    """Return the canonical arguments of an equation: an ellipsis as letters, and the result, where it is not given, in their order."""
    facts = [known for operand in operands if isinstance(operand, fx.Node) and isinstance(known := fact(operand), TensorFact)]
    if len(facts) < len(operands):
        return "one of its operands is not a tensor"
    left, arrow, result = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    most = max(
        (len(known.shape) - len(each.replace("...", "")) for each, known in zip(letters, facts, strict=True) if "..." in each), default=0
    )
    names = "".join(free[:most])
    shapes: list[str] = []
    for each, known in zip(letters, facts, strict=True):
        wide = len(known.shape) - len(each.replace("...", ""))
        shapes.append(each.replace("...", names[most - wide :]) if "..." in each else each)
    if not arrow:
        once = sorted(letter for letter in set(left.replace(",", "").replace(".", "")) if left.count(letter) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    return {"equation": f"{','.join(shapes)}->{result.replace('...', names)}", "operands": list(operands)}


def with_vectors(input: Any, other: Any) -> dict[str, Any] | str | Instead:
    """torch.matmul, of which an operand may be a vector."""
    left, right = (fact(operand) if isinstance(operand, fx.Node) else None for operand in (input, other))
    if not isinstance(left, TensorFact) or not isinstance(right, TensorFact) or min(len(left.shape), len(right.shape)) != 1:
        return {"input": input, "other": other}
    matrices = len(left.shape) > 1, len(right.shape) > 1
    equation = f"{'...' * matrices[0]}k,{'...k' if matrices[1] else 'k'}{'n' * matrices[1]}->{'...' * any(matrices)}{'n' * matrices[1]}"
    found = spelled(equation, input, other)
    return found if isinstance(found, str) else Instead(einsum, found)
