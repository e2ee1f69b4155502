"""Containers of a prepared model, hooks on its modules, and what cannot be called: each works, or says at once why it does not."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared.networks import members, to_train, written


@members(lambda channels: dict(conv=nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm=nn.BatchNorm2d(channels), act=nn.ReLU()))
def Block(self, x: Tensor) -> Any:
    return self.act(self.norm(self.conv(x)) + x)


class Net(nn.Module):
    """Layers that are fused, a residual, one module called twice, a module of several outputs, and one that stays in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Identity())
        self.blocks, self.heads = nn.ModuleList([Block(4), Block(4)]), nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 2)})
        self.twice, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.drop(self.twice(F.silu(self.twice(x.mean((2, 3)))))))
        return {name: head(x) for name, head in self.heads.items()}

    def features(self, x: Tensor) -> Any:
        return self.stem(x)


def float_net() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
            nn.init.uniform_(module.weight, 0.05, 3)  # far apart, so that calibration equalizes
    return net


@pytest.fixture(scope="module")
def net() -> fx.GraphModule:
    x = BATCH
    return fxq.calibrate(fxq.prepare(float_net(), x), [x])


def test_containers_are_indexed_and_iterated_over(net: fx.GraphModule) -> None:
    stem, blocks, heads = (net.get_submodule(name) for name in ("stem", "blocks", "heads"))
    assert isinstance(stem, nn.Sequential)
    assert isinstance(blocks, nn.ModuleList)
    assert isinstance(heads, nn.ModuleDict)
    assert (len(stem), len(blocks), list(heads.keys())) == (4, 2, ["a", "b"])
    assert stem[1] is net.get_submodule("stem.1")
    assert [type(layer) for layer in stem] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Identity]
    assert blocks[-1].conv.weight is net.get_parameter("blocks.1.conv.weight")
    assert [module.out_features for module in heads.values()] == [3, 2]
    groups = [{"params": layer.parameters()} for layer in (*stem, *blocks)]
    assert sum(len(group["params"]) for group in torch.optim.SGD(groups, 0.1).param_groups) == 10


def hooked(model: Any, path: str, kind: str) -> list[tuple[Any, ...]]:
    """Return the arguments of a hook in one call of a model."""
    seen: list[tuple[Any, ...]] = []
    handle = getattr(model.get_submodule(path), kind)(lambda module, *arguments: seen.append(arguments))
    model(BATCH)
    handle.remove()
    return seen


def tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


FUSED = {"stem.0", "stem.1", "blocks.0.conv", "blocks.0.norm", "blocks.1.conv", "blocks.1.norm"}
NO_INPUT = {"stem.1", "stem.2", "blocks.0.norm", "blocks.0.act", "blocks.1.norm", "blocks.1.act"}
PATHS = [path for path, module in Net().named_modules() if path and not isinstance(module, nn.ModuleList | nn.ModuleDict)]
BATCH = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_is_given_what_the_module_reads_and_returns_or_cannot_be_registered(net: fx.GraphModule, path: str, kind: str) -> None:
    if path in (FUSED if kind == "register_forward_hook" else NO_INPUT):
        with pytest.raises(fxq.errors.ConfigurationError, match=f"on {path} would never fire\n.*inside of a fused operator"):
            hooked(net, path, kind)
        return
    expected, actual = hooked(float_net(), path, kind), hooked(net, path, kind)
    assert len(actual) == len(expected) == (2 if path == "twice" else 1)
    if path in NO_INPUT:  # the hook is given None there
        expected, actual = [inputs[1:] for inputs in expected], [inputs[1:] for inputs in actual]
    pairs = list(zip(tensors(expected), tensors(actual), strict=True))
    assert pairs
    for wanted, inputs in pairs:
        assert (wanted - inputs).square().mean() < 0.01 * wanted.square().mean()


@pytest.mark.parametrize("state", ["calibrate", "train", "validate"])
def test_hooks_change_no_bit_in_any_state(net: fx.GraphModule, state: str) -> None:
    one, other = copy.deepcopy(net), copy.deepcopy(net)
    seen: list[Any] = []
    for path in set(PATHS) - FUSED:
        other.get_submodule(path).register_forward_hook(lambda module, args, result: seen.append(result))
    for model in (one, other):
        fxq.set_state(model, state)
        model.train(state == "train")
    torch.manual_seed(0)
    expected = one(BATCH)
    torch.manual_seed(0)
    actual = other(BATCH)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert len(seen) == 1 + len(set(PATHS) - FUSED)  # one of them is called twice
    assert any(actual["a"] is each for each in seen)
    sum(value.sum() for value in expected.values()).backward()
    sum(value.sum() for value in actual.values()).backward()
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_features_that_a_hook_reads_have_gradients(net: fx.GraphModule) -> None:
    prepared = to_train(copy.deepcopy(net))
    features: list[Tensor] = []
    prepared.get_submodule("blocks.0").register_forward_hook(lambda module, args, result: features.append(result))
    prepared(BATCH)
    features[0].square().mean().backward()
    moved = {name.split(".")[0] for name, parameter in prepared.named_parameters() if parameter.grad is not None}
    assert moved == {"stem", "blocks"}
    assert prepared.get_parameter("blocks.1.conv.weight").grad is None


def test_a_forward_hook_can_replace_an_output_and_a_pre_hook_cannot(net: fx.GraphModule) -> None:
    prepared = copy.deepcopy(net)
    handle = prepared.get_submodule("heads.a").register_forward_hook(lambda module, args, result: 2 * result)
    expected = net(BATCH)
    output = prepared(BATCH)
    assert torch.equal(output["a"], 2 * expected["a"])
    assert torch.equal(output["b"], expected["b"])
    handle.remove()
    prepared.get_submodule("heads.a").register_forward_pre_hook(lambda module, args: args)
    with pytest.raises(fxq.errors.ConfigurationError, match=r"pre-hook on heads\.a returned something"):
        prepared(BATCH)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_are_refused_with_what_does_it(net: fx.GraphModule, kind: str) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=r"on heads\.a would never fire[\s\S]*output\.register_hook"):
        getattr(net.get_submodule("heads.a"), kind)(lambda *arguments: None)


COPIES: dict[str, Callable[[fx.GraphModule, Path], Any]] = {
    "copied": lambda model, path: copy.deepcopy(model),
    "pickled": lambda model, path: pickle.loads(pickle.dumps(model)),
    "saved": lambda model, path: fxq.load(fxq.save(model, path / "model.fxq")),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", COPIES)
def test_copies_and_files_keep_what_can_be_hooked(net: fx.GraphModule, name: str, tmp_path: Path) -> None:
    prepared = COPIES[name](net, tmp_path)
    (output,) = hooked(prepared, "heads.a", "register_forward_hook")
    assert torch.equal(output[1], net(BATCH)["a"])
    assert len(prepared.get_submodule("stem")) == 4
    with pytest.raises(fxq.errors.ConfigurationError, match="would never fire"):
        hooked(prepared, "stem.0", "register_forward_hook")
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be called directly"):
        prepared.get_submodule("twice")(torch.zeros(1, 4))


@pytest.mark.parametrize("path", ["stem", "twice", "blocks.0"])
def test_a_part_cannot_be_called_by_itself(net: fx.GraphModule, path: str) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match=rf"{path} cannot be called directly\n  at       test_hooks\.py"):
        net.get_submodule(path)(BATCH)


def test_methods_that_call_modules_are_refused_at_the_line_that_does(net: fx.GraphModule) -> None:
    integer: Any = fxq.convert(net)
    for model in (net, integer):
        with pytest.raises(fxq.errors.ConfigurationError, match=r"at       test_hooks\.py:\d+ in features:  return self\.stem\(x\)"):
            model.features(BATCH)
    assert not hasattr(integer, "stem")
    with pytest.raises(AttributeError, match="has no module heads"):
        _ = integer.heads


def test_outputs_that_nothing_reads_are_none_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 4)
    two = written(lambda m, x: (torch.sigmoid(x), 2 * x))
    model = written(lambda m, x: m.linear(m.two(x)[0]), two=two, linear=nn.Linear(4, 2))
    prepared = fxq.calibrate(fxq.prepare(model, x), [x])
    seen: list[Any] = []
    prepared.get_submodule("two").register_forward_hook(lambda module, args, result: seen.append(result))
    assert "a forward hook on two: a tensor of its output" in caplog.text
    prepared(x)
    first, second = seen[0]
    assert first.shape == (2, 4)
    assert second is None
