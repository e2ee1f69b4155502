"""Find faces with a YOLO for a board: pretrained, its head cut, a camera's NV12 in, integers out.   python examples/find_faces.py

The network is nudenet's YOLOv8n, which reads 320 by 320 pixels. It is cut where the vendor's samples cut it: the six convolutions of the
head leave as integers, channels last, and the host decodes the few cells that have an object. Photographs calibrate it. Where the vendor's
tool is installed, the program is compiled and verified in the simulator, and the folder for the board is written. Boxes are drawn from the
integers. Needs Pillow and scikit-learn; pip install onnx2torch torchvision; pip install --no-deps nudenet scikit-image.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from PIL import Image, ImageDraw
from torch import Tensor, fx

import fxquant as fxq

SIDE, STRIDES = 320, (8, 16, 32)  # pixels of an image, and of a cell of each pair of maps
NAMES = [f"{kind}{stride}" for stride in STRIDES for kind in ("classes", "boxes")]
FACES = {1: "woman's face", 12: "man's face"}  # of the network's 18 labels
SCORE, OVERLAP, BINS = 0.5, 0.5, 16  # least score; overlap of boxes of one object; numbers for a side of a box
PHOTOGRAPHS = {
    "skimage": ("data/astronaut.png", "data/chelsea.png", "data/coffee.png", "data/rocket.jpg", "data/motorcycle_left.png"),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}
PACKAGES = {"nudenet": "--no-deps nudenet", "skimage": "--no-deps scikit-image", "sklearn": "scikit-learn"}  # of pip

Box = tuple[int, float, tuple[float, float, float, float]]  # label, score, and left, top, right, bottom in pixels of the network's image


def files(package: str) -> Path:
    """The folder of an installed package, which need not be importable."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {package} is not installed: pip install {PACKAGES.get(package, package)}")
    return Path(spec.origin).parent


def network() -> tuple[fx.GraphModule, list[str]]:
    """YOLOv8n up to the six convolutions of its head, and their names: classes and boxes of each stride."""
    files("onnx2torch")
    from onnx2torch import convert  # type: ignore[import-not-found]

    model: fx.GraphModule = convert(onnx.load(files("nudenet") / "320n.onnx")).eval()
    nodes = {str(node.target): node for node in model.graph.nodes}
    heads = [nodes[f"model/22/cv{branch}/{scale}/cv{branch}/{scale}/2/Conv"] for scale in range(len(STRIDES)) for branch in (3, 2)]
    model.graph.output_node().args = (tuple(heads),)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model, [str(head.target) for head in heads]


def crops(count: int, seed: int = 0) -> Tensor:
    """Square crops of photographs, float32 (count, 3, 320, 320) of 0 to 1, every other one mirrored."""
    images = [Image.open(files(package) / name).convert("RGB") for package, names in PHOTOGRAPHS.items() for name in names]
    generator, cut = np.random.default_rng(seed), []
    for index in range(count):
        image = images[index % len(images)]
        extent = int(min(image.size) * generator.uniform(0.5, 1.0))
        left, top = (int(generator.integers(0, side - extent + 1)) for side in image.size)
        pixels = np.array(image.crop((left, top, left + extent, top + extent)).resize((SIDE, SIDE)))
        cut.append(torch.from_numpy(pixels[:, :: 1 - 2 * (index % 2)].copy()).permute(2, 0, 1).float() / 255)
    return torch.stack(cut)


def decoded(integers: dict[str, Any], outputs: dict[str, Any]) -> list[Box]:
    """Return the faces in integer maps (1, H, W, C), after non-maximum suppression; `outputs` has the scales of each map."""
    found: list[Box] = []
    for stride in STRIDES:
        classes, boxes = (integers[f"{kind}{stride}"][0] for kind in ("classes", "boxes"))
        fine, step = (np.array(outputs[f"{kind}{stride}"]["scale"]) for kind in ("classes", "boxes"))
        for row, column, label in np.argwhere(classes > math.log(SCORE / (1 - SCORE)) / fine).tolist():  # integers are compared
            weights = np.exp((boxes[row, column] * step).reshape(4, BINS))
            left, top, right, bottom = (weights * np.arange(BINS)).sum(1) / weights.sum(1) * stride
            x, y = (column + 0.5) * stride, (row + 0.5) * stride
            if label in FACES:
                score = 1 / (1 + math.exp(-(classes[row, column] * fine)[label]))
                found.append((label, score, (x - left, y - top, x + right, y + bottom)))
    kept: list[Box] = []
    for box in sorted(found, key=lambda each: -each[1]):
        if all(overlap(box[2], other[2]) < OVERLAP for other in kept):
            kept.append(box)
    return kept


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The area that two boxes share, by the area that they cover together."""
    shared = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return shared / (sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - shared)


def main(count: int = 40, out: Path = Path("find_faces"), optimize_level: str = "O3") -> list[Box]:
    """The faces on the photograph; files are written to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model, heads = network()
    mapping = fxq.QConfigMapping()
    for head in heads:  # sums of 32 bits, as they are
        mapping = mapping.set_module_name(head, fxq.QConfig(fxq.ActivationConfig("int32")))
    result = fxq.quantize(model, crops(count).split(8), "bayes-e", mapping)
    print("dB of the maps to those of the float network:", *(f"{output.sqnr:.1f}" for output in result.compare([crops(8, seed=1)]).outputs))

    camera = fxq.board.with_camera(result.integer, "rgb", std=(255, 255, 255))
    options = fxq.board.HorizonOptions(outputs="integer", layout="NHWC", optimize_level=optimize_level)
    folder = fxq.board.export_horizon(camera, out / "compiler", camera="nv12", output_names=NAMES, options=options)

    photograph = Image.open(files("skimage") / "data" / "astronaut.png").convert("RGB")
    pixels = torch.from_numpy(np.array(photograph.resize((SIDE, SIDE)))).permute(2, 0, 1)[None]
    image = fxq.nn.Nv12ToYuv444(centred=True)(*fxq.nn.rgb_to_nv12(pixels))  # YUV less 128, as a camera gives it
    try:
        program = fxq.board.compile_horizon(folder)
        print(fxq.verify(camera, program, [image]))
        print(fxq.board.board_kit(out / "board", camera, program, [image]))
    except fxq.errors.ConfigurationError as error:
        print(f"not compiled: {error}")

    outputs = json.loads((folder / "layers.json").read_text())["outputs"]
    tensors = next(fxq.inspect.record(camera, [image], ["quantized", "accumulators"]))
    integers = {name: tensors[head.replace("/", "_").lower()].permute(0, 2, 3, 1).numpy() for name, head in zip(NAMES, heads, strict=True)}
    found = decoded(integers, outputs)
    draw, ratio = ImageDraw.Draw(photograph), photograph.width / SIDE
    for label, score, corners in found:
        print(f"a {FACES[label]}, {100 * score:.0f} %, in pixels {', '.join(f'{ratio * corner:.0f}' for corner in corners)}")
        draw.rectangle([ratio * corner for corner in corners], outline="orange", width=3)
        draw.text((ratio * corners[0], ratio * corners[1] - 22), f"{FACES[label]} {100 * score:.0f} %", fill="orange", font_size=18)
    photograph.save(out / "faces.png")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="crops of photographs that calibrate it")
    parser.add_argument("--out", type=Path, default=Path("find_faces"))
    parser.add_argument("--optimize-level", default="O3", help="of the vendor's compiler: O0 compiles in seconds")
    options = parser.parse_args()
    main(options.count, options.out, options.optimize_level)
