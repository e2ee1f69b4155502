"""Horizon's tools for inspecting and writing a model, as far as fxquant has the information that they show."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.compat.horizon.served.march import required
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import is_deployed, stage_of
from fxquant.support.arguments import checked
from fxquant.support.files import write_file


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one.flatten(), other.flatten(), 0))


def _kl(one: Tensor, other: Tensor) -> float:
    return float(F.kl_div(F.log_softmax(other.flatten(), 0), F.softmax(one.flatten(), 0), reduction="sum"))


def _sqnr(one: Tensor, other: Tensor) -> float:
    noise = float((one - other).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(float(one.square().sum()) / noise)


MEASURES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "Cosine": _cosine,
    "MSE": lambda one, other: float(F.mse_loss(other, one)),
    "L1": lambda one, other: float(F.l1_loss(other, one)),
    "KL": _kl,
    "SQNR": _sqnr,
}


class Similarity(NamedTuple):
    """A tensor of two models: the similarity of its values, and their largest difference."""

    name: str
    similarity: float
    scale: float | None
    atol: float


def _values(model: Any, inputs: Any, other: Any) -> dict[str, Tensor]:
    """Return the float values of a form's tensors by name; for a float model, the float results of the other form's operators."""
    state = None
    if not isinstance(model, fx.GraphModule) or stage_of(model) is None:
        target = getattr(other, "meta", {}).get("target")
        model, state = fxq.prepare(model, inputs, required("featuremap_similarity") if target is None else target), fxq.State.FLOAT
    return next(iter(fxq.record(model, [inputs], ["quantized", "outputs"], real=True, state=state)))


def _scales(model: Any) -> dict[str, float]:
    if not isinstance(model, fx.GraphModule) or stage_of(model) is None:
        return {}
    scales = {layer.name: layer.grid.scale for layer in fxq.layers(model) if layer.grid is not None}
    return {name: scale for name, scale in scales.items() if isinstance(scale, float)}


@checked()
def featuremap_similarity(
    model1: nn.Module,
    model2: nn.Module,
    inputs: Any,
    similarity_func: str | Callable[[Tensor, Tensor], float] = "Cosine",
    threshold: float | None = None,
    devices: Any = None,
    out_dir: str | None = None,
) -> list[Similarity]:
    """Compare the tensors that two forms of a model have in common, float, prepared or integer, in the order they are computed.

    similarity_func   "Cosine", "MSE", "L1", "KL", "SQNR" in dB, or a function of two tensors
    threshold         rows on its wrong side are marked with * in the file: below it for Cosine and SQNR, above it for others
    devices           has no effect: a model runs where its parameters are
    out_dir           a folder for similarity.txt
    """
    measure = MEASURES.get(similarity_func) if isinstance(similarity_func, str) else similarity_func
    if not callable(measure):
        raise ConfigurationError(
            f"similarity_func={similarity_func!r} is unknown",
            because=f"it is one of {', '.join(MEASURES)}, or a function",
            remedy="pass one",
        )
    first, second = _values(model1, inputs, model2), _values(model2, inputs, model1)
    scales = {**_scales(model1), **_scales(model2)}
    rows = []
    for name, one in first.items():
        if name in second and one.shape == second[name].shape and one.numel():
            mine, theirs = one.detach().float(), second[name].detach().float()
            rows.append(Similarity(name, measure(mine, theirs), scales.get(name), float((mine - theirs).abs().max())))
    if out_dir is not None:
        _write(out_dir, "similarity.txt", _table(rows, threshold, similarity_func in ("Cosine", "SQNR")))
    return rows


def _table(rows: list[Similarity], threshold: float | None, higher_is_better: bool) -> str:
    marked = [threshold is not None and (row.similarity < threshold if higher_is_better else row.similarity > threshold) for row in rows]
    lines = [
        f"{'*' if mark else ' '} {row.name:32} {row.similarity:12.6g} {'' if row.scale is None else f'{row.scale:.6g}':>12}"
        f" {row.atol:12.6g}"
        for row, mark in zip(rows, marked, strict=True)
    ]
    return "\n".join([f"  {'tensor':32} {'similarity':>12} {'scale':>12} {'atol':>12}", *lines, ""])


def _write(folder: str, name: str, text: str) -> None:
    write_file(Path(folder) / name, text)


@checked()
def check_qconfig(model: fx.GraphModule, example_inputs: Any = None, *, out_dir: str | None = None) -> str:
    """Return how every operator of a prepared or integer model is quantized, and which requests were not met; `fxquant.explain`.

    out_dir   a folder for qconfig_info.txt
    """
    text = fxq.explain(model)
    if out_dir is not None:
        _write(out_dir, "qconfig_info.txt", text)
    return text


@checked()
def check_deploy_device(model: fx.GraphModule) -> dict[str, str]:
    """Return where every operator of a prepared or integer model runs: the march, or "host"."""
    return {layer.name: layer.device for layer in fxq.layers(model)}


@checked()
def get_module_called_count(model: nn.Module, example_inputs: Any, check_leaf_module: Any = None) -> dict[str, int]:
    """Count the calls of each module without children, or that `check_leaf_module(module)` selects: 0 unused, above 1 shared."""
    counts: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        if check_leaf_module(module) if check_leaf_module is not None else not list(module.children()):
            counts[name] = 0

            def count(*_: Any, name: str = name) -> None:
                counts[name] += 1

            hooks.append(module.register_forward_hook(count))
    try:
        with torch.no_grad():
            model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


@checked()
def check_model(
    module: Any,
    example_inputs: Any,
    march: str | None = None,
    input_source: Any = "ddr",
    advice: int | None = None,
    check_quanti_param: bool = True,
) -> int:
    """Return 0 if a float or prepared model meets all limits of the march without float operators, otherwise the number of findings.

    An integer model is compiled instead, to check it with the vendor's compiler itself: 0, or 1 if it refuses. Findings and
    refusals are printed. The other arguments have no effect. Raises ConfigurationError for an integer model without the tool.
    """
    if isinstance(module, torch.jit.ScriptModule):
        module = integer_of(module, "check_model")
    if isinstance(example_inputs, list):
        example_inputs = tuple(example_inputs)
    if isinstance(module, fx.GraphModule) and is_deployed(module):
        with tempfile.TemporaryDirectory() as folder:
            try:
                fxq.compile_horizon(fxq.export_horizon(module, folder), show_progress=False)
            except (fxq.ExportError, fxq.CompilationError) as error:
                print(error)
                return 1
        return 0
    findings = fxq.check(module, example_inputs, required("check_model") if march is None else march)
    if findings:
        return 0
    print(findings)
    return len(findings)
