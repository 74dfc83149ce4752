from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.feature_file import write_features
from spatialdl.data.tile_bags import open_tile_bags
from spatialdl.predicting.bag_run import BagPredictor, run
from spatialdl.predicting.checks import check_config
from spatialdl.training.trainer import Trainer
from tests.bags import SMALL, WIDTH, bag_config, tile_config, write_bags, write_tile_bags
from tests.fitting import fit
from tests.vision import import_path

ROOT = Path(__file__).resolve().parents[2]
ENCODER = ("_target_=spatialdl.models.tile_encoder", "num_classes=8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_bags(folder / "bags")
    words = (*SMALL["clam"], "model.branches=multi", "trainer.max_epochs=1", "data.mean=0.2")
    trainer = Trainer(bag_config(folder / "bags", *words), SingleProcess())
    fit(trainer, folder / "run")
    return folder, trainer.parts.pipeline.stages[0]


def config(*words):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("predict", list(words))


def rows(folder):
    with (folder / "slides.csv").open() as file:
        return list(csv.DictReader(file))


def test_bags_are_predicted_and_their_attention_is_drawn(tmp_path, trained) -> None:
    folder, network = trained
    for number in (0, 2):
        (tmp_path / f"s{number}.h5").write_bytes((folder / "bags" / f"s{number}.h5").read_bytes())
    given = config(f"ckpt_path={folder / 'run'}", f"features={tmp_path}")
    assert run(given, tmp_path, SingleProcess())
    found = rows(tmp_path)
    assert [row["slide"] for row in found] == ["s0", "s2"]
    network.eval()
    for row in found:
        features = open_features(tmp_path / f"{row['slide']}.h5")
        expected = network((features - 0.2).T[None]).softmax(1)[0].tolist()
        told = [float(row[f"probability_{name}"]) for name in "abc"]
        assert told == pytest.approx(expected, abs=1e-12)
        assert row["predicted"] == "abc"[int(np.argmax(expected))]
        assert (tmp_path / f"{row['slide']}-attention.png").is_file()


def open_features(path):
    import h5py

    with h5py.File(path) as file:
        return torch.from_numpy(file["features"][:])


def test_what_fails_is_told_and_the_others_are_predicted(tmp_path, trained) -> None:
    folder, _ = trained
    draw = np.random.default_rng(0)
    write_features(tmp_path / "empty.h5", np.zeros((0, WIDTH)), None)
    write_features(tmp_path / "good.h5", draw.random((4, WIDTH)), None)  # without positions
    write_features(tmp_path / "nan.h5", np.full((2, WIDTH), np.nan), None)
    given = config(f"ckpt_path={folder / 'run'}", f"features={tmp_path}")
    assert not run(given, tmp_path, SingleProcess())
    told = {row["slide"]: (row["status"], row["reason"]) for row in rows(tmp_path)}
    assert told["empty"] == ("failed", "it has no tiles")
    assert told["nan"][0] == "failed"
    assert "NaN or Inf" in told["nan"][1]
    assert told["good"][0] == "processed"
    assert "no heat map" in told["good"][1]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("features=x parallel=sp", "bags of features are not split"),
        ("features=x tile_size=256", "tile_size=256 is for images"),
        ("features=x shards=y", "shards=y is for images"),
    ],
)
def test_keys_of_images_are_refused(trained, words, message) -> None:
    folder, _ = trained
    with pytest.raises(ValueError, match=message):
        check_config(config(f"ckpt_path={folder / 'run'}", *words.split()))


def test_a_network_trained_with_its_encoder_predicts_tiles(tmp_path) -> None:
    folder = write_tile_bags(tmp_path)
    words = (*(f"model.encoder.{key}" for key in ENCODER), "trainer.max_epochs=1")
    trainer = Trainer(tile_config(folder, *words), SingleProcess())
    fit(trainer, folder / "run")
    given = config(f"ckpt_path={folder / 'run'}", f"features={folder / 'tiles'}")
    assert run(given, tmp_path / "out", SingleProcess())
    network = trainer.parts.pipeline.stages[0].eval()
    for row, bag in zip(rows(tmp_path / "out"), open_tile_bags(folder / "tiles")[0], strict=True):
        expected = network(torch.from_numpy(bag.read()).T[None]).softmax(1)[0].tolist()
        told = [float(row[f"probability_{name}"]) for name in "abc"]
        assert told == pytest.approx(expected, abs=1e-12)
    assert (tmp_path / "out" / "s6-attention.png").is_file()
    given = config(f"ckpt_path={folder / 'run'}", "features=[a,b]")
    with pytest.raises(ValueError, match="takes tiles: give the folder of a data set"):
        run(given, tmp_path / "out", SingleProcess())


KILLED = """
import os, signal, sys
from pathlib import Path

from spatialdl.comm.single_process import SingleProcess
from spatialdl.predicting.bag_run import BagPredictor, run
from tests.predicting.test_bag_run import config

draw, drawn = BagPredictor._draw, []


def draw_or_die(self, file, *rest):
    files = draw(self, file, *rest)
    drawn.append(file.slide)
    if len(drawn) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return files


BagPredictor._draw = draw_or_die
run(config(*sys.argv[2:]), Path(sys.argv[1]), SingleProcess())
"""


@pytest.fixture
def predicted(monkeypatch):
    """Names of slides that are predicted rather than loaded from records."""
    names, predict = [], BagPredictor.predict

    def noted(self, file):
        names.append(file.slide)
        return predict(self, file)

    monkeypatch.setattr(BagPredictor, "predict", noted)
    return names


def test_a_killed_run_resumes(tmp_path, trained, predicted) -> None:
    folder, _ = trained
    out, words = tmp_path / "out", (f"ckpt_path={folder / 'run'}", f"features={folder / 'bags'}")
    out.mkdir()
    environment = {**os.environ, "PYTHONPATH": import_path(ROOT)}
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(out), *words],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (out / "slides.csv").exists()
    assert run(config(*words), out, SingleProcess())
    assert predicted == ["s3", "s4", "s5", "s6", "s7", "s8"]
    assert run(config(*words), tmp_path / "at_once", SingleProcess())
    assert (out / "slides.csv").read_bytes() == (tmp_path / "at_once" / "slides.csv").read_bytes()
    for file in (tmp_path / "at_once").glob("*.tif"):
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_what_has_changed_or_is_missing_is_predicted_again(tmp_path, trained, predicted) -> None:
    folder, _ = trained
    bags, out = tmp_path / "bags", tmp_path / "out"
    out.mkdir()
    write_bags(bags, (5, 2, 3))
    words = (f"ckpt_path={folder / 'run'}", f"features={bags}")

    def again(*more):
        predicted.clear()
        assert run(config(*words, *more), out, SingleProcess())
        return list(predicted)

    assert again() == ["s0", "s1", "s2"]
    assert again("table=csv", "device=cpu") == []
    (out / "s1-attention.png").unlink()
    assert again() == ["s1"]
    write_features(bags / "s2.h5", np.ones((4, WIDTH)), np.zeros((4, 2), int))
    assert again() == ["s2"]
    assert [row["tiles"] for row in rows(out)] == ["5", "2", "4"]
    record = out / "records" / "s0.json"
    record.write_text(record.read_text()[:-20])
    assert again() == ["s0"]
    assert again("maps=false") == ["s0", "s1", "s2"]
    assert again("maps=false", "overwrite=true") == ["s0", "s1", "s2"]


def test_a_failed_slide_is_tried_again(tmp_path, trained, predicted) -> None:
    folder, _ = trained
    write_features(tmp_path / "bad.h5", np.full((2, WIDTH), np.nan), None)
    write_features(tmp_path / "good.h5", np.ones((2, WIDTH)), None)
    given = config(f"ckpt_path={folder / 'run'}", f"features={tmp_path}", "maps=false")
    for tried in (["bad", "good"], ["bad"]):
        predicted.clear()
        assert not run(given, tmp_path, SingleProcess())
        assert predicted == tried
