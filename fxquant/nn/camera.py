"""Conversions of camera images for networks: YUV by ITU-R BT.601, with chroma at half the resolution (NV12).

    camera ──NV12──▶ Nv12ToYuv444 ──▶ YuvToRgb(mean, std) ──▶ a network that was trained on normalised RGB
    RGB image ──▶ RgbToYuv444(centred=True) ──▶ ChromaLoss ──▶ a network that is trained on images like the camera's

Conventions, for 8 bits a channel: "full" swing has Y, U and V in 0…255, "studio" has Y in 16…235 and U, V in 16…240. U and V are centred
on 128, and `centred` subtracts 128 from every channel, so that a byte becomes the int8 of the image inputs of the BPU targets.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxquant.api.preparing import convert, prepare
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import attach, describe, fact, made_by, module_path, resolve, source
from fxquant.ir.integer import Operation, Reference, qparams, set_operation
from fxquant.ir.model import replace_graph
from fxquant.prepared.stage import require_integer
from fxquant.quantization.spec import ActivationConfig, QConfig
from fxquant.support.arguments import checked, choice, such

# ---- Colour spaces: a product with a three by three matrix, as a convolution of kernel 1 -----------------------------

# ITU-R BT.601, full swing: Y in 0…255, U and V around 128.
FULL = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
STUDIO = ((0.256788, 0.504129, 0.097906), (-0.148223, -0.290993, 0.439216), (0.439216, -0.367788, -0.071427))  # Y in 16…235
RGB, BGR = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
SPACES = {"full": (FULL, (0.0, 128.0, 128.0)), "studio": (STUDIO, (16.0, 128.0, 128.0)), "rgb": (RGB, (0.0,) * 3), "bgr": (BGR, (0.0,) * 3)}


class _Product(nn.Module):
    """A convolution of kernel 1 with constants."""

    weight: Tensor
    bias: Tensor
    order: tuple[int, ...] = (0, 1, 2)  # the positions of red, green and blue

    def forward(self, image: Tensor) -> Tensor:
        return F.conv2d(image, self.weight, self.bias)


class RgbToYuv444(_Product):
    """(N, 3, H, W) in 0…255, red first, to Y, U, V by ITU-R BT.601.

    swing     "full" (Y in 0…255) or "studio" (Y in 16…235, U and V in 16…240); "rgb" and "bgr" keep the colours, in that order
    centred   whether 128 is subtracted from every channel, as the image inputs of the BPU targets require
    """

    def __init__(self, swing: str = "full", centred: bool = False) -> None:
        super().__init__()
        if swing not in SPACES:
            raise ValueError(f"swing is 'full', 'studio', 'rgb' or 'bgr', not {swing!r}")
        self.swing, self.centred = swing, centred
        matrix, offset = map(torch.tensor, SPACES[swing])
        placed = torch.empty_like(matrix)
        placed[:, list(self.order)] = matrix
        self.register_buffer("weight", placed.reshape(3, 3, 1, 1))
        self.register_buffer("bias", offset - 128.0 if centred else offset)


class BgrToYuv444(RgbToYuv444):
    """`RgbToYuv444` for an image whose first channel is blue."""

    order = (2, 1, 0)


HALF = 2  # NV12 has one U and one V for two by two pixels


class YuvToRgb(_Product):
    """(N, 3, H, W) of Y, U, V to red, green, blue in 0…255, normalised: (rgb - mean) / std; one convolution of kernel 1.

    It is the inverse of `RgbToYuv444` with equal `swing` and `centred`. Nothing is clamped: colours outside of RGB are kept.

    mean, std   numbers of 0…255 for each of red, green and blue
    """

    def __init__(
        self, swing: str = "full", centred: bool = False, mean: Sequence[float] = (0.0, 0.0, 0.0), std: Sequence[float] = (1.0, 1.0, 1.0)
    ) -> None:
        super().__init__()
        if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
            raise ValueError(f"mean and std have a number for each of red, green and blue, std a positive one, not {mean!r} and {std!r}")
        there = RgbToYuv444(swing, centred)
        back = torch.linalg.inv(there.weight.double().reshape(3, 3))
        scale = torch.tensor(std, dtype=torch.float64)
        offset = -(back @ there.bias.double() + torch.tensor(mean, dtype=torch.float64)) / scale
        self.swing, self.centred = swing, centred
        self.register_buffer("weight", (back / scale[:, None])[list(self.order)].float().reshape(3, 3, 1, 1))
        self.register_buffer("bias", offset[list(self.order)].float())


class YuvToBgr(YuvToRgb):
    """`YuvToRgb` with blue as the first channel of its result; `mean` and `std` are still in the order red, green, blue."""

    order = (2, 1, 0)


class RgbToGray(_Product):
    """(N, 3, H, W) in 0…255, red first, to (N, 1, H, W): the Y of `RgbToYuv444` with equal `swing` and `centred`."""

    def __init__(self, swing: str = "full", centred: bool = False) -> None:
        super().__init__()
        whole = RgbToYuv444(swing, centred)
        self.swing, self.centred = swing, centred
        self.register_buffer("weight", whole.weight[:1, list(self.order)].clone())
        self.register_buffer("bias", whole.bias[:1].clone())


class BgrToGray(RgbToGray):
    """`RgbToGray` for an image whose first channel is blue."""

    order = (2, 1, 0)


class Nv12ToYuv444(nn.Module):
    """Y (N, H, W, 1) and UV (N, H/2, W/2, 2) to (N, 3, H, W): each U and V covers two by two pixels.

    Both are the content of NV12, row by row, in the form of the image inputs of the BPU targets. For bytes the result is float32 with equal
    values; for float tensors it has their dtype. `centred` subtracts 128 from every channel.
    """

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, y: Tensor, uv: Tensor) -> Tensor:
        y, uv = (plane.permute(0, 3, 1, 2) if plane.is_floating_point() else plane.permute(0, 3, 1, 2).float() for plane in (y, uv))
        image = torch.cat([y, F.interpolate(uv, scale_factor=HALF, mode="nearest")], 1)
        return image - 128.0 if self.centred else image


class ChromaLoss(nn.Module):
    """(N, 3, H, W) of Y, U, V after a conversion to NV12 and back: U and V are means of two by two pixels, repeated. H and W are even.

    In training it follows the conversion of RGB images, so that the network learns on images like the camera's.
    """

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([image[:, :1], F.interpolate(F.avg_pool2d(image[:, 1:], HALF), scale_factor=HALF, mode="nearest")], 1)


def rgb_to_nv12(image: Tensor, swing: str = "full") -> tuple[Tensor, Tensor]:
    """Return the NV12 of uint8 images (N, 3, H, W), red first: Y (N, H, W, 1) and UV (N, H/2, W/2, 2), uint8.

    It is computed in float64 and rounded once, half up, so that every machine returns equal bytes: U and V are means of the exact values of
    two by two pixels. Libraries that round before they average, or take one pixel of four, differ by a few steps. Raises ValueError for
    images of another dtype or shape, or of odd sizes.
    """
    if image.dtype != torch.uint8 or image.dim() != 4 or image.shape[1] != 3 or image.shape[2] % HALF or image.shape[3] % HALF:
        raise ValueError(f"images are uint8 (N, 3, H, W) with even H and W, not {image.dtype} {tuple(image.shape)}")
    yuv = RgbToYuv444(swing).double()(image.double())
    y, uv = yuv[:, :1], F.avg_pool2d(yuv[:, 1:], HALF)
    return tuple((plane + 0.5).floor().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous() for plane in (y, uv))  # type: ignore[return-value]


def split_nv12(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Return Y (N, H, W, 1) and UV (N, H/2, W/2, 2) of a camera's NV12 images, uint8 (N, 3H/2, W), as views without a copy.

    Raises ValueError for a buffer of another dtype or shape.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 3 or buffer.shape[1] % 3 or buffer.shape[2] % HALF:
        raise ValueError(f"a buffer of NV12 is uint8 (N, 3H/2, W) with even H and W, not {buffer.dtype} {tuple(buffer.shape)}")
    count, rows, width = buffer.shape
    height = rows * 2 // 3
    return buffer[:, :height, :, None], buffer[:, height:].reshape(count, height // HALF, width // HALF, HALF)


# ---- The colours of a camera in front of an integer model ------------------------------------------------------------
NUMBERS = such(
    "one or three finite numbers",
    lambda values: tuple(float(value) for value in values if not isinstance(value, str)),
    lambda values: len(values) in (1, 3) and all(map(math.isfinite, values)),
)
DIVISORS = such("one or three positive numbers", NUMBERS.take, lambda values: min(values) > 0)
CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}  # of an image, by what a model was trained with


def _from_camera(train_type: str, swing: str, mean: Sequence[float] | None, std: Sequence[float] | None) -> nn.Conv2d:
    """Return the convolution of kernel 1 from a camera's image minus 128 to the normalized image. Raises ConfigurationError."""
    channels = CHANNELS[train_type]
    mean, std = mean or (0.0,) * channels, std or (1.0,) * channels
    if (train_type == "gray") != (swing == "gray") or len(mean) != channels or len(std) != channels:
        because = f"a {train_type} image has {channels} channels" + ", and gray is not made of colours" * (train_type != swing)
        remedy = "give mean and std a number for each channel, and 'gray' both as train_type and as swing, or as neither"
        raise ConfigurationError(f"{train_type} is not made of {swing} with mean={mean} and std={std}", because=because, remedy=remedy)
    layer = nn.Conv2d(channels, channels, 1)
    if train_type == "gray":
        layer.load_state_dict({"weight": torch.full((1, 1, 1, 1), 1 / std[0]), "bias": torch.tensor([(128.0 - mean[0]) / std[0]])})
    else:
        layer.load_state_dict({"rgb": YuvToRgb, "bgr": YuvToBgr}[train_type](swing, True, mean, std).state_dict())
    return layer


@checked(train_type=choice(*CHANNELS), swing=choice(*SPACES, "gray"), mean=NUMBERS.or_none("0"), std=DIVISORS.or_none("1"))
def with_camera(
    integer: fx.GraphModule, train_type: str = "rgb", *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    swing: str = "full",
) -> fx.GraphModule:  # fmt: skip
    """Return an integer model with the conversion of colours in front, as `export_horizon(…, camera=…)` takes it.

    Its image is YUV minus 128, float32 (N, 3, H, W), in place of the normalized image that `integer` takes; its other inputs stay. A
    convolution of kernel 1, quantized as a layer of the target, computes the tensor to which `integer` quantizes its image; it keeps that
    tensor's name and scale. All that follows is that of `integer`, which is not changed, and no calibration is needed.

    train_type  the order of the channels that the model was trained with: "rgb" or "bgr", or "gray" for an image (N, 1, H, W)
    mean, std   it was trained with (image - mean) / std: numbers of 0…255 for each of red, green and blue, also for "bgr"; one for "gray"
    swing       of the images: "full" or "studio" for YUV, or "rgb", "bgr" or "gray", with the same word as `camera` of the export

    Raises ConfigurationError unless one input is an image with these channels that the model quantizes once, to int8.
    """
    require_integer(integer)
    inputs = integer.graph.find_nodes(op="placeholder")
    images = [node for node in inputs if _is_image(node, CHANNELS[train_type])]
    if len(images) != 1:
        raise ConfigurationError(
            "the model cannot take its image from a camera",
            because=f"of {', '.join(f'{node.name} {fact(node)}' for node in inputs)}, {len(images)} are {train_type} images (N, "
            f"{CHANNELS[train_type]}, H, W) that are quantized once, to int8",
            remedy="put fxq.nn.YuvToRgb(centred=True, …) in front of the model's image before it is prepared",
        )
    (image,) = images
    first, image_fact = next(iter(image.users)), fact(image)
    shape, scale = image_fact.shape, getattr(qparams(first), "scale", None)
    layer, graph = _from_camera(train_type, swing, mean, std), fx.Graph()
    graph.output(graph.call_module(first.name, (graph.placeholder(f"{first.name}_yuv"),)))
    qconfig = QConfig(ActivationConfig("int8", scale=float(scale)), input=ActivationConfig("int8", scale=1.0))  # type: ignore[arg-type]
    model = fx.GraphModule({first.name: layer}, graph).eval()
    front = convert(prepare(model, torch.zeros(image_fact.at(2)), integer.meta["target"], qconfig))
    start, _, quantized, *_ = front.graph.nodes
    set_operation(quantized, Operation("quantize", {"input": Reference(image.name)}, {}))

    result, graph = copy.deepcopy(integer), fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    copies[start] = copies[image]
    for node in front.graph.nodes:
        if first not in copies and node is not start:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                attach(result, node.target, resolve(front, node.target))
            else:
                describe(copies[node], replace(fact(node), shape=shape), source(first), module_path(first), f"with_camera.{swing}")
            if node.name == first.name:
                copies[first] = copies[node]
    for node in integer.graph.nodes:
        if node not in copies and first not in node.users:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    replace_graph(result, graph)
    result.recompile()
    return result


def _is_image(node: fx.Node, channels: int) -> bool:
    """Return whether an input is an image (N, channels, H, W) that is quantized once, to int8."""
    grids = [qparams(user) for user in node.users]
    shape: tuple[Any, ...] = getattr(fact(node), "shape", ())
    return len(shape) == 4 and shape[1] == channels and len(grids) == 1 and grids[0] is not None and grids[0].dtype == "int8"


def swing_of(model: fx.GraphModule) -> str:
    """Return the `swing` with which `with_camera` made a model; "full" for any other model."""
    return next((made_by(node).partition(".")[2] for node in model.graph.nodes if made_by(node).startswith("with_camera.")), "full")
