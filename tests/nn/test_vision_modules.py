"""The modules of fxq.nn: their float results, their integer forms, and the image formats of cameras."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ops import BY_NAME, FUNCTIONS, OPERATORS
from tests.shared import contract
from tests.shared.contract import compiled
from tests.shared.networks import members


def images(*shape: int, seed: int = 0) -> Tensor:
    """Smooth ones, so that what lies between two pixels is between their values."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(*shape[:2], 4, 4, generator=generator)
    return F.interpolate(coarse, shape[2:], mode="bilinear")


# ---- meaning --------------------------------------------------------------------------------------------------------
def test_a_deformable_convolution_whose_offsets_are_whole_is_the_convolution_moved() -> None:
    layer, image = fxq.nn.DeformConv2d(4, 6, 3, padding=1, groups=2), images(2, 4, 7, 8)
    offset = torch.zeros(2, 18, 7, 8)
    torch.testing.assert_close(layer(image, offset), nn.Conv2d.forward(layer, image), atol=1e-4, rtol=1e-4)
    offset[:, 0::2] = 1  # one row further down
    expected = F.conv2d(F.pad(image, (1, 1, 0, 2)), layer.weight, layer.bias, groups=2)
    torch.testing.assert_close(layer(image, offset), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        layer(image, offset, torch.full((2, 9, 7, 8), 0.5)) - layer.bias[:, None, None],
        (expected - layer.bias[:, None, None]) / 2,
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_box_is_read_from_the_level_that_fits_its_size() -> None:
    pyramid = [torch.full((1, 1, 32 // 2**level, 32 // 2**level), float(level)) for level in range(3)]
    boxes = torch.tensor([[[0.0, 0, 4, 4], [0, 0, 8, 8], [0, 0, 31, 4], [2, 2, 31, 31]]])
    align = fxq.nn.MultiScaleRoIAlign(2, [1.0, 0.5, 0.25], canonical_scale=8, canonical_level=1)
    assert align(pyramid, boxes)[0, :, 0, 0, 0].tolist() == [0.0, 1.0, 1.0, 2.0]


def _bent(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.5 * x) + 0.2 * torch.sin(3 * x)


def test_a_function_of_several_is_one_table_and_one_operator() -> None:
    one, other = fxq.nn.SegmentLUT(_bent, name="bent_by_a_module"), fxq.nn.SegmentLUT(_bent)
    model = nn.Sequential(one, other, fxq.nn.SegmentLUT(torch.sin))
    prepared, integer = compiled(model, [(images(2, 3, 8, 9),)])
    operators = [layer.operator for layer in fxq.inspect.layers(integer) if not layer.boundary]
    assert operators == ["bent_by_a_module", "bent_by_a_module", "sin"]
    contract.assert_validate_is_integer(prepared, integer, images(2, 3, 8, 9))
    with pytest.raises(fxq.errors.ConfigurationError, match="bent_by_a_module"):
        fxq.nn.SegmentLUT(lambda x: x * 2, name="bent_by_a_module")
    for nameless in (lambda x: x * 2 + 1, functools.partial(torch.clamp, min=0.5), nn.Tanh()):
        with pytest.raises(fxq.errors.ConfigurationError, match=r"without a name[\s\S]*SegmentLUT\(function, name="):
            fxq.nn.SegmentLUT(nameless)
    function = BY_NAME.pop("bent_by_a_module").function
    for table in (OPERATORS, FUNCTIONS):
        del table[function]


def test_colours_of_grey_white_and_red() -> None:
    pixels = torch.tensor([[0.0, 0, 0], [255, 255, 255], [255, 0, 0]]).t().reshape(1, 3, 1, 3)
    result = fxq.nn.RgbToYuv444()(pixels)[0, :, 0]
    torch.testing.assert_close(result[:, :2], torch.tensor([[0.0, 255], [128, 128], [128, 128]]), atol=0.01, rtol=0)
    torch.testing.assert_close(result[:, 2], torch.tensor([76.245, 84.97, 255.5]), atol=0.05, rtol=0)
    torch.testing.assert_close(fxq.nn.BgrToYuv444(centred=True)(pixels.flip(1)), fxq.nn.RgbToYuv444(centred=True)(pixels))
    studio = fxq.nn.RgbToYuv444("studio")(pixels)[0, 0, 0, :2]
    torch.testing.assert_close(studio, torch.tensor([16.0, 235.0]), atol=0.05, rtol=0)


def test_anchors_stand_around_the_pixels_of_a_feature_map() -> None:
    (anchors,) = fxq.nn.AnchorGenerator([[8.0]], [[1.0, 4.0]], [4])([torch.zeros(1, 1, 2, 3)])
    assert anchors.shape == (12, 4)
    assert anchors[0].tolist() == [-4, -4, 4, 4]
    assert anchors[-1].tolist() == [8 - 2, 4 - 8, 8 + 2, 4 + 8]


def test_of_boxes_that_overlap_the_best_is_kept() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30], [0, 0, 10, 10]])
    scores = torch.tensor([[[0.9, 0.1], [0.8, 0.0], [0.7, 0.0], [0.0, 0.6]]])
    boxes, best, labels = fxq.nn.DetectionPostProcess(keep=4)(scores, torch.zeros(1, 4, 4), anchors)
    torch.testing.assert_close(best, torch.tensor([[0.9, 0.0, 0.7, 0.6]]))
    assert labels.tolist() == [[0, -1, 0, 1]]
    torch.testing.assert_close(boxes[0, 2], anchors[2])


def test_pillars_and_points_land_in_their_cells() -> None:
    features, places = torch.randn(3, 2), torch.tensor([[0, 0, 1, 2], [1, 0, 0, 0], [0, 0, 2, 3]])
    maps = fxq.nn.PointPillarsScatter((3, 4), batch=2)(features, places)
    assert torch.equal(maps[0, :, 1, 2], features[0])
    assert torch.equal(maps[1, :, 0, 0], features[1])
    assert int((maps != 0).any(1).sum()) == 3
    pool = fxq.nn.BEVPool((2, 2), torch.tensor([0, 1, 5]), torch.tensor([0, 1, 1]), torch.tensor([3, 3, 0]))
    depth, seen = torch.rand(1, 1, 3, 1, 2), torch.randn(1, 1, 4, 1, 2)
    result = pool(depth, seen)
    torch.testing.assert_close(result[0, :, 1, 1], seen[0, 0, :, 0, 0] * depth[0, 0, 0, 0, 0] + seen[0, 0, :, 0, 1] * depth[0, 0, 0, 0, 1])
    torch.testing.assert_close(result[0, :, 0, 0], seen[0, 0, :, 0, 1] * depth[0, 0, 2, 0, 1])


# ---- as integers ----------------------------------------------------------------------------------------------------
@members(lambda: dict(
    colour=fxq.nn.BgrToYuv444(centred=True), flow=nn.Conv2d(3, 2, 3, padding=1), offset=nn.Conv2d(3, 18, 3, padding=1),
    mask=nn.Conv2d(3, 9, 3, padding=1), warp=fxq.nn.Warp(), deform=fxq.nn.DeformConv2d(3, 4, 3, padding=1),
    correlation=fxq.nn.Correlation(1), regions=fxq.nn.MultiScaleRoIAlign(1, [1.0, 0.5], canonical_scale=4, canonical_level=1),
))  # fmt: skip
def Vision(self, image: Tensor, boxes: Tensor) -> tuple[Tensor, ...]:
    """Every module that is integer, in one model."""
    x = self.colour(image) / 64
    moved = self.warp(x, self.flow(x).permute(0, 2, 3, 1))
    features = self.deform(x, self.offset(x), self.mask(x).sigmoid())
    levels = [features, nn.functional.avg_pool2d(features, 2)]
    return self.correlation(x, moved), features, self.regions(levels, boxes)


@pytest.mark.nightly
def test_they_become_integers_by_the_contract(tmp_path: Path) -> None:
    model = Vision().eval()
    corners = torch.rand(2, 3, 2) * 5
    inputs = images(2, 3, 8, 9) * 60 + 128, torch.cat((corners, corners + 3 + torch.rand(2, 3, 2)), -1)
    prepared, integer = compiled(model, [inputs])
    contract.assert_all_is_integer(prepared)
    with torch.no_grad():
        for actual, expected in zip(integer(*inputs), model(*inputs), strict=True):
            assert float((actual - expected).pow(2).mean()) < 10**-2.5 * float(expected.pow(2).mean())  # 25 dB
    contract.assert_contract(prepared, tmp_path / "vision.onnx", *inputs, integer=integer)
    contract.assert_gradients_reach_every_parameter(prepared, *inputs)


def test_positions_are_16_bits_wide_unless_a_rule_says_otherwise() -> None:
    model, inputs = Vision().eval(), (images(2, 3, 8, 9) * 60 + 128, torch.rand(2, 3, 4) * 8)
    dtypes = {layer.name: layer.dtype for layer in fxq.inspect.layers(fxq.prepare(model, inputs))}
    assert dtypes["flow"] == dtypes["offset"] == "int16"
    assert dtypes["warp"] == "int8"
    asked = fxq.QConfigMapping().set_module_name("flow", fxq.QConfig(fxq.ActivationConfig("int8")))
    assert {layer.name: layer.dtype for layer in fxq.inspect.layers(fxq.prepare(model, inputs, qconfig=asked))}["flow"] == "int8"


# ---- what cameras deliver, against each other and against Pillow's; a network after NV12 in integers ----------------
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
    assert np.abs(ours - pillow).max() <= 1  # Pillow multiplies by numbers of 6 bits after the point


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


@members(lambda: dict(
    camera=CAMERA.Nv12ToYuv444(centred=True), colour=CAMERA.YuvToRgb(centred=True, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4)),
    network=nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 3)),
))  # fmt: skip
def Behind(self, y: Tensor, uv: Tensor) -> Tensor:
    """A network that was written for normalised RGB, after a camera."""
    return self.network(self.colour(self.camera(y, uv)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["bayes-e", "x86"])
def test_a_network_after_a_camera_is_integer_from_the_bytes_on(target: str, tmp_path: Path) -> None:
    y, uv = CAMERA.rgb_to_nv12(torch.cat([photograph(), photograph().flip(3)]))
    model = Behind().eval()
    prepared, integer = contract.compiled(model, [(y, uv)], target)
    assert all(layer.dtype is not None for layer in fxq.inspect.layers(integer) if "Conv" in (layer.operator or ""))
    contract.assert_validate_is_integer(prepared, integer, y, uv)
    contract.assert_integer_is_onnx(integer, tmp_path / "camera.onnx", [(y, uv), (y[:1], uv[:1])])
    wanted = model(y, uv)
    assert 10 * torch.log10(wanted.square().sum() / (integer(y, uv) - wanted).square().sum()) > 25
    assert "none is left in float" in fxq.explain(prepared)
