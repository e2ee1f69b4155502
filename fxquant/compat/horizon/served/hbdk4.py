"""Horizon's compiler package for nash over fxquant's integer graphs: export, convert, save, load, statistics, compile.

A module is a prepared model ("qat.bc") or an integer one ("quantized.bc"). Files are fxquant's own, whatever their ending.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.calibration.calibration import require_prepared
from fxquant.compat.horizon.served.exporting import compile_model, perf_model, require_march
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import fact, is_deployed
from fxquant.ir.integer import qparams
from fxquant.support import logger
from fxquant.support.arguments import FILE, PATH, checked

FLOAT, INTEGER = "float", "integer"  # what a module takes and returns, as `io` of `fxquant.export_onnx`
NAME, IO = "hbdk4.name", "hbdk4.io"  # in the file of a module
IO_OPS = frozenset({"quantize", "dequantize", "cast", "transpose", "reshape"})  # that may be named


class Function:
    """The one function of a module: its model, and the names of its inputs and outputs."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.name = module.name

    @property
    def inputs(self) -> list[str]:
        return [str(node.target) for node in self._module.model.graph.nodes if node.op == "placeholder"]

    def remove_io_op(self, op_types: Any = None, op_names: Any = None) -> None:
        """Make the module, and its files, take and return integers: the quantize of inputs and the dequantize of outputs are removed.

        op_types  "Quantize" and "Dequantize"; None means both. Transposes, casts and reshapes at the ends may be named as well, and
                  have no effect: a graph has only those that the user wrote

        Raises ConfigurationError for only one of the two, for other types, for names, and for a module of a prepared model.
        """
        named = {str(name).lower() for name in op_types or ("quantize", "dequantize")}
        if op_names or not named >= {"quantize", "dequantize"} or named - IO_OPS:
            raise ConfigurationError(
                f"remove_io_op({'op_names=…' if op_names else f'op_types={op_types!r}'}) cannot be done",
                because="a file has float tensors at both ends, or integers at both",
                remedy="pass op_types=['Quantize', 'Dequantize'], or leave it out",
            )
        if not is_deployed(self._module.model):
            raise ConfigurationError(
                "the ends of a prepared model cannot be left out",
                because="it computes in float, on the grids of the integers",
                remedy="call convert(module, march) first",
            )
        self._module.io = INTEGER

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("insert_", "register_")):
            raise ConfigurationError(
                f"{name} cannot be done",
                because="graphs are not edited after they were made",
                remedy="insert fxq.nn.Nv12ToYuv444, fxq.nn.YuvToRgb or a permutation before the model, and prepare both together",
            )
        raise AttributeError(name)


class Module:
    """A model between two steps of the compiler: prepared, or integer. A call computes the model.

    io   "float", or "integer" after `remove_io_op`: calls and files then take and return integers
    """

    def __init__(self, model: fx.GraphModule, name: str = "forward", io: str = FLOAT) -> None:
        self.model, self.name, self.io = model, name, io

    @property
    def functions(self) -> list[Function]:
        return [Function(self)]

    def __getitem__(self, index: int) -> Function:
        return self.functions[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs) if self.io == FLOAT else _on_integers(self.model, args)


def _on_integers(model: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    """Return the integers of an integer model's outputs, given those of its inputs; values that stay in float are unchanged."""
    inputs = model.graph.find_nodes(op="placeholder")
    given = [_real(node, value) for node, value in zip(inputs, args, strict=True)]
    (held,) = fxq.inspect.record(model, [given], ("quantized", "accumulators"))
    (output,) = model.graph.find_nodes(op="output")
    nodes, _ = pytree.tree_flatten(output.args[0])
    values, form = pytree.tree_flatten(model(*given))
    return pytree.tree_unflatten([_integers(node, value, held) for node, value in zip(nodes, values, strict=True)], form)


def _real(node: fx.Node, value: Any) -> Any:
    """Return the float value of an input's integers. Quantizing restores them: the product with the scale is off by at most 2^-24."""
    described = next((known for user in node.users if (known := qparams(user)) is not None), None)
    if described is None or not isinstance(value, Tensor) or value.is_floating_point():
        return value
    return (value - described.zero_point) * described.scale


def _integers(node: Any, value: Any, held: Any) -> Any:
    """Return the integers that an output was dequantized from, or the output itself."""
    if not isinstance(node, fx.Node) or node.target is not fxq.primitives.dequantize:
        return value
    (made, *_) = node.all_input_nodes
    return held[made.name].to(fact(made).dtype)


@checked()
def export(model: nn.Module, example_inputs: Any = None, *, name: str = "forward", input_names: Any = None, output_names: Any = None,
           input_descs: Any = None, output_descs: Any = None, native_pytree: bool = True) -> Module:  # fmt: skip
    """Return a prepared model as a module of the compiler, with the inputs it was prepared with; other arguments but `name` are ignored.

    Raises ConfigurationError for a model that was not prepared.
    """
    require_prepared(model)
    return Module(model, name)  # type: ignore[arg-type]


@checked()
def pre_export(model: fx.GraphModule, inplace: bool = False) -> fx.GraphModule:
    """Return the integer graph: tables in it are bit-equal to the prepared model in VALIDATION."""
    return integer_of(model, "pre_export")


@checked()
def convert(m: Any, march: Any = None, advice: Any = None, **options: Any) -> Module:
    """Return a module of integers. Raises ConfigurationError for another march than the one that the model was prepared for."""
    made = _module(m, "convert")
    require_march(made.model, _march(march), "convert")
    return Module(integer_of(made.model, "convert"), made.name, made.io)


def _march(march: Any) -> str | None:
    return None if march is None else str(getattr(march, "value", march)).rpartition(".")[2].replace("_", "-")


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
    """Write a module with its name and its `io`, whatever the ending: a file that `load` and `fxq.load` read."""
    made = _module(m, "save")
    meta = made.model.meta
    meta.update({NAME: made.name, IO: made.io})
    try:
        fxq.save(made.model, path)
    finally:
        del meta[NAME], meta[IO]


@checked(path=PATH)
def load(path: Any) -> Module:
    """Load a module that `save` wrote."""
    model = fxq.load(path)
    return Module(model, model.meta.pop(NAME, "forward"), model.meta.pop(IO, FLOAT))


def statistics(m: Any) -> dict[str, dict[str, int]]:
    """Count the operators on the march by name, and those on the host ("hbtl"); the counts are also printed."""
    counts: dict[str, Counter[str]] = {"bpu": Counter(), "hbtl": Counter()}
    for layer in fxq.inspect.layers(_module(m, "statistics").model):
        if not layer.boundary:
            counts["hbtl" if layer.device == "host" else "bpu"][layer.operator] += 1
    found = {place: dict(each) for place, each in counts.items() if each}
    print(found)
    return found


@checked()
def compile(m: Any, path: Any, march: Any = None, opt: int = 2, jobs: int = 4, progress_bar: bool = False, **options: Any) -> int:
    """Compile with the vendor's hb_mapper, for the marches that it supports; return 0 on success.

    For nash, write the folder that hb_compile takes at `path` without its ending, and raise ConfigurationError: it has to be compiled
    where that tool is. Even after `remove_io_op` a compiled program takes and returns float values, as a line of the log reports.
    """
    made = _module(m, "compile")
    if made.io == INTEGER:
        logger.warning("compile: the program takes and returns float tensors; visualize writes an ONNX file of integers at both ends")
    return compile_model(made.model, None, os.fspath(path), _march(march), opt=f"O{min(opt, 3)}", progressbar=progress_bar)


@checked()
def hbm_perf(model: Any, output_dir: Any = ".", **options: Any) -> Any:
    """Return the cost of a module, or of a compiled file. See `perf_model`. Raises ConfigurationError for a file alone."""
    if isinstance(model, str | Path):
        raise ConfigurationError(
            "the costs of a file cannot be estimated without its model",
            because="layers are named by the model's graph",
            remedy="call fxq.estimate(integer, compiled=path)",
        )
    return perf_model(_module(model, "hbm_perf").model, None, out_dir=output_dir)


@checked()
def visualize(m: Any, onnx_file: Any = None, use_netron: bool = False) -> Path:
    """Write an integer module as ONNX, which Netron draws and onnxruntime runs; return the path.

    After `remove_io_op` the file takes and returns integers.
    """
    made = _module(m, "visualize")
    return fxq.export_onnx(integer_of(made.model, "visualize"), onnx_file or "model.onnx", io=made.io)


def get_hbir_input_flattener(m: Any) -> Any:
    """Return a function that flattens a model's inputs to their tensors, in order."""
    return lambda inputs: [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def get_hbir_output_unflattener(m: Any) -> Any:
    """Return the identity function: a model's outputs are nested as forward returns them."""
    return lambda outputs: outputs


class March:
    """The marches by the compiler package's names."""

    bayes, nash_b, nash_e, nash_m, nash_p, nash_h = "bayes", "nash-b", "nash-e", "nash-m", "nash-p", "nash-h"
