"""The best dtypes under a budget, exactly: an integer program.

The variables x choose the dtypes, and z are their products:

    minimise    Σ loss[c, d] x[c, d]                        x[c, d] ∈ {0, 1}: choice c has dtype d
    such that   Σ_d x[c, d] = 1                             for each choice
                Σ cost z ≤ limit                            for each limit of the budget
                Σ_e z[c, d, c', e] = x[c, d],  and alike    for each pair of choices whose product costs: z = x x' is exact
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fxquant.errors import ConfigurationError
from fxquant.search.budget import Budget, cost_terms, costs
from fxquant.tuning.choices import Choices, bits

RESOLUTION = 1e6  # the largest loss in units of the solver, whose absolute tolerance is 1e-6


def optimum(choices: Choices, losses: Mapping[str, Mapping[str, float]], budget: Budget) -> dict[str, str]:
    """The dtype of every choice: the least sum of losses within the budget; what has no losses keeps its dtype.

    Raises ConfigurationError if nothing is within the budget, or SciPy, which solves it (with HiGHS), is missing.
    """
    milp, constraint, bounds, matrix = _solver()
    keys = [(name, dtype) for name, choice in choices.items() for dtype in (choice.dtypes if name in losses else (choice.dtype,))]
    column = {key: index for index, key in enumerate(keys)}
    objective = [losses.get(name, {}).get(dtype, 0.0) for name, dtype in keys]
    rows: list[dict[int, float]] = []
    lowest: list[float] = []
    highest: list[float] = []

    def require(row: dict[int, float], low: float, high: float) -> None:
        rows.append(row)
        lowest.append(low)
        highest.append(high)

    for name in choices:
        require({index: 1.0 for key, index in column.items() if key[0] == name}, 1.0, 1.0)
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
        require(row, -np.inf, 1 - constant / most)
    for left, right in {(left, right): None for left, _, right, _ in pairs}:
        for own in (0, 2):
            for name, dtype in keys:
                if name != (left, right)[own // 2]:
                    continue
                summed = {
                    index: 1.0
                    for key, index in pairs.items()
                    if (key[0], key[2]) == (left, right) and (key[own], key[own + 1]) == (name, dtype)
                }
                require({**summed, column[name, dtype]: -1.0}, 0.0, 0.0)
    objective += [0.0] * len(pairs)
    unit = max(map(abs, objective), default=0.0) or 1.0
    shape = len(rows), len(objective)
    places = [(index, place, value) for index, row in enumerate(rows) for place, value in row.items()]
    sums = matrix(([value for *_, value in places], ([row for row, *_ in places], [place for _, place, _ in places])), shape=shape)
    found = milp(
        np.array(objective) * (RESOLUTION / unit),
        integrality=np.array([1] * len(keys) + [0] * len(pairs)),
        bounds=bounds(0, 1),
        constraints=constraint(sums, lowest, highest),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise _beyond(choices, losses, budget, str(found.message))
    return {name: dtype for (name, dtype), index in column.items() if found.x[index] > 0.5}


def _column(key: tuple[str, ...], column: Mapping[tuple[str, str], int], pairs: dict[Any, int]) -> int | None:
    """The variable that a cost is multiplied by; None where it is a constant, or one of a dtype that is not chosen."""
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


def _solver() -> Any:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ConfigurationError(
            "a search under a budget needs SciPy",
            because=f"its integer program is solved by scipy.optimize.milp: {error}",
            remedy='pip install "fxquant[tuning]"',
        ) from None
    return milp, LinearConstraint, Bounds, csr_array


def _beyond(choices: Choices, losses: Mapping[str, Any], budget: Budget, message: str) -> ConfigurationError:
    least = {name: min(choice.dtypes, key=bits) if name in losses else choice.dtype for name, choice in choices.items()}
    there = costs(choices, least, budget.speed)
    limits = "; ".join(f"{name} is {there[name]:.6g} at least, and {most:.6g} is allowed" for name, most in budget.limits.items())
    return ConfigurationError(
        "no choice of dtypes is within the budget",
        because=f"{limits} ({message})",
        remedy="raise the limit, let more widths be chosen, or take a target with narrower dtypes",
    )
