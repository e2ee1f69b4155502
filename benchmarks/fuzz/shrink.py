"""A case that fails becomes the smallest one found that fails in the same way.

Every candidate is a little smaller than the case it comes from; the first that still fails takes its place. A candidate that
PyTorch refuses does not fail, so what is tried need not be known to fit.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from benchmarks.fuzz import build
from benchmarks.fuzz.check import CHECKS, FAILED, Outcome, run
from benchmarks.fuzz.generate import DATA, OPTIMIZERS, Case, Config, Input, Rule, Step, pruned
from benchmarks.fuzz.spellings import by_operator

SIMPLE_TARGETS = ("bayes-e", "nash-e")  # one for each way to requantize; the first is the default


def shrink(case: Case, outcome: Outcome, seconds: float = 60, run: Callable[[Case], Outcome] = run) -> tuple[Case, Outcome]:
    """Shrink a failing case for a number of seconds; return the smallest case that fails in the same way, and its outcome."""
    deadline = time.monotonic() + seconds
    tried: set[str] = {_key(case)}
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(case):
            if time.monotonic() > deadline:
                return case, outcome
            key = _key(candidate)
            if key in tried:
                continue
            tried.add(key)
            result = run(candidate)
            if result.kind == FAILED and result.like == outcome.like:
                case, outcome, smaller = candidate, result, True
                break
    return case, outcome


def _key(case: Case) -> str:
    return repr([getattr(case, entry.name) for entry in fields(case)])


def candidates(case: Case) -> Iterator[Case]:
    """Yield smaller cases, the ones that lose most first."""
    for one in (_checks, _outputs, _steps, _setting, _rules, _targets, _batches, _spellings, _options, _inputs):
        for candidate in one(case):
            yield pruned(candidate)


def _checks(case: Case) -> Iterator[Case]:
    """One check, or none."""
    if case.checks:
        yield replace(case, checks=())
    if len(case.checks) > 1:
        for check in CHECKS:
            if check in case.checks:
                yield replace(case, checks=(check,))


def _outputs(case: Case) -> Iterator[Case]:
    if len(case.outputs) > 1:
        for output in case.outputs:
            yield replace(case, outputs=(output,))
        for output in case.outputs:
            yield replace(case, outputs=tuple(other for other in case.outputs if other != output))


def _steps(case: Case) -> Iterator[Case]:
    """The model ends earlier, begins later, or leaves a step out."""
    shapes = _shapes(case)
    for step in case.steps:
        yield replace(case, outputs=(step.name,))
    for step in reversed(case.steps):
        if step.name in case.outputs and len(case.outputs) == 1:
            continue
        sizes = shapes.get(step.name, ())
        if len(sizes) > 1 and sizes[0] == case.batches[0]:
            name = f"x{1 + max(int(entry.name[1:]) for entry in case.inputs)}"
            begun = _renamed(replace(case, inputs=(*case.inputs, Input(name, sizes[1:]))), step, name)
            if len(pruned(begun).steps) < len(case.steps) - 1 or len(pruned(begun).inputs) <= len(case.inputs):
                yield begun
    for step in reversed(case.steps):
        for operand in dict.fromkeys(step.operands):
            if not (step.name in case.outputs and operand.startswith("x")):
                yield _renamed(case, step, operand)


def _renamed(case: Case, removed: Step, name: str) -> Case:
    """Without a step; another value takes the place of its result."""
    steps = tuple(
        replace(step, operands=tuple(name if operand == removed.name else operand for operand in step.operands))
        for step in case.steps
        if step is not removed
    )
    heir = next((step for step in steps if step.shares == removed.name), None)  # makes the layer itself, and the others share that
    if heir is not None:
        steps = tuple(replace(step, shares=None if step is heir else heir.name) if step.shares == removed.name else step for step in steps)
    return replace(case, steps=steps, outputs=tuple(dict.fromkeys(name if output == removed.name else output for output in case.outputs)))


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    player = build.Player(case.seed, case.inputs, case.batches[0])
    try:
        return {step.name: tuple(player.play(step).shape) for step in case.steps}
    except Exception:
        return {}


def _setting(case: Case) -> Iterator[Case]:
    """Yield cases with simpler settings: no optimizer, live batch norms, plain outputs, the default configuration."""
    if case.optimizer is not None:
        yield replace(case, optimizer=None)
        if case.optimizer != OPTIMIZERS[0]:
            yield replace(case, optimizer=OPTIMIZERS[0])
    if case.batch_norm != "live":
        yield replace(case, batch_norm="live")
    if case.named_outputs:
        yield replace(case, named_outputs=False)
    if case.config != Config():
        yield replace(case, config=Config())
        yield from (replace(case, config=config) for config in _configs(case.config))


def _rules(case: Case) -> Iterator[Case]:
    for index, rule in enumerate(case.rules):
        others = case.rules[:index], case.rules[index + 1 :]
        yield replace(case, rules=(*others[0], *others[1]))
        if rule.config is not None:
            for config in _configs(rule.config):
                yield replace(case, rules=(*others[0], Rule(rule.method, rule.where, config), *others[1]))


def _configs(config: Config) -> Iterator[Config]:
    """The configuration without one of its settings."""
    for part in ("output", "weight", "input"):
        settings = getattr(config, part)
        for name in settings:
            yield replace(config, **{part: {key: value for key, value in settings.items() if key != name}})


def _targets(case: Case) -> Iterator[Case]:
    position = SIMPLE_TARGETS.index(case.target) if case.target in SIMPLE_TARGETS else len(SIMPLE_TARGETS)
    yield from (replace(case, target=target) for target in SIMPLE_TARGETS[:position])


def _batches(case: Case) -> Iterator[Case]:
    if len(case.batches) > 1:
        yield from (replace(case, batches=(size,)) for size in case.batches)
        yield from (replace(case, batches=case.batches[:index] + case.batches[index + 1 :]) for index in range(len(case.batches)))
    for index, size in enumerate(case.batches):
        if size > 1:
            yield replace(case, batches=(*case.batches[:index], 1, *case.batches[index + 1 :]))


def _spellings(case: Case) -> Iterator[Case]:
    """Yield copies of the case in which one step has a layer of its own, or an earlier call form of its operator, with as many operands."""
    table = by_operator()
    for index, step in enumerate(case.steps):
        if step.shares is not None:
            yield _replaced(case, index, replace(step, shares=None))
        alike = table[step.spelling.operator.format(rank=1)]
        for spelling in alike[: alike.index(step.spelling)][:2]:
            if spelling.operands == step.spelling.operands:
                options = {key: values[0] for key, values in spelling.options.items()}
                yield _replaced(case, index, replace(step, spelling=spelling, options={**options, **_common(step, options)}))


def _common(step: Step, options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.options.items() if key in options}


def _options(case: Case) -> Iterator[Case]:
    """Every option as simple as it can be, then a little simpler; and operands that are one value."""
    for index, step in enumerate(case.steps):
        for key, value in step.options.items():
            simpler = step.spelling.options[key]
            for other in dict.fromkeys(simpler[: simpler.index(value)]):
                yield _replaced(case, index, replace(step, options={**step.options, key: other}))
        if len(set(step.operands)) > 1:
            yield _replaced(case, index, replace(step, operands=step.operands[:1] * len(step.operands)))


def _replaced(case: Case, index: int, step: Step) -> Case:
    sharing = tuple(replace(other, options=step.options) if other.shares == step.name else other for other in case.steps)
    return replace(case, steps=(*sharing[:index], step, *sharing[index + 1 :]))


def _inputs(case: Case) -> Iterator[Case]:
    """Smaller and plainer inputs; several at once where they are alike."""
    for entry in case.inputs:
        for data in DATA[: DATA.index(entry.data)][:1]:
            yield _resized(case, (entry,), data=data)
    alike = tuple(entry for entry in case.inputs if entry.sizes == case.inputs[0].sizes)
    for group in (alike, *((entry,) for entry in case.inputs if len(alike) > 1 or entry not in alike)):
        sizes = group[0].sizes
        for position, size in enumerate(sizes):
            for smaller in sorted({1, size // 2, size - 1} & set(range(1, size))):
                yield _resized(case, group, sizes=(*sizes[:position], smaller, *sizes[position + 1 :]))


def _resized(case: Case, group: tuple[Input, ...], **changes: Any) -> Case:
    return replace(case, inputs=tuple(replace(entry, **changes) if entry in group else entry for entry in case.inputs))
