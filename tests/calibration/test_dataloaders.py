"""Batches in every form that users have them, for calibration and for everything that takes batches."""

import copy
import functools
import inspect
import logging
import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators

pytestmark = pytest.mark.usefixtures("default_outputs")  # these read scales, and are not about outputs

COUNT = 10  # items, in batches of four: the last one is smaller


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).relu()


class Two(One):
    """Two inputs and one that may be left out."""

    def forward(self, image: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:  # type: ignore[override]
        result = self.conv(image) * mask
        return result if scale is None else result * scale


class Listed(One):
    """One input that is a list of tensors."""

    def forward(self, images: list[Tensor]) -> Tensor:  # type: ignore[override]
        return torch.cat([self.conv(image) for image in images], 1)


class Keyword(One):
    """Inputs that only have names."""

    def forward(self, *, image: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(image) * mask


def images(count: int = COUNT) -> Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def masks(count: int = COUNT) -> Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(2)) + 0.5


def labels(count: int = COUNT) -> Tensor:
    return torch.arange(count)


class Stream(IterableDataset[Any]):
    """Items that come as they come: it has no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(images(), labels(), strict=True)


class Items(Dataset[Any]):
    """Items that a function makes of an image, a mask and a label."""

    def __init__(self, item: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.item(images()[index], masks()[index], labels()[index])


Sample = namedtuple("Sample", "image mask label")


def named() -> DataLoader[Any]:
    """Return a loader of dictionaries: image, mask, label and file name."""
    return loader(Items(lambda image, mask, label: {"label": label, "image": image, "mask": mask, "file": f"{int(label)}.png"}))


def loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4)


def pieces(*tensors: Tensor) -> list[Any]:
    """Batches of four."""
    return list(zip(*(tensor.split(4) for tensor in tensors), strict=True))


ONE: dict[str, Callable[[], Any]] = {
    "tensors": lambda: list(images().split(4)),
    "tuples": lambda: pieces(images()),
    "lists": lambda: [list(batch) for batch in pieces(images(), labels())],
    "a generator": lambda: (batch for batch in images().split(4)),
    "an iterator": lambda: iter(images().split(4)),
    "dicts": lambda: [{"image": batch} for batch in images().split(4)],
    "dicts with labels": lambda: [{"label": label, "image": image} for image, label in pieces(images(), labels())],
    "labels": lambda: pieces(images(), labels()),
    "several labels": lambda: [(image, {"boxes": [label]}, ["a.png"]) for image, label in pieces(images(), labels())],
    "a DataLoader": lambda: loader(TensorDataset(images())),
    "a DataLoader with labels": lambda: loader(TensorDataset(images(), labels())),
    "a DataLoader of a stream": lambda: loader(Stream()),
    "a DataLoader of dicts": named,
}
TWO: dict[str, Callable[[], Any]] = {
    "tuples": lambda: pieces(images(), masks()),
    "labels": lambda: pieces(images(), masks(), labels()),
    "dicts": named,
    "nested": lambda: loader(Items(lambda image, mask, label: ((image, mask), label))),
    "nested by name": lambda: loader(Items(lambda image, mask, label: ({"image": image, "mask": mask}, label))),
    "named tuples": lambda: loader(Items(Sample)),
    "a tokenizer's": lambda: [UserDict(image=image, mask=mask, file="a.png") for image, mask in pieces(images(), masks())],
}

PLAIN: dict[type[One], Callable[[], list[Any]]] = {
    One: lambda: pieces(images()),
    Two: lambda: pieces(images(), masks()),
    Listed: lambda: [([image, image],) for image in images().split(4)],
    Keyword: lambda: [{"image": image, "mask": mask} for image, mask in pieces(images(), masks())],
}


class Form(NamedTuple):
    """Batches of a model in some form, and as they are without it: `plain`, by the model unless told."""

    kind: type[One]
    batches: Callable[[], Any]
    batch_fn: Callable[[Any], Any] | None = None
    plain: Callable[[], list[Any]] | None = None


def channels_last() -> list[Any]:
    return [{"x": image.permute(0, 2, 3, 1), "extra": [mask]} for image, mask in pieces(images(), masks())]


FORMS: dict[str, Form] = {
    **{f"one input, {name}": Form(One, batches) for name, batches in ONE.items()},
    **{f"two inputs, {name}": Form(Two, batches) for name, batches in TWO.items()},
    "keywords": Form(Keyword, named),
    "lists, and labels": Form(Listed, lambda: [([i, i], m) for i, m in pieces(images(), masks())]),
    "lists by name": Form(Listed, lambda: [{"images": [i, i], "label": m} for i, m in pieces(images(), masks())]),
    "lists in tuples": Form(Listed, lambda: [([i, i],) for i in images().split(4)]),
    "one batch alone": Form(One, images, plain=lambda: [(images(),)]),
    "one batch alone, by name": Form(One, lambda: {"image": images()}, plain=lambda: [(images(),)]),
    "another order by batch_fn": Form(Two, channels_last, lambda batch: (batch["x"].permute(0, 3, 1, 2), batch["extra"][0])),
    "arrays by batch_fn": Form(One, lambda: [batch.numpy() for batch in images().split(4)], torch.from_numpy),
}


@functools.cache
def known(kind: type[One], plain: Callable[[], list[Any]]) -> tuple[One, fx.GraphModule, dict[str, Any]]:
    """A model, prepared, and its scales after plain batches."""
    model = kind()
    prepared = fxq.prepare(model, plain()[0])
    return model, prepared, fxq.qparams(fxq.calibrate(copy.deepcopy(prepared), plain()))


def of_one() -> fx.GraphModule:
    """The model of one input, prepared."""
    return copy.deepcopy(known(One, PLAIN[One])[1])


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", FORMS)
def test_batches_in_every_form_give_the_scales_of_plain_ones(name: str) -> None:
    form = FORMS[name]
    plain = form.plain or PLAIN[form.kind]
    model, fresh, scales = known(form.kind, plain)
    prepared = copy.deepcopy(fresh)
    fxq.calibrate(prepared, form.batches(), options=fxq.Options(batch_fn=form.batch_fn))
    result, inputs = fxq.quantize(model, form.batches(), options=fxq.Options(batch_fn=form.batch_fn)), plain()[0]
    assert fxq.qparams(prepared) == fxq.qparams(result.prepared) == scales
    named = inputs if isinstance(inputs, dict) else dict(zip(inspect.signature(model.forward).parameters, inputs, strict=False))
    assert torch.equal(result.integer(**named), result.prepared(**named))


class Counted:
    """Counts the batches that are taken from it."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in images().split(2):
            self.taken += 1
            yield batch


@pytest.mark.sweep(4)
@pytest.mark.parametrize("show_progress", [False, True])
@pytest.mark.parametrize("number", [1, 3, 5, 100, None])
def test_no_batch_is_taken_in_vain(number: int | None, show_progress: bool) -> None:
    wanted = 5 if number is None else min(number, 5)
    prepared = of_one()
    counted = Counted()
    fxq.calibrate(prepared, counted, number, show_progress=show_progress)
    assert counted.taken == wanted
    counted = Counted()
    fxq.quantize(One(), counted, num_batches=number, show_progress=show_progress)
    assert counted.taken == wanted


@pytest.mark.nightly
@pytest.mark.parametrize("observer", [fxq.observers.MinMaxObserver, fxq.observers.HistogramObserver])
def test_calibration_keeps_no_batch(observer: type[fxq.observers.Observer]) -> None:
    """A generator's batches, and all tensors computed from a batch, are freed before the next batch is asked for."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    prepared = fxq.prepare(model, (torch.randn(1, 3, 8, 8),), qconfig=fxq.QConfig(fxq.ActivationConfig(observer=observer)))
    seen: list[weakref.ref[Tensor]] = []
    for operator in quantized_operators(prepared).values():
        operator.register_forward_hook(lambda _module, _inputs, result: seen.append(weakref.ref(result)))
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(6):
            alive.append(len({id(tensor) for ref in seen if (tensor := ref()) is not None}))
            seen.append(weakref.ref(batch := torch.randn(4, 3, 8, 8)))
            yield batch
            del batch

    fxq.calibrate(prepared, batches(), show_progress=False)
    assert len(seen) > 6 * 5
    assert max(alive) <= 1, alive  # the loop over the batches still has the last one in hand


def test_the_rest_of_a_generator_can_be_used() -> None:
    generator = iter(images().split(2))
    prepared = of_one()
    fxq.calibrate(prepared, generator, 2)
    assert torch.equal(next(generator), images()[4:6])


def test_num_batches_is_what_counts() -> None:
    growing = images().clone()
    growing[8:] *= 4

    def scales(batches: Any, number: int | None = None) -> dict[str, Any]:
        return fxq.qparams(fxq.calibrate(of_one(), batches, number))

    scale_of = scales(loader(TensorDataset(growing, labels())), 2)
    assert scale_of == scales(pieces(growing[:8])) != scales(pieces(growing))


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        (lambda: pieces(images(), labels()), "batches have 2 items; the model takes the first 1"),
        (named, "batches have label, mask, file_0, file_1, file_2, file_3 as well; the model takes only image"),
    ],
)
def test_what_is_dropped_is_said_once(batches: Callable[[], Any], line: str, caplog: pytest.LogCaptureFixture) -> None:
    prepared, options = of_one(), fxq.Options(choose_ranges=False, correct_bias=False)
    with caplog.at_level(logging.INFO, "fxquant"):
        fxq.calibrate(prepared, batches(), options=options)
        fxq.calibrate(prepared, batches(), options=options)
    assert [text for text in caplog.messages if not text.startswith(("calibration took", "calibration chose"))] == [line]


# ---- what cannot be used --------------------------------------------------------------------------------------------
BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "arrays": (lambda: [images(4).numpy()], "its value for 'image' is a numpy.ndarray", "torch.from_numpy"),
    "an array": (lambda: images(4).numpy(), "is a numpy.ndarray", "torch.from_numpy"),
    "arrays in tuples": (lambda: [(images(4).numpy(), 1)], "its value for 'image' is a numpy.ndarray", "torch.from_numpy"),
    "arrays in dicts": (lambda: [{"image": images(4).numpy()}], "its value for 'image' is a numpy.ndarray", "torch.from_numpy"),
    "doubles": (lambda: [images(4).double()], "is torch.float64, and the model was traced with torch.float32", "dtype torch.float32"),
    "bytes": (lambda: [images(4).to(torch.uint8)], "is torch.uint8", "or pass batch_fn"),
    "items of a dataset": (lambda: TensorDataset(images()), "has shape [2, 6, 6]", "a DataLoader gives them"),
    "another size": (lambda: [images(4)[..., :5]], "has shape [4, 2, 6, 5]", "[B, 2, 6, 6] and dtype torch.float32, or pass batch_fn; for"),
    "strings": (lambda: ["image.png"], "is a str, not a tensor", "yield tensors"),
    "nothing": (lambda: [()], "it has 0 items", "yield all inputs"),
    "other names": (lambda: [{"picture": images(4)}], "it has no image; its keys are picture", "forward's argument names"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_batch_that_cannot_be_used(name: str) -> None:
    batches, because, remedy = BAD[name]
    prepared = of_one()
    with pytest.raises(fxq.errors.CalibrationError) as caught:
        fxq.calibrate(prepared, batches(), show_progress=False)
    assert "batch 0 does not fit the model" in str(caught.value)
    assert because in str(caught.value)
    assert remedy in caught.value.remedy


def test_a_late_batch_is_named() -> None:
    prepared = of_one()
    with pytest.raises(fxq.errors.CalibrationError, match="batch 2 does not fit the model"):
        fxq.calibrate(prepared, [images(4), images(4), images(4).numpy()])


def test_verify_takes_the_same_batches(tmp_path: Path) -> None:
    result = fxq.quantize(Two(), loader(Items(lambda image, mask, label: ((image, mask), label))))
    path = result.export(tmp_path / "model.onnx")
    for name in TWO:
        report = fxq.verify(result.integer, path, TWO[name](), show_progress=False)
        assert report, name
    both: fx.GraphModule = result.prepared
    assert fxq.verify(result.integer, both, TWO["dicts"]())
    encoded: Any = UserDict(image=images(4), mask=masks(4))  # Hugging Face's BatchEncoding is a UserDict
    prepared = fxq.calibrate(fxq.prepare(Two(), encoded), encoded)
    assert fxq.verify(prepared, fxq.convert(prepared), encoded)
    assert list(fxq.check(Two(), encoded)) == list(fxq.check(Two(), dict(encoded)))
