"""Export integer graphs to other forms than one ONNX file: files of segments, PyTorch programs, C source; and write their loops out.

`fxquant.export_onnx` writes ONNX files, and `fxquant.board.export_horizon` the files of the vendor's compiler.
"""

from fxquant.backends.aten.programs import export_pt2
from fxquant.backends.c.export_c import export_c
from fxquant.backends.onnx.metadata import onnx_metadata
from fxquant.backends.onnx.segments import export_segments, run_segments
from fxquant.prepared.sizes import unrolled

__all__ = ["export_c", "export_pt2", "export_segments", "onnx_metadata", "run_segments", "unrolled"]
