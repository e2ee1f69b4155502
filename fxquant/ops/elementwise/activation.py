"""Clamping, where relu, relu6, hardtanh and clamp are one operator, and dropout in all its kinds, the identity except while training.

Dropout that also acts in eval mode is not in the operator table.
"""

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.numerics.grids import Interval, Ratio
from fxquant.ops.core import Call, Instead, Lowering, Own, Quantized, Same, Trait, clamped, lowered, spelled
from fxquant.ops.core.declare import module_of
from fxquant.ops.core.samples import EXACT, IMAGES, LIMITED, sampled
from fxquant.ops.elementwise.table import UNARY, by_table
from fxquant.ops.elementwise.whole import WHOLE
from fxquant.primitives import elementwise


def _limited_number(x: float, min: float | None = None, max: float | None = None) -> float:
    low, high = interval(min, max)
    return builtins.min(builtins.max(x, low), high)


def _refuses_clamp(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for name in ("min", "max"):
        if not isinstance(arguments[name], int | float | None):
            return f"its bound {name!r} is a tensor"
        if arguments[name] is not None and math.isnan(arguments[name]):
            return f"its bound {name!r} is NaN, and so is its result"
    return None


def both(first: Sequence[float | None], second: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the limits of the one clamp that equals two, one after the other; None means no limit."""
    least, most = interval(*second)
    low, high = (min(max(bound, least), most) for bound in interval(*first))
    return None if low == -math.inf else low, None if high == math.inf else high


def interval(low: Any, high: Any) -> Interval:
    """Return the bounds of a clamp as floats; a bound that is absent or a tensor is infinite."""
    return float(low) if isinstance(low, int | float) else -math.inf, float(high) if isinstance(high, int | float) else math.inf


def _moves(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Return whether the limits leave out 0: values then become larger than they were, and need not lie on the operand's scale."""
    low, high = interval(arguments["min"], arguments["max"])
    return low > 0 or high < 0


def clamp_between(input: Tensor, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Tensor:
    """Clamp a tensor to [min, max], where at least one bound is a tensor."""
    return torch.clamp(input, min, max)  # type: ignore[arg-type]


def _limited(input: Any, min: Any = None, max: Any = None) -> dict[str, Any] | Instead:
    """Adapt a clamp: by numbers it is one operator, by tensors a composite. Where the limits cross, every value becomes the upper one."""
    if isinstance(min, fx.Node) or isinstance(max, fx.Node):
        return Instead(clamp_between, {"input": input, "min": min, "max": max})
    return {"input": input, "min": max if min is not None and max is not None and min > max else min, "max": max}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _onnx_clamp(c: Call) -> str:
    result = c.clamped(c.input, c.arguments.get("min"), c.arguments.get("max"))
    return result if result != c.input else c.do("Identity", result)


_ADAPTED: dict[str, Any] = {
    "clamp_min": lambda input, min: _limited(input, min),
    "clamp_max": lambda input, max: _limited(input, None, max),
    "relu": lambda input, inplace=False: {"input": input, "min": 0.0, "max": None},
    "relu6": lambda input, inplace=False: {"input": input, "min": 0.0, "max": 6.0},
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: _limited(input, float(min_val), float(max_val)),
}


@lowered(
    "clip",
    function=lambda input, min=None, max=None: clamped(input, min, max),
    adapt=_limited,
    calls={form: adapt for name, adapt in _ADAPTED.items() for form in spelled(name)},
    modules={
        nn.ReLU: lambda m: {"min": 0.0, "max": None},
        nn.ReLU6: lambda m: {"min": 0.0, "max": 6.0},
        nn.Hardtanh: lambda m: {"min": float(m.min_val), "max": float(m.max_val)},
    },
    demand=lambda node, arguments: Own() if _moves(node, arguments) else Same(),
    keeps=lambda arguments, after, bits: interval(*both((arguments["min"], arguments["max"]), after)),
    idle=lambda arguments: arguments["min"] in (None, -math.inf) and arguments["max"] in (None, math.inf),
    traits=frozenset({Trait.ELEMENTWISE, Trait.POINTWISE, Trait.HOMOGENEOUS, Trait.BOUNDED_BELOW, Trait.KEEPS_INTEGERS}),
    integers=lambda arguments, operand: (WHOLE["clamp"], {name: _whole(value) for name, value in arguments.items()}),
    refuses=_refuses_clamp,
    onnx=_onnx_clamp,
)
@sampled("relu(x)", "F.relu(x.clone(), inplace=True)", "nn.ReLU()", "nn.ReLU(inplace=True)", "detach(x).relu()", within=EXACT)
@sampled("clamp(x, -0.5, 0.7)", "clamp(x, max=0.3)", "clip(x, min=-1)", "clamp_min(x, -0.4)", "clamp_max(x, 0.4)", within=LIMITED)
@sampled("relu6(x)", "hardtanh(x)", "hardtanh(x, -2, 0.25)", "nn.ReLU6()", "nn.Hardtanh(-0.5, 1.5)", within=LIMITED)
def clamp(lowering: Lowering, input: Quantized, min: float | None = None, max: float | None = None) -> Quantized:
    """Clamp the values to [min, max]; None means no bound. relu is clamp(0, None), relu6 is clamp(0, 6).

    The integers are clamped at ⌊bound/scale + ½⌋ if the result shares the operand's scale; else they are requantized and clamped.
    """
    if not lowering.shares and lowering.arithmetic.float32_tables and input.dtype.bits <= 8:
        return by_table(lowering, input, "limited", min=min, max=max)
    if not lowering.shares:
        return lowering.requantize(lowering.call(elementwise.widen, input.value), Ratio((input.scale,)), (min, max))
    to = lowering.output
    value = lowering.call(elementwise.clamp, input.value, *lowering.bounds((min, max), to))
    return input.with_value(lowering.as_table(value, to.grid) if lowering.ends_in_table((min, max), to) else value)


UNARY["limited"] = clamp, _limited_number  # no operator has this name: on some targets a clamp that is not fused is a table

OF_MODULE = "module"  # the kind of a module of the user's
SCALING = ("dropout", "dropout1d", "dropout2d", "dropout3d")  # the kinds that multiply by a number that is not negative
DROPOUTS: dict[type, str] = {kind: name for name in (*SCALING, "alpha_dropout", "feature_alpha_dropout") for kind in module_of(name)}


def _drops(kind: str) -> Callable[..., dict[str, Any]]:
    """Return an adapter that makes the canonical arguments of one of PyTorch's functions.

    The model was traced in eval mode, so dropout with training=True acts in eval mode, too, as in Monte Carlo dropout.
    It is not a function of its input, and is left as it is.
    """

    def arguments(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None) -> Any:
        if (training if train is None else train) and p > 0:
            return "it drops at random in eval mode as well (training=True), so no two runs are equal"
        return {"input": input, "p": p, "kind": kind}

    return arguments


@lowered(
    function=lambda input, p=0.5, kind="dropout": input,
    by_name=False,
    calls={
        **{getattr(F, kind): _drops(kind) for kind in DROPOUTS.values()},
        **{getattr(torch, kind): _drops(kind) for kind in ("dropout", "alpha_dropout", "feature_alpha_dropout")},
        torch.feature_dropout: _drops("dropout2d"),
    },
    modules={module: lambda m: {"p": m.p, "kind": DROPOUTS[type(m)]} for module in DROPOUTS},
    idle=lambda arguments: arguments["p"] == 0,
    traits=frozenset({Trait.HOMOGENEOUS}),
    demand=Same(),
)
@sampled("dropout(x, 0.3, self.training).relu()", "alpha_dropout(x, 0.3, self.training).relu()")
@sampled("feature_alpha_dropout(x, 0.3, self.training).relu()", "torch.feature_dropout(x, 0.3, self.training).relu()")
@sampled("F.dropout2d(x, 0.3, self.training).relu()", "{nn.Dropout2d(0.3)}(x).relu()", "{nn.FeatureAlphaDropout(0.3)}(x).relu()")
@sampled("{nn.Dropout(0.3)}(x).relu()", "{nn.AlphaDropout(0.3)}(x).relu()")
@sampled("F.dropout1d(x, 0.3, self.training).relu()", "{nn.Dropout1d(0.3)}(x).relu()", x=IMAGES[1])
@sampled("F.dropout3d(x, 0.3, self.training).relu()", "{nn.Dropout3d(0.3)}(x).relu()", x=IMAGES[3])
def dropout(lowering: Lowering, input: Quantized, p: float = 0.5, kind: str = "dropout") -> Quantized:
    """Return the input itself; in state TRAIN, in train mode, the function of torch.nn.functional named `kind` drops with probability p.

    A module's p is the present one. The noise is on float values, which need not lie on the grid; the next operator rounds them to it.
    """
    if not lowering.training or (kind == OF_MODULE and lowering.noise_module is None):  # a file holds no module of the user's
        return input
    real, module = input.real(), lowering.user_module
    if lowering.noise_module is not None:
        noisy = type(lowering.noise_module).forward(lowering.noise_module, real)
    else:
        noisy = getattr(F, kind)(real, module.p if isinstance(module, nn.modules.dropout._DropoutNd) else p, True)
    return input.with_value(noisy / input.scale)
