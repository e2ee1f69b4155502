"""The kernels of native.c, chains.c, training.c and `joining.c`, compiled once for this processor and kept in the user's cache.

They are optional, and so is a compiler: without one the primitives run, and a warning says so.

FXQUANT_NATIVE=0 disables them. FXQUANT_ISA=vnni leaves out the tiles of AMX, avxvnni AVX-512, too, and avx2 all dot products of bytes.
The name of a cached library is a hash of the source, the compiler and the processor.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fxquant.support import arguments, logger
from fxquant.support.arguments import choice, of_environment

SOURCE, TRAINING, JOINING, CHAINS = (Path(__file__).with_name(f"{name}.c") for name in ("native", "training", "joining", "chains"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")  # IEEE's roundings
SWITCH, INSTRUCTIONS = "FXQUANT_NATIVE", "FXQUANT_ISA"
# Flags, by the value of FXQUANT_ISA.
LIMITS = {"": (), "vnni": ("-mno-amx-tile", "-mno-amx-int8"), "avxvnni": ("-mno-avx512f",), "avx2": ("-mno-avx512f", "-mno-avxvnni")}
SUM, REAL, FIXED = 0, 1, 2

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure, all of one kind."""
    return [(name, kind) for name in names.split()]


AREA = ("depth", "height", "width")
_WINDOW = [
    *fields(_int64, " ".join(AREA)),
    *((f"{name}_{side}", _int64) for name in ("out", "kernel", "stride", "padding", "dilation") for side in AREA),
]


class Epilogue(ctypes.Structure):
    """The requantization of an accumulator: the structure of native.c."""

    _fields_ = [
        *fields(_int64, "mode low high zero limit residual_zero"),
        *fields(_pointer, "factor shift multiplier right_shift half before residual_factor residual_shift"),
    ]


class Sum(ctypes.Structure):
    """A sum of products: the structure of native.c."""

    _fields_ = [
        *fields(_pointer, "input residual outside weight bias output"),
        *fields(_int64, "batch channels out_channels out_pixel groups threads fused small in_place arranged steps runs squeezed"),
        *_WINDOW,
        *((f"{name}_{side}", _int64) for name in ("whole", "first", "step") for side in AREA),
        ("epilogue", Epilogue),
    ]


class Move(ctypes.Structure):
    """The arguments of a kernel without weights: the structure of native.c."""

    _fields_ = [
        *fields(_pointer, "input table other output"),
        *fields(_int64, "batch channels zero low high out_channels threads"),
        *_WINDOW,
        ("scale", ctypes.c_float),
    ]


class Product(ctypes.Structure):
    """A product of two activations over their last two dimensions: the structure of native.c."""

    _fields_ = [
        *fields(_pointer, "input other output sizes strides"),
        *fields(_int64, "rows depth columns input_flip other_flip input_zero other_zero threads"),
    ]


class Watch(ctypes.Structure):
    """Spans of memory that are watched for changes: the structure of native.c."""

    _fields_ = [*fields(_pointer, "starts sizes known"), *fields(_int64, "always count next remember everything changed")]


class Dynamic(ctypes.Structure):
    """A linear layer whose operand is quantized at run time on its own grid: the structure of native.c."""

    _fields_ = [
        ("sum", Sum),
        *fields(_pointer, "input output totals scale bias"),
        ("inputs", _int64),
        *fields(ctypes.c_float, "smallest largest"),
    ]


class Pass(ctypes.Structure):
    """One kernel over large float tensors: the structure of training.c."""

    _fields_ = [
        *fields(_pointer, "sums bias residual factor multiplier half first product ratio"),
        *fields(_pointer, "of_integers of_real integers real of_sums of_residual"),
        *fields(_pointer, "inside totals ends offset slope"),
        *fields(_int64, "outer channels inner mode threads outside"),
        *fields(ctypes.c_double, "limit add"),
        *fields(ctypes.c_float, "low high least most scale bottom top"),
    ]


class Count(ctypes.Structure):
    """The arguments of an observer's counting: the structure of training.c."""

    _fields_ = [
        *fields(_pointer, "value places low high counts negative"),
        *fields(_int64, "rows columns step count bins threads"),
        *fields(ctypes.c_float, "first last"),
    ]


@functools.cache
def library() -> Any:
    """Return the compiled kernels, or a sentence that says why there are none."""
    loaded = _loaded(SOURCE)
    if not isinstance(loaded, str):
        for name in ("dot_products", "sums_of_products", "tiles"):
            getattr(loaded, f"fxq_has_{name}").restype = _int64
        for name in ("reads_in_place", "bytes_arranged"):
            getattr(loaded, f"fxq_{name}").restype, getattr(loaded, f"fxq_{name}").argtypes = _int64, [_pointer]
    return loaded


def _loaded(source: Path) -> Any:
    if not of_environment(SWITCH, "1", arguments.SWITCH):
        return f"{SWITCH} is {os.environ[SWITCH]}"
    flags = (*FLAGS, *LIMITS[of_environment(INSTRUCTIONS, "", choice(*LIMITS))])
    compiler = next((path for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)
    if compiler is None:
        _say_once("a C compiler was not found: integer models run their primitives, slower than float models; install gcc or clang")
        return "a C compiler was not found"
    try:
        name = _name(compiler, source, flags)
        loaded = load(name, cached(name, lambda: _compiled(compiler, source, flags)))
        loaded.made_of = name  # type: ignore[attr-defined]
        for function in re.findall(r"^void fxq_(\w+)\(", source.read_text(encoding="utf-8"), re.MULTILINE):
            getattr(loaded, f"fxq_{function}").restype = None
            getattr(loaded, f"fxq_{function}").argtypes = [_pointer]
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.info("the integer kernels in C are left out: %s", error)
        return f"its C source was not compiled: {error}"
    return loaded


# Each returns the compiled functions of its source, or a sentence that says why there are none: those of training, the fused elementwise
# functions of training, and those of elementwise chains and of programs.
training_library = functools.cache(functools.partial(_loaded, TRAINING))
joining_library = functools.cache(functools.partial(_loaded, JOINING))
chains_library = functools.cache(functools.partial(_loaded, CHAINS))


def _name(compiler: str, file: Path, flags: Sequence[str]) -> str:
    """Return the name of a library, which depends on everything that it is compiled from."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    made_by = (file.read_bytes(), version, compiler.encode(), " ".join(flags).encode(), _processor().encode())
    return f"{'kernels' if file == SOURCE else file.stem}-{hashlib.sha256(bytes(1).join(made_by)).hexdigest()[:20]}.library"


def _compiled(compiler: str, file: Path, flags: Sequence[str]) -> bytes:
    logger.info("compiling the integer kernels for this processor, once: %s", file.name)
    with tempfile.TemporaryDirectory() as directory:
        binary = Path(directory) / "made.so"
        for threads in (["-fopenmp"], []):  # without OpenMP, one thread
            call = subprocess.run([compiler, *flags, *threads, str(file), "-o", str(binary)], capture_output=True, timeout=300, check=False)
            if call.returncode == 0:
                return binary.read_bytes()
    raise OSError(call.stderr.decode(errors="replace").strip()[:500])


def _processor() -> str:
    """Return the properties of the processor by which the compiler may choose instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(platform.uname())
    properties = {line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features", "CPU part", "CPU implementer")}
    return "\n".join([platform.machine(), *sorted(properties)])


# ---- Compiled libraries in the user's cache. A library is loaded only if this user wrote it and it is complete; else it is compiled
# again
#
# A file holds a SHA-256 checksum followed by the library. It is read once, and the bytes that were compared with the checksum are loaded
# from memory, so that no one can exchange them in between.
CHECKSUM = hashlib.sha256().digest_size
_loads = itertools.count()


def cached(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the library that is cached under a name; if none can be trusted, call `make`, and cache and return its bytes.

    If the user has no private folder, nothing is cached, and a line of the log says so.
    """
    try:
        file = folder() / name
    except OSError as error:
        _say_once(f"compiled kernels are not kept, and every process compiles its own: {error}")
        return make()
    try:
        return read(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("a compiled library is not used, and compiled again: %s", error)
    content = make()
    try:
        write(file, content)
    except OSError as error:
        logger.warning("a compiled library is not kept: %s", error)
    return content


_say_once = functools.cache(logger.warning)


def folder() -> Path:
    """Return the cache folder, which exists and which no one else can write to. Raises OSError if there is none."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        above = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError("this user has no home directory; the variable XDG_CACHE_HOME can name a folder") from error
    path = above / "fxquant"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(path.stat(), path)
    return path


def read(file: Path) -> bytes:
    """Return the library that a file holds. Raises OSError for a link, a damaged file, and one that others own or can write to."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(file, flags), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{file} is not a file")
        _require_own(status, file)
        data = stream.read()
    checksum, content = data[:CHECKSUM], data[CHECKSUM:]
    if not content or hashlib.sha256(content).digest() != checksum:
        raise OSError(f"{file} is damaged")
    return content


def write(file: Path, content: bytes) -> None:
    """Write a library with its checksum atomically, in place of an existing file."""
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with open(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(content).digest() + content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def load(name: str, content: bytes) -> ctypes.CDLL:
    """Load a library from these bytes. Raises OSError if they are not one, or nothing may be run from memory or temporary folders."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create(name), "wb") as stream:
            stream.write(content)
            stream.flush()
            # The loader distinguishes libraries by path, and descriptor numbers are reused: every path is made unique.
            path = f"/proc/self/fd/{'./' * next(_loads)}{stream.fileno()}"
            with contextlib.suppress(OSError):
                return ctypes.CDLL(path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # for this user alone
        file = Path(directory) / name
        file.write_bytes(content)
        return ctypes.CDLL(str(file))


def _require_own(status: os.stat_result, path: Path) -> None:
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others can write to {path}")
