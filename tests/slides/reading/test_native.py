"""Tiles are read without openslide where that gives the same pixels, and handed on as they are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import imagecodecs
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import simplejpeg
import tifffile
from PIL import Image

from spatialdl.data.jpeg import JpegStream
from spatialdl.errors import SlideError
from spatialdl.slides.reading import native
from spatialdl.slides.reading.native import JpegGrid
from spatialdl.slides.reading.opening import OpenSlideFile, composited
from spatialdl.slides.reading.reader import Slide
from tests.slides.tiled_tiffs import jpeg, picture, spoil, write_tiff

Bytes = npt.NDArray[np.uint8]
BOXES = [
    *((0, 0, 240, 240), (256, 512, 256, 256), (17, 33, 100, 300), (-20, -30, 64, 64)),
    *((-400, 0, 64, 64), (100, 100, 700, 650), (1, 5000, 10, 10)),
]


def from_openslide(
    raw: openslide.OpenSlide, x: int, y: int, level: int, rows: int, cols: int
) -> Bytes:
    background = raw.properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "FFFFFF")
    value = bytes.fromhex(background)
    return composited(raw.read_region((x, y), level, (cols, rows)), (value[0], value[1], value[2]))


def differences(path: Path, levels: int = 1) -> Iterator[int]:
    """How far boxes are from those of openslide, at most, read without it."""
    source = OpenSlideFile(path)
    with openslide.OpenSlide(path) as raw:
        for level in range(levels):
            down = round(source.downsamples[level])
            assert source.is_native(level)
            for x, y, rows, cols in BOXES:
                right = from_openslide(raw, x * down, y * down, level, rows, cols)
                # as if openslide were not there, where it is not needed
                tiles = source._opened_tiles()
                got = tiles.read(level, y, x, (rows, cols), source.background)
                assert got is not None
                assert got.shape == right.shape
                assert (got == source.read(x * down, y * down, level, (rows, cols), True)).all()
                yield int(np.abs(got.astype(int) - right).max())
    source.close()


def decoded_by_all(stream: bytes) -> list[Bytes]:
    """RGB of a stream as decoders give it that know nothing of the slide."""
    return [
        np.asarray(Image.open(io.BytesIO(stream)).convert("RGB")),
        np.asarray(simplejpeg.decode_jpeg(stream, "RGB")),
        np.asarray(imagecodecs.jpeg8_decode(stream, outcolorspace="RGB")),
    ]


def check_grid(path: Path, scale: float, channels: int = 3, most: int = 12) -> JpegGrid:
    """Every decoder gives the pixels that the slide gives; at most so many tiles are compared."""
    with Slide(path) as slide:
        grid = slide.jpeg_grid(scale)
        assert grid is not None
        assert grid.shape[2] == channels
        (rows, cols, _), (high, wide) = grid.shape, grid.chunk
        places = [(row, col) for row in range(grid.tiles[0]) for col in range(grid.tiles[1])]
        for row, col in places[:: -(-len(places) // most)] + places[-1:]:
            size = min(high, rows - row * high), min(wide, cols - col * wide)
            x, y = (round(n * grid.downsample) for n in (col * wide, row * high))
            right = slide.read_scaled(x, y, size, scale)
            stream = grid.encoded(row, col)
            assert isinstance(stream, JpegStream)
            for got in decoded_by_all(stream):
                assert got.shape == (high, wide, 3)
                assert np.abs(got[: size[0], : size[1]].astype(int) - right).max() <= 1
        return grid


def test_synthetic_and_real_slides(synthetic, real):
    assert max(differences(synthetic["ring"], 3)) == 0
    for scale, size in [(1.0, (1600, 2304)), (2.0, (800, 1152))]:
        grid = check_grid(synthetic["ring"], scale)
        assert (grid.shape, grid.chunk) == ((*size, 3), (256, 256))
    path = real / "CMU-1-Small-Region.svs"  # of abbreviated streams
    assert max(differences(path)) == 0
    grid = check_grid(path, 1.0)
    assert (grid.shape, grid.chunk, grid.tiles) == ((2967, 2220, 3), (240, 240), (13, 10))


def test_a_real_jpeg_2000_slide(real):
    path = real / "tcga-cr-7395-01a-01-ts1.svs"
    assert max(differences(path)) == 0
    with Slide(path) as slide:
        assert slide.is_native(1.0)
        assert slide.jpeg_grid(1.0) is None
    # its other level is 2.0005 times as coarse: openslide interpolates nearly everywhere
    source = OpenSlideFile(path)
    assert source.is_native(1)
    with openslide.OpenSlide(path) as raw:
        got = source.read(2000, 1000, 1, (90, 80), True)
        assert (got == from_openslide(raw, 2000, 1000, 1, 90, 80)).all()


@pytest.mark.parametrize(
    ("photometric", "colour", "subsampling"),
    [("ycbcr", "YCBCR", "422"), ("rgb", "RGB", "444"), ("minisblack", "GRAYSCALE", "444")],
)
def test_colours_of_jpeg(tmp_path, photometric, colour, subsampling):
    grey = colour == "GRAYSCALE"
    levels = [picture(900, 1100), picture(450, 550)]
    path = write_tiff(
        tmp_path / "a.tiff",
        [level[..., 0] for level in levels] if grey else levels,
        lambda tile: jpeg(tile, colour, subsampling),
        photometric,
        bigtiff=not grey,
        subsampling={"420": (2, 2), "422": (2, 1), "444": (1, 1)}[subsampling],
        compressionargs={"outcolorspace": colour.lower()},
    )
    assert max(differences(path, 2)) == 0
    for scale in (1.0, 2.0):
        check_grid(path, scale, channels=1 if grey else 3)


@pytest.mark.parametrize("compression", [33003, 33005])
def test_jpeg_2000_of_aperio(tmp_path, compression):
    def encode(tile: Bytes) -> bytes:
        return bytes(imagecodecs.jpeg2k_encode(tile, codecformat="J2K", level=60, mct=True))

    said = "Aperio Image Library v11\r\n600x700 (256x256)|MPP = 0.5"
    path = tmp_path / "a.svs"
    write_tiff(path, [picture(700, 600)], encode, "rgb", compression, said)
    if compression == 33003:  # of Y, Cb, Cr
        assert not Slide(path).is_native(1.0)
    else:
        assert max(differences(path)) == 0


def test_other_tiles_are_left_to_openslide(tmp_path):
    image = picture(600, 600)
    alpha = np.concatenate([image, np.full_like(image[..., :1], 255)], -1)
    for name, pixels, more in [
        ("deflate", image, {"compression": "zlib"}),
        ("planes", image.transpose(2, 0, 1), {"planarconfig": "separate"}),
        ("alpha", alpha, {"extrasamples": ["unassalpha"]}),
    ]:
        path = tmp_path / f"{name}.tiff"
        tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", **more)
        with Slide(path) as slide:
            assert not slide.is_native(1.0)
            assert slide.jpeg_grid(1.0) is None
            assert (slide.read_scaled(3, 5, (300, 200), 1.0) == image[5:305, 3:203]).all()
    path = write_tiff(tmp_path / "jpeg.tiff", [image, image[::2, ::2]])
    with Slide(path, native=False) as slow, Slide(path) as fast:
        assert not slow.is_native(1.0)
        assert slow.jpeg_grid(1.0) is None
        for scale in (0.5, 1.5, 2.01, 4.0):
            assert fast.jpeg_grid(scale) is None


def test_a_level_whose_pixels_differ_is_left_to_openslide(tmp_path, monkeypatch):
    path = write_tiff(tmp_path / "a.tiff", [picture(600, 600)])
    with Slide(path) as slide:
        assert slide.is_native(1.0)
        right = slide.read_scaled(0, 0, (300, 300), 1.0)
    wrong = native.Decoder(lambda _: np.zeros((256, 256, 3), np.uint8))
    monkeypatch.setattr(native, "decoder_of", lambda *_: wrong)
    with Slide(path) as slide:
        assert not slide.is_native(1.0)
        assert slide.jpeg_grid(1.0) is None
        assert (slide.read_scaled(0, 0, (300, 300), 1.0) == right).all()


def alike(fast: Slide, slow: Slide, x: int, y: int, scale: float) -> bool:
    """Whether both read a box, of the same pixels; else neither does."""
    try:
        right = slow.read_scaled(x, y, (256, 256), scale)
    except SlideError:
        with pytest.raises(SlideError, match=f"at x={x}, y={y} .*damaged there"):
            fast.read_scaled(x, y, (256, 256), scale)
        return False
    assert (fast.read_scaled(x, y, (256, 256), scale) == right).all()
    return True


@pytest.mark.parametrize("aperio", [False, True])
def test_missing_tiles_are_what_openslide_makes_of_them(tmp_path, aperio):
    said = "Aperio Image Library v11\r\n1024x1024 (256x256)|MPP = 0.5" if aperio else None
    levels = [picture(1024, 1024), picture(512, 512)]
    path = write_tiff(tmp_path / "a.svs", levels, description=said)
    spoil(path, 6, "missing")
    with Slide(path) as fast, Slide(path, native=False) as slow:
        assert fast.is_native(1.0) != aperio
        assert fast.is_native(2.0) != aperio
        places = product((256, 500, 512), (0, 250, 256), (1.0, 2.0))
        assert sum(alike(fast, slow, *place) for place in places) >= 4


@pytest.mark.parametrize("how", ["missing", "zero", "ended"])
def test_a_stream_that_is_missing_or_damaged_is_an_error(tmp_path, how):
    path = write_tiff(tmp_path / "a.tiff", [picture(1024, 1024)])
    spoil(path, 6, how)
    with Slide(path) as slide:
        grid = slide.jpeg_grid(1.0)
        assert grid is not None
        for row, col in [(1, 2), (1, 2)]:
            with pytest.raises(SlideError, match=r"cannot read slide .* at x=512, y=256 \(level 0"):
                grid.encoded(row, col)
        assert len(grid.encoded(1, 1)) > 1000


def test_reading_moves_no_position_in_the_file(synthetic):
    """Processes that were forked share it, and one would get the bytes of the other."""
    with Slide(synthetic["ring"]) as slide:
        assert slide.is_native(1.0)
        source = slide._source
        assert isinstance(source, OpenSlideFile)
        file = source._opened_tiles()._file
        position = file.tell()
        assert slide.read_scaled(512, 256, (256, 256), 1.0).shape == (256, 256, 3)
        assert file.tell() == position


def test_a_tile_that_says_it_is_larger_than_its_file_is_damaged(tmp_path):
    """As many bytes were asked for as it said, and that was more memory than there is."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, picture(96, 96), tile=(32, 32), compression="jpeg")
    with Slide(path) as slide:
        levels = native.tile_levels(path, slide.properties)
    lengths = levels[0].lengths.copy()
    lengths[0] = 2**45
    tiles = native.NativeTiles(path, {0: levels[0]._replace(lengths=lengths)})
    with pytest.raises(ValueError, match="beyond the end of the file"):
        tiles.read(0, 0, 0, (32, 32), (255, 255, 255))
    assert tiles.read(0, 32, 32, (32, 32), (255, 255, 255)) is not None
    with pytest.raises(ValueError, match="beyond the end of the file"):
        tiles.stream(0, 0)
    tiles.close()


def test_boxes_begin_at_tiles(synthetic):
    with Slide(synthetic["ring"]) as slide:
        grid = slide.jpeg_grid(1.0)
        assert grid is not None
        box = grid.box(256, 900, 512, 2304)
        assert (box.shape, box.tiles) == ((644, 1792, 3), (3, 7))
        inner = box.box(256, 300, 256, 512)
        assert (inner.shape, inner.tiles) == ((44, 256, 3), (1, 1))
        assert box.encoded(1, 1) == inner.encoded(0, 0) == grid.encoded(2, 3)
        for row, col in [(3, 0), (0, 7), (-1, 0)]:
            with pytest.raises(IndexError, match="of 3 x 7"):
                box.encoded(row, col)
        for wrong in [(0, 10, 5, 10), (128, 256, 0, 256)]:
            with pytest.raises(ValueError, match="within a tile of 256 x 256"):
                grid.box(*wrong)
        for wrong in [(0, 0, 0, 10), (0, 1601, 0, 10), (-256, 0, 0, 10), (0, 10, 0, 2305)]:
            with pytest.raises(ValueError, match="not inside 1600 x 2304"):
                grid.box(*wrong)
