"""Bags of tiles as the data of a run: `data=bags`, `tile_bags` and `rare_tiles`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig, ListConfig

from spatialdl.data.bag_labels import BagLabels, SlideRow, read_bag_labels
from spatialdl.data.bags import Bag, BagSource
from spatialdl.data.feature_file import list_features
from spatialdl.data.rare_tiles import KINDS, RareTilesBag
from spatialdl.data.targets import target_of
from spatialdl.data.tile_bags import labels_of_tiles, open_tile_bags

log = logging.getLogger("spatialdl.data")

_SHOWN = 3  # names in a message
SURVIVAL = ("time", "event")
"""Columns of labels of task=survival: time to the event or to the end of watching, and 1 or 0."""


def open_bags(
    data: DictConfig, seed: int, task: str
) -> tuple[BagSource, BagSource | None, tuple[str, ...]]:
    """The bags to train on and to validate on, and the names of classes or targets.

    Raises:
        ValueError: features and table do not go together, or nothing is left to train on.
    """
    if task == "segmentation":
        raise ValueError("data=bags has labels of slides, and no masks for task=segmentation")
    if data.get("tiles_a_slide") is not None:
        return _drawn(data, seed, task)
    files, table = _opened(data, task)
    what = "file of features" if data.get("tiles") is None else "tiles"
    rows = _matched(table, files, bool(data.skip_missing), what)
    rows = _known(rows, task)
    kept = _with_tiles(rows, files)
    labels, names = _labels(kept, table, task)
    where = _splits(data, table, kept, seed, labels if task == "classification" else None)

    def source(split: str | None) -> BagSource | None:
        chosen = [n for n, slide in enumerate(kept) if split is None or where[slide] == split]
        if not chosen:
            return None
        slides = [list(kept)[n] for n in chosen]
        splits = [where[slide] for slide in slides]
        return BagSource([files[slide] for slide in slides], labels[chosen], names, splits)

    train = source(data.split)
    if train is None:
        known = ", ".join(sorted({str(one) for one in where.values()}))
        raise ValueError(f"{table.path} has no slides of data.split={data.split}; it has {known}")
    validation = None if data.validation_split is None else source(data.validation_split)
    if validation is None and data.validation_split is not None:
        log.info("%s has no split %s: nothing to validate on", table.path, data.validation_split)
    _check_learns(train, names, task)
    return train, validation, tuple(names)


def _drawn(
    data: DictConfig, seed: int, task: str
) -> tuple[BagSource, BagSource | None, tuple[str, ...]]:
    """Slides of `data.rare_tiles`, kinds in turns; those to validate on have another seed."""
    if task != "classification":
        raise ValueError(f"data=rare_tiles is for task=classification, got task={task}")

    def source(count: int, name: str, part: int) -> BagSource:
        kinds = np.arange(count, dtype=np.int64) % len(KINDS)
        sizes = int(data.tiles_a_slide), int(data.tile_size)
        bags = [
            RareTilesBag(f"{name}{number:04d}", int(kind), *sizes, (seed, part, number))
            for number, kind in enumerate(kinds)
        ]
        return BagSource(bags, kinds, KINDS, [name] * count)

    if data.slides < 1 or data.validation_slides < 0:
        raise ValueError(
            f"data.slides={data.slides} must be at least 1, data.validation_slides="
            f"{data.validation_slides} at least 0"
        )
    validation = source(int(data.validation_slides), "val", 1) if data.validation_slides else None
    return source(int(data.slides), "train", 0), validation, KINDS


def _opened(data: DictConfig, task: str) -> tuple[dict[str, Bag], BagLabels]:
    """The bags of all slides by name, and their labels."""
    columns = _columns(data, task)
    bags: Sequence[Bag]
    if data.get("tiles") is None:
        bags = list_features(feature_paths(data.features))
        labels = None
    else:
        bags, dataset = open_tile_bags(Path(data.tiles).expanduser(), data.io)
        if data.labels is None and task != "classification":
            raise ValueError(
                f"task={task} needs data.labels=FILE.csv: tiles have classes as their only labels"
            )
        labels = labels_of_tiles(bags, dataset) if data.labels is None else None
    return (
        {bag.slide: bag for bag in bags},
        labels or read_bag_labels(Path(data.labels).expanduser(), columns),
    )


def feature_paths(given: Any) -> list[Path]:
    """Folders and files of a setting: one, or a list.

    Raises:
        ValueError: it is neither.
    """
    each = list(given) if isinstance(given, ListConfig | list) else [given]
    if not each or not all(isinstance(one, str) and one for one in each):
        raise ValueError(f"data.features={given} is a folder of *.h5, or a list of such: [a,b]")
    return [Path(one).expanduser() for one in each]


def _columns(data: DictConfig, task: str) -> Sequence[str] | None:
    given = data.columns
    if given is None:
        return {"classification": ["label"], "survival": list(SURVIVAL)}.get(task)
    columns = list(given) if isinstance(given, ListConfig) else [given]
    if not columns or not all(isinstance(one, str) for one in columns):
        raise ValueError(f"data.columns={given} is a column of data.labels, or a list of some")
    count = {"classification": 1, "survival": 2}.get(task, len(columns))
    if len(columns) != count:
        what = "one column, of labels" if count == 1 else "two columns, time and event"
        raise ValueError(f"data.columns={columns}: task={task} takes {what}")
    return columns


def _matched(
    table: BagLabels, files: Mapping[str, Bag], skip_missing: bool, what: str
) -> dict[str, SlideRow]:
    """Rows of slides that have features, or what else tiles have."""
    rows, missing = table.match(list(files))
    if missing and not (skip_missing and rows):
        raise ValueError(
            f"{len(missing)} of {len(table.rows)} slides of {table.path} have no {what}, such as "
            f"{_some(missing)}; there are {len(files)} slides with them, such as "
            f"{_some(list(files))}: make the others, or leave them out by data.skip_missing=true"
        )
    if missing:
        log.warning("%s have no %s and are left out", _counted(missing, len(table.rows)), what)
    extra = [slide for slide in files if slide not in rows]
    if extra:
        # as information, which only rank 0 prints
        log.info("%s are not in %s", _counted(extra, len(files)), table.path)
    return {slide: rows[slide] for slide in files if slide in rows}


def _known(rows: Mapping[str, SlideRow], task: str) -> dict[str, SlideRow]:
    """Rows with a label."""
    needs_all = task in ("classification", "survival")
    check: Callable[[Sequence[str]], bool] = all if needs_all else any
    without = [slide for slide, row in rows.items() if not check(row.cells)]
    if without:
        log.warning("%s have no label and are left out", _counted(without, len(rows)))
    return {slide: row for slide, row in rows.items() if slide not in set(without)}


def _with_tiles(rows: Mapping[str, SlideRow], files: Mapping[str, Bag]) -> dict[str, SlideRow]:
    empty = [slide for slide in rows if files[slide].tiles == 0]
    if empty:
        log.warning("%s have no tiles and are left out", _counted(empty, len(rows)))
    found = {slide: row for slide, row in rows.items() if files[slide].tiles}
    if not found:
        raise ValueError(
            "no slide has both tiles and a label: nothing to train on (data.features or "
            "data.tiles, data.labels)"
        )
    return found


def _labels(
    rows: Mapping[str, SlideRow], table: BagLabels, task: str
) -> tuple[npt.NDArray[Any], list[str]]:
    """Labels of all slides, and the names of classes or targets."""
    if task == "classification":
        texts = [row.cells[0] for row in rows.values()]
        classes = sorted(set(texts), key=_in_order)
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[one] for one in texts], np.int64), classes
    targets = [_row(row, table.columns, task) for row in rows.values()]
    return np.array(targets, np.float64), list(table.columns)


def _in_order(name: str) -> tuple[bool, int, str]:
    """Numbers as numbers, before other names."""
    is_number = name.isascii() and name.isdecimal()
    return not is_number, int(name) if is_number else 0, name


def _row(row: SlideRow, columns: Sequence[str], task: str) -> list[float]:
    binary = [task == "multilabel" or (task == "survival" and n == 1) for n in range(len(columns))]
    found = [
        target_of(cell, f"{row.where}, {name}", is_binary)
        for cell, name, is_binary in zip(row.cells, columns, binary, strict=True)
    ]
    if task == "survival" and not (found[0] >= 0 and found[1] in (0, 1)):
        raise ValueError(
            f"{row.where}: {columns[0]}={row.cells[0]}, {columns[1]}={row.cells[1]}: the time must "
            "be at least 0, the event 1 (it happened then) or 0 (not seen until then)"
        )
    return found


def _splits(
    data: DictConfig,
    table: BagLabels,
    rows: Mapping[str, SlideRow],
    seed: int,
    classes: npt.NDArray[Any] | None,
) -> dict[str, str | None]:
    """The split of each slide; where the table has none, patients are drawn class by class."""
    if table.has_split or data.split is None or data.validation_split is None:
        return {slide: row.split for slide, row in rows.items()}
    fraction = data.validation_fraction
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(
            f"data.validation_fraction={fraction} must be at least 0 and below 1: what is drawn "
            "from the slides to validate on"
        )
    groups: dict[str, list[str]] = {}
    for slide, row in rows.items():
        groups.setdefault(row.patient or slide, []).append(slide)
    label_of = dict(zip(rows, [0] * len(rows) if classes is None else classes, strict=True))
    strata: dict[int, list[str]] = {}
    for patient in sorted(groups):
        strata.setdefault(int(max(label_of[slide] for slide in groups[patient])), []).append(
            patient
        )
    rng = np.random.default_rng([seed, len(groups)])
    held: set[str] = set()
    for _, patients in sorted(strata.items()):
        count = min(round(fraction * len(patients)), len(patients) - 1)
        held.update(patients[n] for n in rng.permutation(len(patients))[:count])
    found = {
        slide: data.validation_split if patient in held else data.split
        for patient, slides in groups.items()
        for slide in slides
    }
    log.info(
        "%s has no column split: %d of %d patients or slides are drawn to validate on",
        *(table.path, len(held), len(groups)),
    )
    return found


def _check_learns(train: BagSource, names: Sequence[str], task: str) -> None:
    if task == "classification" and len(names) == 1:
        raise ValueError(f"all slides are of one class, {names[0]}: nothing to learn")
    if task == "classification":
        absent = np.setdiff1d(np.arange(len(names)), train.labels)
        if len(absent):
            log.warning("no slide to train on is %s", ", ".join(names[n] for n in absent))
    elif np.isnan(train.labels).all():
        raise ValueError("all labels of the slides to train on are empty: nothing to learn")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN])


def _counted(names: Sequence[str], total: int) -> str:
    more = " ..." if len(names) > _SHOWN else ""
    return f"{len(names)} of {total} slides ({_some(names)}{more})"
