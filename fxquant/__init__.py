"""fxquant: an FX graph-mode quantization compiler for PyTorch whose numbers are exact.

import fxquant as fxq

prepared = fxq.prepare(model, example_inputs, target="bayes-e")
fxq.calibrate(prepared, batches)
integer = fxq.convert(prepared)
path = fxq.export_onnx(integer, "model.onnx")
assert fxq.verify(integer, path, batches)
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout, passes/ and backends/ are next to this folder; in a wheel they are inside it.
if (_root := Path(__file__).resolve().parents[1]).joinpath("pyproject.toml").is_file():
    __path__.append(str(_root))

from fxquant.version import __version__

if TYPE_CHECKING:
    from fxquant import nn, primitives, tuning
    from fxquant.analysis.explain import Finding, Findings, explain
    from fxquant.analysis.layers import Intermediate, Layer, layers
    from fxquant.analysis.partition import Segment, segments
    from fxquant.analysis.report import DeviationReport, Report
    from fxquant.analysis.text import text
    from fxquant.api import Result, calibrate, check, convert, dump, export_onnx, load, prepare, quantize, save
    from fxquant.backends.aten.programs import export_pt2, export_torchscript
    from fxquant.backends.c.export_c import export_c
    from fxquant.backends.horizon.compiled_program import CompiledCost
    from fxquant.backends.horizon.compiling import compile_horizon
    from fxquant.backends.horizon.export import HorizonOptions, export_horizon
    from fxquant.backends.onnx.metadata import onnx_metadata
    from fxquant.backends.onnx.segments import export_segments, run_segments
    from fxquant.calibration.calibration import freeze, qparams, set_qparams, set_state
    from fxquant.calibration.observations import Observations, observations
    from fxquant.conformance.kit import board_kit, conformance_kit
    from fxquant.conformance.results import Conformance, ProbeResult, check_conformance, simulate_conformance
    from fxquant.errors import (
        AccumulatorOverflow,
        CalibrationError,
        CompilationError,
        ConfigurationError,
        ExportError,
        FxQuantError,
        Interrupted,
        NotCalibrated,
        NotFinite,
        ScaleConflict,
        StageViolation,
        TraceError,
        UnknownTarget,
        UnsupportedOperator,
    )
    from fxquant.frontend import trace, wrap
    from fxquant.nn.camera import with_camera
    from fxquant.numerics.rounding import AdaptiveRounding, Nearest, Rounding
    from fxquant.ops.core.custom import operator, unary
    from fxquant.options import Options
    from fxquant.prepared.stage import Stage
    from fxquant.quantization.observers import (
        ClipObserver,
        ClipStdObserver,
        FixedScaleObserver,
        HistogramObserver,
        KLObserver,
        LpObserver,
        MinMaxObserver,
        MixObserver,
        MovingAverageMinMaxObserver,
        MSEObserver,
        Observer,
        PercentileObserver,
    )
    from fxquant.quantization.spec import ActivationConfig, QConfig, QConfigMapping, State, WeightConfig
    from fxquant.reporting import checks
    from fxquant.reporting.advice import Advice
    from fxquant.reporting.comparing import Comparison, compare
    from fxquant.reporting.estimate import Estimate, LayerEstimate, estimate
    from fxquant.reporting.forms import record, verify
    from fxquant.reporting.inspection import GraphDifference, diff
    from fxquant.reporting.page import report
    from fxquant.reporting.statistics import LayerComparison
    from fxquant.search.mixed_precision import Budget, MixedPrecision, Speed, mixed_precision
    from fxquant.search.observer_search import ObserverSearch, ObserverTrial, search_observers
    from fxquant.search.sensitivity import Sensitivity, TensorSensitivity, sensitivity
    from fxquant.search.tune import Tuned, TuneStep, tune
    from fxquant.serialization.qconfig import load_qconfig, save_qconfig
    from fxquant.target import Roofline, Target
    from fxquant.tuning import equalize

__all__ = [
    "AccumulatorOverflow",
    "ActivationConfig",
    "AdaptiveRounding",
    "Advice",
    "Budget",
    "CalibrationError",
    "ClipObserver",
    "ClipStdObserver",
    "Comparison",
    "CompilationError",
    "CompiledCost",
    "ConfigurationError",
    "Conformance",
    "DeviationReport",
    "Estimate",
    "ExportError",
    "Finding",
    "Findings",
    "FixedScaleObserver",
    "FxQuantError",
    "GraphDifference",
    "HistogramObserver",
    "HorizonOptions",
    "Intermediate",
    "Interrupted",
    "KLObserver",
    "Layer",
    "LayerComparison",
    "LayerEstimate",
    "LpObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "MixedPrecision",
    "MovingAverageMinMaxObserver",
    "Nearest",
    "NotCalibrated",
    "NotFinite",
    "Observations",
    "Observer",
    "ObserverSearch",
    "ObserverTrial",
    "Options",
    "PercentileObserver",
    "ProbeResult",
    "QConfig",
    "QConfigMapping",
    "Report",
    "Result",
    "Roofline",
    "Rounding",
    "ScaleConflict",
    "Segment",
    "Sensitivity",
    "Speed",
    "Stage",
    "StageViolation",
    "State",
    "Target",
    "TensorSensitivity",
    "TraceError",
    "TuneStep",
    "Tuned",
    "UnknownTarget",
    "UnsupportedOperator",
    "WeightConfig",
    "__version__",
    "board_kit",
    "calibrate",
    "check",
    "check_conformance",
    "checks",
    "compare",
    "compile_horizon",
    "conformance_kit",
    "convert",
    "diff",
    "dump",
    "equalize",
    "estimate",
    "explain",
    "export_c",
    "export_horizon",
    "export_onnx",
    "export_pt2",
    "export_segments",
    "export_torchscript",
    "freeze",
    "layers",
    "load",
    "load_qconfig",
    "mixed_precision",
    "nn",
    "observations",
    "onnx_metadata",
    "operator",
    "prepare",
    "primitives",
    "qparams",
    "quantize",
    "record",
    "report",
    "run_segments",
    "save",
    "save_qconfig",
    "search_observers",
    "segments",
    "sensitivity",
    "set_qparams",
    "set_state",
    "simulate_conformance",
    "text",
    "trace",
    "tune",
    "tuning",
    "unary",
    "verify",
    "with_camera",
    "wrap",
]

# The module of each public name; a module is imported when its first name is used.
_FROM = {
    "fxquant.analysis.explain": "Finding Findings explain",
    "fxquant.analysis.layers": "Intermediate Layer layers",
    "fxquant.analysis.partition": "Segment segments",
    "fxquant.analysis.report": "DeviationReport Report",
    "fxquant.analysis.text": "text",
    "fxquant.api": "Result calibrate check convert dump export_onnx load prepare quantize save",
    "fxquant.backends.aten.programs": "export_pt2 export_torchscript",
    "fxquant.backends.c.export_c": "export_c",
    "fxquant.backends.horizon.compiling": "compile_horizon",
    "fxquant.backends.horizon.export": "HorizonOptions export_horizon",
    "fxquant.backends.horizon.compiled_program": "CompiledCost",
    "fxquant.backends.onnx.metadata": "onnx_metadata",
    "fxquant.backends.onnx.segments": "export_segments run_segments",
    "fxquant.conformance.kit": "board_kit conformance_kit",
    "fxquant.conformance.results": "Conformance ProbeResult check_conformance simulate_conformance",
    "fxquant.errors": "AccumulatorOverflow CalibrationError CompilationError ConfigurationError ExportError FxQuantError Interrupted "
    "NotCalibrated NotFinite ScaleConflict StageViolation TraceError UnknownTarget UnsupportedOperator",
    "fxquant.reporting.forms": "record verify",
    "fxquant.frontend": "trace wrap",
    "fxquant.nn.camera": "with_camera",
    "fxquant.ops.core.custom": "operator unary",
    "fxquant.options": "Options",
    "fxquant.calibration.calibration": "freeze qparams set_qparams set_state",
    "fxquant.calibration.observations": "Observations observations",
    "fxquant.quantization.observers": "ClipObserver ClipStdObserver FixedScaleObserver HistogramObserver KLObserver LpObserver "
    "MinMaxObserver MixObserver MovingAverageMinMaxObserver MSEObserver Observer PercentileObserver",
    "fxquant.numerics.rounding": "AdaptiveRounding Nearest Rounding",
    "fxquant.quantization.spec": "ActivationConfig QConfig QConfigMapping State WeightConfig",
    "fxquant.reporting": "checks",
    "fxquant.reporting.advice": "Advice",
    "fxquant.reporting.statistics": "LayerComparison",
    "fxquant.reporting.comparing": "Comparison compare",
    "fxquant.reporting.inspection": "GraphDifference diff",
    "fxquant.reporting.estimate": "Estimate LayerEstimate estimate",
    "fxquant.reporting.page": "report",
    "fxquant.serialization.qconfig": "load_qconfig save_qconfig",
    "fxquant.prepared.stage": "Stage",
    "fxquant.target": "Roofline Target",
    "fxquant.tuning": "equalize",
    "fxquant.search.mixed_precision": "Budget MixedPrecision Speed mixed_precision",
    "fxquant.search.observer_search": "ObserverSearch ObserverTrial search_observers",
    "fxquant.search.sensitivity": "Sensitivity TensorSensitivity sensitivity",
    "fxquant.search.tune": "Tuned TuneStep tune",
}
_WHERE = {name: module for module, names in _FROM.items() for name in names.split()}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import and return a public name, or a module of this package."""
        if name in _WHERE:
            module = import_module(_WHERE[name])
            found = vars(module)[name] if name in vars(module) else import_module(f"{_WHERE[name]}.{name}")
        elif name.startswith("__") or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            found = import_module(f"{__name__}.{name}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
