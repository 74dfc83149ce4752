"""The importing command, and volumes of all kinds with masks and labels."""

from __future__ import annotations

from pathlib import Path

import h5py
import nibabel
import nrrd
import numpy as np
import pytest
import tifffile
from PIL import Image
from pydicom.uid import SegmentationStorage

from spatialdl.data import ShardDataset
from spatialdl.data.importing.command import main
from spatialdl.data.importing.volume_files.volume import StoredVolume
from tests.data.importing import written

RANDOM = np.random.default_rng(0)
AFFINE = np.array([[-0.7, 0, 0.1, 3], [0, 0.8, 0, -4.5], [0.1, 0, 2.5, 7], [0, 0, 0, 1.0]])


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


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
    given = ["--masks", path / "masks", "--labels", path / "l.csv", "--codec", "zstd"]
    assert run("volumes", path / "in", "--out", path / "set", *given) == 0
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
    call = ["volumes", path / "in", "--out", path / "set", "--masks", path / "masks"]
    assert run(*call) == 1
    assert not (path / "set").exists()
    capsys.readouterr()
    assert run(*call, "--skip-broken") == 0
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
    for more in ([], ["--skip-broken"]):
        assert run("volumes", path / "in", "--out", path / "set", *more) == 1
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
    multiscales = written.described("zyx")
    written.save_zarr(tmp_path / "in" / "z.ome.zarr", {"0": pixels.T}, multiscales)
    assert run("volumes", tmp_path / "in", "--out", tmp_path / "set") == 0
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


@pytest.mark.parametrize(("code", "suffix"), [("RAS", "nii.gz"), ("LPS", "nrrd"), ("SLA", "nrrd")])
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
    call = ["volumes", tmp_path / "in", "--out", tmp_path / "set", "--masks", tmp_path / "masks"]
    assert run(*call) == 0
    data = ShardDataset(tmp_path / "set")
    assert (data.read_mask(0) == data.read(0)[..., 0] % 5).all()


def test_masks_that_lie_elsewhere_or_are_none_are_refused(folders, capsys):
    path, _ = folders
    moved = AFFINE.copy()
    moved[2, 3] += 0.2
    call = ["volumes", path / "in", "--out", path / "set", "--masks", path / "masks"]
    for shape, affine, said in [
        ((5, 7, 4), moved, "a.nii lies 0.2 mm from its volume"),
        ((4, 5, 7), AFFINE, "resample it to the volume's grid"),
    ]:
        save(path / "masks" / "a.nii", np.zeros(shape, np.uint8), affine)
        assert run(*call) == 1
        assert said in capsys.readouterr().err
    written.dataset(SegmentationStorage).save_as(path / "masks" / "seg.dcm")
    assert run(*call) == 1
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
    assert run("volumes", tmp_path / "in", "--out", tmp_path / "set") == 0
    assert max(box[1] - box[0] for box in asked) <= 64
    data = ShardDataset(tmp_path / "set")
    assert data.dtype == np.uint16
    assert (data.read(0)[..., 0] == pixels).all()


def test_folders_without_volumes_are_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no volume")
    for folder in ("empty", "none"):
        assert run("volumes", tmp_path / folder, "--out", tmp_path / "set") == 1
        assert ".nhdr, .tif, .tiff, .ome.tif, .ome.tiff, .zarr" in capsys.readouterr().err


def test_labels_and_classes_of_masks_are_told_apart(tmp_path, capsys):
    for folder in ("in", "masks"):
        (tmp_path / folder).mkdir()
        for name in "ab":
            save(tmp_path / folder / f"{name}.nii", np.zeros((5, 4, 3), np.uint8))
    for name in ("c.mgz", "d.MHA"):
        (tmp_path / "in" / name).touch()
    call = ["volumes", tmp_path / "in", "--masks", tmp_path / "masks"]
    table = tmp_path / "labels.csv"
    call += ["--labels", table, "--out", tmp_path / "set", "--overwrite"]
    table.write_text("slide_id,label,split\na,,train\nb,,val\n")
    assert run(*call) == 0
    told = capsys.readouterr()
    assert told.out == f"wrote 2 volumes with masks to {tmp_path / 'set'}\n"
    assert "skipped 2 files of unsupported formats (c.mgz, d.MHA); convert" in told.err
    assert "name the classes of the masks" not in told.err
    data = ShardDataset(tmp_path / "set", split="val")
    assert (data.classes, data.splits, data.labels.tolist()) == ([], ["train", "val"], [-1])
    table.write_text("slide_id,label,split\na,ill,train\nb,well,val\n")
    assert run(*call) == 0
    told = capsys.readouterr()
    assert "the labels (ill, well) also name the classes of the masks; leave" in told.err
    assert told.out.startswith("wrote 2 volumes of 2 classes with masks")
    table.write_text("slide_id,label,split\na,,train\nb,,val\n")
    assert run("volumes", tmp_path / "in", "--labels", table, "--out", tmp_path / "other") == 1
    assert "line 2: label is empty" in capsys.readouterr().err


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((6, 5, 3), np.uint8)).save(tmp_path / "images" / name / "1.png")
    return tmp_path / "images"


def test_images(tmp_path, images, capsys):
    out = tmp_path / "set"
    more = "--codec zstd --level 19 --stripes 2 --mpp 0.5 --shard-size 1M"
    assert run("images", images, "--out", out, *more.split()) == 0
    told = capsys.readouterr()
    assert told.out == f"wrote 2 images as regions of 2 classes to {out}\n"
    assert (ShardDataset(out).codec, ShardDataset(out).sample(0).mpp) == ("zstd", 0.5)
    assert run("images", images, "--out", out) == 1
    assert "already contains a data set" in capsys.readouterr().err
    assert run("images", images, "--out", out, "--overwrite", "--codec", "jpeg", "--jobs", 2) == 0
    assert ShardDataset(out).kind == "tiles"
    (images / "b" / "2.png").write_bytes(b"no")
    assert run("images", images, "--out", tmp_path / "other") == 1
    told = capsys.readouterr().err.splitlines()
    assert told[1].startswith(f"  {images}/b/2.png: ")
    assert run("images", images, "--out", tmp_path / "other", "--skip-broken") == 0
    assert capsys.readouterr().err.startswith(f"skipped: {images}/b/2.png: ")


def test_images_with_a_table(tmp_path, images, capsys):
    table, out = tmp_path / "t.csv", tmp_path / "set"
    table.write_text("file,grade\na/1.png,2\nx,1\n")
    call = ("images", images, "--out", out, "--labels", table, "--column", "grade")
    assert run(*call) == 1
    assert capsys.readouterr().err == (
        f"error: 1 image without a label in {table}: b/1.png; 1 label of {table} without an image: "
        "x; nothing was written: complete the table or the folder, or skip these with "
        "--skip-unmatched\n"
    )
    assert run(*call, "--skip-unmatched") == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        f"skipped: 1 image without a label in {table}: b/1.png",
        f"skipped: 1 label of {table} without an image: x",
    ]
    assert told.out == f"wrote 1 image as tiles of 1 classes to {out}\n"
    with pytest.raises(SystemExit):
        run("images", "--help")
    assert "slide" not in capsys.readouterr().out


def test_clam(tmp_path, capsys):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["imgs"], file["coords"] = np.zeros((3, 4, 4, 3), np.uint8), np.zeros((3, 2), int)
    (tmp_path / "l.csv").write_text("slide_id,label\ns,x\n")
    out = tmp_path / "set"
    assert run("clam", tmp_path / "s.h5", "--out", out, "--labels", tmp_path / "l.csv") == 0
    assert capsys.readouterr().out == f"wrote 3 tiles of 1 classes to {out}\n"
    assert run("clam", tmp_path / "none.h5", "--out", out) == 1
    assert "error: " in capsys.readouterr().err


def test_wrong_arguments(images, capsys):
    for option, value, said in [
        ("--level", "0", "'0'"),
        ("--quality", "101", "'101' is not a JPEG quality from 1 to 100"),
    ]:
        with pytest.raises(SystemExit) as caught:
            run("images", images, "--out", images / "x", option, value)
        assert caught.value.code == 2
        told = capsys.readouterr().err
        assert f"argument {option}" in told
        assert said in told
    assert run("images", images, "--out", images.parent / "x", "--level", 23) == 1
