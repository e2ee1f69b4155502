"""Layers as model code bases write them: call forms of operators that PyTorch has no name for."""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention as vision transformers write it, by hand."""

    def __init__(self, features: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (features // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, features = x.shape
        q, k, v = self.qkv(x).reshape(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, count, features))


class RMSNorm(nn.Module):
    """The norm of language models, by hand."""

    def __init__(self, features: int = 8, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(features) + 0.5), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class LayerNorm2d(nn.Module):
    """A layer norm over the channels of an image, by hand."""

    def __init__(self, channels: int = 3, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.randn(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Recurrence(nn.Module):
    """A cell that is called step after step."""

    def __init__(self, cell: nn.Module, hidden: int = 6) -> None:
        super().__init__()
        self.cell, self.hidden = cell, hidden

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], self.hidden)
        pair = (state, state)
        for step in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                pair = self.cell(x[:, step], pair)
            else:
                state = self.cell(x[:, step], state)
        return pair[0] if isinstance(self.cell, nn.LSTMCell) else state


class ClassToken(nn.Module):
    """A learned token in front of a sequence, and learned positions."""

    def __init__(self, features: int = 8, count: int = 5) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, features)), nn.Parameter(torch.randn(1, count + 1, features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions


class RelativeBias(nn.Module):
    """Scores with a bias for each relative position, taken from a table."""

    def __init__(self, count: int = 5, heads: int = 2) -> None:
        super().__init__()
        self.count, self.heads = count, heads
        self.table = nn.Parameter(torch.randn(2 * count - 1, heads))
        places = torch.arange(count)
        self.register_buffer("index", places[:, None] - places[None, :] + count - 1)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.index.view(-1)].view(self.count, self.count, self.heads).permute(2, 0, 1).contiguous()
        return (x + bias.unsqueeze(0)).softmax(-1)


class Flow(nn.Module):
    """An image sampled where a flow says, as warping is written."""

    def forward(self, x: Tensor, flow: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack((columns, rows), dim=0).float().unsqueeze(0) + flow
        horizontal, vertical = 2 * grid[:, 0] / (width - 1) - 1, 2 * grid[:, 1] / (height - 1) - 1
        return nn.functional.grid_sample(x, torch.stack((horizontal, vertical), dim=-1), align_corners=True)
