"""A chain of residual blocks of any length, for measuring how compiling scales."""

import torch
from torch import Tensor, nn

from benchmarks.zoo.life import initialise_with_current_seed, make_alive
from fxquant.support import seeded


class ChainBlock(nn.Module):
    """Seven graph nodes: conv, bn, relu, conv, bn, add, relu."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(x + y)


CHAIN_CHANNELS = 4
CHAIN_IMAGE_SIZE = 8


def residual_chain(nodes: int, seed: int = 0) -> nn.Module:
    """A model in eval mode that traces to `nodes` graph nodes, give or take three (nine at least), for images [batch, 4, 8, 8].

    Its BatchNorm statistics come from noise. Up to a few hundred nodes every relu is alive; far beyond, values are finite still.
    """
    blocks = max(1, round((nodes - 2) / 7))  # two nodes are the input and the output
    with seeded(seed):
        chain = nn.Sequential(*(ChainBlock(CHAIN_CHANNELS) for _ in range(blocks)))
        for block in chain:
            _initialise_chain_block(block)
        make_alive(chain, torch.randn(32, CHAIN_CHANNELS, CHAIN_IMAGE_SIZE, CHAIN_IMAGE_SIZE))
    return chain


def _initialise_chain_block(block: nn.Module) -> None:
    """A downward drift in each block: without it values grow along the chain until no relu has anything left to do."""
    assert isinstance(block, ChainBlock)
    initialise_with_current_seed(block)
    nn.init.normal_(block.bn2.bias, mean=-0.2, std=0.1)
