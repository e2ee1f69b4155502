"""torchvision is published with CUDA alone: where PyTorch is for a CPU its operators are absent, and importing it asks for two names."""

import torch

NAMES = ("nms", "qnms")


def define() -> None:
    """Define the two operators that `import torchvision` looks up; toolkits import it, and call neither for these networks."""
    for name in NAMES:
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
