from __future__ import annotations

from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.data.importing.command import main


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((6, 5, 3), np.uint8)).save(tmp_path / "images" / name / "1.png")
    return tmp_path / "images"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_images(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "set"
    more = ("--codec", "zstd", "--level", 19, "--stripes", 2, "--mpp", 0.5, "--stripe-count", 1)
    assert run("images", images, "--out", out, *more) == 0
    told = capsys.readouterr()
    assert told.out == f"wrote 2 images as regions of 2 classes to {out}\n"
    assert told.err.startswith("remark: stripes were not set")
    assert (ShardDataset(out).codec, ShardDataset(out).sample(0).mpp) == ("zstd", 0.5)
    assert run("images", images, "--out", out) == 1
    assert "already contains a data set" in capsys.readouterr().err
    assert run("images", images, "--out", out, "--overwrite", "--codec", "jpeg", "--jobs", 2) == 0
    assert ShardDataset(out).kind == "tiles"


def test_images_with_a_table(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_broken_images(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "b" / "2.png").write_bytes(b"no")
    out = tmp_path / "set"
    assert run("images", images, "--out", out) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("error: 1 of 3 images cannot be read, and nothing was written")
    assert told[1].startswith(f"  {images}/b/2.png: ")
    assert run("images", images, "--out", out, "--skip-broken") == 0
    assert capsys.readouterr().err.startswith(f"skipped: {images}/b/2.png: ")


def test_volumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("in", "masks"):
        (tmp_path / folder).mkdir()
        for name in "ab":
            pixels = np.zeros((5, 4, 3), np.uint8)
            nibabel.save(nibabel.Nifti1Image(pixels, np.eye(4)), tmp_path / folder / f"{name}.nii")
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
    assert "slide_id or label is empty" in capsys.readouterr().err


def test_clam(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["imgs"], file["coords"] = np.zeros((3, 4, 4, 3), np.uint8), np.zeros((3, 2), int)
    (tmp_path / "l.csv").write_text("slide_id,label\ns,x\n")
    out = tmp_path / "set"
    assert run("clam", tmp_path / "s.h5", "--out", out, "--labels", tmp_path / "l.csv") == 0
    assert capsys.readouterr().out == f"wrote 3 tiles of 1 classes to {out}\n"
    assert run("clam", tmp_path / "none.h5", "--out", out) == 1
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["--codec", "png"], ["--shard-size", "x"], ["--jobs", "0"], ["--level", "0"]]
)
def test_wrong_arguments(images: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("images", images, "--out", images / "x", *more)
    assert caught.value.code == 2
    assert f"argument {more[0]}" in capsys.readouterr().err
    assert run("images", images, "--out", images.parent / "x", "--level", 23) == 1
