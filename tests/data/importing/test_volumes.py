from __future__ import annotations

import nibabel
import nrrd
import numpy as np
import pytest
import tifffile
from pydicom.uid import SegmentationStorage

from spatialdl.data import ShardDataset
from spatialdl.data.importing.command import main
from spatialdl.data.importing.volume_files.volume import StoredVolume
from tests.data.importing.volume_files import test_ome_zarr, written

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
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped")]
    names = ["cut.nii.gz", "empty.nii", "float.nii", "size.nii", "text.tif", "time.nii"]
    assert [line.split(": ")[1].rsplit("/")[-1] for line in said] == [*names, "without.nii"]
    for number, part in (
        (0, "it is damaged, or not a NIfTI file"),
        (2, "float32"),
        (3, "mask has shape"),
        (5, "3 channels of int16, earlier ones have 1"),
        (6, "no mask"),
    ):
        assert part in said[number]
    assert len(ShardDataset(path / "set")) == len(volumes)


def test_one_volume_of_another_type_does_not_leave_out_all_others(folders, capsys):
    path, volumes = folders
    save(path / "in" / "0.nii", np.zeros((5, 7, 4), np.float32))
    call = ["volumes", str(path / "in"), "--out", str(path / "set")]
    for more in ([], ["--skip-broken"]):
        assert main([*call, *more]) == 1
        assert not (path / "set").exists()
        said = capsys.readouterr().err
        assert f"error: {len(volumes)} of {len(volumes) + 1} volumes have another type" in said
        assert f"than the first, {path / 'in' / '0.nii'}" in said


def test_volumes_of_every_kind_in_one_folder(tmp_path, capsys):
    pixels = written.voxels()
    written.save(written.slices(pixels, written.oblique()), tmp_path / "in" / "ct")
    written.dataset(SegmentationStorage).save_as(tmp_path / "in" / "ct" / "seg.dcm")
    nrrd.write(str(tmp_path / "in" / "n.nrrd"), pixels)
    save(tmp_path / "in" / "x.nii", pixels)
    stack = {"photometric": "minisblack", "metadata": {"axes": "ZYX"}}
    tifffile.imwrite(tmp_path / "in" / "o.ome.tif", pixels.T, **stack)
    multiscales = test_ome_zarr.described("zyx")
    test_ome_zarr.save(tmp_path / "in" / "z.ome.zarr", {"0": pixels.T}, multiscales)
    assert main(["volumes", str(tmp_path / "in"), "--out", str(tmp_path / "set")]) == 0
    said = capsys.readouterr().err
    assert "skipped DICOM objects that are not images: 1 x Segmentation Storage" in said
    assert "the spacing of 2 volumes is unknown: n, o" in said
    data = ShardDataset(tmp_path / "set")
    assert [data.sample(k).slide for k in range(5)] == ["ct", "n", "o", "x", "z"]
    for k in range(1, 5):
        assert (data.read(k)[..., 0] == pixels.T).all()
    sample = data.sample(0)
    place = np.argwhere(data.read(0)[..., 0] == pixels.max())[0]
    expected = (written.oblique() @ [1, 4, 3, 1])[:3]
    assert np.array(sample.affine) @ [*place, 1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("code", ["RAS", "LPS", "SLA"])
@pytest.mark.parametrize("suffix", ["nii.gz", "nrrd"])
def test_masks_of_other_orientations_are_turned_onto_their_volumes(code, suffix, tmp_path):
    pixels, affine = written.voxels(), written.oblique()
    written.save(written.slices(pixels, affine), tmp_path / "in" / "ct")
    (tmp_path / "masks").mkdir()
    mask = nibabel.Nifti1Image((pixels % 5).astype(np.uint8), affine)
    to = nibabel.orientations.axcodes2ornt(code)
    mask = mask.as_reoriented(
        nibabel.orientations.ornt_transform(nibabel.io_orientation(affine), to)
    )
    if suffix == "nrrd":
        of_axes = mask.affine[:3].T
        known = {"space": "RAS", "space directions": of_axes[:3], "space origin": of_axes[3]}
        nrrd.write(str(tmp_path / "masks" / "ct.nrrd"), np.asarray(mask.dataobj), known)
    else:
        nibabel.save(mask, tmp_path / "masks" / "ct.nii.gz")
    call = ["volumes", str(tmp_path / "in"), "--out", str(tmp_path / "set"), "--masks"]
    assert main([*call, str(tmp_path / "masks")]) == 0
    data = ShardDataset(tmp_path / "set")
    assert (data.read_mask(0) == data.read(0)[..., 0] % 5).all()


def test_masks_that_lie_elsewhere_are_refused(folders, capsys):
    path, _ = folders
    moved = AFFINE.copy()
    moved[2, 3] += 0.2
    save(path / "masks" / "a.nii", np.zeros((5, 7, 4), np.uint8), moved)
    call = ["volumes", str(path / "in"), "--out", str(path / "set"), "--masks"]
    assert main([*call, str(path / "masks")]) == 1
    assert "a.nii lies 0.2 mm from its volume" in capsys.readouterr().err
    save(path / "masks" / "a.nii", np.zeros((4, 5, 7), np.uint8), AFFINE)
    assert main([*call, str(path / "masks")]) == 1
    assert "resample it to the volume's grid" in capsys.readouterr().err


def test_segmentation_objects_are_no_masks(folders, capsys):
    path, _ = folders
    written.dataset(SegmentationStorage).save_as(path / "masks" / "seg.dcm")
    call = ["volumes", str(path / "in"), "--out", str(path / "set"), "--masks"]
    assert main([*call, str(path / "masks")]) == 1
    assert "DICOM segmentation object (SEG)" in capsys.readouterr().err


def test_a_volume_is_read_some_slices_at_a_time(tmp_path, monkeypatch):
    pixels = RANDOM.integers(-9, 70000, (130, 3, 4)).astype(np.int32) % 40000
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "a.nii.gz", pixels.T)
    asked = []
    read = StoredVolume.read
    monkeypatch.setattr(
        StoredVolume, "read", lambda self, box=None: asked.append(box) or read(self, box)
    )
    assert main(["volumes", str(tmp_path / "in"), "--out", str(tmp_path / "set")]) == 0
    assert max(box[1] - box[0] for box in asked) <= 64
    data = ShardDataset(tmp_path / "set")
    assert data.dtype == np.uint16
    assert (data.read(0)[..., 0] == pixels).all()


@pytest.mark.parametrize("folder", ["empty", "none"])
def test_folders_without_volumes_are_refused(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no volume")
    assert main(["volumes", str(tmp_path / folder), "--out", str(tmp_path / "set")]) == 1
    assert ".nhdr, .tif, .tiff, .ome.tif, .ome.tiff, .zarr" in capsys.readouterr().err
