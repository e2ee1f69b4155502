"""Ranges that calibration chooses by the outputs of the model, after observers have chosen each by the error of its own tensor.

A choice has candidates, the usual one first. Each is put into the model, whose outputs are then measured on a few samples. Another one
than the usual is taken where the outputs clearly gain by it. There are two choices.

*All tensors but outputs, by one method* (`Method`). The squared error of all samples together is that of the samples with the largest
values: it keeps these, and gives all others a coarse step. The noise of a sample in decibels, on average over samples, clips more of the
largest values. The smallest and the largest value keep rare values, which may carry what a detector finds, and a percentile of the values
all but the rarest. No method is better for every network.

*An input many of whose values round to 0, divided by a power of two.* A few large values set the scale of a power spectrogram, say. They
make up its squared error, so no observer cuts them off, but often they do the same to the outputs at half their size. So are tensors of
16 bits, all of them together: the squares whose root is a spectrogram.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.accuracy.measure import Noise, pick, support
from fxquant.accuracy.observe import WIDE
from fxquant.accuracy.step import Run, owned_quantizers_by_name
from fxquant.analysis.recording import Seen, still
from fxquant.ir.model import autocast_off, repeatable
from fxquant.ops.core.composite import QUANTIZE
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.observers.ranges import Method
from fxquant.quantization.quantizer import Quantizer
from fxquant.quantization.spec import State
from fxquant.support import logger

FEWEST = 3  # samples that gain by another choice than the usual, or half of all: one huge activation chooses no range for the others
MANY = 0.2  # of an input's values that are not 0, and become 0
FACTORS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def find_method(run: Run) -> Method | None:
    """Return the method whose ranges are clearly best for the outputs, or the one that the run was given; None without such tensors."""
    free = _free(run)
    if run.method is not None or not free:
        return run.method
    best, noise = _picked(run, {method.value: partial(choose, free, method) for method in Method}, "ranges are chosen by")
    run.judge.current = noise.get(best)  # of the model that has the ranges of this method
    return Method(best)


def apply_method(run: Run, method: Method) -> str:
    """Choose the scales of all tensors that were observed anew by this method."""
    choose(_free(run), method)
    return f"by {method.value}"


def _free(run: Run) -> list[Quantizer]:
    return [quantizer for quantizer in run.observed().values() if quantizer.can_choose]


def choose(quantizers: list[Quantizer], method: Method) -> None:
    """Choose the scales of these quantizers anew by this method."""
    for quantizer in quantizers:
        quantizer.choose_by(method)


def method_of(prepared: fx.GraphModule) -> Method:
    """Return the method by which calibration has chosen ranges."""
    every = owned_quantizers_by_name(prepared).values()
    return next((each.chosen_by for each in every if each.chosen_by is not Method.ERROR), Method.ERROR)


def find_factors(run: Run) -> dict[str, float] | None:
    """Return the factors below 1 of the ranges of lost tensors with which the outputs are best, by node; None if there are none.

    Inputs and tensors of 16 bits that the default observer has observed have other candidates: each input, and all others together.
    """
    observed, prepared, nonzero, survivors = run.observed(), run.prepared, Counter[str](), Counter[str]()
    owned = [(name.removesuffix(".0"), quantizer) for name, quantizer in observed.items() if name.endswith(".0")]
    owners = {id(quantizer): name for name, quantizer in reversed(owned)}  # the first of those that share it
    quantizes = {name for name, operator in quantized_operators(prepared).items() if operator.operator is QUANTIZE}
    sources = {node.name: node.all_input_nodes[0].name for node in prepared.graph.nodes if node.name in quantizes}

    chosen = {name: each for name, each in owned if each.can_choose and (each.dtype.name == WIDE or name in sources)}

    def see(node: fx.Node, value: Any, read: tuple[Any, ...]) -> Any:
        quantizer = chosen.get(node.name)
        if quantizer is not None and isinstance(value, Tensor) and value.is_floating_point():
            name = owners[id(quantizer)]
            nonzero[name] += int((value != 0).sum())
            survivors[name] += int((torch.round(value / quantizer.scale.to(value.device)) != 0).sum())
        return value

    placeholders = [node.name for node in prepared.graph.find_nodes(op="placeholder")]
    runs = any(name not in sources for name in chosen)
    with torch.no_grad(), repeatable(), still(prepared, State.FLOAT), autocast_off():
        for chunk in run.judging:
            if runs:
                Seen(prepared, see).run(*chunk)
                continue
            values = dict(zip(placeholders, chunk, strict=True))
            for node in (node for node in prepared.graph.nodes if sources.get(node.name) in values):
                see(node, values[sources[node.name]], ())
    groups, ratios = dict[str, list[str]](), dict[str, float]()
    for name in (name for name, count in nonzero.items() if count - survivors[name] >= max(MANY * count, 1)):
        what = f"the range of input {sources[name]} is" if name in sources else "the ranges of tensors of 16 bits are"
        groups.setdefault(what, []).append(name)
    for what, names in groups.items():
        factors = {f"{factor:g}": partial(narrow, prepared, dict.fromkeys(names, factor) if factor < 1 else {}) for factor in FACTORS}
        best, noise = _picked(run, factors, f"{what} multiplied by")
        run.judge.current, factor = noise.get("1"), float(best)
        ratios.update(dict.fromkeys(names, factor) if factor < 1 else {})
    if ratios:
        run.judge.current = None
    return ratios or None


def narrow(prepared: fx.GraphModule, factors: Mapping[str, float]) -> None:
    """Multiply the ranges of these quantize nodes."""
    operators = quantized_operators(prepared)
    for name, factor in factors.items():
        operators[name].output.narrow(factor)


def apply_factors(run: Run, factors: Mapping[str, float]) -> str:
    """Multiply the ranges of the quantize nodes of these names."""
    narrow(run.prepared, factors)
    return ", ".join(f"{name} by {factor:g}" for name, factor in factors.items())


def _picked(run: Run, candidates: Mapping[str, Callable[[], None]], what: str) -> tuple[str, dict[str, Noise]]:
    """Return the candidate that is clearly best for the outputs, or the first; and the noise of each."""
    judge, (usual, *others) = run.judge, candidates
    fewest = min(FEWEST, sum(judge.counts) / 2)
    best, noise = pick(
        judge, candidates, usual, {} if judge.current is None else {usual: judge.current},
        supported=lambda after, before: support(after, before) >= fewest, show_progress=run.show,
    )  # fmt: skip
    if noise:
        other = max(others, key=lambda name: noise[name].level) if best == usual else usual
        logger.info("%s %s: the outputs have %.1f dB, and %.1f dB with %s", what, best, noise[best].level, noise[other].level, other)
    return best, noise
