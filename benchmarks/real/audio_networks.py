"""Published audio networks, with the parameter names of their checkpoints: CREPE (tiny), PESTO, silero VAD at 16 kHz, Resemblyzer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Crepe(nn.Module):
    """Pitch of frames of 1024 samples: logits of 360 bins of 20 cents each. Kim, Salamon, Li, Bello: CREPE, ICASSP 2018."""

    CHANNELS = (1, 128, 16, 16, 16, 32, 64)

    def __init__(self) -> None:
        super().__init__()
        for index in range(1, 7):
            kernel, stride = (512, 4) if index == 1 else (64, 1)
            setattr(self, f"conv{index}", nn.Conv2d(self.CHANNELS[index - 1], self.CHANNELS[index], (kernel, 1), (stride, 1)))
            setattr(self, f"conv{index}_BN", nn.BatchNorm2d(self.CHANNELS[index], eps=0.001))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for index in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if index == 1 else (0, 0, 31, 32))
            x = F.relu(getattr(self, f"conv{index}")(x))
            x = F.max_pool2d(getattr(self, f"conv{index}_BN")(x), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1))


class Pesto(nn.Module):
    """Pitch of frames of a constant-Q transform of 219 bins, in dB: logits of 384 bins of a third of a semitone each.

    Riou, Lattner, Hadjeres, Peeters: PESTO, ISMIR 2023. Its layer norm sees frames of silence and of speech in one batch.
    """

    WIDTHS = (40, 30, 30, 10, 3)

    def __init__(self) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm((1, 219))
        self.conv1 = nn.Sequential(nn.Conv1d(1, 40, 39, padding=19))
        self.prefilt_layers = nn.ModuleList(nn.Sequential(nn.Conv1d(40, 40, 39, padding=19)) for _ in range(2))
        pairs = zip(self.WIDTHS[:-1], self.WIDTHS[1:], strict=True)
        self.conv_layers = nn.ModuleDict({str(3 * index): nn.Conv1d(*pair, 1) for index, pair in enumerate(pairs)})
        self.fc = nn.Conv1d(1, 1, 1040, padding=383, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv1(self.layernorm(x)), 0.3)
        for layer in self.prefilt_layers:
            x = x + F.leaky_relu(layer(x), 0.3)
        for layer in self.conv_layers.values():
            x = F.leaky_relu(layer(x), 0.3)
        logits: Tensor = self.fc(x.flatten(1).unsqueeze(1))
        return logits.squeeze(1)


class Silero(nn.Module):
    """Voice activity of one window of 576 samples, from a state of zeros: the logit of speech, shape (items, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1, self.conv2 = nn.Conv1d(129, 128, 3, padding=1), nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3, self.conv4 = nn.Conv1d(64, 64, 3, stride=2, padding=1), nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stft_conv(F.pad(x.unsqueeze(1), (0, 64), mode="reflect"))
        x = (x[:, :129].square() + x[:, 129:].square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(layer(x))
        hidden, _ = self.lstm_cell(x.squeeze(-1))
        logit: Tensor = self.final_conv(F.relu(hidden).unsqueeze(-1))
        return logit.squeeze(-1)


class VoiceEncoder(nn.Module):
    """An embedding of a speaker from 160 frames of mel power, shape (items, 256). Wan, Wang, Papir, Moreno: GE2E, ICASSP 2018."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        raw = F.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)
