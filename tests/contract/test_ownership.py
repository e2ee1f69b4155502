"""Who owns what: no form of a model follows, or disturbs, another one."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from fxquant.ir.graph import copy_parameters
from tests.shared.contract import all_equal
from tests.shared.networks import Network, descend, to_train


class Mixed(nn.Module):
    """Integer layers around layers that stay in float: tied, recurrent, random in training, with buffers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.RMSNorm(16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
        self.recurrent, self.gain = nn.LSTM(16, 16, batch_first=True, dropout=0.3, num_layers=2), nn.Parameter(torch.ones(16))
        self.register_buffer("offset", torch.linspace(0, 1, 16), persistent=False)
        self.again = self.norm  # one layer at two places
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.norm(self.first(x)))
        x = torch.cumsum(x, 1) * self.gain + self.offset
        x = self.again(self.recurrent(x)[0])
        return self.last(x)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed))


@functools.cache
def made() -> fxq.results.Result:
    torch.manual_seed(0)
    kept = fxq.QConfigMapping().set_object_type(torch.cumsum, None)
    for name in ("norm", "again", "encoder", "recurrent"):
        kept = kept.set_module_name(name, None)
    return fxq.quantize(Mixed().eval(), [batch()], "nash-e", kept)


def result() -> fxq.results.Result:
    """The float model and the prepared one, copied for whoever changes them, and a new integer one."""
    prepared = copy.deepcopy(made().prepared)
    return fxq.results.Result(copy.deepcopy(made().float), prepared, fxq.convert(prepared))


def tensors(model: nn.Module) -> set[int]:
    """The memory of everything a model holds, however it holds it."""
    names: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            names.add(value.untyped_storage().data_ptr())
        elif isinstance(value, dict):
            for item in value.values():
                look(item)
        elif isinstance(value, list | tuple | set):
            for item in value:
                look(item)

    for module in model.modules():
        look({name: value for name, value in module.__dict__.items() if name not in ("_modules", "_graph", "meta")})
    return names - {0}


def spoil(model: nn.Module) -> None:
    """Change every number of a model."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1) if tensor.is_floating_point() else tensor.zero_()


FORMS = {
    "float and prepared": lambda r: (made().float, made().prepared),
    "prepared and integer": lambda r: (r.prepared, r.integer),
    "float and integer": lambda r: (made().float, made().integer),
    "two integers": lambda r: (r.integer, fxq.convert(r.prepared)),
    "two prepared": lambda r: (r.prepared, fxq.prepare(r.float, batch(), "nash-e")),
    "of one traced model": lambda r: tuple(fxq.prepare(traced, batch()) for traced in [fxq.trace(r.float, batch())] * 2),
    "a deep copy of prepared": lambda r: (r.prepared, copy.deepcopy(r.prepared)),
    "a deep copy of integer": lambda r: (r.integer, copy.deepcopy(r.integer)),
    "a pickled copy": lambda r: (r.integer, pickle.loads(pickle.dumps(r.integer))),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("forms", FORMS)
def test_two_forms_share_no_memory(forms: str) -> None:
    one, other = FORMS[forms](result())
    assert not tensors(one) & tensors(other)
    assert not {id(module) for module in one.modules()} & {id(module) for module in other.modules()}
    assert not {id(module._forward_hooks) for module in one.modules()} & {id(module._forward_hooks) for module in other.modules()}


def test_an_integer_model_is_kept_while_training_goes_on() -> None:
    actual = result()
    kept, expected = actual.integer, actual.integer(batch(1))
    exported = fxq.text(kept)
    descend(to_train(actual.prepared), [batch()] * 3, 0.1)
    assert torch.equal(kept(batch(1)), expected)
    spoil(actual.prepared)
    spoil(actual.float)
    assert torch.equal(kept(batch(1)), expected)
    assert fxq.text(kept) == exported


def test_an_integer_model_is_always_in_eval_mode(tmp_path: Path) -> None:
    actual = result()
    expected = actual.integer(batch(1))
    actual.prepared.train()
    assert torch.equal(actual.integer(batch(1)), expected)
    around = nn.Sequential(actual.integer)
    loaded = fxq.load(fxq.save(actual.integer, tmp_path / "model.fxq"))
    for model in (actual.integer, around, copy.deepcopy(actual.integer), fxq.convert(actual.prepared), loaded):
        model.train()
        inner = model[0] if isinstance(model, nn.Sequential) else model
        assert not any(module.training for module in inner.modules())
        assert torch.equal(model(batch(1)), expected)
    assert not actual.integer(batch(1)).requires_grad


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "layer", [nn.GRU(3, 3, batch_first=True), nn.MultiheadAttention(3, 1, batch_first=True)], ids=lambda m: type(m).__name__
)
def test_float_modules_are_computed_by_the_same_kernels_in_every_form(layer: nn.Module, tmp_path: Path) -> None:
    """PyTorch chooses kernels, which round differently, by what asks for a gradient."""
    attends = isinstance(layer, nn.MultiheadAttention)
    model = Network(lambda m, x: m.layer(x, x, x)[0] if attends else m.layer(x)[0], layer=layer).eval()
    examples = [torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    prepared = fxq.calibrate(fxq.prepare(model, examples[0]), examples)
    integer = fxq.convert(prepared)
    loaded = fxq.load(fxq.save(integer, tmp_path / "model.fxq"))
    with torch.no_grad():
        for x in examples:
            assert torch.equal(prepared(x), integer(x))
            assert torch.equal(loaded(x), integer(x))
            assert torch.equal(copy.deepcopy(integer)(x), integer(x))


def test_what_is_one_stays_one_and_a_state_dict_has_no_buffers_that_are_not_persistent() -> None:
    actual = result()
    assert "offset" not in actual.prepared.state_dict()
    assert "offset" in {name for name, _ in actual.prepared.named_buffers()}
    for model in (actual.prepared, actual.integer):
        assert model.norm.weight is model.get_submodule("norm").weight
    assert actual.prepared.norm is actual.prepared.again
    recurrent = copy_parameters(nn.LSTM(4, 4))
    assert recurrent._flat_weights[0] is recurrent.weight_ih_l0
    assert recurrent._flat_weight_refs[0]() is recurrent.weight_ih_l0
    assert all_equal(actual.prepared(batch()), actual.integer(batch()))


def test_containers_and_plain_tensors_of_a_module_are_copied() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.table = {"a": [torch.zeros(2), self.weight]}
            self.seen: list[int] = []
            self.inner = (nn.Linear(1, 1),)

    holder = Holder()
    copied = copy_parameters(holder)
    assert copied.table["a"][1] is copied.weight
    assert not tensors(holder) & tensors(copied)
    assert copied.inner[0].weight is not holder.inner[0].weight
    copied.seen.append(1)
    assert holder.seen == []


# ---- dtypes and devices -------------------------------------------------------------------------------------------------
CONVERSIONS = {
    "double": lambda m: m.double(), "half": lambda m: m.half(), "bfloat16": lambda m: m.bfloat16(), "to": lambda m: m.to(torch.float16),
    "to both": lambda m: m.to("cpu", torch.float64), "to like": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda m: m.type(torch.float64), "around": lambda m: nn.Sequential(m).half(),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_another_dtype_is_refused_and_nothing_is_changed(conversion: str) -> None:
    actual = result()
    expected, before = actual.integer(batch()), {name: value.dtype for name, value in actual.prepared.state_dict().items()}
    for model in (actual.prepared, actual.integer):
        with pytest.raises(fxq.errors.ConfigurationError, match="the model cannot be converted to torch"):
            CONVERSIONS[conversion](model)
    assert {name: value.dtype for name, value in actual.prepared.state_dict().items()} == before
    assert torch.equal(actual.integer(batch()), expected)
    assert torch.equal(actual.prepared(batch()), expected)


def test_what_keeps_the_dtype_keeps_the_numbers() -> None:
    actual = result()
    dtypes = {name: value.dtype for name, value in actual.prepared.state_dict().items()}
    assert torch.float64 in dtypes.values()  # histograms count in it
    for model in (actual.prepared, actual.integer):
        expected = model(batch())
        moves = (model.float, model.cpu, model.share_memory, lambda m=model: m.to(torch.float32), lambda m=model: m.type(torch.float32))
        for moved in (move() for move in moves):
            assert moved is model
            assert torch.equal(model(batch()), expected)
        assert torch.equal(model.to(memory_format=torch.channels_last)(batch()), expected)
    assert {name: value.dtype for name, value in actual.prepared.state_dict().items()} == dtypes
    assert all(tensor.is_meta for tensor in copy.deepcopy(actual.prepared).to("meta").state_dict().values())


def test_what_is_not_float32_inside_of_a_model_stays_in_float_and_says_why() -> None:
    model = Network(lambda m, x: m.last(torch.relu(m.first(x).half()).float()), first=nn.Linear(8, 8), last=nn.Linear(8, 4))
    x = torch.randn(4, 8)
    result = fxq.quantize(model, [x])
    assert "its result is float16, and only float32 tensors are quantized" in fxq.explain(result.prepared)
    assert torch.equal(result.prepared(x), result.integer(x))
