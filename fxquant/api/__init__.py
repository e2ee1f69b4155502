"""The public functions: the only package that uses front end, passes and backends together.

preparing     `prepare` and `check`: trace a float model, and run the passes up to PREPARED
calibrating   `calibrate`: the calibration loop, and corrections of weights, biases and ranges
converting    `convert`: run the passes from PREPARED on
files         `export_onnx`, `save`, `load` and `dump`
"""

from fxquant.api.files import dump, export_onnx, load, save
from fxquant.api.preparing import at_sizes, calibrate, check, convert, prepare

__all__ = ["at_sizes", "calibrate", "check", "convert", "dump", "export_onnx", "load", "prepare", "save"]
