"""Analysis of features on ranks against scikit-learn on as many threads."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bench.device import worker_command
from spatialdl.bench.results import (
    CPU,
    heading,
    markdown,
    median_ratio,
    origin,
    parser_of,
    place,
    publish,
    save,
    words_of,
)
from spatialdl.planning.worker import environment, run_worker

OURS, THEIRS = "spatialdl", "scikit-learn"
COLORS = {OURS: "#1f5fa8", THEIRS: "#d0862a"}
WHAT = {
    "kmeans": "k-means, 16 clusters, 10 iterations",
    "pca": "PCA, 16 components, exact",
    "tsvd": "truncated SVD, 16 components, randomised",
    "ridge": "ridge regression, 4 targets",
    "neighbours": "16 nearest rows of 1,000",
}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    turns = [
        (ranks, name)
        for _ in range(options.rounds)
        for ranks in options.ranks
        for name in (OURS, THEIRS)
    ]
    found = [_run(options, *turn) for turn in tqdm(turns, "runs", unit="run")]
    result = summarise(options, list(zip(turns, found, strict=True)))
    publish(result, table, draw, Path(options.out) / "analysis")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("analysis", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks or threads (%(default)s)")
    add("--rows", type=int, default=40_000, help="rows on all ranks together (%(default)s)")
    add("--width", type=int, default=256, help="features per row (%(default)s)")
    add("--rounds", type=int, default=3, help="rounds (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.rounds, *options.ranks) < 1 or options.rows < 2000 or options.width < 32:
        raise ValueError("rounds and ranks must be at least 1, rows 2000 and width 32")
    return options


def _run(options: argparse.Namespace, ranks: int, name: str) -> dict[str, Any]:
    """Seconds of each method, and one value of its result for comparison."""
    if name == OURS:
        settings = argparse.Namespace(**{**vars(options), "device": "cpu", "library": OURS})
        return run_worker(worker_command("analysis_worker", ranks, settings), environment(1))
    words = json.dumps({**vars(options), "device": "cpu", "library": THEIRS})
    command = [sys.executable, "-m", "spatialdl.bench.analysis_worker", words]
    return run_worker(command, environment(ranks))


def summarise(
    options: argparse.Namespace, found: Sequence[tuple[tuple[int, str], dict[str, Any]]]
) -> dict[str, Any]:
    """Medians over the rounds, and medians of the ratios per round.

    Raises:
        RuntimeError: results of the two libraries differ.
    """
    rows = []
    for method in WHAT:
        values = [one["values"][method] for _, one in found]
        spread = max(values) - min(values)
        if spread > 1e-8 * max(1.0, abs(values[0])):
            raise RuntimeError(f"{method}: results differ by {spread:.3g} between runs: {values}")
        for ranks in options.ranks:
            seconds = {
                name: [one["seconds"][method] for turn, one in found if turn == (ranks, name)]
                for name in (OURS, THEIRS)
            }
            rows.append(
                {
                    "method": method,
                    "ranks": ranks,
                    "seconds": {name: statistics.median(of) for name, of in seconds.items()},
                    "times_as_fast": median_ratio(seconds[THEIRS], seconds[OURS]),
                    "all": seconds,
                }
            )
    return {
        **origin("analysis", words_of(options)),
        "device": CPU,
        "options": vars(options),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Table of seconds by method and number of ranks."""
    options = result["options"]
    titles = ["method", "ranks or threads", f"{OURS}, s", f"{THEIRS}, s", "times as fast"]
    rows = [
        [
            WHAT[row["method"]],
            str(row["ranks"]),
            *(f"{row['seconds'][name]:.3f}" for name in (OURS, THEIRS)),
            f"{row['times_as_fast']:.2f}",
        ]
        for row in result["rows"]
    ]
    about = f"{options['rows']:,} rows of {options['width']} numbers in float64; medians of "
    lines = [
        *heading(result),
        *markdown(titles, rows),
        "",
        f"{about}{options['rounds']} rounds, results equal to 1e-8",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of seconds over the number of ranks, one panel per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(WHAT))
    for panel, (method, what) in zip(panels, WHAT.items(), strict=True):
        rows = [row for row in result["rows"] if row["method"] == method]
        at = range(len(rows))
        for offset, name in ((-0.2, OURS), (0.2, THEIRS)):
            heights = [row["seconds"][name] for row in rows]
            panel.bar([k + offset for k in at], heights, 0.38, color=COLORS[name], label=name)
        panel.set_xticks(list(at), [str(row["ranks"]) for row in rows])
        panel.set_xlabel("ranks or threads", fontsize=8)
        panel.set_title(what.replace(", ", ",\n", 1), fontsize=9)
        panel.tick_params(labelsize=8)
    panels[0].set_ylabel("seconds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{result['options']['rows']:,} rows, {place(result)}", fontsize=10)
    save(figure, path)
