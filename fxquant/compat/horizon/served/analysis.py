"""Horizon's QuantAnalysis over `fxquant.compare` and `fxquant.sensitivity`."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxquant as fxq
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import is_deployed
from fxquant.prepared.batches import first_batches
from fxquant.support.arguments import FOLDER, accepted
from fxquant.support.files import write_file

logger = logging.getLogger("fxquant")

TYPES = ("fake_quant", "pre_export", "export", "convert")


def _left_out(called: str, options: Mapping[str, Any]) -> None:
    """Log which options of a call have no effect; an option of None is not logged."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        logger.info("QuantAnalysis%s: without effect here: %s", called, ", ".join(given))


class QuantAnalysis:
    """Compares two stages of a model on the batch that they differ most on.

    baseline_model, analysis_model   a float model and a prepared one, or a prepared one and an integer one
    analysis_model_type              "fake_quant", "pre_export", "export" or "convert"
    out_dir                          where files are written

    device_ids, and options of the methods that this class does not name, have no effect; a line of the log names them. Raises
    ConfigurationError for another type, and for post_process.
    """

    def __init__(
        self, baseline_model: nn.Module, analysis_model: Any, analysis_model_type: str, device_ids: Any = None, post_process: Any = None,
        out_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        if analysis_model_type not in TYPES:
            raise ConfigurationError(
                f"analysis_model_type={analysis_model_type!r} is unknown",
                because=f"it is one of {', '.join(TYPES)}",
                remedy="pass one of these",
            )
        if post_process is not None:
            raise ConfigurationError(
                "QuantAnalysis(post_process=…) cannot be done",
                because="outputs are compared as the models return them",
                remedy="leave it out, or make it part of the model",
            )
        _left_out("", {"device_ids": device_ids})
        self.baseline = getattr(baseline_model, "model", baseline_model) if not isinstance(baseline_model, nn.Module) else baseline_model
        self.analysis = getattr(analysis_model, "model", analysis_model) if not isinstance(analysis_model, nn.Module) else analysis_model
        self.out_dir = Path(accepted("QuantAnalysis", "out_dir", out_dir or "./horizon_quant_analysis", FOLDER))
        self.case: Any = None
        self._comparison: Any = None

    def auto_find_bad_case(self, dataloader: Iterable[Any], num_steps: int | None = None, **options: Any) -> int:
        """Select the batch on which the outputs differ most, by the mean of squares; return its index."""
        _left_out(".auto_find_bad_case", options)
        worst, found = -1.0, -1
        for index, batch in enumerate(first_batches(dataloader, num_steps)):
            difference = fxq.compare(self.baseline, self.analysis, [batch], show_progress=False)
            largest = max((layer.mse for layer in difference.outputs if layer.name.startswith("output")), default=0.0)
            if largest > worst:
                worst, found, self.case = largest, index, batch
        if found < 0:
            raise ConfigurationError("a bad case was not found", because="the dataloader yielded no batch", remedy="pass one with a batch")
        return found

    def set_bad_case(self, data: Any) -> None:
        """Select this batch."""
        self.case = data

    def load_bad_case(self, filename: str | Path | None = None) -> None:
        """Select the batch that `save_bad_case` saved."""
        self.case = torch.load(filename or self.out_dir / "all_badcase_info.pt")

    def save_bad_case(self) -> Path:
        """Save the batch in all_badcase_info.pt; return the path."""
        archive = io.BytesIO()
        torch.save(self._case(), archive)
        return write_file(self.out_dir / "all_badcase_info.pt", archive.getvalue())

    def _case(self) -> Any:
        if self.case is None:
            raise ConfigurationError(
                "a bad case was not set yet",
                because="what is compared is one batch",
                remedy="call auto_find_bad_case(dataloader) or set_bad_case(batch)",
            )
        return self.case

    def run(self, device_id: Any = None, **options: Any) -> None:
        """Compare the two models on the bad case."""
        _left_out(".run", {"device_id": device_id, **options})
        self._comparison = fxq.compare(self.baseline, self.analysis, [self._case()], show_progress=False)

    def compare_per_layer(self, **options: Any) -> Any:
        """Return the difference of each layer as a `fxquant.Comparison`, also written to compare_per_layer_out.txt."""
        _left_out(".compare_per_layer", options)
        if self._comparison is None:
            self.run()
        write_file(self.out_dir / "compare_per_layer_out.txt", f"{self._comparison}\n")
        return self._comparison

    def sensitivity(self, **options: Any) -> list[tuple[str, str, float]]:
        """Return rows (operator, "activation" or "weight", noise to signal), worst first, for SensitivityTemplate; also written to a file.

        Raises ConfigurationError if the analysis model is not a prepared one.
        """
        _left_out(".sensitivity", options)
        if is_deployed(self.analysis):
            raise ConfigurationError(
                "sensitivities of an integer model cannot be measured",
                because="its scales are constants",
                remedy="pass the prepared model it was made of",
            )
        found = fxq.sensitivity(self.analysis, [self._case()], widths=(8,), show_progress=False)
        rows = [(tensor.name.removesuffix(".weight"), tensor.kind, max(tensor.noise.values(), default=0.0)) for tensor in found.ranked()]
        write_file(self.out_dir / "output_sensitive_ops.txt", f"{found}\n")
        return rows
