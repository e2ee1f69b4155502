"""Networks for sequences: a convolutional one for signals, a vision transformer, and a block of Swin and of a Conformer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DilatedBlock(nn.Module):
    """A dilated convolution with its batch norm, an activation, a 1×1 convolution, and the shortcut."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilated = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.bn = nn.BatchNorm1d(channels)
        self.act = nn.LeakyReLU(0.1)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.act(self.bn(self.dilated(x))))


class SignalNetwork(nn.Module):
    """[batch, 3, length] gives the class of the signal and a filtered signal of the same length, which is divisible by 8."""

    def __init__(self, num_classes: int = 10, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, channels, 9, stride=2, padding=4, bias=False), nn.BatchNorm1d(channels), nn.ReLU())
        self.pool = nn.MaxPool1d(2)
        self.blocks = nn.Sequential(*(DilatedBlock(channels, 2**level) for level in range(4)))
        self.smooth = nn.AvgPool1d(2)
        self.up1 = nn.Sequential(nn.ConvTranspose1d(channels, channels, 4, stride=4, bias=False), nn.BatchNorm1d(channels), nn.ReLU())
        self.up2 = nn.ConvTranspose1d(2 * channels, 3, 4, stride=2, padding=1)
        self.head = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.BatchNorm1d(2 * channels), nn.ReLU(), nn.Linear(2 * channels, num_classes)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.stem(x)
        deep = self.smooth(self.blocks(self.pool(low)))
        filtered = self.up2(torch.cat([low, self.up1(deep)], 1))
        return self.head(deep.mean(-1)), filtered


class _Attention(nn.Module):
    """Attention of several heads over the middle dimension, with a learned bias for each pair of `places`, if that is not 0."""

    def __init__(self, width: int, heads: int, places: int = 0) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.bias = nn.Parameter(0.1 * torch.randn(1, heads, places, places)) if places else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).reshape(*x.shape[:2], self.heads, self.size).transpose(1, 2) for part in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) * self.size**-0.5
        weights = torch.softmax(scores if self.bias is None else scores + self.bias, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """A small vision transformer: patches of 16, four blocks of 192 channels and three heads, the mean of the tokens."""

    def __init__(self, classes: int = 100, size: int = 224, width: int = 192, depth: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.sizes = (3, size, size)
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), _Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Swin(nn.Module):
    """Patches of 4, two blocks of 96 channels and three heads on windows of 7, the second one shifted, the mean of the tokens."""

    def __init__(self, classes: int = 10, size: int = 112, width: int = 96, heads: int = 3, window: int = 7) -> None:
        super().__init__()
        self.sizes, self.window, self.side = (3, size, size), window, size // 4
        self.patches, self.norm, self.head = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width), nn.Linear(width, classes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.ModuleList(_Attention(width, heads, window**2) for _ in range(2))
        self.up, self.down = (nn.ModuleList(nn.Linear(*each) for _ in range(2)) for each in ((width, 4 * width), (4 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).permute(0, 2, 3, 1))
        count, window, width = self.side // self.window, self.window, x.shape[-1]
        for block in range(2):
            shift = window // 2 * block
            y = torch.roll(self.norms[2 * block](x), (-shift, -shift), (1, 2)) if shift else self.norms[2 * block](x)
            y = y.reshape(-1, count, window, count, window, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, window**2, width)
            y = self.attention[block](y).reshape(-1, count, count, window, window, width).permute(0, 1, 3, 2, 4, 5)
            y = y.reshape(-1, self.side, self.side, width)
            x = x + (torch.roll(y, (shift, shift), (1, 2)) if shift else y)
            x = x + self.down[block](F.gelu(self.up[block](self.norms[2 * block + 1](x))))
        return self.head(x.mean((1, 2)))


class Conformer(nn.Module):
    """A block: two halves of a feed-forward layer, attention and a depthwise convolution in between, on 100 frames."""

    def __init__(self, width: int = 144, heads: int = 4, frames: int = 100, kernel: int = 15) -> None:
        super().__init__()
        self.sizes, self.attention = (frames, width), _Attention(width, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.up, self.down = (nn.ModuleList(nn.Linear(*each) for _ in range(2)) for each in ((width, 4 * width), (4 * width, width)))
        self.first, self.last, self.bn = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1), nn.BatchNorm1d(width)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.down[0](F.silu(self.up[0](self.norms[0](x))))
        x = x + self.attention(self.norms[1](x))
        y = self.bn(self.depthwise(F.glu(self.first(self.norms[2](x).transpose(1, 2)), 1)))
        x = x + self.last(F.silu(y)).transpose(1, 2)
        return self.norms[4](x + 0.5 * self.down[1](F.silu(self.up[1](self.norms[3](x)))))
