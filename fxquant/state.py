"""The four states of a prepared model."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What a prepared operator computes.

    FLOAT      the float model; nothing observes
    CALIBRATE  the float model; ranges are observed, in train and in eval mode alike
    TRAIN      the integer function, with straight-through gradients; in train mode statistics move
    VALIDATE   the integer function, with fixed statistics: exactly what is deployed
    """

    FLOAT = "float"
    CALIBRATE = "calibrate"
    TRAIN = "train"
    VALIDATE = "validate"
