"""Quantize a QuantStub by its rules, or remove it if it has neither a scale nor a rule: its readers then quantize their operand.

%q = quantize(%x)  (a stub)          →    %y = conv2d(%x, %w)          without a scale or a rule for the stub
%y = conv2d(%q, %w)

%q = quantize(%x)  (a stub)          →    %q = quantize(%x)            with its scale, in the dtype that the rules give it
%y = conv2d(%q, %w)                       %y = conv2d(%q, %w)
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxquant.ir.functional import is_stub
from fxquant.ir.graph import matched_rules, module_path, set_matched_rules, state_demand, stated_demand
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.passes.rewriting import bypass, decide, is_named
from fxquant.pipeline import Context
from fxquant.quantization.spec import Chosen


def settle(gm: fx.GraphModule, context: Context) -> int:
    """Turn QuantStubs with a fixed scale or a rule into quantize nodes, and remove the others."""
    changes = 0
    for node in list(gm.graph.nodes):
        if not is_stub(node):
            continue
        changes += 1
        (rules,) = matched_rules(node)
        set_matched_rules(node, tuple((rule, _of_output(chosen, context.target.default_activation)) for rule, chosen in rules))
        demanded, config = stated_demand(node), decide(node).config
        nearest = rules[0][0]
        # A rule is about this stub alone where it names the stub, its class or its node, or stands on it.
        own = is_named(node) or (nearest.kind in ("name", "attribute") and nearest.key == module_path(node)) or nearest.kind == "pattern"
        if demanded is None and not (own and config is not None and not config.dynamic):
            operand = node.all_input_nodes[0]
            if operand.op == "placeholder" and not module_path(operand):
                operand.meta["module"] = module_path(node)  # whose quantize, if there is one, is this stub's
            context.say(f"%{node.name} marks where the integer part begins")
            bypass(node)
            continue
        if demanded is not None and config is not None and config.output.dtype is not None:
            if own and config.output.fixed_scale is not None:
                state_demand(node, None)  # what its rule gives is said of this stub alone, as its scale is, and later
            elif not ACTIVATION_TYPES[config.output.dtype].affine:
                state_demand(node, replace(demanded, dtype=config.output.dtype))
    return changes


def _of_output(chosen: Chosen, default: str) -> Chosen:
    """Return the config of a rule for a stub: a stub has only an output, and only a layer's sum can be a 32-bit output."""
    if chosen is None or chosen.dynamic:
        return chosen
    output = replace(chosen.output, dtype=default) if chosen.output.dtype == "int32" else chosen.output
    return replace(chosen, output=output, input=None)
