"""Distillation: learn the integers of all weights together, with the float model as the teacher; no labels are needed.

Finkelstein, Fuchs, Tal, Grobman, Vosco, Meller: QFT: Post-training quantization via fast joint finetuning of all degrees of freedom, 2022.
After calibration the integer model is trained for a short while, so that all layers compensate for the errors of one. The
parameters do not change; learned are:

    w_q = round(w / s + v)      v of each weight, in steps, with the gradient straight through
    s · g, b + c                a gain and a shift of each channel, where its scale is not learned or a power of two

by Adam, whose steps become shorter in a cosine, with the loss

    mean over outputs of Σ (y - y')² / Σ y²  +  FEATURES · the same over the results of all layers with weights

The outputs of a few samples determine less than all layers have to learn. So the results of layers are in the loss, too. Samples are mixed,
x' = (1 - λ) x_i + λ x_j, with targets of the teacher, and images are shifted by up to an eighth of their size, reflected at the edges.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.accuracy.checkpoint import Checkpoint, call_of
from fxquant.accuracy.choices import tuning
from fxquant.accuracy.learn import left_out
from fxquant.accuracy.measure import FloatOutputs, judged, real_outputs
from fxquant.accuracy.result import TunedLayer, TuningResult
from fxquant.accuracy.walk import Samples, Values, batch_axes, by_channel, constant_weight, run, single, taken, weighted_nodes
from fxquant.numerics.rounding import AdaptiveRounding, straight_through
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.operators import QuantizedOperator
from fxquant.quantization.weights import BiasCorrection, Coverage, WeightQuantizer
from fxquant.support.arguments import POSITIVE, checked
from fxquant.support.progress import progress

FEATURES = 0.1
MIXED = 0.5  # the largest λ
RATE = 0.005  # of Adam, in parts of what a weight is on average
SLOW_RATE = 0.004  # of gains, and of shifts in parts of a standard deviation of the result
BETAS = (0.9, 0.99)  # of Adam: a few hundred steps are too short for more
MOVED = 8  # images are shifted by at most 1 / MOVED of their size
LOUDEST = 65535.0  # of an image
KEPT = 10  # how often the state is kept in a checkpoint
COPIES = 3  # of what is held out, each moved: a few samples are a poor judge


@checked(steps=POSITIVE)
def distill(
    prepared: fx.GraphModule, batches: Any, num_batches: int | None = None, *, steps: int = 400, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> TuningResult:  # fmt: skip
    """Learn the integers of all weights together, so that the model returns its float outputs; it is left in VALIDATE.

    A step takes `batch_size` samples: finite floats are mixed with those of other samples, and images are shifted by up to an eighth of
    their size. An image is a float tensor of four or five dimensions, batch first, without an element beyond 65535 (an attention mask). A
    quarter of the samples, and shifted copies, are held out: unless the outputs gain 0.2 dB there, the model is unchanged.
    The model's parameters do not change: an `AdaptiveRounding`, a `Coverage` and a `BiasCorrection` of each layer hold what it learned,
    for `convert`, `save` and `state_dict`, and state FLOAT is still the teacher. Layers whose rounding the user set, or whose weight other
    layers read, too, are left out. A step takes about four times as long as forward and backward of the float model.

    `batches` and errors are as in `adaround`; with a checkpoint the same call continues after the last finished tenth of its steps.
    """
    with tuning(prepared) as tuned:
        samples = taken(prepared, batches, num_batches, options, show_progress)
        call = call_of(prepared, samples, method="distill", steps=steps, seed=options.seed, batch_size=options.batch_size)
        skipped = left_out(prepared)
        nodes = {node: operator for node, operator in weighted_nodes(prepared).items() if node.name not in skipped}
        pupil = _Pupil(prepared, nodes, samples, options.batch_size, options.seed)
        checkpoint = Checkpoint(options.checkpoint, call)
        outputs = FloatOutputs(prepared, pupil.judging)
        if not nodes or not outputs.there:
            return TuningResult("distill", (), tuple(skipped.items()))
        before = outputs.measure()
        for _ in progress(pupil.learn(steps, checkpoint), steps, "distilling", show_progress):
            pass
        after, names = outputs.measure(), tuple(node.name for node in nodes)
        for weight in pupil.weights:  # after they have seen what they are in steps of the last gains
            weight.settle()
        row = TunedLayer(prepared.graph.output_node().name, names, before.pooled, after.pooled, True, 1.0)
        rows = judged(outputs, before, [row], tuned.undo, ("weights", "learned by distillation"))
        return TuningResult("distill", rows, tuple(skipped.items()), losses=tuple(pupil.losses))


class _Weight:
    """The learned parameters of one weight."""

    def __init__(self, weight: Tensor, quantizer: WeightQuantizer, result: Tensor) -> None:
        self.quantizer = quantizer
        rounding, coverage, correction = quantizer.parts
        zeros = torch.zeros_like(weight, dtype=torch.float32).detach()
        # v, of the weight's shape
        self.moved = nn.Parameter(rounding.offset.clone() if isinstance(rounding, AdaptiveRounding) else zeros.clone())
        self.real = zeros
        channels = len(weight) if quantizer.per_channel else 1
        # g, of shape (C,), or None where the scale is not to be changed
        self.gain = nn.Parameter(zeros.new_ones(channels)) if quantizer.learned is None and not quantizer.power_of_two else None
        self.share = zeros.new_ones(channels) if coverage is None else coverage.share.clone()
        has_channels = by_channel(result, len(weight), weight.dim()) is not None
        self.unit = float(result.std()) or 1.0
        # c, of shape (C,) in standard deviations of the result, or None if the result does not have the weight's channels
        self.shift = nn.Parameter(zeros.new_zeros(len(weight))) if has_channels else None
        self.corrected = zeros.new_zeros(len(weight)) if correction is None else correction.value.clone()

    def begin(self) -> None:
        """Replace the operator's rounding, weight scale and bias by the learned parameters."""
        rounding = AdaptiveRounding(tuple(self.moved.shape)).to(self.moved.device)
        rounding.soft = self._integers
        self.quantizer.rounding = rounding
        if self.gain is not None:
            self.quantizer.cover(Coverage(len(self.share)).to(self.share.device))
        if self.shift is not None:
            self.quantizer.correct(BiasCorrection(len(self.corrected)).to(self.corrected.device))
        self.place()

    def _integers(self, real: Tensor) -> Tensor:
        self.real = real.detach()
        whole = torch.round(self.real + self.moved.detach())
        smooth = self.moved if self.gain is None else self.moved + self.gain.reshape(-1, *[1] * (real.dim() - 1)) * whole
        return straight_through(smooth, whole)

    def place(self) -> None:
        """Write the current gain and shift into the operator's quantizer."""
        if self.gain is not None and self.quantizer.coverage is not None:
            self.quantizer.coverage.share = (self.share * self.gain.detach()).clamp_min(1e-3)
        if self.shift is not None and self.quantizer.correction is not None:
            self.quantizer.correction.value = self.corrected + self.shift * self.unit

    @property
    def rates(self) -> list[tuple[nn.Parameter, float]]:
        """Return the parameters that Adam updates, and their learning rates."""
        rates = [(self.moved, RATE * max(float(self.real.abs().mean()), 1e-3))]
        return rates + [(part, SLOW_RATE) for part in (self.gain, self.shift) if part is not None]

    @torch.no_grad()
    def settle(self) -> None:
        """Round the learned v to integers, and keep them in the operator's `AdaptiveRounding`."""
        rounding = self.quantizer.rounding
        assert isinstance(rounding, AdaptiveRounding)
        low, high = self.quantizer.dtype.low, self.quantizer.dtype.high
        rounding.settle(self.real, torch.round(self.real + self.moved).clamp(low, high))
        rounding.soft = None


class _Pupil:
    """A prepared model that is trained with its float form as the teacher.

    judging  the held-out samples, in chunks, each with its shifted copies
    losses   the loss of each finished step
    """

    def __init__(self, prepared: fx.GraphModule, nodes: dict[fx.Node, QuantizedOperator], samples: Samples, size: int, seed: int) -> None:
        self.prepared, self.samples = prepared, samples
        self.generator = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []
        self.inputs = prepared.graph.find_nodes(op="placeholder")
        self.axes = batch_axes(prepared)
        by_input = [[chunk[place] for chunk in samples.chunks] for place in range(len(self.inputs))]
        self.mixes = [all(_largest(value) < math.inf for value in values) for values in by_input]
        self.moves = [all(map(_is_image, values)) and axis == 0 for values, axis in zip(by_input, self.axes, strict=True)]
        self.size = size
        self.nodes = tuple(nodes)
        with torch.no_grad():
            first = self._run(samples.chunks[samples.learning[0] if samples.learning else 0], exact=False)[1]
            weights = {node: constant_weight(prepared, node, operator) for node, operator in nodes.items()}
            self.weights = [_Weight(weights[node], operator.weight_quantizer, first[node]) for node, operator in nodes.items()]
            self.judging = [moved for index in samples.judging for moved in self._copies(samples.chunks[index])]
        self.items = self._alike()

    def _run(self, inputs: Sequence[Any], *, exact: bool) -> tuple[list[Tensor], Values]:
        """Return the floating-point outputs, and the results of layers with weights."""
        values: Values = dict(zip(self.inputs, inputs, strict=True))
        results: Values = {}
        readers = {node: len(node.users) for node in self.prepared.graph.nodes}
        for node in self.prepared.graph.nodes:
            if node.op == "output":
                return real_outputs(fx.map_arg(node.args, values.__getitem__)), results
            if node.op != "placeholder":
                values[node] = run(self.prepared, node, values, exact=exact)
            if node in self.nodes:
                results[node] = values[node]
            for operand in node.all_input_nodes:
                readers[operand] -= 1
                if not readers[operand]:
                    del values[operand]
        raise AssertionError("a graph ends with its output")

    def _alike(self) -> list[list[list[Any]]]:
        """Return for each training sample the list of training samples of the same shapes, itself included."""
        groups: dict[Any, list[list[Any]]] = {}
        same_shapes = []
        for index in self.samples.learning or self.samples.judging:
            for item in single(self.samples.chunks[index], self.axes):
                alike = groups.setdefault(tuple(getattr(value, "shape", None) for value in item), [])
                alike.append(item)
                same_shapes.append(alike)
        return same_shapes

    def learn(self, steps: int, checkpoint: Checkpoint) -> Iterator[None]:
        """Train from the checkpoint's step on; yield after each step."""
        with torch.no_grad():
            for weight in self.weights:
                weight.begin()
            self._run(self.samples.chunks[0], exact=True)  # where weights see what they are in steps
        rates = [rate for weight in self.weights for rate in weight.rates]
        parameters = [parameter for parameter, _ in rates]
        optimizer = torch.optim.Adam([{"params": [parameter], "lr": rate} for parameter, rate in rates], betas=BETAS)
        finished = self._resumed(checkpoint, optimizer, parameters)
        for step in range(steps):
            if step >= finished:
                for group, (_, rate) in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
                self._step(optimizer, parameters)
                if (step + 1) * KEPT // steps > step * KEPT // steps:
                    self._keep(checkpoint, optimizer, parameters, step + 1)
            yield

    def _step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        inputs = self._drawn()
        with torch.no_grad():
            targets, features = self._run(inputs, exact=False)
        for weight in self.weights:
            weight.place()  # each step needs a new autograd graph of the shift
        actual, results = self._run(inputs, exact=True)
        outputs = [_share(y, right) for y, right in zip(actual, targets, strict=True)]
        loss = torch.stack(outputs).mean() + FEATURES * torch.stack([_share(results[node], features[node]) for node in self.nodes]).mean()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            parameter.grad = gradient
        optimizer.step()
        self.losses.append(loss.item())
        with torch.no_grad():
            for weight in self.weights:
                weight.place()

    def _drawn(self) -> list[Any]:
        """Draw a batch of training samples of one size; their float tensors are mixed with other samples' tensors, and images shifted."""
        alike = self.items[int(torch.randint(len(self.items), (), generator=self.generator, device="cpu"))]
        order, other = (torch.randperm(len(alike), generator=self.generator, device="cpu")[: self.size] for _ in range(2))
        shares = MIXED * torch.rand(len(order), generator=self.generator, device="cpu", dtype=torch.float32)
        return self._moved([self._mixed([item[place] for item in alike], place, order, other, shares) for place in range(len(self.axes))])

    def _copies(self, inputs: list[Any]) -> Iterator[list[Any]]:
        """Yield the inputs, and copies that are moved, where anything is."""
        yield inputs
        if any(self.moves):
            yield from (self._moved(inputs) for _ in range(COPIES))

    def _moved(self, inputs: list[Any]) -> list[Any]:
        """Shift each sample's images by a random distance, the same for all inputs of a sample."""
        images = [value for value, moves in zip(inputs, self.moves, strict=True) if moves]
        if not images:
            return inputs
        shape = len(images[0]), max(image.dim() for image in images) - 2
        ways = 2 * torch.rand(shape, generator=self.generator, device="cpu", dtype=torch.float32) - 1
        return [_shifted(value, ways) if moves else value for value, moves in zip(inputs, self.moves, strict=True)]

    def _mixed(self, values: list[Any], place: int, order: Tensor, other: Tensor, shares: Tensor) -> Any:
        """Return one input of the chosen samples, each with its share of another."""
        axis = self.axes[place]
        if axis is None:
            return values[int(order[0])]
        value, from_others = (torch.cat([values[index] for index in chosen.tolist()], axis) for chosen in (order, other))
        if not self.mixes[place]:
            return value
        shape = [-1 if dimension == axis else 1 for dimension in range(value.dim())]
        return torch.lerp(value, from_others, shares.to(value).reshape(shape))

    def _keep(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], finished: int) -> None:
        tensors = {"generator": self.generator.get_state(), "losses": torch.tensor(self.losses, device="cpu", dtype=torch.float64)}
        for index, parameter in enumerate(parameters):
            tensors[f"{index}"] = parameter
            tensors.update({f"{index}/{name}": value for name, value in optimizer.state[parameter].items()})
        checkpoint.document, checkpoint.tensors = {"done": finished}, tensors
        checkpoint.write()

    def _resumed(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> int:
        """Return the number of finished steps; restore the state after them."""
        tensors = checkpoint.tensors
        if not tensors:
            return 0
        self.generator.set_state(tensors["generator"])
        self.losses = tensors["losses"].tolist()
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter.copy_(tensors[f"{index}"])
                adam = {name: tensors[f"{index}/{name}"] for name in ("step", "exp_avg", "exp_avg_sq") if f"{index}/{name}" in tensors}
                optimizer.state[parameter] = {name: value if name == "step" else value.to(parameter.device) for name, value in adam.items()}
            for weight in self.weights:
                weight.place()
        return int(checkpoint.document["done"])


def _largest(value: Any) -> float:
    """Return the largest magnitude in a floating-point tensor; infinite if the tensor holds NaN, and for any other value."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return math.inf
    largest = float(value.abs().max()) if value.numel() else 0.0
    return largest if largest < math.inf else math.inf


def _is_image(value: Any) -> bool:
    """Return whether a float tensor has four or five dimensions and the magnitudes of a 16-bit image; attention masks have larger ones."""
    return isinstance(value, Tensor) and value.dim() in (4, 5) and _largest(value) <= LOUDEST


def _shifted(images: Tensor, ways: Tensor) -> Tensor:
    """Images (N, C, ..., H, W), each moved by its row of `ways`, in -1..1 of the largest way, and reflected at the edges."""
    for dimension in range(2, images.dim()):
        size = images.shape[dimension]
        steps = torch.round(ways[:, dimension - 2] * (size // MOVED)).long()
        places = (torch.arange(size, device="cpu") + steps[:, None]).abs()
        places = torch.where(places < size, places, 2 * (size - 1) - places).to(images.device)
        shape = [len(images), *(size if axis == dimension else 1 for axis in range(1, images.dim()))]
        images = images.gather(dimension, places.reshape(shape).expand_as(images))
    return images


def _share(actual: Tensor, target: Tensor) -> Tensor:
    """Return the share of noise in a tensor."""
    return (actual - target).square().sum() / target.square().sum().clamp_min(1e-30)
