"""The files that each of the vendor's compilers reads: one record for hb_mapper, one for hb_compile.

The keys of hb_mapper's configuration are those that it accepts here. The format of hb_compile follows public documents only, and the files
have not been tried with it. Documents: D-Robotics, OpenExplore S100 3.5.0, "hb_compile" (the command and its configuration) and "PTQ FAQ"
(opset 10 to 19, O0 to O2). Keys that these do not name are hb_mapper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxquant.backends.onnx.calibrated import OPSET as CALIBRATED_OPSET
from fxquant.backends.onnx.calibrated import CalibratedWriter
from fxquant.backends.onnx.horizon import OPSET, HorizonWriter
from fxquant.errors import ConfigurationError

OUTPUT = "model_output"  # where the compiler writes, inside the folder
README = "README.txt"


@dataclass(frozen=True)
class Format:
    """The files of one compiler.

    compiler       its command
    marches        the targets that it compiles for
    writer, opset  how the ONNX file is written
    levels         of its optimization
    configuration  the yaml file, with names in braces
    commands       the script, likewise
    untried        what the README says of files that were not tried with a compiler; None if they were
    cameras        the images that the compiled program can take: "nv12" from the camera's pyramid, "yuv444" from memory
    """

    compiler: str
    marches: tuple[str, ...]
    writer: type[HorizonWriter]
    opset: int
    levels: tuple[str, ...]
    configuration: str
    commands: str
    untried: str | None = None
    cameras: tuple[str, ...] = ()

    def check_level(self, level: str) -> None:
        """Raise ConfigurationError for a level that the compiler does not have."""
        if level not in self.levels:
            raise ConfigurationError(
                f"optimize={level!r} is unknown to {self.compiler}",
                because=f"its levels are {', '.join(self.levels)}",
                remedy="pass one of these",
            )


HB_MAPPER = Format(
    "hb_mapper",
    ("bernoulli2", "bayes", "bayes-e"),
    HorizonWriter,
    OPSET,
    ("O0", "O1", "O2", "O3"),
    """\
model_parameters:
  onnx_model: '{name}.onnx'
  march: '{march}'
  output_model_file_prefix: '{name}'
  working_dir: '{output}'
input_parameters:
  input_name: '{names}'
  input_shape: '{shapes}'
  input_type_rt: '{types}'
  input_layout_rt: '{arrived}'
  input_type_train: '{trained}'
  input_layout_train: '{layouts}'
  norm_type: '{norms}'{mean}
calibration_parameters:
  calibration_type: 'load'{processor}
compiler_parameters:
  compile_mode: '{mode}'
  optimize_level: '{level}'
  debug: True
  core_num: 1
""",
    """\
#!/bin/sh
# Makes {output}/{name}.bin of {name}.onnx with the vendor's compiler, whose programs are in PATH; then says what it costs.
set -e
cd "$(dirname "$0")"
hb_mapper makertbin --model-type onnx --config {name}.yaml
hb_perf {output}/{name}.bin
""",
    cameras=("nv12", "yuv444"),
)
HB_COMPILE = Format(
    "hb_compile",
    ("nash-e", "nash-m", "nash-b", "nash-p", "nash-h"),
    CalibratedWriter,
    CALIBRATED_OPSET,
    ("O0", "O1", "O2"),
    """\
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
""",
    """\
#!/bin/sh
# Untried: makes {output}/{name}.hbm of {name}.onnx with the vendor's hb_compile, which is in PATH.
set -e
cd "$(dirname "$0")"
hb_compile --config {name}.yaml
""",
    """\
Untried. These files follow public documents of hb_compile and were not compiled, because that tool cannot be installed freely.
fxquant's tests evaluate such files with a reference implementation of HzCalibration: round to even of x / scale, clamp, times scale.
Compare the outputs of the .hbm with those of the integer model before you rely on it.
""",
)
FORMATS = {march: format for format in (HB_MAPPER, HB_COMPILE) for march in format.marches}
