"""Volumes in, maps and tables that lie on them out."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
import torch
from omegaconf import OmegaConf
from PIL import Image

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.importing.volume_file import open_volume
from spatialdl.data.volume_geometry import Geometry
from spatialdl.errors import SlideError
from spatialdl.inference.predicting.batch import run
from spatialdl.inference.predicting.pieces import MapPiece
from spatialdl.inference.predicting.trained import Trained
from spatialdl.inference.predicting.volume_inputs import (
    shard_volume,
    shard_volume_input,
    volume_input,
)
from spatialdl.inference.predicting.volume_results import nifti_header, save_nifti
from tests.inference.evaluating.cases import read_rows
from tests.inference.predicting.runs import command
from tests.inference.predicting.volumes import (
    AFFINE,
    of_own,
    save,
    train_on_labels,
    train_on_volumes,
    voxels,
)


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
    for name, suffix in (("a", ".nii.gz"), ("b", ".nii")):
        before = nibabel.load(case / "new" / f"{name}{suffix}")
        maps = [nibabel.load(case / "out" / f"{name}-{k}{suffix}") for k in range(3)]
        classes = nibabel.load(case / "out" / f"{name}-classes{suffix}")
        for found in (*maps, classes):
            assert found.shape == before.shape
            assert (found.affine == before.affine).all()
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


def test_shards_are_predicted_as_their_files_are(case):
    assert predict(case, f"shards={case / 'set'}", "overwrite=true")
    volume = ShardDataset(case / "set").read(0)[..., 0]
    found = nibabel.load(case / "out" / "v0-classes.nii")
    np.testing.assert_allclose(found.affine, AFFINE, rtol=1e-6)
    assert np.asarray(found.dataobj).T.shape == volume.shape
    assert predict(case, f"volumes={case / 'in' / 'v0.nii.gz'}", "overwrite=true")
    compressed = nibabel.load(case / "out" / "v0-classes.nii.gz")
    assert (np.asarray(compressed.dataobj) == np.asarray(found.dataobj)).all()


def test_numbers_for_volumes_are_told_in_tables(tmp_path):
    rows = "".join(f"{n},{n}.5\n" for n in range(4))
    (tmp_path / "targets.csv").write_text(f"sample,age\n{rows}")
    train_on_labels(tmp_path, "task=regression", f"data.targets={tmp_path / 'targets.csv'}")
    (tmp_path / "new").mkdir()
    for number, shape in enumerate([(9, 8, 7), (12, 5, 7)]):
        save(tmp_path / "new" / f"n{number}.nii", voxels(shape, number))
    assert predict(tmp_path, f"volumes={tmp_path / 'new'}")
    rows = read_rows(tmp_path / "out" / "volumes.csv")
    assert [row["volume"] for row in rows] == ["n0", "n1"]
    assert not {"slide", "tiles", "vote", "x"} & set(rows[0])
    assert all(float(row["predicted_age"]) and row["status"] == "processed" for row in rows)
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
    row = read_rows(out / "volumes.csv")[0]
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


SPACING = (2.5, 0.8, 0.7)


def known(task: str = "segmentation", channels: int = 1, dtype: str = "int16") -> Trained:
    """Metadata of a network trained on volumes of 4 x 5 x 6."""
    data = {"image_size": [4, 5, 6], "channels": channels, "num_classes": 2}
    config = OmegaConf.create({"task": {"name": task}, "data": data})
    geometry = Geometry("SAR", (SPACING, SPACING))
    names = ("a", "b")
    return Trained(
        Path("run"), 2, "digest", config, names, "volumes", {}, np.dtype(dtype), geometry
    )


@pytest.mark.parametrize(
    ("flips", "axes"),
    [((1, 1, 1), (0, 1, 2)), ((-1, 1, 1), (0, 1, 2)), ((1, -1, -1), (2, 0, 1))],
)
def test_a_file_of_any_orientation_is_read_as_it_was_imported(flips, axes, tmp_path):
    pixels = voxels((6, 7, 5))
    # the same volume in the patient: dims exchanged and reversed, and the affine with them
    other = pixels.transpose(axes)[tuple(slice(None, None, flip) for flip in flips)]
    affine = AFFINE.copy()
    for k, (axis, flip) in enumerate(zip(axes, flips, strict=True)):
        affine[:3, k] = AFFINE[:3, axis] * flip
        if flip < 0:
            affine[:3, 3] += AFFINE[:3, axis] * (other.shape[k] - 1)
    given = volume_input(save(tmp_path / "a.nii", other, affine), "a", known())
    assert (given.size, given.whole, given.remark) == ((5, 7, 6), True, "")
    classified = volume_input(tmp_path / "a.nii", "a", known("classification"))
    assert classified.size == (4, 5, 6)  # of training
    source = pickle.loads(pickle.dumps(given.source))
    assert (source.dtype, source.channels, len(source)) == (np.int16, 1, 1)
    assert (source.read(0)[..., 0] == pixels.T).all()
    assert (source.read(0, (1, 3, 0, 7, 2, 5))[..., 0] == pixels.T[1:3, :, 2:5]).all()
    assert source.unreadable == {}


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (0.5, "int16", "voxels of float32 from -.* converted exactly to int16"),
        (40000, "int16", "cannot be converted exactly to int16"),
        (np.nan, "float32", "1 of 210 voxels read are NaN or infinite"),
        (np.inf, "int16", "are NaN or infinite"),
    ],
)
def test_other_values_are_noted_and_not_predicted(value, dtype, said, tmp_path):
    pixels = voxels((6, 7, 5)).astype(np.float32)
    pixels[3, 3, 3] = value
    source = volume_input(save(tmp_path / "a.nii", pixels), "a", known(dtype=dtype)).source
    assert source.read(0, (0, 1, 0, 7, 0, 6)).any()
    assert source.unreadable == {}  # it lies elsewhere
    assert not source.read(0).any()
    assert re.search(said, source.unreadable[0])


def test_a_file_that_does_not_fit_is_refused_and_one_that_is_cut_short_noted(tmp_path):
    path = save(tmp_path / "short.nii.gz", voxels((40, 40, 30)))
    path.write_bytes(path.read_bytes()[:-4000])
    source = volume_input(path, "short", known()).source
    assert not source.read(0).any()
    assert source.unreadable[0].startswith("short: ")
    path = save(tmp_path / "a.nii", voxels((6, 7, 5, 2)))
    with pytest.raises(SlideError, match="a has 2 channels, the network was trained on 1"):
        volume_input(path, "a", known())
    assert volume_input(path, "a", known(channels=2)).source.read(0).shape == (5, 7, 6, 2)
    (tmp_path / "text.nii.gz").write_text("no volume")
    with pytest.raises(SlideError, match=r"text\.nii\.gz: "):
        volume_input(tmp_path / "text.nii.gz", "text", known())
    tifffile.imwrite(tmp_path / "flat.tif", np.zeros((6, 7), np.uint8))
    with pytest.raises(SlideError, match=r"flat\.tif: .*expected pages of grey"):
        volume_input(tmp_path / "flat.tif", "flat", known())
    old = replace(known(), dtype=None)
    save(tmp_path / "int32.nii", voxels((6, 7, 5)).astype(np.int32))
    with pytest.raises(SlideError, match="voxels of int32, expected one of uint8"):
        volume_input(tmp_path / "int32.nii", "int32", old)


def test_another_spacing_is_remarked(tmp_path):
    thick = AFFINE @ np.diag([1, 1, 2, 1])
    given = volume_input(save(tmp_path / "a.nii", voxels((6, 7, 5)), thick), "a", known())
    assert "5 x 0.805 x 0.704 mm" in given.remark
    assert "training set has 2.5 x 0.8 x 0.7 mm" in given.remark
    tifffile.imwrite(tmp_path / "b.tif", voxels((5, 7, 6)), photometric="minisblack")
    assert "is unknown" in volume_input(tmp_path / "b.tif", "b", known()).remark


def test_samples_of_a_data_set_are_taken_likewise(tmp_path):
    pixels = voxels((5, 7, 6))
    affine = AFFINE[:3, [2, 1, 0, 3]]
    with ShardWriter(tmp_path / "set", kind="volumes") as writer:
        writer.add(pixels, slide="a", spacing=SPACING, affine=affine)
        writer.add(pixels[:, ::-1], slide="b", spacing=SPACING, affine=affine * [1, -1, 1, 1])
        writer.add(pixels.astype(np.int16), slide="c")
    dataset = ShardDataset(tmp_path / "set")
    for number, name in enumerate("abc"):
        given = pickle.loads(pickle.dumps(shard_volume_input(dataset, number, name, known())))
        assert (given.source.read(0)[..., 0] == pixels).all()
        assert bool(given.remark) == (name == "c")


SIZE = (5, 7, 6)
VALUES = np.random.default_rng(0).random(SIZE)
CUTS = {
    "whole": [(0, 5, 0, 7, 0, 6)],
    "columns": [(0, 5, 0, 7, 0, 1), (0, 5, 0, 7, 1, 6)],
    "all": [(0, 2, 0, 7, 0, 6), (2, 5, 0, 3, 0, 2), (2, 5, 0, 3, 2, 6), (2, 5, 3, 7, 0, 6)],
}


def pieces(cut: str) -> list[MapPiece]:
    found = []
    for box in CUTS[cut]:
        part = VALUES[tuple(slice(*box[k : k + 2]) for k in (0, 2, 4))]
        found.append(MapPiece(box[::2], torch.from_numpy(part.copy())[None]))
    return found


@pytest.mark.parametrize(("cut", "ending"), [("columns", "nii"), ("all", "nii"), ("all", "nii.gz")])
def test_pieces_become_a_file_that_lies_as_its_source(cut, ending, tmp_path):
    source = save(tmp_path / f"source.{ending}", voxels(SIZE[::-1]))
    stored, dtype = open_volume(source), np.dtype(np.float64)
    header = nifti_header(stored, source, dtype)
    path = tmp_path / f"a.{ending}"
    save_nifti(path, SingleProcess(), header, SIZE, pieces(cut), dtype)
    found, before = nibabel.load(path), nibabel.load(source)
    assert (np.asarray(found.dataobj) == VALUES.T).all()
    assert (found.affine == before.affine).all()
    assert found.header.get_zooms() == before.header.get_zooms()
    assert found.header.get_xyzt_units()[0] == before.header.get_xyzt_units()[0]
    for code in ("qform_code", "sform_code"):
        assert found.header[code] == before.header[code]
    assert {one.name for one in tmp_path.iterdir()} == {source.name, path.name}


@pytest.mark.parametrize(
    ("spacing", "affine"), [(SPACING, None), (None, None), (SPACING, AFFINE[:3, [2, 1, 0, 3]])]
)
def test_a_sample_of_shards_becomes_a_file_that_lies_as_it_says(spacing, affine, tmp_path):
    with ShardWriter(tmp_path / "set", kind="volumes") as writer:
        writer.add(np.zeros(SIZE, np.int16), spacing=spacing, affine=affine)
    stored = shard_volume(ShardDataset(tmp_path / "set"), 0)
    header = nifti_header(stored, None, np.dtype(np.uint8))
    save_nifti(
        tmp_path / "a.nii", SingleProcess(), header, SIZE, pieces("whole"), np.dtype(np.uint8)
    )
    found = nibabel.load(tmp_path / "a.nii")
    assert (np.asarray(found.dataobj) == 0).all()
    assert found.shape == SIZE[::-1]
    if affine is not None:
        np.testing.assert_allclose(found.affine, AFFINE, rtol=1e-6)
        np.testing.assert_allclose(found.get_qform(), AFFINE, atol=0.05)  # which has no shear
    elif spacing is not None:
        np.testing.assert_allclose(found.header.get_zooms(), spacing[::-1], rtol=1e-6)
        assert found.header["sform_code"] == found.header["qform_code"] == 0


def test_contrasts_scales_and_windows_of_the_source_are_not_taken_over(tmp_path):
    image = nibabel.Nifti1Image(voxels((6, 7, 5, 2)), AFFINE)
    image.header.set_slope_inter(0.5, 3)
    image.header["cal_max"] = 400
    image.header.set_xyzt_units("mm", "sec")
    nibabel.save(image, tmp_path / "source.nii")
    stored, dtype = open_volume(tmp_path / "source.nii"), np.dtype(np.float32)
    header = nifti_header(stored, tmp_path / "source.nii", dtype)
    save_nifti(tmp_path / "a.nii", SingleProcess(), header, SIZE, pieces("whole"), dtype)
    found = nibabel.load(tmp_path / "a.nii")
    assert (np.asarray(found.dataobj) == VALUES.T.astype(np.float32)).all()
    assert found.header["cal_max"] == 0
    assert found.header.get_xyzt_units() == ("mm", "unknown")


@pytest.mark.parametrize("ending", ["nii", "nii.gz"])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(ending, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spatialdl.inference.predicting.volume_results.os.pwrite", full)
    monkeypatch.setattr("spatialdl.inference.predicting.volume_results.gzip.GzipFile.write", full)
    with pytest.raises(OSError, match="No space left"):
        save_nifti(
            *(tmp_path / f"a.{ending}", SingleProcess(), b"head", SIZE, pieces("all")),
            np.dtype(np.uint8),
        )
    assert list(tmp_path.iterdir()) == []
