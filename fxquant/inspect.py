"""Look into a model: its layers and segments, the tensors of a run, the difference of two graphs, its text, and tables of single facts."""

from fxquant.analysis.layers import layers, segments
from fxquant.analysis.text import parse
from fxquant.reporting.checks import (
    call_counts,
    compare_weights,
    devices,
    memory,
    not_fused,
    shared_scales,
    suspicious_settings,
    value_ranges,
)
from fxquant.reporting.forms import record
from fxquant.reporting.inspection import diff

__all__ = [
    "call_counts", "compare_weights", "devices", "diff", "layers", "memory", "not_fused", "parse", "record", "segments", "shared_scales",
    "suspicious_settings", "value_ranges",
]  # fmt: skip
