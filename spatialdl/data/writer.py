"""Writing a data set folder: tiles or regions in, shards of bounded size and a manifest out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import LEVEL, QUALITY, Codec, Coding
from spatialdl.data.encoded import EncodedImage
from spatialdl.data.folder import FolderInProgress
from spatialdl.data.format import Kind, Manifest
from spatialdl.data.region_shard import RegionShards
from spatialdl.data.shard_file import ImageRows
from spatialdl.data.tile_shard import TileShards
from spatialdl.errors import ShardError

DEFAULT_SHARD_SIZE = 512 * 2**20


class ShardWriter:
    """Write a data set folder; it appears under its name when all of it is written.

    ::

        with ShardWriter("set", classes=["benign", "tumour"]) as writer:
            writer.add(image, label="tumour", split="train", slide="a1", xy=(0, 512))

    Leaving the block by an exception (or never leaving it) leaves no folder, and leaves an old
    folder of that name as it was.

    Args:
        path: the folder to be made.
        classes: names of the classes; a label is one of them or its index.
        kind: "tiles" (all of one size) or "regions" (any size, written by row bands).
        mpp: micrometres per pixel of the tiles, if known.
        shard_size: about how many bytes of pixels a shard may have, as many as they are decoded
            (at least one sample is in each).
        stripes: regions only: over how many shards the row bands of a region are spread.
        codec: "raw"; "jpeg" for chunks of JPEG (uint8 of 1 or 3 channels; masks stay raw); "zstd"
            or "lz4", smaller than raw without loss.
        quality: of the JPEGs, 1 to 100. Images that come encoded keep theirs.
        level: of zstd, 1 (fast) to 22 (small).
        chunk: tiles as JPEG only: rows and columns of a chunk, where the tiles to come encoded
            have others than the first one added.
        overwrite: replace a data set of that name.
        made_with: settings worth keeping, written to the manifest as they are.

    Raises:
        ShardError: the folder exists and `overwrite` is false, or it is not a data set.
        ValueError: classes that repeat, sizes below one, no such codec, quality or level.
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
        codec: Codec = "raw",
        quality: int = QUALITY,
        level: int = LEVEL,
        chunk: tuple[int, int] | None = None,
        overwrite: bool = False,
        made_with: Mapping[str, Any] | None = None,
    ) -> None:
        self._classes = _checked_classes(classes)
        if shard_size < 1:
            raise ValueError(f"shard_size is {shard_size}, expected at least 1 byte")
        if kind not in ("tiles", "regions"):
            raise ValueError(f"kind is {kind!r}, expected 'tiles' or 'regions'")
        if stripes < 1 or (kind == "tiles" and stripes != 1):
            raise ValueError(f"stripes is {stripes}; it is at least 1, and 1 where kind is 'tiles'")
        coding = Coding(codec, quality, level)
        if chunk is not None and (kind != "tiles" or codec != "jpeg" or min(chunk) < 1):
            raise ValueError(
                f"chunk is {chunk}; it is for kind 'tiles' with codec 'jpeg', and at least 1 x 1"
            )
        self._folder = FolderInProgress(path, overwrite=overwrite)
        self._shards: TileShards | RegionShards
        if kind == "tiles":
            self._shards = TileShards(self._folder.path, shard_size, coding, chunk)
        else:
            self._shards = RegionShards(self._folder.path, shard_size, stripes, coding)
        self._mpp = mpp
        self._codec: Codec = codec
        self._made_with = dict(made_with or {})
        self._open = True

    @property
    def path(self) -> Path:
        """Where the folder will be."""
        return self._folder.target

    @property
    def workdir(self) -> Path:
        """Where it is being built; other files may be put here, and move with it."""
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
    ) -> None:
        """Add one sample.

        Args:
            image: (rows, cols, channels) or (rows, cols) of uint8, uint16, float16, float32 or
                float64, the same for all. Regions may be anything that has `shape` and `dtype`
                and gives rows as `image[row0:row1]`; it is read some rows at a time.
                With codec "jpeg" an `EncodedImage`, whose streams are stored as they are.
            label: name or index of a class, or None.
            split: "train", "val", "test" or any other name, or None.
            slide: what the image was cut from.
            xy: level-0 column and row of its top-left pixel there.
            mask: class of every pixel, integers 0 to 254, or 255 where it is not known,
                (rows, cols); all samples or none.
            mpp: micrometres per pixel of a region; tiles share that of the writer.

        Raises:
            ValueError: a shape, type, label or split that does not fit, or a stream that is
                damaged; nothing was added.
        """
        if not self._open:
            raise ValueError(f"the data set {self.path} is closed; nothing can be added to it")
        if split is not None and not split:
            raise ValueError("split is empty; give a name such as 'train', or None")
        if "\0" in slide:
            raise ValueError(f"slide name {slide!r} has a zero character in it")
        known = {
            "label": self._label_index(label),
            "split": split,
            "slide": slide,
            "x": int(xy[0]),
            "y": int(xy[1]),
        }
        if isinstance(self._shards, TileShards):
            if mpp is not None:
                raise ValueError("mpp of a tile is that of the whole set; give it to ShardWriter")
            classes = None if mask is None else np.asarray(mask)
            if isinstance(image, EncodedImage):
                self._shards.add_encoded(image, classes, known)
            else:
                self._shards.add(np.asarray(image), classes, known)
        else:
            self._shards.add(_rows(image), None if mask is None else _rows(mask), mpp, known)

    def close(self) -> None:
        """Finish the last shard, write the manifest and give the folder its name.

        Raises:
            ShardError: nothing was added; no folder is made.
        """
        if not self._open:
            return
        self._open = False
        try:
            self._finish()
        except BaseException:
            self._drop()
            raise

    def abort(self) -> None:
        """Drop all that was written."""
        if self._open:
            self._open = False
            self._drop()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, or abort where the block raised."""
        if kind is None:
            self.close()
        else:
            self.abort()

    def _drop(self) -> None:
        try:
            self._shards.abort()
        finally:
            self._folder.discard()

    def _finish(self) -> None:
        if not self._shards.samples:
            raise ShardError(f"no samples were added, so the data set {self.path} was not written")
        infos = self._shards.finish()
        tiles = isinstance(self._shards, TileShards)
        manifest = Manifest(
            kind="tiles" if tiles else "regions",
            classes=self._classes,
            channels=self._shards.channels,
            tile_size=self._shards.tile_size if isinstance(self._shards, TileShards) else None,
            mpp=self._mpp,
            masks=self._shards.masks,
            codec=self._codec,
            dtype=self._shards.dtype.name,
            shards=infos,
            samples=list(self._shards.samples),
            made_with=self._made_with,
        )
        manifest.save(self._folder.path)
        self._folder.publish()

    def _label_index(self, label: int | str | None) -> int | None:
        if label is None:
            return None
        if isinstance(label, str):
            if label not in self._classes:
                raise ValueError(f"label {label!r} is none of the classes {self._classes}")
            return self._classes.index(label)
        index = int(label)
        if index != label or not 0 <= index < len(self._classes):
            raise ValueError(f"label {label} is no index into the {len(self._classes)} classes")
        return index


def _checked_classes(classes: Sequence[str]) -> list[str]:
    if isinstance(classes, str):
        raise ValueError(f"classes is the string {classes!r}, expected a list of names")
    names = [str(name) for name in classes]
    if len(set(names)) != len(names):
        raise ValueError(f"classes repeat a name: {names}")
    return names


def _rows(image: Any) -> ImageRows:
    return image if hasattr(image, "shape") else np.asarray(image)
