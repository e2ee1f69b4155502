"""Batches in every form that users have them, for calibration and for everything that takes batches."""

from __future__ import annotations

import copy
import functools
import logging
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fxquant as fxq

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


class Named(Dataset[Any]):
    """Items by name, with labels among them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"label": labels()[index], "image": images()[index], "mask": masks()[index], "file": f"{index}.png"}


class Nested(Named):
    def __getitem__(self, index: int) -> Any:
        return (images()[index], masks()[index]), labels()[index]


class NamedAndTarget(Named):
    def __getitem__(self, index: int) -> Any:
        return {"image": images()[index], "mask": masks()[index]}, labels()[index]


Sample = namedtuple("Sample", "image mask label")


class Tuples(Named):
    def __getitem__(self, index: int) -> Any:
        return Sample(images()[index], masks()[index], labels()[index])


def loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, **options)


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
    "a DataLoader of dicts": lambda: loader(Named()),
}
TWO: dict[str, Callable[[], Any]] = {
    "tuples": lambda: pieces(images(), masks()),
    "labels": lambda: pieces(images(), masks(), labels()),
    "dicts": lambda: loader(Named()),
    "nested": lambda: loader(Nested()),
    "nested by name": lambda: loader(NamedAndTarget()),
    "named tuples": lambda: loader(Tuples()),
}


def expected(model: nn.Module, inputs: list[Any]) -> dict[str, Any]:
    """The scales after plain tuples of inputs."""
    prepared = fxq.prepare(model, inputs[0])
    fxq.calibrate(prepared, inputs)
    return fxq.qparams(prepared)


@functools.cache
def known(kind: type[One]) -> tuple[One, fx.GraphModule, dict[str, Any]]:
    """A model, prepared, and its scales after plain tuples of inputs."""
    model, inputs = kind(), (images(),) if kind is One else (images(), masks())
    return model, fxq.prepare(model, tuple(value[:4] for value in inputs)), expected(model, pieces(*inputs))


@pytest.mark.parametrize(("kind", "name"), [*((One, name) for name in ONE), *((Two, name) for name in TWO)])
def test_batches_in_every_form_give_the_scales_of_plain_ones(kind: type[One], name: str) -> None:
    (model, fresh, scales), batches = known(kind), (ONE if kind is One else TWO)[name]
    prepared = copy.deepcopy(fresh)
    fxq.calibrate(prepared, batches())
    assert fxq.qparams(prepared) == scales
    result, inputs = fxq.quantize(model, batches()), (images(),) if kind is One else (images(), masks())
    assert fxq.qparams(result.prepared) == scales
    assert torch.equal(result.integer(*inputs), result.prepared(*inputs))


def of_one() -> fx.GraphModule:
    """The model of one input, prepared."""
    return copy.deepcopy(known(One)[1])


def test_keywords() -> None:
    model = Keyword()
    result = fxq.quantize(model, loader(Named()))
    assert fxq.qparams(result.prepared) == expected(model, [{"image": i, "mask": m} for i, m in pieces(images(), masks())])
    assert torch.equal(result.integer(image=images(), mask=masks()), result.prepared(image=images(), mask=masks()))


@pytest.mark.parametrize("form", [lambda i, m: ([i, i], m), lambda i, m: {"images": [i, i], "label": m}, lambda i, m: ([i, i],)])
def test_an_input_that_is_a_list(form: Callable[[Tensor, Tensor], Any]) -> None:
    model = Listed()
    result = fxq.quantize(model, [form(i, m) for i, m in pieces(images(), masks())])
    assert fxq.qparams(result.prepared) == expected(model, [([i, i],) for i in images().split(4)])


@pytest.mark.parametrize("whole", [lambda: images(), lambda: {"image": images()}])
def test_one_batch_alone(whole: Callable[[], Any]) -> None:
    model = One()
    scales = expected(model, [(images(),)])
    prepared = fxq.prepare(model, images(4))
    fxq.calibrate(prepared, whole())
    assert fxq.qparams(prepared) == scales
    assert fxq.qparams(fxq.quantize(model, whole()).prepared) == scales


def test_batch_fn() -> None:
    model = Two()
    scales = expected(model, pieces(images(), masks()))
    batches = [{"x": image.permute(0, 2, 3, 1), "extra": [mask]} for image, mask in pieces(images(), masks())]

    def inputs(batch: Any) -> Any:
        return batch["x"].permute(0, 3, 1, 2), batch["extra"][0]

    prepared = fxq.prepare(model, inputs(batches[0]))
    fxq.calibrate(prepared, batches, batch_fn=inputs)
    assert fxq.qparams(prepared) == scales
    assert fxq.qparams(fxq.quantize(model, batches, batch_fn=inputs).prepared) == scales


def test_a_double_array_becomes_a_batch_in_batch_fn() -> None:
    model = One()
    arrays = [batch.numpy() for batch in images().split(4)]
    prepared = fxq.prepare(model, images(4))
    fxq.calibrate(prepared, arrays, batch_fn=torch.from_numpy)
    assert fxq.qparams(prepared) == expected(model, pieces(images()))


class Counted:
    """Counts the batches that are taken from it."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in images().split(2):
            self.taken += 1
            yield batch


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


def test_the_rest_of_a_generator_can_be_used() -> None:
    generator = iter(images().split(2))
    prepared = of_one()
    fxq.calibrate(prepared, generator, 2)
    assert torch.equal(next(generator), images()[4:6])


def test_num_batches_is_what_counts() -> None:
    model, growing = One(), images().clone()
    growing[8:] *= 4
    prepared = fxq.prepare(model, images(4))
    fxq.calibrate(prepared, loader(TensorDataset(growing, labels())), num_batches=2)
    assert fxq.qparams(prepared) == expected(model, pieces(growing[:8]))
    assert fxq.qparams(prepared) != expected(model, pieces(growing))


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        (lambda: pieces(images(), labels()), "batches have 2 items; the model takes the first 1"),
        (lambda: loader(Named()), "batches have label, mask, file_0, file_1, file_2, file_3 as well; the model takes only image"),
    ],
)
def test_what_is_dropped_is_said_once(batches: Callable[[], Any], line: str, caplog: pytest.LogCaptureFixture) -> None:
    prepared = of_one()
    with caplog.at_level(logging.INFO, "fxquant"):
        fxq.calibrate(prepared, batches())
        fxq.calibrate(prepared, batches())
    assert [record.message for record in caplog.records] == [line]


# ---- what cannot be used --------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "arrays": (lambda: [images(4).numpy()], "its value for 'image' is a numpy.ndarray", "torch.from_numpy"),
    "an array": (lambda: images(4).numpy(), "is a numpy.ndarray", "torch.from_numpy"),
    "arrays in tuples": (lambda: [(images(4).numpy(), 1)], "its value for 'image' is a numpy.ndarray", "torch.from_numpy"),
    "arrays in dicts": (lambda: [{"image": images(4).numpy()}], "its value for 'image' is a numpy.ndarray", "torch.from_numpy"),
    "doubles": (lambda: [images(4).double()], "is torch.float64, and the model was traced with torch.float32", "dtype torch.float32"),
    "bytes": (lambda: [images(4).to(torch.uint8)], "is torch.uint8", "or pass batch_fn"),
    "items of a dataset": (lambda: TensorDataset(images()), "has shape [2, 6, 6]", "a DataLoader gives them"),
    "another size": (lambda: [images(4)[..., :5]], "has shape [4, 2, 6, 5]", "[B, 2, 6, 6]"),
    "strings": (lambda: ["image.png"], "is a str, not a tensor", "yield tensors"),
    "nothing": (lambda: [()], "it has 0 items", "yield all inputs"),
    "other names": (lambda: [{"picture": images(4)}], "it has no image; its keys are picture", "forward's argument names"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_batch_that_cannot_be_used(name: str) -> None:
    batches, because, remedy = BAD[name]
    prepared = of_one()
    with pytest.raises(fxq.CalibrationError) as caught:
        fxq.calibrate(prepared, batches(), show_progress=False)
    assert "batch 0 does not fit the model" in str(caught.value)
    assert because in str(caught.value)
    assert remedy in caught.value.remedy


def test_a_late_batch_is_named() -> None:
    prepared = of_one()
    with pytest.raises(fxq.CalibrationError, match="batch 2 does not fit the model"):
        fxq.calibrate(prepared, [images(4), images(4), images(4).numpy()])


@pytest.mark.parametrize("batch", [np.zeros((4, 2, 6, 6), np.float32), (np.zeros((4, 2, 6, 6), np.float32), 1)])
def test_quantize_refuses_arrays(batch: Any) -> None:
    with pytest.raises(fxq.CalibrationError, match=r"numpy\.ndarray") as caught:
        fxq.quantize(One(), [batch])
    assert "torch.from_numpy" in caught.value.remedy


@pytest.mark.parametrize(
    ("batches", "number", "text"),
    [*((given, None, "yields no batches") for given in (5, None, One)), ([images()], -1, "num_batches=-1 is not usable")],
)
def test_what_yields_no_batches(batches: Any, number: int | None, text: str) -> None:
    for use in (lambda: fxq.calibrate(of_one(), batches, number), lambda: fxq.quantize(One(), batches, num_batches=number)):
        with pytest.raises(fxq.ConfigurationError, match=text):
            use()


def test_verify_takes_the_same_batches(tmp_path: Path) -> None:
    result = fxq.quantize(Two(), loader(Nested()))
    path = result.export(tmp_path / "model.onnx")
    for name in TWO:
        report = fxq.verify(result.integer, path, TWO[name](), show_progress=False)
        assert report, name
    both: fx.GraphModule = result.prepared
    assert fxq.verify(result.integer, both, TWO["dicts"]())
