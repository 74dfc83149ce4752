"""Vision networks in plain PyTorch: nothing in here knows that an image can be split."""

from __future__ import annotations

from spatialdl.models.amoebanet import amoebanet_d
from spatialdl.models.resnet import ResNet, resnet18, resnet50
from spatialdl.models.resnet_v2 import ResNetV2, resnet110_v2, resnet_v2
from spatialdl.models.unet import UNet, unet, unet3d
from spatialdl.models.vit import VisionTransformer, vit
from spatialdl.models.wide_view import wide_view

__all__ = [
    "ResNet",
    "ResNetV2",
    "UNet",
    "VisionTransformer",
    "amoebanet_d",
    "resnet18",
    "resnet50",
    "resnet110_v2",
    "resnet_v2",
    "unet",
    "unet3d",
    "vit",
    "wide_view",
]
