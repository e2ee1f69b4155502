"""Take the noise out of photographs with 4-bit weights, trained as they are deployed.   python examples/denoise_photographs.py

The float network is trained on the left sides of scikit-learn's two photographs, quantized, trained on with quantization, and tested on
the right sides. Prints dB of PSNR of the noisy picture, of the float model, of the calibrated integer model and of the one that was
trained on, and draws a cutting of each. Needs scikit-learn, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_sample_image  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq

NOISE = 0.1
SIZE = 48  # pixels of a cutting, in training and afterwards: what is deployed has one size


class Denoiser(nn.Module):
    """The noise is what is predicted, and taken away."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, wide, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(wide, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) noisy pixels of 0 to 1 → the same without noise."""
        y = F.relu(self.first(x))
        for layer in self.inner:
            y = F.relu(layer(y)) + y
        return x - self.last(y)


def photographs() -> tuple[Tensor, Tensor]:
    """The left sides of two photographs, one below the other, and the right sides: (3, H, W), 0 to 1."""
    whole = torch.cat([torch.tensor(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]).permute(2, 0, 1).float() / 255
    return whole[:, :, :400], whole[:, :, 400:]


def patches(image: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy cuttings, and clean ones."""
    tops = torch.randint(image.shape[1] - SIZE, (count,), generator=generator).tolist()
    lefts = torch.randint(image.shape[2] - SIZE, (count,), generator=generator).tolist()
    clean = torch.stack([image[:, top : top + SIZE, left : left + SIZE] for top, left in zip(tops, lefts, strict=True)])
    return (clean + NOISE * torch.randn(clean.shape, generator=generator)).clamp(0, 1), clean


def psnr(found: Tensor, clean: Tensor) -> float:
    """dB, of pixels of 0 to 1."""
    return float(-10 * torch.log10((found.clamp(0, 1) - clean).square().mean()))


def fit(model: nn.Module, image: Tensor, steps: int, rate: float, seed: int) -> None:
    """Train a model, float or prepared, in place."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        noisy, clean = patches(image, 6, generator)
        optimizer.zero_grad()
        F.l1_loss(model(noisy), clean).backward()
        optimizer.step()


def main(steps: int = 400, out: Path = Path("denoise_photographs")) -> dict[str, float]:
    """dB of PSNR on the sides that were not trained on; files are written to `out`."""
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    train, test = photographs()
    model = Denoiser()
    fit(model, train, steps, 2e-3, seed=1)
    model.eval()

    samples, _ = patches(train, 64, torch.Generator().manual_seed(2))
    result = fxq.quantize(model, samples.split(8), qconfig=fxq.QConfig(weight=fxq.WeightConfig("int4")), target="nash-e")
    calibrated = result.integer
    fxq.set_state(result.prepared, fxq.State.TRAIN)
    fit(result.prepared, train, steps // 4, 2e-4, seed=3)
    fxq.set_state(result.prepared, fxq.State.VALIDATE)
    trained = fxq.convert(result.prepared)

    noisy, clean = patches(test, 64, torch.Generator().manual_seed(4))
    path = fxq.export_onnx(trained, out / "denoiser.onnx")
    assert fxq.verify(trained, path, [noisy[:1]]), "the file and the integer model differ"
    with torch.no_grad():
        found = {"noisy": noisy, "float": model(noisy), "integer": calibrated(noisy), "integer, trained": trained(noisy)}
    figures = {name: psnr(pixels, clean) for name, pixels in found.items()}
    for name, decibels in figures.items():
        print(f"{name:<17} {decibels:.2f} dB")
    picture({**found, "clean": clean}, figures, out / "cuttings.png")
    return figures


def picture(found: dict[str, Tensor], figures: dict[str, float], path: Path) -> None:
    """The cuttings with most in them, in every form."""
    from matplotlib import pyplot as plt

    shown = found["clean"].flatten(1).var(1).argsort(descending=True)[:2].tolist()
    figure, axes = plt.subplots(2, len(found), figsize=(3 * len(found), 6.4))
    for column, (name, pixels) in enumerate(found.items()):
        for row, index in enumerate(shown):
            axes[row, column].imshow(pixels[index].clamp(0, 1).permute(1, 2, 0))
            axes[row, column].axis("off")
        axes[0, column].set_title(name + (f", {figures[name]:.2f} dB" if name in figures else ""))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("denoise_photographs"))
    options = parser.parse_args()
    main(options.steps, options.out)
