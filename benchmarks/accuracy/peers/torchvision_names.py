"""torchvision is published with CUDA alone: where PyTorch is for a CPU its operators are absent, and importing it asks for two names."""

import torch

NAMES = ("nms", "qnms")


def define() -> None:
    """Define what `import torchvision` asks for; the toolkits that import torchvision do not call it for these networks."""
    for name in NAMES:
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
