"""Loops of prepared models in training, all steps at once, where nothing but what the loop carries changes from step to step.

A backend computes what each step carries (`loops.AT_ONCE`), without gradients. With that, the operators of the body are called once for
all steps, which are stacked along dimension 0: one call gives every value and every mask of what saturates. Each sum of products is
detached from the operators that read it, so that the body is, for all steps,

    sums = operands · Wᵀ,    (what is carried, operands) = elementwise functions of (what was carried before, sums, the sequence)

The derivatives of elementwise functions are factors that no gradient changes, and are found for all steps together. What is left to the
steps, from the last to the first, are products with the factors and with W. From the gradients of all steps, autograd finds those of
whatever the loop reads, again together. It also finds those that the steps have found: they must agree.

Gradients equal those of the steps up to the order in which floats are summed. The steps run one by one where no backend computes them, and
where something could see one: hooks, anomaly detection, hooks on saved tensors (checkpoints), forward-mode derivatives, transforms of
torch.func. They run again for second derivatives. Scales that follow statistics take all steps as one batch, after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.ir import loops
from fxquant.ir.graph import computed, resolve
from fxquant.ops.recurrent.recurrence import loop_item, loop_state
from fxquant.prepared.operators import QuantizedOperator, carrying, followed_by, take_integers
from fxquant.primitives.accumulate import products_given
from fxquant.support import disagreed, disagreements

IMPLEMENTATION = "the training of a loop at once"
TOLERANCE = 1e-3  # of the largest gradient: sums of a few thousand float32 numbers differ by less, those of other functions by more


class _Product(NamedTuple):
    """Sums of products of all steps, their operand and weight, and the sums as others read them."""

    operand: Tensor
    weight: Tensor
    sums: Tensor
    read: Tensor


class Body:
    """The body of a loop, called once for all steps with gradients; `carried` has the integers of all steps, as a backend computes them.

    `sources` are the operators whose results the loop reads, by their nodes, and `values` the integers of these results. Raises ValueError
    where the operators carry other integers.
    """

    def __init__(
        self, model: Any, start: fx.Node, sources: Mapping[fx.Node, QuantizedOperator], values: Sequence[Tensor],
        carried: Mapping[int, list[Tensor]],
    ) -> None:  # fmt: skip
        self.model, self.start, self.sources = model, start, sources
        self.nodes, self.steps = [node for node in loops.body(start) if node.target is not loops.end], len(carried[0])
        self.operators = {node: resolve(model, str(node.target)) for node in self.nodes if node.op == "call_module"}
        every = (each for operator in self.operators.values() for each in followed_by(operator) if each.waiting is not None)
        self.scales = {each: {name: value.clone() for name, value in each._buffers.items() if value is not None} for each in every}
        places = {node: place for place, node in enumerate(sources)}
        marks: list[Any] = [node for node, each in self.operators.items() if each.operator.function in (loop_item, loop_state)]
        (item,) = (node for node in marks if self.operators[node].operator.function is loop_item)
        self.first = {node.args[2]: places[node.args[0]] for node in marks if node is not item}  # the places of the first states
        self.place, self.dim, self.backwards = places[item.args[0]], item.args[2], item.args[3]  # of the sequence
        rows = [value.detach() for value in values]
        self.whole = rows[self.place]
        steps = self._others(self.whole)
        self.sequence = (steps.flip(0) if self.backwards else steps).flatten(0, 1).unsqueeze(self.dim).requires_grad_()
        rows[self.place] = self.sequence  # of one step
        before = {index: torch.cat([rows[place], *carried[index][:-1]]) for index, place in self.first.items()}
        frame, self.products = loops.Frame(1), list[_Product]()
        frame.step, frame.carried = 0, {index: [value.requires_grad_()] for index, value in before.items()}
        with torch.enable_grad(), products_given(self._cut):
            self._call(rows, frame)
        self.results = [frame.carried[index][-1] for index in before]
        if not all(torch.equal(torch.cat(carried[index]), result) for index, result in zip(before, self.results, strict=True)):
            raise ValueError("it carries other integers than its operators")
        self.read = [*before.values(), *(product.read for product in self.products)]
        self.parameters = self._leaves()

    def _others(self, sequence: Tensor) -> Tensor:
        """Return the view of a sequence, in memory order, of all steps but the first, which are its dimension 0."""
        return sequence.narrow(self.dim, 0 if self.backwards else 1, self.steps).movedim(self.dim, 0)

    def _cut(self, operand: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
        if not operand.requires_grad:
            return sums
        self.products.append(_Product(operand, weight.detach(), sums, sums.detach().requires_grad_()))
        return self.products[-1].read

    def _call(self, values: Sequence[Tensor], frame: loops.Frame) -> None:
        """Call the operators of the body once, given the integers of what the loop reads."""
        parameters = [node for node in loops.reads(self.start) if node.op == "get_attr"]
        environment: dict[fx.Node, Any] = {node: resolve(self.model, str(node.target)) for node in parameters}
        environment |= {node: carrying(each, source.output.grid) for (node, source), each in zip(self.sources.items(), values, strict=True)}
        environment[self.start] = frame
        for node in self.nodes:
            environment[node] = computed(self.model, node, environment.__getitem__)

    def _leaves(self) -> list[Tensor]:
        """Return the parameters that have gradients."""
        waiting = [each.grad_fn for each in (*self.results, *(product.sums for product in self.products))]
        own, functions = {id(each) for each in (self.sequence, *self.read)}, dict[Any, None]()
        while waiting:
            function = waiting.pop()
            if function is not None and function not in functions:
                functions[function] = None
                waiting += [each for each, _ in function.next_functions]
        return [each.variable for each in functions if hasattr(each, "variable") and id(each.variable) not in own]

    def _terms(self, result: Tensor, of_result: Tensor, to: Sequence[Tensor]) -> list[tuple[Sequence[Tensor], ...]]:
        """Return what the gradient of a result adds to the gradients `to` of `read`: factors, gradient and sum, each by steps."""
        factors = torch.autograd.grad(result, self.read, torch.ones_like(result), retain_graph=True, allow_unused=True)
        columns, terms = result.shape[-1], list[tuple[Sequence[Tensor], ...]]()
        for factor, total in ((factor, total) for factor, total in zip(factors, to, strict=True) if factor is not None):
            if factor.shape[-1] % columns:
                raise ValueError("it is not made of products and elementwise functions")
            parts = self.steps, -1, factor.shape[-1] // columns, columns
            terms.append(tuple(each.unbind(0) for each in (factor.reshape(parts), of_result.unsqueeze(2), total[:-1].view(parts))))
        return terms

    def back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the values and of the parameters, from the gradients of what all steps carry.

        Raises ValueError where autograd finds other gradients of what is carried.
        """
        to = [each.new_zeros(self.steps + 1, each.shape[0] // self.steps, each.shape[1]) for each in self.read]  # the last step has none
        of_outputs = [torch.zeros_like(each[:-1]) if own is None else own for own, each in zip(gradients, to, strict=False)]
        of_results = [torch.empty_like(each) for each in of_outputs]
        terms = [term for pair in zip(self.results, of_results, strict=True) for term in self._terms(*pair, to)]
        products = []
        for product, of_sums in reversed([*zip(self.products, to[len(of_results) :], strict=True)]):
            of_operand = of_sums.new_empty(self.steps, of_sums.shape[1], product.operand.shape[1])
            products.append((of_sums.unbind(0), product.weight, of_operand.unbind(0), self._terms(product.operand, of_operand, to)))
        for step in reversed(range(self.steps)):
            for gradient, each, result in zip(of_outputs, to, of_results, strict=False):
                torch.add(gradient[step], each[step + 1], out=result[step])
            for factor, of_result, total in terms:
                total[step].addcmul_(factor[step], of_result[step])
            for sums, weight, operand, others in products:
                torch.mm(sums[step], weight, out=operand[step])
                for factor, of_result, total in others:
                    total[step].addcmul_(factor[step], of_result[step])
        ends, inputs = [*self.results, *(each.sums for each in self.products)], [self.sequence, *self.read, *self.parameters]
        flat = [each.flatten(0, 1) for each in (*of_results, *(each[:-1] for each in to[len(of_results) :]))]
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        of_sequence, *of_others = torch.autograd.grad(ends, inputs, flat, retain_graph=keeps, allow_unused=True)
        for each, again in zip(to, of_others, strict=False):
            own = each[:-1].flatten(0, 1)
            if float((own if again is None else again - own).abs().max()) > TOLERANCE * float(own.abs().max()):
                raise ValueError("autograd finds other gradients of what it carries")
        of_values = dict[int, Tensor]()
        for place, each in zip(self.first.values(), to, strict=False):
            of_values[place] = of_values[place] + each[0] if place in of_values else each[0]
        if of_sequence is not None:
            of_values[self.place] = torch.zeros_like(self.whole)
            steps = of_sequence.reshape(self.steps, -1, of_sequence.shape[-1])
            self._others(of_values[self.place]).copy_(steps.flip(0) if self.backwards else steps)
        return [*map(of_values.get, range(len(self.sources))), *of_others[len(to) :]]

    def again(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients that `back` returns, by running the loop step by step under autograd; recorded in grad mode."""
        moved, closed = {each: each._buffers.copy() for each in self.scales}, [True]
        try:
            for each, scales in self.scales.items():
                each._buffers.update(scales)
                each.waiting = []
            frame = loops.Frame(self.steps + 1)
            with torch.enable_grad():
                values = [_Given.apply(each, closed) for each in values]  # type: ignore[no-untyped-call]
                while frame.more():
                    self._call(values, frame)
                    frame.advance()
                results = [torch.stack(frame.carried[index]) for index in self.first]
        finally:
            for each, buffers in moved.items():
                each._buffers.update(buffers)
                each.waiting = None
        pairs = [(result, each) for result, each in zip(results, gradients, strict=True) if each is not None]
        inputs = [*values, *self.parameters]
        ends, of_ends = zip(*pairs, strict=True)
        needed = [each for each in inputs if each.requires_grad]
        of_needed = iter(torch.autograd.grad(ends, needed, of_ends, create_graph=torch.is_grad_enabled(), allow_unused=True))
        closed.clear()
        return [next(of_needed) if each.requires_grad else None for each in inputs]


class _Given(torch.autograd.Function):
    """A tensor whose gradient stops at it while a list is not empty."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, closed: Sequence[bool]) -> Tensor:
        ctx.closed = closed
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.closed else gradient, None


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: Body, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.body = body
        return tuple(result.detach().view(body.steps, -1, result.shape[-1]) for result in body.results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        body, tensors = ctx.body, ctx.saved_tensors
        if not torch.is_grad_enabled():
            try:
                with torch.autocast(tensors[0].device.type, enabled=False):
                    return None, *body.back(gradients)
            except ValueError as error:
                disagreed(body.model, IMPLEMENTATION, [f"%{body.start.name}"], str(error), "its steps run one by one")
        return None, *body.again(tensors[: len(body.sources)], gradients)


def wait(model: Any, start: fx.Node, frame: loops.Frame, _: Any) -> None:
    """Let scales that follow the values of a loop wait for its last step, and then follow the values of all steps as one batch."""
    nodes = loops.body(start) if frame.more() and not frame.again else []
    operators = [resolve(model, str(node.target)) for node in nodes if node.op == "call_module"]
    every = dict.fromkeys(each for operator in operators if isinstance(operator, QuantizedOperator) for each in followed_by(operator))
    following = [each for each in every if each.moves and not each.at_first]
    for each in following:
        each.waiting = []

    def follow() -> None:
        for each in following:
            each.follow_all()

    frame.ended = torch.compiler.disable(follow) if following else None  # type: ignore[no-untyped-call]


def at_once(model: Any, start: fx.Node, frame: loops.Frame, values: dict[str, Any]) -> None:
    """Run the loop that a node begins, with gradients, where a backend computes what its steps carry; leave it as it is elsewhere."""
    if not torch.is_grad_enabled() or not frame.more() or _is_watched():
        return
    if any(each.implementation == IMPLEMENTATION and each.place == f"%{start.name}" for each in disagreements(model)):
        return
    inner = loops.Frame(frame.count)
    inner.again = True
    with torch.no_grad():
        loops.at_once(model, start.name, inner, values)
    operators = [resolve(model, str(node.target)) for node in loops.body(start) if node.op == "call_module"]
    if inner.more() or any(each.detached or each._backward_hooks or each._backward_pre_hooks for each in operators):
        return
    if any(each.at_first for operator in operators for each in followed_by(operator)):
        return
    reads = loops.reads(start)
    sources = {node: resolve(model, str(node.target)) for node in reads if node.name in values}
    if not all(node in sources or node.op == "get_attr" for node in reads):
        return
    integers = [take_integers(values[node.name], source.output).value for node, source in sources.items()]
    try:
        body = Body(model, start, sources, integers, inner.carried)
    except ValueError as error:
        return disagreed(model, IMPLEMENTATION, [f"%{start.name}"], str(error), "its steps run one by one")
    stacks = _Trained.apply(body, *integers, *body.parameters)  # type: ignore[no-untyped-call]
    frame.carried = {index: list(stack.unbind(0)) for index, stack in zip(body.first, stacks, strict=True)}
    frame.advance(frame.count - frame.step)


def _is_watched() -> bool:
    """Return whether something may look at single steps, or at what autograd saves."""
    return (
        torch.is_anomaly_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


loops.AT_ONCE += [wait, at_once]
