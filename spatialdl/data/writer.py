"""Data set writer: tiles or regions in, shards of bounded size and a manifest out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import LEVEL, QUALITY, Codec, Coding
from spatialdl.data.folder import FolderInProgress, check_target
from spatialdl.data.format import KINDS, Kind, Manifest
from spatialdl.data.joining import join_parts, part_folder, remove_parts
from spatialdl.data.jpeg import EncodedImage
from spatialdl.data.region_shard import RegionShards
from spatialdl.data.samples import affine_of, spacing_of
from spatialdl.data.shard_file import ImageRows
from spatialdl.data.tile_shard import TileShards
from spatialdl.errors import ShardError

DEFAULT_SHARD_SIZE = 512 * 2**20


class Comm(Protocol):
    """The subset of an mpi4py communicator that is used here."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, in rank order."""


class ShardWriter:
    """Write a data set folder, which appears under its name once it is complete.

    ::

        with ShardWriter("set", classes=["benign", "tumour"]) as writer:
            writer.add(image, label="tumour", split="train", slide="a1", xy=(0, 512))

    An exception inside the block removes the new folder and keeps an existing folder of that name
    unchanged.

    Args:
        path: the folder to create.
        classes: names of the classes; a label is one of them or its index.
        kind: "tiles" (all of one size), "regions" (any size, written by row bands), or "volumes"
            (regions with an additional leading dim, written by bands of slices).
        mpp: micrometres per pixel of the tiles, if known.
        shard_size: approximate bytes of decoded pixels per shard (each shard has at least one
            sample).
        stripes: regions and volumes only: number of shards over which the bands of one sample are
            distributed.
        part: write this part of the data set only; `join_parts` joins the parts. Any number of
            processes may write parts concurrently.
        comm: an mpi4py communicator. All its ranks create a writer with the same settings and
            close it: each rank writes a part, and rank 0 joins the parts in rank order. If one
            rank fails (an exception inside the block included), all raise and no folder is left.
        codec: "raw"; "jpeg" for JPEG chunks (uint8 with 1 or 3 channels; masks stay raw); "zstd"
            or "lz4", lossless compression.
        quality: JPEG quality, 1 to 100. Images added encoded keep theirs.
        level: zstd level, 1 (fast) to 22 (small).
        chunk: JPEG tiles only: (rows, columns) of a chunk, if tiles added encoded have chunks of
            another size than the first tile.
        overwrite: replace an existing data set of that name.
        made_with: settings to record in the manifest unchanged.

    Raises:
        ShardError: the folder exists and `overwrite` is false or it is not a data set; or another
            rank failed.
        ValueError: duplicate classes, sizes below one, unknown codec, quality or level.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        classes: Sequence[str] = (),
        *,
        kind: Kind = "tiles",
        mpp: float | None = None,
        shard_size: int = DEFAULT_SHARD_SIZE,
        stripes: int = 1,
        part: str | None = None,
        comm: Comm | None = None,
        codec: Codec = "raw",
        quality: int = QUALITY,
        level: int = LEVEL,
        chunk: tuple[int, int] | None = None,
        overwrite: bool = False,
        made_with: Mapping[str, Any] | None = None,
    ) -> None:
        with _agreed(comm):
            self._classes = _checked_classes(classes)
            _check_sizes(shard_size, kind, stripes)
            coding = Coding(codec, quality, level)
            if chunk is not None and (kind != "tiles" or codec != "jpeg" or min(chunk) < 1):
                raise ValueError(
                    f"chunk is {chunk}; it requires kind 'tiles' and codec 'jpeg', and at least "
                    "1 x 1"
                )
            if part is not None and comm is not None:
                raise ValueError("part and comm are mutually exclusive: each rank writes its part")
        self._target, self._overwrite = Path(path).resolve(), overwrite
        self._comm, self._part = comm, part
        self._folder = self._open_folder()
        self._shards: TileShards | RegionShards
        if kind == "tiles":
            self._shards = TileShards(self._folder.path, shard_size, coding, chunk)
        else:
            prefix = "" if self._part is None else f"{self._part}-"
            self._shards = RegionShards(
                *(self._folder.path, shard_size, stripes, coding, prefix),
                spatial=3 if kind == "volumes" else 2,
            )
        self._kind: Kind = kind
        self._mpp = mpp
        self._codec: Codec = codec
        self._made_with = dict(made_with or {})
        self._open = True

    @property
    def path(self) -> Path:
        """The folder to be created."""
        return self._target

    @property
    def workdir(self) -> Path:
        """The temporary folder; files put here become part of the data set folder."""
        return self._folder.path

    def __len__(self) -> int:
        """Samples added so far."""
        return len(self._shards.samples)

    def add(
        self,
        image: npt.ArrayLike | ImageRows | EncodedImage,
        label: int | str | None = None,
        split: str | None = None,
        *,
        slide: str = "",
        xy: tuple[int, int] = (0, 0),
        mask: npt.ArrayLike | ImageRows | None = None,
        mpp: float | None = None,
        spacing: Sequence[float] | None = None,
        affine: npt.ArrayLike | None = None,
    ) -> None:
        """Add one sample.

        Args:
            image: (rows, cols, channels) or (rows, cols) of uint8, uint16, int16, float16, float32
                or float64, the same for all samples; volumes with a leading dim of slices. Regions
                and volumes may be any object with `shape` and `dtype` that returns rows (slices)
                for `image[row0:row1]`; it is read in bands.
                With codec "jpeg" an `EncodedImage`, whose streams are stored unchanged.
            label: name or index of a class, or None.
            split: "train", "val", "test" or any other name, or None.
            slide: name of the slide that the image was cut from.
            xy: level-0 (column, row) of its top-left pixel in the slide.
            mask: class of every pixel, integers 0 to 254, or 255 if unknown, (rows, cols), of a
                volume (slices, rows, cols); either all samples have masks or none.
            mpp: micrometres per pixel of a region; tiles use that of the writer.
            spacing: volumes only: millimetres between neighbouring slices, rows and columns.
            affine: volumes only: the first three rows, or all four, of the matrix that maps
                (slice, row, column, 1) to millimetres in RAS+.

        Raises:
            ValueError: invalid shape, type, label or split, or a damaged stream; the sample is
                not added.
        """
        if not self._open:
            raise ValueError(f"data set {self.path} is closed; cannot add a sample")
        if split is not None and not split:
            raise ValueError("split is empty; give a name such as 'train', or None")
        for what, name in (("split", split or ""), ("slide", slide)):
            _check_text(what, name)
        known = {
            "label": self._label_index(label),
            "split": split,
            "slide": slide,
            "x": int(xy[0]),
            "y": int(xy[1]),
            **self._geometry(mpp, spacing, affine),
        }
        if isinstance(self._shards, TileShards):
            if mpp is not None:
                raise ValueError("mpp is set for one tile; tiles share the mpp of the ShardWriter")
            if not isinstance(image, EncodedImage):
                image = np.asarray(image)
                _check_channels_last(image.shape, self._kind)
            self._shards.add(image, None if mask is None else np.asarray(mask), known)
        else:
            rows = _rows(image)
            _check_channels_last(rows.shape, self._kind)
            self._shards.add(rows, None if mask is None else _rows(mask), mpp, known)

    def close(self) -> None:
        """Finish the last shard, write the manifest and rename the folder.

        Raises:
            ShardError: the data set is empty, so no folder is created; or another rank failed.
        """
        if self._open:
            self._open = False
            self._end()

    def abort(self) -> None:
        """Discard all that was written; with `comm`, on all ranks."""
        if self._open:
            self._open = False
            with suppress(_AbortedError):
                self._end(_AbortedError("the writer was aborted"))

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, or abort if the block raised."""
        if error is None:
            self.close()
        elif self._open:
            self._open = False
            self._end(error)

    def _open_folder(self) -> FolderInProgress:
        """The folder that this process writes, created once all ranks can create theirs."""
        if self._comm is None:
            if self._part is None:
                return FolderInProgress(self._target, overwrite=self._overwrite)
            folder = part_folder(self._target, self._part)
            check_target(self._target, overwrite=self._overwrite)
            shutil.rmtree(folder, ignore_errors=True)  # left by an earlier run, would be joined
            return FolderInProgress(folder)
        comm, self._part = self._comm, f"{self._comm.rank:05d}"
        with _agreed(comm):
            if comm.rank == 0:
                check_target(self._target, overwrite=self._overwrite)
                remove_parts(self._target)
        with _agreed(comm):
            return FolderInProgress(part_folder(self._target, self._part))

    def _end(self, error: BaseException | None = None) -> None:
        """Publish the folder, or discard it and raise if this or another rank failed."""
        joins = self._comm is not None and self._comm.rank == 0
        try:
            with _agreed(self._comm):
                try:
                    if error is not None:
                        raise error
                    self._finish()
                except BaseException:
                    self._drop()
                    raise
            with _agreed(self._comm):
                if self._comm is not None and joins:
                    parts = [f"{rank:05d}" for rank in range(self._comm.size)]
                    join_parts(self._target, parts, overwrite=self._overwrite)
        except BaseException:
            if joins:
                remove_parts(self._target)
            raise

    def _drop(self) -> None:
        try:
            self._shards.abort()
        finally:
            self._folder.discard()

    def _finish(self) -> None:
        if not self._shards.samples and self._part is None:  # a part may be empty
            raise ShardError(f"no samples were added, so the data set {self.path} was not written")
        shards, infos = self._shards, self._shards.finish()
        tile = shards.shape if isinstance(shards, TileShards) else None
        manifest = Manifest(
            kind=self._kind,
            classes=self._classes,
            channels=shards.channels,
            tile_size=None if tile is None else tile[:2],
            mpp=self._mpp,
            masks=shards.masks,
            codec=self._codec,
            dtype=shards.dtype.name,
            shards=infos,
            samples=list(shards.samples),
            made_with=self._made_with,
        )
        manifest.save(self._folder.path)
        self._folder.publish()

    def _geometry(
        self, mpp: float | None, spacing: Sequence[float] | None, affine: npt.ArrayLike | None
    ) -> dict[str, Any]:
        """Spacing and affine of a volume; empty for other kinds."""
        if self._kind != "volumes":
            if spacing is not None or affine is not None:
                raise ValueError(f"spacing and affine require kind 'volumes', not {self._kind!r}")
            return {}
        if mpp is not None:
            raise ValueError("mpp does not apply to volumes; set spacing, in millimetres")
        rows = None if affine is None else np.asarray(affine, np.float64).tolist()
        if rows is not None and len(rows) == 4 and rows[3] == [0, 0, 0, 1]:
            rows = rows[:3]
        return {
            "spacing": None if spacing is None else spacing_of([float(x) for x in spacing]),
            "affine": None if rows is None else affine_of(rows),
        }

    def _label_index(self, label: int | str | None) -> int | None:
        if label is None:
            return None
        if isinstance(label, str):
            if label not in self._classes:
                raise ValueError(f"label {label!r} is not one of the classes {self._classes}")
            return self._classes.index(label)
        index = int(label)
        if index != label or not 0 <= index < len(self._classes):
            raise ValueError(f"label {label} is not an index into the {len(self._classes)} classes")
        return index


class _AbortedError(Exception):
    """The error that other ranks receive after `abort`."""


@contextmanager
def _agreed(comm: Comm | None) -> Iterator[None]:
    """Raise on all ranks at the end of the block if one rank raised.

    Raises:
        ShardError: another rank failed; with its rank and error.
    """
    if comm is None:
        yield
        return
    own = None
    try:
        yield
    except BaseException as error:
        own = error
    problems = comm.allgather(None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ShardError(f"rank {rank} failed, so no data set was written: {problem}")


def _check_sizes(shard_size: int, kind: str, stripes: int) -> None:
    if shard_size < 1:
        raise ValueError(f"shard_size is {shard_size}, expected at least 1 byte")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
    if stripes < 1 or (kind == "tiles" and stripes != 1):
        raise ValueError(f"stripes is {stripes}; it is at least 1, and 1 where kind is 'tiles'")


def _check_text(what: str, name: str) -> None:
    """Reject names that HDF5 or JSON cannot store."""
    if "\0" in name:
        raise ValueError(f"{what} name {name!r} contains a null character")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} name {name!r} is not valid Unicode") from error


def _check_channels_last(shape: Sequence[int], kind: str) -> None:
    """Reject PyTorch's order, which would be stored as a few rows with many channels."""
    first = "slices" if kind == "volumes" else "rows"
    has_channels = len(shape) == (4 if kind == "volumes" else 3)
    if has_channels and shape[0] in (1, 3, 4) and min(shape[1:]) > 16:
        order = (*range(1, len(shape)), 0)
        raise ValueError(
            f"image of shape {tuple(shape)} has {shape[0]} {first} and {shape[-1]} channels; "
            f"channels are last: add image.transpose{order}, or image.permute{order} of a tensor"
        )


def _checked_classes(classes: Sequence[str]) -> list[str]:
    if isinstance(classes, str):
        raise ValueError(f"classes is the string {classes!r}, expected a list of names")
    names = [str(name) for name in classes]
    for name in names:
        _check_text("class", name)
    if len(set(names)) != len(names):
        raise ValueError(f"classes contain a duplicate name: {names}")
    return names


def _rows(image: Any) -> ImageRows:
    return image if hasattr(image, "shape") else np.asarray(image)
