"""What cameras deliver: conversions against each other and against Pillow's, and a network behind NV12 in integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn

import fxquant as fxq
from tests.shared import contract

CAMERA = fxq.nn


def photograph() -> Tensor:
    """A photograph of 64 × 96 pixels, uint8, red first."""
    return torch.from_numpy(load_sample_image("flower.jpg")[100:292:3, 200:488:3].copy()).permute(2, 0, 1)[None]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("swing", ["full", "studio"])
def test_there_and_back_is_the_image(swing: str, centred: bool) -> None:
    image = photograph().float()
    yuv = CAMERA.RgbToYuv444(swing, centred)(image)
    mean, std = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
    wanted = (image - torch.tensor(mean).reshape(3, 1, 1)) / torch.tensor(std).reshape(3, 1, 1)
    # Float32 keeps about seven digits of sums of three products of numbers up to 255 and up to 2.2.
    torch.testing.assert_close(CAMERA.YuvToRgb(swing, centred)(yuv), image, atol=1e-3, rtol=0)
    torch.testing.assert_close(CAMERA.YuvToRgb(swing, centred, mean, std)(yuv), wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(CAMERA.YuvToBgr(swing, centred, mean, std)(yuv), wanted.flip(1), atol=1e-4, rtol=0)
    torch.testing.assert_close(CAMERA.RgbToGray(swing, centred)(image), yuv[:, :1], atol=1e-4, rtol=0)
    torch.testing.assert_close(CAMERA.BgrToGray(swing, centred)(image.flip(1)), yuv[:, :1], atol=1e-4, rtol=0)


def test_full_swing_is_the_one_of_jpeg() -> None:
    image = photograph()
    pillow = np.asarray(Image.fromarray(image[0].permute(1, 2, 0).numpy()).convert("YCbCr")).astype(np.int64)
    ours = CAMERA.RgbToYuv444()(image.float())[0].permute(1, 2, 0).round().long().numpy()
    assert np.abs(ours - pillow).max() <= 1  # Pillow multiplies by numbers of 6 bits behind the point


def test_nv12_keeps_what_has_no_fine_colours() -> None:
    blocks = photograph().float()[:, :, ::4, ::4].repeat_interleave(2, 2).repeat_interleave(2, 3)
    y, uv = CAMERA.rgb_to_nv12(blocks.to(torch.uint8))
    assert (y.shape, uv.shape) == ((1, 32, 48, 1), (1, 16, 24, 2))
    back = CAMERA.Nv12ToYuv444()(y, uv)
    assert (back - CAMERA.RgbToYuv444()(blocks)).abs().max() <= 0.5 + 1e-4  # rounded once
    assert torch.equal(CAMERA.Nv12ToYuv444(centred=True)(y, uv), back - 128)


def test_chroma_is_lost_in_training_as_it_is_by_the_camera() -> None:
    image = photograph()
    lost = CAMERA.ChromaLoss()(CAMERA.RgbToYuv444()(image.float()))
    delivered = CAMERA.Nv12ToYuv444()(*CAMERA.rgb_to_nv12(image))
    assert (lost - delivered).abs().max() <= 0.5 + 1e-4
    assert (lost - CAMERA.RgbToYuv444()(image.float())).abs().max() > 5


def test_a_buffer_is_its_two_planes() -> None:
    y, uv = CAMERA.rgb_to_nv12(photograph())
    buffer = torch.cat([y.reshape(1, 64, 96), uv.reshape(1, 32, 96)], 1)
    for plane, wanted in zip(CAMERA.split_nv12(buffer), (y, uv), strict=True):
        assert torch.equal(plane, wanted)
        assert plane.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_what_is_no_image_is_refused() -> None:
    for image in (photograph().float(), photograph()[:, :2], photograph()[:, :, :-1]):
        with pytest.raises(ValueError, match="even H and W"):
            CAMERA.rgb_to_nv12(image)
    for buffer in (torch.zeros(1, 6, 4), torch.zeros(1, 5, 4, dtype=torch.uint8), torch.zeros(6, 4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="a buffer of NV12"):
            CAMERA.split_nv12(buffer)
    for options in ({"mean": (1.0,)}, {"std": (1.0, 0.0, 1.0)}, {"swing": "half"}):
        with pytest.raises(ValueError, match=r"mean and std|swing"):
            CAMERA.YuvToRgb(**options)  # type: ignore[arg-type]


class Behind(nn.Module):
    """A network that was written for normalised RGB, behind a camera."""

    def __init__(self) -> None:
        super().__init__()
        self.camera = CAMERA.Nv12ToYuv444(centred=True)
        self.colour = CAMERA.YuvToRgb(centred=True, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))
        self.network = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, y: Tensor, uv: Tensor) -> Tensor:
        return self.network(self.colour(self.camera(y, uv)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_a_network_behind_a_camera_is_integer_from_the_bytes_on(target: str, tmp_path: Path) -> None:
    y, uv = CAMERA.rgb_to_nv12(torch.cat([photograph(), photograph().flip(3)]))
    model = Behind().eval()
    prepared, integer = contract.compiled(model, [(y, uv)], target)
    assert all(layer.dtype is not None for layer in fxq.inspect.layers(integer) if "Conv" in (layer.operator or ""))
    contract.assert_validate_is_integer(prepared, integer, y, uv)
    contract.assert_integer_is_onnx(integer, tmp_path / "camera.onnx", [(y, uv), (y[:1], uv[:1])])
    wanted = model(y, uv)
    assert 10 * torch.log10(wanted.square().sum() / (integer(y, uv) - wanted).square().sum()) > 25
    assert "none is left in float" in fxq.explain(prepared)
