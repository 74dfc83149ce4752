"""Networks of others, built with random weights and small widths: `transformers` and `monai`.

Nothing is loaded from anywhere, and nothing in them is changed. What is random in training
(dropout, stochastic depth) is switched off by the networks' own options, because one process draws
other numbers than several.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spatialdl.spatial.checking.network import switch_off_dropout

ODD = (70, 93)
EVEN = (96, 80)
SQUARE = (64, 64)


class Entry(NamedTuple):
    """How a network is built, and what it takes.

    Attributes:
        build: makes the network.
        size: (H, W) of the images, (D, H, W) of volumes.
        channels: of the images.
        arguments: what it takes besides the images.
    """

    build: Callable[[], nn.Module]
    size: tuple[int, ...] = ODD
    channels: int = 3
    arguments: Sequence[Tensor] = ()

    def network(self) -> nn.Module:
        """In float64 and training mode, the same on every rank."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = self.build().double().train()
        switch_off_dropout(network)
        for name, parameter in network.named_parameters():
            parameter.data = _drawn(name, parameter)
        return network

    def image(self, samples: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (samples, self.channels, *self.size)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def _drawn(name: str, parameter: Tensor) -> Tensor:
    """Weights with which no block fades: many start at 0 or 1e-6 and would hide their mistakes."""
    if parameter.dim() >= 2:
        inputs = parameter[0].numel()
        return torch.randn_like(parameter) * min(1.0, (1.5 / inputs) ** 0.5)
    if name.endswith("bias"):
        return 0.1 * torch.randn_like(parameter)
    return 0.5 + torch.rand_like(parameter)


# --- transformers


def of_hf(name: str, head: str, size: tuple[int, int] = ODD, **options: Any) -> Entry:
    """`{name}{head}` of transformers, made of a `{name}Config` with these options."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**options)
        network: nn.Module = getattr(transformers, f"{name}{head}")(config)
        return network

    return Entry(build, size)


def classifier(name: str, size: tuple[int, int] = ODD, **options: Any) -> Entry:
    return of_hf(name, "ForImageClassification", size, num_labels=5, **options)


def _upernet(backbone: str, **options: Any) -> Entry:
    def build() -> nn.Module:
        import transformers

        inner = getattr(transformers, f"{backbone}Config")(**options)
        config = transformers.UperNetConfig(
            backbone_config=inner,
            hidden_size=16,
            auxiliary_in_channels=inner.hidden_sizes[2]
            if hasattr(inner, "hidden_sizes")
            else inner.embed_dim * 4,
            auxiliary_channels=8,
            num_labels=5,
        )
        return transformers.UperNetForSemanticSegmentation(config)

    return Entry(build, EVEN)


_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1]}
_RESNET = {"embedding_size": 8, **_STAGES}
_BACKBONE = {**_STAGES, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
_HIERARCHY = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "drop_path_rate": 0.0,
}
_SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MOBILEVIT = {
    "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 48],
    "classifier_dropout_prob": 0.0,
    "aspp_dropout_prob": 0.0,
    "aspp_out_channels": 8,
    **NO_DROPOUT,
}
_MOBILEVITV2 = {
    "width_multiplier": 0.25,
    "n_attn_blocks": [1, 1, 1],
    "base_attn_unit_dims": [32, 32, 32],
    "classifier_dropout_prob": 0.0,
    "aspp_dropout_prob": 0.0,
    "aspp_out_channels": 8,
}
_EFFICIENTNET = {
    "width_coefficient": 0.25,
    "depth_coefficient": 0.3,
    "hidden_dim": 320,
    "dropout_rate": 0.0,
    "drop_connect_rate": 0.0,
    "batch_norm_momentum": 0.9,
}
_HGNET = {
    "embedding_size": 8,
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 24, 32],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 24, 32, 40],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
    "hidden_sizes": [16, 24, 32, 40],
    "depths": [1, 1, 1, 1],
}
_TEXTNET = {
    "stem_out_channels": 8,
    "conv_layer_kernel_sizes": [
        [[3, 3], [3, 3]],
        [[3, 3], [1, 3], [3, 1]],
        [[3, 3], [3, 3]],
        [[3, 3], [3, 1]],
    ],
    "conv_layer_strides": [[1, 2], [2, 1, 1], [2, 1], [2, 1]],
    "hidden_sizes": [8, 8, 16, 16, 24],
}
_CVT = {
    "embed_dim": [8, 16, 24],
    "num_heads": [1, 2, 2],
    "depth": [1, 2, 3],  # each stage reads the rates of as many blocks
    "drop_path_rate": [0.0, 0.0, 0.0],
}
_PVT = {
    "sequence_reduction_ratios": [8, 4, 2, 1],
    "mlp_ratios": [2, 2, 2, 2],
    **_HIERARCHY,
    "image_size": 64,
}
_LEVIT = {
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [2, 2, 2],
    "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
    "image_size": 64,
}

TRANSFORMERS: dict[str, Entry] = {
    "ResNet bottleneck": classifier("ResNet", layer_type="bottleneck", **_RESNET),
    "ConvNext": classifier("ConvNext", **_STAGES),
    "ConvNextV2": classifier("ConvNextV2", **_STAGES),
    "RegNet Y": classifier("RegNet", layer_type="y", groups_width=4, **_RESNET),
    "EfficientNet": classifier("EfficientNet", **_EFFICIENTNET),
    "MobileNetV1": classifier("MobileNetV1", depth_multiplier=0.25, classifier_dropout_prob=0.0),
    "MobileNetV2 segmentation": of_hf(
        "MobileNetV2",
        "ForSemanticSegmentation",
        depth_multiplier=0.25,
        classifier_dropout_prob=0.0,
        output_stride=8,
        num_labels=5,
    ),
    "BiT bottleneck": classifier("Bit", layer_type="bottleneck", num_groups=4, **_RESNET),
    "BiT same padding": classifier("Bit", global_padding="SAME", num_groups=4, **_RESNET),
    "HGNetV2": classifier("HGNetV2", **_HGNET),
    "TextNet": classifier("TextNet", **_TEXTNET),
    "PoolFormer": classifier(
        "PoolFormer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], mlp_ratio=2.0
    ),
    "UperNet ConvNext": _upernet("ConvNext", **_BACKBONE),
    "UperNet Swin": _upernet(
        "Swin",
        embed_dim=8,
        depths=[2, 2, 1, 1],
        num_heads=[1, 2, 2, 2],
        window_size=4,
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    ),
    "SegFormer": classifier("Segformer", **_HIERARCHY, classifier_dropout_prob=0.0),
    "SegFormer segmentation": of_hf(
        "Segformer",
        "ForSemanticSegmentation",
        num_labels=5,
        decoder_hidden_size=16,
        classifier_dropout_prob=0.0,
        **_HIERARCHY,
    ),
    "GLPN": of_hf("GLPN", "ForDepthEstimation", (96, 64), decoder_hidden_size=16, **_HIERARCHY),
    "PVT": classifier("Pvt", SQUARE, **_PVT),
    "PVTv2 linear attention": classifier(
        "PvtV2", **_HIERARCHY, mlp_ratios=[2, 2, 2, 2], linear_attention=True
    ),
    "CvT class token": classifier("Cvt", **_CVT, cls_token=[False, False, True]),
    "FocalNet": classifier(
        "FocalNet", embed_dim=8, hidden_sizes=[8, 16], depths=[1, 1], drop_path_rate=0.0
    ),
    "Swin": classifier("Swin", window_size=4, **_SWIN),
    "Swinv2": classifier("Swinv2", window_size=4, **_SWIN),
    "Swin2SR": of_hf(
        "Swin2SR",
        "ForImageSuperResolution",
        (32, 44),
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
        image_size=32,
    ),
    "MobileViT segmentation": of_hf(
        "MobileViT", "ForSemanticSegmentation", EVEN, num_labels=5, **_MOBILEVIT
    ),
    "MobileViTV2 segmentation": of_hf(
        "MobileViTV2", "ForSemanticSegmentation", EVEN, num_labels=5, **_MOBILEVITV2
    ),
    "LeViT": classifier("Levit", SQUARE, **_LEVIT),
    "SwiftFormer": classifier(
        "SwiftFormer", embed_dims=[8, 16, 24, 32], depths=[1, 1, 1, 1], mlp_ratio=2
    ),
    "SuperPoint": of_hf(
        "SuperPoint",
        "ForKeypointDetection",
        encoder_hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=16,
        descriptor_decoder_dim=16,
    ),
    "DINOv2": classifier(
        "Dinov2",
        SQUARE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        **NO_DROPOUT,
    ),
}


# --- monai


def of_monai(
    name: str,
    size: tuple[int, ...] = EVEN,
    image_channels: int = 3,
    arguments: Sequence[Tensor] = (),
    **options: Any,
) -> Entry:
    def build() -> nn.Module:
        import monai.networks.nets

        network: nn.Module = getattr(monai.networks.nets, name)(**options)
        return network

    return Entry(build, size, image_channels, arguments)


_IO = {"in_channels": 3, "out_channels": 2}
_PLANE = {"spatial_dims": 2, **_IO}
_WIDTHS = {"channels": (4, 8, 16), "strides": (2, 2)}
_CODER = {"channels": (4, 8), "strides": (2, 2)}
_SENET = {"spatial_dims": 2, "in_channels": 3, "num_classes": 5, "layers": (1, 1, 1, 1)}
_KL = {
    "num_res_blocks": 1,
    "channels": (8, 8, 16),
    "attention_levels": (False, False, True),
    "norm_num_groups": 4,
}
_MONAI_SWIN = {"feature_size": 12, "depths": (2, 2, 1, 1), "num_heads": (1, 2, 2, 2)}


class Reconstruction(nn.Module):
    """What a variational autoencoder makes of an image without drawing random numbers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return self.network.reconstruct(image)


def _autoencoder_kl() -> nn.Module:
    return Reconstruction(of_monai("AutoencoderKL", **_PLANE, **_KL).build())


MONAI: dict[str, Entry] = {
    "UNet odd image": of_monai("UNet", (68, 92), **_PLANE, **_WIDTHS),
    "SegResNet deconvolution": of_monai(
        "SegResNet",
        **_PLANE,
        init_filters=8,
        blocks_down=(1, 1, 1),
        blocks_up=(1, 1),
        upsample_mode="deconv",
    ),
    "SENet154": of_monai(
        "SENet",
        (41, 47),
        **_SENET,
        block="se_bottleneck",
        groups=4,
        reduction=4,
        inplanes=16,
        dropout_prob=None,
    ),
    "EfficientNetBN": of_monai(
        "EfficientNetBN", (64, 48), model_name="efficientnet-b0", pretrained=False, num_classes=5
    ),
    "HighResNet": of_monai(
        "HighResNet",
        ODD,
        **_PLANE,
        layer_params=(
            {"name": "conv_0", "n_features": 4, "kernel_size": 3},
            {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
            {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 1},
            {"name": "res_3", "n_features": 8, "kernels": (3, 3), "repeat": 1},
            {"name": "conv_1", "n_features": 8, "kernel_size": 1},
            {"name": "conv_2", "kernel_size": 1},
        ),
    ),
    "AutoEncoder": of_monai("AutoEncoder", **_PLANE, **_CODER, num_res_units=1),
    "VarAutoEncoder": of_monai(
        "VarAutoEncoder",
        spatial_dims=2,
        in_shape=(3, *EVEN),
        out_channels=2,
        latent_size=4,
        **_CODER,
        use_mean_at_inference=True,
    ),
    "AutoencoderKL": Entry(_autoencoder_kl, (32, 40)),
    "DiffusionModelUNet without attention": of_monai(
        "DiffusionModelUNet",
        (32, 40),
        **_PLANE,
        **{**_KL, "attention_levels": (False, False, False)},
        num_head_channels=8,
        resblock_updown=True,
        arguments=(torch.tensor([3, 7]),),
    ),
    "MultiScalePatchDiscriminator": of_monai(
        "MultiScalePatchDiscriminator",
        spatial_dims=2,
        channels=4,
        in_channels=3,
        num_d=2,
        num_layers_d=2,
        minimum_size_im=64,
    ),
    "SwinUNETR": of_monai(
        "SwinUNETR", (64, 64), **_IO, **_MONAI_SWIN, window_size=4, spatial_dims=2
    ),
    "Quicknat": of_monai(
        "Quicknat", (64, 48), image_channels=1, num_classes=3, num_channels=1, num_filters=4
    ),
    "Classifier": of_monai("Classifier", (32, 24), in_shape=(3, 32, 24), classes=4, **_CODER),
    "Regressor": of_monai("Regressor", (33, 26), in_shape=(3, 33, 26), out_shape=(2, 3), **_CODER),
    "Discriminator": of_monai("Discriminator", (33, 26), in_shape=(3, 33, 26), **_CODER),
}

NETWORKS: dict[str, Entry] = {
    **{f"transformers {name}": entry for name, entry in TRANSFORMERS.items()},
    **{f"monai {name}": entry for name, entry in MONAI.items()},
}
