"""Any box that is read equals that of the array, for all ways of writing it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data import format as data_format
from spatialdl.data.codec import CODECS
from spatialdl.data.pixels import DTYPES
from spatialdl.data.raw_reading import IOS

SIDES = st.one_of(st.integers(1, 5), st.integers(1, 90))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    codec = draw(st.sampled_from(CODECS))
    tiles = draw(st.booleans())
    count = draw(st.integers(1, 4))
    sizes = [(draw(SIDES), draw(SIDES))] * count
    if not tiles:
        sizes = [(draw(SIDES), draw(SIDES)) for _ in range(count)]
    return {
        "codec": codec,
        "dtype": "uint8" if codec == "jpeg" else draw(st.sampled_from(DTYPES)),
        "channels": draw(st.sampled_from([1, 3] if codec == "jpeg" else [1, 2, 3, 5])),
        "kind": "tiles" if tiles else "regions",
        "sizes": sizes,
        "stripes": 1 if tiles else draw(st.integers(1, 5)),
        "chunk": draw(st.sampled_from([3, 16, 32, 512])),
        "masks": draw(st.booleans()),
        "shard_size": draw(st.sampled_from([1, 9_000, 2**29])),
        "io": draw(st.sampled_from(IOS)),
        "big_endian": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def images_of(case: dict[str, Any], rng: np.random.Generator) -> list[np.ndarray]:
    """Any bits, so floats with NaN and infinities too; as slices of larger arrays."""
    made = []
    for rows, cols in case["sizes"]:
        dtype = np.dtype(case["dtype"])
        shape = (rows + 1, cols + 1, case["channels"])
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        image = bits.view(dtype)[..., 0][1:, :-1]
        made.append(image.astype(dtype.newbyteorder(">")) if case["big_endian"] else image)
    return made


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def check(case: dict[str, Any], boxes: int) -> None:
    rng = np.random.default_rng(case["seed"])
    images = images_of(case, rng)
    masks = [rng.integers(0, 256, image.shape[:2], np.uint8) for image in images]
    keys = ("kind", "stripes", "codec", "shard_size")
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(Path(folder, "set"), **{key: case[key] for key in keys}) as writer:
            for image, mask in zip(images, masks, strict=True):
                writer.add(image, mask=mask if case["masks"] else None)
        data = ShardDataset(Path(folder, "set"), io=case["io"])
        assert (data.dtype, data.codec) == (case["dtype"], case["codec"])
        for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
            whole = image.astype(data.dtype)
            if case["codec"] == "jpeg":
                whole = data.read(number)
                assert whole.shape == image.shape
            for _ in range(boxes):
                row0, row1 = sorted(rng.integers(0, image.shape[0] + 1, 2).tolist())
                col0, col1 = sorted(rng.integers(0, image.shape[1] + 1, 2).tolist())
                box, cut = (row0, row1, col0, col1), np.s_[row0:row1, col0:col1]
                assert same(data.read(number, box), whole[cut])
                if case["masks"]:
                    assert same(data.read_mask(number, box), mask[cut])
            assert same(data.read(number), whole)
        data.verify()


def with_chunks(case: dict[str, Any], boxes: int) -> None:
    before = data_format.CHUNK
    data_format.CHUNK = case["chunk"]
    try:
        check(case, boxes)
    finally:
        data_format.CHUNK = before


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_boxes_are_those_of_the_arrays(case: dict[str, Any]) -> None:
    with_chunks(case, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_boxes_of_very_many_are_those_of_the_arrays(case: dict[str, Any]) -> None:
    with_chunks(case, 12)
