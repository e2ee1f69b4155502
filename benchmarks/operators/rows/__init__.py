"""The rows: which operators are tried, and how they are written. One line for each operator."""

from benchmarks.operators.rows import choosing, elementwise, geometry, layers, rest, unusual, whole

FAMILIES = {
    **elementwise.FAMILIES,
    **choosing.FAMILIES,
    **layers.FAMILIES,
    **geometry.FAMILIES,
    **rest.FAMILIES,
    **whole.FAMILIES,
    **unusual.FAMILIES,
}

__all__ = ["FAMILIES"]
