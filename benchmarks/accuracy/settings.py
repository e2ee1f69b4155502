"""In which numbers a network is quantized, and by which steps."""

from dataclasses import dataclass

CALIBRATION, TUNING, TRAINING = "calibration", "tuning", "training"
MODES = {
    CALIBRATION: "defaults, and 64 samples without labels",
    TUNING: "what a method can do with the same 64 samples",
    TRAINING: "two epochs with labels, the same batches in the same order",
}
EPOCHS = 2
BATCH = 64
FREEZE_AFTER = 1  # epochs; then observers and batch norm statistics stand still
RATE = 0.001  # of SGD with momentum, falling along a cosine
MOMENTUM = 0.9


@dataclass(frozen=True)
class Setting:
    """The bit widths of a row. The first and the last layer have 8 bits in every row.

    activations     bits of an activation
    weights         bits of a weight
    per_channel     a weight scale for each output channel, or one for all
    power_of_two    every scale is a power of two
    target          fxquant's
    """

    name: str
    weights: int = 8
    activations: int = 8
    per_channel: bool = True
    power_of_two: bool = False
    target: str = "bayes-e"

    @property
    def asked(self) -> tuple[int, int, bool, bool]:
        """Return the setting of a peer: rows that differ in fxquant's target alone have the same peers."""
        return self.weights, self.activations, self.per_channel, self.power_of_two


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("W8A8"),
        Setting("W8A8-affine", target="x86"),
        Setting("power-of-two", power_of_two=True, target="bernoulli"),
        Setting("per-tensor", per_channel=False),
        Setting("per-tensor-affine", per_channel=False, target="x86"),
        Setting("W4A8", weights=4),
        Setting("W4A4", weights=4, activations=4),
    )
}
