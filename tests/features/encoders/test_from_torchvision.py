"""torchvision encoders: networks without last layer, with the transforms of their weights."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from spatialdl.features.encoders.encoder import Wish
from spatialdl.features.encoders.making import make_encoder
from spatialdl.features.encoders.preprocessing import Preprocess
from tests.features.encoders.test_preprocessing import tiles_of
from tests.vision import need_timm


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


def test_nothing_is_fetched_unless_asked(models, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ValueError, match=r"downloads are disabled: give --weights FILE"):
        make_encoder(Wish("torchvision:resnet18"))
    with pytest.raises(ValueError, match="cannot be made"):
        make_encoder(Wish("torchvision:no_such_net"))
