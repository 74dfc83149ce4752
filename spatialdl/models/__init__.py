"""Vision networks in plain PyTorch, without code for split images."""

from __future__ import annotations

from spatialdl.models.amoebanet import amoebanet_d
from spatialdl.models.bags import (
    AttentionMIL,
    BagPooling,
    BagTransformer,
    abmil,
    bag_pooling,
    bag_transformer,
)
from spatialdl.models.clam import CLAM, clam
from spatialdl.models.resnet import ResNet, resnet18, resnet50
from spatialdl.models.resnet_v2 import ResNetV2, resnet110_v2, resnet_v2
from spatialdl.models.tile_encoder import tile_encoder
from spatialdl.models.transmil import TransMIL, transmil
from spatialdl.models.unet import UNet, unet, unet3d
from spatialdl.models.vit import VisionTransformer, vit
from spatialdl.models.wide_view import wide_view

__all__ = [
    "CLAM",
    "AttentionMIL",
    "BagPooling",
    "BagTransformer",
    "ResNet",
    "ResNetV2",
    "TransMIL",
    "UNet",
    "VisionTransformer",
    "abmil",
    "amoebanet_d",
    "bag_pooling",
    "bag_transformer",
    "clam",
    "resnet18",
    "resnet50",
    "resnet110_v2",
    "resnet_v2",
    "tile_encoder",
    "transmil",
    "unet",
    "unet3d",
    "vit",
    "wide_view",
]
