"""The page of operators: what becomes integer on which target, with which dtype, and what stays in float, with its reason.

What is in it is measured, a call form of each row on every target and all of them on the first; the records and the limits are read.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.operators.measure import CRASH, INTEGER, WRONG, Result, has
from benchmarks.operators.rows import FAMILIES
from benchmarks.operators.spelling import HORIZON, NASH, PYTORCH, Row, Spelling, spelled
from fxquant import backends
from fxquant.ops import OPERATORS, Fixed, Operator, Own, Same, Trait
from fxquant.ops.core.composite import DEQUANTIZE, QUANTIZE

TARGETS = ("bayes-e", "nash-e", "bernoulli2", "x86")
DTYPES = ("int8", "int16")
FIRST = (TARGETS[0], DTYPES[0])  # where every call form is tried
LISTS = {HORIZON: "H", NASH: "N", PYTORCH: "P"}
ABSENT = "¹"  # after a cell: the march has no such operator, as far as its public lists say
REASONS = 3  # of one operator

HEAD = """# Operators

Written by `python -m benchmarks.operators --page`, which compiles every call form of each operator on bayes-e at int8 with random
input and holds it to the contract, in PyTorch: the prepared and the integer model have equal bits. For the other targets and dtypes one
of each is prepared, which decides what becomes integer; the same command without `--page` holds them to the contract too, and
their ONNX files.

A cell says with which activations an operator is integer: **8** is int8 (on x86 the affine uint8), **16** is int16, – is neither. ¹ after
it: fxquant computes it in integers, but the public lists of that march do not have it, and `fxq.check` says so; further limits, of kernels,
channels and sizes, are [below](#limits). *call forms* counts the forms that are integer on bayes-e at int8, among those tried: function,
method, in place, module and operator, each with its arguments. *lists*: H is Horizon's (public rows of the RDK, its own operators), N
what the export of the Nash generation takes, P PyTorch's pages on quantization.

What stays in float works all the same: it runs on the host between integer segments, `fxq.explain` names it with its reason, and so does
[the last table](#what-stays-in-float).
"""


def first(spelling: Spelling) -> tuple[str, str, str]:
    """Return the key of its result on the first target at the first dtype."""
    return spelling.name, FIRST[0], FIRST[1]


def wanted() -> Iterator[tuple[Spelling, str, str]]:
    """Yield what is measured: every call form on the first target, the first form of each row on all targets."""
    for entry in spelled(FAMILIES):
        for target in TARGETS:
            for dtype in DTYPES:
                if (dtype == DTYPES[0] or has(target, dtype)) and (entry.text == entry.row.texts[0] or (target, dtype) == FIRST):
                    yield entry, target, dtype


def text(results: Sequence[Result]) -> str:
    """The page. Raises ValueError for a result that is a crash or wrong, for such a page says nothing."""
    bad = [result.name for result in results if result.kind in (CRASH, WRONG)]
    if bad:
        raise ValueError(f"these crash or are wrong: {bad}")
    by_key = {(result.name, result.target, result.dtype): result for result in results}
    lines = [HEAD, *_totals(by_key)]
    for family, rows in FAMILIES.items():
        lines += [f"## {family[0].upper() + family[1:]}", "", *_header("operator", "written", "lists", *TARGETS, "call forms")]
        lines += [_line(*cells(family, row, by_key)) for row in rows]
        lines.append("")
    return "\n".join([*lines, *_records(), *_limits(), *_floats(by_key)])


Known = Mapping[tuple[str, str, str], Result]


def cells(family: str, row: Row, by_key: Known) -> list[str]:
    """The cells of one operator's row."""
    spellings = [Spelling(family, row, text) for text in row.texts]
    integer = sum(by_key[first(s)].kind == INTEGER for s in spellings)
    lists = " ".join(letter for key, letter in LISTS.items() if key in row.lists)
    return [
        row.operator,
        _code(row.texts[0]),
        lists,
        *(cell(spellings[0], target, by_key) for target in TARGETS),
        f"{integer} of {len(spellings)}",
    ]


def cell(spelling: Spelling, target: str, by_key: Known) -> str:
    """The dtypes with which a call form is integer on a target, and whether the march has its operators."""
    results = [by_key[spelling.name, target, dtype] for dtype in DTYPES if (spelling.name, target, dtype) in by_key]
    integer = [result for result in results if result.kind == INTEGER]
    if not integer:
        return "–"
    absent = {name for limit in backends.get(target).limits if limit.measure is None for name in limit.operators}
    mark = ABSENT if any(absent.intersection(result.operators) for result in integer) else ""
    return " ".join(result.dtype.removeprefix("int") for result in integer) + mark


# ---- the other tables -------------------------------------------------------------------------------------------------


def _totals(by_key: Known) -> list[str]:
    kinds = [(entry, by_key[first(entry)].kind) for entry in spelled(FAMILIES)]
    seed = [kind for entry, kind in kinds if entry.seed]
    everything = [kind for _, kind in kinds]
    lines = [
        f"On {FIRST[0]} at {FIRST[1]}, {_share(seed)} call forms of operators on these lists are integer, {_share(everything)} of all. No"
    ]
    return [*lines, "result is wrong.", ""]


def _share(kinds: Sequence[str]) -> str:
    integer = sum(kind == INTEGER for kind in kinds)
    return f"{integer} of {len(kinds)} ({100 * integer / len(kinds):.0f} %)"


def record_rows() -> list[list[str]]:
    """A row for each record of the table: its name, how it is computed, and how many spellings lead to it."""
    rows = []
    for operator in sorted(OPERATORS.values(), key=lambda operator: operator.name):
        meaning = "made by the compiler" if operator.name in (QUANTIZE.name, DEQUANTIZE.name) else _meaning(operator)
        ours = operator.function.__module__.startswith("fxquant.")
        functions = {operator.function, *filter(callable, operator.calls)}
        counts = (len(functions) - ours, sum(isinstance(form, str) for form in operator.calls), len(operator.modules))
        rows.append([operator.name, meaning, *(str(count or "") for count in counts)])
    return rows


def _meaning(operator: Operator) -> str:
    if operator.expand is not None:
        return "expanded into other operators"
    if Trait.DYNAMIC in operator.traits:
        return "quantized at run time, between float values"
    demanded = operator.demand
    if isinstance(demanded, Same):
        return "on its operand's scale"
    if isinstance(demanded, Fixed):
        return f"on a scale of {demanded.scale:g}"
    return (
        "with its own scale" if isinstance(demanded, Own) else "depends on its arguments" if callable(demanded) else "no quantized tensor"
    )


def _records() -> list[str]:
    head = "The records that recognise these call forms, and how each is computed; the last columns count functions, methods and modules."
    names = ("record", "its result", "functions", "methods", "modules")
    return ["## Operator records", "", head, "", *_header(*names), *(_line(*row) for row in record_rows()), ""]


def limit_rows() -> list[list[str]]:
    """A row for each limit of a target that is about some operators: target, operators, what is limited, and to what."""
    rows = []
    for target in TARGETS:
        for limit in backends.get(target).limits:
            operators = ", ".join(limit.operators) or "all"
            rows.append([target, operators, limit.measure or "absent", str(limit) if limit.measure else "", limit.remedy])
    return rows


def _limits() -> list[str]:
    head = "What the public documents say a march allows; `fxq.check` holds a model against it, with layer, line and remedy."
    names = ("target", "operators", "measure", "allowed", "remedy")
    return ["## Limits", "", head, "", *_header(*names), *(_line(*row) for row in limit_rows()), ""]


def _floats(by_key: Known) -> list[str]:
    """Every operator of which a call form stays in float, or is refused, on the first target."""
    lines = ["## What stays in float", "", f"On {FIRST[0]} at {FIRST[1]}.", "", *_header("operator", "written", "why")]
    for family, rows in FAMILIES.items():
        for row in rows:
            reasons: dict[str, list[str]] = defaultdict(list)
            for entry in (Spelling(family, row, text) for text in row.texts):
                result = by_key[first(entry)]
                if result.kind != INTEGER:
                    reasons[result.reasons[0] if result.reasons else result.kind].append(entry.text)
            for reason, texts in list(reasons.items())[:REASONS]:
                more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
                lines.append(_line(row.operator, _code(texts[0]) + more, reason))
    return [*lines, ""]


def _header(*names: str) -> list[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*entries: str) -> str:
    return "| " + " | ".join(entry.replace("|", "\\|") for entry in entries) + " |"


def _code(text: str) -> str:
    return f"`{text}`"
