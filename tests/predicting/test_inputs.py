from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.errors import SlideError
from spatialdl.predicting.cutting import BatchCutting
from spatialdl.predicting.inputs import SlideImages, shard_inputs, slide_input
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.wanted import Wanted
from tests.predicting.runs import picture, write_slide
from tests.slides.tiled_tiffs import write_tiff


@pytest.mark.parametrize("large", [2048, 64])
@pytest.mark.parametrize("scale", [1.0, 1.7, 3.0])
def test_an_image_has_the_same_pixels_however_it_is_divided(scale, large, tmp_path, monkeypatch):
    # a narrow box, and one that begins between two pixels, were off by up to two levels once
    monkeypatch.setattr("spatialdl.predicting.inputs.LARGE", large)
    path, size = write_slide(tmp_path / "a.tiff", 500, 460), (151, 137)
    images = SlideImages(path, None, [(3, 5), (0, 0)], size, scale)
    whole = images.read(0)
    assert whole.shape == (*size, 3)
    rng = np.random.default_rng(0)
    for _ in range(10):
        row0, row1 = sorted(rng.choice(size[0] + 1, 2, replace=False).tolist())
        col0, col1 = sorted(rng.choice(size[1] + 1, 2, replace=False).tolist())
        part = images.read(0, (row0, row1, col0, col1))
        assert np.array_equal(part, whole[row0:row1, col0:col1])
    assert images.read(1, (4, 4, 0, 9)).shape == (0, 9, 3)
    with Slide(path) as slide:
        expected = slide.read_scaled(3, 5, size, scale)
    assert np.abs(whole.astype(int) - expected).max() <= (0 if large > 500 else 2)
    images.close()
    assert np.array_equal(pickle.loads(pickle.dumps(images)).read(0), whole)


def test_a_picture_as_large_as_the_training_images_is_one_image(tmp_path):
    """A rectangular PNG was refused without a tile size, and one without tissue had no tiles."""
    pixels = np.full((32, 24, 3), 250, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    cutting = BatchCutting(32, (32, 24), Wanted(level=0), whole=False, as_pictures=True)
    found = slide_input(tmp_path / "a.png", "a", cutting)
    assert (found.places, found.size, found.span, found.whole) == (
        *([(0, 0)], (32, 24), (32.0, 24.0), False),
    )
    assert np.array_equal(found.source.read(0, (1, 30, 2, 9)), pixels[1:30, 2:9])
    with pytest.raises(SlideError, match=r"a.* is 32x24 pixels, and .* of 24x32, but tiles are"):
        slide_input(tmp_path / "a.png", "a", replace(cutting, view=(24, 32)))


def shards(folder: Path, places: list[tuple[int, int]], **made_with: object) -> ShardDataset:
    with ShardWriter(folder, classes=["a"], mpp=1.0, made_with=made_with) as writer:
        for number, xy in enumerate(places):
            image = np.full((16, 16, 3), number, np.uint8)
            writer.add(image, slide="s", xy=xy)
    return ShardDataset(folder)


def test_tiles_of_shards_say_by_their_places_how_large_they_are(tmp_path):
    grid = [(round(x * 24.6), round(y * 24.6)) for x in range(4) for y in range(3)]
    (found,) = shard_inputs(shards(tmp_path / "a", grid, overlap=4), (16, 16), maps=False)
    assert found.span == pytest.approx((32.8, 32.8), rel=0.03)
    assert found.mpp == pytest.approx(16 / 32.8, rel=0.03)
    assert found.places == grid
    grid = [(x, y) for x in (0, 32, 64, 96, 101) for y in (0, 32, 64, 96, 123)]
    (found,) = shard_inputs(shards(tmp_path / "c", grid, edge="shift"), (16, 16), maps=False)
    assert (found.span, found.extent) == ((32.0, 32.0), (155, 133))
    lonely = [(0, 0), (320, 0), (32, 1000)]  # of which nobody can tell
    (found,) = shard_inputs(shards(tmp_path / "b", lonely), (16, 16), maps=False)
    assert found.span is None
    assert found.extent is None


def test_each_region_is_a_slide_of_its_own_where_maps_are_told(tmp_path):
    dataset = shards(tmp_path / "a", [(0, 0), (16, 0)])
    found = shard_inputs(dataset, (16, 16), maps=True)
    assert [one.name for one in found] == ["s_1", "s_2"]
    assert all(one.whole and one.size == one.extent == (16, 16) for one in found)
    assert found[1].source.read(0)[0, 0, 0] == 1


@pytest.mark.parametrize("edge", ["drop", "pad", "shift"])
def test_tiles_at_the_edges_of_slides(tmp_path, edge, caplog):
    image = np.zeros((200, 150, 3), np.uint8)
    image[60:, 40:, 2] = 150
    image[180:] //= 2
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(64, 64), photometric="rgb")
    cut = BatchCutting(64, (64, 64), Wanted(level=0), whole=False, min_tissue=0.04, edge=edge)
    found = slide_input(tmp_path / "a.tiff", "a", replace(cut, background="dark"))
    says = "a: 25% of its tissue is in no tile: " in caplog.text and "edge=pad or" in caplog.text
    assert says == (edge == "drop")
    last = {"drop": (64, 128), "pad": (128, 192), "shift": (86, 136)}[edge]
    assert found.places[-1] == last
    x, y = last
    expected = np.zeros((64, 64, 3), np.uint8)  # as dark as the slide, beyond it
    part = image[y : y + 64, x : x + 64]
    expected[: len(part), : part.shape[1]] = part
    assert np.array_equal(found.source.read(len(found.places) - 1), expected)
    box = (3, 40, 5, 64)
    assert np.array_equal(found.source.read(len(found.places) - 1, box), expected[3:40, 5:64])


def test_tiles_that_cannot_be_read_are_kept_to_be_reported_unless_all_are(tmp_path):
    cut = BatchCutting(32, (32, 32), Wanted(level=0), whole=False)
    path = write_tiff(tmp_path / "a.tif", [picture(256, 256)], side=64)
    sound = slide_input(path, "a", cut).places
    with tifffile.TiffFile(path) as file:
        places = list(zip(file.pages[0].dataoffsets, file.pages[0].databytecounts, strict=True))
    content = bytearray(path.read_bytes())
    for torn in (places[5:6], places):
        for offset, count in torn:
            content[offset : offset + count] = bytes(count)
        path.write_bytes(content)
        if torn == places:
            with pytest.raises(SlideError, match="has no tiles: cannot read slide"):
                slide_input(path, "a", cut)
        else:
            found = slide_input(path, "a", cut)
            assert set(found.places) == set(sound)
            for number in range(len(found.places)):
                found.source.read(number)
            assert {found.places[number] for number in found.source.unreadable} == {
                (x, y) for x in (64, 96) for y in (64, 96)
            }
