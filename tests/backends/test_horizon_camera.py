"""Images from a camera as the input of a compiled program: what is written, what is refused, and the bytes of NV12."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxquant as fxq
from fxquant.backends.horizon.export import nv12_of
from tests.shared.networks import members, written

MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


@members(lambda: dict(colour=fxq.nn.YuvToRgb(centred=True, mean=MEAN, std=STD), layer=nn.Conv2d(3, 4, 3, 2, 1)))
def Camera(self, image: Tensor) -> Tensor:
    """Centred YUV as normalised RGB, and a layer."""
    return torch.relu(self.layer(self.colour(image)))


def converted(target: str = "bayes-e", scale: float | None = 1.0, size: tuple[int, int] = (8, 8)) -> fx.GraphModule:
    torch.manual_seed(0)
    images = torch.randint(-128, 128, (4, 3, *size)).float()
    prepared = fxq.calibrate(fxq.prepare(Camera().eval(), images, target), [images])
    if scale is not None:
        fxq.set_qparams(prepared, {"image_quantize": scale})
    return fxq.convert(prepared)


def of_rgb(target: str = "bayes-e", train_type: str = "rgb", swing: str = "full") -> tuple[fx.GraphModule, Tensor, Tensor]:
    """Return a model that was calibrated with normalized images, YUV less 128 (2, 3, 32, 32), and that image after normalization."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    yuv = fxq.nn.Nv12ToYuv444(centred=True)(*fxq.nn.rgb_to_nv12(torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)))
    colours = fxq.nn.YuvToRgb if train_type == "rgb" else fxq.nn.YuvToBgr
    images = colours(swing, True, MEAN, STD)(yuv)
    return fxq.quantize(model, [images], target).integer, yuv, images


@pytest.mark.parametrize(("train_type", "swing"), [("rgb", "full"), ("bgr", "full"), ("rgb", "studio"), ("rgb", "bgr"), ("bgr", "rgb")])
def test_a_model_of_normalized_images_takes_a_cameras_after_its_calibration(train_type: str, swing: str, tmp_path: Path) -> None:
    integer, yuv, images = of_rgb(train_type=train_type, swing=swing)
    before = integer(images)
    model = fxq.board.with_camera(integer, train_type, mean=MEAN, std=STD, swing=swing)
    assert torch.equal(integer(images), before)
    name = "input_1_quantize"  # the image on the model's own grid
    grid, converted = (next(fxq.inspect.record(each, [batch], [name]))[name] for each, batch in ((integer, images), (model, yuv)))
    assert (grid - converted).abs().max() <= 2  # steps: of weights and of the image, that are rounded
    assert (model(yuv) - before).norm() < 0.05 * before.norm()
    assert model.state_dict().keys() > integer.state_dict().keys() - {"integer.input_1_quantize.scale"}
    loaded = fxq.load(fxq.save(model, tmp_path / "camera.fxq"))
    assert torch.equal(loaded(yuv), model(yuv))
    fxq.board.export_horizon(loaded, tmp_path / "net", camera="nv12")
    again = fxq.board.export_horizon(model, tmp_path / "again", camera="nv12")
    for path in again.iterdir():
        assert path.read_bytes() == (tmp_path / "net" / path.name).read_bytes()


def of_gray(target: str = "bayes-e") -> tuple[fx.GraphModule, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a model of a vector and of a normalized gray image, such inputs, and a camera's: gray less 128 (2, 1, 16, 24)."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"seen": nn.Conv2d(1, 8, 3), "known": nn.Linear(6, 8), "last": nn.Conv2d(8, 4, 1)})
    model = written(lambda m, pose, image: m.last(torch.relu(m.seen(image)) + m.known(pose)[..., None, None]), **layers).eval()
    pose, image = torch.randn(2, 6), torch.randint(0, 256, (2, 1, 16, 24)).float()
    normalized = (pose, (image - 120) / 60)
    return fxq.quantize(model, [normalized], target).integer, normalized, (pose, image - 128)


def test_a_gray_image_beside_another_input_is_a_cameras(tmp_path: Path) -> None:
    integer, normalized, taken = of_gray()
    model = fxq.board.with_camera(integer, "gray", mean=[120], std=[60], swing="gray")
    assert (model(*taken) - integer(*normalized)).norm() < 0.05 * integer(*normalized).norm()
    folder = fxq.board.export_horizon(model, tmp_path / "net", camera="gray", options=fxq.board.HorizonOptions(input_layout="NHWC"))
    text = (folder / "model.yaml").read_text(encoding="utf-8")
    assert "input_type_rt: 'featuremap;gray'" in text
    assert "norm_type: 'no_preprocess;data_mean'\n  mean_value: ';128'" in text
    inputs = json.loads((folder / "layers.json").read_text(encoding="utf-8"))["inputs"]
    assert {name: each["type"] for name, each in inputs.items()} == {"pose": "float32", "image": "gray"}
    with pytest.raises(fxq.errors.ConfigurationError, match="input_batch cannot be used"):
        fxq.board.export_horizon(model, tmp_path / "many", camera="gray", options=fxq.board.HorizonOptions(input_batch=2))
    with pytest.raises(fxq.errors.ConfigurationError, match="gray is not made of full"):
        fxq.board.with_camera(integer, "gray", mean=[120], std=[60])


def test_what_has_no_image_to_convert_is_refused() -> None:
    for model in (gray(), two(), of_rgb("x86")[0]):
        with pytest.raises(fxq.errors.ConfigurationError, match="cannot take its image from a camera") as refused:
            fxq.board.with_camera(model)
        assert "fxq.nn.YuvToRgb(centred=True" in refused.value.remedy


@pytest.mark.parametrize("camera", ["nv12", "yuv444", "rgb", "bgr"])
def test_the_configuration_asks_for_bytes_less_128(camera: str, tmp_path: Path) -> None:
    folder = fxq.board.export_horizon(converted(), tmp_path / "net", camera=camera)
    text = (folder / "model.yaml").read_text(encoding="utf-8")
    for line in (
        f"input_type_rt: '{camera}'",
        "input_layout_rt: 'NHWC'",
        f"input_type_train: '{'yuv444' if camera == 'nv12' else camera}'",
        "norm_type: 'data_mean'\n  mean_value: '128 128 128'",
    ):
        assert line in text
    plain = fxq.board.export_horizon(converted(), tmp_path / "plain")
    assert "mean_value" not in (plain / "model.yaml").read_text(encoding="utf-8")
    assert (plain / "model.onnx").read_bytes() == (folder / "model.onnx").read_bytes()


def gray() -> fx.GraphModule:
    return fxq.quantize(nn.Conv2d(1, 2, 1).eval(), [torch.randn(1, 1, 8, 8)], target="bayes-e").integer


def two() -> fx.GraphModule:
    batch = (torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8))
    prepared = fxq.calibrate(fxq.prepare(written(lambda m, image, other: image + other), batch, "bayes-e"), [batch])
    fxq.set_qparams(prepared, {"image_quantize": 1.0, "other_quantize": 1.0})
    return fxq.convert(prepared)


REFUSED: dict[str, tuple[Any, str]] = {
    "another scale": (lambda: converted(scale=0.5), "scale=0.5"),
    "an odd size": (lambda: converted(size=(8, 9)), "NV12 has an even number of rows and of columns"),
    "one channel": (gray, "an image of nv12 has 3 channels"),
    "two images": (two, "image and other are images of bytes less 128"),
    "nash": (lambda: converted("nash-e"), "not written for hb_compile"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_of_a_camera_is_refused(name: str, tmp_path: Path) -> None:
    make, because = REFUSED[name]
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot take nv12 from a camera") as refused:
        fxq.board.export_horizon(make(), tmp_path / "net", camera="nv12")
    assert because in refused.value.because
    assert "fxq.board.with_camera(integer, 'rgb'" in refused.value.remedy
    assert not (tmp_path / "net").exists()


def test_the_bytes_of_nv12_are_those_of_the_image() -> None:
    y, uv = torch.randint(0, 256, (1, 4, 6, 1), dtype=torch.uint8), torch.randint(0, 256, (1, 2, 3, 2), dtype=torch.uint8)
    image = fxq.nn.Nv12ToYuv444(centred=True)(y, uv).permute(0, 2, 3, 1).to(torch.int64)
    assert torch.equal(nv12_of(image), torch.cat([y.reshape(4, 6), uv.reshape(2, 6)]))
    image[0, 0, 0, 1] += 1
    with pytest.raises(fxq.errors.ConfigurationError, match="not an NV12 image"):
        nv12_of(image)
