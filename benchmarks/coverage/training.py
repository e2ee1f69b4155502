"""Quantization-aware training, heterogeneous models, accuracy tools, other devices, questions and mistakes."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.coverage.record import Here, Network, absent, chapter, part, refused, sure
from fxquant.compat import horizon

A, W, Q, M = fxq.ActivationConfig, fxq.WeightConfig, fxq.QConfig, fxq.QConfigMapping
DOCS = Path(__file__).parents[2] / "docs"


def trained(here: Here, config: Any = None, **options: Any) -> Any:
    """Return a model trained for two steps, back in state VALIDATE, with the bits of the integer model."""
    prepared = here.prepared(qconfig=config, **options)
    fxq.set_state(prepared, "train")
    optimizer = torch.optim.SGD(prepared.train().parameters(), 1e-3)
    for batch in here.batches[:2]:
        optimizer.zero_grad()
        prepared(batch).square().mean().backward()
        optimizer.step()
    fxq.set_state(prepared.eval(), "validate")
    here.exact(prepared)
    return prepared


def method(activation: str, weight: str = "statistics") -> Any:
    return Q(A(training=activation), weight=W(training=weight))


def loads_calibration(here: Here) -> None:
    other = fxq.prepare(here.model, here.x, "nash-e", method("learned"))
    sure(not other.load_state_dict(here.prepared().state_dict(), strict=False).unexpected_keys)
    fxq.set_state(other, "validate")
    here.exact(other)


def saturates(here: Here) -> None:
    prepared = here.prepared(qconfig=Q(A(threshold=0.5), input=A(threshold=0.5)))
    fxq.set_state(prepared, "train")
    x = here.x.clone().requires_grad_()
    prepared(x).sum().backward()
    sure(x.grad is not None and not x.grad[x.abs() > 0.6].any())


def freezing(here: Here) -> None:
    prepared = here.prepared()
    fxq.set_state(prepared, "train")
    fxq.freeze(prepared)
    before = fxq.qparams(prepared)
    prepared.train()(here.x * 3)
    sure(fxq.qparams(prepared) == before)


def mixed_in(here: Here) -> None:
    prepared = here.prepared()
    fxq.set_state(prepared, "train")
    fxq.freeze(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        output = prepared(here.x)
    sure(torch.equal(output.float(), prepared(here.x)))
    average = torch.optim.swa_utils.AveragedModel(prepared)
    average.update_parameters(prepared)
    fxq.set_state(average.module, "validate")
    fxq.convert(average.module)


def compiled(here: Here) -> None:
    prepared = here.prepared()
    fast = torch.compile(prepared, backend="eager")
    sure(torch.equal(fast(here.x), prepared(here.x)))


def several_processes(here: Here) -> None:
    """DistributedDataParallel in a group of one; tests/contract/test_distributed.py has several."""
    prepared = here.prepared()
    fxq.set_state(prepared, "train")
    fxq.freeze(prepared)  # statistics would move between the two passes
    prepared(here.x).sum().backward()
    alone = prepared.head.weight.grad.clone()
    prepared.zero_grad()
    dist.init_process_group("gloo", init_method=f"file://{here.folder / 'gradients'}", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(prepared)(here.x).sum().backward()
    finally:
        dist.destroy_process_group()
    sure(torch.equal(prepared.head.weight.grad, alone))


chapter(
    "Training",
    ("from a pre-trained model, calibrated", lambda h: trained(h)),
    ("from scratch, without calibration", lambda h: fxq.prepare(Network(), h.x)),
    ("parameters of a calibrated model loaded into another", loads_calibration),
    ("clip(round(x / scale)) · scale, to the bit", lambda h: h.exact(h.prepared())),
    ("scales from statistics", lambda h: trained(h, method("statistics"))),
    ("learned scales, LSQ and straight-through", lambda h: trained(h, method("learned", "learned"))),
    ("LSQ+ of affine grids", lambda h: trained(h, Q(A("int8", training="lsq+")))),
    ("PACT", lambda h: trained(h, method("pact"))),
    ("TQT", lambda h: trained(h, method("tqt", "tqt"))),
    ("frozen scales", lambda h: trained(h, method("frozen"))),
    ("named qconfigs of the plugin", lambda h: sure(horizon.default_qat_8bit_lsq_quant_qconfig)),
    ("no gradient beyond the range", saturates),
    ("training is what is deployed: the same bits", lambda h: trained(h)),
    ("batch norm folded, live or frozen",
     lambda h: [trained(h, options=fxq.Options(batch_norm=mode)) for mode in ("folded", "live", "frozen")]),
    ("scales frozen in mid-training", freezing),
    ("autocast, averaged weights", mixed_in),
    ("torch.compile of the prepared model", compiled),
    ("gradients over several processes", several_processes),
    ("hyper-parameters, anomalies, what to try: a page", lambda h: sure((DOCS / "guide" / "train.md").exists())),
)  # fmt: skip


class Ends(Network):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(super().forward(x)).real


class Plain(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float().to(x.dtype).double().float()).type_as(x)


def on_the_host(here: Here) -> Any:
    return here.quantized(Ends(), "bayes-e", qconfig=M().set_host("deep"))


def forced(here: Here) -> None:
    names = {layer.name for layer in fxq.inspect.layers(on_the_host(here).integer) if layer.device == "host" and not layer.boundary}
    sure("deep" in names and "fft_rfft" in names, str(names))


def through_the_host(here: Here) -> None:
    prepared = on_the_host(here).prepared
    fxq.set_state(prepared, "train")
    prepared(here.x).sum().backward()
    sure(all(parameter.grad is not None for parameter in prepared.parameters()))


def old_opset(here: Here) -> None:
    result = here.quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softmax(1)), "bernoulli2")
    report = result.verify(result.export(here.folder / "old.onnx", style="qdq", opset=11), here.batches[:1])
    assert isinstance(report, fxq.results.DeviationReport)
    # Fused, onnxruntime rounds to the nearest where bernoulli2 rounds down.
    sure(min(output.sqnr for output in report.outputs["onnxruntime"]) > 30)


chapter(
    "Heterogeneous models",
    ("what the march cannot runs on the host, by itself", lambda h: sure(h.quantized(Ends(), "bayes-e"))),
    ("forced there, by type or by name", forced),
    ("training through it", through_the_host),
    ("export as one ONNX file", lambda h: on_the_host(h).export(h.folder / "hosted.onnx", style="exact")),
    ("export at opset 11, float parts too", old_opset),
    ("proof of the file, segment by segment", lambda h: h.equal(on_the_host(h))),
    ("accuracy of the whole in PyTorch", lambda h: on_the_host(h).integer(h.x)),
    ("few, convex segments", lambda h: sure(len(fxq.inspect.segments(on_the_host(h).integer)) <= 5)),
    ("casts that change nothing cost nothing", lambda h: sure("none is left in float" in fxq.explain(h.quantized(Plain()).prepared))),
    ("which operator runs where", lambda h: fxq.inspect.devices(on_the_host(h).integer)),
)


# ---- accuracy tools ---------------------------------------------------------------------------------------------------


def html(here: Here) -> None:
    page = here.result.report(here.folder / "report.html", here.batches).read_text(encoding="utf-8")
    sure("<script" in page and "http://" not in page.split("<body")[0])


def dumped(here: Here) -> None:
    class Writer:
        seen = 0

        def add_scalar(self, *args: Any, **options: Any) -> None:
            self.seen += 1

        add_histogram_raw = add_text = add_histogram = add_scalar

    writer = Writer()
    here.result.compare(here.batches).write_tensorboard(writer)
    sure(writer.seen > 10)


def wrong_scale(here: Here) -> None:
    scales = fxq.qparams(here.result.prepared)
    broken = copy.deepcopy(here.result.prepared)
    fxq.set_qparams(broken, {**scales, "deep": scales["deep"] / 8})
    advice = fxq.compare(here.model, broken, here.batches).advice
    sure(advice and "deep" in str(advice[0]), str(advice[:1]))


def located(here: Here) -> None:
    other = copy.deepcopy(here.result.integer)
    with torch.no_grad():
        next(buffer for name, buffer in other.named_buffers() if name.endswith("deep.weight")).view(-1)[0] += 1
    report = fxq.verify(here.result.prepared, other, here.batches[:1], show_progress=False)
    sure(not report and "deep" in str(report))


chapter(
    "Accuracy tools",
    ("one page about a model", html),
    ("unfused patterns, and why", lambda h: fxq.inspect.not_fused(h.result.prepared)),
    ("how often modules are called", lambda h: sure(fxq.inspect.call_counts(h.model, h.x))),
    ("a check of the settings", lambda h: fxq.inspect.suspicious_settings(h.result.prepared)),
    (
        "export for a viewer: float, prepared and integer models",
        lambda h: [
            fxq.export_onnx(h.model, h.folder / "float.onnx", example_inputs=h.x),
            fxq.export_onnx(h.result.prepared, h.folder / "prepared.onnx"),
            h.result.export(h.folder / "integer.onnx"),
        ],
    ),
    ("similarity of tensors between stages", lambda h: sure(len(fxq.compare(h.model, h.result.integer, h.batches)) > 3)),
    ("statistics and TensorBoard, without histograms", dumped),
    ("weights compared", lambda h: sure(fxq.inspect.compare_weights(h.result.prepared, h.result.integer))),
    ("step by step: a part in float", lambda h: fxq.set_state(copy.deepcopy(h.result.prepared), "float", "stem")),
    ("two compiled models compared", lambda h: sure(fxq.inspect.diff(h.result.integer, h.quantized(Network()).integer))),
    ("memory, layer by layer", lambda h: fxq.inspect.memory(h.result.integer)),
    ("wide ranges and NaN found", lambda h: fxq.inspect.value_ranges(h.result.prepared, h.batches)),
    ("scales that are shared", lambda h: fxq.inspect.shared_scales(h.result.prepared)),
    ("sensitivity, tensor by tensor",
     lambda h: sure(fxq.search.sensitivity(h.model, h.batches, "nash-e", options=fxq.Options(measured=False), show_progress=False))),
    ("advice that names the layer and the cure", wrong_scale),
    ("the first difference located", located),
    (
        "mixed precision within a budget",
        lambda h: fxq.search.mixed_precision(
            h.model, h.batches, "nash-e", budget=fxq.search.Budget(weight_bits=6), options=fxq.Options(measured=False), show_progress=False
        ),
    ),
    ("which tool when: a page", lambda h: sure((DOCS / "guide" / "lost-decibel.md").exists())),
)  # fmt: skip

chapter(
    "Other devices",
    (
        "a model saved here runs there",
        lambda h: (
            part("moves by .to, and was run on CUDA by hand; no GPU in this run")
            if not torch.cuda.is_available()
            else sure(torch.equal(copy.deepcopy(h.result.integer).to("cuda")(h.x.cuda()).cpu(), h.result.integer(h.x)))
        ),
    ),
    ("TorchScript moved between devices", lambda h: absent("its graph names devices, as everywhere: write it where it runs")),
)


# ---- questions and mistakes -------------------------------------------------------------------------------------------


def later_operator(here: Here) -> None:
    refused(lambda: fxq.convert(fxq.prepare(here.model, here.x)), "no scale")


def other_target(here: Here) -> None:
    path = here.quantized(here.model, "bayes-e").export(here.folder / "other.onnx")
    report = fxq.verify(here.result.integer, path, here.batches[:1], show_progress=False)
    sure(not report and "the other for bayes-e" in str(report), str(report))


def in_colours(here: Here) -> None:
    class Camera(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.planes, self.colour = fxq.nn.Nv12ToYuv444(centred=True), fxq.nn.YuvToRgb(centred=True, mean=(120, 120, 120))
            self.network = nn.Conv2d(3, 4, 3)

        def forward(self, y: Tensor, uv: Tensor) -> Tensor:
            return self.network(self.colour(self.planes(y, uv)))

    planes = fxq.nn.rgb_to_nv12(torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8))
    sure("none is left in float" in fxq.explain(fxq.quantize(Camera().eval(), [planes], show_progress=False).prepared))


chapter(
    "Questions and mistakes",
    ("no compiled extension to be missing", lambda h: sure(not list(Path(fxq.__file__).parent.rglob("*.so")))),
    ("post-processing and losses left alone", lambda h: sure(not any("loss" in n.name for n in h.result.prepared.graph.nodes))),
    ("a file of another target is reported", other_target),
    ("accuracy is watched on the integers", lambda h: h.exact(h.result.prepared)),
    ("one FloatFunctional called twice", lambda h: h.quantized(_Twice())),
    ("an operator without a scale is an error", later_operator),
    ("YUV in place of RGB", in_colours),
    ("ranges that are too wide: advice", wrong_scale),
    ("a module that is scripted is refused", lambda h: refused(lambda: fxq.prepare(torch.jit.trace(h.model, h.x), h.x), "ScriptModule")),
    ("questions, and mistakes by task: pages", lambda h: sure("## Questions" in (DOCS / "guide" / "README.md").read_text("utf-8"))),
)


class _Twice(Network):
    def __init__(self) -> None:
        super().__init__()
        self.plus = horizon.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.plus.add(self.plus.add(x, self.deep(x)), x)
