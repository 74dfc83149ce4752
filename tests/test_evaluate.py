"""The command, as a user starts it: shards with labels or masks in, metrics out."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn import metrics as known

from spatialdl import evaluate
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.importing.command import main as import_command
from spatialdl.inference.evaluating import evaluation
from spatialdl.inference.predicting import maps as maps_module
from spatialdl.slides.cohort.split_cli import main as split_table
from spatialdl.training.trainer import Trainer
from tests.bags import LENGTHS, SMALL, bag_config, write_bags
from tests.fitting import fit
from tests.inference.evaluating.cases import read_rows
from tests.inference.predicting.runs import MAPS, NETWORK, train, write_slide
from tests.inference.predicting.volumes import save, train_on_labels, voxels

NAMES = ["0", "1", "2"]  # of networks that were trained on synthetic images
HERE = ("device=cpu", "trust=[tests]", "bootstrap=30")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiles of slides, regions with masks, and a network for each."""
    path = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    with ShardWriter(path / "tiles", classes=NAMES) as writer:
        for number in range(24):
            image = rng.integers(0, 256, (32, 32, 3), np.uint8)
            label = None if number == 5 else NAMES[number // 4 % 3]
            place = {"slide": f"s{number // 4}", "xy": (number % 4 * 32, 0)}
            writer.add(image, label, "test", **place)
    with ShardWriter(path / "regions", classes=NAMES, kind="regions") as writer:
        for number in range(4):
            size = 32, 48 - 16 * (number % 2)
            mask = rng.integers(0, 3, size, np.uint8)
            mask[0, :7] = 255
            image = rng.integers(0, 256, (*size, 3), np.uint8)
            writer.add(image, None, "test", slide=f"r{number}", mask=mask)
    train(path / "run", *NETWORK)
    train(path / "unet", "task=segmentation", *MAPS)
    return path


@pytest.fixture
def here(request, folder, monkeypatch, run_main):
    """Runs the command in this process, and gives its exit code and what it prints."""
    monkeypatch.chdir(folder)
    if "its_predictions_again" not in request.node.name:  # drawing takes long
        monkeypatch.setattr(evaluation, "save_pictures", lambda *_: {})
    return partial(run_main, evaluate.main, *HERE)


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_a_data_set_is_evaluated_and_its_predictions_again(folder, here, monkeypatch):
    code, said = here("ckpt_path=run", "shards=tiles", "split=test", "hydra.run.dir=e")
    assert code == 0, said
    tiles = read_rows(folder / "e" / "predictions.csv")
    assert [row["label"] for row in tiles][4:7] == ["1", "", "1"]
    assert [int(row["sample"]) for row in tiles] == list(range(24))
    known_tiles = [row for row in tiles if row["label"]]
    expected = known.accuracy_score(
        [row["label"] for row in known_tiles], [row["predicted"] for row in known_tiles]
    )
    told = metrics_of(folder / "e")
    assert told["levels"]["tile"]["accuracy"]["estimate"] == pytest.approx(expected)
    assert (told["unit"], told["levels"]["tile"]["samples"]) == ("slide", 23)
    assert told["levels"]["slide"]["samples"] == 6
    assert "1 slide without a label, left out: s1" in said
    assert "data:image/jpeg" in (folder / "e" / "report.html").read_text()
    assert "calibration error" in said
    before = (folder / "e" / "metrics.csv").read_bytes()
    monkeypatch.setattr(evaluation, "save_pictures", lambda *_: {})
    code, said = here("predictions=e", "hydra.run.dir=again")
    assert code == 0, said
    assert (folder / "again" / "metrics.csv").read_bytes() == before
    assert "data:image/jpeg" in (folder / "again" / "report.html").read_text()


def test_a_flat_folder_with_a_table_is_split_imported_trained_on_and_evaluated(folder, here):
    rng, lines = np.random.default_rng(1), ["filename,label,patient"]
    (folder / "flat").mkdir()
    for number in range(12):  # bright images of one class, of odd sizes, PNG and JPEG
        name = f"i{number:02}.{('png', 'jpg')[number % 2]}"
        bright = number // 2 % 2 * 120
        pixels = rng.integers(bright, bright + 99, (33 + number, 47 - number, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "flat" / name)
        lines.append(f"{name},{('dark', 'bright')[bright > 0]},p{number // 2}")
    (folder / "flat.csv").write_text("\n".join(lines))
    divide = ("--val", "0.34", "--test", "0", "--stratify", "label")
    assert split_table(["flat.csv", "--out", "split.csv", *divide]) == 0
    assert import_command(["images", "flat", "--labels", "split.csv", "--out", "images"]) == 0
    data = ("data=shards", f"data.path={folder / 'images'}", "data.image_size=[40,40]")
    train(folder / "image_run", *NETWORK, "trainer.max_steps=4", data=data)
    call = ("ckpt_path=image_run", "shards=images", "split=val", "labels=split.csv")
    code, said = here(*call, "hydra.run.dir=i")
    assert code == 0, said
    told = metrics_of(folder / "i")
    assert (told["unit"], told["levels"]["patient"]["samples"]) == ("patient", 2)
    assert sorted(row["label"] for row in read_rows(folder / "i" / "predictions.csv")) == (
        ["bright"] * 2 + ["dark"] * 2
    )


def test_masks_are_compared_pixel_by_pixel(folder, here, monkeypatch):
    monkeypatch.setattr(maps_module, "save_overlay", lambda path, *_: path.touch())
    code, said = here("ckpt_path=unet", "shards=regions", "hydra.run.dir=m", "maps=true")
    assert code == 0, said
    pairs = {(r["slide"], r["label"]): r for r in read_rows(folder / "m" / "confusion.csv")}
    dataset = ShardDataset(folder / "regions")
    for number in range(4):
        mask = dataset.read_mask(number)
        for k, name in enumerate(NAMES):
            row = pairs[f"r{number}", name]
            total = sum(int(row[f"pixels_{n}"]) for n in range(3))
            assert total == int((mask == k).sum()), name
    told = metrics_of(folder / "m")
    counts = np.array(told["levels"]["image"]["pixels"])
    dice = 2 * counts[1, 1] / (counts[1].sum() + counts[:, 1].sum())
    found = told["levels"]["image"]["per_class"]["dice"]["1"]
    assert found["estimate"] == pytest.approx(dice, abs=1e-12)
    assert found["low"] <= dice <= found["high"]
    assert told["unit"] == "image"
    from_maps = np.zeros((3, 3))  # which have 8 bits
    for number in range(4):
        mask = dataset.read_mask(number)
        maps = [tifffile.imread(folder / "m" / f"r{number}-{k}.tif") for k in range(3)]
        best = np.stack([one[: mask.shape[0], : mask.shape[1]] for one in maps]).argmax(0)
        for true in range(3):
            from_maps[true] += np.bincount(best[mask == true], minlength=3)
    assert np.abs(counts - from_maps).sum() <= 0.01 * counts.sum()


def test_slides_are_evaluated_with_a_table(folder, here):
    """By tile, slide, patient and scanner; a slide that cannot be read is reported."""
    (folder / "slides").mkdir()
    lines = ["slide,label,patient,scanner"]
    for number in range(4):
        write_slide(folder / "slides" / f"a{number}.tiff", 107, 133 - 16 * number, number)
        lines.append(f"a{number}.tiff,{number % 2},{'p' if number < 2 else ''},{'AB'[number // 2]}")
    (folder / "slides" / "bad.tiff").write_text("no slide")
    (folder / "slides.csv").write_text("\n".join([*lines, "bad.tiff,0,q,A"]))
    words = ("ckpt_path=run", "slides=slides", "labels=slides.csv", "subgroups=[scanner]")
    code, said = here(*words, "level=0", "min_tissue=0.3", "hydra.run.dir=s")
    assert code == 1
    assert "bad: cannot open slide" in said
    assert "the metrics exclude them" in said
    told = metrics_of(folder / "s")
    assert {name: one["units"] for name, one in told["levels"].items()} == {
        **{"tile": 3, "slide": 3, "patient": 2},
    }
    assert told["levels"]["slide"]["samples"] == 4
    assert "1 patient with slides of different labels, left out by patient" in said
    predicted = {row["slide"]: row["predicted"] for row in read_rows(folder / "s" / "slides.csv")}
    right = [predicted[f"a{number}"] == str(number % 2) for number in range(4)]
    assert told["levels"]["slide"]["accuracy"]["estimate"] == pytest.approx(np.mean(right))
    found = told["subgroups"]["scanner"]["B"]["slide"]["accuracy"]["estimate"]
    assert found == pytest.approx(np.mean(right[2:]))
    assert "data:image/jpeg" in (folder / "s" / "report.html").read_text()


def test_volumes_are_evaluated_with_a_table(tmp_path, here):
    train_on_labels(tmp_path, "task=classification")
    (tmp_path / "new").mkdir()
    for number in range(3):
        save(tmp_path / "new" / f"v{number}.nii.gz", voxels((9, 8, 7), number))
    lines = ["volume,label,patient", "v0.nii.gz,ill,p", "v1,well,q", "/data/v2.nii.gz,ill,"]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    given = (f"ckpt_path={tmp_path / 'run'}", f"volumes={tmp_path / 'new'}")
    out = tmp_path / "out"
    code, said = here(*given, f"labels={tmp_path / 'labels.csv'}", f"hydra.run.dir={out}")
    assert code == 0, said
    told = metrics_of(out)
    predicted = [row["predicted"] for row in read_rows(out / "volumes.csv")]
    expected = known.accuracy_score(["ill", "well", "ill"], predicted)
    assert list(told["levels"]) == ["volume", "patient"]
    assert told["levels"]["volume"]["accuracy"]["estimate"] == pytest.approx(expected)
    assert told["levels"]["patient"]["units"] == 3


def test_bags_of_features_are_evaluated(tmp_path, here):
    write_bags(tmp_path / "bags")
    words = (*SMALL["mean"], "trainer.max_epochs=1")
    fit(Trainer(bag_config(tmp_path / "bags", *words), SingleProcess()), tmp_path / "run")
    out = tmp_path / "out"
    given = (f"ckpt_path={tmp_path / 'run'}", f"features={tmp_path / 'bags'}")
    table = f"labels={tmp_path / 'bags' / 'labels.csv'}"
    code, said = here(*given, table, f"hydra.run.dir={out}")
    assert code == 0, said
    told = metrics_of(out)["levels"]["slide"]
    found = read_rows(out / "slides.csv")
    right = [row["predicted"] == "abc"[int(row["slide"][1:]) % 3] for row in found]
    assert told["accuracy"]["estimate"] == pytest.approx(np.mean(right))
    assert told["samples"] == len(found) == len(LENGTHS)


def test_mistakes_are_one_line(here):
    code, said = here("predictions=nowhere", "hydra.run.dir=x")
    assert code == 1
    assert said.strip().splitlines()[-1].startswith("error: predictions=nowhere has no predictions")
