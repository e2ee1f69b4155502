"""Deploy on BPUs: Horizon's file and compiler, camera inputs, and folders that test a board.

`export_horizon` writes the ONNX file and the settings of the vendor's compiler, and `compile_horizon` runs that. `with_camera` puts the
conversion of a camera's format in front of a model. A kit is a folder with inputs and expected outputs that a board runs by itself.
"""

from fxquant.backends.horizon.export import HorizonOptions, export_horizon
from fxquant.backends.horizon.tool import compile_horizon
from fxquant.conformance.kit import board_kit, conformance_kit
from fxquant.conformance.results import check_conformance, simulate_conformance
from fxquant.nn.camera import with_camera

__all__ = [
    "HorizonOptions", "board_kit", "check_conformance", "compile_horizon", "conformance_kit", "export_horizon", "simulate_conformance",
    "with_camera",
]  # fmt: skip
