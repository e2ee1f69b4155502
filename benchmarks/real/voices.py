"""Speech at 16 kHz: voices of espeak-ng, or a synthetic voice where that is not installed."""

import io
import math
import shutil
import subprocess
import wave
from functools import cache

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

RATE = 16000  # samples a second
SENTENCES = (
    "The north wind and the sun were disputing which was the stronger, when a traveller came along wrapped in a warm cloak.",
    "They agreed that the one who first succeeded in making the traveller take his cloak off should be considered stronger.",
    "Then the north wind blew as hard as he could, but the more he blew the more closely did the traveller fold his cloak.",
)
VOICES = ("en-us", "en-gb", "en-us+f2", "en-us+f4", "en-gb+m3", "en-us+m7", "de", "fr", "es+f3", "it")
SECONDS = 6  # of a synthetic sentence


def source() -> str:
    """Return where the voices are from."""
    return "espeak-ng" if shutil.which("espeak-ng") else "a synthetic voice, since espeak-ng is not installed"


@cache
def recordings() -> tuple[Tensor, ...]:
    """Return a recording of each voice, float32 of shape (samples,), between -1 and 1."""
    speak = _spoken if shutil.which("espeak-ng") else _synthetic
    return tuple(speak(index) for index in range(len(VOICES)))


def _spoken(index: int) -> Tensor:
    command = ["espeak-ng", "--stdout", "-v", VOICES[index], "-p", str(30 + 5 * index), "-s", str(130 + 6 * index), " ".join(SENTENCES)]
    process = subprocess.run(command, capture_output=True, check=True)
    with wave.open(io.BytesIO(process.stdout)) as file:
        rate, data = file.getframerate(), file.readframes(2**24)
    samples = torch.from_numpy(numpy.frombuffer(data, dtype="<i2").astype("float32") / 32768)
    return F.interpolate(samples.view(1, 1, -1), scale_factor=RATE / rate, mode="linear", align_corners=False).flatten()


def _synthetic(index: int) -> Tensor:
    """Harmonics of a moving pitch under moving formants, in syllables with pauses."""
    generator = torch.Generator().manual_seed(index)
    time = torch.arange(SECONDS * RATE) / RATE
    pitch = (90 + 14 * index) * (1 + 0.15 * torch.sin(2 * torch.pi * 0.7 * time + index))
    phase = 2 * torch.pi * torch.cumsum(pitch / RATE, 0)
    formants = [centre * (1 + 0.2 * torch.sin(2 * torch.pi * (2 + index / 7) * time + centre)) for centre in (500.0, 1500.0, 2500.0)]
    sound = torch.zeros_like(time)
    for harmonic in range(1, 30):
        gain = sum(torch.exp(-(((harmonic * pitch - formant) / 150) ** 2)) for formant in formants)
        sound += gain / harmonic**0.5 * torch.sin(harmonic * phase)
    syllables = (torch.sin(2 * torch.pi * 3 * time) > -0.3).float()
    noise = 0.01 * torch.randn(time.shape, generator=generator)
    return (0.2 * sound * syllables + noise).clamp(-1, 1)


def windows(count: int, length: int, seed: int) -> Tensor:
    """Return windows of the recordings, float32 of shape (count, length); the voices take turns, and places follow from `seed`."""
    generator, pieces = torch.Generator().manual_seed(seed), []
    for index in range(count):
        recording = recordings()[index % len(VOICES)]
        start = int(torch.randint(0, len(recording) - length, (), generator=generator))
        pieces.append(recording[start : start + length])
    return torch.stack(pieces)


def mel_power(samples: Tensor, bands: int = 40) -> Tensor:
    """Return power spectrograms in mel bands, (items, frames, bands), of windows of 25 ms every 10 ms."""
    size, hop = RATE // 40, RATE // 100
    power = torch.stft(samples, size, hop, window=torch.hann_window(size), center=True, return_complex=True).abs().square()
    edges = _hertz(torch.linspace(float(_mel(torch.zeros(()))), float(_mel(torch.tensor(RATE / 2.0))), bands + 2)).unsqueeze(1)
    bins = torch.linspace(0, RATE / 2, size // 2 + 1)
    rising, falling = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    weights = torch.minimum(rising, falling).clamp_min(0) * 2 / (edges[2:] - edges[:-2])
    return (weights @ power).transpose(1, 2)


def constant_q(samples: Tensor, bins: int = 219, a_semitone: int = 3, lowest: float = 27.5, gamma: float = 7.0) -> Tensor:
    """Return a constant-Q transform in dB at the middle of windows of 4096 samples or more, (items, 1, bins); silence has -138 dB.

    The bins are those that PESTO reads of the transform that it was trained with: 16 further ones lie below.
    """
    ratio = 2 ** (1 / (12 * a_semitone))
    centre = samples.shape[1] // 2
    spectrum = []
    for bin in range(16, 16 + bins):
        hertz = lowest / 2 ** ((a_semitone - 1) / (24 * a_semitone)) * ratio**bin
        length = math.ceil(RATE / (ratio - 1) / (hertz + gamma / (ratio - 1)))
        places = torch.arange(-(length // 2), length - length // 2)
        window = torch.hann_window(length, dtype=torch.float64)
        kernel = window / window.sum() * torch.exp(2j * torch.pi * hertz / RATE * places) * length**0.5
        spectrum.append(samples[:, centre + places].to(torch.complex128) @ kernel)
    magnitude = torch.stack(spectrum, 1).abs().float().clamp_min(torch.finfo(torch.float32).eps)
    return 20 * magnitude.log10().unsqueeze(1)


def _mel(hertz: Tensor) -> Tensor:
    """Slaney's mel scale: linear up to 1 kHz, logarithmic beyond."""
    return torch.where(hertz < 1000, hertz * 3 / 200, 15 + 27 * torch.log(hertz.clamp_min(1) / 1000) / torch.log(torch.tensor(6.4)))


def _hertz(mel: Tensor) -> Tensor:
    return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp((mel - 15) * torch.log(torch.tensor(6.4)) / 27))
