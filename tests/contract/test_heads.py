"""Heads that put boxes, scores, classes and masks together: every part is as good as it is when it is returned apart."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from tests.shared import contract
from tests.shared.contract import compiled, flat
from tests.shared.networks import Network, held, sqnr

Parts = dict[str, Tensor]  # what a head computes
WORST = 3.0  # dB that a part may lose by being put together with others
TARGETS = ("bayes-e", "x86")


class Head(nn.Module):
    """A backbone of one convolution, and branches whose ranges differ by some hundred times.

    `apart` returns what is computed of them as it is; otherwise it is put together.
    """

    def __init__(self, name: str, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem, self.box, self.score, self.more = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1), nn.Conv2d(8, 2, 1)
        self.register_buffer("anchors", torch.tensor([[10.0, 13.0], [33.0, 23.0]]))
        self.name, self.apart = name, apart

    def branches(self, x: Tensor) -> Parts:
        x = F.relu(self.stem(x))
        return {"box": self.box(x), "score": self.score(x), "more": self.more(x)}

    def forward(self, x: Tensor) -> Any:
        parts, together = HEADS[self.name]
        result = parts(self, self.branches(x))
        if not self.apart:
            return together(result)
        return [result["box"] * 0.5, result["score"] * result["score"]] if together is split_again else list(result.values())


def grid(like: Tensor) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(like.shape[-2]), torch.arange(like.shape[-1]), indexing="ij")
    return torch.stack((columns, rows), 0).float()


def rows(value: Tensor) -> Tensor:
    return value.flatten(2).transpose(1, 2)


# ---- what each head computes of its branches, part by part, and how it puts these together ------------------------------
def yolo_v3(head: Head, parts: Parts) -> Parts:
    """Centres, sizes by anchors, and scores, of every cell."""
    box = parts["box"]
    centre = (box[:, :2].sigmoid() + grid(box)) * box.new_full((1, 1, 1, 1), 16.0)
    size = box[:, 2:].exp() * head.anchors[0].view(1, 2, 1, 1)
    return {"centre": rows(centre), "size": rows(size), "score": rows(parts["score"].sigmoid())}


def yolo_v5(head: Head, parts: Parts) -> Parts:
    box = parts["box"].sigmoid()
    centre = (box[:, :2] * 2 + (grid(box) - 0.5)) * 16
    size = (box[:, 2:] * 2) ** 2 * head.anchors[1].view(1, 2, 1, 1)
    return {"centre": rows(centre), "size": rows(size), "score": rows(parts["score"].sigmoid())}


def yolo_v10(head: Head, parts: Parts) -> Parts:
    score, label = rows(parts["score"].sigmoid()).max(-1, keepdim=True)
    return {"box": rows(parts["box"]) * 200 + 300, "score": score, "label": label.float()}


def ssd(head: Head, parts: Parts) -> Parts:
    near, far = parts["box"] * 50, F.max_pool2d(parts["box"], 2) * 300
    return {"near": rows(near), "far": rows(far), "score": rows(parts["score"].sigmoid()), "low": rows(parts["more"]) * 0.01}


def keypoints(head: Head, parts: Parts) -> Parts:
    place = (rows(parts["box"]).view(-1, 64, 2, 2) + 3) * 60
    return {"place": place, "seen": rows(parts["more"]).sigmoid().view(-1, 64, 2, 1)}


def last(parts: Parts) -> Tensor:
    return torch.cat(list(parts.values()), -1)


def split_again(parts: Parts) -> Any:
    """Levels of boxes and scores, which are put together along places, and split for what is done to each."""
    whole = torch.cat([torch.cat((parts["box"], parts["score"]), 1), torch.cat((parts["box"], parts["score"]), 1)], 2)
    box, score = whole.split((4, 3), 1)
    return torch.cat((box * 0.5, score * score), 1)


def written(parts: Parts) -> Tensor:
    result = torch.zeros(parts["box"].shape[0], 8, 8, 8)
    result[:, :4] = parts["box"]
    result[:, 4:5] = parts["centre"]
    result[:, 5:] = parts["score"]
    return result


def stacked(parts: Parts) -> Any:
    size, offset = parts["size"], parts["offset"]
    return {"heat": parts["heat"], "regression": torch.stack((size, offset), 1).unbind(1)[0], "all": torch.stack((size, offset), -1)}


HEADS: dict[str, tuple[Callable[[Head, Parts], Parts], Callable[[Parts], Any]]] = {
    "YOLOv3": (yolo_v3, last),
    "YOLOv5": (yolo_v5, lambda parts: (last(parts), list(parts.values()))),
    "YOLOv8": (lambda head, p: {"box": p["box"].flatten(2) * 20 + 100, "score": p["score"].flatten(2).sigmoid()}, split_again),
    "YOLOv10": (yolo_v10, last),
    "SSD": (
        ssd,
        lambda parts: (torch.cat((parts["near"], parts["far"]), 1), torch.cat((parts["score"].flatten(1), parts["low"].flatten(1)), 1)),
    ),
    "RetinaNet": (
        lambda head, p: {"box": p["box"].permute(0, 2, 3, 1).reshape(-1, 64, 4) * 100, "score": p["score"].sigmoid().permute(0, 2, 3, 1)},
        lambda parts: torch.cat((parts["box"], parts["score"].reshape(-1, 64, 3)), -1),
    ),
    "FCOS": (lambda head, p: {"box": p["box"].exp() * 64, "centre": p["more"][:, :1].sigmoid(), "score": p["score"].sigmoid()}, written),
    "CenterNet": (lambda head, p: {"heat": p["score"].sigmoid(), "size": p["box"][:, :2] * 128, "offset": p["more"]}, stacked),
    "Deformable DETR": (
        lambda head, p: {"box": rows(p["box"]).sigmoid() * 640, "score": rows(p["score"]).sigmoid()},
        lambda parts: torch.cat((parts["score"], parts["box"]), -1).transpose(1, 2),
    ),
    "masks": (
        lambda head, p: {"box": rows(p["box"]) * 400, "coefficient": rows(p["more"]).tanh(), "proto": p["score"].relu()},
        lambda parts: {"rows": torch.dstack((parts["box"], parts["coefficient"])), "proto": parts["proto"]},
    ),
    "keypoints": (keypoints, lambda parts: torch.cat((parts["place"], parts["seen"]), -1).flatten(2)),
    "turned": (
        lambda head, p: {"box": p["box"] * 250, "score": p["score"].sigmoid(), "more": p["more"] * 0.1},
        lambda parts: torch.hstack(list(parts.values())).flatten(2).permute(2, 0, 1).contiguous(),
    ),
}


def places(head: Head, x: Tensor) -> list[list[Tensor]]:
    """Return, for every output and part, the elements that are made of the part: the elements that are NaN where the part is NaN."""
    parts, together = HEADS[head.name]
    whole = parts(head, head.branches(x))
    return [
        [
            torch.isnan(each)
            for each in flat(
                together({name: torch.full_like(value, float("nan") if name == part else 1.0) for name, value in whole.items()})
            )
        ]
        for part in whole
    ]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", HEADS)
def test_a_part_is_as_good_as_it_is_apart(name: str, target: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 3, 16, 16, generator=generator) for _ in range(2)]
    head, apart = Head(name).eval(), Head(name, apart=True).eval()
    integer = held(head, [batches[0], batches[1][:1]], tmp_path / "head.onnx", target, train=False, integer_tail=True).integer
    alone = compiled(apart, [batches[0], batches[1][:1]], target, integer_tail=True).integer
    x = batches[0]
    with torch.no_grad():
        wanted, actual = flat(head(x)), flat(integer(x))
        bounds = [sqnr(one, other) for one, other in zip(apart(x), alone(x), strict=True)]
        for bound, masks_of in zip(bounds, places(head, x), strict=True):
            there = [(one[mask], other[mask]) for one, other, mask in zip(wanted, actual, masks_of, strict=True) if mask.any()]
            assert there
            assert all(sqnr(one, other) >= bound - WORST for one, other in there)


# ---- what else is to hold ------------------------------------------------------------------------------------------------
def pair(together: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    """Boxes in pixels and scores, which a function puts together."""
    torch.manual_seed(3)
    layers = {"box": nn.Conv2d(3, 4, 4, 4), "score": nn.Conv2d(3, 4, 4, 4)}
    return Network(lambda m, x: together(m.box(x) * 200 + 300, m.score(x).sigmoid()), **layers).eval()


def assigned(box: Tensor, score: Tensor) -> Tensor:
    result = box.clone()
    result[..., 0] = score[..., 0]
    return result


def one_by_one(box: Tensor, score: Tensor) -> Tensor:
    """Boxes decoded in place: what is read beside what was written is read of the part."""
    y = torch.cat((box, score), 1).flatten(2).permute(0, 2, 1)
    y[..., :2] = (y[..., :2] + 1) * 2
    y[..., 2:4].mul_(2)
    return y


TOGETHER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda box, score: torch.cat((box, score), 1),
    "stack": lambda box, score: torch.stack((box, score), 1),
    "vstack": lambda box, score: torch.vstack((box, score)),
    "column_stack": lambda box, score: torch.column_stack((box.flatten(1), score.flatten(1))),
    "flattened and turned": lambda box, score: torch.cat((box.flatten(2), score.flatten(2)), 1).transpose(1, 2),
    "cat of cats": lambda box, score: torch.cat([torch.cat((box, score), 1).flatten(2)] * 2, 2),
    "chunked": lambda box, score: torch.cat((box, score), 1).chunk(2, 1),
    "unbound": lambda box, score: [part * 0.5 for part in torch.stack((box, score), -1).unbind(-1)],
    "sliced": lambda box, score: [part * 0.5 for part in torch.cat((box, score), 1).permute(0, 2, 3, 1).split(4, -1)],
    "chosen": lambda box, score: torch.where(torch.arange(box.shape[-1]) > 3, box, score),
    "assigned": assigned,
    "in place": one_by_one,
    "scattered": lambda box, score: box.slice_scatter(score[:, :2], 1, 0, 2),
    "padded": lambda box, score: F.pad(score, (1, 1), value=-1000.0),
    "shuffled": lambda box, score: F.pixel_shuffle(torch.cat((box, score), 1), 2),
    "in a dict": lambda box, score: {"all": torch.cat((box, score), 1), "first": torch.cat((box, score), 1)[:, :, :2]},
}


def image(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.nightly
@pytest.mark.parametrize("target", [*TARGETS, "bernoulli"])
def test_no_score_is_lost_however_it_is_put_beside_a_box(target: str) -> None:
    x = image()
    for name, together in TOGETHER.items():
        model = pair(together)
        integer = compiled(model, [x], target).integer
        with torch.no_grad():
            for wanted, actual in zip(flat(model(x)), flat(integer(x)), strict=True):
                small = (wanted > 0) & (wanted < 1.5)
                assert not small.any() or sqnr(wanted[small], actual[small]) > 24, name


def test_class_numbers_are_whole() -> None:
    head = Head("YOLOv10").eval()
    x = torch.randn(4, 3, 16, 16)
    classes = compiled(head, [x]).integer(x)[..., -1]
    assert set(classes.unique().tolist()) <= {0.0, 1.0, 2.0}
    assert len(classes.unique()) > 1


def test_a_rule_that_names_a_concatenation_keeps_one_grid() -> None:
    config = fxq.QConfig(fxq.ActivationConfig("int16"))
    for mapping in (fxq.QConfigMapping().set_object_type(torch.cat, config), fxq.QConfigMapping().set_module_name("cat", config)):
        prepared = compiled(pair(TOGETHER["cat"]), [image()], qconfig=mapping).prepared
        assert next(layer for layer in fxq.inspect.layers(prepared) if layer.name == "cat").dtype == "int16"


def test_parts_of_one_tensor_stay_integer() -> None:
    for together in (lambda box, score: torch.cat((box, box.flip(1)), 1), lambda box, score: score.masked_fill(score > 0.5, 0.0)):
        prepared = compiled(pair(together), [image()], integer_tail=True).prepared
        assert "none is left in float" in fxq.explain(prepared)


def test_a_file_of_integers_returns_real_numbers_where_parts_have_grids_of_their_own(tmp_path: Path) -> None:
    x = image()
    integer = compiled(pair(lambda box, score: (torch.cat((box, score), 1), score)), [x], integer_tail=True).integer
    path = fxq.export_onnx(integer, tmp_path / "head.onnx", io="integer")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [output.type for output in session.get_outputs()] == ["tensor(float)", "tensor(int8)"]
    values = contract.graph_values(integer, x)
    whole, score = session.run(None, {session.get_inputs()[0].name: values["x_quantize"].numpy()})
    assert torch.equal(torch.from_numpy(whole), integer(x)[0])
    assert torch.equal(torch.from_numpy(score), values["sigmoid"])


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler was not found")
def test_c_puts_the_same_parts_together(tmp_path: Path) -> None:
    x = image(2)
    together = [TOGETHER[name] for name in ("stack", "flattened and turned", "assigned", "padded", "shuffled")]

    def every(box: Tensor, score: Tensor) -> list[Tensor]:
        label = score.argmax(1, keepdim=True).float()
        return [*(put(box, score) for put in together), torch.cat((score, label, score.new_full((score.shape[0], 1, 8, 8), 9.0)), 1)]

    integer = compiled(pair(every), [x]).integer
    fxq.export.export_c(integer, tmp_path / "head.c", batch_size=2)
    subprocess.run(["cc", "-std=c99", "-O1", "-ffp-contract=off", "head.c", "head_main.c", "-o", "head"], cwd=tmp_path, check=True)
    x.numpy().tofile(tmp_path / "x.raw")
    wanted = integer(x)
    names = [f"y{index}.raw" for index in range(len(wanted))]
    subprocess.run([str(tmp_path / "head"), "x.raw", *names], cwd=tmp_path, check=True)
    assert all((tmp_path / name).read_bytes() == each.contiguous().numpy().tobytes() for name, each in zip(names, wanted, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_training_is_validating_through_parts(target: str) -> None:
    x = image()
    prepared = compiled(pair(TOGETHER["in place"]), [x], target).prepared
    contract.assert_train_is_validate(prepared, x)
    contract.assert_gradients_reach_every_parameter(prepared, x)


def test_a_common_scale_in_the_middle_is_told() -> None:
    x = image()
    model = pair(lambda box, score: torch.cat((box, score), 1).atan()).eval()
    prepared = compiled(model, [x], "nash-e", integer_tail=True).prepared
    assert "all its tensors share one scale: %sigmoid loses" in fxq.explain(prepared)
    advice = next(each for each in fxq.compare(model, prepared, [x]).advice if each.rule == "held_together")
    assert advice.layer == "cat"
    assert "%sigmoid loses" in advice.cause
    assert "QConfigMapping().set_module_name('cat'" in advice.cure
    cured = compiled(model, [x], "nash-e", qconfig=fxq.QConfigMapping().set_module_name("cat", None), integer_tail=True).prepared
    assert not [each for each in fxq.compare(model, cured, [x]).advice if each.rule == "held_together"]


# ---- a part that is an input ------------------------------------------------------------------------------------------------
def token(m: Network, x: Tensor) -> Tensor:
    return torch.cat((m.token.expand(x.shape[0], -1, -1), x), 1)


def picked(m: Network, whole: Tensor, first: Any, second: Any) -> Tensor:
    return m.one(whole[:, first]) + m.other(whole[:, second])


def frames(m: Network, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """One cell over a cache and the frames after it, and the next cache."""
    whole, state = torch.cat((past, x), 1), torch.zeros(x.shape[0], 8)
    for index in range(3):
        state = m.cell(whole[:, index], state)
    return state, whole[:, 3:]


def written_into(m: Network, x: Tensor, past: Tensor) -> Tensor:
    whole = x * 1
    whole[:, :1] = past[:, :1]
    return m.one(whole[:, 0]) + m.other(whole[:, 2])


OF_INPUTS: dict[str, Callable[..., Any]] = {
    "a streaming cache": frames,
    "a class token": lambda m, x, past: picked(m, token(m, x), 0, 1),
    "tokens one by one": lambda m, x, past: sum(m.one(each) for each in token(m, x).unbind(1)),
    "an inner slice": lambda m, x, past: picked(m, torch.cat((past, x), 1), slice(1, 2), slice(5, 6)),
    "the last frames": lambda m, x, past: torch.cat((past, x), 1)[:, -2:].mean(1) + m.one(x[:, 0]),
    "sizes": lambda m, x, past: [m.one(each) for each in torch.cat((past, x), 1).split([1, 5, 1], 1)],
    "a layer and an input": lambda m, x, past: picked(m, torch.cat((m.other(x), past), 1), 3, 5),
    "turned": lambda m, x, past: m.one(torch.cat((past, x), 1).transpose(0, 1)[4]) + m.one(torch.cat((past, x), 1).flatten(1)[:, 8:16]),
    "of two concatenations": lambda m, x, past: m.one(torch.cat((torch.cat((past, x), 1), torch.cat((x, past), 1)), 2)[:, 4, :8]),
    "written into": written_into,
    "returned as it is": lambda m, x, past: (torch.cat((past, x), 1)[:, 4:], m.one(x)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", OF_INPUTS)
def test_slices_of_a_concatenation_that_holds_an_input(name: str, target: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    layers = {"one": nn.Linear(8, 8), "other": nn.Linear(8, 8), "cell": nn.GRUCell(8, 8), "token": nn.Parameter(torch.randn(1, 1, 8))}
    model = Network(OF_INPUTS[name], **layers).eval()
    x, past = torch.randn(2, 4, 8), torch.randn(2, 3, 8)
    prepared, integer = held(model, [(x, past)], tmp_path / "model.onnx", target, train=False)
    assert "none is left in float" in fxq.explain(prepared)
    for wanted, actual in zip(flat(model(x, past)), flat(integer(x, past)), strict=True):
        assert sqnr(wanted, actual) > 20
