"""Proofs of kernels that processes of this user have made before, kept next to the compiled libraries.

A line of the file is a digest of what one proof depends on: the primitives that a kernel replaces, their constants, and the sizes, layouts
and ranges of the tensors around them. The file's name is a digest of what all depend on: the libraries, which are made for one processor
and compiler, the Python code that builds, computes and proves, and PyTorch's version.
"""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.backends.cpu import native
from fxquant.ir import graph
from fxquant.ir.graph import TensorFact, fact
from fxquant.ir.integer import qparams
from fxquant.kernels import runner
from fxquant.kernels.admission import between
from fxquant.kernels.kernel import Implementation, Site
from fxquant.numerics import grids
from fxquant.primitives import record
from fxquant.support import logger

LARGEST = 2**22  # bytes of a file of proofs, which is begun anew beyond


class Proofs:
    """The proofs in one file; `known` holds the digest of each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known = set(file.read_text(encoding="utf-8", errors="replace").split()) if file.exists() else set[str]()

    def key(self, site: Site, implementation: Implementation) -> str:
        """Return the digest of what the proof of an implementation at a place depends on, 32 hexadecimal digits."""
        nodes = dict.fromkeys((*site.match.reads, *between(site.match, site.match.reads)))
        names = {node: f"%{index}" for index, node in enumerate(nodes)}
        hasher = hashlib.sha256(f"{implementation.name} {names[site.match.root]}".encode())
        for node in nodes:
            for part in _described(site, node, names):
                hasher.update(part)
        return hasher.hexdigest()[:32]

    def add(self, key: str) -> None:
        """Write the digest of a proof that was made now."""
        self.known.add(key)
        try:
            begun_anew = self.file.exists() and self.file.stat().st_size > LARGEST
            with self.file.open("w" if begun_anew else "a", encoding="utf-8") as file:
                file.write(f"{key}\n")
        except OSError as error:
            logger.info("a proof of a kernel is not kept: %s", error)


def _described(site: Site, node: fx.Node, names: dict[fx.Node, str]) -> Iterable[bytes | memoryview]:
    if node.op == "get_attr" and isinstance(constant := site.constant(node), Tensor):
        yield f"{constant.dtype} {tuple(constant.shape)}".encode()
        yield constant.contiguous().flatten().view(torch.uint8).numpy().data
        return
    forms, target, tensor = site.forms, node.target, fact(node)
    called = target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
    args = fx.map_arg((node.args, node.kwargs), lambda read: names.get(read, str(read)))
    bytewise = isinstance(tensor, TensorFact) and tensor.dtype.itemsize == 1
    proved = None if bytewise else forms.ranges.get(node)  # of bytes, the grid says what is proved
    ends = None if proved is None or not proved.low.numel() else (float(proved.low.min()), float(proved.high.max()))
    around = (tensor, qparams(node), site.sizes.get(node), ends, node in forms.non_negative, node in forms.channels_first)
    yield f"{called if node.op == 'call_function' else node.op} {args} {around}\n".encode()


@functools.cache
def proofs() -> Proofs | None:
    """Return the proofs for this installation and processor; None without compiled kernels or a private folder."""
    libraries: list[Any] = [native.library(), native.chains_library()]
    if any(isinstance(each, str) for each in libraries):
        return None
    hasher = hashlib.sha256(f"{torch.__version__} {[each.made_of for each in libraries]}".encode())
    for module in (native, runner, record, grids, graph):  # of the packages whose code a proof depends on
        for file in sorted(Path(str(module.__file__)).parent.rglob("*.py")):
            hasher.update(file.read_bytes())
    try:
        return Proofs(native.folder() / f"proofs-{hasher.hexdigest()[:20]}.txt")
    except OSError:
        return None


runner.PROOFS.append(proofs)
