"""Mixed precision: the dtypes that lose least within a budget, or reach an accuracy at the least cost, as a QConfigMapping."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np
from torch import fx, nn

from fxquant import backends
from fxquant.accuracy import BY_SAMPLES, ranks
from fxquant.accuracy.checkpoint import Checkpoint, model_digest
from fxquant.accuracy.choices import ACTIVATION, WEIGHT, Choices, bits
from fxquant.accuracy.measure import decibels, outputs_of
from fxquant.accuracy.observations import Observations, observations
from fxquant.accuracy.ranges import method_of
from fxquant.accuracy.step import CHUNK, Run
from fxquant.accuracy.walk import HELD_OUT_OF, cut, inputs_of
from fxquant.analysis.text import table
from fxquant.api import calibrate, prepare
from fxquant.errors import ConfigurationError
from fxquant.options import DEFAULTS, Options
from fxquant.prepared.operators import quantized_operators
from fxquant.quantization.spec import ActivationConfig, QConfig, QConfigMapping, Rule, State, as_mapping
from fxquant.search.sensitivity import METRIC, Metric, Sensitivity, calibrated, find, reference_of, score_of
from fxquant.support import logger
from fxquant.support.arguments import NUMBER, Kind, checked, checked_class, instance
from fxquant.target import Roofline, Target

_NONE = NUMBER.or_none("no limit")


SPEED: Kind = instance("a fxq.extend.Roofline", Roofline).or_none("that of the target's chip")


@checked_class(weight_bytes=_NONE, weight_bits=_NONE, bit_operations=_NONE, latency=_NONE, speed=SPEED)
@dataclass(frozen=True)
class Budget:
    """Upper limits of a model; None: no limit.

    weight_bytes    the bytes of weights, two int4 in a byte; biases, and weights that no rule of a mapping can reach, are not counted
    weight_bits     the same as the average over all weights, in bits for each
    bit_operations  of one item: multiply-accumulates, each times the bits of both its factors
    latency         seconds for one item, estimated: a layer takes the sum of the times of its products and of its bytes
    speed           the rates for that. Products of a and b bits take a·b/64 times as long as those of int8, and an int4 is half a byte.
                    None: the peak rates of the target, as in `fxq.estimate`
    """

    weight_bytes: float | None = None
    weight_bits: float | None = None
    bit_operations: float | None = None
    latency: float | None = None
    speed: Roofline | None = None

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in LIMITS):
            because = "weight_bytes, weight_bits, bit_operations and latency are all None"
            raise ConfigurationError("the budget limits nothing", because=because, remedy="give one of them, as in Budget(weight_bits=5)")
        if self.latency is None and self.speed is not None:
            because = "it estimates seconds, and the budget has no latency"
            remedy = "pass Budget(latency=0.01, speed=fxq.extend.Roofline(macs_per_second=1e12, bytes_per_second=1e10)), or neither"
            raise ConfigurationError("a speed is given without a latency", because=because, remedy=remedy)

    def on(self, target: Target) -> "Budget":
        """Return the budget with the target's peak rates as `speed`, if it needs one. Raises ConfigurationError for unknown rates."""
        if self.latency is None or self.speed is not None:
            return self
        if target.roofline is None:
            because = "the rates are those of the machine that the model runs on"
            remedy = "pass Budget(latency=0.01, speed=fxq.extend.Roofline(macs_per_second=1e11, bytes_per_second=2e10))"
            raise ConfigurationError(f"a latency on {target.name} cannot be estimated", because=because, remedy=remedy)
        return replace(self, speed=target.roofline)

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits that are not None, by name."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors whose dtypes affect the limits: only weights where all limits are about their size."""
        return (WEIGHT,) if {*self.limits} <= {"weight_bytes", "weight_bits"} else (ACTIVATION, WEIGHT)


LIMITS = tuple(field.name for field in fields(Budget) if field.name != "speed")
Term = tuple[float, str, str, str, str]  # a cost, if these two choices have these dtypes: choice, dtype, choice, dtype; "" for none


def cost_terms(choices: Choices, limit: str, speed: Roofline | None) -> Iterator[Term]:
    """Yield the terms of the cost that a limit bounds, a sum over choices and pairs of choices."""
    if limit in ("weight_bytes", "weight_bits"):
        weights = [choice for choice in choices.values() if choice.kind == WEIGHT]
        total = sum(choice.elements for choice in weights) or 1
        for choice in weights:
            for dtype in choice.dtypes:
                yield choice.bytes(dtype) if limit == "weight_bytes" else choice.elements * bits(dtype) / total, choice.name, dtype, "", ""
        return
    scale = 1.0 if speed is None else 1 / (64 * speed.macs_per_second)
    for products in choices.products:
        for left, left_bits in _sides(choices, products.left, products.width[0]):
            for right, right_bits in _sides(choices, products.right, products.width[1]):
                yield products.macs * left_bits * right_bits * scale, products.left, left, products.right, right
    if speed is not None:
        for choice in choices.values():
            for dtype in choice.dtypes:
                yield choice.bytes(dtype) * choice.passes / speed.bytes_per_second, choice.name, dtype, "", ""


def _sides(choices: Choices, name: str, width: int) -> list[tuple[str, int]]:
    return [(dtype, bits(dtype)) for dtype in choices[name].dtypes] if name else [("", width)]


def costs(choices: Choices, dtypes: Mapping[str, str], speed: Roofline | None = None, limits: Sequence[str] = LIMITS) -> dict[str, float]:
    """Return the cost of these dtypes for each limit; latency only with a speed."""

    def is_there(name: str, dtype: str) -> bool:
        return not name or dtypes.get(name, choices[name].dtype) == dtype

    limits = [limit for limit in LIMITS if limit != "latency" or speed is not None]
    return {
        limit: sum(
            cost
            for cost, left, left_dtype, right, right_dtype in cost_terms(choices, limit, speed if limit == "latency" else None)
            if is_there(left, left_dtype) and is_there(right, right_dtype)
        )
        for limit in limits
    }


def fits(amounts: Mapping[str, float], budget: Budget) -> bool:
    """Return whether costs are within the budget, up to a rounding error."""
    return all(amounts[name] <= limit * (1 + 1e-9) for name, limit in budget.limits.items())


# ---- The best dtypes under a budget, exactly: an integer program -----------------------------------------------------
#
# The variables x choose the dtypes, and z are their products:
#
#     minimise    Σ loss[c, d] x[c, d]                        x[c, d] ∈ {0, 1}: choice c has dtype d
#     such that   Σ_d x[c, d] = 1                             for each choice
#                 Σ cost z ≤ limit                            for each limit of the budget
#                 Σ_e z[c, d, c', e] = x[c, d],  and alike    for each pair of choices whose product costs: z = x x' is exact
RESOLUTION = 1e6  # the largest loss in units of the solver, whose absolute tolerance is 1e-6


def optimum(choices: Choices, losses: Mapping[str, Mapping[str, float]], budget: Budget) -> dict[str, str]:
    """Return the dtype of every choice with the least sum of losses within the budget; a choice without losses keeps its dtype.

    Raises ConfigurationError if nothing is within the budget, or SciPy, which solves it (with HiGHS), is missing.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        because = f"its integer program is solved by scipy.optimize.milp: {error}"
        raise ConfigurationError("a search under a budget needs SciPy", because=because, remedy='pip install "fxquant[tuning]"') from None
    keys = [(name, dtype) for name, choice in choices.items() for dtype in (choice.dtypes if name in losses else (choice.dtype,))]
    column = {key: index for index, key in enumerate(keys)}
    objective = [losses.get(name, {}).get(dtype, 0.0) for name, dtype in keys]
    rows: list[tuple[dict[int, float], float, float]] = []  # the factors of the variables, and the limits of their sum
    for name in choices:
        rows.append(({index: 1.0 for key, index in column.items() if key[0] == name}, 1.0, 1.0))
    pairs: dict[tuple[str, str, str, str], int] = {}
    for limit, most in budget.limits.items():
        row: dict[int, float] = {}
        constant = 0.0
        for cost, *key in cost_terms(choices, limit, budget.speed if limit == "latency" else None):
            place = _column(tuple(key), column, pairs)
            if place is None:
                constant += cost if not any(key) else 0.0
            else:
                row[place] = row.get(place, 0.0) + cost / most
        rows.append((row, -np.inf, 1 - constant / most))
    for left, right in {(left, right): None for left, _, right, _ in pairs}:
        both = {key: index for key, index in pairs.items() if (key[0], key[2]) == (left, right)}
        for own, chosen in ((1, left), (3, right)):
            for name, dtype in keys:
                if name == chosen:
                    summed = {index: 1.0 for key, index in both.items() if key[own] == dtype}
                    rows.append(({**summed, column[name, dtype]: -1.0}, 0.0, 0.0))
    objective += [0.0] * len(pairs)
    unit = max(map(abs, objective), default=0.0) or 1.0
    shape = len(rows), len(objective)
    places = [(index, place, value) for index, (row, *_) in enumerate(rows) for place, value in row.items()]
    sums = csr_array(([value for *_, value in places], ([row for row, *_ in places], [place for _, place, _ in places])), shape=shape)
    solution = milp(
        np.array(objective) * (RESOLUTION / unit),
        integrality=np.array([1] * len(keys) + [0] * len(pairs)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(sums, [low for _, low, _ in rows], [high for *_, high in rows]),
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        raise _beyond(choices, losses, budget, str(solution.message))
    return {name: dtype for (name, dtype), index in column.items() if solution.x[index] > 0.5}


def _column(key: tuple[str, ...], column: Mapping[tuple[str, str], int], pairs: dict[Any, int]) -> int | None:
    """Return the column of the variable that a cost is multiplied by; None for a dtype that cannot be chosen."""
    left, left_dtype, right, right_dtype = key
    if not right:
        return column.get((left, left_dtype))
    if not left:
        return column.get((right, right_dtype))
    if (left, left_dtype) not in column or (right, right_dtype) not in column:
        return None
    if left == right:  # a tensor times itself
        return column[left, left_dtype] if left_dtype == right_dtype else None
    return pairs.setdefault((left, left_dtype, right, right_dtype), len(column) + len(pairs))


def _beyond(choices: Choices, losses: Mapping[str, Any], budget: Budget, message: str) -> ConfigurationError:
    least = {name: min(choice.dtypes, key=bits) if name in losses else choice.dtype for name, choice in choices.items()}
    there = costs(choices, least, budget.speed)
    limits = "; ".join(f"{name} is {there[name]:.6g} at least, and {most:.6g} is allowed" for name, most in budget.limits.items())
    remedy = "raise the limit, let more widths be chosen, or take a target with narrower dtypes"
    return ConfigurationError("no choice of dtypes is within the budget", because=f"{limits} ({message})", remedy=remedy)


BUDGET: Kind = instance("a fxq.search.Budget, as in Budget(weight_bits=5)", Budget)


@dataclass(frozen=True)
class Candidate:
    """A choice of dtypes, with its cost and its loss."""

    name: str  # "optimum", or, for a uniform one, its dtypes
    dtypes: Mapping[str, str]  # the dtype of every tensor and weight that can be chosen, by name
    costs: Mapping[str, float]  # weight_bytes, weight_bits, bit_operations, and latency where there is a speed
    expected: float  # the noise to signal ratio of the outputs by the sum of the sensitivities
    noise: float | None = None  # the measured noise to signal ratio of the integer function on all batches; None if it was not measured
    score: float | None = None  # the metric's value; None without a metric

    @property
    def rank(self) -> tuple[float, float]:
        """The key that orders measured candidates: the better one's is larger."""
        assert self.noise is not None
        return (0.0 if self.score is None else self.score, -self.noise)


@dataclass(frozen=True, eq=False)
class MixedPrecision:
    """The result of `mixed_precision`; prints as a table.

    qconfig      the mapping, for `prepare`, or for `save_qconfig` to edit it
    prepared     the model prepared with it, calibrated, in state VALIDATE
    chosen       the best of the candidates, by the metric and then by the measured noise
    candidates   the optimum, and every uniform choice of dtypes within the budget
    before       the candidate with the original qconfig
    sensitivity  the sensitivity of every tensor
    budget       the budget
    """

    qconfig: QConfigMapping
    prepared: fx.GraphModule
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    before: Candidate
    sensitivity: Sensitivity
    budget: Budget

    def __str__(self) -> str:
        """Format a result of mixed precision: candidates with cost and error, then the dtype of every tensor before and after."""
        rows = []
        for candidate in (self.before, *self.candidates):
            score = "" if candidate.score is None else f"{candidate.score:.4g}"
            measured = "" if candidate.noise is None else f"{decibels(candidate.noise):.2f} dB"
            spent = [f"{candidate.costs[limit]:.6g}" for limit in self.budget.limits]
            mark = "chosen" if candidate is self.chosen else ""
            rows.append((candidate.name, *spent, f"{decibels(candidate.expected):.2f} dB", measured, score, mark))
        limits = ", ".join(f"{name} {most:.6g}" for name, most in self.budget.limits.items())
        head = ("dtypes", *self.budget.limits, "expected", "measured", "metric", "")
        chosen = [(tensor, self.chosen.dtypes[tensor.name]) for tensor in self.sensitivity.tensors]
        tensors = [(tensor.name, tensor.dtype, dtype, f"{decibels(tensor.loss[dtype]):.1f} dB", "") for tensor, dtype in chosen]
        return f"mixed precision within {limits}\n{table(head, rows)}\n\n{table(('tensor', 'was', 'is', 'alone', ''), tensors)}"


@checked(budget=BUDGET, metric=METRIC)
def mixed_precision(
    model: nn.Module, batches: Any, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None, *, budget: Budget,
    metric: Metric | None = None, options: Options = DEFAULTS, show_progress: bool | None = None,
) -> MixedPrecision:  # fmt: skip
    """Choose int4, int8 or int16, as the target has them, for every weight, and for every tensor unless the budget limits weights only.

    The dtypes are the exact optimum of the sum of the sensitivities within the budget, found by integer programming. They are prepared
    with the scales of the one calibration, and measured; so is every uniform choice within the budget. The best of all is chosen by
    `metric`, and then by the error of the outputs. Rules that the qconfig has already stay, as far as no dtype changes.

    Raises ConfigurationError if nothing is within the budget or SciPy is missing, and the errors of `sensitivity`.
    """
    return search(work_of(model, batches, target, qconfig, options, show_progress), budget, metric)


@dataclass(frozen=True, eq=False)
class Work:
    """A float model with the data to prepare it again, with other dtypes, without another calibration."""

    model: nn.Module
    example: Any
    base: QConfigMapping
    prepared: fx.GraphModule
    seen: Observations
    samples: list[list[Any]]
    options: Options  # without `batch_fn`, since the samples are inputs
    show: bool | None

    def with_mapping(self, mapping: QConfigMapping, options: Options | None = None) -> fx.GraphModule:
        """Return the model prepared with a mapping, in VALIDATE, with the corrections of `options`, by default the work's.

        Raises NotCalibrated where the observations leave a scale open.
        """
        options = options or self.options
        target, observed = self.prepared.meta["target"], self.seen_with(options)
        prepared = prepare(self.model, self.example, target, mapping, observations=observed, options=options)
        for operator in quantized_operators(prepared).values():
            if not operator.plain:
                operator.output.require()
        run = Run(prepared, BY_SAMPLES, options=options, method=method_of(self.prepared))  # as calibration does
        for inputs in self.samples:
            run.take(inputs)
        run.perform()
        return prepared

    def seen_with(self, options: Options) -> Observations:
        """Return the observations of a calibration with these options."""
        return self.seen if options.equalize == self.options.equalize else self.seen_otherwise

    @cached_property
    def seen_otherwise(self) -> Observations:
        """The observations of a calibration with equalization where the work has none, and without where it has it."""
        options = replace(self.options, equalize=not self.options.equalize, round_weights=False, correct_bias=False)
        prepared = prepare(self.model, self.example, self.prepared.meta["target"], self.base, options=options)
        return observations(calibrate(prepared, self.samples, options=options, show_progress=False))


def work_of(
    model: nn.Module, batches: Any, target: str | Target, qconfig: QConfig | QConfigMapping | None, options: Options,
    show_progress: bool | None,
) -> Work:  # fmt: skip
    """Prepare and calibrate a float model; return it with the data to prepare it again."""
    prepared, example = calibrated(model, batches, target, qconfig, None, options, show_progress)
    samples = inputs_of(prepared, batches, None, options)
    own = replace(options, batch_fn=None)
    return Work(model, example, as_mapping(qconfig), prepared, observations(prepared), samples, own, show_progress)


def search(work: Work, budget: Budget, metric: Metric | None) -> MixedPrecision:
    """Return the best dtypes for a prepared and calibrated model."""
    widths, checkpoint = work.options.widths, work.options.checkpoint
    budget = budget.on(work.prepared.meta["target"])
    sensitivities = find(work.prepared, work.samples, work.options, work.show, kinds=budget.kinds)
    choices = Choices(work.prepared, widths)
    losses = {tensor.name: tensor.loss for tensor in sensitivities.tensors}

    def candidate(name: str, dtypes: Mapping[str, str]) -> Candidate:
        expected = sum(losses[key][dtype] for key, dtype in dtypes.items() if key in losses)
        return Candidate(name, dict(dtypes), costs(choices, dtypes, budget.speed), expected)

    before = candidate("as given", choices.dtypes())
    tried = [candidate("optimum", optimum(choices, losses, budget))]
    tried += [uniform for dtypes in _uniform(choices, widths, budget) if fits((uniform := candidate(*dtypes)).costs, budget)]
    reference = reference_of(work.prepared, work.samples)

    tried_by_name = {one.name: one for one in (before, *tried)}

    @cache
    def built(name: str) -> fx.GraphModule:
        return work.prepared if name == before.name else work.with_mapping(choices.mapping(work.base, tried_by_name[name].dtypes))

    def judged(name: str) -> list[Any]:
        model = built(name)
        noise = reference.noise(partial(outputs_of, model)).pooled
        return [Choices(model, widths).dtypes(), noise, None if metric is None else score_of(metric, model)]

    call = {"function": "mixed_precision", "budget": budget, "widths": widths, "measured": work.options.measured}
    call |= {"model": model_digest(work.prepared), "metric": metric is not None}
    journal = Checkpoint(None if checkpoint is None else f"{checkpoint}.candidates", call)
    results = journal.gather({name: partial(judged, name) for name in tried_by_name}, "mixed precision", work.show)
    before, *rest = (
        Candidate(name, dtypes, tried_by_name[name].costs, tried_by_name[name].expected, noise, score)
        for name, (dtypes, noise, score) in results.items()
    )
    chosen = max(rest, key=lambda candidate: candidate.rank)
    return MixedPrecision(choices.mapping(work.base, chosen.dtypes), built(chosen.name), chosen, tuple(rest), before, sensitivities, budget)


def _uniform(choices: Choices, widths: Sequence[int], budget: Budget) -> list[tuple[str, dict[str, str]]]:
    """Return (name, dtypes) for every pair of one width for all weights and one for all tensors; a choice without it keeps its dtype."""
    by_dtypes: dict[tuple[tuple[str, str], ...], tuple[str, dict[str, str]]] = {}
    for weights in widths:
        for tensors in widths if len(budget.kinds) > 1 else [0]:
            width = {WEIGHT: weights, ACTIVATION: tensors}
            having = {name: [dtype for dtype in choice.dtypes if bits(dtype) == width[choice.kind]] for name, choice in choices.items()}
            chosen = {name: (*dtypes, choices[name].dtype)[0] for name, dtypes in having.items()}
            label = f"{weights}-bit weights" + (f", {tensors}-bit tensors" if tensors else "")
            by_dtypes.setdefault(tuple(sorted(chosen.items())), (label, chosen))
    return list(by_dtypes.values())


# ---- 16 bits where they cost least, for an accuracy ------------------------------------------------------------------
# Integers are measured, so the estimate need only be right in the share of the noise that a choice leaves.
NAMED = 6  # tensors that the sentence names, at most
MARGIN = 0.8  # of the noise that an accuracy allows, which is left by estimate
FELT = 0.01  # of the noise that is left, which a tensor has to lower where the accuracy is out of reach
RAISES = 3  # how often a choice is extended that misses the accuracy in integers


@dataclass(frozen=True, eq=False)
class Widened:
    """The tensors and weights that get 16 bits for an accuracy; prints as a sentence.

    goal         the accuracy: the SQNR in dB that every output, and every part of one, is to have
    before       the SQNR in dB of the worst of them without these 16 bits, measured in integers
    after        the same with them: measured, or, of a proposal, expected
    dtypes       the dtype of each by name, the most helpful first; of a weight it is the layer's name with ".weight"
    cost         the share of time that they add on the chip, by the target's peak rates; of bit operations where it has none
    sensitivity  the SQNR with each tensor alone quantized, estimated
    qconfig      the mapping that has their rules
    """

    goal: float
    before: float
    after: float
    dtypes: Mapping[str, str]
    cost: float
    sensitivity: Sensitivity
    qconfig: QConfigMapping

    def __str__(self) -> str:
        alone = [self.sensitivity[name] for name in self.dtypes]
        names = [f"{each.name} ({decibels(each.loss[each.dtype]):.1f} dB alone)" for each in alone[:NAMED]]
        more = f" and {len(alone) - NAMED} more" * (len(alone) > NAMED)
        what = f"16 bits for {', '.join(names)}{more}, {self.cost:.1%} more time by estimate: " * bool(names)
        beyond = "; 16 bits reach no more within the target's limits" * (self.after < self.goal)
        return f"{what}{self.before:.1f} dB become {self.after:.1f}, and {self.goal:.1f} are asked for{beyond}"


def require_wide(target: Target, options: Options) -> None:
    """Raise ConfigurationError where the target has no 16 bits, or several ranks would each choose by samples of their own."""
    backends.require_dtypes(target, [(Rule("option", "accuracy"), QConfig(ActivationConfig("int16")))])
    ranks.require_alone(options)


def widen(work: Work, goal: float) -> tuple[fx.GraphModule, Widened]:
    """Prepare the model with the least costly dtypes that reach an accuracy in dB, or come nearest; return it and the dtypes."""
    plan, allowed = Widening(work.prepared, work.samples, work.options), 10 ** (-goal / 10)
    after, share, dtypes = plan.before, 1.0, dict[str, str]()
    best = after, work.prepared, work.base, dtypes
    for raised in range(1 + RAISES):
        share *= MARGIN * allowed / after if raised < RAISES else 0.0  # the last time all that is felt
        if after <= allowed or dtypes == (dtypes := plan.choose(share)):
            break
        mapping = plan.choices.mapping(work.base, dtypes)
        prepared = work.with_mapping(mapping)
        after = plan.noise(prepared)
        best = min(best, (after, prepared, mapping, dtypes), key=itemgetter(0))
    after, prepared, mapping, dtypes = best
    widened = replace(plan.proposed(goal, dtypes), after=decibels(after), qconfig=mapping)
    (logger.warning if after > allowed else logger.info)("%s", widened)
    return prepared, widened


class Widening:
    """Gains and costs of 16 bits for single tensors and weights of a calibrated prepared model.

    before  the noise to signal ratio of the worst part of the outputs, in integers
    gains   by name the dtype of 16 bits, and how much lower it makes the noise, by estimate, the most first
    """

    def __init__(self, prepared: fx.GraphModule, samples: list[list[Any]], options: Options) -> None:
        chunks = cut(prepared, samples, CHUNK).chunks[:HELD_OUT_OF]
        own = replace(options, widths=(16,), measured=False, checkpoint=None)
        self.choices, self.judge = Choices(prepared, own.widths), reference_of(prepared, chunks)
        self.before, self.sensitivity = self.noise(prepared), find(prepared, chunks, own, show_progress=False)
        self.total, self.gains = sum(each.loss[each.dtype] for each in self.sensitivity.tensors), self.sensitivity.gains(16)
        self.speed = prepared.meta["target"].roofline
        self.costs = {name: self.cost({name: dtype}) for name, (dtype, _) in self.gains.items()}

    def noise(self, prepared: fx.GraphModule) -> float:
        """Return the noise to signal ratio of the worst part of the outputs of the model, prepared with any dtypes, in integers."""
        return max(self.judge.noise(partial(outputs_of, prepared, state=State.VALIDATE)).floored)

    def cost(self, dtypes: Mapping[str, str]) -> float:
        """Estimate the share of time that dtypes add, by the target's peak rates; without rates, the share of bit operations."""
        wide, now = ([*costs(self.choices, each, self.speed).values()][-1] for each in (dtypes, {}))  # latency is last, where it is there
        return wide / now - 1 if now else 0.0

    def choose(self, share: float) -> dict[str, str]:
        """Return the dtypes of the least costly tensors and weights with which at most this share of the noise is left, by estimate."""
        left, allowed, names = self.total, share * self.total, dict[str, float]()
        for name, (_, gain) in sorted(self.gains.items(), key=lambda item: item[1][1] / (self.costs[item[0]] + 1e-9), reverse=True):
            if left > allowed:
                names[name], left = gain, left - gain
        for name in sorted(names, key=self.costs.__getitem__, reverse=True):  # those that later ones made superfluous
            if left + names[name] <= allowed:
                left += names.pop(name)
        least = FELT * left if left > allowed else 0.0  # out of reach: those that are not felt stay as they are
        return {name: dtype for name, (dtype, _) in self.gains.items() if names.get(name, -1.0) >= least}

    def proposed(self, goal: float, dtypes: Mapping[str, str] | None = None) -> Widened:
        """Return dtypes, by default what an accuracy in dB would need by estimate, with the accuracy to be expected."""
        chosen = self.choose(MARGIN * 10 ** (-goal / 10) / self.before) if dtypes is None else dtypes
        left = 1 - sum(self.gains[name][1] for name in chosen) / (self.total or 1.0)
        mapping = self.choices.mapping(QConfigMapping(), chosen)
        return Widened(goal, decibels(self.before), decibels(self.before * left), chosen, self.cost(chosen), self.sensitivity, mapping)
