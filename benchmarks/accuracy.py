"""How accurate is what training leaves?   python -m benchmarks.accuracy

A network of inverted residuals on noisy handwritten digits, quantized to 8 and to 4 bits from one float checkpoint,
by fxquant and by torch.ao: the same calibration batches, the same batches in the same order, the same number of
steps, the same optimizer, the same late freezing of observers and batch norms, 8 bits for the first and the last
layer on both sides.

calibrated      fxquant without training
statistics      scales follow the batches' ranges; beside torch.ao's FakeQuantize, the same in kind
learned         scales are learned by LSQ; beside torch.ao's _LearnableFakeQuantize, the same in kind

fxquant's accuracies are those of the integer model, the deployed bits. torch.ao's 8-bit statistics are its default
qconfig for x86, converted and run by its integer kernels; its other models have no converted form, and their
fake-quantized accuracy is shown. Nothing was tuned on these seeds; the
network, the learning rate and the size of the test were chosen on others, with fxquant's results in view.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.demo.digits import DigitsDataset, load_digits_dataset, split_by_class
from fxquant.demo.network import InvertedResidual
from fxquant.demo.training import BATCH_SIZE, accuracy, seeded, train_float
from fxquant.progress import progress

SEEDS = (0, 1, 2)
BITS = (8, 4)
TEST_IMAGES_PER_CLASS = 90
TEST_COPIES = 20  # of every test image, each with noise of its own
NOISE = 0.7  # standard deviation; the pixels lie in [-1, 1]
FLOAT_EPOCHS = 20
EPOCHS = 5
FREEZE_AFTER = 3  # epochs; then observers and batch norm statistics stand still
LEARNING_RATE = 0.003
MOMENTUM = 0.9
CALIBRATION_BATCHES = 8
QUANTIZED = 26  # activations in torch.ao's model: the input, every layer, every addition
TARGET = "bayes-e"


class SmallNetwork(nn.Module):
    """Digits of shape [batch, 1, 16, 16] to logits of shape [batch, 10]; 9,000 parameters in 20 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        shapes = ((8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1), (16, 16, 1))
        self.blocks = nn.Sequential(*(InvertedResidual(before, behind, stride, 3) for before, behind, stride in shapes))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))
        return logits


class Task(NamedTuple):
    """What every method starts from."""

    data: DigitsDataset
    network: nn.Module
    calibration: list[Tensor]
    seed: int

    def score(self, model: Callable[[Tensor], Tensor]) -> float:
        """Percent of the test images that the model gets right."""
        return 100 * accuracy(model, self.data.test_images, self.data.test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--bits", nargs="*", type=int, default=list(BITS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    tasks = [prepare_task(seed) for seed in progress(options.seeds, len(options.seeds), "float networks")]
    runs = [(bits, task, name) for bits in options.bits for task in tasks for name in METHODS]
    scores = {(bits, task.seed, name): METHODS[name](task, bits) for bits, task, name in progress(runs, len(runs), "quantized networks")}
    table = Table("", "seed", "float", *METHODS, title="percent right", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for bits in options.bits:
        rows = [[task.score(task.network), *(scores[bits, task.seed, name] for name in METHODS)] for task in tasks]
        for task, row in zip(tasks, rows, strict=True):
            table.add_row(f"W{bits}A{bits}", str(task.seed), *(f"{value:.2f}" for value in row))
        table.add_row("", "mean", *(f"{statistics.fmean(column):.2f}" for column in zip(*rows, strict=True)), end_section=True)
    console = Console(width=130)
    console.print(table)
    console.print(f"{len(tasks[0].data.test_labels):,} test images, {time.perf_counter() - start:.0f} seconds")


# ---- the task ---------------------------------------------------------------------------------------------------------


def prepare_task(seed: int) -> Task:
    """Noisy digits with a split of this seed, and a float network trained on them."""
    whole = load_digits_dataset()
    images = F.avg_pool2d(torch.cat([whole.train_images, whole.test_images]), 2)
    labels = torch.cat([whole.train_labels, whole.test_labels])
    train, test = split_by_class(labels, TEST_IMAGES_PER_CLASS, seed)
    test = test.repeat(TEST_COPIES)
    generator = torch.Generator().manual_seed(seed)

    def noisy(chosen: Tensor) -> Tensor:
        return images[chosen] + NOISE * torch.randn(images[chosen].shape, generator=generator)

    data = DigitsDataset(noisy(train), labels[train], noisy(test), labels[test])
    with seeded(seed):
        network = SmallNetwork()
    train_float(network, data, FLOAT_EPOCHS, seed)
    return Task(data, network, list(torch.split(data.train_images, BATCH_SIZE))[:CALIBRATION_BATCHES], seed)


def train(model: nn.Module, task: Task, freeze: Callable[[], None]) -> None:
    """The training of every method; the model is left in eval mode."""
    images, labels = task.data.train_images, task.data.train_labels
    steps = EPOCHS * -(-len(labels) // BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    with seeded(task.seed):
        for epoch in range(EPOCHS):
            if epoch == FREEZE_AFTER:
                freeze()
            for chosen in torch.split(torch.randperm(len(labels)), BATCH_SIZE):
                loss = F.cross_entropy(model(images[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    model.eval()


# ---- fxquant ----------------------------------------------------------------------------------------------------------


def ours(task: Task, bits: int, activations: str = "statistics", weights: str = "statistics") -> fx.GraphModule:
    """The calibrated model."""

    def qconfig(bits: int) -> fxq.QConfig:
        return fxq.QConfig(fxq.ActivationConfig(f"int{bits}", training=activations), fxq.WeightConfig(f"int{bits}", training=weights))

    mapping = fxq.QConfigMapping(qconfig(bits)).set_module_name("stem", qconfig(8)).set_module_name("head", qconfig(8))
    prepared = fxq.prepare(task.network, task.calibration[0], TARGET, mapping)
    return fxq.calibrate(prepared, task.calibration, show_progress=False)


def ours_calibrated(task: Task, bits: int) -> float:
    return task.score(fxq.convert(ours(task, bits)))


def ours_trained(activations: str, weights: str) -> Callable[[Task, int], float]:
    def run(task: Task, bits: int) -> float:
        prepared = ours(task, bits, activations, weights)
        fxq.set_state(prepared, fxq.State.TRAIN)
        train(prepared, task, lambda: fxq.freeze(prepared, scales=activations == "statistics"))
        return task.score(fxq.convert(prepared))

    return run


# ---- torch.ao ---------------------------------------------------------------------------------------------------------


def theirs_statistics(task: Task, bits: int) -> float:
    """8 bits: the default QAT qconfig, converted. 4 bits: the same ranges as ours, fake-quantized."""
    from torch.ao import quantization as ao
    from torch.ao.quantization.quantize_fx import convert_fx

    if bits == 8:
        prepared = theirs(task, ao.get_default_qat_qconfig_mapping("x86"))
        torch.backends.quantized.engine = "x86"
    else:
        mapping = ao.QConfigMapping().set_global(fake_quantized(bits))
        prepared = theirs(task, mapping.set_module_name("stem.0", fake_quantized(8)).set_module_name("head", fake_quantized(8)))

    def freeze() -> None:
        prepared.apply(ao.disable_observer)
        prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)

    train(prepared, task, freeze)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task.score(convert_fx(prepared) if bits == 8 else prepared)


def fake_quantized(bits: int) -> Any:
    """torch.ao's QAT with fxquant's ranges: symmetric, weights per channel."""
    from torch.ao import quantization as ao

    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    limits = {"quant_min": low, "quant_max": high, "dtype": torch.qint8}
    # Not the fused fake quantization: it gives a tensor without negative values a zero point, whatever its scheme says.
    return ao.QConfig(
        activation=ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, qscheme=torch.per_tensor_symmetric, **limits),
        weight=ao.FakeQuantize.with_args(observer=ao.MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, **limits),
    )


def theirs_learned(task: Task, bits: int) -> float:
    """torch.ao's learnable fake quantization, per channel for weights, with its gradient scaling; fake-quantized."""
    from torch.ao import quantization as ao
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

    def learnable(bits: int, channels: int) -> Any:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        settings = {"quant_min": low, "quant_max": high, "dtype": torch.qint8, "scale": 1.0, "zero_point": 0.0, "use_grad_scaling": True}
        return ao.QConfig(
            activation=_LearnableFakeQuantize.with_args(
                observer=ao.MovingAverageMinMaxObserver, qscheme=torch.per_tensor_symmetric, **settings
            ),
            weight=_LearnableFakeQuantize.with_args(
                observer=ao.MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, channel_len=channels, **settings
            ),
        )

    mapping = ao.QConfigMapping().set_global(learnable(bits, 1))
    for name, module in task.network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            mapping.set_module_name(name, learnable(8 if name in ("stem.0", "head") else bits, module.weight.shape[0]))
    prepared = theirs(task, mapping)
    for module in prepared.modules():
        if isinstance(module, _LearnableFakeQuantize):
            module.enable_param_learning()
    train(prepared, task, lambda: prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats) and None)
    return task.score(prepared)


def theirs(task: Task, mapping: Any) -> nn.Module:
    """The model prepared by torch.ao, its observers shown the calibration batches."""
    from torch.ao import quantization as ao
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = copy.deepcopy(task.network).train()
        prepared = prepare_qat_fx(network, mapping, (task.calibration[0],), backend_config=symmetric_backend())
    quantized = sum(isinstance(module, ao.FakeQuantizeBase) and ".weight_" not in name for name, module in prepared.named_modules())
    assert quantized == QUANTIZED, f"torch.ao left activations in float: {quantized}"
    for module in prepared.modules():
        if isinstance(module, _LearnableFakeQuantize):
            module.enable_static_observation()
    prepared.apply(ao.disable_fake_quant)
    prepared.eval()
    with torch.no_grad():
        for batch in task.calibration:
            prepared(batch)
    prepared.apply(ao.enable_fake_quant)
    return prepared


def symmetric_backend() -> Any:
    """PyTorch's own backend, extended by signed activations: without them torch.ao leaves the activations of such a qconfig in float."""
    from torch.ao.quantization.backend_config import DTypeConfig, get_native_backend_config

    backend = get_native_backend_config()
    for pattern in backend.configs:
        pattern.add_dtype_config(
            DTypeConfig(input_dtype=torch.qint8, output_dtype=torch.qint8, weight_dtype=torch.qint8, bias_dtype=torch.float)
        )
    return backend


METHODS: dict[str, Callable[[Task, int], float]] = {
    "calibrated": ours_calibrated,
    "statistics": ours_trained("statistics", "statistics"),
    "learned": ours_trained("learned", "learned"),
    "torch.ao": theirs_statistics,
    "torch.ao learned": theirs_learned,
}


if __name__ == "__main__":
    main()
