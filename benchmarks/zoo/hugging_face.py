"""Classes of Hugging Face's `transformers` as users meet them: a class, a small configuration, inputs. No class is edited.

Weights are random and alive (see `live`), nothing is downloaded. `transformers` is a dependency of the extra "zoo" and is imported
when an entry is built.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.photographs import photographs, signals
from fxquant.support import seeded

Inputs = dict[str, Tensor]
LABELS = 32  # of a classifier: the noise of two numbers says little
Draw = Callable[[int, int], Inputs]
"""From a number of items and a seed, the keyword inputs of forward for so many items."""


@dataclass(frozen=True)
class Entry:
    """One class.

    model    its name, and with a dot that of its module below `transformers.models`
    config   the name of its configuration's class
    settings what the configuration is made with; a value that is a pair (class name, settings) is a configuration itself
    inputs   draws its inputs
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Draw

    def build(self) -> nn.Module:
        """The model with random weights from a fixed seed, in eval mode; they are not alive yet."""
        with seeded(0):
            labels = {"num_labels": LABELS} if "Classification" in self.model else {}
            return _named(self.model)(_configuration(self.config, {**labels, **self.settings})).eval()


def _named(name: str) -> Any:
    home, _, plain = name.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{home}" if home else "transformers"), plain)


def _configuration(name: str, settings: Mapping[str, Any]) -> Any:
    arguments = {key: _configuration(*value) if isinstance(value, tuple) else value for key, value in settings.items()}
    return _named(name)(**arguments)


# ---- inputs -----------------------------------------------------------------------------------------------------------


def _images(height: int, width: int | None = None) -> Draw:
    size = width or height
    return lambda count, seed: {"pixel_values": photographs(count, size, seed)[:, :, :height]}


def _padded_images(size: int) -> Draw:
    """Images of which some are smaller than the batch they are in."""

    def draw(count: int, seed: int) -> Inputs:
        mask = torch.ones(count, size, size, dtype=torch.int64)
        mask[1::2, :, size * 3 // 4 :] = 0
        return {"pixel_values": photographs(count, size, seed), "pixel_mask": mask}

    return draw


def _tokens(length: int, vocabulary: int, padded: bool = True) -> Draw:
    """Draw sentences; every second one is shorter than its batch."""

    def draw(count: int, seed: int) -> Inputs:
        tokens = torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(count, length, dtype=torch.int64)
        mask[1::2, length * 3 // 4 :] = 0
        return {"input_ids": tokens, "attention_mask": mask} if padded else {"input_ids": tokens}

    return draw


def _sound(length: int) -> Draw:
    """Sound with mean 0 and variance 1, as the model's feature extractor has it."""

    def draw(count: int, seed: int) -> Inputs:
        values = signals(count, length, seed).flatten(1)[:, :length]
        return {"input_values": (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True)}

    return draw


def _spectrum(bands: int, length: int) -> Draw:
    def draw(count: int, seed: int) -> Inputs:
        return {"input_features": torch.randn(count, bands, length, generator=torch.Generator().manual_seed(seed))}

    return draw


# ---- configurations ---------------------------------------------------------------------------------------------------

_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_VIT = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_PYRAMID = {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4]}
_WINDOWS = {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_TEXT = {
    "vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96,
    "max_position_embeddings": 32,
}  # fmt: skip


def _classifier(name: str, settings: Mapping[str, Any], inputs: Draw) -> Entry:
    """Return the entry of a family's classifier of images."""
    return Entry(f"{name}ForImageClassification", f"{name}Config", settings, inputs)


ENTRIES: dict[str, Entry] = {
    "ResNet": _classifier("ResNet", {"embedding_size": 16, **_STAGES}, _images(64)),
    "RegNet": _classifier("RegNet", {"embedding_size": 16, "groups_width": 8, **_STAGES}, _images(64)),
    "MobileNetV1": _classifier("MobileNetV1", {"image_size": 64, "depth_multiplier": 0.25}, _images(64)),
    "MobileNetV2": _classifier("MobileNetV2", {"image_size": 64, "depth_multiplier": 0.35}, _images(64)),
    "EfficientNet": _classifier("EfficientNet", {
        "image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320,
    }, _images(64)),
    "ConvNeXt": _classifier("ConvNext", {"image_size": 64, **_STAGES}, _images(64)),
    "ConvNeXtV2": _classifier("ConvNextV2", {"image_size": 64, **_STAGES}, _images(64)),
    "ViT": _classifier("ViT", _VIT, _images(32)),
    "DeiT": Entry("DeiTForImageClassificationWithTeacher", "DeiTConfig", _VIT, _images(32)),
    "BEiT": _classifier("Beit", {**_VIT, "use_relative_position_bias": True}, _images(32)),
    "DINOv2": _classifier("Dinov2", {
        **{key: value for key, value in _VIT.items() if key != "intermediate_size"}, "mlp_ratio": 2,
    }, _images(32)),
    "Swin": _classifier("Swin", _WINDOWS, _images(64)),
    "SwinV2": _classifier("Swinv2", _WINDOWS, _images(64)),
    "MobileViT": _classifier("MobileViT", {
        "image_size": 128, "hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64],
    }, _images(128)),
    "MobileViTV2": _classifier("MobileViTV2", {"image_size": 128, "width_multiplier": 0.25, "n_attn_blocks": [1, 1, 1]}, _images(128)),
    "SegFormer": Entry("SegformerForSemanticSegmentation", "SegformerConfig", {
        **_PYRAMID, "decoder_hidden_size": 32, "image_size": 64,
    }, _images(64)),
    "PVT": _classifier("Pvt", {"image_size": 64, **_PYRAMID}, _images(64)),
    "PVTv2": _classifier("PvtV2", {"image_size": 64, **_PYRAMID}, _images(64)),
    "PoolFormer": _classifier("PoolFormer", _STAGES, _images(64)),
    "LeViT": _classifier("Levit", {
        "image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
    }, _images(64)),
    "CvT": _classifier("Cvt", {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}, _images(64)),
    "DPT": Entry("DPTForDepthEstimation", "DPTConfig", {
        **_VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 24, 32, 32],
        "fusion_hidden_size": 16,
    }, _images(32)),
    "UperNet": Entry("UperNetForSemanticSegmentation", "UperNetConfig", {
        "backbone_config": ("ConvNextConfig", {"image_size": 64, **_STAGES, "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
        "hidden_size": 32, "auxiliary_channels": 16, "auxiliary_in_channels": 48, "num_labels": 10,
    }, _images(64)),
    "DETR": Entry("DetrForObjectDetection", "DetrConfig", {
        "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": ("ResNetConfig",
        {"embedding_size": 16, **_STAGES, "out_features": ["stage4"]}), "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
    }, _padded_images(64)),
    "YOLOS": Entry("YolosForObjectDetection", "YolosConfig", {**_VIT, "image_size": [32, 48], "num_detection_tokens": 10}, _images(32, 48)),
    "BERT": Entry("BertForSequenceClassification", "BertConfig", _TEXT, _tokens(16, 120)),
    "DistilBERT": Entry("DistilBertForSequenceClassification", "DistilBertConfig", {
        "vocab_size": 120, "dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 96, "max_position_embeddings": 32,
    }, _tokens(16, 120)),
    "ALBERT": Entry("AlbertForSequenceClassification", "AlbertConfig", {**_TEXT, "embedding_size": 32}, _tokens(16, 120)),
    "GPT-2": Entry("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": 120, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 3,
    }, _tokens(16, 120)),
    "Llama": Entry("LlamaForCausalLM", "LlamaConfig", {**_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}, _tokens(16, 120)),
    "T5 encoder": Entry("T5EncoderModel", "T5Config", {
        "vocab_size": 120, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 3,
    }, _tokens(16, 120)),
    "Wav2Vec2": Entry("Wav2Vec2ForCTC", "Wav2Vec2Config", {
        "vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "conv_dim": [32,
        32, 32], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    }, _sound(600)),
    "Whisper encoder": Entry("whisper.modeling_whisper.WhisperEncoder", "WhisperConfig", {
        "vocab_size": 120, "num_mel_bins": 20, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96,
        "max_source_positions": 32, "decoder_layers": 1, "decoder_attention_heads": 3, "decoder_ffn_dim": 96, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }, _spectrum(20, 64)),
    "CLIP image": Entry("CLIPVisionModelWithProjection", "CLIPVisionConfig", {**_VIT, "projection_dim": 32}, _images(32)),
    "CLIP text": Entry("CLIPTextModelWithProjection", "CLIPTextConfig", {
        **_TEXT, "projection_dim": 32, "eos_token_id": 119, "bos_token_id": 0, "pad_token_id": 1,
    }, _tokens(16, 120)),
    "SAM image": Entry("SamVisionModel", "SamVisionConfig", {
        "hidden_size": 48, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 64, "patch_size": 8,
        "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 96,
    }, _images(64)),
}  # fmt: skip
