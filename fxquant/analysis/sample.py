"""Samples and batches for a model from a file of arrays, or drawn at random over the range of its inputs."""

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, fx, nn

from fxquant.errors import ConfigurationError
from fxquant.ir.graph import TensorFact, fact
from fxquant.numerics.grids import ACTIVATION_TYPES
from fxquant.prepared.stage import grid_of

TORCH = (".pt", ".pth")
FORMATS = (".npy", ".npz", ".safetensors", *TORCH)
Named = dict[str, Tensor]


def batches_from(path: Path, model: fx.GraphModule, size: int) -> list[Any]:
    """Return the batches in a file of arrays that hold all samples, of `size` samples, or of as many as the model is fixed to.

    Samples are along the dimension that is the batch of that input; where no size of the model varies, dimension 0.

    A model of one input takes the file's only array; otherwise arrays go by the names of the inputs, and those that
    numpy.savez numbered in their order. Raises ConfigurationError if the file cannot be read; nothing is unpickled.
    """
    inputs = model.graph.find_nodes(op="placeholder")
    arrays = named(arrays_from(path), [str(node.target) for node in inputs])
    facts = {str(node.target): node_fact for node in inputs if isinstance(node_fact := fact(node), TensorFact) and node_fact.shape}
    axes = {name: entry.batch_axis for name, entry in facts.items()}
    if all(axis is None for axis in axes.values()):
        axes = dict.fromkeys(axes, 0)
    along = {name: axis for name, axis in axes.items() if axis is not None and name in arrays and arrays[name].dim() > axis}
    counts = {arrays[name].shape[axis] for name, axis in along.items()}
    if len(counts) != 1:
        return [arrays]
    first, axis = next(iter(along.items()))
    each = facts[first].shape[axis]
    size = each if isinstance(each, int) else size
    repeated = -(-max(counts) // size)
    pieces = {name: torch.split(array, size, along[name]) if name in along else [array] * repeated for name, array in arrays.items()}
    return [dict(zip(pieces, batch, strict=True)) for batch in zip(*pieces.values(), strict=True)]


def samples_from(path: Path, model: nn.Module) -> Named:
    """Return the arrays of a file or folder by the arguments of a float model's forward; dimension 0 is the sample in each.

    A forward of one required argument takes the only array; otherwise arrays go by their names, or in order if numpy.savez numbered them.
    Raises ConfigurationError if the data cannot be read, if an argument has no array, and if arrays differ in their number of samples.
    """
    required = arguments_of(model)
    arrays = named(arrays_from(path), required)
    if missing := [name for name in required if name not in arrays]:
        because = f"forward takes {', '.join(required)}, and the data holds {', '.join(arrays) or 'nothing'}"
        remedy = "name the arrays like forward's arguments"
        raise ConfigurationError(f"{path} has no array for {', '.join(missing)}", because=because, remedy=remedy)
    counts = {name: len(array) if array.dim() else 0 for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        sizes = ", ".join(f"{count} of {name}" for name, count in counts.items()) or "none"
        because = f"dimension 0 of every array is the sample, and the sizes are {sizes}"
        raise ConfigurationError(f"{path} does not hold samples", because=because, remedy="give each array one row for each sample")
    doubles, dtypes = [name for name, array in arrays.items() if array.dtype == torch.float64], {each.dtype for each in model.parameters()}
    if doubles and torch.float32 in dtypes and torch.float64 not in dtypes:
        because = f"{', '.join(doubles)} is float64, NumPy's default, and the model computes in float32"
        raise ConfigurationError(f"{path} does not fit the model", because=because, remedy="save it as float32: array.astype('float32')")
    return arrays


def arguments_of(model: nn.Module) -> list[str]:
    """Return the names of the arguments that a model's forward requires."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def named(arrays: Named, names: Sequence[str]) -> Named:
    """Return arrays by the names of inputs: the only one goes to the only input, and numbered ones go by their order."""
    if len(arrays) == 1 and len(names) == 1:
        return {names[0]: next(iter(arrays.values()))}
    if all(name == f"arr_{index}" for index, name in enumerate(arrays)) and len(arrays) == len(names):
        return dict(zip(names, arrays.values(), strict=True))
    return arrays


def arrays_from(path: Path) -> Named:
    """Return the arrays in a file, or in a folder of .npy files by file name. Only tensors are unpickled.

    Raises ConfigurationError if something cannot be read, or is of another format.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            if not files:
                remedy = "save each input there as NAME.npy"
                raise ConfigurationError(f"{path} cannot be read as data", because="the folder holds no .npy file", remedy=remedy)
            return {file.stem: torch.from_numpy(np.load(file, allow_pickle=False)) for file in files}
        if path.suffix.lower() not in FORMATS:
            because = f"data is read from {', '.join(FORMATS)}, or a folder of .npy; other formats can hold code"
            remedy = "save it with numpy.savez or safetensors.torch.save_file"
            raise ConfigurationError(f"{path} cannot be read as data", because=because, remedy=remedy)
        return _of_file(path)
    except ConfigurationError:
        raise
    except Exception as error:  # what is read of a damaged file raises errors of many classes
        because = (str(error) or type(error).__name__).splitlines()[0]
        if any(advice in because for advice in ("pickle", "weights_only", "Weights only")):  # to load it unsafely
            because = "it is damaged, or holds other objects than arrays and tensors, which could run code"
        remedy = "pass a file that numpy.save, numpy.savez, torch.save of tensors or safetensors.torch.save_file wrote"
        raise ConfigurationError(f"{path} cannot be read as data", because=because, remedy=remedy) from error


def _of_file(path: Path) -> Named:
    if path.suffix.lower() == ".safetensors":
        return dict(safetensors.torch.load_file(path))
    loaded = torch.load(path, "cpu", weights_only=True) if path.suffix.lower() in TORCH else np.load(path, allow_pickle=False)
    if isinstance(loaded, Tensor):
        return {"": loaded}
    if isinstance(loaded, np.ndarray):
        return {"": torch.from_numpy(loaded)}
    if path.suffix.lower() not in TORCH:
        with loaded:
            return {name: torch.from_numpy(loaded[name]) for name in loaded.files}
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise TypeError("it holds neither a tensor nor a dict of tensors")
    return {str(name): value for name, value in loaded.items()}


def random_example(shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return float32 inputs of the shapes given, in the order of forward's arguments; each call returns equal inputs."""
    generator = torch.Generator().manual_seed(0)
    return tuple(_normal(shape, generator) for shape in shapes)


def random_batches(model: fx.GraphModule, sizes: tuple[int, ...]) -> list[Any]:
    """Return a batch of each size, the same at each call: normal numbers that slightly exceed the range of the input's scale."""
    generator = torch.Generator().manual_seed(0)
    inputs = model.graph.find_nodes(op="placeholder")
    return [{str(node.target): _drawn(model, node, size, generator) for node in inputs} for size in sizes]


def _drawn(model: fx.GraphModule, node: fx.Node, size: int, generator: torch.Generator) -> Any:
    node_fact = fact(node)
    if not isinstance(node_fact, TensorFact):
        return node_fact
    shape = node_fact.at(size)
    if node_fact.dtype.is_floating_point:
        drawn = (_normal(shape, generator) * (_input_range(model, node) / 2)).to(node_fact.dtype)
        if yuv_size(model, node):
            drawn[:, 1:] = drawn[:, 1:, ::2, ::2].repeat_interleave(2, 2).repeat_interleave(2, 3)
        return drawn
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(node_fact.dtype)


def yuv_size(model: fx.GraphModule, node: fx.Node) -> tuple[int, int] | None:
    """Return the height and width of an input that is YUV less 128, (N, 3, H, W) of even sizes on the scale 1; None of any other."""
    shape = node_fact.at(1) if isinstance(node_fact := fact(node), TensorFact) else ()
    steps = [grid.scale for user in node.users if (grid := grid_of(model, user)) is not None]
    is_yuv = 1.0 in steps and len(shape) == 4 and shape[1] == 3 and not any(size % 2 for size in shape[2:])
    return (shape[2], shape[3]) if is_yuv else None


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return normal float32 numbers of a shape. Raise ConfigurationError where this machine cannot hold them."""
    try:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
    except (RuntimeError, TypeError):  # no memory; a size, or a number of elements, that 64 bits do not hold
        what = f"an input of the sizes {', '.join(map(str, shape))} cannot be made"
        because = f"it has {math.prod(shape) * 4:,} bytes, which this machine cannot hold"
        raise ConfigurationError(what, because=because, remedy="give smaller sizes") from None


def _input_range(model: fx.GraphModule, node: fx.Node) -> float:
    """Return the largest value that the first quantizer of an input can represent; 2 if no scale is known."""
    for user in node.users:
        grid = grid_of(model, user)
        if grid is not None and isinstance(grid.scale, float) and math.isfinite(grid.scale):
            dtype = ACTIVATION_TYPES[grid.dtype]
            return grid.scale * (max(dtype.high - grid.zero_point, grid.zero_point - dtype.low - 1) + 1)
    return 2.0
