"""The truth values that an added mask is made of: which elements it adds nothing to, and what it adds to the others.

    (1 - mask) * -1e9              mask                   of truth values, or of 0 and 1, whole or real
    where(mask, 0, -inf)           mask
    mask.float() * -1e9            not mask
    causal + padding               both of them

Found in the graph, and not in the values: such a mask is computed from truth values in integers, and never becomes real numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxquant.facts import TensorFact
from fxquant.graph import fact, is_parameter, parameter_value
from fxquant.ops.composite import Builder
from fxquant.ops.record import operator_of
from fxquant.ops.whole import COMPARISONS, to_real

HIDDEN = -64.0  # what lies so far below the largest element of its row has no share of it: exp(-64) < 2^-92
MOVES = ("reshape", "permute", "expand", "getitem", "identity", "repeat", "in_dtype")  # that move elements, and change none
NEARLY_ONE = 1 - 2.0**-8  # a mask of real numbers that are 0 and 1, on any grid


def far_below(value: Any) -> bool:
    """Whether a number, or every element of a constant, is nothing beside scores."""
    number = _everywhere(value)
    if number is None and isinstance(value, fx.Node) and is_parameter(value):
        model = value.graph.owning_module
        assert model is not None
        return bool((torch.as_tensor(parameter_value(model, value)) <= HIDDEN).all())
    return number is not None and number <= HIDDEN


class Hiding:
    """What an added mask hides.

    adds   what it adds to the elements that it hides: the number nearest to 0, where there are several
    """

    def __init__(self, build: Builder) -> None:
        self._build = build
        self.adds = -math.inf

    def kept(self, mask: Any) -> fx.Node | None:
        """The elements that a mask adds nothing to, as truth values; None where it is not made of truth values alone."""
        if not isinstance(mask, fx.Node):
            return None
        if is_parameter(mask):
            return self._of_constant(mask)
        record = operator_of(mask)
        if record is None:
            return None
        arguments = record.arguments(mask)
        if record.name in MOVES:
            return self._moved(mask, self.kept(arguments["input"]))
        if record.name == "where":
            return self._chosen(**arguments)
        if record.name in ("add", "minimum") and arguments.get("alpha", 1) == 1:
            return self._both(self.kept(arguments["input"]), self.kept(arguments["other"]))
        if record.name in ("maximum", "clamp") and far_below(arguments.get("other", arguments.get("min"))) and arguments.get("max") is None:
            return self.kept(arguments["input"])
        if record.name == "mul":
            for number, value in ((arguments["other"], arguments["input"]), (arguments["input"], arguments["other"])):
                number = _everywhere(number)
                if number is not None and number <= HIDDEN:
                    return self._seen(number, self._not(self.holds(value)))
                if number is not None and number >= -HIDDEN:
                    return self._seen(-number, self._less_one(value))
        return None

    def holds(self, value: Any) -> fx.Node | None:
        """Where a tensor of nothing but 0 and 1 is 1."""
        if not isinstance(value, fx.Node) or is_parameter(value) or not isinstance(fact(value), TensorFact):
            return None
        record, dtype = operator_of(value), fact(value).dtype
        if dtype == torch.bool:
            return value
        if record is None:
            given = value.op == "placeholder" and dtype == torch.float32
            return self._build.host(torch.gt, value, NEARLY_ONE) if given else None
        arguments = record.arguments(value)
        if record.function is to_real:
            return self._build.host(COMPARISONS["gt"], arguments["input"], 0)
        if record.name in MOVES:
            return self._moved(value, self.holds(arguments["input"]))
        if record.name == "where":
            branches = _everywhere(arguments["input"]), _everywhere(arguments["other"])
            return arguments["condition"] if branches == (1, 0) else self._not(arguments["condition"]) if branches == (0, 1) else None
        if record.name == "sub" and arguments["alpha"] == 1 and _everywhere(arguments["input"]) == 1:
            return self._not(self.holds(arguments["other"]))
        if record.name == "mul":
            return self._both(self.holds(arguments["input"]), self.holds(arguments["other"]))
        return None

    def _less_one(self, value: Any) -> fx.Node | None:
        """(mask - 1) · 1e9."""
        record = operator_of(value) if isinstance(value, fx.Node) else None
        if record is None or record.name not in ("sub", "add"):
            return None
        arguments = record.arguments(value)
        one = 1 if record.name == "sub" else -1
        return self.holds(arguments["input"]) if _everywhere(arguments["other"]) == one and arguments["alpha"] == 1 else None

    def _chosen(self, condition: Any, input: Any, other: Any) -> fx.Node | None:
        if not isinstance(condition, fx.Node):
            return None
        hides = far_below(input), far_below(other)
        kept = [_everywhere(value) == 0 or self.kept(value) for value in (input, other)]
        for branch, far in ((input, hides[0]), (other, hides[1])):
            if far:
                number = _everywhere(branch)
                self._seen(HIDDEN if number is None else number, None)
        if hides == (False, True) and kept[0] is not None:
            return condition if kept[0] is True else self._both(condition, kept[0])
        if hides == (True, False) and kept[1] is not None:
            visible = self._not(condition)
            return visible if kept[1] is True else self._both(visible, kept[1])
        return None

    def _of_constant(self, mask: fx.Node) -> fx.Node | None:
        model = mask.graph.owning_module
        value = None if model is None else parameter_value(model, mask)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not bool(((value == 0) | (value <= HIDDEN)).all()):
            return None
        if bool((value != 0).any()):
            self._seen(float(value[value != 0].max()), None)
        return self._build.host(torch.eq, mask, 0.0)

    def _seen(self, adds: float, found: fx.Node | None) -> fx.Node | None:
        self.adds = max(self.adds, adds)
        return found

    def _not(self, value: fx.Node | None) -> fx.Node | None:
        if value is not None and value.target is torch.logical_not:
            opposite: fx.Node = value.args[0]  # type: ignore[assignment]
            return opposite
        return None if value is None else self._build.host(torch.logical_not, value)

    def _both(self, left: Any, right: Any) -> fx.Node | None:
        return None if left is None or right is None else self._build.host(torch.logical_and, left, right)

    def _moved(self, node: fx.Node, found: fx.Node | None) -> fx.Node | None:
        """Truth values moved as the node moves numbers."""
        record = operator_of(node)
        assert record is not None
        if found is None or record.name in ("identity", "in_dtype"):
            return found
        return self._build.host(node.target, found, *node.args[1:])  # type: ignore[arg-type]


def _everywhere(value: Any) -> float | None:
    """The one number that a number, or a tensor that is made anew, holds everywhere."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    if is_parameter(value):
        model = value.graph.owning_module
        held = None if model is None else parameter_value(model, value)
        one = isinstance(held, torch.Tensor) and held.numel() > 0 and bool((held == held.flatten()[0]).all())
        return float(held.flatten()[0]) if one and isinstance(held, torch.Tensor) else None
    name = value.target if isinstance(value.target, str) else getattr(value.target, "__name__", "")
    if name in ("zeros_like", "zeros", "new_zeros"):
        return 0.0
    number = value.args[1] if len(value.args) > 1 else value.kwargs.get("fill_value")
    return float(number) if name in ("full_like", "new_full", "full") and isinstance(number, int | float) else None
