"""Short forwards, each with one habit of real models or one rare call form: the graph has the model's bits at every batch size."""

import functools
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxquant as fxq
from fxquant.frontend import trace
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, written

Pair = namedtuple("Pair", "first second")


class Layers(nn.Module):
    """Something of everything for the forwards below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.norm = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)
        self.weight, self.token = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(1, 1, 6))
        self.grid = nn.Parameter(torch.randn(1, 6, 4, 4))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("count", torch.zeros(1))
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


class Written:
    """Forwards of several statements; each is called by its name."""

    def shape_unpacking(m: Any, x):
        batch, rows, columns = x.shape
        return x.reshape(batch * rows, columns).reshape(batch, rows * columns)

    def formatted_shape(m: Any, x):
        assert f"{x.shape[1]}" == "3"
        return x + 1

    def maximum(m: Any, x):
        result = x.max(dim=1)
        return result.values + result[0], result.indices

    def vmap_over_constants(m: Any, x):
        mask = torch.vmap(lambda i: torch.arange(6) >= i)(torch.arange(3))
        return x.masked_fill(mask, 0.0)

    def out_argument(m: Any, x):
        y = x * 1
        torch.add(x, 1, out=y)
        return y

    def in_place_relu_and_reuse(m: Any, x):
        y = m.linear(x)
        z = m.relu(y)
        return y + z

    def in_place_operators(m: Any, x):
        y = x * 2
        y += x
        y *= m.table
        y.add_(1).mul_(2)
        y.clamp_(min=-1)
        F.relu(y, inplace=True)
        torch.relu_(y)
        return y

    def in_place_copy_and_fill(m: Any, x):
        y, z = x.clone(), x.clone()
        y.copy_(m.table)
        z.zero_()
        return y + z.fill_(3)

    def item_assignment(m: Any, x):
        y = x.clone()
        y[:, 0] = 1
        y[:, 1, 2:] = x[:, 0, 2:]
        return y

    def constant_changed_in_place(m: Any, x):
        total = torch.zeros(6)
        total.add_(x.sum((0, 1)))
        total[0] = 5
        return total * 2 + x

    def zeros_then_assigned(m: Any, x):
        result = torch.zeros(x.shape[0], 3)
        result[:, 1:] = x[:, 0, :2]
        return result

    def buffer_changed_in_place(m: Any, x):
        m.count.add_(1)
        return x + m.count

    def python_attribute_changed(m: Any, x):
        m.calls = getattr(m, "calls", 0) + 1
        return x * 2

    def identity_shares_memory(m: Any, x):
        y = m.linear(x)
        z = nn.Identity()(y)
        z += 1
        return y + z

    def asserts_on_shapes(m: Any, x):
        assert x.shape[0] == x.shape[0]
        assert isinstance(x, torch.Tensor)
        assert isinstance(x.shape[0], int)
        torch._assert(x.shape[2] == 6, "six columns")
        torch._check(x.shape[0] > 0)
        return m.norm(x)

    def boolean_mask_constant(m: Any, x):
        mask = torch.tensor([True, False, True])
        return x[:, mask] + x[:, mask.nonzero()[:, 0]]

    def size_of_the_result(m: Any, x):
        y = torch.cat([x, x])
        return y.view(2, y.shape[0] // 2, -1), x.shape[0] + 1, y.size()


FORWARDS: dict[str, Callable[..., Any]] = {
    "view half the batch": lambda m, x: x.repeat(2, 1, 1).view(x.shape[0] * 2 // 2, 2, *x.shape[1:]),
    "zeros of the batch": lambda m, x: torch.zeros(x.shape[0], 3) + x[:, 0, :3],
    "full of the batch": lambda m, x: torch.full((x.size(0), 6), 2.5) * x[:, 0],
    "arange of the batch": lambda m, x: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None, None],
    "new ones": lambda m, x: x.new_ones((*x.shape[:2], 4)) + 1,
    "tensor of the batch": lambda m, x: x * torch.tensor([x.shape[0], 1.0]).sum(),
    "linspace of the batch": lambda m, x: x + torch.linspace(0, 1, x.shape[0]).view(-1, 1, 1),
    "numel": lambda m, x: x / x.numel(),
    "product of sizes": lambda m, x: x.reshape(math.prod(x.shape[:2]), -1),
    "square root of the batch": lambda m, x: x * math.sqrt(x.shape[0]),
    "power and logarithm of the batch": lambda m, x: (
        x * x.shape[0] ** 0.5 + math.log(x.shape[0]) + math.floor(x.shape[0] / 3) + round(x.shape[0] / 3)
    ),
    "integer of the batch": lambda m, x: x.reshape(int(x.shape[0] * 3), 6) + int(x.shape[0] / 4) + float(x.shape[0]),
    "length": lambda m, x: x.reshape(len(x), -1) / len(x),
    "minus the batch": lambda m, x: (10 - x.shape[0]) * x + -x.shape[0] + x.shape[0] % 3 + divmod(x.shape[0], 3)[0],
    "iterate over rows": lambda m, x: sum(row for row in x.transpose(0, 1)),
    "token": lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1),
    "interpolated parameter": lambda m, x: F.interpolate(m.grid, size=(2, 3), mode="bilinear").flatten(2).mean(2) + x.mean(1),
    "normalised weight": lambda m, x: F.linear(x, m.weight / m.weight.norm(dim=1, keepdim=True)),
    "data of a parameter": lambda m, x: F.linear(x, m.weight.data) + m.weight.detach().sum(),
    "left parameter": lambda m, x: m.weight @ x.transpose(1, 2) - m.weight[0, 0] * 2 / m.token.sum(),
    "vmap over inputs": lambda m, x: torch.vmap(lambda row: row.sum(0) * 2)(x),
    "scripted function": lambda m, x: scripted(x, x) + 1,
    "autograd function": lambda m, x: Doubled.apply(x) + 1,
    "shared module": lambda m, x: m.linear(m.relu(m.linear(x))),
    "dictionary output": lambda m, x: {"a": x + 1, "b": [x, (x * 2, None)], "c": 3},
    "named tuple output": lambda m, x: Pair(x + 1, x * 2),
    "ordered dictionary output": lambda m, x: OrderedDict(a=x + 1, b=x),
    "plain attribute": lambda m, x: x + m.constant,
    "layer made in forward": lambda m, x: nn.Softmax(-1)(nn.Sequential(nn.ReLU(), nn.Flatten())(x)),
    "condition on a constant": lambda m, x: x + 1 if m.table.sum() > 3 and bool((m.table >= 0).all()) else x - 1,
    "conditional expression on training": lambda m, x: F.dropout(x, 0.5, m.training) * (2 if m.training else 3),
    "slice with the batch": lambda m, x: torch.arange(100.0)[: x.shape[0]] + x[:, 0, 0],
    "keyword only functions": lambda m, x: torch.clamp(input=x, min=0, max=1) + F.softmax(input=x, dim=-1),
    "weight shape": lambda m, x: x[..., : m.weight.shape[0]] + m.weight.numel() + m.weight.dim(),
    "powers of parameters": lambda m, x: x * m.weight[0].abs() ** 0.5 + 2.0 ** m.weight[0] - m.weight[0] ** 2,
}
FORWARDS |= {name.replace("_", " "): forward for name, forward in vars(Written).items() if not name.startswith("__")}


def build(forward) -> nn.Module:
    torch.manual_seed(0)
    return type("Model", (Layers,), {"forward": forward})().eval()


@functools.cache
def traced(name) -> tuple[nn.Module, fx.GraphModule]:
    """The model and its graph, from which nothing else on the model has changed."""
    model = build(FORWARDS[name])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attributes = {key: id(value) for key, value in model.__dict__.items()}
    random = torch.get_rng_state()
    result = trace(model, (torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(1)),))
    assert {key: id(value) for key, value in model.__dict__.items()} == attributes
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert list(result.state_dict()) == list(model.state_dict())
    return model, result


@pytest.mark.sweep(35)
@pytest.mark.parametrize("name", FORWARDS)
def test_graph_equals_model(name):
    model, graph = traced(name)
    for batch in (4, 5, 8):
        x = torch.randn(batch, 3, 6)
        model.count.zero_()
        with torch.no_grad():
            expected, actual = (tree_leaves(form(x.clone())) for form in (model, graph))
        assert len(expected) == len(actual)
        for mine, theirs in zip(actual, expected, strict=True):
            assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


@pytest.mark.parametrize("name", FORWARDS)
def test_graph_changes_nothing_in_place(name):
    for node in traced(name)[1].graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        assert node.op in ("placeholder", "get_attr", "output", "call_module") or not target.endswith("_") or target in ("and_", "or_")
        assert node.kwargs.get("inplace") is not True
        assert "out" not in node.kwargs


TORCH: Any = torch  # whose stubs do not know NumPy's names of arguments


def live(function: Callable[[Tensor], Any]) -> nn.Module:
    """A function of a live tensor of shape (4, 3, 6, 6)."""
    return Network(lambda m, x: function(m.layer(x)), layer=nn.Conv2d(3, 3, 1))


def batch(seed: int = 1, *shape: int) -> Tensor:
    return torch.randn(shape or (4, 3, 6, 6), generator=torch.Generator().manual_seed(seed))


def many(x: Any) -> tuple[Any, ...]:
    """Functions that are others, called, and NumPy's names of arguments."""
    a, b = x[0, 0], x[1, 0]
    return (
        torch.atleast_3d(a, b)[1], x.conj() + torch.real(x).real, (a + 3).median(), a.argmax(), (x > 0).any(), x.new_tensor([0.5] * 6) * x,
        torch.sum(x, axis=1, keepdims=True), x.amax(axis=(1, 2)), TORCH.cat([x, x], axis=1), TORCH.stack((x, x), axis=2),
        torch.ops.aten.relu(x), torch.ops.aten.mean.dim(x, [2, 3]), torch.cat([x, x[:, :0]], 1),
        x[:, [True, False, True]], torch.ops.aten.index_put(x, [None, torch.tensor([1])], x[:, :1]),
    )  # fmt: skip


def test_what_is_other_calls_is_integer_and_holds_the_contract(tmp_path: Path) -> None:
    model, batches = live(many).eval(), [batch(seed) for seed in (1, 2)]
    prepared, integer = compiled(model, batches, dynamic_shapes={})
    contract.assert_all_is_integer(prepared)
    path = fxq.export_onnx(integer, tmp_path / "model.onnx")
    assert fxq.verify(integer, path, [(each,) for each in batches])
    contract.assert_validate_is_integer(prepared, integer, batches[1])
    contract.assert_train_is_validate(prepared, batches[1])
    for wanted, actual in zip(model(batches[0]), integer(batches[0]), strict=True):
        assert wanted.shape == actual.shape
        assert wanted.dtype == actual.dtype
        if wanted.is_floating_point():  # noise of int8, 20 dB below the signal
            assert (wanted - actual).square().mean() < wanted.square().mean() / 100


def scaled_where_negative(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] *= 0.1
    return y


SELECTED: tuple[Callable[[Tensor], Any], ...] = (
    scaled_where_negative, lambda x: x[x > 0], lambda x: x + x[x > 0].mean(), lambda x: len(x[x > 0]), lambda x: x if x[x > 0] else -x,
)  # fmt: skip


@pytest.mark.parametrize("function", SELECTED)
def test_what_a_mask_selects_is_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(fxq.errors.TraceError, match=r"depends on the content of a tensor[\s\S]*use torch.where"):
        fxq.trace(live(function).eval(), (batch(),))


@pytest.mark.parametrize("function", [torch.acos, torch.asin, torch.atanh, torch.erfinv], ids=lambda function: function.__name__)
def test_a_grid_that_reaches_beyond_where_a_function_has_values_trains(function: Callable[[Tensor], Tensor]) -> None:
    """The grid of a tanh: 127 steps are 1.003."""
    x = torch.linspace(-4, 4, 3 * 4 * 36).reshape(4, 3, 6, 6)
    model, options = live(lambda y: function(y.tanh())).eval(), fxq.Options(integer_tail=True)
    prepared = fxq.calibrate(fxq.prepare(model, (x,), options=options), [x])
    fxq.set_qparams(prepared, {"tanh": 0.0079})
    fxq.set_state(prepared, fxq.State.TRAIN)
    prepared(x * 9).sum().backward()
    gradients = [parameter.grad for parameter in prepared.parameters() if parameter.grad is not None]
    assert gradients
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True, "add_bias_kv": True}], ids=["plain", "added"])
def test_what_a_mask_of_padding_hides_changes_no_bit(options: dict[str, bool]) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()  # type: ignore[arg-type]

    hidden = torch.tensor([[False, False, True, True], [False, True, False, True]])
    q, x = batch(1, 2, 3, 8), batch(2, 2, 4, 8)
    model = written(lambda m, q, x, hidden: m.layer(q, x, x, key_padding_mask=hidden, need_weights=False)[0], layer=layer)
    prepared, integer = compiled(model, [(q, x, hidden)])
    assert "none is left in float" in fxq.explain(prepared)
    other = torch.where(hidden[..., None], -x, x)
    assert torch.equal(integer(q, x, hidden), integer(q, other, hidden))
    assert not torch.equal(integer(q, x, hidden), integer(q, x, ~hidden))


def test_tensors_without_elements_stay_on_the_host() -> None:
    model, x = live(lambda x: (x[..., 6:].sum(-1), x[:, :0].flatten(1), torch.cat([x[:, 3:], x, x[:, :0]], 1))).eval(), batch()
    prepared, integer = compiled(model, [x])
    assert "has no elements" in fxq.explain(prepared)
    for wanted, actual in zip(model(x), integer(x), strict=True):
        assert wanted.shape == actual.shape
    assert not integer(x)[0].any()
