from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from spatialdl.slides.batch import identity
from spatialdl.slides.batch.identity import sampled_digest, slide_key
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.reading.reader import Slide


def test_a_key_tells_all_that_decides_on_tiles(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "mask.png"
    beside.write_bytes(b"one")
    label, settings = SlideLabel("x", "train"), {"mpp": 0.5, "filter": {"pen": 0.1}}
    with Slide(small / "a.tiff") as a, Slide(small / "b.tiff") as b:
        keys = [
            slide_key(a, "a", None, settings),
            slide_key(b, "a", None, settings),
            slide_key(a, "b", None, settings),
            slide_key(a, "a", label, settings),
            slide_key(a, "a", label._replace(label="y"), settings),
            slide_key(a, "a", label._replace(split="val"), settings),
            slide_key(a, "a", label._replace(mpp=0.25), settings),
            slide_key(a, "a", None, {**settings, "mpp": 1.0}),
            slide_key(a, "a", None, settings, [beside]),
        ]
        beside.write_bytes(b"two")
        keys.append(slide_key(a, "a", None, settings, [beside]))
        again = slide_key(a, "a", None, dict(reversed(settings.items())))
        monkeypatch.setattr(identity, "CUTTING_VERSION", -1)
        keys.append(slide_key(a, "a", None, settings))
    assert len(set(keys)) == len(keys)
    assert again == keys[0]


def test_where_a_slide_lies_and_since_when_does_not_matter(tmp_path: Path, small: Path) -> None:
    shutil.copy(small / "a.tiff", tmp_path / "other.tiff")
    os.utime(tmp_path / "other.tiff", (1, 1))
    keys = []
    for path in (small / "a.tiff", tmp_path / "other.tiff"):
        with Slide(path) as slide:
            keys.append(slide_key(slide, "a", None, {}))
    assert keys[0] == keys[1]


def test_a_digest_sees_length_start_middle_and_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = np.random.default_rng(0).integers(0, 256, 20 * 2**20, np.uint8)
    found = []
    for place in (None, 0, 19 * 2**20 * 7 // 15 + 3, len(content) - 1):
        other = content.copy()
        if place is not None:
            other[place] ^= 1
        path.write_bytes(other.tobytes())
        found.append(sampled_digest(path))
    path.write_bytes(content.tobytes() + b"\0")
    found.append(sampled_digest(path))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("size", [0, 1, 2**20 + 1, 3 * 2**20])
def test_small_files_are_seen_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(size))
    before = sampled_digest(path)
    path.write_bytes(bytes(size + 1))
    assert sampled_digest(path) != before
    for place in {0, size // 3, size // 2, size - 1} - {-1}:
        content = bytearray(size)
        if size:
            content[place] = 1
            path.write_bytes(content)
            assert sampled_digest(path) != before
