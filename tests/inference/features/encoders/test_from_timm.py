"""Encoders of timm and torchvision: weights from a file, their own transforms, no downloads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from spatialdl.inference.features.encoders.encoder import Wish
from spatialdl.inference.features.encoders.making import make_encoder
from spatialdl.inference.features.encoders.preprocessing import Preprocess
from tests.inference.features.encoders.test_preprocessing import tiles_of
from tests.vision import need_timm

NAME = "test_resnet"  # of timm's own tests, for images of 160 x 160


@pytest.fixture
def timm():
    need_timm()
    import timm
    import timm.data

    return timm


@pytest.fixture
def weights(timm, tmp_path: Path) -> Path:
    """Random weights with a head."""
    torch.manual_seed(1)
    torch.save(timm.create_model(NAME).state_dict(), tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("side", [160, 200])
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


@pytest.mark.parametrize(("change", "message"), [("lose", ": missing"), ("add", ": unexpected")])
def test_other_weights_are_refused(timm, weights, change, message):
    state = torch.load(weights, weights_only=True)
    if change == "lose":
        del state[next(iter(state))]
    else:
        state["more.weight"] = torch.zeros(1)
    torch.save(state, weights)
    with pytest.raises(ValueError, match=message):
        make_encoder(Wish(f"timm:{NAME}", weights))


def test_pickled_objects_are_not_loaded(timm, weights):
    torch.save({"weight": Path("x")}, weights)
    with pytest.raises(ValueError, match="must contain only tensors"):
        make_encoder(Wish(f"timm:{NAME}", weights))


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


def test_other_sizes_and_statistics_are_taken(timm, weights):
    wish = Wish(f"timm:{NAME}", weights, size=96, mean=(0.1, 0.2, 0.3), interpolation="bilinear")
    steps = make_encoder(wish).preprocessing
    assert (steps.size, steps.mean, steps.interpolation) == (96, (0.1, 0.2, 0.3), "bilinear")
    assert make_encoder(wish).width() > 0


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
    [("mobilenet_v3_small", 1024), ("squeezenet1_1", 512), ("shufflenet_v2_x0_5", 1024)],
)
def test_heads_are_found_whatever_they_are_called(models, tmp_path, name, width):
    torch.save(models.get_model(name).state_dict(), tmp_path / "weights.pth")
    encoder = make_encoder(Wish(f"torchvision:{name}", tmp_path / "weights.pth"))
    assert encoder.preprocessing.resized is None
    assert encoder.width() == width


def test_nothing_of_torchvision_is_fetched_unless_asked(models, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ValueError, match=r"downloads are disabled: give --weights FILE"):
        make_encoder(Wish("torchvision:resnet18"))
    with pytest.raises(ValueError, match="cannot be made"):
        make_encoder(Wish("torchvision:no_such_net"))
