"""An attention mask before a softmax becomes a bool tensor that the softmax reads.

%a = add(%scores, %mask)             →    %y_kept = kept(%mask, -1)
%y = softmax(%a, -1)                      %y = masked_softmax(%scores, %y_kept, -1)

On an integer grid a mask of -1e9 would take the whole range, and round all scores to one integer. Values that the mask adds to the
elements that it keeps are still added. Factors of the masked scores stay in place; operators that reshape them move after the softmax.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxquant.ir.graph import TensorFact, absorb, fact, inherit, is_parameter, refusal, set_fact
from fxquant.ops import Trait, calls, operator_of
from fxquant.ops.attention import softmax as masking
from fxquant.ops.attention.softmax import Hiding, added, far_below, kept, level_of, masked_softmax, may_hide, parts_of, softmax, terms_of
from fxquant.ops.core.composite import Builder
from fxquant.ops.elementwise.arithmetic import add, div, sub
from fxquant.ops.elementwise.comparison import where
from fxquant.ops.movement.shape import identity, permute
from fxquant.passes.floating import given
from fxquant.passes.rewriting import decide, eliminate_dead
from fxquant.pipeline import Context


def recognise(gm: fx.GraphModule, context: Context) -> int:
    """Rewrite every softmax that becomes integer so that it reads the scores and the mask separately."""
    plain = given(gm)
    changes = 0
    for node in list(gm.graph.nodes):
        if not calls(node, softmax) or refusal(node) is not None or decide(node).config is None or not isinstance(fact(node), TensorFact):
            continue
        description = Search(node, plain, context.target.activations).run()
        if description is not None:
            context.say(f"%{node.name} reads a mask: {description}")
            changes += 1
    return changes


class Search:
    """The search for the masks before one softmax."""

    def __init__(self, softmax: fx.Node, plain: set[fx.Node], activations: Sequence[str]) -> None:
        self.softmax, self.plain = softmax, plain
        self.build = Builder(masked_softmax.__name__, softmax, activations)
        self.dim: int = softmax.args[1] % max(len(fact(softmax).shape), 1)  # type: ignore[operator, assignment]
        self.keeps: list[fx.Node] = []
        self.empty: set[str] = set()  # treatment of rows that a mask hides completely, of each mask
        self.otherwise: fx.Node | None = None  # what counts in such a row, where there is one mask
        self.levels: list[float | None] = []  # what each mask adds where it hides
        self.moves: list[fx.Node] = []  # the operators after the masks that change the shape, the last one first
        self.seen: list[fx.Node] = []

    def run(self) -> str | None:
        """Make the softmax read its scores without masks, and the boolean masks; return a text about them, or None without masks."""
        node = self.softmax
        scores = node.all_input_nodes[0]
        clean = self._without(scores)
        if clean is None or not self.keeps:
            self.build.discard()
            return None
        keep = self.keeps[0]
        for other in self.keeps[1:]:
            keep = self.build.host(torch.logical_and, keep, other)
        names = ", ".join(f"%{each.name}" for each in self.seen)
        for each in self.seen:
            absorb(node, each)
        if not self.moves:
            node.target, node.args = (masked_softmax, (clean, keep, self.dim, *self._empty()))
        else:
            self._moved(clean, keep)
        self.build.discard()
        eliminate_dead([scores, *self.seen, *self.moves], lambda each: each.op != "get_attr")
        return names

    def _empty(self) -> tuple[str, fx.Node | None]:
        """Return `empty` and `otherwise` of `masked_softmax`; "zeros" if a completely hidden row is NaN in PyTorch."""
        if len(self.keeps) == 2 and self.levels[0] == self.levels[1] and (self.levels[0] or 0.0) <= masking.ABSORBING:
            return "equal", self.build.host(torch.logical_or, *self.keeps)
        kind = next((kind for kind in ("zeros", "equal", "whole") if kind in self.empty), "zeros")
        return kind, self.otherwise if len(self.keeps) == 1 else None

    def _moved(self, clean: fx.Node, keep: fx.Node) -> None:
        """Move the reshapes before the softmax to after it; the softmax keeps its node."""
        node = self.softmax
        readers = list(node.users)
        set_fact(node, fact(clean))
        node.target, node.args = masked_softmax, (clean, keep, self.dim, *self._empty())
        last = node
        for move in reversed(self.moves):
            moved = node.graph.create_node("call_function", move.target, (last, *move.args[1:]), {}, name=f"{node.name}_{move.name}")
            last.append(moved)
            inherit(moved, node, "masks.recognise")
            set_fact(moved, fact(move))
            last = moved
        for reader in readers:
            reader.replace_input_with(node, last)

    def _without(self, node: fx.Node) -> fx.Node | None:
        """Return the scores that a node masks, as an old or a new node, and record the masks in `keeps`; None if no mask is removable."""
        record = operator_of(node)
        if record is None or (record.function is not where and record.refuses(node, record.arguments(node)) is not None):
            return None
        arguments = record.arguments(node)
        if record.function is where:
            return self._chosen(node, arguments)
        if record.function is identity:
            return self._same(node, arguments)
        if Trait.AFFINE in record.traits:
            return self._sum(node, arguments) if Trait.ADDS in record.traits else self._multiple(node, arguments)
        if Trait.BOUNDED_BELOW in record.traits:
            return self._limited(node, arguments)
        return self._move(node, arguments) if Trait.REARRANGES in record.traits else None

    def _same(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node | None:
        clean = self._without(arguments["input"])
        if clean is not None:
            self.seen.append(node)
        return clean

    def _unmasked(self, node: fx.Node, scores: fx.Node) -> fx.Node:
        """Return the scores that this node masks, without further masks."""
        self.seen.append(node)
        clean = self._without(scores)
        return scores if clean is None else clean

    def _sum(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node | None:
        """Return the scores of a sum of scores and a mask, or a sum without the masks of its terms."""
        left, right = arguments["input"], arguments["other"]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return self._with(node, left if isinstance(left, fx.Node) else right)
        negative = node.target is sub
        if self._shifts(node, left, right):
            return self._same(node, {"input": left})
        masked = right in self.plain or (left in self.plain and not negative)
        if not masked or arguments["alpha"] != 1:
            return self._with(node, left) or self._with(node, right)
        scores, mask = (left, right) if right in self.plain else (right, left)
        if fact(scores).shape != fact(node).shape or not isinstance(fact(mask), TensorFact):
            return None
        dim = self.dim - len(fact(node).shape)
        if -dim > len(fact(mask).shape) or fact(mask).shape[dim] == 1 or not fact(mask).dtype.is_floating_point:
            return None
        if negative:
            mask = self.build.host(torch.neg, mask)
        hiding = Hiding(self.build, mask)
        kept_by = None if is_parameter(mask) else hiding.kept(mask, dim)
        if kept_by is not None:
            self.keeps.append(kept_by)
            self.empty.add(hiding.empty)
            self.otherwise = hiding.otherwise
            self.levels.append(hiding.adds)
            return self._unmasked(node, scores)
        if not may_hide(mask):
            return self._with(node, scores)
        terms = [] if negative else terms_of(mask)
        if not all(map(may_hide, terms)):
            for term in terms:  # a position bias and a mask
                scores = self._call(node, add, scores, term, 1)
                set_fact(scores, fact(node))
            self.seen.append(node)
            return self._without(scores)
        hides, adds = parts_of(mask, dim)
        if not hides:
            return self._with(node, scores)
        self.keeps.append(self.build.host(kept, mask, dim))
        self.levels.append(level_of(mask) if is_parameter(mask) else None)
        clean = self._unmasked(node, scores)
        return self._call(node, add, clean, self.build.host(added, mask, dim), 1) if adds else clean

    def _shifts(self, node: fx.Node, scores: fx.Node, other: fx.Node) -> bool:
        """Return whether the sum adds one number to each row of scores: it does not change the softmax (a subtracted maximum)."""
        other_fact, dim = fact(other), self.dim - len(fact(node).shape)
        if other in self.plain or not isinstance(other_fact, TensorFact) or fact(scores).shape != fact(node).shape:
            return False
        return len(other_fact.shape) < -dim or other_fact.shape[dim] == 1

    def _chosen(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node | None:
        """Return the scores of a `where` that replaces some by a number far below, and record the mask; None for another `where`."""
        condition, input, other = (arguments[name] for name in ("condition", "input", "other"))
        if not isinstance(condition, fx.Node) or fact(condition).dtype != torch.bool:
            return None
        if isinstance(other, fx.Node) and far_below(input):
            scores, keep = other, self.build.host(torch.logical_not, condition)
        elif isinstance(input, fx.Node) and far_below(other):
            scores, keep = input, condition
        else:
            return None
        if fact(scores).shape != fact(node).shape:
            return None
        self.keeps.append(keep)
        self.levels.append(None)
        self.empty.add("zeros" if -math.inf in (input, other) else "equal")
        return self._unmasked(node, scores)

    def _multiple(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node | None:
        number, operand = arguments["other"], arguments["input"]
        if isinstance(operand, int | float):
            number, operand = operand, number
        if not isinstance(number, int | float) or not number > 0 or (node.target is div and operand is arguments["other"]):
            return None
        return self._with(node, operand)

    def _limited(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node | None:
        """Return the scores of a maximum with a number far below, which keeps sums of masks finite."""
        scores, limit = arguments["input"], arguments.get("other", arguments.get("min"))
        if far_below(scores):
            scores, limit = limit, scores
        if not isinstance(scores, fx.Node) or not far_below(limit) or arguments.get("max") is not None:
            return None
        return self._same(node, {"input": scores})

    def _move(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node | None:
        """Elements in another shape, whose rows stay whole."""
        if self.keeps:  # of masks in another shape
            return None
        operand = arguments["input"]
        before, after, outer = fact(operand).shape, fact(node).shape, self.dim
        if node.target is permute:
            self.dim = arguments["dims"][outer]
        elif self.dim == len(after) - 1 and before and before[-1] == after[-1]:
            self.dim = len(before) - 1
        else:
            return None
        self.moves.append(node)
        clean = self._without(operand)
        if clean is None:
            self.moves.remove(node)
            self.dim = outer
        return clean

    def _with(self, node: fx.Node, operand: Any) -> fx.Node | None:
        """Return the same operator on its operand without masks, where the masks are before the operator."""
        if not isinstance(operand, fx.Node) or fact(operand) is None:
            return None
        clean = self._without(operand)
        if clean is None:
            return None
        self.seen.append(node)
        return self._call(node, node.target, *(clean if value is operand else value for value in node.args))

    def _call(self, node: fx.Node, function: Any, *arguments: Any) -> fx.Node:
        """Call a function on other operands, in place of a node, with the node's source line, module and rules."""
        call = self.build.host(function, *arguments)
        for key in ("source", "module", "qconfig", "matched_rules", "spelling"):
            if key in node.meta:
                call.meta[key] = node.meta[key]
        return call
