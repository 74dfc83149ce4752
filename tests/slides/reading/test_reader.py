from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide


def tiff(path: Path, mpp: tuple[float, float] | None = (0.5, 0.5), size: int = 512) -> Path:
    """A slide of one level, a gradient."""
    image = np.zeros((size, size, 3), np.uint8)
    image[..., 0] = np.linspace(0, 255, size)[None]
    image[..., 1] = np.linspace(0, 255, size)[:, None]
    more = {}
    if mpp is not None:
        more = {"resolution": (1e4 / mpp[0], 1e4 / mpp[1]), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, image, tile=(256, 256), photometric="rgb", **more)
    return path


def test_native_pixels_are_those_of_openslide(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide, openslide.OpenSlide(synthetic["ring"]) as raw:
        assert slide.size == (1600, 2304)
        assert slide.mpp == pytest.approx(0.5)
        assert slide.downsamples == (1, 2, 4, 8)
        assert slide.properties == raw.properties
        for mpp, level in [(0.5, 0), (1.0, 1), (4.0, 3), (0.5004, 0)]:
            wanted = np.asarray(raw.read_region((800, 400), level, (80, 50)).convert("RGB"))
            assert (slide.read(800, 400, (50, 80), mpp) == wanted).all()


def test_other_resolutions_are_resampled_from_a_finer_level(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["strand"]) as slide:
        native = slide.read(512, 512, (600, 900), 0.5).astype(float)
        got = slide.read(512, 512, (200, 300), 1.5)
        assert got.shape == (200, 300, 3)
        mean = native.reshape(200, 3, 300, 3, 3).mean((1, 3))
        assert np.abs(got - mean).mean() < 4
        enlarged = slide.read(512, 512, (64, 32), 0.25)
        assert enlarged.shape == (64, 32, 3)


def test_a_large_read_is_the_same_in_parts(
    synthetic: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # each part was resampled by itself once: its first and last rows differed by up to 60 levels
    for scale in (3.0, 3.37, 0.71):
        with monkeypatch.context() as small, Slide(synthetic["ring"]) as slide:
            whole = slide.read_scaled(64, 32, (300, 400), scale)
            rows = [slide.read_rows(64, 32, (300, 400), scale, k) for k in [(0, 77), (77, 300)]]
            small.setattr("spatialdl.slides.reading.reader._AT_A_TIME", 50_000)
            parts = slide.read_scaled(64, 32, (300, 400), scale)
        assert np.abs(whole.astype(int) - np.concatenate(rows)).max() <= 1
        assert np.abs(whole.astype(int) - parts).max() <= 1


def test_outside_is_background_and_not_black(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        assert (slide.read(-600, -600, (64, 64), 0.5) == 255).all()
        corner = slide.read(2304 - 10, 1600 - 10, (20, 20), 0.5)
        assert (corner[10:] == 255).all()
        assert (corner[:, 10:] == 255).all()
        assert corner[:10, :10].max() < 255


def test_resolution_is_checked(tmp_path: Path) -> None:
    for mpp, says in [
        ((353.0, 353.0), r"has 353 x 353 .* not between 0.05 and 20; .*--slide-mpp"),
        ((0.001, 0.001), "not between"),
        ((0.5, 0.25), "0.5 micrometres per pixel horizontally and 0.25 vertically.*--slide-mpp"),
    ]:
        with Slide(tiff(tmp_path / "a.tiff", mpp)) as slide, pytest.raises(SlideError, match=says):
            assert slide.mpp
    with Slide(tiff(tmp_path / "b.tiff", None)) as slide:
        with pytest.raises(SlideError, match=r"has no micrometres per pixel .*--slide-mpp"):
            assert slide.mpp
        assert slide.read_scaled(0, 0, (2, 3), 1.0).shape == (2, 3, 3)
    with Slide(tmp_path / "b.tiff", mpp=0.3) as slide:
        assert slide.mpp == 0.3
    with pytest.raises(ValueError, match="not between"):
        Slide(tmp_path / "b.tiff", mpp=500)


def test_files_that_are_no_slides_say_what_they_are(tmp_path: Path) -> None:
    lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    whole = tiff(tmp_path / "whole.tiff").read_bytes()
    for name, content, says in [
        ("empty.svs", b"", "is empty"),
        ("lfs.svs", lfs.encode(), "git lfs pull"),
        ("text.svs", b"slide,label\n", "text file"),
        ("other.svs", bytes(range(256)) * 4, "does not support this format"),
        ("cut.tiff", whole[: len(whole) // 2], "Short read.*copy it again"),
        ("head.tiff", whole[:9], "cut short"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SlideError, match=says) as caught:
            Slide(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(SlideError, match="no such file"):
        Slide(tmp_path / "missing.svs")
    with pytest.raises(SlideError, match="it is a folder"):
        Slide(tmp_path)


def test_a_bad_place_does_not_spoil_the_others(real: Path) -> None:
    good = real / "CMU-1-Small-Region.svs"
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide, Slide(good) as whole:
        places = [(x, y) for y in range(0, 2880, 240) for x in range(0, 2160, 240)]
        failed = [place for place in places if not same(slide, whole, *place)]
    assert len(failed) == 16


def same(slide: Slide, whole: Slide, x: int, y: int) -> bool:
    """Whether a place can be read; then its pixels are right."""
    try:
        tile = slide.read(x, y, (240, 240), 0.499)
    except SlideError:
        with pytest.raises(SlideError, match=f"at x={x}, y={y} .*damaged there"):
            slide.read(x, y, (240, 240), 0.499)
        return False
    assert (tile == whole.read(x, y, (240, 240), 0.499)).all()
    return True


def test_a_thumbnail_goes_around_bad_places(real: Path) -> None:
    good = real / "CMU-1-Small-Region.svs"
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide, Slide(good) as whole:
        thumbnail, right = slide.thumbnail(16.0), whole.thumbnail(16.0)
    assert thumbnail.image.shape == (186, 139, 3)
    assert not right.missing.any()
    assert 0.1 < thumbnail.missing.mean() < 0.5
    seen = ~thumbnail.missing
    difference = np.abs(thumbnail.image[seen].astype(int) - right.image[seen])
    assert difference.mean() < 5
    assert (thumbnail.image[thumbnail.missing] == 255).all()


@pytest.mark.parametrize("scale", [1.0, 4.0, 16.0, 5.3])
def test_a_thumbnail_shows_the_slide_up_to_its_edge_and_nothing_else(
    tmp_path: Path, scale: float
) -> None:
    for side in range(96, 113):
        image = np.full((side, side + 5, 3), 7, np.uint8)
        tifffile.imwrite(tmp_path / "a.tiff", image, tile=(32, 32), photometric="rgb")
        with Slide(tmp_path / "a.tiff") as slide:
            thumbnail = slide.thumbnail(scale)
        shape = ceil(side / scale), ceil((side + 5) / scale)
        assert thumbnail.image.shape == (*shape, 3)
        assert (thumbnail.image == 7).all()
        assert thumbnail.seen.all()


def test_a_slide_that_reads_nowhere_is_missing_everywhere(real: Path) -> None:
    with Slide(real / "osp-unreadable.svs") as slide:
        assert slide.thumbnail(1.0).missing.all()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad/truncated-half.svs", "cut short"),
        ("bad/empty.svs", "is empty"),
        ("osp-unopenable.tiff", "Unsupported TIFF compression"),
        ("SOURCES.md", "text file"),
    ],
)
def test_bad_real_files_are_refused(real: Path, name: str, says: str) -> None:
    with pytest.raises(SlideError, match=says):
        Slide(real / name)


def test_resolution_of_real_slides(real: Path) -> None:
    with Slide(real / "CMU-1-Small-Region.svs") as slide:
        assert slide.mpp == 0.499
        assert slide.name == "CMU-1-Small-Region"
    for name in ("bad/no-mpp.svs", "tcga-cr-7395-01a-01-ts1.svs", "osp-boxes.tiff"):
        with Slide(real / name) as slide, pytest.raises(SlideError, match="--slide-mpp"):
            assert slide.mpp


def test_where_the_scanned_part_begins(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        assert slide.scanned_from == (0, 0)
        slide._source.properties |= {"openslide.bounds-x": "320", "openslide.bounds-y": "64"}
        assert slide.scanned_from == (320, 64)
        slide._source.properties["openslide.bounds-y"] = "?"
        assert slide.scanned_from == (0, 0)
