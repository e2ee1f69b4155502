"""In depth, the API, the appendix with its operators, and PyTorch's own quantization."""

import copy
import pickle
import re
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.coverage.record import Function, Here, Network, State, absent, chapter, part, refused, sure
from benchmarks.operators.__main__ import PAGE as OPERATORS
from benchmarks.operators.measure import DECIDED, INTEGER, measure
from benchmarks.operators.page import TARGETS
from benchmarks.operators.rows import FAMILIES
from benchmarks.operators.spelling import Spelling
from fxquant import backends
from fxquant.compat import horizon, torch_ao
from fxquant.ops.elementwise.arithmetic import add, mul

A, W, Q, M = fxq.ActivationConfig, fxq.WeightConfig, fxq.QConfig, fxq.QConfigMapping


def camera(here: Here) -> None:
    photograph = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    y, uv = fxq.nn.rgb_to_nv12(photograph)
    back = fxq.nn.YuvToRgb()(fxq.nn.Nv12ToYuv444()(y, uv))
    sure(back.shape == photograph.shape)


def pyramid(here: Here) -> State:
    model = nn.Sequential(fxq.nn.YuvToRgb(centred=True, mean=(110.0, 115.0, 120.0), std=(60.0, 62.0, 64.0)), nn.Conv2d(3, 4, 3))
    images = [fxq.nn.Nv12ToYuv444(centred=True)(*fxq.nn.rgb_to_nv12(torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)))]
    prepared = fxq.prepare(model.eval(), images[0], "bayes-e")
    fxq.calibrate(prepared, images, show_progress=False)
    fxq.set_qparams(prepared, {next(iter(fxq.qparams(prepared))): 1.0})
    folder = fxq.board.export_horizon(fxq.convert(prepared), here.folder / "camera", camera="nv12")
    sure("input_type_rt: 'nv12'" in (folder / "model.yaml").read_text())
    return part("NV12 of the pyramid and YUV444 from memory, for bernoulli2, bayes and bayes-e; crops of a resizer are not an input")


def normalised(here: Here) -> None:
    class Bytes(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.float() / 255 - 0.5) / torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1))

    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    result = fxq.quantize(Bytes().eval(), [images], target="nash-e", show_progress=False)
    sure("none is left in float" in fxq.explain(result.prepared))


def in_segments(here: Here) -> None:
    fxq.export.export_segments(here.result.integer, here.folder / "parts", cut=["deep"])
    (output,) = fxq.export.run_segments(here.folder / "parts", here.x)
    sure(torch.equal(output, here.result.integer(here.x)))


def patterns(here: Here) -> None:
    for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ConvTranspose2d(3, 3, 3, padding=1)):
        for function in (lambda x: F.relu6(x + 1), lambda x: torch.relu(x)):
            names = [
                one.operator
                for one in fxq.inspect.layers(here.quantized(nn.Sequential(layer, nn.BatchNorm2d(3), Function(function, False))).prepared)
            ]
            sure("batch_norm" not in names, str(names))


def reconstruction(here: Here) -> None:
    prepared = here.prepared(qconfig=Q(weight=W("int4")))
    fxq.tuning.adaround(prepared, here.batches, steps=10, show_progress=False)
    here.exact(prepared)


def fast_mode(here: Here) -> None:
    sure(torch.equal(horizon.convert_fx(here.result.prepared, fast_mode=True)(here.x), here.result.integer(here.x)))


def own_pass(here: Here) -> None:
    ran: list[int] = []

    def count(gm: torch.fx.GraphModule, context: Any) -> int:
        ran.append(len(gm.graph.nodes))
        return 0

    fxq.prepare(here.model, here.x, options=fxq.Options(passes={"batchnorm.fold": count}))
    sure(ran)
    refused(lambda: fxq.prepare(here.model, here.x, options=fxq.Options(passes={"nonsense": count})), "names no pass")


def own_operator(here: Here) -> None:
    name = "coverage_mean_of_two"
    mean = fxq.extend.operator(name, lambda a, b: (a + b) / 2, ["a", "b"], expand=lambda build, a, b: build(mul, build(add, a, b), 0.5))

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mean(x, torch.tanh(x))

    sure(here.integer(Custom()) is None)


def engine(here: Here) -> State:
    before = torch.backends.quantized.engine
    try:
        for name in {"qnnpack", "x86"} & set(torch.backends.quantized.supported_engines):
            torch.backends.quantized.engine = name
            prepared = torch_ao.prepare_fx(here.model, torch.ao.quantization.default_qconfig, (here.x,))
            sure(prepared.meta["target"].name == "x86")
    finally:
        torch.backends.quantized.engine = before
    return part("it has no effect: the target is x86, with the arithmetic of all engines, or the one that target= says")


def observer_dict(here: Here) -> State:
    observers: dict[str, Any] = {}
    torch_ao.get_observer_dict(here.result.prepared, observers)
    sure(len(observers) > 3 and next(fxq.inspect.record(here.result.integer, [here.x])))
    return part("a RecordingObserver is refused: fxq.inspect.record gives the values, without keeping them")


def command_c(here: Here) -> None:
    source = fxq.export.export_c(here.result.integer, here.folder / "model.c", batch_size=1)
    sure(source.exists() and (shutil.which("cc") is None or source.stat().st_size > 1000))


chapter(
    "In depth",
    ("fusion alone, and every pass seen", lambda h: fxq.prepare(h.model, h.x, until="activation.fuse")),
    ("colours for training: RGB, BGR, gray, YUV in both swings",
     lambda h: [getattr(fxq.nn, name)() for name in ("RgbToYuv444", "BgrToYuv444", "RgbToGray", "BgrToGray", "YuvToBgr")]),
    ("colours and normalisation at the input of the integer model", lambda h: fxq.nn.YuvToRgb(mean=(1, 2, 3), std=(4, 5, 6))),
    ("NV12 inputs", camera),
    ("resizers and pyramids of the chip's image path", pyramid),
    ("bytes normalised inside the model", normalised),
    ("segmented deployment", in_segments),
    ("fusions, in both orders", patterns),
    ("a fusion of one's own", own_pass),
    ("AdaRound, reconstruction", reconstruction),
    ("BRECQ and QDrop by blocks",
     lambda h: fxq.tuning.reconstruct(h.prepared(qconfig=Q(weight=W("int4"))), h.batches, steps=4, show_progress=False)),
    ("calibration and tuning by themselves", lambda h: fxq.tune(h.model, h.batches, "nash-e", tolerance=5.0, steps=2, show_progress=False)),
    ("a program in C, without anything else", command_c),
)  # fmt: skip


def checks_limits(here: Here) -> None:
    wide = nn.Sequential(nn.Conv2d(3, 4, 3, dilation=3)).eval()
    findings = fxq.check(wide, here.x, "bernoulli2")
    sure(not findings and "dilation" in str(findings))
    sure("dilation" in fxq.explain(fxq.prepare(wide, here.x, "bernoulli2", options=fxq.Options(adapt=True))))


def geometry(here: Here) -> State | None:
    return here.integer(
        lambda x: fxq.nn.Correlation(1)(x, x.flip(2)), lambda x: fxq.nn.Warp()(x, x[:, :2].permute(0, 2, 3, 1)), target="nash-e"
    )


def tables(here: Here) -> State | None:
    return here.integer(fxq.nn.SegmentLUT(torch.sigmoid), target="nash-e")


def constants(here: Here) -> None:
    class Returns(Network):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("anchors", torch.rand(4, 2))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.anchors

    here.equal(here.quantized(Returns()))


def compiled(here: Here) -> State:
    integer = here.quantized(Network(), "bayes-e").integer
    names = horizon.export_hbir(integer, [here.x], here.folder / "hbir" / "net.hbir", march="bayes-e")
    sure(names == (["x"], ["head_dequantize"]), str(names))
    refused(lambda: horizon.compile_model(here.result.integer, [here.x], here.folder / "net.hbm", march="nash-e"), "hb_compile")
    return part("by the vendor's installed compiler, for bernoulli2, bayes and bayes-e; for nash files of hb_compile, untried")


def perf_model(here: Here) -> State:
    costs = horizon.perf_model(here.result.integer, [here.x], out_dir=here.folder / "perf")
    sure(sum(row.microseconds for row in costs) > 0 and "nash-e" in (here.folder / "perf" / "estimate.txt").read_text())
    return part("for nash fxquant's own bounds; the vendor's figures need its compiler, for bernoulli2, bayes and bayes-e")


def plugin_checkpoint(here: Here) -> None:
    horizon.set_march("nash-e")
    student = horizon.prepare(here.model, here.x, horizon.default_qat_qconfig_setter)
    weights = {name: value for name, value in student.state_dict().items() if not name.startswith("quantized.")}
    student.load_state_dict({**weights, "deep.activation_post_process.scale": torch.tensor([0.03])}, strict=False)
    sure(abs(fxq.qparams(student)["deep"] - 0.03) < 1e-6)


chapter(
    "API",
    ("marches", lambda h: horizon.March.BAYES_E),
    ("get_default_qconfig and the named ones", lambda h: [horizon.get_default_qconfig(), horizon.default_qat_8bit_fake_quant_qconfig]),
    ("FakeQuantize and its settings", lambda h: horizon.FakeQuantize.with_args(dtype="qint8")),
    ("prepare, convert and fuse, by their names",
     lambda h: sure(all(map(callable, (horizon.prepare_qat_fx, horizon.convert_fx, horizon.fuse_fx))))),
    ("the same of eager mode", lambda h: sure(all(map(callable, (horizon.prepare_qat, horizon.convert, horizon.fuse_modules))))),
    (
        "fast_mode of convert",
        lambda h: (
            sure(torch.equal(horizon.convert_fx(h.result.prepared, fast_mode=True)(h.x), h.result.integer(h.x)))
            or part("it has no effect: integer models run by kernels with the reference's bits")
        ),
    ),
    ("ONNX: names, opsets, dynamic batch, layouts",
     lambda h: h.result.export(h.folder / "n.onnx", input_names=["image"], layouts={"image": "NHWC"})),
    ("ONNX of a model that returns constants", constants),
    ("saved files with a version", lambda h: sure(fxq.load(fxq.save(h.result.integer, h.folder / "v.fxq")))),
    ("correlation and warping", geometry),
    ("a function as a table", tables),
    ("limits checked, and mended", checks_limits),
    ("compile_model, export_hbir", compiled),
    ("perf_model", perf_model),
    ("visualize_model", lambda h: sure("<" in horizon.visualize_model(h.result.integer, save_path=h.folder / "drawn.html").read_text())),
    ("checkpoints of the plugin", plugin_checkpoint),
)  # fmt: skip


class Stubbed(Network):
    def __init__(self, scale: float | None = 1 / 64) -> None:
        super().__init__()
        self.quant, self.dequant = horizon.QuantStub(scale=scale), horizon.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(super().forward(self.quant(x)))


def stubs(here: Here) -> None:
    scales = fxq.qparams(here.quantized(Stubbed()).prepared)
    sure(1 / 64 in scales.values(), str(scales))
    for scale in (None, 1 / 4096):
        prepared = here.quantized(Stubbed(scale), qconfig=M().set_module_name("quant", Q(A("int16")))).prepared
        dtypes = [layer.dtype for layer in fxq.inspect.layers(prepared)]
        sure((dtypes[0], dtypes[1]) == ("int16", "int8"), str(dtypes))
        here.exact(prepared)


def of_pytorch(here: Here) -> State:
    """Prepare a call form of each family, and compare it with the page of operators, which has tried every form; return its totals."""
    page = OPERATORS.read_text(encoding="utf-8")
    for family, (first, *_) in FAMILIES.items():
        form = Spelling(family, first, first.texts[0])
        results = {dtype: measure(form, "nash-e", dtype, DECIDED) for dtype in ("int8", "int16")}
        dtypes = " ".join(dtype.removeprefix("int") for dtype, result in results.items() if result.kind == INTEGER) or "–"
        row = next(line.split(" | ") for line in page.splitlines() if line.startswith(f"| {first.operator} | `{form.text}` |"))
        sure(row[TARGETS.index("nash-e") + 3].strip("¹") == dtypes, f"{form.name}: {results}")
    totals = re.search(r"(?m)^On (.*) of all\b", page)
    assert totals is not None
    return part(f"on {totals[1]} of all")


def boxes(here: Here) -> State:
    anchors, scores, deltas = torch.rand(6, 4).sort(1)[0], torch.rand(2, 6, 3), torch.zeros(2, 6, 4)
    detections = fxq.nn.DetectionPostProcess(4, 0.1)(scores, deltas, anchors)
    sure(detections[0].shape == (2, 4, 4))
    sure(horizon.functional.nms(anchors, scores[0, :, 0], 1.0).tolist() == scores[0, :, 0].argsort(descending=True).tolist())
    sure(not hasattr(horizon.nn, "DetectionPostProcess"))
    return part("in float, on the host; post-processes are refused under the plugin's names, and so are turned boxes")


def regions(here: Here) -> State | None:
    align = horizon.nn.MultiScaleRoIAlign((2, 2), [4, 8])
    rois = torch.tensor([[[0.0, 0, 9, 9]]])
    sure(align([torch.ones(1, 2, 8, 8), torch.ones(1, 2, 4, 4)], rois).eq(1).all())
    ranks = torch.tensor([0, 1, 1])
    pool = fxq.nn.BEVPool((2, 2), ranks, ranks * 0, ranks)
    sure(pool(torch.ones(1, 1, 2, 1, 1), torch.ones(1, 1, 3, 1, 1)).sum() == 9)
    clouds, ends = [torch.rand(20, 4)], torch.tensor([0.0, 0, 0, 1, 1, 1])
    features, places = horizon.nn.functional.point_pillars_preprocess(clouds, ends, torch.tensor([0.5, 0.5, 1.0]), 9, 4, True)
    sure(features.shape == (1, 4, 9, 4) and places.shape == (9, 4))
    return part("regions are integer; pillars and pooled maps are in float, since where elements go is data")


def deformable(here: Here) -> State | None:
    layer = fxq.nn.DeformConv2d(8, 4, 3, padding=1)
    return here.integer(lambda x: layer(x, torch.cat((x, x, x[:, :2]), 1)), target="nash-e")


chapter(
    "Operators",
    ("stubs say where integers begin and end, with their scale and dtype", stubs),
    ("FloatFunctional", lambda h: horizon.FloatFunctional().add(h.x, h.x)),
    ("operators of PyTorch, each in its call forms: [the page of operators](OPERATORS.md)", of_pytorch),
    ("deformable convolution", deformable),
    ("boxes of detectors: nms and post-processes", boxes),
    ("regions, pillars, and maps seen from above", regions),
)


# ---- PyTorch ----------------------------------------------------------------------------------------------------------


def program(here: Here) -> None:
    exported = torch.export.export(here.model, (here.x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    sure("none is left in float" in fxq.explain(fxq.prepare(exported, here.x)))


def two_step(here: Here) -> None:
    prepared = torch_ao.prepare_fx(here.model, torch.ao.quantization.get_default_qconfig_mapping("x86"), (here.x,))
    prepared(here.x)
    sure(torch_ao.convert_fx(prepared)(here.x).shape == (8, 5))


def dynamic(here: Here) -> None:
    prepared = here.prepared("x86", M().set_object_type(nn.Linear, Q(dynamic=True)))
    sure("dynamic" in fxq.explain(prepared))
    here.exact(prepared)


def affine(here: Here) -> None:
    sure(any(zero for _, zero in fxq.qparams(here.prepared("x86")).values()))


def embedding(here: Here) -> None:
    table = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()
    result = fxq.quantize(table, [torch.randint(0, 10, (4, 6))], show_progress=False)
    sure("none is left in float" in fxq.explain(result.prepared))


def same_module(here: Here) -> None:
    twin = pickle.loads(pickle.dumps(here.result.prepared))
    sure(torch.equal(twin(here.x), here.result.prepared(here.x)) and copy.deepcopy(here.result.integer))


chapter(
    "PyTorch",
    ("a quantized tensor: scale, zero point, integers",
     lambda h: sure(next(fxq.inspect.record(h.result.integer, [h.x]))) or part("functions and records; no tensor class")),
    ("affine, per tensor", affine),
    ("zero is exact", lambda h: h.exact(h.prepared("x86"))),
    ("static quantization", lambda h: h.equal(h.result)),
    ("dynamic quantization", dynamic),
    ("x86 and qnnpack", lambda h: [h.equal(h.quantized(Network(), name)) for name in ("x86", "qnnpack")]),
    ("backends.quantized.engine", engine),
    ("its QConfig, QConfigMapping and dicts", two_step),
    ("the model stays a module: copies, pickles, state_dict", same_module),
    ("get_observer_dict, RecordingObserver", observer_dict),
    ("intrinsic patterns", patterns),
    ("layers of torch.ao.nn.qat", lambda h: h.quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))),
    ("functions on integers", lambda h: sure(len(fxq.primitives.PRIMITIVES) > 40)),
    ("operators of one's own", lambda h: h.integer(fxq.extend.unary("coverage_wave", lambda x: torch.sin(x) * x))),
    ("custom modules", own_operator),
    ("a backend as data",
     lambda h: sure(backends.get("x86").activations) or part("targets are rows, dtypes among them; operators are records of their own")),
    ("operators with fixed scales", lambda h: h.exact(h.prepared(qconfig=M().set_object_type(torch.sigmoid, Q(A(scale=1 / 256)))))),
    ("numeric suite", lambda h: fxq.compare(h.model, h.result.integer, h.batches)),
    ("equalization, bias correction", lambda h: fxq.tuning.correct_bias(h.prepared(), h.batches, show_progress=False)),
    ("save and load", lambda h: fxq.load(fxq.save(h.result.prepared, h.folder / "s.fxq"))),
    ("programs of torch.export as input", program),
    ("a GraphModule as input", lambda h: h.equal(h.quantized(torch.fx.symbolic_trace(h.model)))),
    ("a ScriptModule as input",
     lambda h: refused(lambda: fxq.trace(torch.jit.trace(h.model, h.x), h.x), "ScriptModule") or absent("refused: its Python is gone")),
    ("embeddings", embedding),
    ("a reference model of quantize and dequantize", lambda h: h.result.export(h.folder / "qdq.onnx", style="qdq", opset=13)),
)  # fmt: skip
