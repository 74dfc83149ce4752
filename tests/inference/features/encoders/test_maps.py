"""Maps of timm, torchvision and transformers; pooled, they equal the networks' vectors."""

from __future__ import annotations

import pytest
import torch

from spatialdl.inference.features.encoders.encoder import Wish
from spatialdl.inference.features.encoders.libraries import (
    TimmMap,
    TorchvisionMap,
    TransformersMap,
    of_patches,
)
from spatialdl.inference.features.encoders.making import make_encoder
from tests.inference.features.encoders.test_from_transformers import SIZES, folder_of, vit
from tests.vision import need_timm

IMAGES = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def timm():
    need_timm()
    import timm

    return timm


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext"])
@torch.no_grad()
def test_a_map_of_timm_has_the_mean_of_its_vector(timm, name):
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=0).eval()
    found = TimmMap(network)(IMAGES)
    wanted = network.forward_head(found, pre_logits=True)
    torch.testing.assert_close(network(IMAGES), wanted)
    assert found.shape[2:] == (3, 2)


@torch.no_grad()
def test_patches_of_a_transformer_lie_row_after_row(timm):
    network = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True).eval()
    found = TimmMap(network)(IMAGES)
    tokens = network.forward_features(IMAGES)[:, network.num_prefix_tokens :]
    assert found.shape == (2, tokens.shape[2], 6, 4)
    torch.testing.assert_close(found[:, :, 4, 1], tokens[:, 4 * 4 + 1])


@torch.no_grad()
def test_channels_that_come_last_are_put_before(timm):
    network = timm.create_model(
        "swin_tiny_patch4_window7_224",
        num_classes=0,
        strict_img_size=False,
        embed_dim=8,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 2, 2),
    ).eval()
    found = TimmMap(network)(IMAGES)
    assert found.shape == (2, 64, 3, 2)
    torch.testing.assert_close(found.mean((2, 3)), network(IMAGES))


def small_network(name):
    """A network of torchvision of little width and depth."""
    from torchvision import models

    if name == "ResNet":
        return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    if name == "DenseNet":
        return models.DenseNet(8, (1, 1, 1, 1), 16)
    if name == "SwinTransformer":
        sizes = {"depths": [1, 1], "num_heads": [1, 2], "window_size": [4, 4]}
        return models.SwinTransformer([4, 4], 8, **sizes)
    return models.get_model(name)


@pytest.mark.parametrize(
    "name", ["ResNet", "DenseNet", "regnet_y_400mf", "mobilenet_v3_small", "SwinTransformer"]
)
@torch.no_grad()
def test_a_map_of_torchvision_has_the_mean_that_the_classifier_is_given(timm, name):
    torch.manual_seed(0)
    network = small_network(name).eval()
    given = []
    first = {"ResNet": "fc", "regnet_y_400mf": "fc", "SwinTransformer": "head"}.get(
        name, "classifier"
    )
    network.get_submodule(first).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    network(IMAGES)
    torch.testing.assert_close(TorchvisionMap(network, name)(IMAGES).mean((2, 3)), given[0])


def test_a_network_of_torchvision_that_pools_elsewhere_is_refused(timm):
    from torchvision import models

    vit = models.VisionTransformer(32, 16, 1, 1, 8, 8)
    with pytest.raises(ValueError, match="unknown where torchvision:vit_b_16 pools its map"):
        TorchvisionMap(vit, "torchvision:vit_b_16")


@torch.no_grad()
def test_a_map_of_transformers_has_no_class_token(tmp_path):
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "vit", vit())
    encoder = make_encoder(Wish(f"transformers:{folder}", whole=True))
    found = encoder.network(IMAGES)
    hidden = vit()(pixel_values=IMAGES, interpolate_pos_encoding=True).last_hidden_state
    assert found.shape == (2, 24, 12, 8)
    torch.testing.assert_close(found[:, :, 5, 3], hidden[:, 1 + 5 * 8 + 3])
    with pytest.raises(ValueError, match="--pool class is for tiles"):
        make_encoder(Wish(f"transformers:{folder}", pool="class", whole=True))


@torch.no_grad()
def test_registers_are_left_out_and_maps_stay():
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2WithRegistersConfig(
        **SIZES, image_size=32, patch_size=8, num_register_tokens=3
    )
    network = transformers.Dinov2WithRegistersModel(config).eval()
    hidden = network(pixel_values=IMAGES).last_hidden_state
    torch.testing.assert_close(TransformersMap(network)(IMAGES)[:, :, 0, 0], hidden[:, 4])
    sizes = {"hidden_sizes": [4, 4, 8, 8], "depths": [1, 1, 1, 1]}
    network = transformers.ConvNextModel(transformers.ConvNextConfig(**sizes)).eval()
    hidden = network(pixel_values=IMAGES).last_hidden_state
    torch.testing.assert_close(TransformersMap(network)(IMAGES), hidden)


def test_tokens_without_a_place_are_refused():
    with pytest.raises(ValueError, match="returns 5 tokens for an image of 96 x 64, whose"):
        of_patches(torch.zeros(1, 5, 7), IMAGES, (16, 16))


def test_a_class_of_ones_own_gives_a_map_or_is_refused():
    found = make_encoder(Wish("tests.inference.features.maps.networks.Convolved", whole=True))
    assert found.network(IMAGES).shape == (2, 10, 24, 16)
    assert found.width() == 10
    vector = make_encoder(Wish("tests.inference.features.tiny.Tiny", whole=True))
    with pytest.raises(
        ValueError, match=r"returns \[2, 12\] for 2 images, but --whole needs a map"
    ):
        vector.network(IMAGES)
