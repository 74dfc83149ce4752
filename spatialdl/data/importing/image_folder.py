"""Import of a folder of images as a data set: tiles if all have one size, else regions.

Labels and splits are those of folders, or of a table with a row for each image::

    image,label,split,patient            filename,grade
    a.png,tumour,train,p1                p1/a.jpg,2
    b.jpg,normal,val,p2                  p2/a.jpg,3

The column of images has one of the names `IMAGE_COLUMNS`. A cell is a file name, with or without
its suffix, or the end of a path. Columns other than the label, `split` and `patient` are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from spatialdl.common.text import counted, progress_bar
from spatialdl.data.format import Kind
from spatialdl.data.importing.images import (
    BrokenImageError,
    FoundImage,
    class_names,
    find_images,
    image_size,
    load_image,
)
from spatialdl.data.tables import IMAGE_COLUMNS, SLIDE_COLUMNS, PathIndex, TableRow, read_labels
from spatialdl.data.writer import ShardWriter

Loaded = npt.NDArray[Any] | BrokenImageError


class BrokenImagesError(ValueError):
    """Some images cannot be read, and nothing was written.

    Attributes:
        broken: an error for each.
    """

    def __init__(self, broken: Sequence[str], images: int, noun: str = "images") -> None:
        self.broken = list(broken)
        super().__init__(
            f"{len(broken)} of {images} {noun} cannot be read, and nothing was written; repair or "
            "remove them, or skip them with --skip-broken"
        )


def import_images(
    folder: Path,
    out: Path,
    *,
    labels: Path | None = None,
    column: str = "label",
    skip_unmatched: bool = False,
    rgb: bool = False,
    skip_broken: bool = False,
    jobs: int = 1,
    **settings: Any,
) -> list[str]:
    """Write a data set from a folder of images.

    Args:
        folder: contains a folder of images per class, or such folders per split; with `labels`,
            images at any depth.
        out: the data set to create.
        labels: a table of images, see `label_images`.
        column: its column of labels.
        skip_unmatched: skip images without a label, and rows of the table without an image.
        rgb: convert all images to three channels of uint8.
        skip_broken: skip images that cannot be read.
        jobs: decoding threads.
        settings: arguments of `ShardWriter`.

    Returns:
        Errors of the skipped images, and a sentence for each kind of mismatch with the table.

    Raises:
        BrokenImagesError: some cannot be read, and `skip_broken` is false.
        ValueError: no images, inconsistent ones, or a table that does not match them; nothing was
            written.
    """
    images, unmatched = find_images(folder, class_folders=labels is None), list[str]()
    if labels is not None:
        images, unmatched = label_images(
            images, labels, column=column, skip_unmatched=skip_unmatched
        )
    broken: dict[str, str] = {}
    sizes = _sizes(images, broken)
    kind: Kind = "tiles"
    if len(set(sizes.values())) != 1 or "stripes" in settings:
        kind, own = "regions", {"mpp": settings.pop("mpp", None)}
    else:
        own = {}
    whole = [image for image in images if image.name in sizes]
    with (
        ShardWriter(out, class_names(images), kind=kind, **settings) as writer,
        progress_bar(None, None, "image", total=len(whole)) as bar,
    ):
        for image, loaded in _loaded(whole, rgb, jobs):
            bar.update()
            if isinstance(loaded, BrokenImageError):
                broken[image.name] = str(loaded)
            elif skip_broken or not broken:  # else only list all broken ones
                _add(writer, image, loaded, own)
        reasons = [broken[image.name] for image in images if image.name in broken]
        if reasons and (not skip_broken or len(reasons) == len(images)):
            raise BrokenImagesError(reasons, len(images))
    return unmatched + reasons


def _sizes(images: Sequence[FoundImage], broken: dict[str, str]) -> dict[str, tuple[int, int]]:
    """(Rows, columns) by name; adds errors of unreadable images to `broken`."""
    sizes = {}
    for image in progress_bar(images, "sizes", "image"):
        try:
            sizes[image.name] = image_size(image.path)
        except BrokenImageError as error:
            broken[image.name] = str(error)
    return sizes


def _add(
    writer: ShardWriter, image: FoundImage, pixels: npt.NDArray[Any], own: dict[str, Any]
) -> None:
    try:
        writer.add(pixels, image.label, image.split, slide=image.name, **own)
    except ValueError as error:
        raise ValueError(
            f"{image.path}: {error}; --rgb converts all to three channels of uint8"
        ) from error


def _loaded(
    images: Sequence[FoundImage], rgb: bool, jobs: int
) -> Iterator[tuple[FoundImage, Loaded]]:
    """The images in order, decoded ahead."""

    def load(image: FoundImage) -> Loaded:
        try:
            return load_image(image.path, rgb=rgb)
        except BrokenImageError as error:
            return error

    with ThreadPoolExecutor(jobs, thread_name_prefix="import") as pool:
        ahead: deque[tuple[FoundImage, Future[Loaded]]] = deque()
        try:
            for image in images:
                ahead.append((image, pool.submit(load, image)))
                if len(ahead) > 2 * jobs:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_MOST_NAMES = 20


def label_images(
    images: Sequence[FoundImage],
    table: Path,
    *,
    column: str = "label",
    skip_unmatched: bool = False,
) -> tuple[list[FoundImage], list[str]]:
    """Give images the labels of a table, and its splits if it has the column `split`.

    Args:
        images: images found in a folder.
        table: a CSV.
        column: column of the labels.
        skip_unmatched: leave out images without a label, and rows without an image.

    Returns:
        The labelled images in the given order, and a sentence for each kind of mismatch.

    Raises:
        ValueError: the table is missing or malformed, has a patient in two splits, names an image
            twice, or does not match the images and `skip_unmatched` is false.
    """
    read = read_labels(table, [column], (*IMAGE_COLUMNS, *SLIDE_COLUMNS), "--column NAME")
    index = PathIndex(
        [image.path for image in images],
        "image",
        lambda path: [path.absolute()],
        lambda path: [path.name, path.stem],
    )
    rows: dict[Path, TableRow] = {}
    absent = []
    for row in read.rows:
        path = index.find(row.name, row.where)
        if path is None:
            absent.append(row.name)
        elif path in rows:
            raise ValueError(
                f"{row.where}: {row.name} is {path}, which {rows[path].where} also names; keep one"
            )
        else:
            rows[path] = row
    labelled = [image for image in images if image.path in rows and rows[image.path].labels[0]]
    known = {image.path for image in labelled}
    without = [image.name for image in images if image.path not in known]
    remarks = [
        f"{counted(len(names), noun)} {what}: {_first(names)}"
        for names, noun, what in (
            (without, "image", f"without a label in {table}"),
            (absent, "label", f"of {table} without an image"),
        )
        if names
    ]
    if remarks and not (skip_unmatched and labelled):
        raise ValueError(
            f"{'; '.join(remarks)}; nothing was written: complete the table or the folder"
            + ", or skip these with --skip-unmatched" * bool(labelled)
        )
    return [_labelled(image, rows[image.path]) for image in labelled], remarks


def _labelled(image: FoundImage, row: TableRow) -> FoundImage:
    split = image.split if row.split is None else row.usual_split()
    return replace(image, label=row.labels[0], split=split)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
