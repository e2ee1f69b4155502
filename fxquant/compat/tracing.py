"""Tracing for the functions of other toolkits: with what a model computes only in train mode, and at any batch size, if these can be."""

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

    dynamic_shapes   as `fxquant.trace` takes it; None: any batch size, or with a warning that of the example, if forward needs that
    training_branch  whether to keep what forward computes only in train mode; None: if it can be traced, otherwise with a warning
    """

    def trace(branch: bool) -> fx.GraphModule:
        try:
            return fxq.trace(model, example_inputs, dynamic_shapes, leaf=leaf, training_branch=branch)
        except fxq.TraceError as error:
            if dynamic_shapes is not None:
                raise
            try:
                fixed = fxq.trace(model, example_inputs, {}, leaf=leaf, training_branch=branch)
            except fxq.TraceError:
                raise error from None
            logger.warning("%s: the batch size is fixed to the example's, since forward cannot be traced at another\n%s", called, error)
            return fixed

    if training_branch is False:
        return trace(False)
    try:
        return trace(True)
    except fxq.TraceError as error:
        if training_branch:
            raise
        without = trace(False)
        logger.warning("%s: what forward does only in train mode is left out, since it cannot be traced\n%s", called, error)
        return without
