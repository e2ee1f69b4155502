"""Find letters on a page: the network in integers, what comes behind it on the host.   python examples/detect_glyphs.py

Pages are rendered from the fonts that matplotlib brings. The network gives a map of how likely each letter has its middle there; where it
peaks is found by the host, in Python, and is no part of the graph. Prints precision and recall of the float and the integer model on pages
that neither has seen, and draws one of them. Needs matplotlib and Pillow.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq

LETTERS = "AEKRSX"
SIZE, STRIDE, LETTER = 96, 4, 20  # pixels of a page, of a cell of the map, of a letter
FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "DejaVuSans-Bold.ttf")

Found = list[tuple[int, int, int]]  # letter, and the cell of its middle: row, column


class Detector(nn.Module):
    """Convolutions down to a quarter of the page, and a score for each letter in every cell."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for wide, stride in ((16, 2), (32, 2), (48, 1), (48, 1)):
            layers += [nn.Conv2d(channels, wide, 5, stride, 2, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        self.features = nn.Sequential(*layers)
        self.score = nn.Conv2d(channels, len(LETTERS), 1)

    def forward(self, page: Tensor) -> Tensor:
        """(N, 1, 96, 96) pages of 0 to 1 → (N, letters, 24, 24) probabilities."""
        return torch.sigmoid(self.score(self.features(page)))


def render(lot: random.Random, fonts: list[ImageFont.FreeTypeFont]) -> tuple[Tensor, Found]:
    """A page with one to five letters that do not overlap, and where they are."""
    page, placed = Image.new("L", (SIZE, SIZE), lot.randrange(60)), []
    draw = ImageDraw.Draw(page)
    for _ in range(lot.randint(1, 5)):
        x, y = (lot.randrange(LETTER // 2, SIZE - LETTER // 2) for _ in "xy")
        if all(max(abs(x - left), abs(y - top)) > LETTER for _, top, left in placed):
            letter = lot.randrange(len(LETTERS))
            draw.text((x, y), LETTERS[letter], fill=lot.randrange(140, 256), font=lot.choice(fonts), anchor="mm")
            placed.append((letter, y, x))
    pixels = torch.tensor(list(page.tobytes()), dtype=torch.float32).reshape(1, SIZE, SIZE) / 255
    pixels = (pixels + 0.06 * torch.randn(pixels.shape)).clamp(0, 1)
    return pixels, [(letter, y // STRIDE, x // STRIDE) for letter, y, x in placed]


def pages(seed: int, count: int) -> tuple[Tensor, list[Found]]:
    """So many pages, and what is on each."""
    lot = random.Random(seed)
    torch.manual_seed(seed)
    folder = Path(font_manager.findfont("DejaVu Sans")).parent
    fonts = [ImageFont.truetype(str(folder / name), size) for name in FONTS for size in (LETTER - 2, LETTER)]
    drawn = [render(lot, fonts) for _ in range(count)]
    return torch.stack([page for page, _ in drawn]), [found for _, found in drawn]


def wanted(found: list[Found]) -> Tensor:
    """The maps that the network is to give."""
    maps = torch.zeros(len(found), len(LETTERS), SIZE // STRIDE, SIZE // STRIDE)
    for page, letters in enumerate(found):
        for letter, row, column in letters:
            maps[page, letter, row, column] = 1.0
    return maps


def peaks(maps: Tensor, least: float = 0.4) -> list[Found]:
    """Post-processing on the host: the cells that are likelier than all around them, over all letters."""
    best, letter = maps.max(1)
    around = F.max_pool2d(best[:, None], 5, 1, 2)[:, 0]
    found: list[Found] = [[] for _ in maps]
    for page, row, column in ((best == around) & (best > least)).nonzero().tolist():
        found[page].append((int(letter[page, row, column]), row, column))
    return found


def quality(found: list[Found], truth: list[Found]) -> tuple[float, float]:
    """Precision and recall: a letter is found where its name is right and its cell is a neighbour at most."""
    right = sum(
        any(a == b and abs(y - v) <= 1 and abs(x - u) <= 1 for b, v, u in t) for f, t in zip(found, truth, strict=True) for a, y, x in f
    )
    return right / max(1, sum(map(len, found))), right / max(1, sum(map(len, truth)))


def main(steps: int = 500, out: Path = Path("detect_glyphs")) -> dict[str, tuple[float, float]]:
    """Precision and recall of both models; files are written to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    train, truth = pages(0, 600)
    test, test_truth = pages(1, 100)
    maps = wanted(truth)

    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        chosen = torch.randint(len(train), (16,))
        given = model(train[chosen]).clamp(1e-5, 1 - 1e-5)
        weight = 1 + 40 * maps[chosen]  # a page is mostly empty
        optimizer.zero_grad()
        F.binary_cross_entropy(given, maps[chosen], weight).backward()
        optimizer.step()
    model.eval()

    result = fxq.quantize(model, train[:64].split(16), target="bayes-e")
    assert result.verify(result.export(out / "detector.onnx"), [test[:4]]), "the file and the integer model differ"
    with torch.no_grad():
        given_maps = {"float": model(test), "integer": result.integer(test)}
    figures = {name: quality(peaks(found), test_truth) for name, found in given_maps.items()}
    for name, (precision, recall) in figures.items():
        print(f"{name:<8} precision {100 * precision:.1f} %, recall {100 * recall:.1f} %")
    picture(test[:4], peaks(given_maps["integer"][:4]), out / "pages.png")
    return figures


def picture(drawn: Tensor, found: list[Found], path: Path) -> None:
    """Pages with what the integer model found on them."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    figure, axes = plt.subplots(1, len(drawn), figsize=(3 * len(drawn), 3.2))
    for axis, page, letters in zip(axes.flat, drawn, found, strict=True):
        axis.imshow(page[0], cmap="gray", vmin=0, vmax=1)
        for letter, row, column in letters:
            x, y = (column + 0.5) * STRIDE, (row + 0.5) * STRIDE
            axis.add_patch(Rectangle((x - LETTER / 2, y - LETTER / 2), LETTER, LETTER, fill=False, color="orange"))
            axis.text(x + LETTER / 2, y - LETTER / 2, LETTERS[letter], color="orange", fontsize=11, va="bottom")
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("detect_glyphs"))
    options = parser.parse_args()
    main(options.steps, options.out)
