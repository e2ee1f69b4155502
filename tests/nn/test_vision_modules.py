"""fxq.nn: what the modules mean in float, and that they become integers as they are."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.ops import BY_NAME, FUNCTIONS, OPERATORS
from tests.shared import contract
from tests.shared.contract import compiled


def images(*shape: int, seed: int = 0) -> Tensor:
    """Smooth ones, so that what lies between two pixels is between their values."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(*shape[:2], 4, 4, generator=generator)
    return F.interpolate(coarse, shape[2:], mode="bilinear")


# ---- meaning --------------------------------------------------------------------------------------------------------


def test_warp_reads_where_the_flow_points() -> None:
    image = images(2, 3, 5, 6)
    flow = torch.zeros(2, 5, 6, 2)
    flow[..., 0], flow[..., 1] = 2, -1
    moved = fxq.nn.Warp()(image, flow)
    torch.testing.assert_close(moved[:, :, 1:, :4], image[:, :, :-1, 2:])
    assert bool((moved[:, :, 0] == 0).all())


def test_a_deformable_convolution_whose_offsets_are_whole_is_the_convolution_moved() -> None:
    torch.manual_seed(0)
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


def test_roi_align_of_a_slope_is_the_slope_at_the_cells_middles() -> None:
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(16.0), indexing="ij")
    features = torch.stack((x, y)).unsqueeze(0)
    boxes = torch.tensor([[[4.0, 2.0, 12.0, 8.0], [1.0, 1.0, 3.0, 5.0]]])
    found = fxq.nn.RoIAlign((2, 4), spatial_scale=1.0, sampling_ratio=2)(features, boxes)
    assert found.shape == (1, 2, 2, 2, 4)
    torch.testing.assert_close(found[0, 0, 0], (torch.tensor([5.0, 7, 9, 11]) - 0.5).expand(2, 4))
    torch.testing.assert_close(found[0, 0, 1], (torch.tensor([[3.5], [6.5]]) - 0.5).expand(2, 4))


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


def test_correlation_finds_by_how_much_an_image_is_moved() -> None:
    image = torch.randn(1, 8, 9, 9, generator=torch.Generator().manual_seed(0))
    found = fxq.nn.Correlation(2)(image, torch.roll(image, (1, -2), (2, 3)))
    assert found.shape == (1, 25, 9, 9)
    assert int(found[:, :, 3:-3, 3:-3].mean((0, 2, 3)).argmax()) == (1 + 2) * 5 + (-2 + 2)


def test_colours_of_grey_white_and_red() -> None:
    pixels = torch.tensor([[0.0, 0, 0], [255, 255, 255], [255, 0, 0]]).t().reshape(1, 3, 1, 3)
    found = fxq.nn.RgbToYuv444()(pixels)[0, :, 0]
    torch.testing.assert_close(found[:, :2], torch.tensor([[0.0, 255], [128, 128], [128, 128]]), atol=0.01, rtol=0)
    torch.testing.assert_close(found[:, 2], torch.tensor([76.245, 84.97, 255.5]), atol=0.05, rtol=0)
    torch.testing.assert_close(fxq.nn.BgrToYuv444(centred=True)(pixels.flip(1)), fxq.nn.RgbToYuv444(centred=True)(pixels))
    studio = fxq.nn.RgbToYuv444("studio")(pixels)[0, 0, 0, :2]
    torch.testing.assert_close(studio, torch.tensor([16.0, 235.0]), atol=0.05, rtol=0)


def test_anchors_stand_around_the_pixels_of_a_feature_map() -> None:
    (found,) = fxq.nn.AnchorGenerator([[8.0]], [[1.0, 4.0]], [4])([torch.zeros(1, 1, 2, 3)])
    assert found.shape == (12, 4)
    assert found[0].tolist() == [-4, -4, 4, 4]
    assert found[-1].tolist() == [8 - 2, 4 - 8, 8 + 2, 4 + 8]


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
    found = pool(depth, seen)
    torch.testing.assert_close(found[0, :, 1, 1], seen[0, 0, :, 0, 0] * depth[0, 0, 0, 0, 0] + seen[0, 0, :, 0, 1] * depth[0, 0, 0, 0, 1])
    torch.testing.assert_close(found[0, :, 0, 0], seen[0, 0, :, 0, 1] * depth[0, 0, 2, 0, 1])


def test_attention_at_a_pixels_middle_is_its_value() -> None:
    value = torch.randn(1, 12 + 2, 2, 3)
    middles = torch.tensor([2.5 / 4, 1.5 / 3]), torch.tensor([0.75, 0.5])
    locations = torch.stack(middles).reshape(1, 1, 1, 2, 1, 2).expand(1, 1, 2, 2, 1, 2)
    weights = torch.tensor([0.25, 0.75]).reshape(1, 1, 1, 2, 1).expand(1, 1, 2, 2, 1)
    found = fxq.nn.MultiScaleDeformableAttention([(3, 4), (1, 2)])(value, locations, weights)
    torch.testing.assert_close(found[0, 0], (value[0, 6] * 0.25 + value[0, 13] * 0.75).flatten())


# ---- as integers ----------------------------------------------------------------------------------------------------


class Vision(nn.Module):
    """Every module that is integer, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = fxq.nn.BgrToYuv444(centred=True)
        self.flow, self.offset, self.mask = (nn.Conv2d(3, outputs, 3, padding=1) for outputs in (2, 18, 9))
        self.warp, self.deform = fxq.nn.Warp(), fxq.nn.DeformConv2d(3, 4, 3, padding=1)
        self.correlation = fxq.nn.Correlation(1)
        self.regions = fxq.nn.MultiScaleRoIAlign(1, [1.0, 0.5], canonical_scale=4, canonical_level=1)

    def forward(self, image: Tensor, boxes: Tensor) -> tuple[Tensor, ...]:
        x = self.colour(image) / 64
        moved = self.warp(x, self.flow(x).permute(0, 2, 3, 1))
        features = self.deform(x, self.offset(x), self.mask(x).sigmoid())
        levels = [features, nn.functional.avg_pool2d(features, 2)]
        return self.correlation(x, moved), features, self.regions(levels, boxes)


@pytest.mark.nightly
def test_they_become_integers_by_the_contract(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Vision().eval()
    corners = torch.rand(2, 3, 2) * 5
    inputs = images(2, 3, 8, 9) * 60 + 128, torch.cat((corners, corners + 3 + torch.rand(2, 3, 2)), -1)
    prepared, integer = compiled(model, [inputs])
    contract.assert_all_is_integer(prepared)
    with torch.no_grad():
        for found, expected in zip(integer(*inputs), model(*inputs), strict=True):
            assert float((found - expected).pow(2).mean()) < 10**-2.5 * float(expected.pow(2).mean())  # 25 dB
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    contract.assert_integer_is_onnx(integer, tmp_path / "vision.onnx", [inputs])
    contract.assert_train_is_validate(prepared, *inputs)
    contract.assert_gradients_reach_every_parameter(prepared, *inputs)


def test_positions_are_16_bits_wide_unless_a_rule_says_otherwise() -> None:
    model, inputs = Vision().eval(), (images(2, 3, 8, 9) * 60 + 128, torch.rand(2, 3, 4) * 8)
    dtypes = {layer.name: layer.dtype for layer in fxq.inspect.layers(fxq.prepare(model, inputs))}
    assert dtypes["flow"] == dtypes["offset"] == "int16"
    assert dtypes["warp"] == "int8"
    asked = fxq.QConfigMapping().set_module_name("flow", fxq.QConfig(fxq.ActivationConfig("int8")))
    assert {layer.name: layer.dtype for layer in fxq.inspect.layers(fxq.prepare(model, inputs, qconfig=asked))}["flow"] == "int8"
