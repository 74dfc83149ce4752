"""HTML report of a training run, one self-contained file."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from spatialdl.common.pages import as_data, as_svg, save_page
from spatialdl.common.text import readable_bytes, without_passwords
from spatialdl.training.console.validation_table import (
    SHARES,
    class_rows,
    confusion_rows,
    metric_label,
    metric_text,
    scalar_metrics,
)
from spatialdl.training.pictures.curves import draw_curves, few_validated
from spatialdl.training.step_sync import PARTS
from spatialdl.version import __version__

_MOST_ROWS = 30  # validations in the table; the middle of a longer list is left out
_PART_TEXT = {
    "compute": "layers, loss and optimizer",
    "halo": "waiting for halos of neighbouring tiles",
    "hand_over": "waiting for activations and gradients of other stages",
    "reduce": "all-reduces (gradients, BatchNorm, loss), including waits for slower ranks",
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
    timeline: Path | None = None,
    ended: str = "",
) -> None:
    """Write the report atomically.

    Args:
        path: HTML file to write.
        title: title of the run.
        config: resolved and shown without passwords.
        overrides: command-line overrides.
        table: start table, see `start_table`.
        names: class or target names.
        steps: rows of ``metrics.csv``.
        validations: metrics of each validation, lists included.
        summary: ``images_per_second``, ``peak_memory_mb`` (one per rank), ``device_memory_mb``,
            ``offloaded_mb`` (per rank, see `offloaded_mb`) and ``time_split``; each is optional.
        timeline: picture of a step, if any.
        ended: why the run ended early.
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
        curves=as_svg(draw_curves("", steps, validations)) if steps else "",
        split=_split(summary.get("time_split") or {}),
        step_seconds=(summary.get("time_split") or {}).get("seconds_per_step"),
        validations=_validations(validations),
        classes=class_rows(last, names),
        confusion=_confusion(last, names),
        few=_few(validations),
        timeline=as_data(timeline.read_bytes(), "png") if timeline else "",
        settings=OmegaConf.to_yaml(OmegaConf.create(plain)),
        overrides=overrides,
        environment=_environment(),
    )


def _facts(
    steps: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Headline results, as names and values."""
    facts = []
    few = few_validated(validations)
    if validations:
        last = scalar_metrics(validations[-1])
        shown = [n for n in last if n in (*SHARES, "rmse", "mae", "r2")]
        shown = [n for n in shown if few is None or not n.startswith(few[1])][:2]
        facts += [(metric_label(name), metric_text(name, last[name])) for name in shown]
        facts.append(("validation loss", metric_text("loss", last.get("loss"))))
    if steps:
        facts.append(("training loss", f"{steps[-1]['loss']:.4g}"))
        facts.append(("steps", f"{int(steps[-1]['step']):,}"))
    rate = summary.get("images_per_second")
    if rate:
        facts.append(("images per second", f"{rate:.3g}"))
    memory = summary.get("peak_memory_mb")
    if memory:
        facts.append(("peak memory of a rank", readable_bytes(round(max(memory) * 2**20))))
    used = [mb for mb in summary.get("device_memory_mb") or () if mb is not None]
    if used:  # includes the device context, NCCL buffers and other processes
        facts.append(("device memory in use", readable_bytes(round(max(used) * 2**20))))
    stored = [one for one in summary.get("offloaded_mb") or () if one is not None]
    for what in ("written", "read") if stored else ():
        total = round(sum(one[what] for one in stored) * 1e6)
        facts.append((f"{what}, activations off the device", readable_bytes(total)))
    return facts


def _split(shares: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "name": part.replace("_", "-"),
            "share": 100 * shares[part],
            "description": _PART_TEXT[part],
        }
        for part in PARTS
        if part in shares
    ]


def _validations(validations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header and one row per validation; metrics that are never defined are left out."""
    if not validations:
        return []
    names = [
        name
        for name in scalar_metrics(validations[0])
        if any(metrics.get(name) is not None for metrics in validations)
    ]
    rows = [
        [str(metrics["step"]), *(metric_text(name, metrics.get(name)) for name in names)]
        for metrics in validations
    ]
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ["..."] * len(rows[0]), *rows[-half:]]
    return [["step", *map(metric_label, names)], *rows]


def _confusion(metrics: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Confusion matrix; each cell has its text and its share of the row, for the shading."""
    rows = confusion_rows(metrics, names)
    if not rows:
        return {}
    pairs = metrics["confusion_matrix"]
    body = []
    for (name, *cells), counts in zip(rows[1:], pairs, strict=True):
        total = sum(counts) or 1
        shares = [round(count / total, 3) for count in counts]
        body.append({"name": name, "cells": list(zip(cells, shares, strict=False))})
    return {"head": rows[0][1:], "rows": body}


def _few(validations: Sequence[Mapping[str, Any]]) -> str:
    """A warning about metrics of few slides."""
    few = few_validated(validations)
    return f"{few[0]}: their metrics say little, and are not drawn above." if few else ""


def _environment() -> list[tuple[str, str]]:
    mpi = sys.modules.get("mpi4py.MPI")
    rows = [
        ("spatialdl", __version__),
        ("PyTorch", torch.__version__),
        ("Python", platform.python_version()),
        ("MPI", mpi.Get_library_version().strip("\0").splitlines()[0].strip(", ") if mpi else "-"),
        ("host of rank 0", f"{socket.gethostname()}, {platform.platform()}"),
    ]
    return rows if mpi else [row for row in rows if row[0] != "MPI"]
