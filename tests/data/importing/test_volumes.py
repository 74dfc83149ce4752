from __future__ import annotations

import nibabel
import numpy as np
import pytest
import tifffile

from spatialdl.data import ShardDataset
from spatialdl.data.importing.command import main

RANDOM = np.random.default_rng(0)
AFFINE = np.array([[-0.7, 0, 0.1, 3], [0, 0.8, 0, -4.5], [0.1, 0, 2.5, 7], [0, 0, 0, 1.0]])


def save(path, pixels, affine=AFFINE):
    nibabel.save(nibabel.Nifti1Image(pixels, affine), path)


@pytest.fixture
def folders(tmp_path):
    """NIfTI files i, j, k of several types with masks, and a TIFF stack."""
    (tmp_path / "in").mkdir()
    (tmp_path / "masks").mkdir()
    volumes = {}
    for name, dtype in (("a", np.int16), ("b", np.int32)):
        pixels = RANDOM.integers(-1000, 1000, (5, 7, 4)).astype(dtype)
        save(tmp_path / "in" / f"{name}.nii.gz", pixels)
        save(tmp_path / "masks" / f"{name}.nii", (pixels > 0).astype(np.float32))
        volumes[name] = pixels.T
    volumes["c"] = RANDOM.integers(-9, 9, (3, 6, 8)).astype(np.int16)
    tifffile.imwrite(tmp_path / "in" / "c.tif", volumes["c"], photometric="minisblack")
    mask = (volumes["c"] > 0).astype(np.uint8)
    tifffile.imwrite(tmp_path / "masks" / "c.tiff", mask, photometric="minisblack")
    return tmp_path, volumes


def test_volumes_come_with_masks_labels_and_geometry(folders):
    path, volumes = folders
    (path / "l.csv").write_text("slide_id,label,split\na,ill,train\nb,well,val\nc,ill,train\n")
    given = ["--masks", str(path / "masks"), "--labels", str(path / "l.csv"), "--codec", "zstd"]
    assert main(["volumes", str(path / "in"), "--out", str(path / "set"), *given]) == 0
    data = ShardDataset(path / "set")
    assert (data.kind, data.dtype, data.classes) == ("volumes", np.int16, ["ill", "well"])
    assert data.labels.tolist() == [0, 1, 0]
    for number, (name, pixels) in enumerate(volumes.items()):
        assert data.sample(number).slide == name
        assert (data.read(number)[..., 0] == pixels).all()
        assert (data.read_mask(number) == (pixels > 0)).all()
    sample = data.sample(0)
    assert sample.spacing == pytest.approx((np.hypot(0.1, 2.5), 0.8, np.hypot(0.7, 0.1)))
    where = np.array(sample.affine) @ [3, 2, 1, 1]  # slice 3, row 2, column 1 is i 1, j 2, k 3
    assert where == pytest.approx((AFFINE @ [1, 2, 3, 1])[:3])
    assert (data.sample(2).spacing, data.sample(2).affine) == (None, None)


def test_broken_files_have_a_sentence_each_and_the_others_are_written(folders, capsys):
    path, volumes = folders
    whole = (path / "in" / "a.nii.gz").read_bytes()
    (path / "in" / "cut.nii.gz").write_bytes(whole[: len(whole) // 2])
    (path / "in" / "empty.nii").touch()
    (path / "in" / "text.tif").write_text("no picture")
    save(path / "in" / "time.nii", np.zeros((5, 7, 4, 3), np.int16))
    save(path / "in" / "float.nii", np.zeros((5, 7, 4), np.float32))
    save(path / "in" / "size.nii", np.zeros((5, 7, 4), np.int16))
    for name in ("cut", "empty", "text", "time", "float"):
        save(path / "masks" / f"{name}.nii", np.zeros((5, 7, 4), np.uint8))
    save(path / "masks" / "size.nii", np.zeros((5, 7, 5), np.uint8))
    save(path / "in" / "without.nii", np.zeros((5, 7, 4), np.int16))
    call = ["volumes", str(path / "in"), "--out", str(path / "set"), "--masks", f"{path / 'masks'}"]
    assert main(call) == 1
    assert not (path / "set").exists()
    capsys.readouterr()
    assert main([*call, "--skip-broken"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    names = ["cut.nii.gz", "empty.nii", "float.nii", "size.nii", "text.tif", "time.nii"]
    assert [line.split(": ")[1].rsplit("/")[-1] for line in said] == [*names, "without.nii"]
    for number, part in (
        (2, "float32"),
        (3, "mask has shape"),
        (5, "3 channels of int16, those before it 1"),
        (6, "no mask"),
    ):
        assert part in said[number]
    assert len(ShardDataset(path / "set")) == len(volumes)
