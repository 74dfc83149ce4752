"""The report of a run: one file for the browser, nothing from elsewhere."""

from __future__ import annotations

import io
import json
import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from spatialdl.pages.writing import as_data, save_page
from spatialdl.text import readable_bytes, without_passwords
from spatialdl.training.console.validation_table import (
    SHARES,
    class_rows,
    confusion_rows,
    metrics_of,
    told_name,
    told_value,
)
from spatialdl.training.pictures.gallery import Example, stacked
from spatialdl.training.report.curves import curves
from spatialdl.training.time_split import PARTS
from spatialdl.version import __version__

_QUALITY = 85
_MOST_ROWS = 30  # of validations; of more, the first ones and the last ones
_PART_TEXT = {
    "compute": "the layers, the loss, the optimizer",
    "halo": "waiting for the edges of other ranks' tiles",
    "hand_over": "waiting for activations and gradients of other stages",
    "reduce": "sums over ranks (gradients, BatchNorm, the loss), and waiting for slower ranks",
    "data": "waiting for the next batch",
}


def save_report(
    path: Path,
    *,
    title: str,
    config: DictConfig,
    overrides: Sequence[str],
    table: str,
    names: Sequence[str],
    steps: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    examples: Sequence[Example] = (),
    timeline: Path | None = None,
    ended: str = "",
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: the HTML file.
        title: of the run.
        overrides: of the command line, which are marked in the configuration.
        table: what was told at the start.
        names: of the classes or targets.
        steps: rows of ``metrics.csv``.
        validations: with their lists.
        summary: with ``images_per_second``, ``peak_memory_mb`` (a list) and ``time_split``, each
            if it is known.
        examples: the worst first.
        timeline: picture of a step, if there is one.
        ended: why before its end.
    """
    plain = without_passwords(OmegaConf.to_container(config, resolve=True))
    overrides = without_passwords(list(overrides))
    last = validations[-1] if validations else {}
    save_page(
        path,
        __package__,
        title=title,
        ended=ended,
        facts=_facts(steps, validations, summary),
        table=table,
        curves=curves(steps, validations) if steps else "",
        split=_split(summary.get("time_split") or {}),
        step_seconds=(summary.get("time_split") or {}).get("seconds_per_step"),
        validations=_validations(validations),
        classes=class_rows(last, names),
        confusion=_confusion(last, names),
        examples=[_shown(example) for example in examples],
        timeline=as_data(timeline.read_bytes(), "png") if timeline else "",
        settings=settings_lines({str(k): v for k, v in plain.items()}, overrides),
        overrides=overrides,
        environment=_environment(),
    )


def _facts(
    steps: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """What a reader wants first: names and values."""
    found = []
    if validations:
        last = metrics_of(validations[-1])
        shown = [n for n in last if n in (*SHARES, "rmse", "mae", "r2")][:2]
        found += [(told_name(name), told_value(name, last[name])) for name in shown]
        found.append(("validation loss", told_value("loss", last.get("loss"))))
    if steps:
        found.append(("training loss", f"{steps[-1]['loss']:.4g}"))
        found.append(("steps", f"{int(steps[-1]['step']):,}"))
    rate = summary.get("images_per_second")
    if rate:
        found.append(("images per second", f"{rate:.3g}"))
    memory = summary.get("peak_memory_mb")
    if memory:
        found.append(("peak memory of a rank", readable_bytes(round(max(memory) * 2**20))))
    used = [one for one in summary.get("device_memory_mb") or () if one is not None]
    if used:  # with the context, NCCL and what other processes take
        found.append(("in use on its device", readable_bytes(round(max(used) * 2**20))))
    return found


def _split(shares: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "name": part.replace("_", "-"),
            "share": 100 * shares[part],
            "what": _PART_TEXT[part],
        }
        for part in PARTS
        if part in shares
    ]


def _validations(validations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row each below a head, without metrics that none has."""
    if not validations:
        return []
    names = [
        name
        for name in metrics_of(validations[0])
        if any(one.get(name) is not None for one in validations)
    ]
    rows = [
        [str(one["step"]), *(told_value(name, one.get(name)) for name in names)]
        for one in validations
    ]
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ["..."] * len(rows[0]), *rows[-half:]]
    return [["step", *map(told_name, names)], *rows]


def _confusion(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Cells with the share of their row, by which they are shaded."""
    rows = confusion_rows(found, names)
    if not rows:
        return {}
    pairs = found["confusion_matrix"]
    body = []
    for (name, *cells), counts in zip(rows[1:], pairs, strict=True):
        total = sum(counts) or 1
        shares = [round(count / total, 3) for count in counts]
        body.append({"name": name, "cells": list(zip(cells, shares, strict=False))})
    return {"head": rows[0][1:], "rows": body}


def _shown(example: Example) -> dict[str, Any]:
    pictures = []
    for name, pixels in example.pictures.items():
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=_QUALITY)
        rows, cols = pixels.shape[:2]
        data = as_data(out.getvalue(), "jpeg")
        pictures.append({"name": name, "data": data, "rows": rows, "cols": cols})
    return {
        "name": example.name,
        "title": example.title,
        "error": f"{example.error:.3f}",
        "pictures": pictures,
        "stacked": stacked(example),
    }


def _environment() -> list[tuple[str, str]]:
    mpi = sys.modules.get("mpi4py.MPI")
    found = [
        ("spatialdl", __version__),
        ("PyTorch", torch.__version__),
        ("Python", platform.python_version()),
        ("MPI", mpi.Get_library_version().strip("\0").splitlines()[0].strip(", ") if mpi else "-"),
        ("host of rank 0", f"{socket.gethostname()}, {platform.platform()}"),
    ]
    return found if mpi else [one for one in found if one[0] != "MPI"]


class Line(NamedTuple):
    """A line of YAML, and the words of the command line that have set it."""

    text: str
    override: str


def settings_lines(config: Mapping[str, Any], overrides: Sequence[str]) -> list[Line]:
    """The lines of a nested configuration.

    Args:
        overrides: as on the command line; that of a group belongs to the group's own line.
    """
    given = {}
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        given[key.partition("@")[0].replace("/", ".")] = f"{key}={value}" if value else word
    return list(_lines(config, given, "", 0))


def _lines(
    config: Mapping[str, Any], given: Mapping[str, str], path: str, depth: int
) -> Iterator[Line]:
    for key, value in config.items():
        name, indent = f"{path}{key}", "  " * depth
        if isinstance(value, Mapping) and value:
            yield Line(f"{indent}{key}:", given.get(name, ""))
            yield from _lines(value, given, f"{name}.", depth + 1)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield Line(f"{indent}{key}: {text}", given.get(name, ""))
