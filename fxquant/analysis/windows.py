"""Measures of windows: kernels, strides, dilations, paddings."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from fxquant.analysis.site import Site, known, measure


@measure("kernel")
def _kernel(site: Site) -> list[Any]:
    if "weight" in site.arguments and site.rank > 0:
        return list(site.shape("weight")[2:])
    if "output_size" in site.arguments:  # windows that are all alike, unless it pools everything at once
        return [] if _pools_everything(site) else [a // b for a, b in zip(known(site.shape()[2:]), known(site.result[2:]), strict=True)]
    return site.spatial("kernel_size")


def _pools_everything(site: Site) -> bool:
    return all(size == 1 for size in site.result[2:])


@measure("kernel in depth and height")
def _kernel_depth_height(site: Site) -> list[Any]:
    return _kernel(site)[:-1]


@measure("kernel in width")
def _kernel_width(site: Site) -> list[Any]:
    return _kernel(site)[-1:]


@measure("area of a global average")
def _global_area(site: Site) -> list[Any]:
    return [math.prod(known(site.shape()[2:]))] if "output_size" in site.arguments and _pools_everything(site) else []


@measure("stride")
def _stride(site: Site) -> list[Any]:
    return site.spatial("stride")


@measure("number of different strides")
def _different_strides(site: Site) -> list[Any]:
    return [len(set(site.spatial("stride")))]


@measure("stride where it is dilated")
def _stride_dilated(site: Site) -> list[Any]:
    return site.spatial("stride") if any(d > 1 for d in site.spatial("dilation")) else []


@measure("stride with a residual added")
def _stride_residual(site: Site) -> list[Any]:
    return site.spatial("stride") if site.arguments.get("residual") is not None else []


@measure("stride beyond the kernel")
def _stride_beyond(site: Site) -> list[Any]:
    return [max(s - k, 0) for s, k in zip(site.spatial("stride"), _kernel(site), strict=True)]


@measure("dilation")
def _dilation(site: Site) -> list[Any]:
    return site.spatial("dilation")


@measure("padding")
def _padding(site: Site) -> list[Any]:
    return site.spatial("padding")


@measure("padding beyond (kernel - 1) / 2")
def _padding_beyond_middle(site: Site) -> list[Any]:
    return [max(p - (k - 1) // 2, 0) for p, k in zip(site.spatial("padding"), _kernel(site), strict=True)]


@measure("padding beyond kernel / 2")
def _padding_beyond(site: Site) -> list[Any]:
    return [max(p - k // 2, 0) for p, k in zip(site.spatial("padding"), _kernel(site), strict=True)]


@measure("padding beyond kernel / stride")
def _padding_beyond_step(site: Site) -> list[Any]:
    rows = zip(site.spatial("padding"), _kernel(site), site.spatial("stride"), strict=True)
    return [max(math.ceil(p - Fraction(k, s)), 0) for p, k, s in rows]


@measure("output padding")
def _output_padding(site: Site) -> list[Any]:
    return site.spatial("output_padding")


@measure("count_include_pad")
def _count_include_pad(site: Site) -> list[Any]:
    return [site.arguments.get("count_include_pad", True)] if any(site.spatial("padding")) else []


@measure("divisor_override")
def _divisor_override(site: Site) -> list[Any]:
    return [site.arguments.get("divisor_override")]


@measure("padding mode")
def _padding_mode(site: Site) -> list[Any]:
    return [site.arguments["mode"]]
