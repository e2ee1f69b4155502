"""Horizon's profiling tools: comparison of two models, and the operators that were not fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import fxquant as fxq
from fxquant.compat.horizon.served.march import required
from fxquant.ir.graph import stage_of
from fxquant.support.arguments import FLAG, FOLDER, checked
from fxquant.support.files import write_file


@checked(print_tabulate=FLAG)
def check_unfused_operations(model: nn.Module, example_inputs: Any, print_tabulate: bool = True) -> Any:
    """Return a row for each batch norm, addition and relu of a model that is not fused into the layer before it, with the reason.

    A float model is prepared for the march that was set. The rows are printed unless `print_tabulate` is False.
    """
    prepared = isinstance(model, fx.GraphModule) and stage_of(model) == "PREPARED"
    rows = fxq.checks.not_fused(model if prepared else fxq.prepare(model, example_inputs, required("check_unfused_operations")))  # type: ignore[arg-type]
    if print_tabulate:
        print(rows)
    return rows


@checked()
def compare_weights(float_model: fx.GraphModule, qat_quantized_model: fx.GraphModule, *, out_dir: str | None = None) -> Any:
    """Return the difference of the weights of two prepared or integer models, a row each, worst first.

    out_dir   a folder for weight_comparison.txt
    """
    rows = fxq.checks.compare_weights(float_model, qat_quantized_model)
    if out_dir is not None:
        write_file(Path(out_dir) / "weight_comparison.txt", f"{rows}\n")
    return rows


@checked(out_dir=FOLDER.or_none("the working directory"))
def model_profiler(
    model1: nn.Module, model2: fx.GraphModule, example_inputs: Any, mode: Any = None, out_dir: str | None = None, kwargs_dict: Any = None
) -> Path:
    """Write profiler.html, the page of `fxquant.report`: the second model compared with the first. Return its path.

    `mode` and `kwargs_dict` have no effect: the kinds of the models are known, and everything is on one page.
    """
    batch = example_inputs if isinstance(example_inputs, torch.Tensor | dict) else tuple(example_inputs)
    return fxq.report(model2, Path(out_dir or ".") / "profiler.html", [batch], reference=model1)
