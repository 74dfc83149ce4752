"""Shared code of the benchmarks: options, tables, pictures and result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spatialdl.data.saving import load_json, save_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU = "CPU"
"""Device name of CPUs; the machine's description has the model."""


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Parser of a benchmark's command line, with ``--out`` for `publish`."""
    parser = argparse.ArgumentParser(prog=f"python -m spatialdl.bench {name}", description=about)
    parser.add_argument("--out", default="outputs/bench", help="output folder (%(default)s)")
    return parser


def words_of(options: argparse.Namespace) -> list[str]:
    """Command-line arguments of these options, without ``--out``."""
    words = []
    for key, value in vars(options).items():
        if key != "out" and value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{key.replace('_', '-')}", *map(str, values)]
    return words


def origin(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Command, machine and date of a benchmark."""
    command = " ".join(["python -m spatialdl.bench", name, *words])
    return {"command": command, "machine": machine(), "date": time.strftime("%Y-%m-%d")}


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """Median of the ratios per round."""
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


def publish(
    result: dict[str, Any],
    table: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None],
    path: Path,
) -> None:
    """Print a result in Markdown, and write `path`.md, .json and .png."""
    text = table(result)
    print(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.md").write_text(text + "\n")
    path.with_name(f"{path.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result, path.with_name(f"{path.name}.png"))
    print(f"\nwritten: {path}.md, .json and .png")


def kept(path: Path, words: Sequence[str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Result of `work`, cached in a JSON file under the same words."""
    cached = load_json(path)
    if cached is None or cached["words"] != list(words):
        cached = {"words": list(words), "found": work()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json(path, cached)
    found: dict[str, Any] = cached["found"]
    return found


def heading(result: dict[str, Any], *more: str) -> list[str]:
    """Heading lines: command, machine and date."""
    found = [result[key] for key in ("machine", "device", "mpi") if key in result]
    where = ", ".join([*(text for text in found if text != CPU), *more, result["date"]])
    return [f"`{result['command']}`", "", where, ""]


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of an aligned table in Markdown: first column left, all others right.

    Args:
        titles: titles of the columns.
        rows: cells by row.
    """
    lines = [list(titles), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [_line(cells, widths) for cells in (lines[0], rule, *lines[1:])]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(padded)} |"


def place(result: dict[str, Any]) -> str:
    """Short name of the device or the cores of a result, for pictures."""
    device: str = result["device"]
    return (result["machine"] if device == CPU else device).partition(",")[0]


def save(figure: Figure, path: Path) -> None:
    """Write a picture, without top and right spines."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def machine() -> str:
    """Number of cores and CPU model."""
    return f"{os.cpu_count()} cores, {cpu_model()}"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
