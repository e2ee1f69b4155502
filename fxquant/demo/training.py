"""A minimal training loop, for the float network and for the prepared one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxquant.support.seeding import seeded

BATCH_SIZE = 64
FLOAT_LEARNING_RATE = 0.01
_WEIGHT_DECAY = 1e-2
_LABEL_SMOOTHING = 0.1

OnBatch = Callable[[int, int, float], None]
"""Called after each batch with the number of batches done, their total and the loss of this batch."""


class TrainingImages(Protocol):
    """Training data: images [count, ...] and their labels [count]; `DigitsDataset` is one."""

    @property
    def train_images(self) -> Tensor: ...
    @property
    def train_labels(self) -> Tensor: ...


def train_float(network: nn.Module, dataset: TrainingImages, epochs: int, seed: int, on_batch: OnBatch | None = None) -> None:
    """Train in place from the current weights of `network`, which is left in eval mode.

    Equal weights, seed and number of threads give equal results, bit for bit, on one machine.
    """
    _train(network, dataset, epochs, seed, FLOAT_LEARNING_RATE, on_batch)


def train_quantized(
    prepared: nn.Module,
    dataset: TrainingImages,
    epochs: int,
    seed: int,
    learning_rate: float = FLOAT_LEARNING_RATE / 20,
    on_batch: OnBatch | None = None,
) -> None:
    """Train at a lower rate, for a network that was trained before; `prepared` is left in eval mode.

    The caller has put `prepared` into the state in which it trains.
    """
    _train(prepared, dataset, epochs, seed, learning_rate, on_batch)


def accuracy(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, batch_size: int = 256) -> float:
    """Return the fraction, 0..1, of images whose largest logit is their label's; a module in train mode is evaluated in eval mode."""
    network = model if isinstance(model, nn.Module) and model.training else None
    if network is not None:
        network.eval()
    try:
        with torch.no_grad():
            pairs = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
            right = sum(int((model(batch).argmax(1) == expected).sum()) for batch, expected in pairs)
    finally:
        if network is not None:
            network.train()
    return right / len(labels)


def _train(network: nn.Module, dataset: TrainingImages, epochs: int, seed: int, learning_rate: float, on_batch: OnBatch | None) -> None:
    images, labels = dataset.train_images, dataset.train_labels
    total = epochs * -(-len(labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=total)
    network.train()
    with seeded(seed):
        for done, chosen in enumerate(_shuffled_batches(len(labels), epochs), start=1):
            loss = F.cross_entropy(network(images[chosen]), labels[chosen], label_smoothing=_LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if on_batch is not None:
                on_batch(done, total, loss.item())
    network.eval()


def _shuffled_batches(count: int, epochs: int) -> Iterator[Tensor]:
    """Yield batches of indices that visit every image once in each epoch, in a new order each time."""
    for _ in range(epochs):
        yield from torch.split(torch.randperm(count), BATCH_SIZE)
