"""Models that cannot be traced are refused with a text that says where and why, and what to do."""

import re

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.errors import ConfigurationError, TraceError
from fxquant.frontend import trace
from tests.shared.networks import members, written


def refusal(forward, *inputs, error=TraceError) -> str:
    """The error's text, with line numbers replaced."""
    model = type("Model", (nn.Module,), {"forward": forward})()
    with pytest.raises(error) as caught:
        trace(model, inputs or (torch.randn(2, 3),))
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def branch_on_data(self, x):
    if x.sum() > 0:
        return x
    return -x


def branch_on_the_batch(self, x):
    if x.shape[0] > 5:
        return x
    return -x


def autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.mT
    return y


def assigned_data(self, x):
    y = x * 1
    y.data = x
    return y


# A forward with the shape of its input, and what is said: what is wrong, the line, why, and the remedy.
REFUSALS = {
    branch_on_data: (
        (2, 3), "the model's Python depends on the content of a tensor", "if x.sum() > 0:",
        "need the value of a tensor, which exists only when the graph runs", "use torch.where or a mask",
    ),
    branch_on_the_batch: (
        (2, 3), "control flow depends on the batch size", "if x.shape[0] > 5:",
        "a condition is true at some sizes and false at others", "options=fxq.Options(dynamic_shapes={})",
    ),
    lambda self, x: sum(x[index] for index in range(x.shape[0])): (
        (2, 3), "a loop runs over the batch", "return sum(x[index] for index in range(x.shape[0]))",
        "range() was given a number that depends on the batch size", "options=fxq.Options(dynamic_shapes={})",
    ),
    autocast: (
        (2, 3, 3), "autocast is switched inside forward", "y = x @ x.mT",
        "the numbers would differ from the model's", "remove torch.autocast from forward",
    ),
    lambda self, x: x * x.shape.numel(): (
        (2, 3), "Python code in the model turned the batch size into a constant (node %mul)", "return x * x.shape.numel()",
        "an argument of mul is 12 at one batch size and 30 at another", "keep batch sizes as x.shape[0] or x.size(0) gives them",
    ),
    assigned_data: ((2, 3), "the model assigns to .data of a tensor", "y.data = x", "", ""),
    lambda self, x: x.view(x.shape[0], 7): ((2, 3), "the model's forward raised RuntimeError", "return x.view(x.shape[0], 7)", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("forward", REFUSALS)
def test_what_cannot_be_traced_is_said_with_its_line_its_cause_and_a_remedy(forward):
    shape, what, line, because, remedy = REFUSALS[forward]
    said = refusal(forward, torch.randn(shape)).splitlines()
    assert said[0] == what
    assert said[1].startswith(f"  at       test_errors.py:N in {forward.__name__}:  ")
    assert line.removeprefix("return ") in said[1]  # of a lambda the whole line is shown
    assert said[2].startswith("  because  ")
    assert because in said[2]
    assert said[3].startswith("  remedy   ")
    assert remedy in said[3]


@pytest.mark.parametrize("name", ["nonzero", "argwhere", "masked_select", "unique_consecutive"])
def test_what_has_as_many_items_as_the_data_is_called_on_the_outputs(name):
    def forward(self, x):
        return getattr(torch, name)(x > 0, *[x > 1] * (name == "masked_select"))

    text = refusal(forward)
    assert f"because  {name} needs numbers" in text
    assert "remedy   return what it reads from forward, and call it on the outputs of the model" in text


def test_single_calls_that_cannot_be_traced_are_named():
    assert "item needs numbers" in refusal(lambda self, x: x * x.max().item())
    assert "tolist needs numbers" in refusal(lambda self, x: x * x[0].tolist()[0])
    assert "getitem needs numbers" in refusal(lambda self, x: x[x > 0])
    assert "needs numbers" in refusal(lambda self, x: torch.from_numpy(x.numpy()))
    assert "__int__ needs numbers" in refusal(lambda self, x: x * int(x.sum()))
    assert "the in-place operation bernoulli_ cannot be traced" in refusal(lambda self, x: (x * 1).bernoulli_(0.5))
    assert "the model iterates over the batch" in refusal(lambda self, x: next(iter(x)))


def test_state_that_the_graph_does_not_keep():
    @members(lambda: dict(calls=torch.zeros(1)))
    def Model(self, x):
        self.calls.add_(1)
        return x + self.calls.clone() * counter()

    numbers = iter(range(100))

    def counter():
        return next(numbers)

    with pytest.raises(TraceError) as caught:
        trace(Model(), torch.ones(2, 3), options=fxq.Options(dynamic_shapes={}))
    assert str(caught.value) == (
        "output 0 of the graph is not the model's output\n"
        "  because  on the example input of shape (2, 3) the two differ by up to 1; forward keeps state between calls, "
        "draws random numbers, or has an effect that is not an operation of the graph\n"
        "  remedy   make forward a function of its inputs and parameters alone"
    )


class Nothing:
    pass


def test_an_output_without_tensors():
    assert refusal(lambda self, x: Nothing()) == (
        "forward returned a Nothing\n"
        "  because  a graph returns tensors, numbers, and tuples, lists and dicts of them, and this object holds none\n"
        "  remedy   return a tuple or a dict, or wrap the model in a module whose forward does"
    )


@pytest.mark.parametrize("batch", [4, 7])
def test_a_batch_size_written_into_forward(batch):
    def forward(self, x):
        y = x * 2
        return y.view(batch, 3) @ torch.ones(3, 2)

    x = torch.randn(batch, 3)
    assert refusal(forward, x) == (
        f"the batch size of the example, {batch}, is written into forward\n"
        "  at       test_errors.py:N in forward:  return y.view(batch, 3) @ torch.ones(3, 2)\n"
        "  because  with that size forward runs; with another one this line fails: "
        f"shape '[{batch}, 3]' is invalid for input of size {18 if batch == 4 else 12}\n"
        "  remedy   write x.shape[0], or -1, in place of the number, or pass options=fxq.Options(dynamic_shapes={}) to fix the batch size"
    )
    model = type("Model", (nn.Module,), {"forward": forward})()
    remedy = re.search(r"pass options=(\S+)", refusal(forward, x))
    assert torch.equal(trace(model, x, options=eval(remedy[1]))(x), model(x))


def test_inputs_that_do_not_fit():
    with pytest.raises(TraceError, match="the example inputs do not fit the model's forward"):
        trace(nn.Identity(), (torch.ones(1), torch.ones(1)))
    with pytest.raises(ConfigurationError, match="the example inputs hold no tensor"):
        trace(nn.Identity(), (3,))
    with pytest.raises(ConfigurationError, match="example inputs of type int cannot be used"):
        trace(nn.Identity(), 3)
    with pytest.raises(ConfigurationError, match="input has no dimension 1"):
        trace(nn.Identity(), torch.ones(1), options=fxq.Options(dynamic_shapes={"input": {1: "batch"}}))
    with pytest.raises(ConfigurationError, match="a function cannot be traced"):
        trace(lambda x: x, torch.randn(2, 3))


def test_a_dtype_of_pythons_is_met_by_the_name_of_pytorchs():
    with pytest.raises(TraceError) as raised:
        trace(written(lambda m, x: x + torch.zeros(4, dtype=int).to(x.dtype)), (torch.randn(2, 4),))
    assert "torch.int64 for int" in str(raised.value)
    assert "not Python's int" in str(raised.value)
