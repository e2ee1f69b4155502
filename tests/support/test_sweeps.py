"""Sweeps: which of their cases are in `make test`, and which in the nightly lane."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import further_cases


class Item(SimpleNamespace):
    """A case, as far as the choice reads it."""

    __hash__ = object.__hash__


TARGETS, DTYPES, SIZES = ("bayes-e", "nash-e", "x86"), ("int8", "int16"), (1, 2, 3, 4)


def cases(*numbers: int, quick: str = "") -> list[Any]:
    """Items as pytest collects them, of a test over targets, dtypes and sizes."""
    marks = {"sweep": SimpleNamespace(args=numbers)}
    return [
        Item(
            name=(name := f"test[{target}-{dtype}-{size}]"),
            callspec=SimpleNamespace(params={"target": target, "dtype": dtype, "size": size}),
            get_closest_marker=(marks | ({"quick": True} if name == quick else {})).get,
        )
        for target, dtype, size in itertools.product(TARGETS, DTYPES, SIZES)
    ]


def chosen(all_cases: list[Any]) -> list[Any]:
    further = further_cases(all_cases)
    return [item for item in all_cases if item not in further]


def test_each_value_of_each_parameter_is_in_a_case_of_make_test() -> None:
    result = chosen(cases())
    assert len(result) == len(SIZES)
    for name, values in (("target", TARGETS), ("dtype", DTYPES), ("size", SIZES)):
        assert {item.callspec.params[name] for item in result} == set(values)


def test_the_choice_does_not_depend_on_the_order_and_has_the_quick_case() -> None:
    names = {item.name for item in chosen(cases())}
    assert {item.name for item in chosen(cases()[::-1])} == names
    quick = next(item.name for item in cases() if item.name not in names)
    assert quick in {item.name for item in chosen(cases(quick=quick))}


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_is_the_most_that_are_chosen(number: int) -> None:
    assert len(chosen(cases(number))) == number
