"""Train a small network on handwritten digits, quantize it, and write what it deploys.   python examples/classify_digits.py

Prints the accuracy of the float model, of the integer model and of the ONNX file on digits that none of them has seen, and draws the ones
that the integer model gets wrong. Needs scikit-learn, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import onnxruntime
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq


class Classifier(nn.Module):
    """Convolutions with a shortcut, and a mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) images of 0 to 16 → (N, 10) scores."""
        x = self.stem(x / 16)
        scores: Tensor = self.head(self.down(x + self.body(x)).mean((2, 3)))
        return scores


def main(steps: int = 400, out: Path = Path("classify_digits")) -> dict[str, float]:
    """The share of test digits that each form gets right; files are written to `out`."""
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]

    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        chosen = train[torch.randint(len(train), (64,))]
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    model.eval()

    result = fxq.quantize(model, images[train[:256]].split(32), target="bayes-e")
    path = result.export(out / "classifier.onnx")
    assert result.verify(path, [images[test[:64]]]), "the file and the integer model differ"

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        scores = {
            "float": model(images[test]),
            "integer": result.integer(images[test]),
            "ONNX": torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images[test].numpy()})[0]),
        }
    right = {name: float((found.argmax(1) == labels[test]).float().mean()) for name, found in scores.items()}
    for name, share in right.items():
        print(f"{name:<8} {100 * share:.2f} %")
    print(fxq.explain(result.prepared))
    picture(images[test], labels[test], scores["integer"].argmax(1), out / "mistakes.png")
    return right


def picture(images: Tensor, labels: Tensor, found: Tensor, path: Path) -> None:
    """The digits that are taken for another, with both names; a few that are right where there are not enough."""
    from matplotlib import pyplot as plt

    order = torch.argsort((found == labels).int(), stable=True)[:12]
    figure, axes = plt.subplots(2, 6, figsize=(9, 3.6))
    for axis, index in zip(axes.flat, order.tolist(), strict=True):
        axis.imshow(images[index, 0], cmap="gray_r")
        wrong = int(found[index]) != int(labels[index])
        axis.set_title(f"{int(labels[index])}, taken for {int(found[index])}" if wrong else f"{int(labels[index])}", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("classify_digits"))
    options = parser.parse_args()
    main(options.steps, options.out)
