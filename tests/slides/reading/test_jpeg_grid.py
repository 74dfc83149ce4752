from __future__ import annotations

import io
from pathlib import Path

import imagecodecs
import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data import jpeg as jpeg_codec
from spatialdl.data.jpeg import JpegStream
from spatialdl.errors import SlideError
from spatialdl.slides.reading import decoding, native
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.reader import Slide
from tests.slides.tiled_tiffs import jpeg, picture, write_tiff

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=["strict", "silent"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a decoder that tells of damage and with one that does not."""
    if request.param == "silent":
        monkeypatch.setattr(jpeg_codec, "simplejpeg", None)
    return str(request.param)


def decoded(stream: bytes) -> list[Bytes]:
    """RGB of a stream as decoders give it that know nothing of the slide."""
    return [
        np.asarray(Image.open(io.BytesIO(stream)).convert("RGB")),
        np.asarray(simplejpeg.decode_jpeg(stream, "RGB")),
        np.asarray(imagecodecs.jpeg8_decode(stream, outcolorspace="RGB")),
    ]


def check_grid(path: Path, scale: float, channels: int = 3, most: int = 200) -> JpegGrid:
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
            for got in decoded(stream):
                assert got.shape == (high, wide, 3)
                assert np.abs(got[: size[0], : size[1]].astype(int) - right).max() <= 1
        return grid


def test_synthetic_slides(synthetic: dict[str, Path], both: str) -> None:
    for scale, size in [(1.0, (1600, 2304)), (2.0, (800, 1152))]:
        grid = check_grid(synthetic["ring"], scale, most=12)
        assert (grid.shape, grid.chunk) == ((*size, 3), (256, 256))


def test_a_real_slide_of_abbreviated_streams(real: Path, both: str) -> None:
    grid = check_grid(real / "CMU-1-Small-Region.svs", 1.0, most=30)
    assert (grid.shape, grid.chunk) == ((2967, 2220, 3), (240, 240))
    assert grid.tiles == (13, 10)
    check_grid(real / "bad" / "all-white.svs", 1.0, most=5)


@pytest.mark.parametrize(
    ("photometric", "colour", "subsampling"),
    [
        ("ycbcr", "YCBCR", "420"),
        ("ycbcr", "YCBCR", "422"),
        ("ycbcr", "YCBCR", "444"),
        ("rgb", "RGB", "444"),
    ],
)
def test_colours(
    tmp_path: Path, both: str, photometric: str, colour: str, subsampling: str
) -> None:
    path = write_tiff(
        tmp_path / "a.tiff",
        [picture(600, 700), picture(300, 350)],
        lambda tile: jpeg(tile, colour, subsampling),
        photometric,
        subsampling={"420": (2, 2), "422": (2, 1), "444": (1, 1)}[subsampling],
        compressionargs={"outcolorspace": colour.lower()},
    )
    check_grid(path, 1.0)
    check_grid(path, 2.0)


def test_grey(tmp_path: Path, both: str) -> None:
    path = write_tiff(
        tmp_path / "a.tiff",
        [picture(600, 700)[..., 0]],
        lambda tile: jpeg(tile, "GRAYSCALE"),
        "minisblack",
    )
    check_grid(path, 1.0, channels=1)


def test_levels_that_are_not_read_from_jpeg_tiles(tmp_path: Path) -> None:
    image = picture(600, 600)
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(256, 256), photometric="rgb")
    tifffile.imwrite(tmp_path / "strips.tiff", image, photometric="rgb")
    Image.fromarray(image).save(tmp_path / "a.jpg")
    path = write_tiff(tmp_path / "jpeg.tiff", [image, image[::2, ::2]])
    for other in ("a.tiff", "strips.tiff", "a.jpg"):
        with Slide(tmp_path / other) as slide:
            assert slide.jpeg_grid(1.0) is None
    with Slide(path, native=False) as slide:
        assert slide.jpeg_grid(1.0) is None
    with Slide(path) as slide:
        for scale in (0.5, 1.5, 2.01, 4.0):
            assert slide.jpeg_grid(scale) is None
        assert slide.jpeg_grid(2.0) is not None


def test_jpeg_2000_is_not_jpeg(real: Path) -> None:
    with Slide(real / "tcga-cr-7395-01a-01-ts1.svs") as slide:
        assert slide.is_native(1.0)
        assert slide.jpeg_grid(1.0) is None


def test_a_level_whose_pixels_differ_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiff(tmp_path / "a.tiff", [picture(600, 600)])
    right = decoding.decoder_of(decoding.JPEG, decoding.YCBCR, 3, None)
    assert right is not None
    wrong = right._replace(decode=lambda _: np.zeros((256, 256, 3), np.uint8))
    monkeypatch.setattr(native, "decoder_of", lambda *_: wrong)
    with Slide(path) as slide:
        assert slide.jpeg_grid(1.0) is None


def test_boxes_begin_at_tiles(synthetic: dict[str, Path]) -> None:
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


def test_places_of_reads(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        grid = slide.jpeg_grid(2.0)
        assert grid is not None
        found = grid.at(512, 1024, (256, 512))
        assert found is not None
        assert found.shape == (256, 512, 3)
        assert found.encoded(0, 1) == grid.encoded(2, 2)
        assert grid.at(1536, 1024, (288, 384)) is not None
        for x, y, size in [
            *((513, 1024, (256, 256)), (256, 1024, (256, 256)), (-512, 0, (256, 256))),
            *((1536, 1024, (289, 384)), (1536, 1024, (288, 385)), (4608, 0, (1, 1))),
        ]:
            assert grid.at(x, y, size) is None


def spoil(path: Path, number: int, how: str) -> None:
    """Make a tile missing, zero from the middle on, or end there though its own end is left."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        tag = page.tags["TileByteCounts"]
        offset, length = page.dataoffsets[number], page.databytecounts[number]
        size = {3: 2, 4: 4, 16: 8}[int(tag.dtype)]
        place = tag.valueoffset + number * size
    content = bytearray(path.read_bytes())
    middle = offset + length // 2
    if how == "missing":
        content[place : place + size] = bytes(size)
    elif how == "zero":
        content[middle : offset + length] = bytes(offset + length - middle)
    else:
        content[middle : middle + 2] = b"\xff\xd9"
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "zero", "ended"])
def test_a_tile_that_is_missing_or_damaged_is_an_error(tmp_path: Path, both: str, how: str) -> None:
    path = write_tiff(tmp_path / "a.tiff", [picture(1024, 1024)])
    spoil(path, 6, how)
    with Slide(path) as slide:
        grid = slide.jpeg_grid(1.0)
        assert grid is not None
        for row, col in [(1, 2), (1, 2)]:
            with pytest.raises(SlideError, match=r"cannot read slide .* at x=512, y=256 \(level 0"):
                grid.encoded(row, col)
        assert len(grid.encoded(1, 1)) > 1000
        with ShardWriter(tmp_path / "set", codec="jpeg") as writer:
            writer.add(grid.box(0, 256, 0, 512))
            with pytest.raises(SlideError, match="at x=512, y=256"):
                writer.add(grid.box(256, 512, 512, 1024))
            writer.add(grid.box(512, 768, 512, 1024))
    assert len(ShardDataset(tmp_path / "set")) == 2


def test_a_closed_slide_is_opened_again(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        grid = slide.jpeg_grid(1.0)
        assert grid is not None
        first = grid.encoded(0, 0)
        slide.close()
        assert grid.encoded(0, 0) == first


@pytest.mark.parametrize("kind", ["tiles", "regions"])
def test_tiles_of_a_slide_go_into_shards_as_they_are(
    synthetic: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    boxes = [(256, 768, 512, 1024), (0, 512, 0, 512), (1024, 1536, 1792, 2304)]
    if kind == "regions":
        boxes = [(256, 1600, 512, 2304), (0, 100, 256, 300)]
    with (
        Slide(synthetic["ring"]) as slide,
        ShardWriter(tmp_path / "set", kind=kind, codec="jpeg") as writer,
    ):
        grid = slide.jpeg_grid(1.0)
        assert grid is not None
        for box in boxes:
            writer.add(grid.box(*box), slide=slide.name, xy=(box[2], box[0]))
        writer.close()
        data = ShardDataset(tmp_path / "set")
        for number, (row0, row1, col0, col1) in enumerate(boxes):
            right = slide.read_scaled(col0, row0, (row1 - row0, col1 - col0), 1.0)
            got = data.read(number)
            assert got.shape == right.shape
            assert np.abs(got.astype(int) - right).max() <= 1
