"""torchvision is published with CUDA alone: where PyTorch is for a CPU its operators are absent, and importing it asks for two names."""

import torch

NAMES = ("nms", "qnms")


def define() -> None:
    """Declare torchvision::nms and torchvision::qnms, without a body, so that `import torchvision` succeeds; nothing here calls them."""
    for name in NAMES:
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
