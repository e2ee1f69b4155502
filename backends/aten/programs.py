"""The integer model as a program of plain ATen operators: an archive of `torch.export`."""

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.analysis.sample import random_batches
from fxquant.errors import ExportError
from fxquant.frontend.entry import noted_limits
from fxquant.ir.graph import BatchDim, TensorFact, fact, is_python
from fxquant.ir.model import default_device_cpu
from fxquant.prepared.stage import require_integer
from fxquant.support import log_levels
from fxquant.support.arguments import checked
from fxquant.support.files import write_file
from fxquant.support.progress import working

LARGEST_BATCH = 2**31 - 1
OTHERS = "export it as ONNX with fxq.export_onnx, or keep it with fxq.save"


class Program(nn.Module):
    """The integer graph alone: it takes its inputs by position, and returns one tensor or a tuple of tensors in order."""

    def __init__(self, integer: fx.GraphModule) -> None:
        super().__init__()
        self.integer = integer
        returned = pytree.tree_leaves(integer.graph.output_node().args[0])
        # Decided from the facts, because sizes are tensors as well while PyTorch traces.
        self._is_tensor = [isinstance(value, fx.Node) and isinstance(fact(value), TensorFact) for value in returned]

    def forward(self, *inputs: Tensor) -> Any:
        """Compute the graph without any checks of the inputs."""
        values = pytree.tree_leaves(self.integer.forward(*inputs))
        returned = [value for value, is_tensor in zip(values, self._is_tensor, strict=True) if is_tensor]
        return returned[0] if len(returned) == 1 else tuple(returned)


@checked()
@working("writing a program")
def export_pt2(integer: fx.GraphModule, path: str | os.PathLike[str]) -> Path:
    """Write the integer model as an archive of `torch.export`, and return its path.

    `torch.export.load(path).module()` is the model, in a process that has PyTorch and needs no fxquant: it takes the model's tensors by
    position, in the order of its inputs, and returns its tensor, or a tuple of those, in order, with the bits of the integer model.
    Numbers and None among the outputs are left out. The batch is dynamic where the model was traced so, within its batch limits.

    Before the file appears it is loaded, run at several batch sizes on inputs that fill their range, and compared byte for byte.
    Raises ConfigurationError if the model is not an integer model, ExportError if `torch.export` refuses it or a bit differs.
    """
    require_integer(integer)
    program = Program(integer)
    limits = noted_limits(integer.graph)
    # The first size, for tracing, is not one that PyTorch specializes on.
    within = [size for size in (4, 6, 3, 2, 1) if limits.smallest <= size <= (limits.largest or size)]
    sizes = tuple(within) or (limits.smallest, limits.largest or limits.smallest + 1)
    batches = [list(batch.values()) for batch in random_batches(integer, sizes)]
    archive = io.BytesIO()  # PyTorch's own file writer aborts the process if the disk is full
    with warnings.catch_warnings(), torch.no_grad(), default_device_cpu():
        warnings.simplefilter("ignore")  # PyTorch's, about its formats and about shapes, which are compared below
        try:
            with _quiet():
                exported = torch.export.export(program, tuple(batches[0]), dynamic_shapes=(_dynamic_shapes(integer),))
                torch.export.save(exported, archive)
            archive.seek(0)
            loaded = torch.export.load(archive).module()
            results = [pytree.tree_leaves(loaded(*batch)) for batch in batches]
        except Exception as error:  # PyTorch's exporters raise errors of many classes
            message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            python_node = next((node for node in integer.graph.nodes if is_python(node)), None)
            traced = "" if python_node is None else "; what fxq.wrap or the option leaf keeps as Python is traced by it as well"
            remedy = OTHERS if python_node is None else "return what it reads, and call it after the program; or fxq.export.export_segments"
            because = f"torch.export says: {message}{traced}"
            raise ExportError("the model cannot be written by torch.export", node=python_node, because=because, remedy=remedy) from error
        for batch, ours in zip(batches, results, strict=True):
            if [_bytes(value) for value in ours] != [_bytes(value) for value in pytree.tree_leaves(program(*batch))]:
                shapes = ", ".join(str(tuple(value.shape)) for value in batch if isinstance(value, Tensor))
                because = f"the file was run with inputs of shape {shapes}, and gave other bits"
                raise ExportError("what torch.export has written is not equal to the integer model", because=because, remedy=OTHERS)
    return write_file(Path(path), archive.getvalue())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress PyTorch's prints and its log below errors, since it prints the whole graph of a model that it cannot export."""
    names = ["torch", *(name for name in logging.root.manager.loggerDict if name.startswith("torch."))]
    levels = {name: max(logging.getLogger(name).level, logging.ERROR) for name in names}
    with log_levels(levels), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _bytes(value: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return value.dtype, value.shape, value.contiguous().numpy(force=True).tobytes()


def _dynamic_shapes(integer: fx.GraphModule) -> tuple[dict[int, Any] | None, ...]:
    limits = noted_limits(integer.graph)
    batch = torch.export.Dim("batch", min=limits.smallest, max=limits.largest or LARGEST_BATCH)
    shapes = []
    for node in integer.graph.find_nodes(op="placeholder"):
        sizes = enumerate(fact(node).shape) if isinstance(fact(node), TensorFact) else ()
        varying = {dim: size for dim, size in sizes if isinstance(size, BatchDim)}
        shapes.append({dim: batch if size.largest is None else torch.export.Dim.AUTO for dim, size in varying.items()} or None)
    return tuple(shapes)
