from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.data.importing.image_folder import BrokenImagesError, import_images
from spatialdl.errors import ShardError

RANDOM = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["train/b/1", "train/a/2", "val/a/3", "test/b/4", "test/b/5"]):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), number, np.uint8)).save(path)
    return tmp_path / "images"


@pytest.mark.parametrize("jobs", [1, 3])
def test_images_of_one_size_are_tiles(tmp_path: Path, folder: Path, jobs: int) -> None:
    assert import_images(folder, tmp_path / "set", jobs=jobs, mpp=0.5, codec="zstd") == []
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.classes, data.codec, data.mpp) == ("tiles", ["a", "b"], "zstd", 0.5)
    assert data.splits == ["train", "val", "test"]
    names = [data.sample(k).slide for k in range(5)]
    assert names == [
        "test/b/4.png",
        "test/b/5.png",
        "train/a/2.png",
        "train/b/1.png",
        "val/a/3.png",
    ]
    assert data.labels.tolist() == [1, 1, 0, 1, 0]
    assert [int(image[0, 0, 0]) for image, _ in data] == [3, 4, 1, 0, 2]


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_images_of_any_size_are_regions(tmp_path: Path, dtype: str) -> None:
    images = [
        (RANDOM.random((rows, cols, 2)) * 999).astype(dtype) for rows, cols in ((9, 7), (600, 5))
    ]
    for number, image in enumerate(images):
        path = tmp_path / "images" / "c" / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    import_images(tmp_path / "images", tmp_path / "set", mpp=0.25, stripes=2)
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.dtype, data.sample(0).mpp) == ("regions", dtype, 0.25)
    assert all((data.read(k) == image).all() for k, image in enumerate(images))
    assert len(data.sample(1).bands) == 2


def test_broken_images_are_listed_or_left_out(tmp_path: Path, folder: Path) -> None:
    cut = folder / "test" / "b" / "4.png"
    cut.write_bytes(cut.read_bytes()[:-30])
    (folder / "val" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(BrokenImagesError, match="2 of 6 images cannot be read, and nothing") as got:
        import_images(folder, tmp_path / "set")
    assert ["4.png" in got.value.broken[0], "0.png" in got.value.broken[1]] == [True, True]
    assert not (tmp_path / "set").exists()
    said = import_images(folder, tmp_path / "set", skip_broken=True)
    assert said == got.value.broken
    assert len(ShardDataset(tmp_path / "set")) == 4


def test_nothing_but_broken_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(b"no image")
    with pytest.raises((BrokenImagesError, ShardError)):
        import_images(tmp_path / "images", tmp_path / "set", skip_broken=True)
    assert not (tmp_path / "set").exists()


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Images of odd sizes, some in a folder of a patient; no class folders."""
    for number, name in enumerate(["a.png", "b.jpg", "c.png", "p9/a.jpeg"]):
        path = tmp_path / "flat" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = RANDOM.integers(0, 256, (33 + number, 47 - number, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return tmp_path / "flat"


@pytest.mark.parametrize(
    "table",
    [
        "image,label,split,patient\na.png,x,train,1\nb,y,valid,2\nc.png,x,test,\na.jpeg,y,train,1\n",
        "split, label ,note,filename\nTrain,x,,flat/a.png\nval,y,,b.jpg\ntest,x,-,c\n"
        "train,y,,p9/a.jpeg\n",
    ],
)
def test_a_table_labels_a_flat_folder(tmp_path: Path, flat: Path, table: str) -> None:
    (tmp_path / "t.csv").write_text(table, encoding="utf-8-sig")
    assert import_images(flat, tmp_path / "set", labels=tmp_path / "t.csv") == []
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.classes) == ("regions", ["x", "y"])
    found = [(one.slide, one.label, one.split) for one in map(data.sample, range(4))]
    assert found == [
        ("a.png", 0, "train"),
        ("b.jpg", 1, "val"),
        ("c.png", 0, "test"),
        ("p9/a.jpeg", 1, "train"),
    ]
    assert data.read(3).shape == (36, 44, 3)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "file,label\na.png,x\nc,\nd.png,y\ne,y\n",
            r"3 images without a label in .*t\.csv: b\.jpg, c\.png, p9/a\.jpeg; 2 labels of "
            r".*t\.csv without an image: d\.png, e; nothing was written.*--skip-unmatched",
        ),
        ("file,label\nz,y\n", r"4 images without a label.*1 label of .* without an image: z"),
        ("name,label\na,x\n", "no column image or image_id.* its header is name,label"),
        ("image,grade\na,2\n", "has no column label; its columns are image, grade.*--column NAME"),
        ("image,label\na,x\n", "line 2: image 'a' is ambiguous: .*p9/a.jpeg; add its suffix"),
        ("image,label\nb,x\nb.jpg,x\n", "line 3: b.jpg is .*, which .* line 2 also names; keep"),
        ("image,label,split\nb,x,dev\n", "line 2: split is 'dev', expected train, val or test"),
        (
            "image,label,split,patient\nb,x,train,1\nc,x,val,1\n",
            "line 3: patient 1 is in the split val, and in train at .* line 2",
        ),
    ],
)
def test_tables_that_do_not_match_the_images(
    tmp_path: Path, flat: Path, table: str, says: str
) -> None:
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(ValueError, match=says) as caught:
        import_images(
            flat, tmp_path / "set", labels=tmp_path / "t.csv", skip_unmatched="dev" in says
        )
    assert "slide" not in str(caught.value).replace("slide or slide_id", "")
    assert not (tmp_path / "set").exists()


def test_images_that_do_not_go_together_are_named(tmp_path: Path, folder: Path) -> None:
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(folder / "train" / "b" / "9.png")
    with pytest.raises(
        ValueError, match=r"9\.png: tile has shape \(20, 30, 1\), .*; --rgb converts"
    ):
        import_images(folder, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    import_images(folder, tmp_path / "set", rgb=True)
    assert len(ShardDataset(tmp_path / "set")) == 6
