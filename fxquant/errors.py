"""Errors with one shape: what / at / module / because / remedy.

Every error a user can cause is an `FxQuantError`. Its text states the problem, the line of the
user's own code, the module, the reason, and the remedy. The texts are golden-tested.
"""

from typing import Any, Protocol

__all__ = [
    "AccumulatorOverflow", "CalibrationError", "CompilationError", "ConfigurationError", "ExportError", "Interrupted", "NotCalibrated",
    "NotFinite", "ScaleConflict", "StageViolation", "TraceError", "UnknownTarget",
]  # fmt: skip


class Unless(Exception):
    """A base class of exceptions that are raised, with one text, where a condition does not hold."""

    @classmethod
    def unless(cls, holds: object, text: str) -> None:
        """Raise the exception with this text unless the condition holds."""
        if not holds:
            raise cls(text)


class Located(Protocol):
    """An object with a source location; an `fx.Node` has it in its `meta`."""

    name: str
    meta: dict[str, object]


class FxQuantError(Exception):
    """An error that states the problem, its place, the reason, and the remedy.

    what     one line, without a full stop
    node     the graph node it is about (its source line and module path are printed), or None
    because  the reason
    remedy   what the user can do now
    reached  of an error of the first trace at some sizes: how many operations were begun before it
    """

    reached: int | None = None

    def __init__(
        self, what: str, *, because: str, remedy: str, node: Located | None = None, at: str | None = None, module: str | None = None
    ) -> None:
        self.what, self.because, self.remedy = what, because, remedy
        self.node = node
        meta = node.meta if node is not None else {}
        self.at = at or _text(meta.get("source"))
        self.module = module or _text(meta.get("module"))
        name = f" (node %{self.node.name})" if self.node is not None else ""
        rows = [self.what + name]
        for label, value in (("at", self.at), ("module", self.module), ("because", self.because), ("remedy", self.remedy)):
            if value:
                rows.append(f"  {label:<8} " + value.replace("\n", "\n" + " " * 11))
        super().__init__("\n".join(rows))


def _text(value: object) -> str | None:
    return str(value) if value else None


class TraceError(FxQuantError):
    """The model's Python could not be turned into a graph."""


class ScaleConflict(FxQuantError):
    """Tensors that must share one scale ask for different ones."""


class StageViolation(FxQuantError):
    """A graph holds something its stage does not allow: a defect of a pass."""


class CalibrationError(FxQuantError):
    """Calibration data is missing, malformed or not finite."""


class NotCalibrated(FxQuantError):
    """A scale is needed that no calibration has determined."""


class NotFinite(FxQuantError):
    """A parameter, or a learned scale, is NaN or infinite, so it cannot become integers."""


class AccumulatorOverflow(FxQuantError):
    """An accumulator cannot be proved to fit, and no wider path exists."""


class UnknownTarget(FxQuantError):
    """A target name is unknown."""


class ConfigurationError(FxQuantError):
    """An argument of a public function is not usable."""


class MissingModule(ConfigurationError, AttributeError):
    """A requested module of the float model does not exist in the graph made from it."""


class ExportError(FxQuantError):
    """The graph cannot be exported, a file cannot be written, or a file that is read is damaged or of another kind."""


class CompilationError(FxQuantError):
    """A compiler or simulator of another vendor refused a model, or crashed."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or KeyboardInterrupt in a batch or a metric, stopped a function that has a partial result.

    result   what the function would have returned for the batches that it had finished
    """

    def __init__(self, what: str, result: Any) -> None:
        self.result = result
        super().__init__(f"{what}; what it found until then is this exception's `result`")
