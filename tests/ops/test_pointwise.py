"""Functions of one tensor in one or several operators, which become one table; comparisons with numbers at every integer."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ir.integer import qparams
from fxquant.numerics.grids import EVERYTHING
from fxquant.ops import BY_NAME, FUNCTIONS, OPERATORS, operator_of
from fxquant.ops.elementwise.table import curve, same_as
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import Network, members, to_train


@members(lambda function: dict(conv=nn.Conv2d(3, 4, 3), function=function))
def Net(self, x: Tensor) -> Tensor:
    """A convolution, then the function, on values on both sides of 0."""
    return self.function(self.conv(x))


def gamma(x: Tensor) -> Tensor:
    return torch.where(x <= 0.0031308, 12.92 * x, 1.055 * x.pow(1 / 2.4) - 0.055)


def guarded(x: Tensor) -> Tensor:
    y = torch.log(x)
    return torch.where(torch.isnan(y), torch.zeros_like(y), y).clamp(min=-3)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "gamma": gamma,
    "far side": lambda x: torch.where((x > 0.5) | (x < -0.5), 1 / x, 4 * x),
    "guarded": guarded,
    "filled": lambda x: x.sqrt().masked_fill(x < 0, 0.0),
    "not a number": lambda x: (x + 0.1).sqrt().nan_to_num(0.25),
    "nested": lambda x: torch.where(x > 0, torch.where(x > 0.5, x.rsqrt(), x + 1), torch.sigmoid(x + 1) * x),
}


def seeded(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Net(function).eval(), [torch.randn(4, 3, 8, 8) for _ in range(3)]


def names_of(model: nn.Module, example: Tensor, qconfig: fxq.QConfigMapping | None = None) -> list[str]:
    graph = fxq.prepare(model, example, qconfig=qconfig, until="pointwise.to_table").graph
    return [record.name for node in graph.nodes if (record := operator_of(node)) is not None]


def assert_saved_and_exported(prepared: fx.GraphModule, batches: list[Tensor], folder: Path) -> None:
    """Calibrate the prepared model; the integer model that is read from a file has its bits, and so has the ONNX file."""
    fxq.set_state(prepared, "calibrate")
    fxq.calibrate(prepared, batches)
    integer = fxq.load(fxq.save(fxq.convert(prepared), folder / "model.fxq"))
    fxq.set_state(prepared, "validate")
    with torch.no_grad():
        assert torch.equal(integer(batches[0]), prepared(batches[0]))
    assert fxq.verify(integer, fxq.export_onnx(integer, folder / "model.onnx"), batches[:1])


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["bayes-e", "nash-e", "x86"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_table_with_equal_bits(name: str, target: str, tmp_path: Path) -> None:
    model, batches = seeded(CHOICES[name])
    names = names_of(model, batches[0])
    assert names.count("curve") == 1
    assert not {"where", "nan_to_num", "pow", "quotient_of"} & set(names)
    prepared = fxq.prepare(model, batches[0], target=target)
    fxq.set_state(prepared, "float")
    expected = model(batches[0])
    assert torch.equal(prepared(batches[0]), expected)
    assert_saved_and_exported(prepared, batches, tmp_path)


WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {  # a function, and the operator that computes the same
    "silu": (lambda x: x * torch.sigmoid(x), "silu"),
    "silu as a quotient": (lambda x: x / (1 + torch.exp(-x)), "silu"),
    "hard swish": (lambda x: x * F.relu6(x + 3) / 6, "hardswish"),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
    "softplus": (lambda x: torch.log(1 + torch.exp(x)), "softplus"),
    "softsign": (lambda x: x / (1 + x.abs()), "softsign"),
    "gelu": (lambda x: x * 0.5 * (1 + torch.erf(x / 1.4142135381698608)), "gelu"),
    "gelu by tanh": (lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), "gelu"),
    "gelu by tanh, x*x*x": (lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x))), "gelu"),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), None),
    "squared relu": (lambda x: F.relu(x + x.neg() * 0.5) ** 2, None),
    "two tables": (lambda x: torch.tanh(torch.exp(x)), None),
    "masked": (lambda x: x * (x > 0).float(), None),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2", "nash-e", "x86"])
@pytest.mark.parametrize("name", WRITTEN)
def test_operators_that_read_one_tensor_are_one_table(name: str, target: str, tmp_path: Path) -> None:
    function, same = WRITTEN[name]
    model, batches = seeded(function)
    prepared = fxq.prepare(model, batches[0], target=target)
    fxq.set_state(prepared, "float")
    x, y = (batches[0].clone().requires_grad_() for _ in range(2))
    real, expected = prepared(x), model(y)
    assert torch.equal(real, expected)
    assert torch.equal(*(torch.autograd.grad(value.square().sum(), at)[0] for value, at in ((real, x), (expected, y))))
    graph = fxq.prepare(model, batches[0], until="pointwise.to_table", target=target).graph
    curves = [node for node in graph.nodes if node.target is curve]
    known_values = same is not None and "tanh" not in name
    assert len(curves) == int(known_values or name == "masked" or target in ("nash-e", "x86"))
    if curves:
        result = same_as(curves[0].args[1])
        assert (result if result is None else result[0]) == same
    assert_saved_and_exported(prepared, batches, tmp_path)


def test_the_range_ends_where_the_whole_function_saturates() -> None:
    model, batches = seeded(lambda x: torch.exp(-0.5 * x * x))
    batches = [20 * batch for batch in batches]
    assert float(model.conv(batches[0]).detach().abs().max()) > 15
    values = next(fxq.inspect.record(fxq.quantize(model, batches, "nash-e").integer, batches[:1], real=True))
    assert max(float(value.abs().max()) for key, value in values.items() if key.startswith("conv")) < 4.1
    keeps = BY_NAME["curve"].keeps
    assert keeps is not None
    silu = ("mul", "input", ("sigmoid", "input"))
    assert keeps({"steps": silu}, EVERYTHING, 8) == (-9.5, math.inf)
    assert keeps({"steps": ("mul", silu, 0.001)}, EVERYTHING, 8) == (-9.5, math.inf)
    assert keeps({"steps": ("where", ("gt", "input", 200.0), "input", 0.0)}, EVERYTHING, 8) == EVERYTHING


STAY: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "one table": (torch.sigmoid, ["conv2d", "sigmoid"]),
    "a product and a table": (lambda x: torch.sigmoid(2 * x), ["conv2d", "mul", "sigmoid"]),
    "a clamp of the layer": (lambda x: F.relu(x) ** 2, ["conv2d", "clamp", "pow"]),
    "a clamp of a sum": (lambda x: F.relu(x + x.flip(1)) ** 2, ["conv2d", "flip", "add", "clamp", "pow"]),
    "a gate": (lambda x: x * F.hardsigmoid(x.mean((2, 3), keepdim=True)), ["conv2d", "mean", "hardsigmoid", "mul"]),
    "a square": (lambda x: (x * x).sum(1), ["conv2d", "mul", "sum"]),
    "a read tensor": (lambda x: (y := torch.exp(x), torch.tanh(y) + y.flip(1))[1], ["conv2d", "exp", "tanh", "flip", "add"]),
    "a read part": (lambda x: x * (y := torch.sigmoid(x)) + y.flip(1), ["conv2d", "sigmoid", "curve", "flip", "add"]),
}


@pytest.mark.parametrize("name", STAY)
def test_what_gains_nothing_or_is_read_by_others_stays_as_it_is(name: str) -> None:
    function, names = STAY[name]
    model, batches = seeded(function)
    assert names_of(model, batches[0]) == names


def test_the_table_holds_the_function_at_every_point_of_the_grid(tmp_path: Path) -> None:
    model, batches = seeded(gamma)
    result = fxq.quantize(model, batches, target="bayes-e")
    values = next(fxq.inspect.record(result.integer, batches[:1], real=True))
    x, actual = (next(value for key, value in values.items() if key.startswith(name)) for name in ("conv", "where"))
    step = float(torch.diff(torch.unique(actual)).min())
    assert len(torch.unique(actual)) > 50
    assert float((actual - gamma(x)).abs().max()) <= step * 0.5001


def test_training_has_gradients_on_both_sides() -> None:
    model, batches = seeded(gamma)
    prepared = fxq.calibrate(fxq.prepare(model, batches[0], target="nash-e"), batches)
    to_train(prepared)
    x = batches[0].clone().requires_grad_()
    (prepared(x) * torch.linspace(0, 1, 36).view(6, 6)).sum().backward()
    assert bool(torch.isfinite(x.grad).all())
    assert float((x.grad != 0).float().mean()) > 0.9


def deep(x: Tensor) -> Tensor:
    y, z = x, x + 1
    for _ in range(9):
        y, z = z, y * z  # as a nest it would be half as large again at each step
    return torch.where(y > 0, y, z)


NO_CURVE: dict[str, Callable[[Tensor], Tensor]] = {
    "a choice of another tensor": lambda x: torch.where(x > 0, x, x.mean(1, keepdim=True)),
    "a choice of neighbours": lambda x: torch.where(x > 0, x, torch.cumsum(x, 1)),
    "a part without gradients": lambda x: x * torch.sigmoid(x).detach(),
    "too much": deep,
}


@pytest.mark.parametrize("name", NO_CURVE)
def test_what_is_no_single_table_is_left_as_it_is(name: str) -> None:
    model, batches = seeded(NO_CURVE[name])
    assert "curve" not in names_of(model, batches[0])


LIMIT = torch.tensor(0.05)
OF_A_CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: torch.maximum(x, LIMIT) * x,
    "maximum of a constant": lambda x: torch.maximum(LIMIT, x) * x,
    "minimum": lambda x: x * torch.sigmoid(torch.minimum(x, LIMIT)),
    "fmax": lambda x: torch.rsqrt(torch.fmax(x, LIMIT).abs() + 0.5),
    "max": lambda x: torch.max(x, LIMIT.reshape(1)) * x,
    "clamp": lambda x: x.clamp(-LIMIT, LIMIT) * x,
    "a comparison as a number": lambda x: (x > LIMIT).float(),
    "a comparison of a constant": lambda x: torch.where(torch.lt(LIMIT, x), x, x * x),
}


@pytest.mark.parametrize("name", OF_A_CONSTANT)
@pytest.mark.parametrize("target", ["bayes-e", "nash-e"])
def test_a_constant_of_one_number_is_that_number(name: str, target: str) -> None:
    model, batches = seeded(OF_A_CONSTANT[name])
    prepared, integer = compiled(model, batches, target)
    contract.assert_validate_is_integer(prepared, integer, batches[0])
    fxq.set_state(prepared, "float")
    assert torch.equal(prepared(batches[0]), model(batches[0]))


def test_what_the_user_keeps_in_float_is_not_taken_in() -> None:
    model, batches = seeded(lambda x: torch.where(x > 0, torch.sqrt(x), x))
    mapping = fxq.QConfigMapping().set_object_type(torch.sqrt, None)
    assert "curve" in names_of(model, batches[0])
    assert "curve" not in names_of(model, batches[0], mapping)


def test_a_nest_holds_nothing_else() -> None:
    with pytest.raises(ValueError, match="'load' is not an elementwise function"):
        curve(torch.zeros(3), ("load", "input"))


def test_a_function_of_ones_own_is_one_table(tmp_path: Path) -> None:
    bent = fxq.extend.unary("bent_by_a_test", lambda x: x * torch.sigmoid(1.5 * x) + torch.sin(x))

    images = [torch.randn(3, 3, 6, 6) for _ in range(2)]
    prepared, integer = compiled(Network(lambda _, x: bent(x)), images)
    assert [layer.operator for layer in fxq.inspect.layers(integer)] == ["quantize", "bent_by_a_test", "dequantize"]
    contract.assert_validate_is_integer(prepared, integer, images[0])
    contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [(images[1],)])
    assert float((integer(images[0]) - bent(images[0])).abs().max()) < 0.05
    with pytest.raises(fxq.errors.ConfigurationError, match="bent_by_a_test"):
        fxq.extend.unary("bent_by_a_test", torch.sin)
    function = BY_NAME.pop("bent_by_a_test").function
    for table in (OPERATORS, FUNCTIONS):
        del table[function]


def test_thresholds_are_exact() -> None:
    """A comparison with a number is the comparison of what the integers stand for, at every integer and at numbers between."""
    images = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16).expand(2, -1, -1, -1)
    numbers = [0.0, 0.25, 1e-3, -0.5, 0.99, 5.0, -5.0]
    relations = (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne)
    compared = [(number, relation) for number in numbers for relation in relations]
    model = Network(lambda _, x: (x.relu(), x.abs(), [relation(x.clamp(-1, 1), number) for number, relation in compared]))
    _, integer = compiled(model, [images])
    values = contract.graph_values(integer, images)
    clamp = next(node for node in integer.graph.nodes if node.name.startswith("clamp") and qparams(node) is not None)
    real = values[clamp.name].double() * qparams(clamp).scale
    for (number, relation), result in zip(compared, integer(images)[2], strict=True):
        assert torch.equal(result, relation(real, float(torch.tensor(number, dtype=torch.float32)))), (number, relation)
