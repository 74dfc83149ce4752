from __future__ import annotations

import csv

import nibabel
import numpy as np
import pytest
from PIL import Image

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset
from spatialdl.predicting.batch import run
from tests.predicting.runs import command
from tests.predicting.volumes import AFFINE, of_own, save, train_on_labels, train_on_volumes, voxels


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A network of single voxels, and volumes with one brightest voxel."""
    folder = tmp_path_factory.mktemp("case")
    train_on_volumes(folder, *of_own("pointwise"))
    (folder / "new").mkdir()
    save(folder / "new" / "a.nii.gz", voxels((10, 9, 5)))
    flipped = AFFINE @ np.diag([-1, 1, -1, 1])
    save(folder / "new" / "b.nii", voxels((6, 8, 7), 1), flipped)
    return folder


def predict(folder, *words: str) -> bool:
    config = command(f"ckpt_path={folder / 'run'}", *words)
    (folder / "out").mkdir(exist_ok=True)
    return run(config, folder / "out", SingleProcess())


def test_maps_lie_voxel_on_voxel_on_their_volumes(case):
    assert predict(case, f"volumes={case / 'new'}", "overwrite=true")
    for name, source in (("a", "a.nii.gz"), ("b", "b.nii")):
        before = nibabel.load(case / "new" / source)
        suffix = source[1:]
        maps = [nibabel.load(case / "out" / f"{name}-{k}{suffix}") for k in range(3)]
        classes = nibabel.load(case / "out" / f"{name}-classes{suffix}")
        for found in (*maps, classes):
            assert found.shape == before.shape
            assert (found.affine == before.affine).all()
            assert found.header.get_zooms() == before.header.get_zooms()
        values = np.stack([np.asarray(one.dataobj) for one in maps])
        assert values.dtype == np.float64  # as trained
        np.testing.assert_allclose(values.sum(0), 1, rtol=1e-12)
        labels = np.asarray(classes.dataobj)
        assert labels.dtype == np.uint8
        assert (labels == values.argmax(0)).all()
        # what a voxel has is a monotone function of its own value: the brightest is the extreme
        extreme = {int(one.argmax()) for one in values} | {int(one.argmin()) for one in values}
        assert 0 in extreme
        with Image.open(case / "out" / f"{name}-slices.png") as picture:
            assert min(picture.size) > 300


def test_single_classes_and_tables_alone(case):
    volumes = f"volumes={case / 'new' / 'b.nii'}"
    for path in (case / "out").glob("b-*"):
        path.unlink()
    assert predict(case, volumes, "classes=['2']", "overwrite=true", "precision=float32")
    names = {path.name for path in (case / "out").glob("b-*")}
    assert names == {"b-classes.nii", "b-2.nii", "b-slices.png"}
    assert nibabel.load(case / "out" / "b-2.nii").get_data_dtype() == np.float32
    for path in (case / "out").glob("b-*"):
        path.unlink()
    assert predict(case, volumes, "maps=false", "overwrite=true")
    assert list((case / "out").glob("b-*")) == []


def test_shards_are_predicted_as_their_files_are(case):
    assert predict(case, f"shards={case / 'set'}", "overwrite=true")
    volume = ShardDataset(case / "set").read(0)[..., 0]
    found = nibabel.load(case / "out" / "v0-classes.nii")
    np.testing.assert_allclose(found.affine, AFFINE, rtol=1e-6)
    assert np.asarray(found.dataobj).T.shape == volume.shape
    assert predict(case, f"volumes={case / 'in' / 'v0.nii.gz'}", "overwrite=true")
    compressed = nibabel.load(case / "out" / "v0-classes.nii.gz")
    assert (np.asarray(compressed.dataobj) == np.asarray(found.dataobj)).all()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_one_class_or_number_for_a_volume_is_told_in_tables(task, tmp_path):
    words: tuple[str, ...] = (f"task={task}",)
    if task == "regression":
        (tmp_path / "targets.csv").write_text(
            "sample,age\n" + "".join(f"{n},{n}.5\n" for n in range(4))
        )
        words += (f"data.targets={tmp_path / 'targets.csv'}",)
    train_on_labels(tmp_path, *words)
    (tmp_path / "new").mkdir()
    for number, shape in enumerate([(9, 8, 7), (12, 5, 7)]):
        save(tmp_path / "new" / f"n{number}.nii", voxels(shape, number))
    assert predict(tmp_path, f"volumes={tmp_path / 'new'}")
    with (tmp_path / "out" / "volumes.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["volume"], row["status"]) for row in rows] == [
        ("n0", "processed"),
        ("n1", "processed"),
    ]
    assert not {"slide", "tiles", "vote", "x"} & set(rows[0])
    if task == "classification":
        assert {row["predicted"] for row in rows} <= {"ill", "well", "new"}
    else:
        assert all(float(row["predicted_age"]) for row in rows)
    assert {path.suffix for path in (tmp_path / "out").iterdir() if path.is_file()} == {".csv"}


def test_what_places_give_to_a_class_lies_on_the_volume(tmp_path):
    """It is 0 outside the network's input, and its mean inside is the logit."""
    train_on_labels(tmp_path, "task=classification")
    pixels = voxels((15, 13, 11))  # odd: the middle is that from both ends
    (tmp_path / "new").mkdir()
    save(tmp_path / "new" / "a.nii.gz", pixels)
    order = [2, 0, 1]  # columns, rows and slices of the same volume lead elsewhere
    turned = pixels.transpose(order)[:, ::-1]
    save(tmp_path / "new" / "b.nii", turned, AFFINE[:, [*order, 3]] * [1, -1, 1, 1])
    save(tmp_path / "new" / "small.nii", voxels((5, 4, 3)))
    assert predict(tmp_path, f"volumes={tmp_path / 'new'}", "activation=true")
    out = tmp_path / "out"
    assert len(list(out.glob("*-*"))) == 3 * (3 + 1)
    with (out / "volumes.csv").open(newline="") as lines:
        row = next(csv.DictReader(lines))
    logits = []
    for name in ("ill", "well", "new"):
        found = nibabel.load(out / f"a-{name}-activation.nii.gz")
        assert (found.affine == nibabel.load(tmp_path / "new" / "a.nii.gz").affine).all()
        values = np.asarray(found.dataobj)
        assert (values.shape, values.dtype) == (pixels.shape, np.float32)
        assert (np.ptp(np.argwhere(values), 0) + 1).tolist() == [9, 8, 7]  # as in training
        logits.append(values[values != 0].astype(np.float64).mean())
        other = np.asarray(nibabel.load(out / f"b-{name}-activation.nii").dataobj)
        assert (other == values.transpose(order)[:, ::-1]).all()
        assert nibabel.load(out / f"small-{name}-activation.nii").get_fdata().all()
    shares = np.exp(logits) / np.exp(logits).sum()
    told = [float(row[f"probability_{name}"]) for name in ("ill", "well", "new")]
    np.testing.assert_allclose(shares, told, atol=1e-6)
    pictures = [Image.open(out / f"{name}-activation.png") for name in ("a", "b")]
    assert (np.asarray(pictures[0]) == np.asarray(pictures[1])).mean() > 0.99  # but for the title
