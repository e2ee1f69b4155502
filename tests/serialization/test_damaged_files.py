"""Damaged configs and ONNX files: an error of our kind, or what fxquant can read; saved models are in test_serialization.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import fxquant as fxq
from benchmarks.files.check import check, compiled
from fxquant.ir.integer import operation, set_operation


def test_an_operator_that_nobody_knows_is_told_without_its_cost(tmp_path: Path) -> None:
    """As a function of the user's that another process has declared, or a damaged name."""
    loaded = fxq.load(fxq.save(compiled()[0].integer, tmp_path / "integer.fxq"))
    head = next(node for node in loaded.graph.nodes if (found := operation(node)) is not None and found.name == "linear")
    set_operation(head, replace(operation(head), name="undeclared"))
    layer = next(layer for layer in fxq.inspect.layers(loaded) if layer.name == head.name)
    assert (layer.operator, layer.macs) == ("undeclared", 0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("kind", "mutations"), [("qconfig", 120), ("onnx", 16), ("manifest", 120), ("data-npy", 200)])
def test_damage_is_an_error_and_nothing_else(kind: str, mutations: int, tmp_path: Path) -> None:
    found = check(kind, range(mutations), tmp_path, limit_memory=False)
    assert not [outcome for outcome in found if outcome.result not in ("refused", "read")]
    results = Counter(outcome.result for outcome in found)
    assert results["refused"] > mutations / 4  # the damage is seen
    assert results["read"] > 0  # and is not all there is
