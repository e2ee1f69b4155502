"""torchao's PT2E flow with the quantizer for x86 processors: affine activations, weights symmetric for each channel.

It quantizes what layers read. The sums of shortcuts, and what is between two layers otherwise, stay in float: less is asked of it.
"""

import warnings

import torch

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.peers import Quantized
from benchmarks.accuracy.settings import TRAINING, TUNING, Setting
from benchmarks.accuracy.training import train


def refuses(setting: Setting, mode: str) -> str | None:
    if mode == TUNING:
        return "no tuning"
    if setting.power_of_two:
        return "no power-of-two scales"
    if min(setting.weights, setting.activations) < 8:
        return "its quantizer for x86 has 8 bits"
    return None if setting.per_channel else "its quantizer for x86 has weights per channel"


def quantize(checkpoint: Checkpoint, setting: Setting, mode: str) -> Quantized:
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    training = mode == TRAINING
    network = checkpoint.load()
    example = checkpoint.data.calibration[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            network.train() if training else network, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
        ).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=training))
        prepared = (prepare_qat_pt2e if training else prepare_pt2e)(exported, quantizer)
        move_exported_model_to_eval(prepared)
        with torch.no_grad():
            for batch in checkpoint.data.calibration:
                prepared(batch)
        if training:
            move_exported_model_to_train(prepared)
            train(prepared, checkpoint, lambda: None)
            move_exported_model_to_eval(prepared)
        converted = convert_pt2e(prepared)
        move_exported_model_to_eval(converted)
    count = sum("quantize_per" in str(node.target) and "dequantize" not in str(node.target) for node in converted.graph.nodes)
    layers = sum(node.target in LAYERS for node in converted.graph.nodes)
    assert count >= layers, f"PT2E leaves layers in float: {count} tensors are quantized beside {layers} layers"
    return converted


LAYERS = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default, torch.ops.aten.conv_transpose2d.input)
