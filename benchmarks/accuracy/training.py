"""The training of every method that trains: the same loss, batches, order, optimizer, steps and freezing."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.accuracy.floats import Checkpoint, batches
from benchmarks.accuracy.settings import BATCH, EPOCHS, FREEZE_AFTER, MOMENTUM, RATE
from fxquant.support import seeded


def train(model: nn.Module, checkpoint: Checkpoint, freeze: Callable[[], object]) -> None:
    """Train a prepared model in place; `freeze` is called once, before the last epoch. The caller says when it is in eval mode."""
    task, data = checkpoint.task, checkpoint.data
    each = -(-len(data.train_inputs) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * each)
    with seeded(checkpoint.seed):
        for step, chosen in enumerate(batches(len(data.train_inputs), BATCH, EPOCHS, checkpoint.seed)):
            if step == FREEZE_AFTER * each:
                freeze()
            loss = task.loss(model(data.train_inputs[chosen]), data.train_targets[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
