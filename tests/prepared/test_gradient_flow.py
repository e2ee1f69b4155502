"""While a prepared model trains, its gradients are the float model's in direction, also in branches that start at zero."""

import copy
import functools
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.quantizer import Quantizer
from fxquant.training import fused_layers
from tests.shared.networks import members, to_train, to_validate, written

Form = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """Layers for a form of forward: convolutions, a batch norm, factors for channels."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.norm, self.factors, self.form = nn.BatchNorm2d(4), nn.Parameter(torch.rand(4, 1, 1) + 0.5), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self, x)

    @fxq.wrap
    def tail(self, y: Tensor) -> Tensor:
        return y * 10 if self.training else y


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


reverse = Reversal.apply


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0].abs() <= 1)


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return x.clone(), x * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        return first * ctx.factor - second, None


class Written:
    """Forms of several statements; each is called by its name."""

    def no_grad(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = net.a(x)
        return net.b(F.relu(y))

    def inference_mode(net: Net, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = net.a(x)
        return net.b(F.relu(y.clone()))

    def set_grad_enabled_as_a_call(net: Net, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        y = net.a(x)
        torch.set_grad_enabled(True)
        return net.b(F.relu(y + net.c(x)))

    def set_grad_enabled_by_training(net: Net, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(net.training):
            y = net.a(x)
        with torch.set_grad_enabled(not net.training):
            z = net.c(x)
        return net.b(F.relu(y + z))

    def enable_grad_within_no_grad(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = net.a(x)
            with torch.enable_grad():
                z = net.b(F.relu(y))
        return z

    def straight_through(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y + (torch.round(y * 4) / 4 - y).detach())

    def half_detached(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y * 0.3 + y.detach() * 0.7)

    def data_changed_in_place(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        y.data.mul_(2)
        return net.b(y)

    def changed_in_place_without_gradients(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        with torch.no_grad():
            y[:, 0].zero_()
        return net.b(y)


@torch.no_grad()
def frozen(net: Net, x: Tensor) -> Tensor:
    return F.relu(net.norm(net.a(x)))


@torch.no_grad()
def frozen_sigmoid(y: Tensor) -> Tensor:
    return torch.sigmoid(y)


def forms(stop: Callable[[Tensor], Tensor]) -> dict[str, Form]:
    """Forms with a stop at some place, which dissolves where nothing else reads the stopped tensor."""
    return {
        "between layer and relu": lambda net, x: net.b(F.relu(stop(net.a(x)))),
        "of the input": lambda net, x: net.b(F.relu(net.a(stop(x)))),
        "between layer and batch norm": lambda net, x: net.b(F.relu(net.norm(stop(net.a(x))))),
        "in front of a residual": lambda net, x: net.b(F.relu(stop(net.a(x)) + net.c(x))),
        "of a residual": lambda net, x: net.b(F.relu(net.a(x) + stop(net.c(x)))),
        "after a batch norm, in front of a residual": lambda net, x: net.b(F.relu(net.norm(stop(net.a(x))) + net.c(x))),
        "in front of factors": lambda net, x: net.b(stop(net.a(x)) * net.factors + net.c(x)),
        "of an output": lambda net, x: operator.itemgetter(0, 1)((net.b(net.a(x)), stop(net.c(x)))),
        "of an output that is returned twice": lambda net, x: (lambda y: (y, stop(y)))(net.b(net.a(x))),
        "of a part": lambda net, x: net.b(torch.cat([stop(net.a(x))[:, :2], net.c(x)[:, 2:]], 1)),
        "in front of a softmax": lambda net, x: net.b((net.a(x) - stop(net.a(x).amax(1, keepdim=True))).softmax(1)),
        "of one of two readers": lambda net, x: (lambda y: (net.b(y), net.b(stop(y))))(F.relu(net.a(x))),
        "of one of two terms": lambda net, x: (lambda y: F.relu(net.b(y) + stop(y)))(net.a(x)),
        "of one of two terms, of the same tensor": lambda net, x: (lambda y: y * stop(y))(F.silu(net.a(x))),
        "of one of two parts": lambda net, x: (lambda y: torch.cat([stop(y), net.b(y)], 1))(F.max_pool2d(net.a(x), 2)),
        "of one of two calls": lambda net, x: (lambda y: net.a(y) + net.a(stop(y)))(net.a(x)[:, :3]),
        "of a pooled tensor for a second head": lambda net, x: (lambda y: (net.b(y), stop(y).mean((2, 3)) @ net.b.bias))(net.a(x)),
        "of the largest score": lambda net, x: (lambda y: softmax(y - stop(y.amax(1, keepdim=True))))(net.a(x)),
        "of the nearest code": lambda net, x: (lambda y: (net.b(y), y - stop(nearest(net, y))))(net.a(x)),
        "of a half that is chunked": lambda net, x: (lambda y, z: net.b(torch.cat([y, stop(y) * z], 1)))(*net.a(x).chunk(2, 1)),
    }


def softmax(scores: Tensor) -> Tensor:
    powers = scores.exp()
    return powers / powers.sum(1, keepdim=True)


def nearest(net: Net, y: Tensor) -> Tensor:
    """Return the rows (N,4,H,W) of a codebook that are nearest to the pixels of y."""
    codes = net.b.weight.detach()[:, :, 1].permute(0, 2, 1).flatten(0, 1)
    pixels = y.permute(0, 2, 3, 1)
    return F.embedding((pixels @ codes.t()).argmax(-1), codes).permute(0, 3, 1, 2)


STOPS = forms(Tensor.detach)
FORMS: dict[str, Form] = {
    **STOPS,
    **{name: form for name, form in vars(Written).items() if not name.startswith("__")},
    "data": lambda net, x: net.b(F.relu(net.a(x).data)),
    "data of one of two terms": lambda net, x: (lambda y: net.b(y) + y.data)(net.a(x)),
    "no_grad for one of two readers": lambda net, x: (lambda y: net.b(y) + frozen_sigmoid(y))(net.a(x)),
    "detach in place": lambda net, x: net.b(F.relu(net.a(x)).detach_()),
    "no_grad, a decorator": lambda net, x: net.b(frozen(net, x)),
    "SimSiam": lambda net, x: net.b(net.a(x)) * net.a(x).detach(),
    "a detached weight": lambda net, x: F.conv2d(F.relu(net.a(x)), net.b.weight.detach(), net.b.bias, padding=1),
    "a weight's data": lambda net, x: F.conv2d(x, net.a.weight.data, net.a.bias, padding=1),
    "a straight-through weight": lambda net, x: F.conv2d(
        net.a(x), (weight := net.b.weight) + (weight.sign() * weight.abs().mean() - weight).detach(), net.b.bias, padding=1
    ),
    "gradient reversal": lambda net, x: net.b(reverse(F.relu(net.a(x)), 0.5)),
    "gradient reversal in front of a relu": lambda net, x: net.b(F.relu(reverse(net.a(x), 0.5))),
    "gradient reversal of an output": lambda net, x: reverse(net.b(net.a(x)), 0.5),
    "gradient scaling": lambda net, x: net.b(reverse(F.relu(net.a(x)), -0.1)),
    "custom backward with saved tensors": lambda net, x: net.b(Sign.apply(net.a(x))),
    "custom backward of a weight": lambda net, x: F.conv2d(F.relu(net.a(x)), Sign.apply(net.b.weight), net.b.bias, padding=1),
    "custom backward with two results": lambda net, x: functools.reduce(
        lambda first, second: net.b(first) + second, TwoResults.apply(F.relu(net.a(x)), 3.0)
    ),
    "checkpoint": lambda net, x: net.b(checkpoint(lambda y: F.relu(net.a(y)), x, use_reentrant=False)),
    "checkpoint, reentrant": lambda net, x: checkpoint(lambda y: net.b(F.relu(y)), net.a(x), use_reentrant=True),
}
BATCHES = list(torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1)))


def calibrated(model: Any, target: str = "bayes-e") -> torch.fx.GraphModule:
    return fxq.calibrate(fxq.prepare(model, BATCHES[0], target), BATCHES)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters, and of the input, by name; without gradients that are 0 or None."""
    x = BATCHES[0].clone().requires_grad_()
    output = model(x)
    outputs = output if isinstance(output, tuple) else (output,)
    sum((each - 1).square().mean() for each in outputs).backward()
    result = {**{name: parameter.grad for name, parameter in model.named_parameters() if name in NAMES}, "x": x.grad}
    return {name: gradient for name, gradient in result.items() if gradient is not None and bool(gradient.any())}


NAMES = frozenset(name for name, _ in Net(Written.no_grad).named_parameters())


def assert_like(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        if name == "a.bias" and gradient.norm() < 1e-5:  # in front of a batch norm: nothing but rounding
            continue
        assert F.cosine_similarity(actual[name].flatten(), gradient.flatten(), 0) >= 0.99, name
        assert 0.9 < actual[name].norm() / gradient.norm() < 1.1, name


@pytest.mark.sweep(20)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_train_are_the_float_models(form: str, target: str) -> None:
    model = Net(FORMS[form]).train()
    prepared = calibrated(model, target)
    fxq.set_state(prepared, "train")
    assert_like(gradients(prepared.train()), gradients(model))


@members(lambda kind, **settings: dict(
    e=(nn.EmbeddingBag if kind == "bag" else nn.Embedding)(9, 4, **({} if kind == "function" else settings)), kind=kind, settings=settings,
    head=nn.Linear(4, 4),
), seed=0)  # fmt: skip
def Rows(self, ids: Tensor) -> Tensor:
    """Rows of a table of nine, and a head that may be the table itself."""
    rows = self.head(F.embedding(ids, self.e.weight, **self.settings) if self.kind == "function" else self.e(ids))
    return rows @ self.e.weight.t() if self.kind == "tied" else rows


EMBEDDINGS = [{"padding_idx": 3}, {"padding_idx": -6, "scale_grad_by_freq": True}, {"scale_grad_by_freq": True}, {"sparse": True}]


@pytest.mark.parametrize("settings", EMBEDDINGS, ids=lambda settings: " ".join(settings))
@pytest.mark.parametrize("kind", ["module", "function", "tied", "bag", "program"])
def test_arguments_for_gradients_alone_are_the_float_models(kind: str, settings: dict[str, Any]) -> None:
    ids = torch.tensor([[3, 3, 1, 2, 3], [0, 3, 5, 1, 3]])
    model = Rows(kind, **settings)
    sizes = {"ids": {0: torch.export.Dim("batch", min=2)}}
    source = torch.export.export(model.eval(), (ids,), dynamic_shapes=sizes) if kind == "program" else model.eval()
    prepared = fxq.calibrate(fxq.prepare(source, ids), [ids])
    fxq.set_state(prepared, "train")
    slopes = []
    for each in (prepared.train(), model.train()):
        each(ids).sum().backward()
        slopes.append(next(weight.grad for weight in each.parameters() if weight.shape == (9, 4)))
        each.zero_grad()
    (mine, right) = slopes
    assert mine.is_sparse == right.is_sparse
    mine, right = mine.to_dense(), right.to_dense()
    assert torch.equal(mine.any(1), right.any(1))
    torch.testing.assert_close(mine, right, rtol=0.03, atol=0.01)  # that of the quantized head


@pytest.mark.sweep(5)
@pytest.mark.parametrize("form", STOPS)
def test_a_stop_changes_no_bit(form: str, tmp_path: Path) -> None:
    prepared, other = calibrated(Net(STOPS[form])), calibrated(Net(forms(torch.nn.Identity())[form]))
    for each in (prepared, other):
        fxq.set_state(each, "validate")
    integer = fxq.convert(prepared)
    (mine, theirs) = (value if isinstance(value, tuple) else (value,) for value in (prepared(BATCHES[0]), other(BATCHES[0])))
    assert all(map(torch.equal, mine, theirs))
    assert fxq.verify(prepared, integer, BATCHES)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), BATCHES)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", ["gradient reversal", "custom backward with two results", "custom backward of a weight", "half_detached"])
def test_the_integer_model_has_the_bits_of_train_and_nothing_of_gradients(form: str, tmp_path: Path) -> None:
    prepared = calibrated(Net(FORMS[form]).eval())
    fxq.set_state(prepared, "validate")
    expected = prepared(BATCHES[0])
    fxq.set_state(prepared, "train")
    assert torch.equal(prepared.eval()(BATCHES[0]), expected)
    integer = fxq.convert(prepared)
    assert fxq.verify(prepared, integer, BATCHES)
    assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), BATCHES)
    assert "gradient" not in fxq.text(integer)
    assert "detach" not in fxq.text(integer)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", ["half_detached", "after a batch norm, in front of a residual", "of an output that is returned twice"])
def test_stops_survive_files_copies_and_pickles(form: str, tmp_path: Path) -> None:
    prepared = calibrated(Net(STOPS.get(form, FORMS[form])).train())
    fxq.set_state(prepared, "train")
    again = fxq.load(fxq.save(prepared, tmp_path / "prepared.fxq"))
    others = [again, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))]
    expected = gradients(prepared.train())
    for other in others:
        gradient_of = gradients(other.train())
        assert set(gradient_of) == set(expected)
        assert all(torch.equal(gradient_of[name], gradient) for name, gradient in expected.items())


def test_a_file_names_the_python_that_it_cannot_hold(tmp_path: Path) -> None:
    prepared = calibrated(Net(FORMS["gradient reversal"]))
    with pytest.raises(fxq.errors.ExportError, match=r"it calls Reversal.backward[\s\S]*keep prepared\.state_dict\(\)"):
        fxq.save(prepared, tmp_path / "prepared.fxq")
    fxq.save(fxq.convert(prepared), tmp_path / "integer.fxq")
    prepared = calibrated(Net(FORMS["gradient reversal"]).train())
    fxq.set_state(prepared, "train")
    expected = gradients(copy.deepcopy(prepared).train())
    assert_like(gradients(prepared.train()), expected)


def test_a_traced_model_says_the_same_of_gradients_and_is_traced_again() -> None:
    for form in ("no_grad", "gradient reversal", "changed_in_place_without_gradients"):
        model = Net(FORMS[form]).eval()
        traced = fxq.trace(model, BATCHES[0])
        expected = gradients(model)
        for parameter in model.parameters():
            parameter.grad = None
        assert_like(gradients(traced), expected)
        around = nn.Sequential(traced)
        prepared = calibrated(around)
        fxq.set_state(prepared, "train")
        prepared.train()(BATCHES[0]).sub(1).square().mean().backward()
        result = {name.removeprefix("0."): p.grad for name, p in prepared.named_parameters() if p.grad is not None and p.grad.any()}
        assert_like(result, {name: gradient for name, gradient in expected.items() if name != "x"})


# ---- exported programs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_its_stops_and_says_what_it_has_lost(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    batch = ({0: torch.export.Dim("batch")},)
    kept = ("no_grad",) if strict else ("between layer and relu", "detach in place", "no_grad", "half_detached", "a detached weight")
    for form in kept:
        model = Net(FORMS[form]).train()
        prepared = calibrated(torch.export.export(model, (BATCHES[0],), dynamic_shapes=batch, strict=strict))
        caplog.clear()
        fxq.set_state(prepared, "train")
        assert "an exported program holds no hooks" in caplog.text
        expected = gradients(model)
        assert_like(gradients(prepared), expected)


# ---- what is refused, and what is reported -------------------------------------------------------------------------------
def test_what_cannot_be_kept_is_refused_or_told(caplog: pytest.LogCaptureFixture) -> None:
    def hooks_a_parameter(net: Net, x: Tensor) -> Tensor:
        net.a.weight.register_hook(lambda gradient: gradient * 2)
        return net.a(x)

    def hooks_a_tensor(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y

    def keeps(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        y.retain_grad()
        return y

    for forward in (hooks_a_parameter, hooks_a_tensor):
        with pytest.raises(fxq.errors.TraceError, match="registers a hook on the gradient of a tensor"):
            fxq.prepare(Net(forward), BATCHES[0])
    model = Net(lambda net, x: net.b(net.a(x)))
    model.a.register_full_backward_hook(lambda *_: None)
    model.b.weight.register_hook(lambda gradient: gradient * 0)
    model.b.bias.register_post_accumulate_grad_hook(lambda _: None)
    fxq.prepare(model, BATCHES[0])
    assert "backward hooks have no effect in the new model: those of a;" in caplog.text
    assert "hooks on parameters are not copied" in caplog.text
    assert "b.weight, b.bias" in caplog.text


# ---- train mode in Python that is kept --------------------------------------------------------------------------------
def test_a_wrapped_method_sees_train_mode_and_may_stand_in_a_training_branch() -> None:
    def returned(net: Net, x: Tensor) -> Any:
        features = F.relu(net.a(x))
        return (net.b(features), net.tail(features)) if net.training else net.b(features)

    prepared = calibrated(Net(lambda net, x: net.tail(net.a(x))).eval())
    fxq.set_state(prepared, "validate")
    expected = prepared(BATCHES[0])
    assert torch.equal(prepared.train()(BATCHES[0]), expected * 10)
    assert torch.equal(prepared.eval()(BATCHES[0]), expected)
    model = Net(returned).eval()
    prepared = fxq.calibrate(fxq.prepare(model, BATCHES[0], options=fxq.Options(training_branch=True)), BATCHES)
    fxq.set_state(prepared, "float")
    main, tail = copy.deepcopy(prepared).train()(BATCHES[0])
    torch.testing.assert_close(tail, F.relu(model.a(BATCHES[0])) * 10)
    assert torch.equal(prepared.eval()(BATCHES[0]), main)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, F.relu], ids=["silu", "sigmoid", "relu"])
def test_a_second_derivative_has_the_derivative_of_a_table_as_a_constant(function: Any) -> None:
    class Between(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    model = nn.Sequential(nn.Linear(4, 8), Between(), nn.Linear(8, 1))
    x = torch.randn(64, 4)
    prepared = fxq.calibrate(fxq.prepare(model.eval(), x), [x])
    fxq.set_state(prepared, "train")
    penalties: dict[Any, Any] = {}
    for each in (model, prepared):
        (gradient,) = torch.autograd.grad(each(point := x.clone().requires_grad_()).sum(), point, create_graph=True)
        names = ("0.weight", "0.bias", "2.weight")
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        penalties[each] = torch.autograd.grad(penalty, [each.get_parameter(name) for name in names], allow_unused=True)
    (first, bias, last), (wanted, _, wanted_last) = penalties[prepared], penalties[model]
    assert bias is None  # reached by the derivative of the function alone
    assert F.cosine_similarity(first.flatten(), wanted.flatten(), 0) > 0.98
    assert F.cosine_similarity(last.flatten(), wanted_last.flatten(), 0) > 0.98


pytestmark = pytest.mark.usefixtures("default_outputs")

IMAGES = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
ROWS = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Model(NamedTuple):
    """Return the float model by `build`; `trains` is the parameter that starts at 0."""

    trains: str
    batches: list[Tensor]
    build: Callable[[], nn.Module]


def gate(start: float = 0.0) -> nn.Module:
    return written(lambda m, x: x + m.conv(x) * m.gate, conv=nn.Conv2d(3, 3, 1), gate=nn.Parameter(torch.full((1, 3, 1, 1), start)))


def tanh_gate() -> nn.Module:
    return written(lambda m, x: x + torch.tanh(m.gate) * m.conv(x), conv=nn.Conv2d(3, 3, 1), gate=nn.Parameter(torch.zeros(1)))


def last_norm() -> nn.Module:
    model = written(lambda m, x: x - m.norm(m.conv(x)), conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.BatchNorm2d(3))
    nn.init.zeros_(model.norm.weight)
    return model


def last_layer(forward: Callable[..., Tensor]) -> nn.Module:
    model = written(forward, first=nn.Conv2d(3, 8, 3, padding=1), last=nn.Conv2d(8, 3, 1))
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)
    return model


def head() -> nn.Module:
    return last_layer(lambda m, x: m.last(F.silu(m.first(x))))


def lora() -> nn.Module:
    layers = {"linear": nn.Linear(8, 8), "down": nn.Linear(8, 4, bias=False), "up": nn.Linear(4, 8, bias=False)}
    model = written(lambda m, x: m.linear(x) + m.up(m.down(x)) * 2, **layers)
    nn.init.zeros_(model.up.weight)
    return model


MODELS = {
    "gate": Model("gate", IMAGES, gate),  # ReZero, NAFNet, layer scales
    "norm": Model("norm.weight", IMAGES, last_norm),  # torchvision's `zero_init_residual`
    "conv": Model("last.weight", IMAGES, lambda: last_layer(lambda m, x: x + m.last(F.silu(m.first(x))))),  # diffusion models, flows
    "head": Model("last.weight", IMAGES, head),
    "lora": Model("up.weight", ROWS, lora),
    "tanh": Model("gate", IMAGES, tanh_gate),  # Flamingo's gated attention
}
SMALL = {"small gate": Model("gate", IMAGES, lambda: gate(1e-6))}


def in_training(
    model: nn.Module,
    batches: list[Tensor],
    target: str,
    activations: str = "statistics",
    weights: str = "statistics",
    dtype: str | None = None,
) -> fx.GraphModule:
    qconfig = fxq.QConfig(fxq.ActivationConfig(dtype, training=activations), fxq.WeightConfig(training=weights))
    return to_train(fxq.calibrate(fxq.prepare(model, batches[0], target, qconfig), batches))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["bayes-e", "x86", "qnnpack"])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_gradient_is_the_float_models(name: str, target: str) -> None:
    """Batch norms have running statistics on both sides: integers that are all 0 show nothing of a batch's statistics."""
    torch.manual_seed(3)
    trains, batches, build = MODELS[name]
    model = build().eval()
    prepared = in_training(model, batches, target)
    loss(prepared, batches[0]).backward()
    loss(model, batches[0]).backward()
    actual, wanted = (each.get_parameter(trains).grad.flatten() for each in (prepared, model))
    assert float(F.cosine_similarity(actual, wanted, 0)) > 0.99
    assert 0.9 < float(actual.norm() / wanted.norm()) < 1.1


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
@pytest.mark.parametrize("start", [1e-9, 1e-6, 1e-4, -1e-5])
def test_a_small_term_of_a_sum_has_its_gradient(start: float, dtype: str, fused: bool) -> None:
    """Its multiplier is rounded, to 0 or to few bits; its gradient is not."""
    torch.manual_seed(3)
    model = gate(start)
    prepared = in_training(model, IMAGES, "x86" if dtype == "uint8" else "nash-e", dtype=dtype)
    if fused:
        loss(prepared, IMAGES[0]).backward()
    else:
        with fused_layers.unfused():
            loss(prepared, IMAGES[0]).backward()
    loss(model, IMAGES[0]).backward()
    torch.testing.assert_close(prepared.gate.grad, model.gate.grad, rtol=0.03, atol=0.003)


SETTINGS = [  # target, training of activations, training of weights
    ("x86", "statistics", "statistics"),
    ("x86", "lsq+", "learned"),
    ("x86", "frozen", "statistics"),
    ("bayes-e", "learned", "tqt"),
    ("bayes-e", "pact", "learned"),
    ("qnnpack", "tqt", "statistics"),
]
CASES = [(name, *SETTINGS[(at + other) % len(SETTINGS)]) for at, name in enumerate(MODELS | SMALL) for other in (0, 3)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "target", "activations", "weights"), CASES, ids=["-".join(case) for case in CASES])
def test_a_branch_that_starts_at_zero_trains_as_the_float_one_does(name: str, target: str, activations: str, weights: str) -> None:
    torch.manual_seed(3)
    trains, batches, build = (MODELS | SMALL)[name]
    model = build().train()
    prepared = in_training(model, batches, target, activations, weights)
    losses: dict[nn.Module, Tensor] = {}
    for each in (prepared, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.2)
        for step in range(25):
            optimizer.zero_grad()
            losses[each] = loss(each, batches[step % 3])
            if step == 0:
                start = losses[each].detach()
            losses[each].backward()
            optimizer.step()
    assert float(prepared.get_parameter(trains).detach().abs().max()) > 0.01
    gained = float(start - losses[model].detach())
    assert float(start - losses[prepared].detach()) > 0.6 * gained > 0
    to_validate(prepared)
    assert fxq.verify(prepared, fxq.convert(prepared), batches[:1])


def test_calibration_names_the_tensors_that_were_zero(caplog: pytest.LogCaptureFixture) -> None:
    prepared = in_training(lora(), ROWS, "bayes-e", "learned")
    (said,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    assert "%up (" in said
    assert f"{__file__}:" in said or "test_gradient_flow.py:" in said
    assert "%down" not in said
    assert prepared.quantized.up.quantizer.was_zero
    caplog.clear()
    in_training(gate(1.0), IMAGES, "bayes-e", "learned")
    assert not caplog.records


def overwritten(m: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :2] = x[:, :2] * 2
    return y + memory


def test_zeros_that_forward_makes_are_not_named_and_zeros_that_it_is_given_are(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    fxq.calibrate(fxq.prepare(written(overwritten), (x, x * 0)), [(x, x * 0)])
    (said,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    assert said.count("%") == 1
    assert "%memory_quantize" in said


def test_calibrating_again_lets_a_scale_that_was_zero_learn() -> None:
    prepared = in_training(head(), IMAGES, "bayes-e", "learned")
    quantizer: Quantizer = prepared.quantized.last.quantizer
    loss(prepared, IMAGES[0]).backward()
    assert quantizer.scale_change.grad is None
    with torch.no_grad():
        prepared.get_parameter("last.weight").fill_(0.1)
    fxq.calibrate(prepared, IMAGES)
    fxq.set_state(prepared, fxq.State.TRAIN)
    loss(prepared, IMAGES[0]).backward()
    assert not quantizer.was_zero
    assert bool(quantizer.scale_change.grad != 0)


def scaled(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A branch times 1e-6, which only the sum reads, and a tensor just as small that is an output, too."""
    branch, shown = torch.relu(x) * 1e-6, x.tanh() * 1e-6
    return x + branch.reshape(-1, 8) * 2.0 + shown, shown


def test_tensors_that_a_sum_does_not_see_follow_their_batches(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    prepared = in_training(written(scaled), ROWS, "bayes-e", "learned")
    unseen = {operator.output.name for operator in quantized_operators(prepared).values() if operator.output.unseen}
    assert unseen == {"mul", "mul_2"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "%mul (" in said
    assert "below half a step of the sum that reads them" in said
    loaded = fxq.load(fxq.save(prepared, tmp_path / "model.fxq"))
    assert {operator.output.name for operator in quantized_operators(loaded).values() if operator.output.unseen} == unseen
    before = fxq.qparams(prepared)
    for model in (prepared, loaded):
        model(ROWS[0] / 2)
    after = fxq.qparams(prepared)
    assert {name for name in after if after[name] != before[name]} == unseen
    assert after == fxq.qparams(loaded)


def test_a_tensor_that_something_else_reads_is_seen() -> None:
    model = written(lambda m, x: (x + (y := x * 1e-6), m.head(y)), head=nn.Linear(8, 4))
    prepared = in_training(model, ROWS, "nash-e", "learned")
    assert not any(operator.output.unseen for operator in quantized_operators(prepared).values())
