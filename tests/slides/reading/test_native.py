from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import tifffile

from spatialdl.data import jpeg as jpeg_codec
from spatialdl.errors import SlideError
from spatialdl.slides.reading import decoding, native
from spatialdl.slides.reading.openslide_file import OpenSlideFile, composited
from spatialdl.slides.reading.reader import Slide
from tests.slides.tiled_tiffs import jpeg, picture, write_tiff

Bytes = npt.NDArray[np.uint8]
BOXES = [
    *((0, 0, 240, 240), (256, 512, 256, 256), (17, 33, 100, 300), (-20, -30, 64, 64)),
    *((-400, 0, 64, 64), (100, 100, 700, 650), (1, 5000, 10, 10)),
]


@pytest.fixture(params=["strict", "silent"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a decoder that tells of damage, if there is one, and with one that does not."""
    if request.param == "silent":
        monkeypatch.setattr(jpeg_codec, "simplejpeg", None)
    elif jpeg_codec.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    return str(request.param)


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


def test_synthetic_slides(synthetic: dict[str, Path], both: str) -> None:
    assert max(differences(synthetic["ring"], 3)) == 0


def test_a_real_jpeg_slide_of_abbreviated_streams(real: Path, both: str) -> None:
    assert max(differences(real / "CMU-1-Small-Region.svs")) == 0
    assert max(differences(real / "bad" / "all-white.svs")) == 0


def test_a_real_jpeg_2000_slide(real: Path) -> None:
    path = real / "tcga-cr-7395-01a-01-ts1.svs"
    assert max(differences(path)) == 0
    # its other level is 2.0005 times as coarse: openslide interpolates nearly everywhere
    source = OpenSlideFile(path)
    assert source.is_native(1)
    with openslide.OpenSlide(path) as raw:
        for x, y in [(0, 0), (2000, 1000)]:
            got = source.read(x, y, 1, (90, 80), True)
            assert (got == from_openslide(raw, x, y, 1, 90, 80)).all()


@pytest.mark.parametrize(
    ("photometric", "colour", "subsampling"),
    [
        ("ycbcr", "YCBCR", "420"),
        ("ycbcr", "YCBCR", "422"),
        ("ycbcr", "YCBCR", "444"),
        ("rgb", "RGB", "444"),
    ],
)
def test_colours_of_jpeg(
    tmp_path: Path, both: str, photometric: str, colour: str, subsampling: str
) -> None:
    path = write_tiff(
        tmp_path / "a.tiff",
        [picture(900, 1100), picture(450, 550)],
        lambda tile: jpeg(tile, colour, subsampling),
        photometric,
        bigtiff=True,
        subsampling={"420": (2, 2), "422": (2, 1), "444": (1, 1)}[subsampling],
        compressionargs={"outcolorspace": colour.lower()},
    )
    with tifffile.TiffFile(path) as tiff:
        assert tiff.pages.first.photometric.name == colour
    assert max(differences(path, 2)) == 0


def test_grey_jpeg(tmp_path: Path, both: str) -> None:
    path = write_tiff(
        tmp_path / "a.tiff",
        [picture(700, 600)[..., 0]],
        photometric="minisblack",
        encode=lambda tile: jpeg(tile, "GRAYSCALE"),
    )
    assert max(differences(path)) == 0


@pytest.mark.parametrize("compression", [33003, 33005])
def test_jpeg_2000_of_aperio(tmp_path: Path, compression: int) -> None:
    def encode(tile: Bytes) -> bytes:
        # 33003 holds Y, Cb, Cr as if they were any three channels
        return bytes(
            imagecodecs.jpeg2k_encode(tile, codecformat="J2K", level=60, mct=compression == 33005)
        )

    path = write_tiff(
        tmp_path / "a.svs",
        [picture(700, 600)],
        encode,
        "rgb",
        compression,
        "Aperio Image Library v11\r\n600x700 (256x256)|MPP = 0.5",
    )
    # the transform of openslide and ours round differently
    assert max(differences(path)) <= (1 if compression == 33003 else 0)


def test_other_tiles_are_left_to_openslide(tmp_path: Path) -> None:
    image = picture(600, 600)
    kinds = {
        "deflate": {"compression": "zlib"},
        "raw": {},
        "planes": {"planarconfig": "separate"},
        "alpha": {"extrasamples": ["unassalpha"]},
    }
    for name, more in kinds.items():
        pixels = image.transpose(2, 0, 1) if name == "planes" else image
        if name == "alpha":
            pixels = np.concatenate([image, np.full_like(image[..., :1], 255)], -1)
        path = tmp_path / f"{name}.tiff"
        tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", **more)
        with Slide(path) as slide:
            assert not slide.is_native(1.0)
            assert (slide.read_scaled(3, 5, (300, 200), 1.0) == image[5:305, 3:203]).all()


def test_two_pages_of_one_size_are_left_to_openslide(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "a.tiff", [picture(600, 600), picture(600, 600) // 2])
    with Slide(path) as slide:
        assert not slide.is_native(1.0)


def test_a_level_whose_pixels_differ_is_left_to_openslide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiff(tmp_path / "a.tiff", [picture(600, 600)])
    with Slide(path) as slide:
        assert slide.is_native(1.0)
        right = slide.read_scaled(0, 0, (300, 300), 1.0)
    wrong = decoding.Decoder(lambda _: np.zeros((256, 256, 3), np.uint8), silent=False)
    monkeypatch.setattr(native, "decoder_of", lambda *_: wrong)
    with Slide(path) as slide:
        assert not slide.is_native(1.0)
        assert (slide.read_scaled(0, 0, (300, 300), 1.0) == right).all()


def test_reading_without_it(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"], native=False) as slide, Slide(synthetic["ring"]) as fast:
        assert not slide.is_native(1.0)
        assert fast.is_native(1.0)
        for x, y, rows, cols in BOXES:
            got = slide.read_scaled(x, y, (rows, cols), 2.0)
            assert (got == fast.read_scaled(x, y, (rows, cols), 2.0)).all()


@pytest.mark.parametrize("seed", range(6))
def test_damage_is_found_as_openslide_finds_it(tmp_path: Path, both: str, seed: int) -> None:
    path = write_tiff(tmp_path / "a.tiff", [picture(1024, 1024)])
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        places = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(seed)
    for number in (1, 6, 11, 14):  # not what the level is tried on
        offset, length = places[number]
        at = offset + int(random.integers(length // 4, length - 20))
        kind = number % 3
        content[at : at + 8] = random.bytes(8) if kind else bytes(8)
        if kind == 2:
            content[at : offset + length] = bytes(offset + length - at)
    path.write_bytes(content)
    failed = 0
    with Slide(path) as fast, Slide(path, native=False) as slow:
        assert fast.is_native(1.0)
        for number in range(16):
            x, y = number % 4 * 256, number // 4 * 256
            try:
                right = slow.read_scaled(x, y, (256, 256), 1.0)
            except SlideError:
                failed += 1
                with pytest.raises(SlideError, match=f"at x={x}, y={y} .*damaged there"):
                    fast.read_scaled(x, y, (256, 256), 1.0)
                with pytest.raises(SlideError, match="damaged there"):
                    fast.read_scaled(x - 9, y - 9, (256, 256), 1.0)
            else:
                assert (fast.read_scaled(x, y, (256, 256), 1.0) == right).all()
    assert failed >= 1


def without_tiles(path: Path, page: int, numbers: list[int]) -> None:
    """Set byte counts of tiles to nothing."""
    with tifffile.TiffFile(path) as tiff:
        tag = tiff.pages[page].tags["TileByteCounts"]
        size = {3: 2, 4: 4, 16: 8}[int(tag.dtype)]
        place = tag.valueoffset
    content = bytearray(path.read_bytes())
    for number in numbers:
        content[place + number * size : place + (number + 1) * size] = bytes(size)
    path.write_bytes(content)


@pytest.mark.parametrize("aperio", [False, True])
def test_missing_tiles_are_what_openslide_makes_of_them(
    tmp_path: Path, both: str, aperio: bool
) -> None:
    path = write_tiff(
        tmp_path / "a.svs",
        [picture(1024, 1024), picture(512, 512)],
        description="Aperio Image Library v11\r\n1024x1024 (256x256)|MPP = 0.5" if aperio else None,
    )
    without_tiles(path, 0, [6])
    read = 0
    with Slide(path) as fast, Slide(path, native=False) as slow:
        assert fast.is_native(1.0) != aperio
        assert fast.is_native(2.0) != aperio
        for scale, side in ((1.0, 1024), (2.0, 512)):
            for x, y in [(256, 0), (512, 256), (500, 250), (0, 512)]:
                if x / scale >= side:
                    continue
                try:
                    right = slow.read_scaled(x, y, (256, 256), scale)
                except SlideError:
                    with pytest.raises(SlideError, match="damaged there"):
                        fast.read_scaled(x, y, (256, 256), scale)
                else:
                    read += 1
                    assert (fast.read_scaled(x, y, (256, 256), scale) == right).all()
    assert read >= 4


def test_decoded_tiles_are_kept_within_bounds(
    synthetic: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    original = native.NativeTiles._decoded

    def counted(self: native.NativeTiles, level: int, number: int) -> Bytes | None:
        decoded.append(number)
        return original(self, level, number)

    monkeypatch.setattr(native.NativeTiles, "_decoded", counted)
    source = OpenSlideFile(synthetic["ring"])
    assert source.is_native(0)
    decoded.clear()
    for x in (10, 20, 30):
        source.read(x, 10, 0, (256, 256), True)
    assert sorted(decoded) == [0, 1, 9, 10]
    monkeypatch.setattr(native, "_CACHE", 3 * 256 * 256 * 3)
    source.read(10, 10, 0, (600, 1800), True)
    tiles = source._opened_tiles()
    assert tiles._bytes == sum(tile.nbytes for tile in tiles._kept.values()) <= 3 * 256 * 256 * 3
    source.close()


def test_reading_moves_no_position_in_the_file(synthetic: dict[str, Path]) -> None:
    """Processes that were forked share it, and one would get the bytes of the other."""
    with Slide(synthetic["ring"]) as slide:
        assert slide.is_native(1.0)
        source = slide._source
        assert isinstance(source, OpenSlideFile)
        file = source._opened_tiles()._file
        position = file.tell()
        assert slide.read_scaled(512, 256, (256, 256), 1.0).shape == (256, 256, 3)
        assert file.tell() == position


def test_a_tile_that_says_it_is_larger_than_its_file_is_left_to_openslide(tmp_path: Path) -> None:
    """As many bytes were asked for as it said, and that was more memory than there is."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, picture(96, 96), tile=(32, 32), compression="jpeg")
    with Slide(path) as slide:
        levels = native.tile_levels(path, slide.properties)
    lengths = levels[0].lengths.copy()
    lengths[0] = 2**45
    tiles = native.NativeTiles(path, {0: levels[0]._replace(lengths=lengths)}, lambda *_: True)
    assert tiles.read(0, 0, 0, (32, 32), (255, 255, 255)) is None
    assert tiles.read(0, 32, 32, (32, 32), (255, 255, 255)) is not None
    with pytest.raises(ValueError, match="beyond the end of the file"):
        tiles.stream(0, 0)
    tiles.close()
