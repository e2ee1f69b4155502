"""Horizon's tools for inspecting a model and comparing two, as far as fxquant has the information that they show."""

import contextlib
import functools
import io
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.compat.common import foreign, refusals, refused, unknown
from fxquant.compat.horizon.served import required
from fxquant.compat.horizon.served.flow import integer_of
from fxquant.errors import ConfigurationError
from fxquant.ir.graph import fact, is_deployed, stage_of
from fxquant.prepared.batches import first_batches
from fxquant.reporting.statistics import sqnr_of
from fxquant.support import logger
from fxquant.support.arguments import FLAG, FOLDER, accepted, checked
from fxquant.support.files import write_file

takes = foreign("profiler", refusals("profiler", similarity_func=lambda measure: measure in ("Cosine", "SQNR")))
MEASURES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "Cosine": lambda one, other: float(F.cosine_similarity(one.flatten(), other.flatten(), 0)),
    "MSE": lambda one, other: float(F.mse_loss(other, one)),
    "L1": lambda one, other: float(F.l1_loss(other, one)),
    "KL": lambda one, other: float(F.kl_div(F.log_softmax(other.flatten(), 0), F.softmax(one.flatten(), 0), reduction="sum")),
    "SQNR": lambda one, other: sqnr_of(float(one.square().sum()), float((one - other).square().sum())),
}


class Similarity(NamedTuple):
    """A tensor of two models: the similarity of its values, and their largest difference."""

    name: str
    similarity: float
    scale: float | None
    atol: float


def _values(model: Any, inputs: Any, other: Any) -> dict[str, Tensor]:
    """Return the float values of a form's tensors by name; for a float model, the float results of the other form's operators."""
    state = None
    if not isinstance(model, fx.GraphModule) or stage_of(model) is None:
        target = getattr(other, "meta", {}).get("target")
        model, state = fxq.prepare(model, inputs, required("featuremap_similarity") if target is None else target), fxq.State.FLOAT
    return next(iter(fxq.inspect.record(model, [inputs], ["quantized", "outputs"], real=True, state=state)))


def _scales(model: Any) -> dict[str, float]:
    if not isinstance(model, fx.GraphModule) or stage_of(model) is None:
        return {}
    scales = {layer.name: layer.grid.scale for layer in fxq.inspect.layers(model) if layer.grid is not None}
    return {name: scale for name, scale in scales.items() if isinstance(scale, float)}


@takes()
def featuremap_similarity(
    model1: nn.Module, model2: nn.Module, inputs: Any, similarity_func: str | Callable[[Tensor, Tensor], float] = "Cosine",
    threshold: float | None = None, out_dir: str | None = None,
) -> list[Similarity]:  # fmt: skip
    """Compare the tensors that two forms of a model have in common, float, prepared or integer, in the order they are computed.

    similarity_func   "Cosine", "MSE", "L1", "KL", "SQNR" in dB, or a function of two tensors
    threshold         rows on its wrong side are marked with * in the file: below it for Cosine and SQNR, above it for others
    devices           has no effect: a model runs where its parameters are
    out_dir           a folder for similarity.txt
    """
    measure = MEASURES.get(similarity_func) if isinstance(similarity_func, str) else similarity_func
    if not callable(measure):
        raise unknown("similarity_func", similarity_func, f"one of {', '.join(MEASURES)}, or a function")
    first, second = _values(model1, inputs, model2), _values(model2, inputs, model1)
    scales = {**_scales(model1), **_scales(model2)}
    rows = []
    for name, one in first.items():
        if name in second and one.shape == second[name].shape and one.numel():
            mine, theirs = one.detach().float(), second[name].detach().float()
            rows.append(Similarity(name, measure(mine, theirs), scales.get(name), float((mine - theirs).abs().max())))
    higher_is_better = similarity_func in ("Cosine", "SQNR")
    marked = [threshold is not None and (row.similarity < threshold if higher_is_better else row.similarity > threshold) for row in rows]
    lines = [
        f"{'*' if mark else ' '} {row.name:32} {row.similarity:12.6g} {'' if row.scale is None else f'{row.scale:.6g}':>12}"
        f" {row.atol:12.6g}"
        for row, mark in zip(rows, marked, strict=True)
    ]
    _write(out_dir, "similarity.txt", "\n".join([f"  {'tensor':32} {'similarity':>12} {'scale':>12} {'atol':>12}", *lines, ""]))
    return rows


def _write(folder: str | None, name: str, text: str) -> None:
    if folder is not None:
        write_file(Path(folder) / name, text)


@takes()
def check_qconfig(model: fx.GraphModule, prefixes: Any = (), out_dir: str | None = None) -> str:
    """Return how the operators of a prepared or integer model are quantized, and which requests were not met; `fxquant.explain`.

    prefixes  only operators of modules whose paths begin with one of these
    out_dir   a folder for qconfig_info.txt
    """
    text = fxq.explain(model)
    if chosen := (prefixes,) if isinstance(prefixes, str) else tuple(prefixes):
        places = {layer.name: layer.module or "" for layer in fxq.inspect.layers(model)}
        names = [name for name, path in places.items() if any(f"{path}.".startswith(f"{prefix}.") for prefix in chosen)]
        text = "".join(line + "\n" for line in text.splitlines() if line.split(" ")[0].removeprefix("%") in names)
    _write(out_dir, "qconfig_info.txt", text)
    return text


@takes(save_results=FLAG)
def check_qat_model(model: fx.GraphModule, save_results: bool = False, out_dir: str | None = None) -> str:
    """Return a text of a prepared model: operators that are not fused, layers called several times, unusual settings, and all operators.

    save_results  whether to write model_check_result.txt into out_dir, by default the working directory
    """
    calls = Counter(layer.module for layer in fxq.inspect.layers(model) if layer.weight_bytes)
    shared = "".join(f"  {path} {count}\n" for path, count in calls.items() if count > 1) or "  none\n"
    parts = (
        fxq.inspect.not_fused(model),
        f"layers called several times:\n{shared}",
        fxq.inspect.suspicious_settings(model),
        fxq.explain(model),
    )
    text = "\n".join(map(str, parts))
    if save_results or out_dir is not None:
        _write(out_dir or ".", "model_check_result.txt", text)
    return text


@checked()
def check_deploy_device(model: fx.GraphModule) -> dict[str, str]:
    """Return where every operator of a prepared or integer model runs: the march, or "host"."""
    return {layer.name: layer.device for layer in fxq.inspect.layers(model)}


@checked(print_tabulate=FLAG)
def get_module_called_count(
    model: nn.Module, example_inputs: Any, check_leaf_module: Any = None, print_tabulate: bool = True
) -> dict[str, int]:
    """Count the calls of each module without children, or that `check_leaf_module(module)` selects: 0 unused, above 1 shared.

    The counts are printed unless `print_tabulate` is False.
    """
    chosen = check_leaf_module or (lambda module: not list(module.children()))
    counts = {name: 0 for name, module in model.named_modules() if chosen(module)}

    def count(name: str, *_: Any) -> None:
        counts[name] += 1

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in counts:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(functools.partial(count, name)))
        model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)
    if print_tabulate:
        print("\n".join(f"{name:40} {count}" for name, count in counts.items()))
    return counts


@takes()
def check_model(module: Any, example_inputs: Any, march: str | None = None) -> int:
    """Return 0 if a float or prepared model meets all limits of the march without float operators, otherwise the number of findings.

    An integer model is compiled instead, to check it with the vendor's compiler itself: 0, or 1 if it foreign. Findings and
    refusals are printed. The other arguments have no effect. Raises ConfigurationError for an integer model without the tool.
    """
    if isinstance(module, torch.jit.ScriptModule):
        module = integer_of(module, "check_model")
    if isinstance(example_inputs, list):
        example_inputs = tuple(example_inputs)
    if isinstance(module, fx.GraphModule) and is_deployed(module):
        with tempfile.TemporaryDirectory() as folder:
            try:
                fxq.board.compile_horizon(fxq.board.export_horizon(module, folder), show_progress=False)
            except (fxq.errors.ExportError, fxq.errors.CompilationError) as error:
                print(error)
                return 1
        return 0
    findings = fxq.check(module, example_inputs, required("check_model") if march is None else march)
    if findings:
        return 0
    print(findings)
    return len(findings)


@checked(print_tabulate=FLAG)
def check_unfused_operations(model: nn.Module, example_inputs: Any, print_tabulate: bool = True) -> Any:
    """Return a row for each batch norm, addition and relu of a model that is not fused into the layer before it, with the reason.

    A float model is prepared for the march that was set. The rows are printed unless `print_tabulate` is False.
    """
    prepared = isinstance(model, fx.GraphModule) and stage_of(model) == "PREPARED"
    rows = fxq.inspect.not_fused(model if prepared else fxq.prepare(model, example_inputs, required("check_unfused_operations")))  # type: ignore[arg-type]
    if print_tabulate:
        print(rows)
    return rows


@takes()
def compare_weights(float_model: nn.Module, qat_quantized_model: fx.GraphModule, out_dir: str | None = None) -> Any:
    """Return the difference of the weights of two forms of a model, float, prepared or integer, a row each, worst first.

    out_dir   a folder for weight_comparison.txt
    """
    target = getattr(qat_quantized_model, "meta", {}).get("target")
    if target is not None and (not isinstance(float_model, fx.GraphModule) or stage_of(float_model) is None):
        inputs = tuple(
            torch.zeros(fact(node).at(2), dtype=fact(node).dtype, device="cpu")
            for node in qat_quantized_model.graph.find_nodes(op="placeholder")
        )
        float_model = fxq.prepare(float_model, inputs, target)
    rows = fxq.inspect.compare_weights(float_model, qat_quantized_model)
    _write(out_dir, "weight_comparison.txt", f"{rows}\n")
    return rows


@takes(out_dir=FOLDER.or_none("the working directory"))
def model_profiler(model1: nn.Module, model2: fx.GraphModule, example_inputs: Any, out_dir: str | None = None) -> Path:
    """Write profiler.html, the page of `fxquant.report`: the second model compared with the first. Return its path.

    `mode` and `kwargs_dict` have no effect: the kinds of the models are known, and everything is on one page.
    """
    batch = example_inputs if isinstance(example_inputs, torch.Tensor | dict) else tuple(example_inputs)
    return fxq.report(model2, Path(out_dir or ".") / "profiler.html", [batch], reference=model1)


TYPES = ("fake_quant", "pre_export", "export", "convert")


def _left_out(called: str, options: Mapping[str, Any]) -> None:
    """Log which options of a call have no effect; an option of None is not logged."""
    ignored = [name for name, value in options.items() if value is not None]
    if ignored:
        logger.info("QuantAnalysis%s: without effect here: %s", called, ", ".join(ignored))


class QuantAnalysis:
    """Compares two stages of a model on the batch that they differ most on.

    baseline_model, analysis_model   a float model and a prepared one, or a prepared one and an integer one
    analysis_model_type              "fake_quant", "pre_export", "export" or "convert"
    out_dir                          where files are written

    device_ids, and options of the methods that this class does not name, have no effect; a line of the log names them. Raises
    ConfigurationError for another type, and for post_process.
    """

    case: Any
    _comparison: Any

    def __init__(
        self, baseline_model: nn.Module, analysis_model: Any, analysis_model_type: str, device_ids: Any = None, post_process: Any = None,
        out_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        if analysis_model_type not in TYPES:
            raise unknown("analysis_model_type", analysis_model_type, f"one of {', '.join(TYPES)}")
        if post_process is not None:
            raise refused("QuantAnalysis(post_process)")
        _left_out("", {"device_ids": device_ids})
        models: tuple[Any, Any] = baseline_model, analysis_model
        self.baseline, self.analysis = (each if isinstance(each, nn.Module) else getattr(each, "model", each) for each in models)
        self.out_dir = Path(accepted("QuantAnalysis", "out_dir", out_dir or "./horizon_quant_analysis", FOLDER))
        self.clean()

    def auto_find_bad_case(self, dataloader: Iterable[Any], num_steps: int | None = None, **options: Any) -> int:
        """Select the batch on which the outputs differ most, by the mean of squares; return its index."""
        _left_out(".auto_find_bad_case", options)
        worst, worst_index = -1.0, -1
        for index, batch in enumerate(first_batches(dataloader, num_steps)):
            difference = fxq.compare(self.baseline, self.analysis, [batch], show_progress=False)
            largest = max((layer.mse for layer in difference.outputs if layer.name.startswith("output")), default=0.0)
            if largest > worst:
                worst, worst_index, self.case = largest, index, batch
        if worst_index < 0:
            raise ConfigurationError("a bad case was not found", because="the dataloader yielded no batch", remedy="pass one with a batch")
        return worst_index

    def set_bad_case(self, data: Any) -> None:
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
            raise refused("QuantAnalysis.case")
        return self.case

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("plot_", "tune_")):
            raise AttributeError(name)
        raise refused("QuantAnalysis.plot", name=name)

    def clean(self) -> None:
        """Forget the selected batch and its comparison."""
        self.case = self._comparison = None

    def run(self, device_id: Any = None, **options: Any) -> None:
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
            raise refused("QuantAnalysis.sensitivity")
        result = fxq.search.sensitivity(self.analysis, [self._case()], options=fxq.Options(widths=(8,)), show_progress=False)
        rows = [(tensor.name.removesuffix(".weight"), tensor.kind, max(tensor.noise.values(), default=0.0)) for tensor in result.ranked()]
        write_file(self.out_dir / "output_sensitive_ops.txt", f"{result}\n")
        return rows
