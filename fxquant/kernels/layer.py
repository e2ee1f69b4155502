"""Common parts of implementations: the numbers of a sum of products, the proof of its requantization, tables of all bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.kernels.admission import evaluate
from fxquant.kernels.kernel import Disagrees, Held, Site, grid
from fxquant.numerics.grids import ACTIVATION_TYPES, INT32_MAX, accumulator_bound, power_of_two
from fxquant.primitives import Role, requantize, role_of

AROUND = (-1, 0, 1, 2)  # of the sum below a step of the result, those that are compared


def magnitude(node: fx.Node) -> int:
    """Return the largest absolute value of a centred integer of a tensor of bytes."""
    known = grid(node)
    return max(known.zero_point, 255 - known.zero_point) if known.dtype == "uint8" else 128


@dataclass(frozen=True)
class Layer:
    """The constants of a sum of products.

    weight   (out, in / groups, height, width), int8; ones for a sum over windows
    given    the bias as it is, int32; None where there is none
    largest  the largest |sum|, the residual included
    window   stride, padding, dilation, groups
    """

    weight: Tensor
    given: Tensor | None
    largest: float
    window: Mapping[str, Any]

    @staticmethod
    def of(site: Site) -> Layer:
        """Return the layer of a place where the pattern was found."""
        parts, reads = dict(site.match.parts), site.match.reads
        if parts["weight"] is None:
            _, parts["groups"], *area = site.sizes[reads[0]]
            weight = torch.ones(parts["groups"], 1, *parts.get("kernel", area), dtype=torch.int8, device="cpu")
        else:
            weight = site.tensor("weight")
        weight = weight.reshape(*weight.shape, 1, 1) if weight.dim() == 2 else weight
        given = site.constant(parts["bias"])
        bound = accumulator_bound(weight, given, 0, magnitude(reads[0]))
        if parts["factor"] is not None:
            bound = bound + torch.ceil(residual_factor(site).flatten().abs() * magnitude(reads[1]))
        return Layer(weight, given, float(bound.max()), {name: parts[name] for name in ("stride", "padding", "dilation", "groups")})

    def bias(self, zero: int) -> Tensor:
        """Return the bias for a sum of products of bytes with this zero, int32: exact modulo 2^32, as sums of 32 bits are."""
        whole = self.weight.flatten(1).to(torch.int64).sum(1) * -zero
        whole = whole if self.given is None else whole + self.given
        return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32)

    def prove_requantization(self, site: Site, requantized: Callable[[Tensor], Tensor]) -> None:
        """Raise Disagrees unless a function of int32 rows of sums gives the primitive's result, as held, for every possible sum.

        Both never fall as the sum grows, so they are equal everywhere if they are equal on both sides of every step of the result.
        """
        root = site.match.root
        if root.target is requantize.accumulator_output:
            return
        sums = self._steps(site)
        is_linear = role_of(site.match.parts["sum"].target) is Role.LINEAR
        constants = [site.constant(node) if isinstance(node, fx.Node) else node for node in root.args[1:]]
        given = sums if is_linear else sums[..., None, None]
        wanted: Tensor = root.target(given, *constants)  # type: ignore[operator]
        centred = wanted.to(torch.int64).reshape(sums.shape) - grid(root).zero_point
        apart = requantized(sums.clone()).to(torch.int64) - site.result().zero != centred
        if bool(apart.any()):
            raise Disagrees(f"its requantization differs from the primitive's for {int(apart.sum())} of {apart.numel()} sums")

    def _steps(self, site: Site) -> Tensor:
        """Return for each channel the sums on both sides of every step of the result, the ends, and 0: int32, (sums, channels)."""
        root, channels = site.match.root, self.weight.shape[0]
        arguments: Any = root.args
        if root.target is requantize.requantize_real:
            ratio, low, high = site.constant(arguments[1]).double().flatten(), int(arguments[2]), int(arguments[3])
        else:
            shift, multiplier, right_shift = (site.constant(node).flatten() for node in arguments[1:4])
            ratio = multiplier.double() * power_of_two(-shift - right_shift)
            low, high = int(arguments[6]), int(arguments[7])
        steps = torch.arange(low - 1, high + 2, dtype=torch.float64, device="cpu")
        largest = min(self.largest, float(INT32_MAX))
        found = []
        for place in (0.0, 0.5):  # where results round, and where they are floors
            below = torch.floor((steps[:, None] + place) / ratio.clamp_min(2.0**-60).expand(channels))
            found += [below + offset for offset in AROUND]
            if root.target is requantize.requantize_fixed:  # a first shift moves a step to a multiple of its power, this one or the next
                first = power_of_two(shift).expand(channels)
                found += [(torch.floor(below / first) + later) * first + offset for later in (0, 1) for offset in AROUND]
        ends = torch.tensor([-largest, 1 - largest, -1.0, 0.0, 1.0, largest - 1, largest], dtype=torch.float64, device="cpu")
        sums = torch.cat([*found, ends[:, None].expand(-1, channels)]).clamp_(-largest, largest)
        return sums.to(torch.int32)


def residual_factor(site: Site) -> Tensor:
    """Return the factor of a residual, float64; their product is rounded down and added."""
    shift = site.constant(site.match.parts["factor_shift"])
    factor = site.tensor("factor").double()
    return factor if shift is None else factor * power_of_two(-shift)


def enumerated(site: Site, forms: Sequence[Held], result: Held) -> Tensor:
    """Return the result's byte for every byte of an operand, or every pair of them; 0 where a byte stands for no integer of the tensor.

    The primitives compute it, so it is right for every operand.
    """
    valid = torch.ones((), dtype=torch.bool, device="cpu")
    given: dict[fx.Node, Tensor] = {}
    size = [256] * len(forms)
    # The constants have one element, and up to four dimensions.
    ones = [1] * (4 - len(forms))
    for axis, (read, form) in enumerate(zip(site.match.reads, forms, strict=True)):
        dtype = ACTIVATION_TYPES[grid(read).dtype]
        stored = torch.arange(256, device="cpu") - form.zero + grid(read).zero_point
        shape = [256 if axis == index else 1 for index in range(len(forms))]
        valid = valid & ((stored >= dtype.low) & (stored <= dtype.high)).reshape(shape)
        given[read] = stored.clamp(dtype.low, dtype.high).to(dtype.storage).reshape(shape).expand(size).reshape(*size, *ones)
    found = evaluate(site.model, site.match, given).to(torch.int64) - grid(site.match.root).zero_point + result.zero
    return torch.where(valid, found.reshape(size), 0).to(torch.uint8).flatten().contiguous()
