"""Introduction, terms, environment, quick start, and what a float model must be."""

import copy
import enum
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from benchmarks.coverage.record import Function, Here, Network, State, chapter, part, refused, sure
from benchmarks.horizon_programs.__main__ import import_lines, is_installed, judge, try_import
from fxquant import backends
from fxquant.cli import main
from fxquant.compat import horizon, torch_ao


def smaller(here: Here) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    path = here.quantized(model, "nash-e").export(here.folder / "small.onnx", style="fast")
    sure(sum(p.numel() * 4 for p in model.parameters()) > 3 * path.stat().st_size)


def faster(here: Here) -> State:
    """Kernels are used where they are proved to be exact, which is the processor's affair."""
    kernels = fxq.export.onnx_metadata(here.result.export(here.folder / "fast.onnx", style="fast"))["kernels"]
    sure(set(kernels["integer"]) | set(kernels["refused"]) == {"stem_0", "deep"}, str(kernels))  # the head returns its sum
    sure("the kernel for" in fxq.explain(here.result.integer, machine=True))
    return part(
        "on x86 processors without VNNI, onnxruntime's kernels of sums are refused where not exact; without a C compiler the primitives run"
    )


def trains(here: Here) -> None:
    prepared = here.prepared()
    fxq.set_state(prepared, "train")
    prepared(here.x).square().sum().backward()
    sure(all(parameter.grad is not None for parameter in prepared.parameters()))
    prepared.zero_grad()
    fxq.set_state(prepared, "validate")
    here.exact(prepared)


def to_the_vendors_tools(here: Here) -> State:
    """The folder that each of the vendor's compilers takes."""
    for target, command in (("bernoulli2", "hb_mapper"), ("nash-e", "hb_compile")):
        folder = fxq.board.export_horizon(here.quantized(Network(), target).integer, here.folder / command)
        sure(command in (folder / "compile.sh").read_text() and (folder / "model.onnx").exists())
    return part("for nash by public documents alone: no compiler has tried these files")


def compiles(here: Here) -> State:
    """With the tool, the program it makes is simulated; without it, the error says how to get it."""
    integer = here.quantized(Network(), "bayes-e").integer
    folder = fxq.board.export_horizon(integer, here.folder / "compiled")
    if is_installed():
        sure(fxq.verify(integer, fxq.board.compile_horizon(folder, show_progress=False), [here.x[:1]], show_progress=False))
    else:
        refused(lambda: fxq.board.compile_horizon(folder), "not installed")
    return part("by the vendor's compiler, for bernoulli2, bayes and bayes-e, where it is installed; that of nash is closed")


def import_of(here: Here) -> State:
    horizon.install(replace=True)
    outcomes = [try_import(line) for line in import_lines()]
    return part(f"{outcomes.count('refused')} of {len(outcomes)} import lines of public documents are refused, each with a remedy")


def march(here: Here) -> None:
    sure({backends.get(name).name for name in ("X3", "j3", "X5", "J5", "bayes_e", "BERNOULLI2")} == {"bernoulli2", "bayes-e", "bayes"})
    sure(backends.get(next(iter(enum.Enum("March", {"BAYES": "bayes"})))).name == "bayes")
    refused(lambda: backends.get("bayse"), "bayes")


def exported_program(here: Here) -> None:
    program = torch.export.load(fxq.export.export_pt2(here.result.integer, here.folder / "model.pt2")).module()
    sure(torch.equal(program(here.x[:3]), here.result.integer(here.x[:3])))


def names_of_torch(here: Here) -> None:
    prepared = torch_ao.prepare_fx(here.model, torch.ao.quantization.get_default_qconfig_mapping("x86"), (here.x,))
    prepared(here.x)
    integer = torch_ao.convert_fx(prepared)
    sure(integer.meta["target"].name == "x86" and torch.equal(fxq.set_state(prepared, "validate") or prepared(here.x), integer(here.x)))


def stepwise(here: Here) -> None:
    prepared = here.prepared()
    fxq.set_state(prepared, "train")
    prepared.train()
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    prepared(here.x).square().mean().backward()
    optimizer.step()
    prepared.eval()
    fxq.set_state(prepared, fxq.State.VALIDATE)
    here.exact(prepared)


chapter(
    "Introduction",
    ("files of int8 weights, a quarter of the size", smaller),
    ("faster than float in onnxruntime (style fast), and in PyTorch by kernels", faster),
    (
        "operators of integers, called by themselves",
        lambda h: sure(
            fxq.primitives.requantize_real(torch.tensor([7000], dtype=torch.int32), torch.tensor(0.001), -128, 127, torch.int8) == 7
        ),
    ),
    ("fake quantization forward and backward", trains),
    ("conversion to a fixed-point model", lambda h: h.equal(h.result)),
    ("a form the BPU's own tools take", to_the_vendors_tools),
    ("the plugin's names, for a program that imports them: served, or refused with a remedy", import_of),
    ("unedited programs for the plugin", lambda h: sure(judge("v3_order", h.folder) == "", judge("v3_order", h.folder))),
    ("prepare_fx and convert_fx of PyTorch's names, with a mapping of PyTorch's: equal bits", names_of_torch),
)

chapter(
    "Terms",
    ("float, calibration, training and integer model, each a state",
     lambda h: [fxq.set_state(h.prepared(), state) for state in ("float", "calibrate", "train", "validate")]),
    ("a traced model", lambda h: sure("[B,3,8,8]" in fxq.text(fxq.trace(h.model, h.x)))),
    ("a saved program of torch.export", exported_program),
    ("Bernoulli2, Bayes, Bayes-e", lambda h: [h.quantized(Network(), name) for name in ("bernoulli2", "bayes", "bayes-e")]),
    ("chips and marches by all their names, enums too", march),
    ("Nash-e, -m, -b, -p, -h", lambda h: [backends.get(f"nash-{letter}") for letter in "embph"]),
)  # fmt: skip

chapter(
    "Environment",
    ("versions of Python and PyTorch, a range of them", lambda h: sure(sys.version_info >= (3, 10) and hasattr(torch, "export"))),
    ("a machine without a GPU", lambda h: sure(h.result.integer(h.x).device.type == "cpu")),
    ("export of float parts without further installation", lambda h: h.equal(h.quantized(Function(lambda x: torch.fft.rfft(x).real)))),
)

chapter(
    "Quick start",
    ("float model to file in five calls", lambda h: h.equal(h.result)),
    ("a float model as it is, without stubs", lambda h: sure("none is left in float" in fxq.explain(h.result.prepared))),
    ("calibration from any iterable",
     lambda h: fxq.calibrate(fxq.prepare(h.model, h.x), ({"x": b, "label": 0} for b in h.batches), num_batches=2, show_progress=False)),
    ("training after it", stepwise),
    ("to fixed point", lambda h: sure(fxq.convert(h.prepared())(h.x).shape == (8, 5))),
    ("check before deployment", lambda h: sure(fxq.check(h.model, h.x, "bayes-e"))),
    ("an estimate of the speed, and a drawing",
     lambda h: sure(fxq.estimate(h.result.integer).summary and fxq.report(h.result.integer, h.folder / "graph.html").exists())),
    ("compile for the processor", compiles),
    ("a demonstration on the command line",
     lambda h: sure(main(["inspect", str(fxq.save(h.result.integer, h.folder / "inspected.fxq"))]) == 0)),
)  # fmt: skip


# ---- what a float model must be ---------------------------------------------------------------------------------------


@fxq.wrap
def kept(scores: Tensor, limit: float) -> list[Tensor]:
    """Python that no graph has."""
    return [torch.from_numpy(np.flatnonzero((row > limit).numpy())) for row in scores.detach()]


class Post(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


class WithPython(Network):
    def __init__(self) -> None:
        super().__init__()
        self.post = Post()

    def forward(self, x: Tensor) -> Any:
        return kept(self.post(super().forward(x)), 0.0)


class WithBranch(Network):
    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, self.aux(self.stem(x).mean((2, 3)))) if self.training else y


class FixedBatch(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(8, 5)


def branch(here: Here) -> None:
    prepared = fxq.prepare(WithBranch().eval(), here.x, options=fxq.Options(training_branch=True))
    fxq.calibrate(prepared, here.batches, show_progress=False)
    here.exact(prepared)
    fxq.set_state(prepared, "train")
    sure(len(prepared.train()(here.x)) == 2)


def fixed_batch(here: Here) -> None:
    refused(lambda: fxq.prepare(FixedBatch().eval(), here.x), "dynamic_shapes={}")
    here.quantized(FixedBatch(), options=fxq.Options(dynamic_shapes={}))


def varying_sizes(here: Here) -> State:
    refused(lambda: here.result.integer(torch.randn(1, 3, 9, 9)), "dimension 2 has size 9")
    return part("the batch varies, height and width do not: one integer model for each size")


def attributes(here: Here) -> None:
    result = here.quantized(Network(), options=fxq.Options(preserve=["names", "stem"]))
    sure(result.integer.names == ("cat", "dog") and result.integer.stem(here.x).shape[1] == 8)
    sure(fxq.load(fxq.save(result.integer, here.folder / "kept.fxq")).names == ("cat", "dog"))


class Twice(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x * 0.5)


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Holding(Network):
    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(5, requires_grad=True) * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


chapter(
    "What a float model must be",
    ("loops, shapes, dicts, nested inputs in forward",
     lambda h: fxq.trace(Function(lambda x: {"all": [x[:, i] * i for i in range(x.shape[1]) if x.dim() == 4]}), h.x)),
    ("operators outside of the list, named before anything runs",
     lambda h: sure(not fxq.check(Function(lambda x: torch.fft.rfft(x).real), h.x, "bayes-e"))),
    ("pre- and post-processing kept out of the graph, functions and modules",
     lambda h: sure(len(h.quantized(WithPython(), options=fxq.Options(leaf=Post)).integer(h.x)) == 8)),
    ("branches that only train, auxiliary heads", branch),
    ("a batch size written into forward", fixed_batch),
    ("height and width that vary", varying_sizes),
    ("attributes, methods and modules that survive", attributes),
    ("a module used several times", lambda h: h.equal(h.quantized(Twice()))),
    ("a tensor that is iterated over", lambda h: h.quantized(Function(lambda x: sum(part for part in x.unbind(1))))),
    ("a tensor among the attributes that is not a leaf", lambda h: copy.deepcopy(h.quantized(Holding()).prepared)),
    ("layers subclassed from PyTorch's",
     lambda h: sure("none is left in float" in fxq.explain(h.quantized(nn.Sequential(Standardized(3, 4, 3))).prepared))),
)  # fmt: skip
