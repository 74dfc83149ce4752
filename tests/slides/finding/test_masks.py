from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.finding import masks
from spatialdl.slides.finding.masks import find_mask, read_mask
from spatialdl.slides.finding.tissue import Mask
from spatialdl.slides.reading.reader import Slide, Thumbnail

SLIDE = cast(Slide, SimpleNamespace(path=Path("a.svs"), size=(1000, 2000)))
SEEN = Thumbnail(np.zeros((50, 100, 3), np.uint8), np.ones((50, 100), bool), 20.0)


def read(path: Path) -> Mask:
    tissue = read_mask(path, SLIDE, SEEN)
    assert not tissue.unknown.any()
    return tissue.mask


def drawn(size: tuple[int, int] = (50, 100)) -> np.ndarray:
    """The left half of a slide is tissue."""
    mask = np.zeros(size, np.uint8)
    mask[:, : size[1] // 2] = 1
    return mask


@pytest.mark.parametrize("size", [(50, 100), (1000, 2000), (10, 20), (333, 667), (2, 4)])
def test_a_mask_of_any_size(tmp_path: Path, size: tuple[int, int]) -> None:
    for name in ("a.png", "a.tif"):
        Image.fromarray(drawn(size)).save(tmp_path / name)
        mask = read(tmp_path / name)
        assert mask.shape == (50, 100)
        assert mask[:, :49].all()
        assert not mask[:, 51:].any()


def test_a_thumbnail_that_ends_beyond_the_slide_is_not_drawn_together(tmp_path: Path) -> None:
    slide = cast(Slide, SimpleNamespace(path=Path("a.svs"), size=(989, 1990)))
    fine = np.zeros((989, 1990), np.uint8)
    fine[:, 1968:] = 1  # 12 columns of the last pixel but one
    fine[971:] = 1  # less than a half of the last row but one
    Image.fromarray(fine).save(tmp_path / "a.png")
    mask = read_mask(tmp_path / "a.png", slide, SEEN).mask
    assert mask[:, 98:].all()
    assert not mask[:49, :98].any()
    assert mask[49].all()


def test_a_pixel_is_tissue_from_a_half(tmp_path: Path) -> None:
    fine = drawn((100, 200))
    fine[:2, :2] = ((0, 1), (0, 0))
    fine[98:, 198:] = ((1, 0), (0, 1))
    Image.fromarray(fine).save(tmp_path / "a.png")
    mask = read(tmp_path / "a.png")
    assert not mask[0, 0]
    assert mask[-1, -1]


def test_all_ways_to_store_a_mask(tmp_path: Path) -> None:
    mask = drawn()
    colour = np.zeros((50, 100, 3), np.uint8)
    colour[..., 2] = mask
    alpha = np.full((50, 100, 4), 255, np.uint8)
    alpha[..., 3] = mask * 255
    palette = Image.fromarray(1 - mask).convert("P")
    palette.putpalette([0, 200, 0, 0, 0, 0])  # number 0 is green
    for image in (
        *(Image.fromarray(mask * 255), Image.fromarray(mask.astype(bool)), palette),
        *(Image.fromarray(colour), Image.fromarray(alpha), Image.fromarray(mask.astype(np.uint16))),
        *(Image.fromarray(np.stack([mask * 9, mask * 0 + 255], -1), "LA"),),
    ):
        image.save(tmp_path / "a.png")
        assert (read(tmp_path / "a.png") == (mask > 0)).all(), image.mode
    for values in (mask * np.float32(0.5), mask.astype(bool), mask.astype(np.int32), colour):
        tifffile.imwrite(tmp_path / "a.tif", values)
        assert (read(tmp_path / "a.tif") == (mask > 0)).all()


def test_of_a_pyramid_the_level_that_is_fine_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        file.write(drawn((400, 800)), subifds=2, tile=(16, 16))
        file.write(drawn((100, 200)), subfiletype=1, tile=(16, 16))
        file.write(np.ones((25, 50), np.uint8), subfiletype=1, tile=(16, 16))
    assert (read(path) == (drawn() > 0)).all()


def test_an_empty_mask_is_no_tissue(tmp_path: Path) -> None:
    Image.fromarray(drawn() * 0).save(tmp_path / "a.png")
    assert not read(tmp_path / "a.png").any()


@pytest.mark.parametrize("size", [(100, 50), (50, 50), (50, 110), (8, 8), (1000, 1900)])
def test_a_mask_of_another_shape_is_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.fromarray(drawn(size)).save(tmp_path / "a.png")
    with pytest.raises(SlideError, match=f"has {size[0]} x {size[1]} pixels, but slide a.svs 1000"):
        read(tmp_path / "a.png")


def test_what_is_no_mask_is_refused(tmp_path: Path) -> None:
    Image.fromarray(drawn()).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((7, 50, 100, 5), np.uint8))
    for name, text in [
        *(("empty.png", b""), ("text.png", b"hello"), ("text.tif", b"hello")),
        *(("cut.png", content[:60]), ("named.tif", content)),
    ]:
        (tmp_path / name).write_bytes(text)
    for name in ("empty.png", "text.png", "text.tif", "cut.png", "named.tif", "deep.tif"):
        with pytest.raises(SlideError, match=f"cannot read mask .*{name} of slide a.svs: "):
            read(tmp_path / name)


def test_a_mask_too_large_to_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "a.tif"):
        Image.fromarray(drawn((100, 200))).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9_000)
    with pytest.raises(SlideError, match=r"a.png of slide a.svs has too many pixels \(.*20000"):
        read(tmp_path / "a.png")
    monkeypatch.setattr(masks, "_MOST_PIXELS", 9_000)
    with pytest.raises(
        SlideError, match=r"a.tif .* level has \(100, 200\) pixels, too many to read; make it"
    ):
        read(tmp_path / "a.tif")


def test_masks_are_found_by_the_slides_name(tmp_path: Path) -> None:
    slide = tmp_path / "a.tif"
    slide.touch()
    with pytest.raises(SlideError, match=r"has no mask: there is no a.png in .* \(nor .tif, .tiff"):
        find_mask(tmp_path, slide)  # the slide is not its own mask
    for name in ("a.TIFF", "a.tif.png", "a.png"):
        (tmp_path / name).touch()
        assert find_mask(tmp_path, slide) == tmp_path / name
        (tmp_path / name).unlink()
