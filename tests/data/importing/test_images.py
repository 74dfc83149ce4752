"""Images of a folder are found, loaded as they are, and written as tiles or regions."""

from __future__ import annotations

from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.data.importing.image_folder import BrokenImagesError, import_images
from spatialdl.data.importing.images import (
    BrokenImageError,
    class_names,
    find_images,
    image_size,
    load_image,
)
from spatialdl.errors import ShardError

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 256, (20, 30, 4), np.uint8)


def put(path: Path, pixels: np.ndarray | None = None, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(COLOURS[..., :3] if pixels is None else pixels).save(path, **more)
    return path


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            ("b/2.png", "b/1.JPG", "a/deep/er/3.tif", "b/.hidden.png"),
            [("a/deep/er/3.tif", "a", None), ("b/1.JPG", "b", None), ("b/2.png", "b", None)],
        ),
        (
            ("Train/x/1.png", "valid/y/1.png", "test/x/2.png"),
            [
                *(("Train/x/1.png", "x", "train"), ("test/x/2.png", "x", "test")),
                ("valid/y/1.png", "y", "val"),
            ],
        ),
        (("1.png",), [("1.png", None, None)]),
    ],
)
def test_classes_are_folders_below_splits(tmp_path: Path, names, found) -> None:
    for name in names:
        put(tmp_path / name)
    for name in ("notes.txt", "patches.h5"):
        ((tmp_path / names[0]).parent / name).write_text("x")
    images = find_images(tmp_path)
    assert [(image.name, image.label, image.split) for image in images] == found
    assert class_names(images) == sorted({label for _, label, _ in found if label})


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "train").mkdir(parents=True)
    put(tmp_path / "both" / "1.png")
    put(tmp_path / "both" / "a" / "2.png")
    for name, says in [
        ("empty", "contains no images"),
        ("none", "is not a folder"),
        ("both", r"1\.png lies beside folders; move it"),
    ]:
        with pytest.raises(ValueError, match=says):
            find_images(tmp_path / name)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 3), (20, 30, 5)])
@pytest.mark.parametrize("planar", [False, True])
def test_tiff_stays_as_it_is(tmp_path: Path, dtype: str, shape, planar: bool) -> None:
    pixels = (RANDOM.random(shape) * 1000).astype(dtype)
    path = tmp_path / "a.tif"
    given = np.moveaxis(pixels, -1, 0) if planar and len(shape) == 3 else pixels
    config = {"planarconfig": "separate" if planar else "contig"} if len(shape) == 3 else {}
    kind = "rgb" if shape[2:] == (3,) else "minisblack"
    tifffile.imwrite(path, given, photometric=kind, compression="zlib", **config)
    found = load_image(path)
    assert found.dtype == dtype
    assert (found == pixels.reshape(20, 30, -1)).all()
    assert image_size(path) == (20, 30)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_stays_as_it_is(tmp_path: Path, channels: int) -> None:
    path = put(tmp_path / "a.png", COLOURS[..., :channels].squeeze())
    assert (load_image(path) == COLOURS[..., :channels]).all()
    assert image_size(path) == (20, 30)
    if channels in (1, 3):
        pixels = RANDOM.integers(0, 2**16, (20, 30, channels), np.uint16)
        path.write_bytes(imagecodecs.png_encode(pixels.squeeze()))
        assert load_image(path).dtype == np.uint16
        assert (load_image(path) == pixels).all()
        rgb = load_image(path, rgb=True)
        assert (rgb == np.broadcast_to(pixels >> 8, (20, 30, 3))).all()


def test_what_is_no_colour_becomes_one_and_images_are_turned_as_their_camera_says(tmp_path):
    image = Image.fromarray(COLOURS[..., :3])
    image.quantize(16).save(tmp_path / "palette.png")
    image.convert("1").save(tmp_path / "bits.png")
    image.convert("CMYK").save(tmp_path / "cmyk.tif")
    for name, rgb, channels in [
        *(("palette.png", False, 3), ("cmyk.tif", False, 3)),
        *(("bits.png", False, 1), ("bits.png", True, 3)),
    ]:
        assert load_image(tmp_path / name, rgb=rgb).shape == (20, 30, channels)
    assert set(np.unique(load_image(tmp_path / "bits.png"))) == {0, 255}
    exif = Image.Exif()
    exif[274] = 6
    path = put(tmp_path / "a.png", exif=exif)
    assert image_size(path) == (30, 20)
    assert (load_image(path) == np.rot90(COLOURS[..., :3], -1)).all()


def cut(path: Path, part: float) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    return path


def test_broken_images_are_named(tmp_path: Path) -> None:
    for suffix in ("png", "jpg", "tif", "bmp", "webp"):
        path = cut(put(tmp_path / f"a.{suffix}"), 0.6)
        with pytest.raises(BrokenImageError, match=rf"a\.{suffix}: ."):
            load_image(path)
    empty = tmp_path / "empty.png"
    empty.touch()
    for path in (empty, tmp_path / "none.tif", cut(put(tmp_path / "b.tif"), 0.01)):
        for call in (load_image, image_size):
            with pytest.raises(BrokenImageError, match=rf"{path.name}: ."):
                call(path)
    path = tmp_path / "a.tif"
    for shape, dtype, rgb, says in [
        ((4, 20, 30), np.uint8, False, "it has several pages"),
        ((20, 30), np.int32, False, "image has type int32, expected one of"),
        ((20, 30), np.float32, True, "1 channels of float32, expected colours"),
    ]:
        tifffile.imwrite(path, np.zeros(shape, dtype), photometric="minisblack")
        with pytest.raises(BrokenImageError, match=says):
            load_image(path, rgb=rgb)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["train/b/1", "train/a/2", "val/a/3", "test/b/4", "test/b/5"]):
        put(tmp_path / "images" / f"{name}.png", np.full((20, 30, 3), number, np.uint8))
    return tmp_path / "images"


def test_images_of_one_size_are_tiles(tmp_path: Path, folder: Path) -> None:
    assert import_images(folder, tmp_path / "set", jobs=3, mpp=0.5, codec="zstd") == []
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.classes, data.codec, data.mpp) == ("tiles", ["a", "b"], "zstd", 0.5)
    assert data.splits == ["train", "val", "test"]
    names = ["test/b/4.png", "test/b/5.png", "train/a/2.png", "train/b/1.png", "val/a/3.png"]
    assert [data.sample(k).slide for k in range(5)] == names
    assert data.labels.tolist() == [1, 1, 0, 1, 0]
    assert [int(image[0, 0, 0]) for image, _ in data] == [3, 4, 1, 0, 2]


def test_images_of_any_size_are_regions(tmp_path: Path) -> None:
    images = [(RANDOM.random((*size, 2)) * 999).astype("f4") for size in ((9, 7), (600, 5))]
    (tmp_path / "images" / "c").mkdir(parents=True)
    for number, image in enumerate(images):
        path = tmp_path / "images" / "c" / f"{number}.tif"
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    import_images(tmp_path / "images", tmp_path / "set", mpp=0.25, stripes=2)
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.dtype, data.sample(0).mpp) == ("regions", "float32", 0.25)
    assert all((data.read(k) == image).all() for k, image in enumerate(images))
    assert len(data.sample(1).bands) == 2


def test_broken_images_are_listed_or_left_out(tmp_path: Path, folder: Path) -> None:
    cut(folder / "test" / "b" / "4.png", 0.7)
    (folder / "val" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(BrokenImagesError, match="2 of 6 images cannot be read, and nothing") as got:
        import_images(folder, tmp_path / "set")
    assert ["4.png" in got.value.broken[0], "0.png" in got.value.broken[1]] == [True, True]
    assert not (tmp_path / "set").exists()
    assert import_images(folder, tmp_path / "set", skip_broken=True) == got.value.broken
    assert len(ShardDataset(tmp_path / "set")) == 4
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"no image")
    with pytest.raises((BrokenImagesError, ShardError)):
        import_images(tmp_path / "broken", tmp_path / "other", skip_broken=True)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Images of odd sizes, some in a folder of a patient; no class folders."""
    for number, name in enumerate(["a.png", "b.jpg", "c.png", "p9/a.jpeg"]):
        put(tmp_path / "flat" / name, np.zeros((33 + number, 47 - number, 3), np.uint8))
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
        *(("a.png", 0, "train"), ("b.jpg", 1, "val"), ("c.png", 0, "test")),
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
        ("name,label\na,x\n", "no column image or image_id.* its columns are name, label"),
        ("image,grade\na,2\n", "has no column label; its columns are image, grade.*--column NAME"),
        ("image,label\na,x\n", "line 2: image 'a' is ambiguous: .*p9/a.jpeg; add its suffix"),
        ("image,label\nb,x\nb.jpg,x\n", "line 3: b.jpg is .*, which .* line 2 also names; keep"),
        ("image,label,split\nb,x,dev\n", "line 2: split is 'dev', expected train, val or test"),
        (
            "image,label,split,patient\nb,x,train,1\nc,x,val,1\n",
            "patient 1 is in train and val, which invalidates the evaluation",
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
    put(folder / "train" / "b" / "9.png", np.zeros((20, 30), np.uint8))
    with pytest.raises(ValueError, match=r"9\.png: tile has shape \(20, 30, 1\), .*; --rgb"):
        import_images(folder, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    import_images(folder, tmp_path / "set", rgb=True)
    assert len(ShardDataset(tmp_path / "set")) == 6
