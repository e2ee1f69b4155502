"""Tracing for the functions of other toolkits: with what a model computes only in train mode, if that can be traced."""

from __future__ import annotations

import logging
from typing import Any

from torch import fx, nn

import fxquant as fxq
from fxquant.support.arguments import FLAG

logger = logging.getLogger("fxquant")

BRANCH = FLAG.or_none("if it can be traced")


def traced(
    called: str, model: nn.Module, example_inputs: Any, dynamic_shapes: Any, training_branch: bool | None, leaf: Any = None
) -> fx.GraphModule:
    """Return the graph of a model.

    training_branch  whether to keep what forward computes only in train mode; None: if it can be traced, otherwise with a warning
    """
    if training_branch is False:
        return fxq.trace(model, example_inputs, dynamic_shapes, leaf=leaf)
    try:
        return fxq.trace(model, example_inputs, dynamic_shapes, leaf=leaf, training_branch=True)
    except fxq.TraceError as error:
        if training_branch:
            raise
        without = fxq.trace(model, example_inputs, dynamic_shapes, leaf=leaf)
        logger.warning("%s: what forward does only in train mode is left out, since it cannot be traced\n%s", called, error)
        return without
