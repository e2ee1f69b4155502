"""Writing files: every file of the library is written here.

A file is written into a temporary folder in its folder, flushed to the disk and then renamed to its place. An error, a full disk or a
kill leaves the previous file unchanged. A folder that remains after a kill, named `.fxquant-writing-…`, is removed by a write a day later.

Several files are all complete before the first is renamed. Only a kill between two renames leaves new files with old ones, each complete.
A symbolic link is replaced by the file; the permissions of a file that is replaced are kept.
"""

import ctypes
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from fxquant.errors import ExportError

# A text, which is written as UTF-8; bytes; or the parts of a file, bytes-like each, for one that is too large to copy in memory.
Content = str | bytes | Iterable[bytes | memoryview]

TEMPORARY = ".fxquant-writing-"  # what the names of temporary folders begin with
ABANDONED = 86400  # seconds after which a temporary folder is no longer one that is being written
PART = 2**24  # bytes of a file that are copied at a time
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: str | os.PathLike[str], content: Content, check: Callable[[Path], None] | None = None) -> Path:
    """Write one file, and its folder if it is missing; return its path. `check` and errors are as in `write_files`."""
    place = Path(path)
    write_files(place.parent, {place.name: content}, check)
    return place


def write_files(folder: str | os.PathLike[str], contents: Mapping[str, Content], check: Callable[[Path], None] | None = None) -> None:
    """Write files by their names into one folder, which is made if it is missing.

    `check` is called with the temporary folder when all files are in it; nothing is put in place if it raises. The files are put in place
    in the order of `contents`: the one that refers to the others has to be the last.

    Raises ExportError where the file system refuses; files that exist are then unchanged.
    """
    place = Path(folder)
    with ExitStack() as stack:
        with _explained(place):
            place.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(_temporary(place))
        for name, content in contents.items():
            with _explained(place / name):
                _fill(temporary / name, content, _mode_of(place / name))
        if check is not None:
            check(temporary)
        for name in contents:
            with _explained(place / name):
                os.replace(temporary / name, place / name)
        _flush(place)


@contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    """Make a temporary folder inside `place` for the context; remove temporary folders there that are older than `ABANDONED`."""
    for left in place.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # another writer may remove it, too
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=TEMPORARY, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def place_files(source: Path, folder: Path, last: str) -> None:
    """Write the files of a folder, and of the folders in it, into another one; `last` is the file at its top that refers to the others."""
    by_folder: dict[Path, dict[str, Content]] = {}
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for path in sorted(paths, key=lambda path: path == source / last):
        by_folder.setdefault(folder / path.parent.relative_to(source), {})[path.name] = _parts(path)
    for place in sorted(by_folder, key=lambda each: -len(each.parts)):
        write_files(place, by_folder[place])
    for path in paths:
        if path.stat().st_mode & stat.S_IXUSR:
            (folder / path.relative_to(source)).chmod(path.stat().st_mode)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(PART):
            yield part


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise ExportError if no file can be written at a path, before the work whose result it is to hold."""
    place = Path(path).absolute()
    with _explained(place):
        _mode_of(place)
        there = place.parent
        while not there.exists():
            there = there.parent
    write_files(there, {})


def _mode_of(path: Path) -> int | None:
    """Return the permissions of a file that will be replaced; None if it does not exist. Raises OSError if it must not be replaced."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe, which a file would replace")
    if stat.S_ISLNK(status.st_mode):
        return None
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected")
    return stat.S_IMODE(status.st_mode)


def _fill(path: Path, content: Content, mode: int | None) -> None:
    with path.open("xb") as file:
        for part in [content.encode()] if isinstance(content, str) else [content] if isinstance(content, bytes) else content:
            file.write(part)
        file.flush()
        if mode is not None:
            os.chmod(path, mode)
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Flush the new names to the disk. The files are complete by now, and some file systems cannot flush a folder."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Inside, errors of the file system become an ExportError about this path."""
    try:
        yield
    except (OSError, ValueError) as error:  # a ValueError is about a name, or a text, that cannot be encoded
        full = isinstance(error, OSError) and error.errno in _FULL
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = "free space, or choose a folder on another file system" if full else "choose a file in a folder that can be written to"
        raise ExportError(f"{path} cannot be written", because=f"{reason}; the previous file is kept", remedy=remedy) from error


# ---- Take the addresses of tensors for functions in C, which read memory as it is ------------------------------------
#
# PyTorch may keep a sign, a conjugation, or that all elements are 0, as a mark on a tensor instead of in its memory. Such a tensor is
# copied first. A tensor without memory on the CPU is refused.
def readable(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its memory holds its values, else a copy whose memory does."""
    return torch.empty_like(tensor).copy_(tensor) if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor() else tensor


def address(tensor: Tensor) -> int:
    """Return the address of the first element of a tensor of any dtype and strides; 0 if it has no elements.

    Raises RuntimeError if its memory does not hold its values, or is not on the CPU: meta, sparse, fake or transformed tensors.
    """
    plain = tensor.is_cpu and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # else a class may keep values elsewhere
    pointer = tensor.data_ptr() if plain else 0
    if tensor.is_neg() or tensor.is_conj() or (not pointer and tensor.numel()):
        raise RuntimeError(f"a function in C cannot read the memory of a tensor: {tensor.layout}, on {tensor.device}")
    return pointer


memory_start = Tensor.data_ptr  # of a tensor with memory, to be compared with what it was


def start(tensor: Tensor) -> int | None:
    """Return the address of a tensor in the memory of its device; None if its memory does not hold its values, or it has none."""
    return None if tensor.is_neg() or tensor.is_conj() or tensor.is_meta else tensor.data_ptr()


def point(structure: ctypes.Structure, tensors: Iterable[tuple[str, Tensor | None]]) -> list[Tensor]:
    """Set fields of a structure to the addresses of tensors, and leave a field as it is where the tensor is None.

    The result owns the memory: keep it until the function in C has returned. A tensor that C writes to has to be new:
    it then has no lazy negation or conjugation.
    """
    held = []
    for name, tensor in tensors:
        if tensor is not None:
            held.append(readable(tensor))
            setattr(structure, name, address(held[-1]))
    return held
