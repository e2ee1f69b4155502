"""Spellings of what is computed of pairs, of neighbours, of windows and of whole slices: samples for the test of the table.

Each is computed of two live tensors of shape (B, 4, 6, 6); the second is between 0.1 and 0.9.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Spelled = tuple[str, Callable[[Any, Tensor, Tensor], Any], bool]
STEPS = ("floor_quotient", "trunc_quotient", "floor_remainder", "trunc_remainder", "heaviside", "copysign", "signbit", "kl_div")


def _of(name: str, function: Callable[[Tensor, Tensor], Any]) -> Spelled:
    return name, lambda m, x, y: function(x * 1.0, y), name not in STEPS


def _assigned_to_lists(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, [0, 2], [1, 3]] = y[:, :2, 0]
    return x


def _places(x: Tensor) -> Tensor:
    return x.argmax(1, keepdim=True).expand(-1, 4, -1, -1)


LAYERS: dict[type, nn.Module] = {
}  # fmt: skip

SPELLINGS: dict[Any, Spelled] = {
    # ---- powers, rounded quotients, signs, logarithms
    torch.heaviside: _of("heaviside", torch.heaviside),
    "heaviside": _of("heaviside", lambda x, y: x.heaviside(y)),
    "heaviside_": _of("heaviside", lambda x, y: x.heaviside_(y)),
    torch.signbit: _of("signbit", lambda x, y: torch.where(torch.signbit(x), x, y)),
    "signbit": _of("signbit", lambda x, y: x.signbit() & (y > 0.5)),
    "__rfloordiv__": _of("floor_quotient", lambda x, y: y.__rfloordiv__(2.0)),
    "__rmod__": _of("floor_remainder", lambda x, y: y.__rmod__(2.0)),
    # ---- what is moved and multiplied whole
    torch.broadcast_tensors: _of("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y[:, :1])[1]),
    torch.meshgrid: _of("meshgrid", lambda x, y: torch.meshgrid(x.flatten()[:2], y.flatten()[:3], indexing="xy")[0]),
    "sum_to_size": _of("sum_to_size", lambda x, y: x.sum_to_size(x.shape[0], 4, 1, 6)),
    torch.as_strided: ("as_strided", lambda m, x, y: torch.as_strided(m.given, (2, 3), (3, 1), 4), True),
    "as_strided": ("as_strided", lambda m, x, y: m.given.as_strided((2, 2, 2), (1, 6, 36)), True),
    torch.kron: _of("kron", lambda x, y: torch.kron(x, torch.tensor([[1.0, -0.5]]))),
    "kron": _of("kron", lambda x, y: x.kron(torch.tensor([[1.0], [-0.5]]))),
    torch.linalg.matmul: _of("matmul", lambda x, y: torch.linalg.matmul(x, y)),
    torch.matrix_power: _of("matrix_power", lambda x, y: torch.matrix_power(x, 2)),
    torch.linalg.matrix_power: _of("matrix_power", lambda x, y: torch.linalg.matrix_power(x, 3)),
    "matrix_power": _of("matrix_power", lambda x, y: x.matrix_power(5)),
    torch.dist: _of("dist", lambda x, y: torch.dist(x[0], y[0])),
    "dist": _of("dist", lambda x, y: x[0].dist(y[0], 1)),
    torch.isclose: ("isclose", lambda m, x, y: torch.isclose(x, y, atol=0.2), False),
    "isclose": ("isclose", lambda m, x, y: x.isclose(y[:, :1], rtol=0, atol=0.3), False),
    # ---- windows, norms, images
    torch.grid_sampler: _of("cubic_sample", lambda x, y: torch.grid_sampler(x, x[:, :2].permute(0, 2, 3, 1), 2, 1, False)),
    torch.grid_sampler_2d: _of("grid_sample", lambda x, y: torch.grid_sampler_2d(x, x[:, :2].permute(0, 2, 3, 1), 0, 0, True)),
    torch.grid_sampler_3d: _of(
        "grid_sample", lambda x, y: torch.grid_sampler_3d(x.unsqueeze(1), y.unsqueeze(-1)[:, :3].permute(0, 2, 3, 4, 1), 0, 2, False)
    ),
}  # fmt: skip
ALSO: dict[str, Spelled] = {
    "a power": _of("power", lambda x, y: y**x),
    "a power of few exponents": _of("power", lambda x, y: x ** torch.tensor([0.0, 1, 2, 3, 2, 1])),
    "a power of doubles": _of("pow", lambda x, y: torch.float_power(x, 3).float()),
    "a floor": _of("floor_quotient", lambda x, y: x // y),
    "a floor of a number": _of("floor_quotient", lambda x, y: 2 // y),
    "a truncation": _of("trunc_quotient", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    "a remainder": _of("floor_remainder", lambda x, y: operator.mod(x, y)),
    "a remainder of a sign": _of("trunc_remainder", torch.fmod),
    "means at places": ("scatter_mean", lambda m, x, y: x.scatter_reduce(1, _places(x), y, "mean"), False),
    "means of others at places": ("scatter_mean", lambda m, x, y: x.scatter_reduce(1, _places(x), y, "mean", include_self=False), False),
    "sums in place of others": ("scatter_sum", lambda m, x, y: x.scatter_reduce(1, _places(x), y, "sum", include_self=False), False),
    "lists of places": ("put_lists", _assigned_to_lists, True),
    "a norm of sums": _of("sums_norm", lambda x, y: torch.linalg.matrix_norm(x, 1)),
    "a norm of the least": _of("norm", lambda x, y: torch.linalg.vector_norm(y, -math.inf, dim=1)),
    "a loss of weights": _of(
        "binary_cross_entropy_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y, reduction="none", pos_weight=torch.tensor(2.0)),
    ),
    "a loss of few": _of("huber_loss", lambda x, y: F.huber_loss(x, y, "none", 0.7)),
    "a smooth loss": _of("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.3)),
    "a divergence of logarithms": _of("kl_div", lambda x, y: F.kl_div(x, y, reduction="none", log_target=True)),
    "zeros": _of("clamp", lambda x, y: x * 0 + y),
    "a quotient by an exponential": _of("true_divide", lambda x, y: x / x.exp()),
}
