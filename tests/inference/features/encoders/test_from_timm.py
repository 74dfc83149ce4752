"""Encoders of timm and torchvision: weights from a file, their own transforms, no downloads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from spatialdl.inference.features.encoders.encoder import Preprocess, Wish
from spatialdl.inference.features.encoders.making import make_encoder
from tests.inference.features.encoders.test_preprocessing import tiles_of
from tests.vision import need_timm

NAME = "test_resnet"  # of timm's own tests, for images of 160 x 160


@pytest.fixture(scope="module")
def timm():
    need_timm()
    import timm
    import timm.data

    return timm


@pytest.fixture(scope="module")
def weights(timm, tmp_path_factory) -> Path:
    """Random weights with a head."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(timm.create_model(NAME).state_dict(), path)
    return path


@pytest.mark.parametrize(("crop", "side"), [(False, 160), (True, 200)])
def test_features_are_those_of_timm_and_its_transform(timm, weights, crop, side):
    encoder = make_encoder(Wish(f"timm:{NAME}", weights, crop=crop))
    model = timm.create_model(NAME, num_classes=0).eval()
    model.load_state_dict(torch.load(weights, weights_only=True), strict=False)
    config = timm.data.resolve_data_config({}, model=model)
    assert config["crop_pct"] < 1
    if not crop:
        config["crop_pct"] = 1.0
    transform = timm.data.create_transform(**config, is_training=False)
    tiles = tiles_of(side)
    images = torch.stack([transform(Image.fromarray(tile)) for tile in tiles.numpy()])
    seen = Preprocess(encoder.preprocessing)(tiles)
    exact = side == 160 and not crop
    level = 2.01 / 255 / min(config["std"])
    torch.testing.assert_close(seen, images, rtol=0, atol=1e-6 if exact else level)
    assert (seen - images).abs().mean() < (1e-6 if exact else level / 20)
    with torch.inference_mode():
        found, wanted = encoder.network(seen), model(images)
    assert found.shape == (3, encoder.width())
    torch.testing.assert_close(
        found, wanted, rtol=1e-4 if exact else 0.05, atol=1e-5 if exact else 0.01
    )


def test_networks_are_frozen_and_their_digest_is_of_all_weights(timm, weights, tmp_path):
    first = make_encoder(Wish(f"timm:{NAME}", weights))
    assert not first.network.training
    assert not any(value.requires_grad for value in first.network.parameters())
    assert first.digest() == make_encoder(Wish(f"timm:{NAME}", weights)).digest()
    state = torch.load(weights, weights_only=True)
    state["conv1.weight" if "conv1.weight" in state else next(iter(state))].view(-1)[0] += 1
    torch.save(state, tmp_path / "other.pth")
    assert first.digest() != make_encoder(Wish(f"timm:{NAME}", tmp_path / "other.pth")).digest()


def test_other_weights_and_pickled_objects_are_refused(timm, weights, tmp_path):
    state = torch.load(weights, weights_only=True)
    first, *rest = state
    for given, message in (
        ({name: state[name] for name in rest}, ": missing"),
        ({**state, "more.weight": state[first]}, ": unexpected"),
        ({"weight": Path("x")}, "must contain only tensors"),
    ):
        torch.save(given, tmp_path / "other.pth")
        with pytest.raises(ValueError, match=message):
            make_encoder(Wish(f"timm:{NAME}", tmp_path / "other.pth"))


def test_nothing_is_fetched_unless_asked(timm, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ValueError, match=r"hf download timm/test_resnet\), or add --download"):
        make_encoder(Wish(f"timm:{NAME}"))
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_unknown_networks_and_arguments_are_refused(timm, weights):
    with pytest.raises(ValueError, match="cannot be made: Unknown model"):
        make_encoder(Wish("timm:no_such_net", weights))
    with pytest.raises(ValueError, match="there is no such file"):
        make_encoder(Wish(f"timm:{NAME}", Path("no.pth")))
    with pytest.raises(ValueError, match="--pool mean needs --encoder transformers"):
        make_encoder(Wish(f"timm:{NAME}", weights, pool="mean"))


# --- torchvision


@pytest.fixture
def models():
    need_timm()
    from torchvision import models

    return models


def test_features_are_what_the_classifier_is_given(models, tmp_path):
    torch.manual_seed(2)
    model = models.get_model("resnet18").eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    encoder = make_encoder(Wish("torchvision:resnet18", tmp_path / "weights.pth", crop=True))
    tiles = tiles_of(256, 2)
    transform = models.ResNet18_Weights.DEFAULT.transforms()
    images = torch.stack([transform(Image.fromarray(tile)) for tile in tiles.numpy()])
    seen = Preprocess(encoder.preprocessing)(tiles)
    torch.testing.assert_close(seen, images, rtol=0, atol=1e-6)  # 256 is what it resizes to
    with torch.inference_mode():
        found, wanted = encoder.network(seen), model(images)
        torch.testing.assert_close(model.fc(found), wanted)
    assert found.shape == (2, 512)


@pytest.mark.parametrize(
    ("name", "width"),
    [("squeezenet1_1", 512), ("shufflenet_v2_x0_5", 1024)],
)
def test_heads_are_found_whatever_they_are_called(models, tmp_path, name, width):
    torch.save(models.get_model(name).state_dict(), tmp_path / "weights.pth")
    encoder = make_encoder(Wish(f"torchvision:{name}", tmp_path / "weights.pth"))
    assert encoder.preprocessing.resized is None
    assert encoder.width() == width
