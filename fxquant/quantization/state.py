"""The four states of a prepared model."""

from __future__ import annotations

import enum

from fxquant.errors import ConfigurationError


class State(enum.Enum):
    """The state of a prepared operator, which determines what it computes.

    FLOAT      the float model; nothing observes
    CALIBRATE  the float model; ranges are observed, in train and in eval mode alike
    TRAIN      the integer function, with straight-through gradients; in train mode statistics move
    VALIDATE   the integer function, with fixed statistics: exactly what is deployed
    """

    FLOAT = "float"
    CALIBRATE = "calibrate"
    TRAIN = "train"
    VALIDATE = "validate"

    @classmethod
    def _missing_(cls, value: object) -> State:
        """Return a state by its name in any case. Raises ConfigurationError for anything else."""
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if found is None:
            raise ConfigurationError(
                f"{value!r} is not a state", because=f"the states are {', '.join(cls.__members__)}", remedy="pass a fxq.State, or its name"
            )
        return found
