"""Bags of tiles as training data: `data=bags`, `tile_bags` and `rare_tiles`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig, ListConfig

from spatialdl.data.bags import Bag, BagSource, labels_of_tiles, open_tile_bags
from spatialdl.data.feature_file import list_features
from spatialdl.data.rare_tiles import KINDS, RareTilesBag
from spatialdl.data.tables import LABEL, SPLIT, SlideTable, TableRow, read_labels
from spatialdl.data.targets import target_of

log = logging.getLogger("spatialdl.data")

_SHOWN = 3  # names in a message
SURVIVAL = ("time", "event")
"""Label columns of task=survival: time to the event or to censoring, and event 1 or 0."""


def open_bags(
    data: DictConfig, seed: int, task: str
) -> tuple[BagSource, BagSource | None, tuple[str, ...]]:
    """Open training and validation bags.

    Args:
        data: group ``data`` of the configuration.
        seed: seed of a drawn split, and of rare tiles.
        task: name of the task.

    Returns:
        Training bags, validation bags (if any), names of classes or targets.

    Raises:
        ValueError: if features and labels do not match, or no training slides are left.
    """
    if task == "segmentation":
        raise ValueError("data=bags has slide labels only, but task=segmentation needs masks")
    if data.get("tiles_a_slide") is not None:
        return _drawn(data, seed, task)
    files, table = _opened(data, task)
    content = "feature file" if data.get("tiles") is None else "tiles"
    rows = _matched(table, files, bool(data.skip_missing), content)
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
        log.info("%s has no split %s: the run has no validation", table.path, data.validation_split)
    _check_learns(train, names, task)
    return train, validation, tuple(names)


def _drawn(
    data: DictConfig, seed: int, task: str
) -> tuple[BagSource, BagSource | None, tuple[str, ...]]:
    """Generate slides of `data.rare_tiles`, alternating kinds; validation has another seed."""
    if task != "classification":
        raise ValueError(f"data=rare_tiles requires task=classification, got task={task}")

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


def _opened(data: DictConfig, task: str) -> tuple[dict[str, Bag], SlideTable]:
    """Bags of all slides by name, and their labels."""
    columns = _columns(data, task)
    bags: Sequence[Bag]
    if data.get("tiles") is None:
        bags = list_features(feature_paths(data.features))
        labels = None
    else:
        bags, dataset = open_tile_bags(Path(data.tiles).expanduser())
        if data.labels is None and task != "classification":
            raise ValueError(
                f"task={task} needs data.labels=FILE.csv: tiles only have class labels"
            )
        labels = labels_of_tiles(bags, dataset) if data.labels is None else None
    return (
        {bag.slide: bag for bag in bags},
        labels or read_labels(Path(data.labels).expanduser(), columns),
    )


def feature_paths(setting: Any) -> list[Path]:
    """Parse ``data.features``: a folder, a file, or a list of them.

    Raises:
        ValueError: if it is neither.
    """
    each = list(setting) if isinstance(setting, ListConfig | list) else [setting]
    if not each or not all(isinstance(one, str) and one for one in each):
        raise ValueError(f"data.features={setting} must be a folder of *.h5, or a list: [a,b]")
    return [Path(one).expanduser() for one in each]


def _columns(data: DictConfig, task: str) -> Sequence[str] | None:
    setting = data.columns
    if setting is None:
        return {"classification": [LABEL], "survival": list(SURVIVAL)}.get(task)
    columns = list(setting) if isinstance(setting, ListConfig) else [setting]
    if not columns or not all(isinstance(one, str) for one in columns):
        raise ValueError(f"data.columns={setting} must be a column of data.labels, or a list")
    count = {"classification": 1, "survival": 2}.get(task, len(columns))
    if len(columns) != count:
        expected = "one label column" if count == 1 else "two columns, time and event"
        raise ValueError(f"data.columns={columns}: task={task} needs {expected}")
    return columns


def _matched(
    table: SlideTable, files: Mapping[str, Bag], skip_missing: bool, content: str
) -> dict[str, TableRow]:
    """Rows of slides that have a feature file, or tiles."""
    rows, missing = table.match(list(files))
    if missing and not (skip_missing and rows):
        raise ValueError(
            f"{len(missing)} of {len(table.rows)} slides of {table.path} have no {content}, such "
            f"as {_some(missing)}; {len(files)} slides have one, such as {_some(list(files))}: "
            "create the missing ones, or skip these slides with data.skip_missing=true"
        )
    if missing:
        log.warning("%s have no %s and are skipped", _counted(missing, len(table.rows)), content)
    extra = [slide for slide in files if slide not in rows]
    if extra:
        # not a warning, since every rank would report it
        log.info("%s are not in %s", _counted(extra, len(files)), table.path)
    return {slide: rows[slide] for slide in files if slide in rows}


def _known(rows: Mapping[str, TableRow], task: str) -> dict[str, TableRow]:
    """Rows with a label."""
    needs_all = task in ("classification", "survival")
    check: Callable[[Sequence[str]], bool] = all if needs_all else any
    without = [slide for slide, row in rows.items() if not check(row.labels)]
    if without:
        log.warning("%s have no label and are skipped", _counted(without, len(rows)))
    return {slide: row for slide, row in rows.items() if slide not in set(without)}


def _with_tiles(rows: Mapping[str, TableRow], files: Mapping[str, Bag]) -> dict[str, TableRow]:
    empty = [slide for slide in rows if files[slide].tiles == 0]
    if empty:
        log.warning("%s have no tiles and are skipped", _counted(empty, len(rows)))
    kept = {slide: row for slide, row in rows.items() if files[slide].tiles}
    if not kept:
        raise ValueError(
            "no slide has both tiles and a label: nothing to train on (check data.features or "
            "data.tiles, and data.labels)"
        )
    return kept


def _labels(
    rows: Mapping[str, TableRow], table: SlideTable, task: str
) -> tuple[npt.NDArray[Any], list[str]]:
    """Labels of all slides, and names of classes or targets."""
    if task == "classification":
        texts = [row.labels[0] for row in rows.values()]
        classes = sorted(set(texts), key=_in_order)
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[one] for one in texts], np.int64), classes
    targets = [_row(row, table.labels, task) for row in rows.values()]
    return np.array(targets, np.float64), list(table.labels)


def _in_order(name: str) -> tuple[bool, int, str]:
    """Sort key: numbers by value, before other names."""
    is_number = name.isascii() and name.isdecimal()
    return not is_number, int(name) if is_number else 0, name


def _row(row: TableRow, columns: Sequence[str], task: str) -> list[float]:
    binary = [task == "multilabel" or (task == "survival" and n == 1) for n in range(len(columns))]
    values = [
        target_of(cell, f"{row.where}, {name}", is_binary)
        for cell, name, is_binary in zip(row.labels, columns, binary, strict=True)
    ]
    if task == "survival" and not (values[0] >= 0 and values[1] in (0, 1)):
        raise ValueError(
            f"{row.where}: {columns[0]}={row.labels[0]}, {columns[1]}={row.labels[1]}: the time "
            "must be at least 0, the event 1 (observed) or 0 (censored)"
        )
    return values


def _splits(
    data: DictConfig,
    table: SlideTable,
    rows: Mapping[str, TableRow],
    seed: int,
    classes: npt.NDArray[Any] | None,
) -> dict[str, str | None]:
    """Split of each slide; without a split column, patients are drawn, stratified by class."""
    if SPLIT in table.columns or data.split is None or data.validation_split is None:
        return {slide: row.split for slide, row in rows.items()}
    fraction = data.validation_fraction
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(
            f"data.validation_fraction={fraction} must be at least 0 and below 1: the share of "
            "slides drawn for validation"
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
    splits = {
        slide: data.validation_split if patient in held else data.split
        for patient, slides in groups.items()
        for slide in slides
    }
    log.info(
        "%s has no column split: %d of %d patients or slides are drawn for validation",
        *(table.path, len(held), len(groups)),
    )
    return splits


def _check_learns(train: BagSource, names: Sequence[str], task: str) -> None:
    if task == "classification" and len(names) == 1:
        raise ValueError(f"all slides have the same class, {names[0]}: nothing to learn")
    if task == "classification":
        absent = np.setdiff1d(np.arange(len(names)), train.labels)
        if len(absent):
            log.warning("no training slide of class %s", ", ".join(names[n] for n in absent))
    elif np.isnan(train.labels).all():
        raise ValueError("all labels of the training slides are empty: nothing to learn")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN])


def _counted(names: Sequence[str], total: int) -> str:
    more = " ..." if len(names) > _SHOWN else ""
    return f"{len(names)} of {total} slides ({_some(names)}{more})"
