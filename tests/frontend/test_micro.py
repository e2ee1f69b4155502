"""Short forwards, each with one habit of real models: the graph must give the model's bits at every batch size."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxquant.frontend import trace

Pair = namedtuple("Pair", "first second")


class Layers(nn.Module):
    """Something of everything for the forwards below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.LayerNorm(6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.grid = nn.Parameter(torch.randn(1, 6, 4, 4))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("count", torch.zeros(1))
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.constant = torch.randn(6)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@torch.jit.script
def scripted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * y


def shape_unpacking(m, x):
    batch, rows, columns = x.shape
    return x.reshape(batch * rows, columns).reshape(batch, rows * columns)


def view_half_the_batch(m, x):
    return x.repeat(2, 1, 1).view(x.shape[0] * 2 // 2, 2, *x.shape[1:])


def zeros_of_the_batch(m, x):
    return torch.zeros(x.shape[0], 3) + x[:, 0, :3]


def full_of_the_batch(m, x):
    return torch.full((x.size(0), 6), 2.5) * x[:, 0]


def arange_of_the_batch(m, x):
    return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None, None]


def new_ones(m, x):
    return x.new_ones((*x.shape[:2], 4)) + 1


def tensor_of_the_batch(m, x):
    return x * torch.tensor([x.shape[0], 1.0]).sum()


def linspace_of_the_batch(m, x):
    return x + torch.linspace(0, 1, x.shape[0]).view(-1, 1, 1)


def numel(m, x):
    return x / x.numel()


def formatted_shape(m, x):
    assert f"{x.shape[1]}" == "3"
    return x + 1


def product_of_sizes(m, x):
    return x.reshape(math.prod(x.shape[:2]), -1)


def square_root_of_the_batch(m, x):
    return x * math.sqrt(x.shape[0])


def power_and_logarithm_of_the_batch(m, x):
    return x * x.shape[0] ** 0.5 + math.log(x.shape[0]) + math.floor(x.shape[0] / 3) + round(x.shape[0] / 3)


def integer_of_the_batch(m, x):
    return x.reshape(int(x.shape[0] * 3), 6) + int(x.shape[0] / 4) + float(x.shape[0])


def length(m, x):
    return x.reshape(len(x), -1) / len(x)


def minus_the_batch(m, x):
    return (10 - x.shape[0]) * x + -x.shape[0] + x.shape[0] % 3 + divmod(x.shape[0], 3)[0]


def einsum(m, x):
    return torch.einsum("bij,jk->bik", x, m.weight)


def roll(m, x):
    return torch.roll(x, 1, dims=1)


def chunk(m, x):
    first, second = x.chunk(2, dim=-1)
    return first * second


def split(m, x):
    first, second = torch.split(x, [2, 4], dim=-1)
    return first, second


def unbind(m, x):
    first, *rest = x.unbind(1)
    return first + rest[0] * rest[1]


def iterate_over_rows(m, x):
    return sum(row for row in x.transpose(0, 1))


def topk(m, x):
    return x.topk(2).values + x.topk(2)[0]


def sort(m, x):
    values, indices = x.sort(-1)
    return values, indices


def maximum(m, x):
    found = x.max(dim=1)
    return found.values + found[0], found.indices


def lstm(m, x):
    output, (hidden, cell) = m.lstm(x)
    return output[:, -1] + hidden[0], cell


def attention(m, x):
    return m.attention(x, x, x, need_weights=False)[0]


def token(m, x):
    return torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1)


def interpolated_parameter(m, x):
    return F.interpolate(m.grid, size=(2, 3), mode="bilinear").flatten(2).mean(2) + x.mean(1)


def normalised_weight(m, x):
    return F.linear(x, m.weight / m.weight.norm(dim=1, keepdim=True))


def data_of_a_parameter(m, x):
    return F.linear(x, m.weight.data) + m.weight.detach().sum()


def left_parameter(m, x):
    return m.weight @ x.transpose(1, 2) - m.weight[0, 0] * 2 / m.token.sum()


def reflected_operators(m, x):
    return 1 - x + 2 * x + 3 / (x * x + 1) + 2**x


def comparison_and_where(m, x):
    return torch.where((x > 0) & ~(x > 1), x, -x)


def vmap_over_inputs(m, x):
    return torch.vmap(lambda row: row.sum(0) * 2)(x)


def vmap_over_constants(m, x):
    mask = torch.vmap(lambda i: torch.arange(6) >= i)(torch.arange(3))
    return x.masked_fill(mask, 0.0)


def scripted_function(m, x):
    return scripted(x, x) + 1


def autograd_function(m, x):
    return Doubled.apply(x) + 1


def shared_module(m, x):
    return m.linear(m.relu(m.linear(x)))


def out_argument(m, x):
    y = x * 1
    torch.add(x, 1, out=y)
    return y


def in_place_relu_and_reuse(m, x):
    y = m.linear(x)
    z = m.relu(y)
    return y + z


def in_place_operators(m, x):
    y = x * 2
    y += x
    y *= m.table
    y.add_(1).mul_(2)
    y.clamp_(min=-1)
    F.relu(y, inplace=True)
    torch.relu_(y)
    return y


def in_place_copy_and_fill(m, x):
    y, z = x.clone(), x.clone()
    y.copy_(m.table)
    z.zero_()
    return y + z.fill_(3)


def item_assignment(m, x):
    y = x.clone()
    y[:, 0] = 1
    y[:, 1, 2:] = x[:, 0, 2:]
    return y


def constant_changed_in_place(m, x):
    total = torch.zeros(6)
    total.add_(x.sum((0, 1)))
    total[0] = 5
    return total * 2 + x


def zeros_then_assigned(m, x):
    result = torch.zeros(x.shape[0], 3)
    result[:, 1:] = x[:, 0, :2]
    return result


def buffer_changed_in_place(m, x):
    m.count.add_(1)
    return x + m.count


def python_attribute_changed(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return x * 2


def identity_shares_memory(m, x):
    y = m.linear(x)
    z = nn.Identity()(y)
    z += 1
    return y + z


def dictionary_output(m, x):
    return {"a": x + 1, "b": [x, (x * 2, None)], "c": 3}


def named_tuple_output(m, x):
    return Pair(x + 1, x * 2)


def ordered_dictionary_output(m, x):
    return OrderedDict(a=x + 1, b=x)


def plain_attribute(m, x):
    return x + m.constant


def layer_made_in_forward(m, x):
    return nn.Softmax(-1)(nn.Sequential(nn.ReLU(), nn.Flatten())(x))


def asserts_on_shapes(m, x):
    assert x.shape[0] == x.shape[0]
    assert isinstance(x, torch.Tensor)
    assert isinstance(x.shape[0], int)
    torch._assert(x.shape[2] == 6, "six columns")
    torch._check(x.shape[0] > 0)
    return m.norm(x)


def boolean_mask_constant(m, x):
    mask = torch.tensor([True, False, True])
    return x[:, mask] + x[:, mask.nonzero()[:, 0]]


def condition_on_a_constant(m, x):
    return x + 1 if m.table.sum() > 3 and bool((m.table >= 0).all()) else x - 1


def type_conversion(m, x):
    return x.half().float().to(x.dtype).type_as(x).double()


def size_of_the_result(m, x):
    y = torch.cat([x, x])
    return y.view(2, y.shape[0] // 2, -1), x.shape[0] + 1, y.size()


def conditional_expression_on_training(m, x):
    return F.dropout(x, 0.5, m.training) * (2 if m.training else 3)


def slice_with_the_batch(m, x):
    return torch.arange(100.0)[: x.shape[0]] + x[:, 0, 0]


def index_with_arange(m, x):
    return x[torch.arange(x.shape[0]), x.argmax(1)[:, 0]]


def expand_and_stack(m, x):
    return torch.stack([x, x.expand(x.shape), x.expand_as(x)], 1).permute(0, 2, 1, 3).contiguous()


def pad_and_unfold(m, x):
    return F.unfold(F.pad(x[:, None], (1, 1, 0, 0)), 3)


def one_hot_and_cumsum(m, x):
    return F.one_hot(x.argmax(-1), 6).cumsum(-1) + x


def scaled_attention(m, x):
    return F.scaled_dot_product_attention(x, x, x)


def keyword_only_functions(m, x):
    return torch.clamp(input=x, min=0, max=1) + F.softmax(input=x, dim=-1)


def transposed_property(m, x):
    return x.mT @ x + m.weight.T


def weight_shape(m, x):
    return x[..., : m.weight.shape[0]] + m.weight.numel() + m.weight.dim()


def powers_of_parameters(m, x):
    return x * m.weight[0].abs() ** 0.5 + 2.0 ** m.weight[0] - m.weight[0] ** 2


FORWARDS = [
    value for name, value in list(globals().items()) if callable(value) and getattr(value, "__module__", "") == __name__
    and value not in (Layers, Doubled, Pair, scripted)
]  # fmt: skip


def build(forward) -> nn.Module:
    torch.manual_seed(0)
    model = type("Model", (Layers,), {"forward": lambda self, x: forward(self, x)})()
    return model.eval()


def flat(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return [leaf for item in output.values() for leaf in flat(item)]
    return [leaf for item in output for leaf in flat(item)] if isinstance(output, (tuple, list)) else [output]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_graph_equals_model(forward):
    model = build(forward)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: id(value) for name, value in model.__dict__.items()}
    random = torch.get_rng_state()
    traced = trace(model, (torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(1)),))
    assert {name: id(value) for name, value in model.__dict__.items()} == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert list(traced.state_dict()) == list(model.state_dict())
    for batch in (4, 5, 8):
        x = torch.randn(batch, 3, 6)
        model.count.zero_()
        with torch.no_grad():
            expected = flat(model(x.clone()))
            found = flat(traced(x.clone()))
        assert len(expected) == len(found)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_graph_changes_nothing_in_place(forward):
    traced = trace(build(forward), (torch.randn(2, 3, 6),), check=False)
    for node in traced.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        assert node.op in ("placeholder", "get_attr", "output", "call_module") or not name.endswith("_") or name in ("and_", "or_")
        assert node.kwargs.get("inplace") is not True
        assert "out" not in node.kwargs
