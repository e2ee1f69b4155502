"""Bytes of files that ship inside of wheels, and Magika, which tells their types."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.real.wheels import folder

ENDINGS = ("*.csv", "*.rst", "*.jpg", "*.gz", "*.png", "*.xml", "*.txt", "*.py", "*.tif", "*.np?")
PADDING = 256  # the byte after a file's end


@cache
def _files() -> tuple[bytes, ...]:
    places = (folder("sklearn", "scikit-learn") / "datasets", folder("skimage", "scikit-image") / "data")
    return tuple(path.read_bytes() for place in places for ending in ENDINGS for path in sorted(place.rglob(ending)))


def heads_and_tails(count: int, seed: int) -> Tensor:
    """Return the first and the last 1024 bytes of pieces of files, int64 of shape (count, 2048)."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        file = _files()[int(torch.randint(len(_files()), (), generator=generator))]
        piece = file[: int(torch.randint(min(len(file), 256), len(file) + 1, (), generator=generator))].strip()
        head, tail = list(piece[:1024]), list(piece[-1024:])
        rows.append(head + [PADDING] * (2048 - len(head) - len(tail)) + tail)
    return torch.tensor(rows)


class Magika(nn.Module):
    """The probabilities of 214 types of files, from 2048 bytes. Fratantonio et al.: Magika, ICSE 2025."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(257, 64), nn.Conv1d(256, 512, 5)
        self.norm_0, self.norm_1 = nn.LayerNorm(512, eps=1e-6), nn.LayerNorm(512, eps=1e-6)
        self.dense = nn.Linear(512, 214)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.embedding(x), approximate="tanh").reshape(-1, 512, 256)
        x = self.norm_0(x.transpose(1, 2)).transpose(1, 2)
        x = F.gelu(self.conv(x.transpose(1, 2)), approximate="tanh")
        return torch.softmax(self.dense(self.norm_1(x.amax(2))), 1)


def magika() -> nn.Module:
    """Return Magika with the weights of its ONNX file, whose names end in the names of layers."""
    import onnx

    path = folder("magika", "magika") / "models" / "standard_v3_3" / "model.onnx"
    named = {
        each.name.split("get_logits_/")[-1]: torch.tensor(onnx.numpy_helper.to_array(each)) for each in onnx.load(path).graph.initializer
    }
    network = Magika()
    network.load_state_dict({
        "embedding.weight": named["Const:0"] + named["MagikaV2/Dense_0/Reshape:0"][0],
        "conv.weight": named["MagikaV2/Conv_0/transpose_3:0"].squeeze(3), "conv.bias": named["const_fold_opt__209"].flatten(),
        "dense.weight": named["Const_24:0"].T, "dense.bias": named["MagikaV2/Dense_1/Reshape:0"].flatten(),
        **{f"norm_{index}.weight": named[f"MagikaV2/LayerNorm_{index}/Reshape_2:0"].flatten() for index in (0, 1)},
        **{f"norm_{index}.bias": named[f"MagikaV2/LayerNorm_{index}/Reshape_3:0"].flatten() for index in (0, 1)},
    })  # fmt: skip
    return network
