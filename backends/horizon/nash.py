"""What stands beside the ONNX file of a nash target: the configuration of hb_compile, its command, and what was not tried.

Source of the keys: D-Robotics S100 3.5.0 OE documents, "hb_compile" (convert.html) and "PTQ FAQ" (opset 10 to 19, levels O0 to O2).
"""

from __future__ import annotations

LEVELS = ("O0", "O1", "O2")
CONFIGURATION = """\
model_parameters:
  onnx_model: '{name}.onnx'
  march: '{march}'
  output_model_file_prefix: '{name}'
  working_dir: '{output}'
input_parameters:
  input_name: '{names}'
  input_shape: '{shapes}'
  input_type_rt: '{types}'
  input_type_train: '{types}'
  norm_type: '{norms}'
calibration_parameters:
  calibration_type: 'load'
compiler_parameters:
  compile_mode: '{mode}'
  optimize_level: '{level}'
"""
COMMANDS = """\
#!/bin/sh
# Untried: makes {output}/{name}.hbm of {name}.onnx with the vendor's hb_compile, which is in PATH.
set -e
cd "$(dirname "$0")"
hb_compile --config {name}.yaml
"""
README = """\
Untried. These files follow public documents of hb_compile; they were not compiled, because the tool is not public.
model.onnx was evaluated with a reference implementation of HzCalibration: round to even of x / scale, clamp, times scale.
Compare the outputs of the .hbm with those of the integer model before you rely on it.
"""
