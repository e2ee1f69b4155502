"""Writing an integer graph as a C99 program: a source, a header, a main, and optionally a file of weights."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx

from fxquant.backends.c import forms
from fxquant.backends.c.program import C_TYPES, FOLDER, WIDTH, Program, Value, comment, identifier, number, pool_name
from fxquant.errors import ConfigurationError
from fxquant.frontend.entry import noted_limits
from fxquant.prepared.sizes import at_example_sizes, unrolled
from fxquant.prepared.stage import require_integer
from fxquant.support.arguments import checked
from fxquant.support.files import Content, write_files
from fxquant.support.progress import working
from fxquant.version import __version__

__all__ = ["export_c", "forms"]  # which declares the C forms

FLAGS = "-std=c99 -O2 -ffp-contract=off"
MOST_NAMED = 16  # inputs and outputs in a line of help
LARGEST_SOURCE = 2**22  # bytes of weights that compilers take as text in reasonable time
GUARD = """#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "every float operation has to be rounded once, to its own type: no -ffast-math; on 32-bit x86, -msse2 -mfpmath=sse"
#endif
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "NaN and infinity are values: no -ffinite-math-only"
#endif
#if defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "sums, quotients and zeros are IEEE's: no -fassociative-math, -freciprocal-math, -fno-signed-zeros or -funsafe-math-optimizations"
#endif
#if defined(__clang__) || !defined(__GNUC__)
#pragma STDC FP_CONTRACT OFF
#endif"""


@checked()
@working("writing C")
def export_c(integer: fx.GraphModule, path: str | os.PathLike[str], *, batch_size: int = 1, external_data: bool | None = None) -> Path:
    """Write the integer model as a C99 program that needs only the standard library; return `path`, that of its source.

    With `net.c` come `net.h`, with the function `net_run(inputs…, outputs…)`, and `net_main.c`, which runs it on raw files:

        cc -std=c99 -O2 -ffp-contract=off net.c net_main.c -o net
        ./net input.raw output.raw

    The function takes and returns what the integer model does, with the same bits, as contiguous arrays: float, int64_t, or uint8_t for
    booleans. A batch has `batch_size` rows, and its other sizes are the example's. Numbers and None among the outputs are left out. Memory
    is static: nothing is allocated, and two calls cannot run at once. The function returns 1 if an input indexes an element that does not
    exist or divides by 0, else 0.

    external_data  True writes weights and tables to `net.data`, which `net_load(path)` reads (and net_main.c, in the current folder), in
                   the byte order of the machine that wrote it; False writes them into the source; by default up to 4 MB are.

    The source is meant to be read: it has a function for each primitive, in the order of the sections of backends/bpu/ARITHMETIC.md,
    instantiated for the element types that occur. It is a reference, not fast.

    Raises ConfigurationError if the model is not an integer model or does not support the batch size, and ExportError, before anything
    is written, for float operators.
    """
    path = Path(path)
    _check(integer, path, batch_size)
    program = Program(unrolled(at_example_sizes(integer)), batch_size)
    name = identifier(path.stem) or "model"
    name = f"x{name}" if name[0].isdigit() else name
    nbytes = sum(value.constant.nbytes for value in program.arrays if value.constant is not None)
    external = nbytes > LARGEST_SOURCE if external_data is None else external_data and nbytes > 0
    constants = [value.constant for value in program.arrays if external and value.constant is not None]
    data: dict[str, Content] = {path.with_suffix(".data").name: (constant.numpy(force=True).tobytes() for constant in constants)}
    texts: dict[str, Content] = {
        path.name: _source(program, name, path, external),
        path.with_suffix(".h").name: _header(program, name, path, external),
        f"{path.stem}_main.c": _main(program, name, path, external),
    }
    write_files(path.parent, {**(data if external else {}), **texts})
    return path


def _check(integer: fx.GraphModule, path: Path, batch_size: int) -> None:
    require_integer(integer)
    if path.suffix != ".c" or not re.fullmatch(r"[\w .+-]+", path.stem):
        because = "header and main lie in the same folder and are named after it, and the source names them"
        remedy = "pass one like net.c, of letters, digits, and any of _ . + -"
        raise ConfigurationError(f"{path.name!r} is not a name for a C source", because=because, remedy=remedy)
    limits = noted_limits(integer.graph)
    if not limits.smallest <= batch_size <= (limits.largest or batch_size):
        because = f"the model slices its batch at a fixed index, and takes from {limits.smallest} to {limits.largest or 'any'} rows"
        raise ConfigurationError(f"batch_size={batch_size} cannot be used", because=because, remedy="pass a batch size between these")


def _signature(program: Program, name: str) -> str:
    inputs = [f"const {C_TYPES[value.dtype]} *{value.text}" for value in program.inputs]
    outputs = [f"{C_TYPES[value.dtype]} *{value.text}" for value in program.outputs]
    return f"int {name}_run({', '.join([*inputs, *outputs]) or 'void'})"


def _about(program: Program, path: Path) -> str:
    target = program.integer.meta["target"].name
    return f"{comment(path.stem)}: an integer model for {target}, at a batch of {program.batch}, written by fxquant {__version__}."


def _elements(name: str, value: Value) -> str:
    """Return the name of the macro for the number of elements of an input or output."""
    return f"{name}_{value.text}_ELEMENTS".upper()


def _header(program: Program, name: str, path: Path, external: bool) -> str:
    guard = f"FXQUANT_{name.upper()}_H"
    lines = [f"/* {_about(program, path)} */", f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", ""]
    for value in (*program.inputs, *program.outputs):
        shape = "".join(f"[{size}]" for size in value.shape)
        what = ", 0 or 1" if value.dtype == torch.bool else ""
        lines.append(f"#define {_elements(name, value)} {max(value.count, 1)} /* {C_TYPES[value.dtype]}{shape}{what} */")
    lines += ["", "/* 0; 1 where an input names an element that does not exist, or divides by 0. Memory is static: one call at a time. */"]
    lines += [f"{_signature(program, name)};"]
    if external:
        lines += ["", "/* Reads the weights, once, before anything is run; 0, or 1 where the file is not that of this program. */"]
        lines += [f"int {name}_load(const char *path);"]
    return "\n".join([*lines, "", "#endif", ""])


def _source(program: Program, name: str, path: Path, external: bool) -> str:
    body = "".join(f"    {line}\n" if line else "\n" for text in program.lines for line in text.split("\n"))
    used = "\n".join([*program.lines, program.functions.text()])
    used_pools = [(kind, pool) for kind, pool in program.pools.items() if re.search(rf"\b{pool_name(kind)}\b", used)]
    pools = [f"static {kind} {pool_name(kind)}[{pool.size}];" for kind, pool in used_pools]
    unused = [f"    (void){value.text};\n" for value in program.inputs if not re.search(rf"\b{value.text}\b", body)]
    includes = ["<float.h>", "<stddef.h>", "<stdint.h>", *(["<stdio.h>"] if external else [])]
    sizes = {name: dtype.itemsize for dtype, name in C_TYPES.items()}
    memory = sum(pool.size * sizes[kind] for kind, pool in program.pools.items())
    constants = "\n".join(_constants(program, external))
    includes += ["<math.h>"] if re.search(r"\b(NAN|INFINITY)\b", constants + body) else []
    parts = [
        f"/* {_about(program, path)}\n\n   cc {FLAGS} {path.name} {path.stem}_main.c -o {name}\n\n"
        f"   {len(program.arrays)} constants, {memory} bytes of memory for tensors. The sections that comments name are those of\n"
        "   ARITHMETIC.md, which defines every number here. */",
        "\n".join([*(f"#include {include}" for include in includes), "", f'#include "{path.stem}.h"']),
        GUARD,
        constants,
        "\n".join(pools),
        "\n".join(f"static const ptrdiff_t {name}[] = {{{values}}};" for name, values in program.sizes.items()),
        program.functions.text(),
        "\n".join(f"static const struct window {name} = {{{fields}}};" for fields, name in program.windows.items()),
        *([_loader(program, name)] if external else []),
        f"{_signature(program, name)}\n{{\n{''.join(unused)}{body}    return 0;\n}}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _constants(program: Program, external: bool) -> Iterator[str]:
    for value in program.arrays:
        assert value.constant is not None
        head = f"{C_TYPES[value.dtype]} {value.text}[{max(value.count, 1)}]"
        if external:
            yield f"static {head};"
        else:
            yield f"static const {head} = {{\n{_numbers(value.constant)}\n}};"


def _numbers(tensor: Tensor) -> str:
    """Return the elements as C literals, in lines."""
    if tensor.dtype.is_floating_point:
        texts = [number(value, tensor.dtype) for value in tensor.flatten().tolist()]
    elif tensor.dtype == torch.int64:
        texts = ["INT64_MIN" if value == -(2**63) else f"INT64_C({value})" for value in tensor.flatten().tolist()]
    else:
        texts = ["(-2147483647 - 1)" if value == -(2**31) else str(value) for value in tensor.to(torch.int64).flatten().tolist()]
    lines, line = [], ""
    for text in texts or ["0"]:
        if len(line) + len(text) + 2 > WIDTH - 4:
            lines.append(line)
            line = ""
        line += f"{text}, "
    return "\n".join(f"    {line.rstrip()}" for line in [*lines, line])


def _loader(program: Program, name: str) -> str:
    reads = "\n".join(
        f"    whole = whole && fread({value.text}, sizeof *{value.text}, {value.count}, file) == {value.count};"
        for value in program.arrays
        if value.count
    )
    return (
        f'int {name}_load(const char *path)\n{{\n    FILE *file = fopen(path, "rb");\n    int whole = file != NULL;\n'
        f"    if (!file) return 1;\n{reads}\n    whole = whole && fgetc(file) == EOF;\n    fclose(file);\n    return !whole;\n}}"
    )


def _main(program: Program, name: str, path: Path, external: bool) -> str:
    both = [*program.inputs, *program.outputs]
    buffers = "\n".join(f"static {C_TYPES[value.dtype]} {value.text}[{_elements(name, value)}];" for value in both)
    data = path.with_suffix(".data").name
    load = (
        f'    if ({name}_load("{data}") != 0) {{\n        fprintf(stderr, "{data} holds no weights of it\\n");\n        return 2;\n    }}\n'
    )
    words = {
        "MODEL": name,
        "MODEL_run": f"{name}_run",
        "INPUT_COUNT": str(len(program.inputs)),
        "OUTPUT_COUNT": str(len(program.outputs)),
        "BUFFERS": buffers,
        "VALUES": ", ".join(value.text for value in both),
        "BYTES": ", ".join(f"sizeof {value.text}" for value in both),
        "USAGE": "".join(f" {value.text}" for value in both) if len(both) <= MOST_NAMED else " INPUT... OUTPUT...",
        "RUN": f"{name}_run({', '.join(value.text for value in both)})",
    }
    text = (FOLDER / "main.c").read_text(encoding="utf-8").replace('"MODEL.h"', f'"{path.stem}.h"')
    text = text.replace("LOAD\n", load if external else "")
    return re.sub(r"\b[A-Za-z_]+\b", lambda word: words.get(word[0], word[0]), text)
