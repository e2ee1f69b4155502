"""The float checkpoints that all methods start from: trained once for a recipe, kept in a folder."""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.accuracy.networks import NETWORKS, Network
from benchmarks.accuracy.tasks import TASKS, Data, Task, data_of
from fxquant.support import seeded

CACHE = Path(__file__).parents[1] / ".cache"
WEIGHT_DECAY = 0.01
EVALUATED = 250  # inputs at a time


@dataclass(frozen=True)
class Checkpoint:
    """A trained network of a task and a seed, with the data it was trained on."""

    task: Task
    name: str
    seed: int
    path: Path

    @property
    def data(self) -> Data:
        return data_of(self.task.name, self.seed)

    def load(self) -> nn.Module:
        """The network, new at each call, in eval mode."""
        network = NETWORKS[self.name].new(self.task)
        network.load_state_dict(torch.load(self.path, weights_only=True))
        return network.eval()

    def score(self, outputs: Tensor) -> float:
        return self.task.score(outputs, self.data.test_targets)


def outputs_of(model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the outputs of the model for all inputs."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in torch.split(inputs, EVALUATED)])


def sqnr(expected: Tensor, actual: Tensor) -> float:
    """The power of what is wanted over that of the error, in dB."""
    expected, error = expected.double(), (actual.double() - expected.double())
    return float(10 * (expected.square().sum() / error.square().sum().clamp_min(1e-300)).log10())


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Indices that visit every item once in each epoch, in an order of the seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.split(torch.randperm(count, generator=generator), size)


def train_float(network: nn.Module, task: Task, data: Data, recipe: Network, seed: int) -> None:
    """AdamW under OneCycle; the network is left in eval mode. Channels come last in memory: twice as fast, on a CPU."""
    rate, steps = recipe.rate, recipe.epochs * -(-len(data.train_inputs) // recipe.batch)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    network.train()
    for chosen in batches(len(data.train_inputs), recipe.batch, recipe.epochs, seed):
        images = data.train_inputs[chosen].contiguous(memory_format=torch.channels_last)
        loss = task.loss(network(images), data.train_targets[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    network.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


def path_of(task: str, network: str, seed: int, cache: Path = CACHE) -> Path:
    """Where the checkpoint of this recipe is, or will be."""
    return cache / f"{task}-{network}-{seed}-{_recipe(task, network)}.pt"


def checkpoint(task: str, network: str, seed: int, cache: Path = CACHE) -> Checkpoint:
    """The checkpoint of this recipe, trained now if the folder does not hold it yet."""
    stored = Checkpoint(TASKS[task], network, seed, path_of(task, network, seed, cache))
    if stored.path.exists():
        return stored
    recipe = NETWORKS[network]
    if recipe.derived is not None:
        name, derive = recipe.derived
        trained = derive(checkpoint(task, name, seed, cache).load(), seed)
    else:
        with seeded(seed):
            trained = recipe.new(stored.task)
        train_float(trained, stored.task, stored.data, recipe, seed)
    cache.mkdir(parents=True, exist_ok=True)
    partial = stored.path.with_suffix(".partial")
    torch.save(trained.state_dict(), partial)
    partial.replace(stored.path)  # whole or not at all, also beside another process
    return stored


def _recipe(task: str, network: str) -> str:
    """Ten hexadecimal digits of what the checkpoint is made from: the task's numbers, the network's modules and code, the training's."""
    recipe = NETWORKS[network]
    model = recipe.new(TASKS[task])
    code = [inspect.getsource(part) for part in (type(model), train_float, *([] if recipe.derived is None else [recipe.derived[1]]))]
    if recipe.derived is not None:
        code.append(_recipe(task, recipe.derived[0]))
    parts = (TASKS[task].recipe, network, str(model), recipe.epochs, recipe.rate, recipe.batch, code, WEIGHT_DECAY)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def checkpoints(task_names: list[str], network_names: list[str], seeds: list[int]) -> list[tuple[str, str, int]]:
    """Every task with every network that suits it, for every seed."""
    return [(t, n, s) for t in task_names for n in network_names if NETWORKS[n].suits(TASKS[t]) for s in seeds]
