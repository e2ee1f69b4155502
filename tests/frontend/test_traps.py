"""Side effects that a tracer does not see: caches, state, in-place operations on views, hooks, shared modules."""

import copy
import functools

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.errors import ConfigurationError, TraceError
from fxquant.frontend import assumptions, attach_call_hooks, default_leaf, trace
from fxquant.ir import graph
from fxquant.ir.functional import write
from fxquant.ir.graph import BatchDim, TensorFact
from tests.shared import contract
from tests.shared.networks import members, written


def targets(traced: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op in ("call_module", "get_attr")]


class CachedBias(nn.Module):
    """Attention keeps an indexed parameter in a dict, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 4))
        self.register_buffer("index", torch.tensor([0, 1, 2, 3]), persistent=False)
        self.bias_cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = str(x.device)
        if key not in self.bias_cache:
            self.bias_cache[key] = self.bias[:, self.index]
        return x + self.bias_cache[key].sum(0)


@pytest.mark.parametrize("warm", [False, True])
def test_a_cache_neither_hides_parameters_nor_is_left_full(warm):
    model = CachedBias().eval()
    x = torch.randn(3, 4)
    if warm:
        with torch.no_grad():
            model(x)
    kept = dict(model.bias_cache)
    traced = trace(model, (x,))
    assert "bias" in targets(traced)
    assert model.bias_cache.keys() == kept.keys()
    assert all(model.bias_cache[key] is tensor for key, tensor in kept.items())
    assert torch.equal(traced(x), model(x))


def test_a_model_in_train_mode_is_traced_as_eval_and_left_in_train_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    before = copy.deepcopy(model.state_dict())
    traced = trace(model, torch.randn(2, 3, 8, 8))
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in traced.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[3].inplace
    assert not traced.get_submodule("3").inplace


def test_module_dicts_hooks_and_call_are_as_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    call = nn.Module.__call__
    before = {name: {key: id(value) for key, value in module.__dict__.items()} for name, module in model.named_modules()}
    with pytest.raises(TraceError):
        trace(model, torch.randn(2, 5))
    trace(model, torch.randn(2, 4))
    assert nn.Module.__call__ is call
    assert before == {name: {key: id(value) for key, value in module.__dict__.items()} for name, module in model.named_modules()}
    assert "int" not in globals()
    assert "len" not in globals()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.total, self.linear = torch.zeros(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        self.total += 1
        self.linear.last = x
        return self.linear(x)


def test_what_forward_leaves_after_is_not_left_on_the_model():
    model = Counter()
    trace(model, torch.randn(2, 4))
    assert model.seen == []
    assert torch.equal(model.total, torch.zeros(4))
    assert "last" not in model.linear.__dict__


def test_parameters_are_shared_and_containers_are_not():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    traced = trace(model, torch.randn(2, 4))
    assert traced.get_parameter("0.0.weight") is model[0][0].weight
    linear = traced.get_submodule("0.0")
    assert type(linear) is nn.Linear
    assert linear is not model[0][0]
    linear.weight = nn.Parameter(torch.zeros(4, 4))
    assert not torch.equal(model[0][0].weight, linear.weight)
    traced.get_buffer("1.running_mean").add_(1)
    assert torch.equal(model[1].running_mean, torch.zeros(4))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.register_buffer("second", torch.zeros(1))
        self.register_buffer("transient", torch.ones(4), persistent=False)
        self.linear, self.head = nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head["b"](self.linear(x) + self.transient + torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_state_dict_is_the_models_in_the_same_order_also_after_deepcopy():
    model = Unused()
    traced = trace(model, torch.randn(2, 4))
    assert list(traced.state_dict()) == list(model.state_dict())
    copied = copy.deepcopy(traced)
    assert list(copied.state_dict()) == list(model.state_dict())
    assert "parameter first is not used by the graph" in assumptions(traced)
    assert "parameter head.a.weight is not used by the graph" in assumptions(traced)
    x = torch.randn(3, 4)
    assert torch.equal(copied(x), model(x))


def test_a_shared_module_is_one_module_with_several_calls():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    traced = trace(model, torch.randn(2, 4))
    assert targets(traced) == ["0", "1", "0"]
    assert traced.get_submodule("0") is traced.get_submodule("2")
    assert list(traced.state_dict()) == list(model.state_dict())


def test_facts_are_on_every_node():
    @members(lambda: dict(block=nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())))
    def Model(self, x):
        y = self.block(x)
        return y.flatten(1), x.shape[0] * 2

    traced = trace(Model(), torch.randn(1, 3, 8, 8))
    nodes = {node.name: node for node in traced.graph.nodes}
    assert graph.fact(nodes["block_0"]) == TensorFact((BatchDim(), 4, 6, 6), torch.float32)
    assert graph.fact(nodes["flatten"]) == TensorFact((BatchDim(), 144), torch.float32)
    assert str(graph.fact(nodes["mul"])) == "2B"
    assert graph.source(nodes["block_0"]).startswith("test_traps.py:")
    assert graph.source(nodes["block_0"]).endswith("in forward:  y = self.block(x)")
    assert graph.module_path(nodes["block_1"]) == "block.1"
    assert graph.module_path(nodes["flatten"]) == ""
    assert graph.made_by(nodes["flatten"]) == "trace"


def test_the_leaf_rule_can_be_replaced():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    whole = trace(model, torch.randn(2, 4), options=fxq.Options(leaf=lambda module, path: path == "0" or default_leaf(module, path)))
    assert targets(whole) == ["0", "1"]
    open_ = trace(model, torch.randn(2, 4), options=fxq.Options(leaf=lambda module, path: False))
    assert targets(open_) == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    x = torch.randn(3, 4)
    assert torch.equal(whole(x), model(x))
    assert torch.equal(open_(x), model(x))


def test_bound_methods_partials_and_unregistered_modules():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.hidden = nn.Linear(4, 4), [nn.Linear(4, 4)]
            self.apply_linear = functools.partial(self.twice, 2.0)

        def twice(self, factor, x):
            return self.linear(x) * factor

        def forward(self, x):
            return self.hidden[0](self.apply_linear(x))

    model = Model()
    traced = trace(model, torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert "linear" in targets(traced)
    assert torch.equal(traced(x), model(x))


def test_random_numbers_are_drawn_by_the_graph():
    x, model = torch.randn(2, 3), written(lambda m, x: x + torch.rand(3) + torch.randn_like(x))
    traced = trace(model, x)
    torch.manual_seed(5)
    first, second = traced(x), traced(x)
    torch.manual_seed(5)
    assert torch.equal(first, model(x))
    assert not torch.equal(first, second)


def test_inputs_with_another_first_dimension_are_fixed():
    traced = trace(written(lambda m, x, table, scalar: x @ table + scalar), (torch.randn(2, 3), torch.randn(3, 5), torch.tensor(2.0)))
    result = [str(graph.fact(node)) for node in traced.graph.nodes if node.op == "placeholder"]
    assert result == ["f32[B,3]", "f32[3,5]", "f32[]"]


def test_the_input_check_survives_deepcopy_and_can_be_attached_again():
    traced = trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    hooks = list(traced._forward_pre_hooks.values())
    attach_call_hooks(traced)
    assert list(traced._forward_pre_hooks.values()) == hooks
    copied = copy.deepcopy(copy.deepcopy(traced))
    assert list(copied._forward_pre_hooks.values()) == hooks
    with pytest.raises(ConfigurationError):
        copied(torch.randn(2, 5))


def test_a_plain_tensor_that_became_a_constant_is_reported():
    model = written(lambda m, x: x + m.anchors)
    model.anchors = torch.randn(4)
    [note, _] = assumptions(trace(model, torch.randn(2, 4)))
    assert note.startswith("anchors is neither parameter nor buffer: its present content became a constant (test_traps.py:")


def test_repeated_blocks_are_evaluated_once(monkeypatch):
    runs = []
    original = nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, x: runs.append(1) or original(self, x))
    trace(nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(20))), torch.randn(2, 3, 4, 4), check=False)
    assert len(runs) == 2


@torch.library.custom_op("fxquant_tests::narrow_only_when_fake", mutates_args=())
def narrow_only_when_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@narrow_only_when_fake.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("expected bfloat16")


def test_an_operator_whose_form_for_fake_tensors_refuses_what_it_computes_is_run_on_zeros():
    """As `grouped_mm` is, which computes float32 on CPUs, and says of fake tensors that it does not."""
    x = torch.randn(3, 4)
    traced = trace(written(lambda m, x: narrow_only_when_fake(x.relu()) + 1), (x,))
    assert torch.equal(traced(x), x.relu() * 2 + 1)
    assert torch.equal(traced(x[:2]), x[:2].relu() * 2 + 1)


@members(lambda body: dict(conv=nn.Conv2d(3, 8, 3, padding=1), body=body))
def Model(self, x):
    return self.body(self.conv(x))


class Writing:
    """Bodies that write into views."""

    def augmented(y: torch.Tensor):
        y[:, 0] += 1.0
        return y

    def augmented_twice(y: torch.Tensor):
        y[:, 0] += 1.0
        y[:, 1:3] *= 2.0
        y[:, 0] -= y[:, 1]
        return y

    def one_piece(y: torch.Tensor):
        a, b = y.chunk(2, 1)
        a.relu_()
        return torch.cat([b, a], 1)

    def every_piece(y: torch.Tensor):
        a, b = torch.split(y, 4, 1)
        a.relu_()
        b.sigmoid_()
        return y, a + b

    def the_whole_after_a_piece(y: torch.Tensor):
        a, b = y.chunk(2, 1)
        a.mul_(2)
        y.add_(1)
        b.neg_()
        return a, b, y

    def a_view_of_a_view(y: torch.Tensor):
        row = y.flatten(2)[:, 1]
        row[:, :3] = 0.5
        row[:, 4] += 1
        return y, row

    def a_piece_of_the_batch(y: torch.Tensor):
        half = y[: y.shape[0] // 2]
        half.zero_()
        return y + 1

    def transposed(y: torch.Tensor):
        last = y.permute(0, 2, 3, 1)
        last[..., 0] = last[..., 1]
        last[0, 0].T[0].add_(1)
        y.select(1, 2).fill_(3)
        y.narrow(1, 4, 2).copy_(y.narrow(1, 6, 2))
        return y, last

    def from_itself(y: torch.Tensor):
        y[:, 1:3].copy_(y[:, 3:5])
        y.copy_(y[:, :1])
        return y, y[:, 2]

    def unbound(y: torch.Tensor):
        first, *others = y.unbind(1)
        first.clamp_(min=0)
        others[0].add_(first)
        return torch.stack([first, *others], 1), y

    def reshaped(y: torch.Tensor):
        flat = y.view(y.shape[0], -1)
        flat.mul_(2)
        flat[:, ::2].neg_()
        return y.view_as(y) + flat.view(y.shape)

    def seen_in_another_way(y: torch.Tensor):
        kept = y.detach()
        y.transpose_(1, 2)
        y.add_(1)
        y.squeeze_(0)
        return y, kept

    def by_a_function(y: torch.Tensor):
        F.relu(y[:, :4], inplace=True)
        a, b = y[:, :4], y[:, 4:]
        b += a
        return y


BODIES = {name: body for name, body in vars(Writing).items() if not name.startswith("__")}


def same(mine, theirs):
    pairs = zip(mine, theirs, strict=True) if isinstance(theirs, tuple) else [(mine, theirs)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_eager_numbers_at_every_batch_size(body):
    model = Model(body).eval()
    traced = trace(model, torch.randn(2, 3, 5, 5))
    with torch.no_grad():
        for batch in (2, 4, 6):
            x = torch.randn(batch, 3, 5, 5)
            assert same(traced(x), model(x))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("body", [BODIES[name] for name in ("augmented", "one_piece", "a_view_of_a_view", "transposed", "unbound")])
def test_they_are_compiled(body, tmp_path):
    model, x = Model(body).eval(), torch.randn(2, 3, 5, 5)
    result = fxq.quantize(model, [x])
    assert fxq.verify(result.prepared, result.integer, [x])
    again = fxq.load(fxq.save(result.integer, tmp_path / "model.fxq"))
    assert same(again(x), result.integer(x))
    fxq.set_state(result.prepared, fxq.State.FLOAT)
    with torch.no_grad():
        assert same(result.prepared(x), model(x))


def test_disjoint_pieces_are_not_written_together():
    result = fxq.quantize(Model(Writing.one_piece).eval(), [torch.randn(2, 3, 5, 5)])
    contract.assert_all_is_integer(result.prepared)


def test_what_write_follows_is_a_closed_list():
    tensor = torch.zeros(2, 4)
    assert torch.equal(write(tensor, torch.ones(2), (("t", (), {}), ("__getitem__", (1,), {})))[:, 1], torch.ones(2))
    assert torch.equal(tensor, torch.zeros(2, 4))
    for step in (("zero_", (), {}), ("getattr", ("data",), {}), ("__class__", (), {})):
        with pytest.raises(ValueError, match="does not make a view"):
            write(tensor, torch.ones(2), (step,))


def test_a_view_that_cannot_be_taken_again_is_refused():
    def body(y):
        view = torch.as_strided(y, (2, 2), (1, 1))
        view.add_(1)
        return y

    with pytest.raises(TraceError, match="a tensor is read after its memory was changed through a view"):
        trace(Model(body), torch.randn(2, 3, 5, 5))
