from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.encoded import Streams
from spatialdl.data.jpeg import decode, encode

RANDOM = np.random.default_rng(0)
CHUNK = (32, 48)


def picture(rows: int, cols: int, channels: int = 3) -> np.ndarray:
    slope = np.add.outer(np.arange(rows) * 2, np.arange(cols))[..., None] // 2 % 200
    return (slope + RANDOM.integers(0, 40, (rows, cols, channels))).astype(np.uint8)


def streams_of(image: np.ndarray, quality: int = 70) -> Streams:
    """An image as streams of chunks, its last pixels repeated to whole ones."""
    (rows, cols, _), (high, wide) = image.shape, CHUNK
    padded = np.pad(image, ((0, -rows % high), (0, -cols % wide), (0, 0)), mode="edge")
    streams = [
        bytes(encode(padded[row : row + high, col : col + wide], quality))
        for row in range(0, rows, high)
        for col in range(0, cols, wide)
    ]
    return Streams(image.shape, CHUNK, streams)


def pixels_of(image: Streams) -> np.ndarray:
    """What the streams hold."""
    rows, cols, channels = image.shape
    across = -(-cols // CHUNK[1])
    parts = [decode(stream, (*CHUNK, channels)) for stream in image.streams]
    lines = [np.concatenate(parts[k : k + across], 1) for k in range(0, len(parts), across)]
    return np.concatenate(lines)[:rows, :cols]


@pytest.mark.parametrize("size", [(64, 96), (70, 50), (20, 30)])
@pytest.mark.parametrize("channels", [1, 3])
def test_streams_are_stored_as_they_are(
    tmp_path: Path, size: tuple[int, int], channels: int
) -> None:
    images = [streams_of(picture(*size, channels)) for _ in range(3)]
    with ShardWriter(tmp_path / "set", codec="jpeg") as writer:
        for number, image in enumerate(images):
            writer.add(image, slide="s", xy=(number, 7))
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        dataset = file["images"]
        assert (dataset.shape, dataset.chunks) == ((3, *size, channels), (1, *CHUNK, channels))
        for number, image in enumerate(images):
            for row in range(0, size[0], CHUNK[0]):
                for col in range(0, size[1], CHUNK[1]):
                    stored = dataset.id.read_direct_chunk((number, row, col, 0))[1]
                    assert bytes(stored) == image.encoded(row // CHUNK[0], col // CHUNK[1])
    data = ShardDataset(tmp_path / "set")
    data.verify()
    for number, image in enumerate(images):
        assert (data.read(number) == pixels_of(image)).all()
        assert data.sample(number).x == number


def test_pixels_are_encoded(tmp_path: Path) -> None:
    image = picture(600, 530)
    with ShardWriter(tmp_path / "set", codec="jpeg", quality=80) as writer:
        writer.add(image, mask=image[..., 0])
        writer.add(image[..., ::-1], mask=image[..., 1])
    data = ShardDataset(tmp_path / "set")
    right = decode(encode(image[:512, :512], 80), (512, 512, 3))
    assert (data.read(0, (0, 512, 0, 512)) == right).all()
    assert np.abs(data.read(1).astype(int) - image[..., ::-1]).mean() < 10
    assert (data.read_mask(0) == image[..., 0]).all()
    assert (data.read_mask(1) == image[..., 1]).all()
    data.close()
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert (file["masks"][1] == image[..., 1]).all()
        with pytest.raises(OSError, match=r"."):
            file["images"][0]


def test_streams_and_pixels_of_one_data_set(tmp_path: Path) -> None:
    image = streams_of(picture(64, 96))
    for first in (0, 1):
        with ShardWriter(tmp_path / "set", codec="jpeg", chunk=CHUNK, overwrite=True) as writer:
            for number in (first, 1 - first):
                writer.add(image if number == 0 else pixels_of(image))
        data = ShardDataset(tmp_path / "set")
        assert (data.read(first) == pixels_of(image)).all()
        again = data.read(1 - first).astype(int)
        assert 0 < np.abs(again - pixels_of(image)).mean() < 8


def test_shards_are_as_full_as_raw_ones(tmp_path: Path) -> None:
    tile = picture(64, 96)
    counts = []
    for codec in ("raw", "jpeg"):
        path = tmp_path / codec
        with ShardWriter(path, codec=codec, shard_size=3 * tile.size + 1) as writer:
            for _ in range(7):
                writer.add(tile)
        shards = json.loads((path / "manifest.json").read_text())["shards"]
        counts.append([shard["samples"] for shard in shards])
    assert counts == [[3, 3, 1]] * 2


def test_what_does_not_fit_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    image = streams_of(picture(64, 96))
    cut = list(image.streams)
    cut[3] = cut[3][: len(cut[3]) // 2]
    with ShardWriter(tmp_path / "set", codec="jpeg") as writer:
        for wrong, says in [
            (replace(image, streams=cut), "stream at row 1, column 1 of the image: "),
            (replace(image, streams=cut[:3]), "has 3 streams, expected 2 x 2"),
            (replace(image, chunk=(64, 48)), r"has 4 streams"),
            (replace(image, chunk=(48, 48)), "the JPEG is 32 x 48 .*, expected 48 x 48"),
            (replace(image, shape=(64, 96, 1)), "with 3 channels, expected .* 1 channel"),
            (picture(64, 96, 2), "2 channels, but codec 'jpeg' supports 1 or 3"),
        ]:
            with pytest.raises(ValueError, match=says):
                writer.add(wrong)
        writer.add(image)
        other = Streams((64, 96, 3), (64, 96), [encode(picture(64, 96))])
        with pytest.raises(ValueError, match=r"chunks of \(64, 96\), the data set has \(32, 48\)"):
            writer.add(other)
        writer.add(image)
    data = ShardDataset(tmp_path / "set")
    assert len(data) == 2
    assert (data.read(1) == pixels_of(image)).all()


def test_raw_shards_take_no_streams(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        with pytest.raises(ValueError, match="use codec='jpeg'"):
            writer.add(streams_of(picture(64, 96)))
        writer.add(picture(8, 8))
