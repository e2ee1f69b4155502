"""Call forms of arithmetic on integers in a random model, whose inputs and outputs are float values."""

from collections.abc import Iterator

from benchmarks.fuzz.spelling import Spelling, spell

ONE, OTHER = "({0} * 3).long()", "({1} * 2).long()"
NARROW = "({0} * 3).char()"

CALLS = {
    "whole_add": (f"{ONE} + {OTHER}", f"torch.add({ONE}, 3, alpha=2)", f"{NARROW} + {NARROW}"),
    "whole_sub": (f"{ONE} - {OTHER}", f"1 - {ONE}", f"~{NARROW}"),
    "whole_mul": (f"{ONE} * {OTHER}", f"{NARROW} * 5"),
    "whole_floor_divide": (f"{ONE} // 3", f"{ONE} // ({OTHER}.abs() + 1)"),
    "whole_trunc_divide": (f"torch.div({ONE}, -3, rounding_mode='trunc')",),
    "whole_remainder": (f"{ONE} % -3", f"{ONE} % ({OTHER}.abs() + 1)"),
    "whole_maximum": (f"torch.maximum({ONE}, {OTHER})",),
    "whole_minimum": (f"torch.minimum({ONE}, {OTHER})",),
    "whole_and": (f"{ONE} & {OTHER}", f"{NARROW} & -4"),
    "whole_or": (f"{ONE} | {OTHER}", f"{NARROW} | 3"),
    "whole_xor": (f"{ONE} ^ {OTHER}",),
    "whole_abs": (f"{ONE}.abs()",),
    "whole_clamp": (f"{ONE}.clamp(-2, 5)", f"torch.clamp({ONE}, max={OTHER})"),
    "whole_pow": (f"({ONE} % 9) ** 3",),
    "whole_lshift": (f"{ONE} << 2",),
    "whole_rshift": (f"{ONE} >> 1",),
    **{f"whole_{name}": (f"torch.{name}({ONE}, {OTHER})", f"{ONE}.{name}(2.5)") for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "whole_where": (f"torch.where({ONE} > 1, {ONE}, {OTHER})",),
    "whole_sum": (f"{ONE}.sum(1)", "({0} > 0).sum(-1)"),
    "whole_cumsum": (f"{ONE}.cumsum(-1)",),
    "whole_argmax": (f"{ONE}.argmax(-1)",),
    "whole_cat": (f"torch.cat(({ONE}, {OTHER}), 1)",),
    "to_integer": (f"{ONE}.short()", "({0} > 0).int()"),
    "to_real": (ONE,),
    "truncated": (ONE, "{0}.int()"),
}


def whole_numbers() -> Iterator[Spelling]:
    """Yield each operator on integers, whose result becomes a float tensor again."""
    for name, calls in CALLS.items():
        yield from spell(name, *(f"({call}).float()" for call in calls))
