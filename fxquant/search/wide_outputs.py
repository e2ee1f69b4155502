"""High-precision outputs: layers whose sum the model returns leave it as it is, in 32 bits, instead of rounding it once more.

Such a layer is spared a requantization, and the output a rounding that nothing behind it could make up for.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import fx, nn

from fxquant.api import prepare
from fxquant.ir.parts import part
from fxquant.ops import operator_of
from fxquant.ops.core.boundary import DEQUANTIZE
from fxquant.prepared.nodes import quantized_operator
from fxquant.quantization.mapping import QConfigMapping, as_mapping
from fxquant.quantization.spec import QConfig
from fxquant.support.arguments import checked
from fxquant.target import Target
from fxquant.tuning.choices import ACTIVATION, Choice, Choices

logger = logging.getLogger("fxquant")
WIDE = "int32"


@checked()
def high_precision_outputs(
    model: nn.Module, example_inputs: Any, target: str | Target = "bayes-e", qconfig: QConfig | QConfigMapping | None = None
) -> QConfigMapping:
    """Return the qconfig with an int32 rule for each layer with weights whose result the model returns, and nothing else reads.

    A result that is reshaped, permuted or sliced before it is returned counts as well.

    Such an output is the layer's accumulator, with a scale for each channel, which is neither rounded to 8 bits nor clipped; it takes
    four bytes per element. A result whose scale is given keeps its grid, and so does one whose grid is shared. Without any such layer,
    a line is logged, and the mapping is that of the qconfig.

    The arguments are those of `prepare`, to which the result is passed; raises what `prepare` raises.
    """
    prepared = prepare(model, example_inputs, target, qconfig)
    mapping, wide = with_high_precision(prepared, as_mapping(qconfig))
    if not wide:
        logger.info("no output of this model is the sum of a layer: the qconfig has no rule more")
    return mapping


def with_high_precision(prepared: fx.GraphModule, base: QConfigMapping) -> tuple[QConfigMapping, list[str]]:
    """Return the mapping that a model was prepared with, with rules for 32-bit outputs, and the names of the layers of these rules."""
    choices = Choices(prepared, ())
    has = WIDE in prepared.meta["target"].activations
    wide = [name for name, choice in choices.items() if has and _is_summed(prepared, choice, choices.nodes[choice.operators[0].name])]
    return choices.mapping(base, dict.fromkeys(wide, WIDE)), wide


def _is_summed(prepared: fx.GraphModule, choice: Choice, node: fx.Node) -> bool:
    """Whether a choice is a layer's sum, on a grid of its own, that the model returns, and nothing else reads."""
    alone = choice.kind == ACTIVATION and len(choice.operators) == 1 and part(node) is None
    return alone and choice.operators[0].operator.sums and _is_returned(prepared, node)


def _is_returned(prepared: fx.GraphModule, node: fx.Node) -> bool:
    """Whether all that reads a value is the model's output, directly or behind operators that move its elements."""
    return bool(node.users) and all(
        user.op == "output" or (_only_moves(prepared, user) and _is_returned(prepared, user)) for user in node.users
    )


def _only_moves(prepared: fx.GraphModule, node: fx.Node) -> bool:
    quantized = quantized_operator(prepared, node)
    operator = operator_of(node) if quantized is None else quantized.operator
    return operator is not None and (operator is DEQUANTIZE or operator.moves)
