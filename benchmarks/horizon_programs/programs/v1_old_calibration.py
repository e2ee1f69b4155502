"""The function that releases before 1.0 calibrated with."""

from horizon_plugin_pytorch.quantization import prepare_calibration_fx

prepare_calibration_fx(None)
