"""transformers encoders: folder of a network, image processor, pooling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from spatialdl.inference.features.encoders.encoder import Preprocess, Wish
from spatialdl.inference.features.encoders.making import make_encoder
from tests.inference.features.encoders.test_preprocessing import tiles_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


def folder_of(path: Path, model: torch.nn.Module, **processor: object) -> Path:
    """A folder written by `save_pretrained`."""
    model.save_pretrained(path)
    said = {
        **{"image_processor_type": "ViTImageProcessor", "do_resize": True, "resample": 3},
        **{"size": {"height": 32, "width": 32}, "do_rescale": True, "rescale_factor": 1 / 255},
        **{"do_normalize": True, "image_mean": MEAN, "image_std": STD},
        **processor,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(said))
    return path


def vit(**more: object) -> torch.nn.Module:
    torch.manual_seed(3)
    config = transformers.ViTConfig(**SIZES, intermediate_size=32, image_size=32, patch_size=8)
    return transformers.ViTModel(config, **more).eval()


@pytest.mark.parametrize("side", [32, 50])
def test_features_are_those_of_the_model_and_its_processor(tmp_path, side):
    folder, model = folder_of(tmp_path / "vit", vit()), vit()
    encoder = make_encoder(Wish(f"transformers:{folder}"))
    with torch.device("meta"):  # loading had taken this function from all dry runs of the process
        assert torch.linspace(0, 1, 3).is_meta
    tiles = tiles_of(side)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    given = [Image.fromarray(tile) for tile in tiles.numpy()]
    images = processor(given, return_tensors="pt")["pixel_values"]
    seen = Preprocess(encoder.preprocessing)(tiles)
    level = 1e-6 if side == 32 else 1.01 / 255 / min(STD)
    torch.testing.assert_close(seen, images, rtol=0, atol=level)
    with torch.inference_mode():
        wanted = model(pixel_values=seen)
        torch.testing.assert_close(encoder.network(seen), wanted.pooler_output)
        for pool, tensor in (
            ("class", wanted.last_hidden_state[:, 0]),
            ("mean", wanted.last_hidden_state[:, 1:].mean(1)),
            ("pooler", wanted.pooler_output),
        ):
            found = make_encoder(Wish(f"transformers:{folder}", pool=pool)).network(seen)
            torch.testing.assert_close(found, tensor)


def test_a_pooler_without_weights_is_not_used(tmp_path):
    """transformers initialises it at random, with different features each time."""
    model = vit(add_pooling_layer=False)
    name = f"transformers:{folder_of(tmp_path / 'vit', model)}"
    encoder, images = make_encoder(Wish(name)), torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = model(pixel_values=images).last_hidden_state[:, 0]
        torch.testing.assert_close(encoder.network(images), wanted)
    assert encoder.digest() == make_encoder(Wish(name)).digest()
    with pytest.raises(ValueError, match=r"no weights for pooler.dense.* would be random"):
        make_encoder(Wish(name, pool="pooler"))


def test_a_network_with_a_map_gives_its_mean(tmp_path):
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2)
    torch.manual_seed(5)
    model = transformers.ConvNextModel(config).eval()
    folder, images = folder_of(tmp_path / "net", model), torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = model(pixel_values=images)
        for pool, tensor in (
            ("auto", wanted.pooler_output),
            ("mean", wanted.last_hidden_state.mean((2, 3))),
        ):
            found = make_encoder(Wish(f"transformers:{folder}", pool=pool)).network(images)
            torch.testing.assert_close(found, tensor)
    with pytest.raises(ValueError, match="has no class token"):
        make_encoder(Wish(f"transformers:{folder}", pool="class")).width()


def test_weights_of_a_file_are_those_of_the_network_with_or_without_a_head(tmp_path):
    folder = folder_of(tmp_path / "vit", vit())
    torch.manual_seed(9)
    other = transformers.ViTForImageClassification(vit().config).eval()
    torch.save(other.state_dict(), tmp_path / "other.pth")
    encoder = make_encoder(Wish(f"transformers:{folder}", tmp_path / "other.pth"))
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = other.vit(pixel_values=images).last_hidden_state[:, 0]
        torch.testing.assert_close(encoder.network(images), wanted)


def test_crops_of_processors_are_their_own_only_if_asked(tmp_path):
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        **{"size": {"shortest_edge": 43}, "do_center_crop": True},
        **{"crop_size": {"height": 32, "width": 32}, "do_convert_rgb": True},
    }
    folder = folder_of(tmp_path / "vit", vit(), **processor)
    name, tiles = f"transformers:{folder}", tiles_of(50)
    assert make_encoder(Wish(name)).preprocessing.resized is None
    encoder = make_encoder(Wish(name, crop=True))
    own = transformers.AutoImageProcessor.from_pretrained(folder)
    images = own([Image.fromarray(tile) for tile in tiles.numpy()], return_tensors="pt")
    seen = Preprocess(encoder.preprocessing)(tiles)
    level = 1.01 / 255 / min(STD)
    torch.testing.assert_close(seen, images["pixel_values"], rtol=0, atol=level)


def test_folders_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        make_encoder(Wish(f"transformers:{tmp_path / 'none'}"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"give a folder with config.json"):
        make_encoder(Wish(f"transformers:{tmp_path / 'empty'}"))
    folder = folder_of(tmp_path / "vit", vit())
    with pytest.raises(ValueError, match="does not crop; leave it out"):
        make_encoder(Wish(f"transformers:{folder}", crop=True))
