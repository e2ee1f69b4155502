"""Classes of the values that public functions return, for annotations. No program constructs them."""

from fxquant.accuracy.result import TunedLayer, TuningResult
from fxquant.analysis.explain import Finding, Findings
from fxquant.analysis.layers import Intermediate, Layer, Segment
from fxquant.analysis.report import DeviationReport, Report
from fxquant.backends.horizon.compiled_program import CompiledCost
from fxquant.conformance.results import Conformance, ProbeResult
from fxquant.prepared.stage import Stage
from fxquant.quantizing import Result
from fxquant.reporting.advice import Advice
from fxquant.reporting.comparing import Comparison
from fxquant.reporting.estimate import Estimate, LayerEstimate
from fxquant.reporting.inspection import GraphDifference
from fxquant.reporting.statistics import LayerComparison
from fxquant.search.bit_widths import MixedPrecision, Widened
from fxquant.search.sensitivity import Sensitivity, TensorSensitivity
from fxquant.search.tune import Tuned, TuneStep

__all__ = [
    "Advice", "Comparison", "CompiledCost", "Conformance", "DeviationReport", "Estimate", "Finding", "Findings", "GraphDifference",
    "Intermediate", "Layer", "LayerComparison", "LayerEstimate", "MixedPrecision", "ProbeResult",
    "Report", "Result", "Segment", "Sensitivity", "Stage", "TensorSensitivity", "TuneStep", "Tuned", "TunedLayer", "TuningResult",
    "Widened",
]  # fmt: skip
