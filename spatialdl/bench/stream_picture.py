"""Picture of the `stream` benchmark: memory and CPU time over the image size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spatialdl.bench.results import place, save

STREAMED, WHOLE = "#1f5fa8", "#d0862a"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw memory of the process with the limit, and CPU seconds with the ideal."""
    from matplotlib.figure import Figure

    options = result["options"]
    rows = [row for row in result["rows"] if row["fits"]]
    names = [f"{row['size']} x {row['size']}\n{row['precision']}" for row in rows]
    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    for panel, key in ((memory, "resident_gb"), (seconds, "cpu_seconds")):
        _bars(panel, rows, key)
        panel.set_xticks(range(len(rows)), names, fontsize=8)
        panel.set_yscale("log")
        panel.margins(y=0.15)
    limit = options["limit_gb"]
    memory.axhline(limit, color="#8a8a8a", linewidth=1, linestyle="dotted")
    memory.set_title(f"peak memory of the process, GB; dotted: the limit, {limit:g} GB", fontsize=9)
    seconds.set_title("CPU seconds of the first training step", fontsize=9)
    seconds.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(f"ResNet-18 on one process, {place(result)}", fontsize=10)
    save(figure, path)


def _bars(panel: Any, rows: list[dict[str, Any]], key: str) -> None:
    """Bars of the streamed and the whole image; hatched if extrapolated."""
    places = range(len(rows))
    bars = panel.bar(
        [at - 0.2 for at in places],
        [row[key] for row in rows],
        width=0.38,
        color=STREAMED,
        label="streamed",
    )
    panel.bar_label(bars, fontsize=8, fmt="%.3g")
    for is_measured, title in ((True, "whole image"), (False, "whole image, extrapolated")):
        there = [
            at
            for at, row in enumerate(rows)
            if "ideal" in row and row["is_measured"] == is_measured
        ]
        if not there:
            continue
        bars = panel.bar(
            [at + 0.2 for at in there],
            [rows[at]["ideal"][key] for at in there],
            width=0.38,
            color=WHOLE if is_measured else "none",
            edgecolor=WHOLE,
            hatch=None if is_measured else "///",
            label=title,
        )
        panel.bar_label(bars, fontsize=8, fmt="%.3g")
