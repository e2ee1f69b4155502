"""Scripted functions are traced as the Python they were scripted from; what cannot be traced says so, with the line and a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.backends.onnx.float_export import FloatRegions
from fxquant.frontend import assumptions
from fxquant.ir.graph import TensorFact, fact
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import members


@members(lambda function, width=8: dict(first=nn.Linear(8, 8), function=function, last=nn.Linear(width, 4)))
def Written(self, x: Tensor) -> Tensor:
    """A function between two layers."""
    return self.last(self.function(self.first(x)))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


@torch.jit.script
def gated(a: Tensor, b: Tensor, n: Tensor) -> Tensor:  # as in VITS and WaveNet
    k = int(n[0])
    x = a + b
    return torch.tanh(x[:, :k]) * torch.sigmoid(x[:, k:])


@torch.jit.script
def whole(x: Tensor) -> Tensor:
    return x[:, :] * x[..., :8]


@torch.jit.script
def viewed(x: Tensor) -> Tensor:
    return x.view(x.size(0), 2, -1).transpose(1, 2).reshape(x.shape[0], 8)


def expanded(x: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(x.size(0), 2, 8).mean(1)


def looped(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x * 0.5 + x[:, :8]
    return x


def listed(x: Tensor) -> Tensor:
    parts = []
    for index in range(2):
        parts.append(x[:, index * 4 : (index + 1) * 4])
    return torch.cat(parts, 1)


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :4] = 0.0
    return y


def flagged(x: Tensor, flag: bool = True) -> Tensor:
    return x * 2 if flag else x


def itself(x: Tensor) -> Tensor:
    return x


@torch.jit.script
def nested(x: Tensor) -> Tensor:
    return whole(viewed(x))


def branching(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x
    return x * 2


SCRIPTED: dict[str, nn.Module] = {
    "gated": Written(lambda y: gated(y, y * 0.5, torch.IntTensor([4])), 4),
    "traced": Written(torch.jit.trace(lambda y: y[:, :] * torch.sigmoid(y), rows(), check_trace=False)),
    **{f.name: Written(f) for f in (whole, viewed, nested)},
    **{f.__name__: Written(torch.jit.script(f)) for f in (expanded, looped, listed, assigned, flagged, itself)},
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_helpers_hold_at_every_batch_size(name: str) -> None:
    prepared, integer = compiled(SCRIPTED[name].eval(), [rows(0), rows(1)])
    assert "none is left in float" in fxq.explain(prepared)
    for batch in (rows(2), rows(3)[:3]):
        contract.assert_validate_is_integer(prepared, integer, batch)


def test_a_scripted_function_is_what_it_was_after_a_trace() -> None:
    before = vars(torch.jit.ScriptFunction)["__call__"]
    fxq.trace(SCRIPTED["whole"], rows())
    assert vars(torch.jit.ScriptFunction)["__call__"] is before
    assert torch.equal(whole(rows()), rows() * rows())


def test_a_branch_in_a_scripted_helper_is_refused_at_its_line() -> None:
    with pytest.raises(fxq.errors.TraceError, match=r"depends on the content[\s\S]*in branching:  if bool\(x.sum\(\) > 0\):"):
        fxq.prepare(Written(torch.jit.script(branching)).eval(), rows())


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda y: torch.vmap(lambda a: a * 2 + a.sum())(y),
    "grad": lambda y: torch.func.grad(lambda a: a.square().sum())(y),
    "jvp": lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1],
    "hessian": lambda y: torch.func.hessian(lambda a: a.square().sum())(y[0])[0] + y,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_is_refused_with_a_remedy(name: str) -> None:
    model = Written(TRANSFORMS[name]).eval()
    model(rows())
    with pytest.raises(fxq.errors.TraceError) as raised:
        fxq.prepare(model, rows())
    said = str(raised.value)
    assert "test_scripts_and_transforms.py" in said
    assert "a transform of torch.func cannot be traced" in said
    assert "fxq.wrap" in said
    assert "recursion" not in said


def test_functional_call_is_no_transform() -> None:
    layer = nn.Linear(8, 8)
    model = Written(lambda y: torch.func.functional_call(layer, dict(layer.named_parameters()), (y,)))
    contract.assert_validate_is_integer(*compiled(model.eval(), [rows(0), rows(1)]), rows(2))


Normal, Categorical = distributions.Normal, distributions.Categorical
DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "density": lambda y: Normal(y, 1.0).log_prob(y),
    "mode": lambda y: Categorical(logits=y).mode[:, None] + y,
    "divergence": lambda y: distributions.kl_divergence(Normal(y, 1.0), Normal(y * 0, 1.0)),
    "covariance": lambda y: distributions.MultivariateNormal(y, torch.eye(8)).mean,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_that_checks_its_arguments_says_how_not_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)  # PyTorch's default, which others turn off for a process
    with pytest.raises(fxq.errors.TraceError, match=r"test_scripts_and_transforms\.py[\s\S]*pass validate_args=False"):
        fxq.prepare(Written(DISTRIBUTIONS[name]).eval(), rows())


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda y: Normal(y, F.softplus(y) + 0.1, validate_args=False).mean,
        lambda y: Categorical(logits=y, validate_args=False).probs,
        lambda y: distributions.Bernoulli(logits=y, validate_args=False).probs,
    ],
    ids=["normal", "categorical", "bernoulli"],
)
def test_a_distribution_without_checks_is_traced(function: Callable[[Tensor], Tensor]) -> None:
    contract.assert_validate_is_integer(*compiled(Written(function).eval(), [rows(0), rows(1)]), rows(2))


def checked(assertion: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def function(y: Tensor) -> Tensor:
        assertion(y)
        return y

    return function


ASSERTED: dict[str, Callable[[Tensor], Any]] = {
    "_assert": lambda y: torch._assert(y.sum() > -1e9, "too small"),
    "_assert of all": lambda y: torch._assert((y > -1e9).all(), "too small"),
    "_assert of finite": lambda y: torch._assert(torch.isfinite(y).all(), "infinite"),
    "_assert_async": lambda y: torch._assert_async((y > -1e9).all()),
    "_assert_async with a message": lambda y: torch._assert_async((y > -1e9).all(), "too small"),
}
OF_SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "of a size": lambda y: torch._assert(y.shape[1] == 8, "wrong size"),
    "of the batch": lambda y: torch._assert(y.shape[0] > 0, "empty"),
    "of a rank": lambda y: torch._assert(y.dim() == 2, "wrong rank"),
    "a check": lambda y: torch._check(y.shape[1] == 8),
    "python's": lambda y: Written.forward.__name__ == "forward" and y.shape[1] == 8,
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [*ASSERTED, *OF_SHAPES])
def test_an_assertion_about_content_is_left_out_and_noted(name: str) -> None:
    model = Written(checked({**ASSERTED, **OF_SHAPES}[name])).eval()
    traced = fxq.trace(model, rows())
    noted = [text for text in assumptions(traced) if "an assertion about the content of a tensor is left out" in text]
    assert len(noted) == (1 if name in ASSERTED else 0)
    assert all("test_scripts_and_transforms.py" in text for text in noted)
    assert not any("assert" in node.name for node in traced.graph.nodes)
    prepared, integer = compiled(model, [rows(0), rows(1)])
    contract.assert_validate_is_integer(prepared, integer, rows(2))


def test_an_assertion_that_fails_by_shape_is_the_models_error() -> None:
    with pytest.raises(fxq.errors.TraceError, match="wrong size"):
        fxq.prepare(Written(checked(lambda y: torch._assert(y.shape[1] == 9, "wrong size"))).eval(), rows())


class Padded(nn.Module):
    """A transformer's encoder over sequences of which some positions are padding."""

    def __init__(self, mask: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.mask = mask
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, self.mask, padding)


def sequences(seed: int) -> tuple[Tensor, Tensor]:
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[:, 4:] = True
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed)), padding


PADDING = "positions of encoder that src_key_padding_mask masks hold what its layers compute"


@pytest.mark.nightly
def test_padded_positions_of_an_encoder_are_said_to_differ_from_pytorchs_path_for_inference(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = Padded().eval(), [sequences(seed) for seed in range(3)]
    prepared, integer = compiled(model, batches)
    assert [PADDING in message for message in caplog.messages].count(True) == 1
    assert PADDING in fxq.explain(prepared)
    with torch.no_grad():
        fast, plain, output = model(*batches[0]), model.train().eval()(*batches[0]), integer(*batches[0])
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(*batches[0])
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(fast, plain)
    assert bool((fast[:, 4:] == 0).all())
    error = (slow - output).square().mean() / slow.square().mean()
    assert float(error) < 10**-2.5  # 25 dB, at padded positions as well
    contract.assert_validate_is_integer(prepared, integer, *batches[1])


@pytest.mark.parametrize("form", ["turned off", "no padding", "a mask as well"])
def test_where_pytorch_has_no_such_path_nothing_is_said(form: str) -> None:
    mask = torch.zeros(6, 6, dtype=torch.bool) if form == "a mask as well" else None
    model, (x, padding) = Padded(mask, enable_nested_tensor=form != "turned off").eval(), sequences(0)
    traced = fxq.trace(model.encoder, x) if form == "no padding" else fxq.trace(model, (x, padding))
    assert not any("src_key_padding_mask masks" in text for text in assumptions(traced))


def test_results_of_one_float_function_that_are_read_apart_are_exported_together() -> None:
    """Of two results in float the second one is read after integers: both belong to what gives them, and only tensors go further."""
    _, integer = compiled(Written(lambda y: Normal(y, 1.0, validate_args=False).log_prob(y)).eval(), [rows(0), rows(1)])
    (region,) = FloatRegions(integer, 17).regions.values()
    assert [node.name for node in region.nodes] == ["broadcast_tensors", "getitem", "getitem_1"]
    assert all(isinstance(fact(node), TensorFact) for node in (*region.inputs, *region.outputs))
