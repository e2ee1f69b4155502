"""Vision operators that PyTorch lacks, as modules: float models use them directly, and they compile like any other layer.

Their definitions follow public descriptions of the operators with these names; each cites its source.
"""

from fxquant.nn.camera import (
    BgrToGray,
    BgrToYuv444,
    ChromaLoss,
    Nv12ToYuv444,
    RgbToGray,
    RgbToYuv444,
    YuvToBgr,
    YuvToRgb,
    rgb_to_nv12,
    split_nv12,
)
from fxquant.nn.geometry import (
    AnchorGenerator,
    BEVPool,
    Correlation,
    DeformConv2d,
    DetectionPostProcess,
    MultiScaleDeformableAttention,
    MultiScaleRoIAlign,
    PointPillarsScatter,
    RoIAlign,
    SegmentLUT,
    Warp,
)

__all__ = [
    "AnchorGenerator", "BEVPool", "BgrToGray", "BgrToYuv444", "ChromaLoss", "Correlation", "DeformConv2d", "DetectionPostProcess",
    "MultiScaleDeformableAttention", "MultiScaleRoIAlign", "Nv12ToYuv444", "PointPillarsScatter", "RgbToGray", "RgbToYuv444", "RoIAlign",
    "SegmentLUT", "Warp", "YuvToBgr", "YuvToRgb", "rgb_to_nv12", "split_nv12",
]  # fmt: skip
