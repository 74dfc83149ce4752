"""Rows of a manifest: shards and samples.

Their parsers raise KeyError or ValueError if a field is missing or of the wrong type.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from spatialdl.common import fields

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.h5")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard file: name inside the folder, bytes, SHA-256 and number of samples."""

    file: str
    bytes: int
    sha256: str
    samples: int


@dataclass(frozen=True, slots=True)
class TileSample:
    """Location of a tile (`shard`, row `index` of its datasets) and its metadata.

    `label` is an index into the classes or None; `x`, `y` are level-0 pixels of `slide`.
    """

    shard: int
    index: int
    label: int | None
    split: str | None
    slide: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class RegionBand:
    """Rows `row0` to `row0 + rows` of a region (slices of a volume), in one shard."""

    shard: int
    row0: int
    rows: int


@dataclass(frozen=True, slots=True)
class RegionSample:
    """A region of any size: one band if stored in a single shard, several if striped."""

    id: str
    height: int
    width: int
    mpp: float | None
    striped: bool
    bands: tuple[RegionBand, ...]
    label: int | None
    split: str | None
    slide: str
    x: int
    y: int

    @property
    def size(self) -> tuple[int, ...]:
        """(Rows, columns); of a volume (slices, rows, columns)."""
        return self.height, self.width


@dataclass(frozen=True, slots=True)
class VolumeSample(RegionSample):
    """A volume: a region with an additional leading dim, along which its bands lie.

    Attributes:
        depth: number of slices.
        spacing: millimetres between neighbouring slices, rows and columns, if known.
        affine: the first three rows of the matrix that maps (slice, row, column, 1) to
            millimetres to the right, the front and the top of the patient (RAS+), if known.
    """

    depth: int
    spacing: tuple[float, ...] | None
    affine: tuple[tuple[float, ...], ...] | None

    @property
    def size(self) -> tuple[int, ...]:
        """(Slices, rows, columns)."""
        return self.depth, self.height, self.width


Sample = TileSample | RegionSample


def parse_shard(row: dict[str, Any]) -> ShardInfo:
    """Parse a shard."""
    numbers = fields.whole(row, "bytes"), fields.whole(row, "samples")
    shard = ShardInfo(fields.text(row, "file"), numbers[0], fields.text(row, "sha256"), numbers[1])
    if not _SHARD_NAME.fullmatch(shard.file):
        raise ValueError(f"shard file {fields.shown(shard.file)} is not a plain name ending in .h5")
    return shard


def parse_tile(row: dict[str, Any]) -> TileSample:
    """Parse a tile."""
    return TileSample(
        shard=fields.place(row, "shard"), index=fields.place(row, "index"), **_common(row)
    )


def parse_region(row: dict[str, Any]) -> RegionSample:
    """Parse a region from its `asdict` form."""
    return RegionSample(**_region(row))


def parse_volume(row: dict[str, Any]) -> VolumeSample:
    """Parse a volume from its `asdict` form."""
    return VolumeSample(
        depth=fields.whole(row, "depth", 1),
        spacing=None if row["spacing"] is None else spacing_of(row["spacing"]),
        affine=None if row["affine"] is None else affine_of(row["affine"]),
        **_region(row),
    )


def spacing_of(value: Any) -> tuple[float, ...]:
    """Validate the spacing of a volume.

    Raises:
        ValueError: it is not three finite numbers above 0.
    """
    numbers = _floats(value, 3)
    if numbers is None or min(numbers) <= 0:
        raise ValueError(f"spacing is {fields.shown(value)}, expected three numbers above 0, in mm")
    return numbers


def affine_of(value: Any) -> tuple[tuple[float, ...], ...]:
    """Validate the affine of a volume.

    Raises:
        ValueError: it is not three rows of four finite numbers.
    """
    rows = [_floats(row, 4) for row in value] if isinstance(value, list | tuple) else []
    matrix = tuple(row for row in rows if row is not None)
    if not len(matrix) == len(rows) == 3:
        raise ValueError(f"affine is {fields.shown(value)}, expected three rows of four numbers")
    return matrix


def _floats(value: Any, count: int) -> tuple[float, ...] | None:
    """`count` finite numbers as floats, or None if `value` is anything else."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    if any(type(x) not in (int, float) or not isfinite(x) for x in value):
        return None
    return tuple(map(float, value))


def _region(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": fields.text(row, "id"),
        "height": fields.whole(row, "height", 1),
        "width": fields.whole(row, "width", 1),
        "mpp": None if row["mpp"] is None else fields.positive(row, "mpp"),
        "striped": fields.flag(row, "striped"),
        "bands": tuple(
            RegionBand(
                fields.whole(b, "shard"), fields.whole(b, "row0"), fields.whole(b, "rows", 1)
            )
            for b in fields.tables(row, "bands")
        ),
        **_common(row),
    }


def _common(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "label": None if row["label"] is None else fields.place(row, "label"),
        # Many samples share few names: interning keeps one copy of each.
        "split": None if row["split"] is None else sys.intern(fields.text(row, "split")),
        "slide": sys.intern(fields.text(row, "slide")),
        "x": fields.place(row, "x"),
        "y": fields.place(row, "y"),
    }


def shards_of(sample: Sample) -> list[int]:
    """Numbers of the shards that hold a sample."""
    if isinstance(sample, RegionSample):
        return [band.shard for band in sample.bands]
    return [sample.shard]


def with_shards(sample: Sample, number: Callable[[int], int]) -> Sample:
    """A sample with its shards renumbered."""
    if isinstance(sample, RegionSample):
        bands = tuple(replace(band, shard=number(band.shard)) for band in sample.bands)
        return replace(sample, bands=bands)
    return replace(sample, shard=number(sample.shard))


def as_row(row: ShardInfo | Sample) -> dict[str, Any]:
    """A shard or sample as a JSON object; `asdict` takes longer than cutting a small tile."""
    if isinstance(row, RegionSample):
        return asdict(row)
    return {name: getattr(row, name) for name in row.__slots__}
