from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
from omegaconf import OmegaConf

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.volume_geometry import Geometry
from spatialdl.errors import SlideError
from spatialdl.predicting.trained import Trained
from spatialdl.predicting.volume_inputs import shard_volume_input, volume_input
from tests.predicting.volumes import AFFINE, save, voxels

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


def test_a_file_is_read_box_by_box_as_it_was_imported(tmp_path):
    pixels = voxels((6, 7, 5))
    given = volume_input(save(tmp_path / "a.nii.gz", pixels), "a", known())
    assert (given.size, given.whole, given.remark) == ((5, 7, 6), True, "")
    source = pickle.loads(pickle.dumps(given.source))
    assert (source.dtype, source.channels, len(source)) == (np.int16, 1, 1)
    assert (source.read(0)[..., 0] == pixels.T).all()
    assert (source.read(0, (1, 3, 0, 7, 2, 5))[..., 0] == pixels.T[1:3, :, 2:5]).all()
    assert source.unreadable == {}


@pytest.mark.parametrize("flips", [(-1, 1, 1), (1, -1, -1), (-1, -1, -1)])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_a_file_of_another_orientation_is_turned_to_that_of_training(flips, axes, tmp_path):
    pixels = voxels((6, 7, 5))
    # the same volume in the patient: dims exchanged and reversed, and the affine with them
    other = pixels.transpose(axes)[tuple(slice(None, None, flip) for flip in flips)]
    affine = AFFINE.copy()
    for k, (axis, flip) in enumerate(zip(axes, flips, strict=True)):
        affine[:3, k] = AFFINE[:3, axis] * flip
        if flip < 0:
            affine[:3, 3] += AFFINE[:3, axis] * (other.shape[k] - 1)
    given = volume_input(save(tmp_path / "a.nii", other, affine), "a", known())
    assert given.size == (5, 7, 6)
    assert given.remark == ""
    assert (given.source.read(0)[..., 0] == pixels.T).all()
    assert (given.source.read(0, (1, 3, 0, 7, 2, 5))[..., 0] == pixels.T[1:3, :, 2:5]).all()


def test_other_tasks_than_segmentation_see_the_size_of_training(tmp_path):
    path = save(tmp_path / "a.nii", voxels((6, 7, 5)))
    assert volume_input(path, "a", known("classification")).size == (4, 5, 6)


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.float32, np.int64])
def test_values_that_training_knew_are_read_in_its_type(dtype, tmp_path):
    pixels = voxels((6, 7, 5))
    image = nibabel.Nifti1Image(pixels.astype(dtype), AFFINE, dtype=dtype)
    nibabel.save(image, tmp_path / "a.nii")
    found = volume_input(tmp_path / "a.nii", "a", known()).source.read(0)
    assert found.dtype == np.int16
    assert (found[..., 0] == pixels.T).all()


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


def test_floats_are_rounded_to_those_of_training(tmp_path):
    pixels = np.random.default_rng(0).normal(size=(6, 7, 5))
    given = volume_input(save(tmp_path / "a.nii", pixels), "a", known(dtype="float32"))
    assert (given.source.read(0)[..., 0] == pixels.T.astype(np.float32)).all()
    assert given.source.unreadable == {}


def test_a_file_that_does_not_fit_is_refused(tmp_path):
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


def test_a_file_that_ends_too_early_is_noted_when_it_is_read(tmp_path):
    path = save(tmp_path / "a.nii.gz", voxels((40, 40, 30)))
    path.write_bytes(path.read_bytes()[:-4000])
    source = volume_input(path, "a", known()).source
    assert not source.read(0).any()
    assert source.unreadable[0].startswith("a: ")


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
