"""The names of Horizon's compiler package for nash, over fxquant's integer graphs: export, convert, save, load, statistics, compile.

A module of it is a prepared model ("qat.bc") or an integer one ("quantized.bc"). Files are fxquant's own, whatever their ending.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import fxquant as fxq
from fxquant import backends
from fxquant.arguments import FILE, PATH, checked
from fxquant.backends.horizon.formats import HB_MAPPER
from fxquant.compat.horizon.served.compiling import compile_model, perf_model
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.errors import ConfigurationError
from fxquant.quantization.calibration import require_prepared


class Function:
    """The one function of a module: its model, and the names of its inputs and outputs."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.name = module.name

    @property
    def inputs(self) -> list[str]:
        """Names of inputs."""
        return [str(node.target) for node in self._module.model.graph.nodes if node.op == "placeholder"]

    def remove_io_op(self, op_types: Any = None, op_names: Any = None) -> None:
        """Have files written with integer inputs and outputs: what quantizes the first and dequantizes the last is left out of them."""
        if op_names:
            raise ConfigurationError(
                "remove_io_op(op_names=…) cannot be done", because="quantize and dequantize are left out together", remedy="pass op_types"
            )
        self._module.io = "integer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("insert_", "register_")):
            raise ConfigurationError(
                f"{name} cannot be done",
                because="graphs are not edited after they were made",
                remedy="put fxq.nn.Nv12ToYuv444, fxq.nn.YuvToRgb or a permutation in front of the model, and prepare it with them",
            )
        raise AttributeError(name)


class Module:
    """A model between two steps of the compiler: prepared, or integer. Called, it computes what that does."""

    def __init__(self, model: fx.GraphModule, name: str = "forward") -> None:
        self.model, self.name, self.io = model, name, "float"

    @property
    def functions(self) -> list[Function]:
        """Its one function."""
        return [Function(self)]

    def __getitem__(self, index: int) -> Function:
        return self.functions[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


@checked()
def export(model: nn.Module, example_inputs: Any = None, *, name: str = "forward", input_names: Any = None, output_names: Any = None,
           input_descs: Any = None, output_descs: Any = None, native_pytree: bool = True) -> Module:  # fmt: skip
    """A prepared model as a module of the compiler. Its inputs are those it was prepared with; `name` alone of the others is kept.

    Raises ConfigurationError for a model that was not prepared.
    """
    require_prepared(model)
    return Module(model, name)  # type: ignore[arg-type]


@checked()
def pre_export(model: fx.GraphModule, inplace: bool = False) -> fx.GraphModule:
    """The integer graph: what a table computes is in it to the bit, as it is in the prepared model in VALIDATION."""
    return integer_of(model, "pre_export")


@checked()
def convert(m: Any, march: Any = None, advice: Any = None, **options: Any) -> Module:
    """A module of integers. Raises ConfigurationError for another march than the one that the model was prepared for."""
    made = _module(m, "convert")
    own = made.model.meta["target"]
    if march is not None and backends.get(_march(march)).march != own.march:
        raise ConfigurationError(
            f"the model cannot be converted for {march}",
            because=f"it was prepared for {own.name}, whose arithmetic is another",
            remedy=f"prepare it after set_march({str(march)!r})",
        )
    return Module(integer_of(made.model, "convert"), made.name)


def _march(march: Any) -> str:
    return str(getattr(march, "value", march)).rpartition(".")[2].replace("_", "-")


def _module(given: Any, called: str) -> Module:
    if isinstance(given, Module):
        return given
    if isinstance(given, fx.GraphModule):
        return Module(given)
    raise ConfigurationError(
        f"{called} was given a {type(given).__name__}",
        because="it takes what export, convert and load return, and models",
        remedy="call horizon_plugin_pytorch.quantization.hbdk4.export(model, example_inputs) first",
    )


@checked(path=FILE)
def save(m: Any, path: Any) -> None:
    """Write a module, whatever the ending: a file that `load` and `fxq.load` read."""
    fxq.save(_module(m, "save").model, path)


@checked(path=PATH)
def load(path: Any) -> Module:
    """What `save` wrote."""
    return Module(fxq.load(path))


def statistics(m: Any) -> dict[str, dict[str, int]]:
    """How many operators run on the march, by name, and how many on the host ("hbtl"); printed as well."""
    counts: dict[str, Counter[str]] = {"bpu": Counter(), "hbtl": Counter()}
    for layer in fxq.layers(_module(m, "statistics").model):
        if not layer.boundary:
            counts["hbtl" if layer.device == "host" else "bpu"][layer.operator] += 1
    found = {place: dict(each) for place, each in counts.items() if each}
    print(found)
    return found


@checked()
def compile(m: Any, path: Any, march: Any = None, opt: int = 2, jobs: int = 4, progress_bar: bool = False, **options: Any) -> int:
    """Compile with the vendor's hb_mapper, for the marches that it compiles for; 0 when it is done.

    Raises ConfigurationError for nash, whose compiler is not run here: the ONNX file of an integer model is what is verified.
    """
    made = _module(m, "compile")
    target = made.model.meta["target"]
    if target.name not in HB_MAPPER.marches:
        raise ConfigurationError(
            f"a model for {target.name} cannot be compiled here",
            because="the vendor's compiler for this march takes its own format alone, which is closed",
            remedy="write fxq.export_onnx(integer, 'model.onnx'), and verify it with fxq.verify; fxq.estimate says what it costs",
        )
    return compile_model(
        made.model, None, os.fspath(path), _march(march) if march else None, opt=f"O{min(opt, 3)}", progressbar=progress_bar
    )


@checked()
def hbm_perf(model: Any, output_dir: Any = ".", **options: Any) -> Any:
    """What a module, or a compiled file, costs. See `perf_model`. Raises ConfigurationError for a file alone."""
    if isinstance(model, str | Path):
        raise ConfigurationError(
            "the costs of a file alone cannot be had",
            because="layers are named by the model's graph",
            remedy="call fxq.estimate(integer, compiled=path)",
        )
    return perf_model(_module(model, "hbm_perf").model, None, out_dir=output_dir)


@checked()
def visualize(m: Any, onnx_file: Any = None, use_netron: bool = False) -> Path:
    """Write an integer module as ONNX, which Netron draws; returns the path."""
    made = _module(m, "visualize")
    return fxq.export_onnx(integer_of(made.model, "visualize"), onnx_file or "model.onnx")


def get_hbir_input_flattener(m: Any) -> Any:
    """A function from a model's inputs to their tensors, in order."""
    return lambda inputs: [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def get_hbir_output_unflattener(m: Any) -> Any:
    """A function from a model's outputs to themselves: they are nested as forward returns them."""
    return lambda outputs: outputs


class March:
    """The marches by the compiler package's names."""

    bayes, nash_b, nash_e, nash_m, nash_p, nash_h = "bayes", "nash-b", "nash-e", "nash-m", "nash-p", "nash-h"
