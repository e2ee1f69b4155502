"""Cross-layer equalization: scale channels by powers of two so that their ranges are closer; the layers that read them undo the factors.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction, ICCV 2019, section 4.1,
moves a factor for each channel from one layer's weight to the next one's, so that the ranges of both weights are alike. Weights with one
scale for all outputs need that. Where every output has its own scale, the activations need it: their one scale follows from the largest
channel. So several choices of factors are compared by the error that they leave (`LayerNoise`), and one must leave clearly less than none.

Xiao, Lin, Seznec, Wu, Demouth, Han: SmoothQuant, ICML 2023, section 4, has max |x_c|^α / max |w_c|^(1-α) for transformers, where a few
channels of every token are far larger than all others. Some of the choices start there, with several α.

Later items may reach further than those seen, and would be clipped: factors must also lower the error if every channel reaches half as far
again. They are powers of two, kept next to the parameters (`ChannelFactors`). The float function keeps its bits, except for numbers
beyond the range of float32, and parameters keep their meaning.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxquant.accuracy.ranks import require_alone
from fxquant.accuracy.states import out_of_calibration, require_prepared
from fxquant.accuracy.step import Run
from fxquant.analysis.recording import still
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import by_name, is_parameter, parameter_value
from fxquant.ir.model import repeatable
from fxquant.numerics.grids import SMALLEST_NORMAL
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.batches import as_batches, first_batches, length, model_inputs, no_batches
from fxquant.prepared.channels import Channels, channels, multiply
from fxquant.prepared.operators import QuantizedOperator, quantized_operators
from fxquant.prepared.stage import quantized_operator
from fxquant.prepared.undo import all_or_nothing, having
from fxquant.quantization.spec import State
from fxquant.support import logger
from fxquant.support.arguments import checked
from fxquant.support.progress import progress

# ---- the cost of quantization as a function of channel factors -------------------------------------------------------
#
# Costs are mean squared errors, each weighted by its effect on later layers.
#
#     layer     Σ_oi min(taps·(δ_o·f_i)²/12, S_oi) · p_i · g_o,   δ_o = max_i |w_oi|/f_i / divisor
#     tensor    Σ_c min((Δ/f_c)²/12, p_c) · g_c,                  Δ = max_c m_c·f_c / divisor
#
# m and p are the largest magnitude and the mean square of a channel of the float model. S is the sum of squares of the weights that
# multiply it. g is what an error of mean square one in a channel adds to the errors of later results: for every layer that reads it, Σ_o
# S_oc·g_o. Where a layer returns a tensor that has no factors, its errors count as a share of each channel's signal, g_o = 1 / (channels
# · Σ_i S_oi·p_i). Rounding errors are taken as uniform, and never larger than the rounded value. The model ignores that scales are powers
# of two, since this does not favour a choice.
IN_CACHE = 2**15  # float64 numbers of each of a few tensors


@dataclass(frozen=True)
class LayerNoise:
    """The rounding error of a layer's weight. Tensors are float64, labels int64; channels that share a factor have one label."""

    read: Tensor  # (out, in): labels of the input channels; equal for all outputs of a group
    groups: int  # the number of groups
    given: Tensor  # (out,): labels of the output channels
    squares: Tensor  # (out, in): Σ w² over a kernel's taps
    largest: Tensor  # (out, in): max |w| over a kernel's taps
    share: Tensor  # (out, in): cost p_i · g_o of an error of mean square one in a weight
    taps: int  # the number of a kernel's taps
    divisor: float  # half the number of steps of the weight's dtype
    per_channel: bool  # whether scales are per channel

    @property
    def labels(self) -> Tensor:
        """The labels of the input channels of each group, (groups, in)."""
        return self.read[:: len(self.read) // self.groups]

    def least_error(self) -> float:
        """Compute a lower bound of the error over all factors: the error if every kernel had its own scale."""
        costs = torch.empty_like(self.share)
        for largest, squares, share, cost in self._blocks(self.largest, self.squares, self.share, costs):
            rounding = (largest / self.divisor).square_().mul_(self.taps / 12)
            torch.mul(torch.minimum(rounding, squares), share, out=cost)
        return float(costs.sum())

    def error(self, factors: Tensor, rising: Tensor, falling: Tensor) -> float:
        """Compute the cost of rounding the weight.

        `rising` accumulates, by label, the part of the error that grows with f² of a channel; `falling` the part that grows with 1/f². Both
        hold as long as the scale stays.
        """
        read = factors[self.labels].unsqueeze(1)
        steps = self._steps(factors, read).unsqueeze(1)
        costs, parts = torch.empty_like(self.share), torch.empty_like(self.share)
        blocks = zip(self._blocks(self.squares, self.share, costs, parts), self._blocks(steps, by_group=read), strict=True)
        for (squares, share, cost, part), (step, met) in blocks:
            rounding = (step * met).square_().mul_(self.taps / 12)
            torch.mul(torch.minimum(rounding, squares), share, out=cost)
            torch.mul(rounding, share, out=part)
        rising.index_add_(0, self.read.flatten(), parts.flatten())
        if not self.per_channel:
            falling.index_add_(0, self.given, parts.sum(1))
        return float(costs.sum())

    def _steps(self, factors: Tensor, read: Tensor) -> Tensor:
        """Return the scale of every output's weights, in numbers of the float model, (out,)."""
        maxima = torch.empty(len(self.read), dtype=torch.float64, device="cpu")
        for (largest, step), (_, met) in zip(
            self._blocks(self.largest, maxima.unsqueeze(1)), self._blocks(self.largest, by_group=read), strict=True
        ):
            torch.amax(largest / met, 2, keepdim=True, out=step)
        steps = maxima / self.divisor
        if self.per_channel:
            return steps
        output_factors = factors[self.given]
        return (steps * output_factors).amax() / output_factors

    def _blocks(self, *tensors: Tensor, by_group: Tensor | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Yield tensors with a row for each output, as (groups, outputs of a group, …), in pieces that fit in a processor's cache.

        `by_group`, with a row for each group, is cut likewise and appended.
        """
        shaped = [tensor.view(self.groups, -1, tensor.shape[1]) for tensor in tensors]
        dim = 1 if self.groups == 1 else 0
        size = max(1, IN_CACHE // max(self.read[0].numel() * (len(self.read) // self.groups if dim == 0 else 1), 1))
        for start in range(0, shaped[0].shape[dim], size):
            pieces = [tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)) for tensor in shaped]
            if by_group is not None:
                pieces.append(by_group if dim == 1 else by_group.narrow(0, start, len(pieces[0])))
            yield tuple(pieces)


@dataclass(frozen=True)
class TensorNoise:
    """The rounding error of the activations that share one scale. Tensors are float64, labels int64."""

    labels: Tensor  # (n,): labels of the channels, each once
    largest: Tensor  # largest, power: (n,): the largest magnitude and the mean square
    power: Tensor
    gain: Tensor  # (n,): cost of an error of mean square one
    divisor: float  # half the number of steps of the grid's dtype

    def ahead(self, times: float) -> "TensorNoise":
        """Return a copy in which every channel's largest magnitude is multiplied by `times`, up to the largest of all channels."""
        return replace(self, largest=torch.minimum(self.largest * times, self.largest.max()))

    def least_error(self) -> float:
        """Compute a lower bound of the error: the error if every channel had its own scale."""
        return float((torch.minimum((self.largest / self.divisor).square() / 12, self.power) * self.gain).sum())

    def error(self, factors: Tensor, rising: Tensor | None = None, falling: Tensor | None = None) -> float:
        """Compute the cost of rounding the tensor.

        `falling` accumulates, by label, the part of the error that grows with 1/f² of a channel, as long as the scale stays.
        """
        own = factors[self.labels]
        rounding = ((self.largest * own).amax() / self.divisor / own).square() / 12
        if falling is not None:
            falling.index_add_(0, self.labels, rounding * self.gain)
        return float((torch.minimum(rounding, self.power) * self.gain).sum())


SHARES = (0.5, 1.0)  # of the way, in bits, to channels of one range
MIGRATION = (0.35, 0.5, 0.65, 0.8)  # how much of an activation's range goes to the weights that read it
WORTH = 0.5  # factors are kept where they leave at most so much of the error
SWEEPS = 3  # over all groups, where weights have one scale for all outputs
ROUNDS = 4  # how often each choice is balanced anew
LARGEST = 10  # the largest exponent
OUTLIER = 4.0  # items with more than 4 times the median magnitude are outliers, and do not show how far apart channels are
AHEAD = 1.5  # times as far as a few items show: a channel may turn out to reach so far

Seen = tuple[Tensor, Tensor, int]  # max |x| and Σ x̄² for each label of a tensor, and how many tensors were seen
Statistics = dict[str, Seen]  # by node


@checked()
@all_or_nothing
def equalize(
    prepared: fx.GraphModule, batches: Iterable[Any], num_batches: int | None = None, *, options: Options = DEFAULTS,
    show_progress: bool | None = None,
) -> fx.GraphModule:  # fmt: skip
    """Multiply channels whose ranges are far apart by powers of two, as these batches show them in the float model; returns it.

    `calibrate` does so with its first batch; this takes all batches, and is called before it. The output channels of a layer are
    multiplied, the factors pass through positively homogeneous operators (relu, poolings, additions, concatenations, reshapes, a product
    with a gate), and every layer that reads them divides its weight by them: convolutions, linear layers, the affine part of a norm. A
    channel keeps the factor 1 if it reaches a clamp at another bound than 0 (relu6), another function, an output, a constant scale or a
    float operator. Parameters do not change, nor does the float function, bit for bit, unless a number leaves the range of float32.

    The arguments and errors are those of `calibrate`, and ConfigurationError if the model has been observed already.
    """
    require_prepared(prepared)
    if _begun(prepared):
        raise ConfigurationError(
            "the channels of this model cannot be equalized any more",
            because="scales were observed, and they fit the channels without equalization",
            remedy="call fxq.tuning.equalize before fxq.calibrate, on a model that fxq.prepare has just returned",
        )
    require_alone(options)
    first = first_batches(as_batches(batches), num_batches)
    count = 0

    def inputs() -> Iterator[list[Any]]:
        nonlocal count
        for batch in progress(first, length(batches, num_batches), "equalizing", show_progress):
            yield model_inputs(prepared, options.inputs(batch), count)
            count += 1

    with having(out_of_calibration(prepared), left_out=True):
        labelled = channels(prepared, open_alone=True)
        observed = _observed(prepared, labelled, inputs())
        if (chosen := _exponents(prepared, labelled, observed)) is not None:
            _multiply(prepared, *chosen)
    if not count:
        raise no_batches(num_batches)
    return prepared


def find(run: Run) -> tuple[Channels, Tensor] | None:
    """Return the exponents of channels by the first batch of a run; None for a model that has scales or factors now."""
    prepared, observed = run.prepared, None
    multiplied = any(each.factors is not None and each.factors.active for each in quantized_operators(prepared).values())
    labelled = channels(prepared, open_alone=True)
    if not multiplied and not _begun(prepared):
        inputs = run.first_batch()
        observed = {} if inputs is None else _observed(prepared, labelled, [inputs])
    return _exponents(prepared, labelled, observed)


def apply(run: Run, chosen: tuple[Channels, Tensor]) -> str:
    """Multiply the channels of tensors by powers of two."""
    return _multiply(run.prepared, *chosen)


def remedies(prepared: fx.GraphModule) -> Iterator[tuple[str, bool]]:
    """Yield no powers of two for channels, where calibration chose some."""
    if any(operator.factors is not None and operator.factors.active for operator in quantized_operators(prepared).values()):
        yield "off", False


def _begun(prepared: fx.GraphModule) -> bool:
    """Return whether anything was observed."""
    operators = [operator for operator in quantized_operators(prepared).values() if operator.owns_output]
    return any(operator.output.observer is not None and operator.output.observer.observed for operator in operators)


def _observed(prepared: fx.GraphModule, labelled: Channels, batches: Iterable[Sequence[Any]]) -> Statistics:
    """Run the batches; return statistics of the tensors whose channels may have factors, and of the operands of layers, by channel."""
    quantized = {node: labels for node, labels in labelled.tensors.items() if quantized_operator(prepared, node) is not None}
    watched = {node.name: labels for node, labels in quantized.items() if labels.any() or any(user in labelled.read for user in node.users)}
    return statistics(prepared, watched, batches)


def _exponents(prepared: fx.GraphModule, labelled: Channels, observed: Statistics | None) -> tuple[Channels, Tensor] | None:
    """Return labelled channels with the exponent of each label; None without finite statistics, of which calibration says what is wrong."""
    if not observed or not all(bool(torch.isfinite(part).all()) for entry in observed.values() for part in entry[:2]):
        return None
    with repeatable():
        return labelled, _chosen(prepared, labelled, observed)


def _multiply(prepared: fx.GraphModule, labelled: Channels, exponents: Tensor) -> str:
    multiply(prepared, labelled, exponents)
    layers = [node.name for node, own in labelled.given.items() if bool(exponents[own].any())]
    if layers:
        logger.info("channels are equalized in %d layers: %s", len(layers), ", ".join(layers))
    return f"{len(layers)} layers" * bool(layers)


class _Problem:
    """The errors of all layers and grids as functions of one factor for each channel label, and the errors that depend on each label."""

    def __init__(self, prepared: fx.GraphModule, labelled: Channels, observed: Statistics) -> None:
        self.number = labelled.number
        gain = torch.zeros(labelled.number, dtype=torch.float64, device="cpu")
        # Last layers first: the cost of an error in a layer depends on its cost in the layers after it.
        self.layers = [layer for node in reversed(labelled.read) if (layer := _layer(prepared, labelled, node, observed, gain)) is not None]
        self.tensors = _grids(prepared, labelled, observed, gain)

    def groups(self) -> Iterator[tuple[Tensor, list[LayerNoise | TensorNoise]]]:
        """Labels that one tensor holds or one layer reads belong together; with each group the terms that it has a part in."""
        root = torch.arange(self.number, dtype=torch.int64, device="cpu")
        terms: list[tuple[Tensor, LayerNoise | TensorNoise]] = [(torch.unique(layer.labels), layer) for layer in self.layers]
        terms += [(tensor.labels, tensor) for tensor in self.tensors]
        changed = True
        while changed:
            changed = False
            for labels, _ in terms:
                own = labels[labels > 0]
                if len(own) and bool((root[own] != root[own].min()).any()):
                    root[own], changed = root[own].min(), True
        touched: dict[int, list[LayerNoise | TensorNoise]] = {}
        for labels, term in terms:
            output_labels = term.given if isinstance(term, LayerNoise) and not term.per_channel else labels[:0]
            for group in set(root[torch.cat([labels, output_labels])].tolist()):
                touched.setdefault(group, []).append(term)
        for group in sorted(touched.keys() - {0}):
            yield torch.nonzero(root == group).flatten(), touched[group]


def _layer(prepared: fx.GraphModule, channel_labels: Channels, node: fx.Node, observed: Statistics, gain: Tensor) -> LayerNoise | None:
    """Return the error of a layer as a `LayerNoise`, and add its costs to `gain`; None if there are no statistics of its operand.

    `gain` holds the cost of an error of mean square one in a channel, by label; the cost in this layer is added to it.
    """
    module = quantized_operator(prepared, node)
    assert module is not None
    operator, read = module.operator, channel_labels.read[node]
    arguments = operator.bind_call(node.args, node.kwargs)
    values = {
        name: fx.map_arg(value, lambda operand: parameter_value(prepared, operand) if is_parameter(operand) else None)
        for name, value in arguments.items()
        if name in (*operator.parameter_names[1:], "batch_norm")
    }
    if "weight" not in values or arguments["input"].name not in observed:
        return None
    if values.get("batch_norm") is not None:
        assert operator.layer.folded is not None
        values["weight"], values["bias"] = operator.layer.folded(**values)
    weight = operator.layer.weight(**values)
    assert weight is not None
    rows = weight.detach().double().cpu().unsqueeze(2).flatten(2)
    outputs, inputs, taps = rows.shape
    groups = max(len(read) // inputs, 1)
    _, power, count = observed[arguments["input"].name]
    assert operator.layer.channels is not None
    moved = power.movedim(operator.layer.channels(arguments) % (power.dim() + 1) - 1, 0)
    means = (moved.reshape(len(moved), -1).mean(1) / count).expand(len(read))
    squares = rows.square().sum(2)
    by_group = (each.reshape(groups, 1, -1).expand(groups, outputs // groups, -1) for each in (read, means))
    labels, met = (each.flatten(0, 1) for each in by_group)  # (outputs, inputs of a group): each output's row is that of its group
    signal = (squares * met).sum(1) * outputs
    written = channel_labels.given[node]
    after = torch.where(written > 0, gain[written], torch.where(signal > SMALLEST_NORMAL, 1 / signal.clamp_min(SMALLEST_NORMAL), 0))
    gain.index_add_(0, labels.flatten(), (squares * after.unsqueeze(1)).flatten())
    quantizer = module.weight_quantizer
    return LayerNoise(
        read=labels, groups=groups, given=written, squares=squares, largest=rows.abs().amax(2), share=met * after.unsqueeze(1), taps=taps,
        divisor=quantizer.dtype.divisor, per_channel=quantizer.per_channel,
    )  # fmt: skip


def _grids(prepared: fx.GraphModule, channel_labels: Channels, observed: Statistics, gain: Tensor) -> list[TensorNoise]:
    """Return the quantized tensors that have statistics, grouped by shared scale."""
    by_quantizer: dict[int, tuple[Any, list[str]]] = {}
    nodes = {node.name: node for node in channel_labels.tensors}
    for name, operator in quantized_operators(prepared).items():
        if name in observed and not operator.plain and not operator.output.follows_sum:
            by_quantizer.setdefault(id(operator.output), (operator.output, []))[1].append(name)
    tensors = []
    for quantizer, names in by_quantizer.values():
        labels = torch.cat([channel_labels.tensors[nodes[name]].flatten() for name in names])
        largest = torch.cat([observed[name][0].flatten() for name in names])
        power = torch.cat([(observed[name][1] / observed[name][2]).flatten() for name in names])
        own, place, count = torch.unique(labels, return_inverse=True, return_counts=True)
        of_label = torch.zeros(len(own), dtype=torch.float64, device="cpu")
        largest, power = of_label.scatter_reduce(0, place, largest, "amax"), of_label.scatter_add(0, place, power) / count
        tensors.append(TensorNoise(own, largest, power, gain[own] * (own > 0), quantizer.dtype.divisor))
    return tensors


def _chosen(prepared: fx.GraphModule, channel_labels: Channels, observed: Statistics) -> Tensor:
    """Return the exponent of every label."""
    problem = _Problem(prepared, channel_labels, observed)
    exponents = torch.zeros(channel_labels.number, dtype=torch.int64, device="cpu")

    def better(group: Tensor, terms: list[LayerNoise | TensorNoise]) -> Tensor:
        """Return the exponents, changed for this group of labels if that lowers the error enough."""
        costs = _Costs(group, terms)
        least = before = costs.of(exponents).error
        best, most = exponents, WORTH * costs.of(exponents).doubtful()
        for offered in _candidates(group, terms, problem) if sum(term.least_error() for term in terms) <= WORTH * before else ():
            candidate = exponents.clone()
            candidate[group] = offered
            for _ in range(ROUNDS):
                cost = costs.of(candidate)
                if cost.error < least and cost.doubtful() <= most:
                    least, best = cost.error, candidate
                candidate = cost.balanced
        if not least <= WORTH * before:
            return exponents
        lowest = best.clone()
        lowest[group] -= best[group].min()  # a factor that all have in common changes nothing, where none of them is held
        return lowest if costs.of(lowest).error <= least else best

    groups = list(problem.groups())
    alone = all(layer.per_channel for layer in problem.layers)  # else what one group has changes what is best for others
    for _ in range(1 if alone else SWEEPS):
        before = exponents
        for group, terms in groups:
            exponents = better(group, terms)
        if torch.equal(before, exponents):
            break
    return exponents


def _candidates(group: Tensor, terms: list[LayerNoise | TensorNoise], problem: _Problem) -> Iterator[Tensor]:
    """Exponents for the labels of a group."""
    nearest, rows, written, read = (torch.zeros(problem.number, dtype=torch.float64, device="cpu") for _ in range(4))
    layers = [term for term in terms if isinstance(term, LayerNoise)]
    for term in terms:
        if isinstance(term, TensorNoise):
            nearest[term.labels] = torch.maximum(nearest[term.labels], term.largest / term.largest.max().clamp_min(1e-300))
    short = torch.where(nearest > 0, -torch.log2(nearest.clamp_min(2.0**-60)), 0)[group]  # bits to the range of the largest channel
    for share in SHARES:
        yield torch.minimum(torch.round(short * share), torch.floor(short)).clamp(-LARGEST, LARGEST).long()
    for layer in layers:
        rows.scatter_reduce_(0, layer.read.flatten(), layer.largest.flatten(), "amax")
    light = torch.where(rows > 0, torch.log2(rows.clamp_min(2.0**-60)), 0)[group]
    for strength in MIGRATION:
        yield torch.round(strength * short + (1 - strength) * (light - light.max())).clamp(-LARGEST, LARGEST).long()
    if all(layer.per_channel for layer in layers):
        return
    for layer in layers:
        shares = layer.largest / layer.largest.max().clamp_min(1e-300)
        written.scatter_reduce_(0, layer.given, shares.amax(1), "amax")
        read.scatter_reduce_(0, layer.read.flatten(), shares.flatten(), "amax")
    both = (written > 0) & (read > 0)
    weights = torch.where(both, torch.log2(read.clamp_min(1e-300) / written.clamp_min(1e-300)) / 2, 0)[group]
    for share in (0.0, 0.5):
        yield torch.round(weights * (1 - share) + short * share).clamp(-LARGEST, LARGEST).long()


class _Cost(NamedTuple):
    """The cost of some exponents."""

    error: float  # the error with these exponents
    doubtful: Callable[[], float]  # computes the error if channels had larger magnitudes than in the samples
    balanced: Tensor  # the exponents at which the terms that grow with a factor equal those that shrink with it, all scales kept


class _Costs:
    """The costs of exponents that differ in one group alone, in the terms that it has a part in; each is computed once."""

    def __init__(self, group: Tensor, terms: list[LayerNoise | TensorNoise]) -> None:
        self.group, self.terms = group, terms
        self.ahead = {index: term.ahead(AHEAD) for index, term in enumerate(terms) if isinstance(term, TensorNoise)}
        self.known: dict[bytes, _Cost] = {}

    def of(self, exponents: Tensor) -> _Cost:
        key = exponents[self.group].numpy().tobytes()
        if key in self.known:
            return self.known[key]
        factors = torch.exp2(exponents.double())
        rising, falling = torch.zeros_like(factors), torch.zeros_like(factors)
        errors = [term.error(factors, rising, falling) for term in self.terms]

        def doubtful() -> float:
            return sum(self.ahead[index].error(factors) if index in self.ahead else error for index, error in enumerate(errors))

        both = (rising > 0) & (falling > 0)
        moved = torch.where(both, torch.log2(falling.clamp_min(1e-300) / rising.clamp_min(1e-300)) / 4, 0)
        candidate = exponents.clone()
        candidate[self.group] = torch.round(exponents + moved)[self.group].clamp(-LARGEST, LARGEST).long()
        self.known[key] = _Cost(sum(errors), doubtful, candidate)
        return self.known[key]


# ---- Statistics of the channels of tensors in the float model: the largest magnitude and the mean square of each -----
#
# Outliers among the items (`quantization.observers.histogram`) are left out: their channels have other proportions, and a scale may clip
# them anyway.
@torch.no_grad()
def statistics(prepared: fx.GraphModule, watched: Mapping[str, Tensor], batches: Iterable[Sequence[Any]]) -> Statistics:
    """Return the statistics, over these batches, of the watched tensors: node name -> labels."""
    totals: Statistics = {}

    def watch(module: QuantizedOperator, _: Any, result: Tensor) -> None:
        labels = watched[module.name]
        if result.dim() != labels.dim() + 1 or not result.is_floating_point() or not result.numel():
            return
        reduced = [0, *(dim + 1 for dim, size in enumerate(labels.shape) if size == 1)]
        magnitude = result.abs().flatten(1).amax(1)
        usual = ~(magnitude > OUTLIER * magnitude.median())  # NaN is not left out
        usable = result if bool(usual.all()) else result[usual]
        largest = usable.abs().amax(reduced, keepdim=True).squeeze(0).double().cpu()
        power = usable.square().mean(reduced, keepdim=True, dtype=torch.float64).squeeze(0).cpu()
        _add(totals, module.name, (largest, power, 1))

    operators = quantized_operators(prepared)
    handles = [operators[name].register_forward_hook(watch) for name in watched]
    try:
        with still(prepared, State.FLOAT):
            for inputs in batches:
                with repeatable():
                    prepared(**by_name(prepared, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return totals


def _add(totals: Statistics, name: str, added: Seen) -> None:
    largest, power, count = added
    before = totals.get(name)
    totals[name] = added if before is None else (torch.maximum(before[0], largest), before[1] + power, before[2] + count)
