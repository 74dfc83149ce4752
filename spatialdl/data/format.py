"""The format of a data set folder: manifest, names and chunk shapes.

A folder is one `manifest.json` and its shards, plain HDF5 files. The manifest is written last, so
a folder with a manifest is complete. It records the length and SHA-256 of each shard, so a
truncated or replaced shard is detected when the folder is opened, before training starts.

::

    manifest.json
        format_version, kind, classes, splits, channels, dtype, tile_size, mpp, masks, codec,
        made_with
        shards:   [{file, bytes, sha256, samples}, ...]
        samples:  [{shard, index, label, split, slide, x, y}, ...]                     tiles
                  [{id, height, width, mpp, bands, label, split, slide, x, y}, ...]    regions
    shard-00000.h5
        images (N, rows, cols, channels), coords (N, 2), labels (N,), slides (N,)
        [masks (N, rows, cols) uint8]                                                  tiles
        regions/<id>/image            or, striped,  regions/<id>/image/00000 ...       regions

Volumes are regions with an additional leading dim, along which their bands lie:
`regions/<id>/image` is (slices, rows, cols, channels). Their samples also have `depth`, `spacing`
and `affine`; `row0` and `rows` of their bands count slices.

With codec "jpeg" each image chunk is a complete JPEG stream, which `read_direct_chunk` returns;
masks stay raw. With "zstd" and "lz4" image and mask chunks are the output of the HDF5 filters of
these names. The dataset records its filters, so a reader without them fails instead of returning
wrong pixels. Images are of `dtype`, little-endian, masks of uint8.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from spatialdl.common import fields
from spatialdl.common.files import file_status, replacing
from spatialdl.data.codec import CODECS, Codec
from spatialdl.data.image_source import DTYPES
from spatialdl.data.samples import (
    Sample,
    ShardInfo,
    TileSample,
    as_row,
    parse_region,
    parse_shard,
    parse_tile,
    parse_volume,
    shards_of,
    with_shards,
)
from spatialdl.errors import ShardError

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
CHUNK = 512
VOLUME_CHUNK = 64
NO_LABEL = -1
UNLABELLED = 255
"""Mask value of a pixel of unknown class; losses and metrics ignore it."""

T = TypeVar("T")
Kind = Literal["tiles", "regions", "volumes"]
KINDS: tuple[Kind, ...] = ("tiles", "regions", "volumes")
_BLOCK_BYTES = 2**20
_LISTED = 3  # samples and slides listed by name
_USUAL_SPLITS = ("train", "val", "test")


@dataclass(slots=True)
class Manifest:
    """The table of contents of a data set folder.

    `tile_size` is (rows, cols) for tiles and None for regions. `codec` and `dtype` apply to
    images. `made_with` holds free-form settings of the program that wrote the folder; it is not
    interpreted.
    """

    kind: Kind
    classes: list[str]
    channels: int
    tile_size: tuple[int, int] | None = None
    mpp: float | None = None
    masks: bool = False
    codec: Codec = "raw"
    dtype: str = "uint8"
    shards: list[ShardInfo] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    made_with: dict[str, Any] = field(default_factory=dict)

    @property
    def splits(self) -> list[str]:
        """Splits in use: train, val and test first."""
        return order_splits(s.split for s in self.samples if s.split is not None)

    def describe_samples(self, shard: int) -> str:
        """List the samples in a shard: "samples 3, 4, 5 and 20 more (of a1)"."""
        found = [number for number, sample in enumerate(self.samples) if shard in shards_of(sample)]
        if not found:
            return "no samples"
        named = ", ".join(map(str, found[:_LISTED]))
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        slides = sorted({self.samples[number].slide for number in found} - {""})
        where = f" (of {', '.join(slides[:_LISTED])}{', ...' * (len(slides) > _LISTED)})"
        return f"sample{'s' * (len(found) > 1)} {named}{more}{where if slides else ''}"

    def of_splits(self, splits: Sequence[str]) -> Manifest:
        """The manifest restricted to some splits and their shards.

        Raises:
            ValueError: a split does not exist.
        """
        for split in splits:
            if split not in self.splits:
                known = ", ".join(self.splits) or "none"
                raise ValueError(f"the data set has no split {split!r}; its splits: {known}")
        samples = [sample for sample in self.samples if sample.split in splits]
        used = sorted({shard for sample in samples for shard in shards_of(sample)})
        number = {shard: n for n, shard in enumerate(used)}
        return replace(
            self,
            shards=[self.shards[shard] for shard in used],
            samples=[with_shards(sample, number.__getitem__) for sample in samples],
        )

    def save(self, folder: Path) -> None:
        """Write `manifest.json` into `folder` atomically."""
        head: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "classes": self.classes,
            "splits": self.splits,
            "channels": self.channels,
            "dtype": self.dtype,
            "tile_size": self.tile_size,
            "mpp": self.mpp,
            "masks": self.masks,
            "codec": self.codec,
            "made_with": self.made_with,
        }
        with replacing(folder / MANIFEST) as out:
            # One sample per line, so that the file stays readable and works with grep.
            out.write(json.dumps(head, indent=1)[:-2].encode())
            for name, rows in (("shards", self.shards), ("samples", self.samples)):
                lines = ",\n  ".join(json.dumps(as_row(row)) for row in rows)
                out.write(f',\n "{name}": [\n  {lines}\n ]'.encode())
            out.write(b"\n}\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check the manifest of `folder`.

        Raises:
            ShardError: the folder or manifest is missing, damaged, or of a newer version.
        """
        path = folder / MANIFEST
        try:
            if not folder.is_dir():
                what = "it is a file" if folder.exists() else "there is no such folder"
                raise ShardError(f"cannot open data set {folder}: {what}; give the folder itself")
            file_status(folder, MANIFEST)
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ShardError(
                f"cannot open data set {folder}: it has no {MANIFEST}, so it is not a data set "
                "or was not finished; write one of slides by spatialdl-tile, of images, volumes or "
                "patches by spatialdl-import"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ShardError(f"cannot read {path}: {error}") from error
        except ValueError as error:  # not a file, or elsewhere
            raise ShardError(f"cannot open data set {folder}: {error}") from None
        try:
            return _parse(fields.table({MANIFEST: fields.parse(text)}, MANIFEST))
        except (ValueError, KeyError) as error:
            if isinstance(error, ShardError):
                raise ShardError(f"{path}: {error}") from None
            raise ShardError(
                f"{path} is damaged: {fields.missing(error)}; copy or write the data set again"
            ) from error


def order_splits(splits: Iterable[str]) -> list[str]:
    """Distinct splits: train, val, test, then the rest by name."""
    found = set(splits)
    usual = [split for split in _USUAL_SPLITS if split in found]
    return usual + sorted(found.difference(_USUAL_SPLITS))


def chunk_size(rows: int, cols: int) -> tuple[int, int]:
    """(Rows, columns) of an image chunk: the whole image if small, else 512 x 512."""
    if rows <= CHUNK and cols <= CHUNK:
        return rows, cols
    return min(rows, CHUNK), min(cols, CHUNK)


def volume_chunk(size: Sequence[int]) -> tuple[int, ...]:
    """(Slices, rows, columns) of a volume chunk: at most 64 each, as even as possible."""
    return tuple(-(-n // -(-n // VOLUME_CHUNK)) for n in size)


def stored_bytes(
    size: Sequence[int], channels: int, chunk: Sequence[int] | None = None, itemsize: int = 1
) -> int:
    """Bytes of an image's pixels in a shard; chunks at its edges are stored in full."""
    if chunk is None:
        chunk = chunk_size(size[0], size[1])
    whole = (-(-n // each) * each for n, each in zip(size, chunk, strict=True))
    return prod(whole) * channels * itemsize


def shard_name(number: int) -> str:
    """File name of a shard: `shard-00000.h5`."""
    return f"shard-{number:05d}.h5"


def shard_status(folder: Path, info: ShardInfo) -> os.stat_result:
    """Stat result of a shard file.

    Raises:
        ShardError: not a regular file, or a link that leads out of the folder.
        OSError: the file does not exist.
    """
    try:
        return file_status(folder, info.file)
    except ValueError as error:
        raise ShardError(f"{error}; copy or write the data set again") from None


def shard_problem(
    folder: Path,
    info: ShardInfo,
    progress: Callable[[int], object] | None = None,
    *,
    contents: bool = True,
) -> str:
    """Why a shard or file of a data set is not intact; empty if it is.

    Args:
        folder: of the data set.
        info: its path in the folder, length and SHA-256.
        progress: called with the bytes of each block read.
        contents: read all of it; else only its length is compared.
    """
    try:
        size = shard_status(folder, info).st_size
        if size != info.bytes:
            return f"has {size} bytes, expected {info.bytes}; it was truncated or replaced"
        actual = sha256_of(folder / info.file, progress) if contents else info.sha256
    except (ShardError, OSError) as error:
        return f"cannot be read: {getattr(error, 'strerror', error)}"
    if actual == info.sha256:
        return ""
    return f"has other contents (SHA-256 {actual[:12]}..., expected {info.sha256[:12]}...)"


def sha256_of(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """Hexadecimal SHA-256 of a file; `progress` is called with the bytes of each block read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def _parse(raw: dict[str, Any]) -> Manifest:
    version = fields.whole(raw, "format_version", 1)
    if version > FORMAT_VERSION:
        raise ShardError(
            f"format version {version} is newer than {FORMAT_VERSION}, the newest that this "
            "spatialdl reads; upgrade spatialdl"
        )
    manifest = Manifest(
        kind=_one_of(raw, "kind", KINDS),
        classes=fields.texts(raw, "classes"),
        channels=fields.whole(raw, "channels"),
        tile_size=None if raw["tile_size"] is None else _parse_size(raw["tile_size"]),
        mpp=None if raw["mpp"] is None else fields.positive(raw, "mpp"),
        masks=fields.flag(raw, "masks"),
        codec=_one_of(raw, "codec", CODECS),
        dtype=_one_of(raw, "dtype", DTYPES),
        shards=_parse_rows(raw, "shards", parse_shard),
        made_with=fields.table(raw, "made_with"),
    )
    if (manifest.kind == "tiles") != (manifest.tile_size is not None):
        raise ValueError(f"tile_size is {raw['tile_size']} where kind is {manifest.kind!r}")
    manifest.samples = _parse_rows(raw, "samples", _PARSERS[manifest.kind])
    if manifest.samples and 0 in (manifest.channels, *(manifest.tile_size or ())):
        raise ValueError("channels or tile_size is 0, and there are samples")
    for number, sample in enumerate(manifest.samples):
        _check_sample(manifest, number, sample)
    return manifest


def _one_of(raw: dict[str, Any], key: str, known: Sequence[Any]) -> Any:
    value = raw[key]
    if value not in known:
        expected = ", ".join(map(str, known))
        raise ValueError(f"{key} is {fields.shown(value)}, expected one of {expected}")
    return value


def _parse_rows(raw: dict[str, Any], key: str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Parse a list of objects; errors give the index of the faulty object."""
    found: list[T] = []
    for row in fields.tables(raw, key):
        try:
            found.append(parse(row))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{key} {len(found)}: {fields.missing(error)}") from error
    return found


def _parse_size(size: object) -> tuple[int, int]:
    if not isinstance(size, list) or len(size) != 2:
        raise ValueError(f"tile_size is {fields.shown(size)}, expected rows and columns")
    rows, cols = ({"tile_size": side} for side in size)
    return fields.whole(rows, "tile_size"), fields.whole(cols, "tile_size")


_PARSERS: dict[Kind, Callable[[dict[str, Any]], Sample]] = {
    "tiles": parse_tile,
    "regions": parse_region,
    "volumes": parse_volume,
}


def _check_sample(manifest: Manifest, number: int, sample: Sample) -> None:
    if sample.label is not None and not 0 <= sample.label < len(manifest.classes):
        raise ValueError(
            f"sample {number} has label {sample.label} of {len(manifest.classes)} classes"
        )
    if isinstance(sample, TileSample):
        inside = 0 <= sample.shard < len(manifest.shards)
        if not inside or not 0 <= sample.index < manifest.shards[sample.shard].samples:
            raise ValueError(
                f"sample {number} is at index {sample.index} of shard {sample.shard}, which does "
                "not exist"
            )
        return
    row = 0
    for band in sample.bands:
        if band.row0 != row or band.shard >= len(manifest.shards):
            raise ValueError(
                f"sample {number} (region {fields.shown(sample.id)}) has a wrong band at row {row}"
            )
        row += band.rows
    if row != sample.size[0] or not re.fullmatch(r"[A-Za-z0-9_-]+", sample.id):
        raise ValueError(
            f"sample {number} (region {fields.shown(sample.id)}) is not covered by its bands"
        )
    if len(sample.bands) > 1 and not sample.striped:
        raise ValueError(
            f"sample {number} (region {sample.id}) has several bands and is not striped"
        )
