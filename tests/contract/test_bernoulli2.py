"""bernoulli2, whose rules differ most from the other targets': the contract for every spelling of every operator."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxquant as fxq
from tests.ops.test_operators import ROWS, Pack, Sample, covering, inputs_of, kept_integer
from tests.shared import contract

PACKS = [row.values[0] for row in ROWS if row.values[1:] == ("bayes-e", "int8", "int8")]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("samples", PACKS, ids=range(len(PACKS)))
def test_every_spelling_holds_the_contract(samples: list[Sample], tmp_path: Path) -> None:
    inputs, others = (tuple(x for sample in samples for x in inputs_of(sample, *size)) for size in ((5, 0), (1, 1)))
    batches = [tuple(factor * x for x in inputs) for factor in (1.1, 0.9)]
    prepared, integer = contract.compiled(Pack(samples).eval(), batches, "bernoulli2", kept_integer(covering()))
    contract.assert_alive(integer, *inputs)
    contract.assert_validate_is_integer(prepared, integer, *inputs)
    if "none is left in float" in fxq.explain(prepared):
        contract.assert_integer_is_onnx(integer, tmp_path / "model.onnx", [inputs, others])
    else:  # bernoulli2 has no int16, of which composites are made: runtimes round what is in float in their own ways
        assert fxq.verify(integer, fxq.export_onnx(integer, tmp_path / "model.onnx"), [inputs, others], show_progress=False)
    contract.assert_train_is_validate(prepared, *inputs)
