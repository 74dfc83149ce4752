"""Labels and splits of images, from a table with a row for each.

::

    image,label,split,patient            filename,grade
    a.png,tumour,train,p1                p1/a.jpg,2
    b.jpg,normal,val,p2                  p2/a.jpg,3

The column of images has one of the names `IMAGE_COLUMNS`. A cell is a file name, with or without
its suffix, or the end of a path. Columns other than the label, `split` and `patient` are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spatialdl.data.bag_labels import SlideRow, read_bag_labels
from spatialdl.data.importing.images import SPLITS, FoundImage
from spatialdl.data.slide_table import IMAGE_COLUMNS, SLIDE_COLUMNS, PathIndex
from spatialdl.text import counted

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
    read = read_bag_labels(table, [column], (*IMAGE_COLUMNS, *SLIDE_COLUMNS), "--column NAME")
    index = PathIndex(
        [image.path for image in images],
        "image",
        lambda path: [path.absolute()],
        lambda path: [path.name, path.stem],
    )
    rows: dict[Path, SlideRow] = {}
    absent = []
    for name, row in read.rows.items():
        path = index.find(name, row.where)
        if path is None:
            absent.append(name)
        elif path in rows:
            raise ValueError(
                f"{row.where}: {name} is {path}, which {rows[path].where} also names; keep one"
            )
        else:
            rows[path] = row
    labelled = [image for image in images if image.path in rows and rows[image.path].cells[0]]
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


def _labelled(image: FoundImage, row: SlideRow) -> FoundImage:
    if row.split is None:
        return replace(image, label=row.cells[0])
    split = SPLITS.get(row.split.lower())
    if split is None:
        raise ValueError(f"{row.where}: split is {row.split!r}, expected train, val or test")
    return replace(image, label=row.cells[0], split=split)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
