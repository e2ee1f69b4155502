"""Images from a camera as the input of a compiled program.

The compiler inserts a layer before the model that subtracts the mean from each channel and rounds to the model's grid:

    acc = 127 · q + 64, y = ⌊acc · 16513 / 2^21⌋ = q       for a mean of 128 and the scale 1

So the bytes minus 128 are the integers of the model's input. For NV12 the hardware first repeats U and V for two by two pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxquant.backends.horizon.formats import Format
from fxquant.errors import ConfigurationError
from fxquant.ir.facts import TensorFact
from fxquant.ir.graph import fact
from fxquant.ir.integer import qparams

CENTRE = 128  # of a byte: the compiler's int8 is the byte minus this
MEAN = f"\n  mean_value: '{CENTRE} {CENTRE} {CENTRE}'"
HALF = 2  # NV12 has one U and one V for two by two pixels


def check_camera(integer: fx.GraphModule, format: Format, camera: str) -> None:
    """Raise ConfigurationError if a program cannot take its only input from a camera with the integers of `integer`."""
    (first, *others) = integer.graph.find_nodes(op="placeholder")
    because = None
    if camera not in format.cameras:
        because = f"files with a camera are not written for {format.compiler}"
    elif others:
        because = f"it has {1 + len(others)} inputs, and one alone may come from a camera"
    else:
        because = _not_an_image(first, camera)
    if because is not None:
        raise ConfigurationError(
            f"the model cannot take {camera} from a camera",
            because=because,
            remedy="let fxq.nn.YuvToRgb(centred=True, …) be its first module, which takes YUV less 128 as (N, 3, H, W), and set its input's"
            f" scale before converting: fxq.set_qparams(prepared, {{'{first.name}_quantize': 1.0}}); or leave out camera=",
        )


def _not_an_image(node: fx.Node, camera: str) -> str | None:
    """Return why an input is not an image on the grid of bytes minus 128; None if it is one."""
    known = fact(node)
    shape = known.shape if isinstance(known, TensorFact) else ()
    if len(shape) != 4 or shape[1] != 3:
        return f"the input {node.name!r} has the shape {list(map(str, shape))}, and an image has 3 channels"
    if camera == "nv12" and any(not isinstance(size, int) or size % HALF for size in shape[2:]):
        return f"the input {node.name!r} has {shape[2]} rows of {shape[3]} pixels, and NV12 has an even number of both"
    for user in node.users:
        described = qparams(user)
        if described is None or described.dtype != "int8" or float(described.scale) != 1.0:  # type: ignore[arg-type]
            shown = "in float" if described is None else f"{described.dtype} on the scale {float(described.scale):g}"  # type: ignore[arg-type]
            return f"%{user.name} reads the input {node.name!r} {shown}, and a byte less 128 is int8 on the scale 1"
    return None


def nv12_of(image: Tensor) -> Tensor:
    """Return the bytes of NV12, uint8 (3 · H / 2, W), of integers (1, H, W, 3) that are Y, U and V minus 128.

    Raises ConfigurationError if U and V are not equal for two by two pixels: NV12 cannot represent such an image.
    """
    _, height, width, _ = image.shape
    planes = (image[0] + CENTRE).to(torch.uint8)
    chroma = planes[::HALF, ::HALF, 1:]
    if not torch.equal(chroma.repeat_interleave(HALF, 0).repeat_interleave(HALF, 1), planes[..., 1:]):
        raise ConfigurationError(
            "a batch is not an NV12 image",
            because="its U and V differ within two by two pixels, and NV12 has one of each for these four",
            remedy="pass images that fxq.nn.Nv12ToYuv444(centred=True) made of NV12",
        )
    return torch.cat([planes[..., 0], chroma.reshape(height // HALF, width)])
