"""Bags of features in one process: predictions, attention, records."""

from __future__ import annotations

import json
from functools import partial

import h5py
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.bags import open_tile_bags
from spatialdl.data.feature_file import write_features
from spatialdl.inference.predicting.bags import (
    BagPlaces,
    BagWork,
    save_bag_maps,
    shares_below,
    tile_span,
)
from spatialdl.inference.predicting.batch import run
from spatialdl.inference.predicting.maps import MapFolder
from spatialdl.inference.predicting.trained import find_trained
from spatialdl.training.trainer import Trainer
from tests.bags import SMALL, WIDTH, bag_config, tile_config, write_bags, write_tile_bags
from tests.composing import composed
from tests.fitting import fit
from tests.inference.evaluating.cases import read_rows

ENCODER = ("_target_=spatialdl.models.tile_encoder", "num_classes=8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_bags(folder / "bags")
    words = (*SMALL["clam"], "model.branches=multi", "trainer.max_epochs=1", "data.mean=0.2")
    trainer = Trainer(bag_config(folder / "bags", *words), SingleProcess())
    fit(trainer, folder / "run")
    return folder, trainer.parts.pipeline.stages[0]


@pytest.fixture
def predicted(monkeypatch):
    """Names of slides that are predicted rather than loaded from records."""
    names, opened = [], BagWork.open

    def noted(self, file):
        names.append(file.slide)
        return opened(self, file)

    monkeypatch.setattr(BagWork, "open", noted)
    return names


config = partial(composed, "predict")


def test_bags_are_predicted_and_their_attention_is_drawn(tmp_path, trained) -> None:
    folder, network = trained
    for number in (0, 2):
        (tmp_path / f"s{number}.h5").write_bytes((folder / "bags" / f"s{number}.h5").read_bytes())
    given = config(f"ckpt_path={folder / 'run'}", f"features={tmp_path}")
    assert run(given, tmp_path, SingleProcess())
    found = read_rows(tmp_path / "slides.csv")
    assert [row["slide"] for row in found] == ["s0", "s2"]
    network.eval()
    for row in found:
        with h5py.File(tmp_path / f"{row['slide']}.h5") as file:
            features = torch.from_numpy(file["features"][:])
        expected = network((features - 0.2).T[None]).softmax(1)[0].tolist()
        told = [float(row[f"probability_{name}"]) for name in "abc"]
        assert told == pytest.approx(expected, abs=1e-12)
        assert row["predicted"] == "abc"[int(np.argmax(expected))]
        assert (tmp_path / f"{row['slide']}-attention.png").is_file()


def test_what_fails_is_told_and_tried_again_and_the_others_are_predicted(
    tmp_path, trained, predicted
) -> None:
    folder, _ = trained
    draw = np.random.default_rng(0)
    write_features(tmp_path / "empty.h5", np.zeros((0, WIDTH)), None)
    write_features(tmp_path / "good.h5", draw.random((4, WIDTH)), None)  # without positions
    write_features(tmp_path / "nan.h5", np.full((2, WIDTH), np.nan), None)
    given = config(f"ckpt_path={folder / 'run'}", f"features={tmp_path}")
    assert not run(given, tmp_path, SingleProcess())
    told = {
        row["slide"]: (row["status"], row["reason"]) for row in read_rows(tmp_path / "slides.csv")
    }
    assert told["empty"] == ("failed", "it has no tiles")
    assert told["nan"][0] == "failed"
    assert "NaN or Inf" in told["nan"][1]
    assert told["good"][0] == "processed"
    assert "no heat map" in told["good"][1]
    assert "good" in predicted
    predicted.clear()
    assert not run(given, tmp_path, SingleProcess())
    assert "nan" in predicted
    assert "good" not in predicted


def test_features_of_another_encoder_are_refused(tmp_path, trained) -> None:
    folder, _ = trained
    write_features(tmp_path / "a.h5", np.zeros((2, WIDTH + 1)), None)
    given = config(f"ckpt_path={folder / 'run'}", f"features={tmp_path}")
    with pytest.raises(ValueError, match=r"has 7 features per tile, but the network .* on 6"):
        run(given, tmp_path, SingleProcess())
    slide = tmp_path / "other.tif"
    slide.touch()
    words = (f"features={folder / 'bags'}", f"slides={slide}")
    with pytest.raises(ValueError, match="match no features: features are of s0, s1"):
        run(config(f"ckpt_path={folder / 'run'}", *words), tmp_path, SingleProcess())


def test_a_network_trained_with_its_encoder_predicts_tiles(tmp_path) -> None:
    folder = write_tile_bags(tmp_path)
    words = (*(f"model.encoder.{key}" for key in ENCODER), "trainer.max_epochs=1")
    trainer = Trainer(tile_config(folder, *words), SingleProcess())
    fit(trainer, folder / "run")
    given = config(f"ckpt_path={folder / 'run'}", f"features={folder / 'tiles'}")
    assert run(given, tmp_path / "out", SingleProcess())
    network = trainer.parts.pipeline.stages[0].eval()
    for row, bag in zip(
        read_rows(tmp_path / "out" / "slides.csv"), open_tile_bags(folder / "tiles")[0], strict=True
    ):
        expected = network(torch.from_numpy(bag.read()).T[None]).softmax(1)[0].tolist()
        told = [float(row[f"probability_{name}"]) for name in "abc"]
        assert told == pytest.approx(expected, abs=1e-12)
    assert (tmp_path / "out" / "s6-attention.png").is_file()
    given = config(f"ckpt_path={folder / 'run'}", "features=[a,b]")
    with pytest.raises(ValueError, match="takes tiles: give the folder of a data set"):
        run(given, tmp_path / "out", SingleProcess())


class Killed(BaseException):
    """Nothing in a run handles it."""


def test_a_killed_run_resumes(tmp_path, trained, predicted, monkeypatch) -> None:
    folder, _ = trained
    out, bags = tmp_path / "out", tmp_path / "bags"
    write_bags(bags, (5, 4, 6))
    out.mkdir()
    words, draw = (f"ckpt_path={folder / 'run'}", f"features={bags}"), BagWork._draw

    def draw_or_die(self, where, *rest):
        draw(self, where, *rest)
        if where.name == "s1":
            raise Killed

    monkeypatch.setattr(BagWork, "_draw", draw_or_die)
    with pytest.raises(Killed):
        run(config(*words), out, SingleProcess())
    monkeypatch.setattr(BagWork, "_draw", draw)
    assert not (out / "slides.csv").exists()
    predicted.clear()
    assert run(config(*words), out, SingleProcess())
    assert predicted == ["s1", "s2"]
    assert run(config(*words), tmp_path / "at_once", SingleProcess())
    assert (out / "slides.csv").read_bytes() == (tmp_path / "at_once" / "slides.csv").read_bytes()
    for file in (tmp_path / "at_once").glob("*.tif"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    (out / "s1-attention.png").unlink()
    record = out / "records" / "s0.npz"
    record.write_bytes(record.read_bytes()[:-20])
    everything = ["s0", "s1", "s2"]
    for more, expected in (((), everything[:2]), (("maps=false", "overwrite=true"), everything)):
        predicted.clear()
        assert run(config(*words, *more), out, SingleProcess())
        assert predicted == expected


def test_a_key_follows_features_slide_and_settings(tmp_path, trained):
    slide, network = tmp_path / "a.tif", find_trained(str(trained[0] / "run"), SingleProcess())
    slide.touch()

    def key(bag, *words):
        given = config("ckpt_path=x", "features=y", *words)
        return BagWork(network, given, tmp_path, [bag]).key(bag)

    bag = write_features(tmp_path / "a.h5", np.ones((2, 3)), None)
    found = {
        *(key(bag), key(bag, f"slides={slide}"), key(bag, "maps=false")),
        key(bag, "precision=float64"),
    }
    assert key(bag, "table=parquet") in found
    bag = write_features(tmp_path / "a.h5", np.ones((3, 3)), None)
    found.add(key(bag))
    assert len(found) == 5
    bag.path.unlink()
    assert "No such file" in key(bag)


PLACES = np.array([[0, 0], [256, 0], [0, 256]], np.int64)


@pytest.mark.parametrize(
    ("attributes", "span"),
    [
        ({"patch_size_level0": 512, "patch_size": 256}, 512),  # TRIDENT
        ({"patch_size": 256, "patch_level": 1, "downsample": (4.0, 4.0)}, 1024),  # CLAM
        ({"patch_size": 300, "patch_level": 0}, 300),
        ({}, 256),  # side by side
        ({"patch_size": "wide", "patch_size_level0": float("nan")}, 256),
    ],
)
def test_how_large_tiles_are(attributes, span) -> None:
    assert tile_span(attributes, PLACES) == span


def test_shares_of_tiles_with_less_attention() -> None:
    assert shares_below(np.array([0.1, 0.7, 0.2])).tolist() == [0, 1, 0.5]
    assert shares_below(np.array([0.5, 0.5, 0.9])).tolist() == [0.25, 0.25, 1]
    assert shares_below(np.array([0.5])).tolist() == [1]


def test_a_heat_map_is_where_the_tiles_are(tmp_path) -> None:
    file = write_features(tmp_path / "a.h5", np.zeros((3, 2)), PLACES)
    places = BagPlaces.of(file, None)
    assert places.extent == (512, 512)
    single = write_features(tmp_path / "b.h5", np.zeros((1, 2)), PLACES[:1])
    with pytest.raises(ValueError, match="does not record the size of its tiles"):
        BagPlaces.of(single, None)
    attention = np.array([0.1, 0.7, 0.2])
    where = MapFolder(tmp_path, "a")
    save_bag_maps(where, attention, places, None, "attention")
    assert sorted(where.files) == ["a-attention.png", "a-attention.tif", "a.geojson"]
    pixels = tifffile.imread(tmp_path / "a-attention.tif")
    half = len(pixels) // 2
    assert (pixels[:half, :half] == 1).all()
    assert (pixels[:half, half:] == 255).all()
    assert (pixels[half:, :half] == 128).all()
    assert (pixels[half:, half:] == 0).all()  # no tile
    found = json.loads((tmp_path / "a.geojson").read_text())["features"]
    assert found[1]["geometry"]["coordinates"][0][0] == [256, 0]
    assert found[1]["properties"]["measurements"] == {"attention": 0.7, "attention share": 1.0}
    marked = ["classification" in one["properties"] for one in found]
    assert marked == [False, True, False]
    with Image.open(tmp_path / "a-attention.png") as picture:
        assert min(picture.size) > 200
