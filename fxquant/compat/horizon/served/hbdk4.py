"""Horizon's compiler package for nash over fxquant's integer graphs: export, convert, save, load, statistics, compile.

A module is a prepared model ("qat.bc") or an integer one ("quantized.bc"). Files are fxquant's own, whatever their ending.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.accuracy.states import require_prepared
from fxquant.backends.horizon.export import HB_MAPPER
from fxquant.compat.common import foreign, refused
from fxquant.compat.horizon.served import NAMES
from fxquant.compat.horizon.served.exporting import compiled, perf_model, require_march
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.ir.graph import fact, is_deployed
from fxquant.ir.integer import qparams
from fxquant.support import logger
from fxquant.support.arguments import FILE, PATH, checked

takes = foreign("hbdk4")

FLOAT, INTEGER = "float", "integer"  # what a module takes and returns, as `io` of `fxquant.export_onnx`
META = "hbdk4"  # in the file of a module: its name, `io`, `image` and `unit`
IO_OPS = frozenset({"quantize", "dequantize", "cast", "transpose", "reshape"})  # that may be named
NHWC, YUV, NV12 = "NHWC", "yuv444", "nv12"  # formats of a module's image
ORDERS = {None: "", "yuvbt601full2rgb": "rgb", "yuvbt601full2bgr": "bgr"}  # modes of a preprocessing, and the model's order of channels
CENTRE = 128.0  # of a byte, whose int8 is the byte minus this


class Input:
    """An input of a module, which can take the image of a camera instead of (N, 3, H, W). Methods return the input that replaces it."""

    def __init__(self, module: Module, name: str) -> None:
        self._module, self.name = module, name

    def _to(self, called: str, before: str | None, step: str, image: str) -> Input:
        """Set the module's format of images. Raises ConfigurationError unless it was `before`, which `step` sets."""
        if self._module.image != before:
            remedy = f"call {step} first" if self._module.image is None else "export the model again, and insert each step once"
            raise refused("hbdk4.order", called=called, remedy=remedy)
        if len(self._module.model.graph.find_nodes(op="placeholder")) != 1:
            raise refused("hbdk4.several", called=called)
        self._module.image = image
        return self

    def insert_transpose(self, permutes: Any) -> Input:
        """Transpose an input, so that the module takes images (N, H, W, 3). Raises ConfigurationError for another order of dimensions."""
        if list(permutes) != [0, 3, 1, 2]:
            raise refused("hbdk4.insert_transpose", permutes=permutes)
        return self._to("insert_transpose", None, "insert_transpose", NHWC)

    def insert_image_preprocess(
        self, mode: str | None = None, divisor: float = 1, mean: Any = (0.0, 0.0, 0.0), std: Any = (1.0, 1.0, 1.0), is_signed: bool = True
    ) -> Input:
        """Make the module take bytes of Y, U and V (N, H, W, 3), each in 0…255, by `fxquant.with_camera`.

        mode       "yuvbt601full2rgb" or "yuvbt601full2bgr": the model takes these colours as (colour / divisor - mean) / std. None: the
                   model takes Y, U and V as (value / divisor - mean) / std, where mean is 128 / divisor
        mean, std  a number for each channel, in the model's order
        is_signed  has no effect

        Raises ConfigurationError for another mode, and for a model that `with_camera` does not take.
        """
        if mode not in ORDERS:
            raise refused("hbdk4.mode", mode=mode, known=", ".join(map(repr, ORDERS)))
        means, stds = ([float(value) * divisor for value in values] for values in (mean, std))
        if mode is None and not (set(means) == {CENTRE} and len(set(stds)) == 1):
            raise refused("hbdk4.bytes")
        model = self._module.model
        if mode is not None:
            step = -1 if ORDERS[mode] == "bgr" else 1
            model = fxq.board.with_camera(integer_of(model, "insert_image_preprocess"), ORDERS[mode], mean=means[::step], std=stds[::step])
        self._to("insert_image_preprocess", NHWC, "insert_transpose([0, 3, 1, 2])", YUV)
        self._module.model, self._module.unit = model, 1.0 if mode else 1 / stds[0]
        return self

    def insert_image_convert(self, mode: str = NV12) -> tuple[Input, Input]:
        """Make the module take Y (N, H, W, 1) and UV (N, H/2, W/2, 2) of NV12, uint8. Raises ConfigurationError for another mode."""
        if mode != NV12:
            raise refused("hbdk4.insert_image_convert", mode=mode)
        self._to("insert_image_convert", YUV, "insert_image_preprocess(mode, divisor, mean, std)", NV12)
        return Input(self._module, f"{self.name}_y"), Input(self._module, f"{self.name}_uv")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise refused("hbdk4.Input", name=name)


class Function:
    """The one function of a module: its model, and its inputs. A call returns a list of the outputs' tensors."""

    def __init__(self, module: Module) -> None:
        self._module, self.name = module, module.name

    @property
    def inputs(self) -> list[Input]:
        names = [str(node.target) for node in self._module.model.graph.nodes if node.op == "placeholder"]
        planes = [f"{names[0]}_y", f"{names[0]}_uv"] if self._module.image == NV12 else names
        return [Input(self._module, name) for name in planes]

    flatten_inputs = inputs

    def __call__(self, *inputs: Any) -> list[Any]:
        tensors = (torch.as_tensor(each) if hasattr(each, "__array__") else each for each in inputs)  # arrays of numpy
        return pytree.tree_leaves(self._module(*tensors))

    def remove_io_op(self, op_types: Any = None, op_names: Any = None) -> None:
        """Make the module, and its files, take and return integers: the quantize of inputs and the dequantize of outputs are removed.

        op_types  "Quantize" and "Dequantize"; None means both. Transposes, casts and reshapes at the ends may be named as well, and
                  have no effect: a graph has only those that the user wrote

        Raises ConfigurationError for only one of the two, for other types, for names, and for a module of a prepared model.
        """
        named = {str(name).lower() for name in op_types or ("quantize", "dequantize")}
        if op_names or not named >= {"quantize", "dequantize"} or named - IO_OPS:
            raise refused("hbdk4.remove_io_op", argument="op_names=…" if op_names else f"op_types={op_types!r}")
        if not is_deployed(self._module.model):
            raise refused("hbdk4.remove_io_op of prepared")
        self._module.io = INTEGER

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("insert_", "register_", "feed")):
            raise refused("hbdk4.Function", name=name)
        raise AttributeError(name)


class Module:
    """A model between two steps of the compiler: prepared, or integer. A call computes the model.

    io     "float", or "integer" after `remove_io_op`: calls and files then take and return integers
    image  the format of the input after steps of a camera: "NHWC", "yuv444" or "nv12"; None: the model's own
    unit   the size of a step of bytes in the model's input
    """

    def __init__(self, model: fx.GraphModule, name: str = "forward", io: str = FLOAT, image: str | None = None, unit: float = 1.0) -> None:
        self.model, self.name, self.io, self.image, self.unit = model, name, io, image, unit

    @property
    def functions(self) -> list[Function]:
        return [Function(self)]

    graphs = functions

    def __getitem__(self, index: int) -> Function:
        return self.functions[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.image == NV12:
            args = (fxq.nn.Nv12ToYuv444(centred=True)(*args) * self.unit,)
        elif self.image is not None:
            (image,) = (each.permute(0, 3, 1, 2) for each in args)
            args = (image if self.image == NHWC else (image.float() - CENTRE) * self.unit,)
        return self.model(*args, **kwargs) if self.io == FLOAT else _on_integers(self.model, args)

    def report(self, called: str) -> None:
        """Log what the files of a module with an image take, which is not what its calls take."""
        if self.image is not None:
            values = "" if self.image == NHWC else f" of Y, U and V minus 128, times {self.unit:g}"
            logger.warning("%s: the file takes float32 (N, 3, H, W)%s; calls of the module take %s", called, values, self.image)


def _on_integers(model: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    """Run an integer model on the integers of its inputs, and return the integers of its outputs; float values are unchanged."""
    float_inputs = [_real(node, value) for node, value in zip(model.graph.find_nodes(op="placeholder"), args, strict=True)]
    (recorded,) = fxq.inspect.record(model, [float_inputs], ("quantized", "accumulators"))
    (output,) = model.graph.find_nodes(op="output")
    nodes, _ = pytree.tree_flatten(output.args[0])
    values, form = pytree.tree_flatten(model(*float_inputs))
    return pytree.tree_unflatten([_integers(node, value, recorded) for node, value in zip(nodes, values, strict=True)], form)


def _real(node: fx.Node, value: Any) -> Any:
    """Return the float value of an input's integers. Quantizing restores them: the product with the scale is off by at most 2^-24."""
    described = next((params for user in node.users if (params := qparams(user)) is not None), None)
    if described is None or not isinstance(value, Tensor) or value.is_floating_point():
        return value
    return (value - described.zero_point) * described.scale


def _integers(node: Any, value: Any, recorded: Any) -> Any:
    """Return the integers that an output was dequantized from, or the output itself."""
    if not isinstance(node, fx.Node) or node.target is not fxq.primitives.dequantize:
        return value
    (source, *_) = node.all_input_nodes
    return recorded[source.name].to(fact(source).dtype)


@takes()
def export(model: nn.Module, *, name: str = "forward") -> Module:
    """Return a prepared model as a module of the compiler, with the inputs it was prepared with; other arguments but `name` are ignored.

    Raises ConfigurationError for a model that was not prepared.
    """
    require_prepared(model)
    return Module(model, name)  # type: ignore[arg-type]


@takes()
def pre_export(model: fx.GraphModule) -> fx.GraphModule:
    """Return the integer graph: tables in it are bit-equal to the prepared model in VALIDATION."""
    return integer_of(model, "pre_export")


@takes()
def convert(m: Any, march: Any = None) -> Module:
    """Return a module of integers. Raises ConfigurationError for another march than the one that the model was prepared for."""
    wrapped = _module(m, "convert")
    require_march(wrapped.model, _march(march), "convert")
    return Module(integer_of(wrapped.model, "convert"), wrapped.name, wrapped.io, wrapped.image, wrapped.unit)


def _march(march: Any) -> str | None:
    return None if march is None else str(getattr(march, "value", march)).rpartition(".")[2].replace("_", "-")


def _module(model: Any, called: str) -> Module:
    if isinstance(model, Module):
        return model
    if isinstance(model, fx.GraphModule):
        return Module(model)
    raise refused("hbdk4.module", called=called, kind=type(model).__name__)


@checked(path=FILE)
def save(m: Any, path: Any) -> None:
    """Write a module with its name and its ends, whatever the ending: a file that `load` and `fxq.load` read."""
    wrapped = _module(m, "save")
    meta = wrapped.model.meta
    meta[META] = [wrapped.name, wrapped.io, wrapped.image or "", str(wrapped.unit)]
    try:
        fxq.save(wrapped.model, path)
    finally:
        del meta[META]


@checked(path=PATH)
def load(path: Any) -> Module:
    """Load a module that `save` wrote."""
    model = fxq.load(path)
    name, io, image, unit = model.meta.pop(META, ("forward", FLOAT, "", "1"))
    return Module(model, name, io, image or None, float(unit))


def statistics(m: Any) -> dict[str, dict[str, int]]:
    """Count the operators by name, on the march ("bpu") and on the host ("hbtl"); print the counts and return them."""
    counts: dict[str, Counter[str]] = {"bpu": Counter(), "hbtl": Counter()}
    for layer in fxq.inspect.layers(_module(m, "statistics").model):
        if not layer.boundary:
            counts["hbtl" if layer.device == "host" else "bpu"][layer.operator] += 1
    nonzero = {place: dict(each) for place, each in counts.items() if each}
    print(nonzero)
    return nonzero


@takes()
def compile(m: Any, path: Any, march: Any = None, opt: int = 2, progress_bar: bool = False) -> int:
    """Compile with the vendor's hb_mapper, for the marches that it supports; return 0 on success.

    For nash, write the folder that hb_compile takes at `path` without its ending, and raise ConfigurationError: it has to be compiled
    where that tool is. Even after `remove_io_op` a compiled program takes and returns float values, as a line of the log reports.
    """
    wrapped = _module(m, "compile")
    if wrapped.io == INTEGER:
        logger.warning("compile: the program takes and returns float tensors; visualize writes an ONNX file of integers at both ends")
    camera = wrapped.image if wrapped.image in (YUV, NV12) and wrapped.model.meta["target"].name in HB_MAPPER.marches else None
    if camera is None:
        wrapped.report("compile")
    return compiled(wrapped.model, path, _march(march), None, f"O{min(opt, 3)}", progress_bar, camera)


@takes()
def hbm_perf(model: Any, output_dir: Any = ".") -> Any:
    """Return the cost of a module, or of a compiled file. See `perf_model`. Raises ConfigurationError for a file alone."""
    if isinstance(model, str | Path):
        raise refused("hbdk4.hbm_perf")
    return perf_model(_module(model, "hbm_perf").model, None, out_dir=output_dir)


@takes()
def visualize(m: Any, onnx_file: Any = None) -> Path:
    """Write an integer module as ONNX, which Netron draws and onnxruntime runs; return the path.

    After `remove_io_op` the file takes and returns integers.
    """
    wrapped = _module(m, "visualize")
    wrapped.report("visualize")
    return fxq.export_onnx(integer_of(wrapped.model, "visualize"), onnx_file or "model.onnx", io=wrapped.io)


def get_hbir_input_flattener(m: Any) -> Any:
    """Return a function that flattens a model's inputs to their tensors, in order."""
    return lambda inputs: [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def get_hbir_output_unflattener(m: Any) -> Any:
    """Return a function that nests a list of output tensors as forward returns them."""
    (output,) = _module(m, "get_hbir_output_unflattener").model.graph.find_nodes(op="output")
    return lambda outputs: pytree.tree_unflatten(pytree.tree_leaves(outputs), pytree.tree_structure(output.args[0]))


March = type("March", (), {name.replace("-", "_"): name for name in NAMES})
