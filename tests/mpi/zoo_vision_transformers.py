"""Vision transformers of `transformers` and `monai`, built as the networks of `zoo`.

With class tokens, registers, detection tokens, relative positions, windows, pooled keys, learned
queries. Not with eager attention of `transformers`, whose softmax is float32 in any network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from spatialdl import gather_before
from tests.mpi.zoo import NO_DROPOUT, SQUARE, Entry, classifier, of_hf, of_monai

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES = {**_SMALL, "image_size": 64, "patch_size": 8}
_VIT = {**_PATCHES, "intermediate_size": 32}
_DINO = {**_PATCHES, **NO_DROPOUT}
_BEIT = {**_VIT, **NO_DROPOUT, "drop_path_rate": 0.0}
_SAM = {
    **_PATCHES,
    "output_channels": 8,
    "mlp_dim": 32,
    "window_size": 3,  # does not divide the 8 tokens of a row
    "global_attn_indexes": [1],
    "num_pos_feats": 8,
}
_NO_ATTENTION_DROPOUT = {"attention_dropout": 0.0}


def _of(make: Callable[[Any], nn.Module]) -> Entry:
    """A network that is made of several configurations; `make` has the module's names."""

    def build() -> nn.Module:
        import transformers

        return make(transformers)

    return Entry(build, SQUARE)


def _dpt(library: Any) -> nn.Module:
    config = library.DPTConfig(
        **_VIT,
        **NO_DROPOUT,
        num_labels=5,
        backbone_out_indices=[0, 1],
        neck_hidden_sizes=[8, 8],
        fusion_hidden_size=8,
        reassemble_factors=[2, 1],
        use_auxiliary_head=False,
        semantic_classifier_dropout=0.0,
    )
    network: nn.Module = library.DPTForSemanticSegmentation(config)
    return network


def _depth_anything(library: Any) -> nn.Module:
    backbone = library.Dinov2Config(**_PATCHES, out_indices=[1, 2], reshape_hidden_states=False)
    config = library.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=16,
        reassemble_factors=[2, 1],
        neck_hidden_sizes=[8, 8],
        fusion_hidden_size=8,
        head_hidden_size=8,
        patch_size=8,
    )
    network: nn.Module = library.DepthAnythingForDepthEstimation(config)
    return network


def _mask2former(library: Any) -> nn.Module:
    backbone = library.SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 2],
        window_size=4,
        drop_path_rate=0.0,
        image_size=64,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = library.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=5,
        dropout=0.0,
    )
    network: nn.Module = library.Mask2FormerModel(config)
    return network


def _mask2former_gathered(library: Any) -> nn.Module:
    """Its deformable attention reads pixels anywhere; the backbone, with most pixels, is split."""
    network = _mask2former(library)
    gather_before(network, "pixel_level_module.decoder")
    return network


def _clip(name: str) -> Callable[[Any], nn.Module]:
    def make(library: Any) -> nn.Module:
        vision = {**_VIT, **_NO_ATTENTION_DROPOUT}
        config = getattr(library, f"{name}Config")(vision_config=vision, num_labels=5)
        network: nn.Module = getattr(library, f"{name}ForImageClassification")(config)
        return network

    return make


_TRANSFORMERS: dict[str, Entry] = {
    "DeiT distilled": of_hf(
        "DeiT", "ForImageClassificationWithTeacher", SQUARE, num_labels=5, **_VIT, **NO_DROPOUT
    ),
    "DINOv2 registers": classifier("Dinov2WithRegisters", SQUARE, num_register_tokens=3, **_DINO),
    "DINOv3 ViT": of_hf("DINOv3ViT", "Model", SQUARE, **_VIT, num_register_tokens=2),
    "BEiT": classifier("Beit", SQUARE, use_relative_position_bias=True, **_BEIT),
    "BEiT shared bias": classifier(
        "Beit",
        SQUARE,
        use_shared_relative_position_bias=True,
        use_absolute_position_embeddings=True,
        use_mean_pooling=False,
        **_BEIT,
    ),
    "CLIP": _of(_clip("CLIP")),
    "SigLIP attention pooling": of_hf(
        "SiglipVision", "Model", SQUARE, **_VIT, **_NO_ATTENTION_DROPOUT
    ),
    "SAM": of_hf("SamVision", "Model", SQUARE, **_SAM),
    "ViTDet": of_hf(
        "VitDet",
        "Backbone",
        SQUARE,
        **_PATCHES,
        pretrain_image_size=64,
        window_block_indices=[0],
        window_size=3,
        use_relative_position_embeddings=True,
        drop_path_rate=0.0,
    ),
    "Hiera": classifier(
        "Hiera",
        SQUARE,
        embed_dim=8,
        depths=[1, 1, 1],
        num_heads=[1, 2, 2],
        image_size=[64, 64],
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        num_query_pool=2,
        drop_path_rate=0.0,
    ),
    "DPT": _of(_dpt),
    "Depth Anything": _of(_depth_anything),
    "YOLOS": of_hf(
        "Yolos",
        "Model",
        SQUARE,
        **{**_VIT, **NO_DROPOUT, "image_size": [64, 64]},
        num_detection_tokens=3,
    ),
    "Perceiver": of_hf(
        "Perceiver",
        "ForImageClassificationConvProcessing",
        SQUARE,
        num_latents=4,
        d_latents=16,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    ),
    "EoMT": of_hf(
        "Eomt",
        "ForUniversalSegmentation",
        SQUARE,
        **_VIT,
        num_blocks=1,
        num_queries=5,
        num_upscale_blocks=1,
        num_register_tokens=2,
    ),
    "Mask2Former": _of(_mask2former),
    "Mask2Former, gathered": _of(_mask2former_gathered),
}

_MONAI_VIT = {
    "in_channels": 3,
    "img_size": 64,
    "hidden_size": 16,
    "mlp_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "spatial_dims": 2,
}

_MONAI: dict[str, Entry] = {
    "ViT perceptron": of_monai("ViT", SQUARE, **_MONAI_VIT, patch_size=8, proj_type="perceptron"),
    "ViTAutoEnc": of_monai(
        "ViTAutoEnc", SQUARE, **_MONAI_VIT, patch_size=16, out_channels=2, deconv_chns=4
    ),
}

VISION_TRANSFORMERS: dict[str, Entry] = {
    **{f"transformers {name}": entry for name, entry in _TRANSFORMERS.items()},
    **{f"monai {name}": entry for name, entry in _MONAI.items()},
}
