"""Networks of `monai` for volumes (N, C, D, H, W), built as those of images in `zoo`."""

from __future__ import annotations

from typing import Any

import torch

from tests.mpi.zoo import Entry, Reconstruction, of_monai

EVEN = (16, 24, 20)
CUBE = (32, 32, 32)


def _monai(name: str, size: tuple[int, int, int] = EVEN, **options: Any) -> Entry:
    return of_monai(name, size, 1, **options)


_IO = {"in_channels": 1, "out_channels": 2}
_VOLUME = {"spatial_dims": 3, **_IO}
_WIDTHS = {"channels": (4, 8, 8), "strides": (2, 2)}
_FEATURES = (4, 4, 4, 8, 8, 4)
_SEG_RES = {
    **_VOLUME,
    "init_filters": 4,
    "blocks_down": (1, 1, 1),
    "blocks_up": (1, 1),
    "norm": ("group", {"num_groups": 2}),
}
_DYNUNET = {
    "kernel_size": [3, [1, 3, 3], 3],
    "strides": [1, [1, 2, 2], 2],
    "upsample_kernel_size": [[1, 2, 2], 2],
    "filters": [4, 8, 8],
    **_VOLUME,
}
_DENSE = {"init_features": 8, "growth_rate": 4, "bn_size": 2}
_RESNET = {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 3}
_NARROW = {"layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 8, 8]}
_SENET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "num_classes": 3,
    "layers": (1, 1, 1, 1),
    "inplanes": 4,
    "reduction": 4,
    "dropout_prob": None,
}
_KL = {
    "num_res_blocks": 1,
    "channels": (4, 4, 8),
    "attention_levels": (False, False, True),
    "norm_num_groups": 2,
}
_VNET = {"spatial_dims": 3, **_IO, "dropout_prob_down": None, "dropout_prob_up": (None, 0.0)}
_MEDNEXT = {
    **_VOLUME,
    "init_filters": 4,
    "blocks_down": (1, 1),
    "blocks_bottleneck": 1,
    "blocks_up": (1, 1),
}

VOLUMES: dict[str, Entry] = {
    "UNet residual, batch norm": _monai(
        "UNet", **_VOLUME, **_WIDTHS, num_res_units=2, norm="batch", act="relu"
    ),
    "UNet group norm, kernel 5": _monai(
        "UNet",
        **_VOLUME,
        **_WIDTHS,
        num_res_units=1,
        kernel_size=5,
        norm=("group", {"num_groups": 2}),
    ),
    "UNet flat kernels": _monai(
        "UNet",
        (9, 20, 28),
        **_VOLUME,
        channels=(4, 8, 8),
        strides=((1, 2, 2), (1, 2, 2)),
        kernel_size=(1, 3, 3),
        up_kernel_size=(1, 3, 3),
    ),
    "BasicUNet": _monai("BasicUNet", (33, 21, 24), **_VOLUME, features=_FEATURES),
    "BasicUNet pixel shuffle": _monai(
        "BasicUNet", (16, 32, 16), **_VOLUME, features=_FEATURES, upsample="pixelshuffle"
    ),
    "BasicUNetPlusPlus": _monai(
        "BasicUNetPlusPlus", (32, 16, 32), **_VOLUME, features=_FEATURES, deep_supervision=True
    ),
    "AttentionUnet": _monai("AttentionUnet", **_VOLUME, **_WIDTHS),
    "DynUNet": _monai("DynUNet", (10, 20, 24), **_DYNUNET),
    "DynUNet deep supervision": _monai(
        "DynUNet",
        (10, 20, 24),
        **_DYNUNET,
        deep_supervision=True,
        res_block=True,
        norm_name="batch",
    ),
    "SegResNet pixel shuffle": _monai("SegResNet", **_SEG_RES, upsample_mode="pixelshuffle"),
    "SegResNetVAE": _monai(
        "SegResNetVAE", (16, 32, 16), **_SEG_RES, input_image_size=(16, 32, 16), vae_nz=8
    ),
    "SegResNetDS": _monai(
        "SegResNetDS", **_VOLUME, init_filters=4, blocks_down=(1, 1, 1), dsdepth=2
    ),
    "SegResNetDS anisotropic": _monai(
        "SegResNetDS",
        **_VOLUME,
        init_filters=4,
        blocks_down=(1, 1, 1),
        resolution=(2.0, 1.0, 1.0),
        norm="instance",
    ),
    "VNet": _monai("VNet", (16, 32, 16), **_VNET),
    "HighResNet": _monai(
        "HighResNet",
        (9, 13, 14),
        **_VOLUME,
        layer_params=(
            {"name": "conv_0", "n_features": 4, "kernel_size": 3},
            {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
            {"name": "res_2", "n_features": 4, "kernels": (3, 3), "repeat": 1},
            {"name": "res_3", "n_features": 8, "kernels": (3, 3), "repeat": 1},
            {"name": "conv_1", "n_features": 4, "kernel_size": 1},
            {"name": "conv_2", "kernel_size": 1},
        ),
    ),
    "DenseNet121": _monai("DenseNet121", (33, 32, 34), **_VOLUME, **_DENSE),
    "ResNet18": _monai(
        "ResNet",
        (35, 38, 33),
        **_RESNET,
        block="basic",
        layers=[2, 2, 2, 2],
        block_inplanes=[4, 4, 8, 8],
    ),
    "ResNet bottleneck, type A, stride 2": _monai(
        "ResNet",
        (40, 39, 43),
        **_RESNET,
        **_NARROW,
        block="bottleneck",
        shortcut_type="A",
        conv1_t_stride=2,
    ),
    "SEResNeXt": _monai(
        "SENet", (35, 33, 37), **_SENET, block="se_resnetxt_bottleneck", groups=4, input_3x3=False
    ),
    "EfficientNet": _monai(
        "EfficientNet",
        (21, 26, 23),
        blocks_args_str=["r1_k3_s11_e1_i32_o8_se0.25", "r2_k5_s22_e6_i8_o16_se0.25"],
        spatial_dims=3,
        in_channels=1,
        num_classes=3,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        image_size=24,
    ),
    "FlexibleUNet": _monai(
        "FlexibleUNet", CUBE, **_VOLUME, backbone="resnet10", decoder_channels=(8, 8, 4, 4, 4)
    ),
    "RegUNet concatenated": _monai(
        "RegUNet", **_VOLUME, num_channel_initial=4, depth=2, concat_skip=True, pooling=False
    ),
    "LocalNet": _monai("LocalNet", **_VOLUME, num_channel_initial=4, extract_levels=(0, 1, 2)),
    "AutoencoderKL": Entry(
        lambda: Reconstruction(_monai("AutoencoderKL", **_VOLUME, **_KL).build()), (8, 12, 8), 1
    ),
    "DiffusionModelUNet": _monai(
        "DiffusionModelUNet",
        (8, 12, 8),
        **_VOLUME,
        **_KL,
        num_head_channels=4,
        arguments=(torch.tensor([3, 7]),),
    ),
    "PatchDiscriminator": _monai(
        "PatchDiscriminator", (27, 30, 26), spatial_dims=3, channels=4, in_channels=1
    ),
    "MedNeXt residual, deep supervision": _monai(
        "MedNeXt",
        (12, 16, 20),
        **_MEDNEXT,
        kernel_size=5,
        use_residual_connection=True,
        deep_supervision=True,
        global_resp_norm=True,
    ),
    "AHNet": _monai("AHNet", CUBE, **_VOLUME, layers=(1, 1, 1, 1), psp_block_num=0),
    "VoxelMorphUNet": of_monai(
        "VoxelMorphUNet",
        EVEN,
        2,
        spatial_dims=3,
        in_channels=2,
        unet_out_channels=4,
        channels=(4, 4, 4, 4),
        final_conv_channels=(4, 4),
    ),
    "UNETR": _monai(
        "UNETR", CUBE, **_IO, img_size=CUBE, feature_size=4, hidden_size=12, mlp_dim=24, num_heads=2
    ),
    "SwinUNETR": _monai(
        "SwinUNETR",
        (64, 32, 32),
        **_IO,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        window_size=2,
    ),
    "Classifier": _monai(
        "Classifier",
        (12, 16, 8),
        in_shape=(1, 12, 16, 8),
        classes=3,
        channels=(4, 8),
        strides=(2, 2),
    ),
}
