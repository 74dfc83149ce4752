"""The command, as a user starts it: slides and shards in, tables and maps out."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image
from torch import nn

from spatialdl import predict
from spatialdl.cli import prediction
from spatialdl.data import ShardWriter
from spatialdl.training.run_lock import held
from tests.inference.evaluating.cases import read_rows
from tests.inference.predicting.runs import NETWORK, picture, train, write_slide
from tests.inference.predicting.volumes import of_own, save, train_on_volumes, voxels
from tests.mpi.training import small
from tests.slides.tiled_tiffs import spoil, write_tiff
from tests.vision import import_path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["benign", "tumour in situ", "tumour"]
HERE = ("device=cpu", "trust=[tests]")
SHOWN = "classes=[tumour in situ,tumour]"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A folder with a network that was trained on shards, and slides."""
    folder = tmp_path_factory.mktemp("predict")
    made_with = {"tile_size": 32, "level": 0, "overlap": 6, "min_tissue": 0.4, "filter": {}}
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "tiles", classes=NAMES, made_with=made_with) as writer:
        for number in range(12):
            image = rng.integers(0, 256, (32, 32, 3), np.uint8)
            split = "val" if number % 4 == 0 else "train"
            xy = (number % 4 * 26, number // 4 * 26)
            writer.add(image, NAMES[number % 3], split, slide="one", xy=xy)
    shards = ("data=shards", f"data.path={folder / 'tiles'}", "data.batch_size=4")
    train(folder / "run", *NETWORK, data=shards)
    write_slide(folder / "a.tiff", 203, 187)
    write_slide(folder / "b.tif", 90, 101, seed=1)
    (folder / "bad.svs").write_text("no slide")
    return folder


@pytest.fixture
def here(case, monkeypatch, run_main):
    """Runs the command in this process, and gives its exit code and what it says."""
    monkeypatch.chdir(case)
    return partial(run_main, predict.main, *HERE)


def test_slides_are_predicted_as_the_training_set_was_cut(case, here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", import_path(ROOT))  # of the network on ranks
    words = ("ckpt_path=run", "slides=[a.tiff,b.tif]", "hydra.run.dir=p", SHOWN)
    code, text = here(*words, "parallel=sp", "parallel.grid=[2,1]")
    assert code == 0, text
    tiles, slides = read_rows(case / "p/predictions.csv"), read_rows(case / "p/slides.csv")
    assert [row["slide"] for row in slides] == ["a", "b"]
    assert sum(int(row["tiles"]) for row in slides) == len(tiles)
    xs = sorted({int(row["x"]) for row in tiles})
    assert {b - a for a, b in pairwise(xs)} == {26}
    assert {(row["width"], row["height"]) for row in tiles} == {("32.0", "32.0")}
    for row in (*tiles, *slides):
        probabilities = [float(row[f"probability_{name}"]) for name in NAMES]
        assert sum(probabilities) == pytest.approx(1)
        assert row["predicted"] == NAMES[int(np.argmax(probabilities))]
    own = [float(row["probability_tumour"]) for row in tiles if row["slide"] == "a"]
    assert float(slides[0]["probability_tumour"]) == pytest.approx(np.mean(own), abs=1e-12)
    assert f"a      {len(own):>5}  {slides[0]['predicted']}" in text
    with openslide.OpenSlide(case / "p" / "a-tumour_in_situ.tif") as found:
        told = json.loads(found.properties["tiff.ImageDescription"])
        assert told["class"] == "tumour in situ"
        # a pixel is an eighth of a tile
        assert found.dimensions == (-(-187 // 4), -(-203 // 4))
    features = json.loads((case / "p" / "a.geojson").read_text())["features"]
    properties = features[0]["properties"]
    assert (len(features), properties["objectType"]) == (len(own), "tile")
    assert properties["classification"]["name"] == tiles[0]["predicted"]
    assert properties["measurements"]["probability tumour"] == pytest.approx(own[0], abs=1e-12)
    with Image.open(case / "p" / "a-heatmap.png") as picture:
        assert min(picture.size) > 300
    _check_resuming(case, here)
    _check_refusal(case, here)


def no_weights(num_classes: int, in_channels: int) -> nn.Module:
    raise FileNotFoundError("no weights at /nowhere")


def of_more_arguments(num_classes: int, in_channels: int, depth: int) -> nn.Module:
    raise AssertionError("cannot be called without depth")


def of_other_shapes(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(OrderedDict(conv1=nn.Conv2d(in_channels, 5, 5, bias=False)))


def test_errors_of_an_own_network_are_found_before_ranks_start(here, monkeypatch):
    started = []
    monkeypatch.setattr(prediction, "start_ranks", lambda *words, **_: started.append(words) or 0)
    words = ("ckpt_path=run", "slides=b.tif", "hydra.run.dir=not_there", "parallel=sp")
    assert here(*words)[0] == 0
    assert len(started) == 1
    code, errors = here(*words, "trust=[]")
    assert code == 1
    assert "add trust=[tests.mpi.training.small.small]" in errors
    for changed, said in (
        (no_weights, "error: model=tests.mpi.training.small.small cannot be built: .*no weights"),
        (of_more_arguments, "cannot be built: .*missing 1 required positional argument: 'depth'"),
        (of_other_shapes, "another network: its 'conv1.weight' is 4x3x5x5, .* is 5x3x5x5"),
    ):
        monkeypatch.setattr(small, "small", changed)
        code, errors = here(*words)
        assert (code, len(started)) == (1, 1)
        assert re.search(f"(?s){said}", errors)


def _check_refusal(case: Path, here: Callable[..., tuple[int, str]]) -> None:
    with held(case / "p"):
        before = {p: p.read_bytes() for p in (case / "p").rglob("*") if p.is_file()}
        code, said = here("ckpt_path=run", "slides=b.tif", "hydra.run.dir=p")
        assert code == 1
        assert "another run is writing to" in said
        after = {p: p.read_bytes() for p in (case / "p").rglob("*") if p.is_file()}
        assert after == before
        assert case / "p" / "predict.log" in after


def _check_resuming(case: Path, here: Callable[..., tuple[int, str]]) -> None:
    """A slide that is done is left as it is, unless a file of it is gone."""
    before = (case / "p" / "predictions.csv").read_bytes()
    (case / "p" / "b-tumour.tif").unlink()
    code, out = here("ckpt_path=run", "slides=[a.tiff,b.tif]", "hydra.run.dir=p", SHOWN)
    assert code == 0
    assert "a is already predicted" in out
    assert "b is already predicted" not in out
    assert (case / "p" / "b-tumour.tif").is_file()
    after = (case / "p" / "predictions.csv").read_bytes()
    assert len(after.splitlines()) == len(before.splitlines())


def test_a_bad_slide_does_not_end_the_others(case, here):
    words = ("ckpt_path=run", "slides=[bad.svs,b.tif]", "hydra.run.dir=bad", "maps=false")
    code, said = here(*words)
    assert code == 1
    assert "cannot open slide bad.svs: it is a text file" in said
    assert "failed: cannot open slide bad.svs" in said
    assert said.splitlines()[-1].startswith("error: some predictions failed, see status and reason")
    bad, good = read_rows(case / "bad/slides.csv")
    assert (bad["slide"], bad["status"], bad["tiles"]) == ("bad", "failed", "0")
    assert bad["reason"] == "cannot open slide bad.svs: it is a text file; give the slide itself"
    assert bad["probability_tumour"] == ""
    assert (good["slide"], good["status"], good["reason"]) == ("b", "processed", "")
    assert not list((case / "bad").glob("*.tif"))
    code, said = here("ckpt_path=run", "slides=b.tif", "mpp=1", "hydra.run.dir=worse")
    assert code == 1
    assert "has no micrometres per pixel in its metadata; set them with slide_mpp=..." in said


def test_shards_are_predicted_as_in_validation(case, here):
    import pyarrow.parquet

    words = ("ckpt_path=run", "shards=tiles", "split=val", "hydra.run.dir=s", "table=parquet")
    words += ("maps=false",)
    assert here(*words)[0] == 0
    found = pyarrow.parquet.read_table(case / "s" / "predictions.parquet").to_pydict()
    validated = read_rows(case / "run/predictions.csv")
    assert found["x"] == [int(row["x"]) for row in validated]
    assert found["predicted"] == [row["predicted"] for row in validated]
    for name in NAMES:
        expected = [float(row[f"probability_{name}"]) for row in validated]
        assert found[f"probability_{name}"] == pytest.approx(expected, abs=1e-12)


def test_a_slide_of_which_some_tiles_cannot_be_read_is_told_each_time(case, here):
    path = write_tiff(case / "torn.tif", [picture(203, 187)], side=64)
    spoil(path, 5, "zero")  # openslide takes the pixels that its decoder makes of zeros
    words = ("ckpt_path=run", "slides=[torn.tif,b.tif]", "hydra.run.dir=torn", "maps=false")
    for again in (False, True):
        code, said = here(*words)
        assert code == 1
        assert re.search(r"torn +\d+ .* \d+ tiles could not be read", said)
        assert ("torn is already predicted" in said) == again
    found = [(row["slide"], row["status"]) for row in read_rows(case / "torn/slides.csv")]
    assert found == [("torn", "damaged"), ("b", "processed")]


def test_a_damaged_shard_does_not_end_the_others(case, here):
    with ShardWriter(case / "set", classes=NAMES, shard_size=9000) as writer:
        for number in range(6):  # two to a shard
            image = np.full((32, 32, 3), 40 * number, np.uint8)
            writer.add(image, 0, slide="aabbbc"[number], xy=(0, 0))
    shards = sorted((case / "set").glob("shard-*.h5"))
    assert len(shards) == 3
    words = ("ckpt_path=run", "shards=set", "hydra.run.dir=damaged", "maps=false")
    assert here(*words[:2], "hydra.run.dir=sound", "maps=false")[0] == 0
    kept = shards[1].read_bytes()
    shards[1].write_bytes(kept[:-100])
    shards[2].unlink()
    code, said = here(*words)
    assert code == 1
    assert "failed: cannot read images from" in said
    assert "shard-00001.h5" in said
    sound, damaged = (read_rows(case / f"{one}/predictions.csv") for one in ("sound", "damaged"))
    assert damaged == [row for row in sound if row["slide"] == "a"]
    shards[1].write_bytes(kept)  # what was not there is predicted now
    code, said = here(*words)
    assert code == 1
    assert "a is already predicted" in said
    assert "b: 1 tile could not be read: cannot read images from" in said
    slides = [row["slide"] for row in read_rows(case / "damaged/predictions.csv")]
    assert slides == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("slides=a.tiff", "ckpt_path has no value: add ckpt_path=..."),
        ("ckpt_path=nowhere slides=a.tiff", "ckpt_path=nowhere does not exist"),
        ("ckpt_path=run volumes=a.tiff", "volumes=a.tiff has volumes, but the network of"),
        ("ckpt_path=run slides=*.ndpi", "slides=*.ndpi matches no file or folder"),
        ("ckpt_path=run slides=a.tiff overlap=32", "overlap=32 must be less than tile_size=32"),
        ("ckpt_path=run slides=a.tiff classes=[x]", "classes=['x']: the network has no class x"),
        ("ckpt_path=run slide=a.tiff", "slide is unknown; nearest: slides"),
        (
            "ckpt_path=run slides=a.tiff table=xml",
            "table=xml is not supported: use one of csv, ",
        ),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, here):
    code, said = here(*words.split(), "hydra.run.dir=wrong")
    assert code == 1
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith(f"error: {sentence}")


def test_numbers_have_no_activation_maps(case, here):
    train(case / "regression", *NETWORK, "task=regression")
    code, said = here("ckpt_path=regression", "slides=b.tif", "level=0", "activation=true")
    assert code == 1
    assert "was trained with task=regression: leave it out" in said


def test_volumes_are_predicted_and_bad_files_are_reported(tmp_path, here, monkeypatch):
    train_on_volumes(tmp_path, *of_own("pointwise"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    volume = save(tmp_path / "new" / "whole.nii.gz", voxels((10, 9, 6)))
    save(tmp_path / "new" / "contrasts.nii", voxels((10, 9, 6, 2)))
    save(tmp_path / "new" / "thick.nii", voxels((10, 9, 1)), np.diag([0.7, 0.8, 9, 1]))
    (tmp_path / "new" / "broken.nii").write_text("no volume")
    lost = tmp_path / "new" / "lost.tif"  # its last pages: it was predicted as a smaller volume
    pages = np.random.default_rng(0).integers(0, 999, (12, 54, 45)).astype(np.int16)
    tifffile.imwrite(lost, pages, metadata=None, compression="zlib")
    lost.write_bytes(lost.read_bytes()[: lost.stat().st_size // 2])
    code, said = here("ckpt_path=run", "volumes=new", "hydra.run.dir=q")
    assert code == 1
    assert " tile" not in said
    for sentence in (
        "new/broken.nii: it is damaged, or not a NIfTI file",
        "new/lost.tif: it is damaged: ",
        "contrasts has 2 channels, the network was trained on 1",
        "thick: its voxels are 9 x 0.8 x 0.7 mm",
        "training set has 2.5 x 0.805 x 0.704 mm",
    ):
        assert sentence in said
    status = {row["volume"]: row["status"] for row in read_rows(tmp_path / "q/volumes.csv")}
    good = {"whole", "thick"}
    assert status == {
        name: "processed" if name in good else "failed"
        for name in ("broken", "contrasts", "lost", "thick", "whole")
    }
    maps = {path.name.partition("-")[0] for path in (tmp_path / "q").glob("*.nii*")}
    assert maps == good
    code, said = here("ckpt_path=run", f"slides={volume}", "hydra.run.dir=r")
    assert code == 1
    assert "was trained on volumes of 7x8x9: give volumes by volumes=..." in said
