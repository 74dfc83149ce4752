"""Encoder trained on whole slides against frozen ones, where only pairs of rare tiles tell a class.

Draws slides in which two tiles have a rare mark, of class 1 if both kinds of it occur. Three arms
train the same aggregator over as many epochs: on features of an encoder as it was drawn, of one
trained on another task of tiles, and, from that one on, together with the encoder, on all tiles of
a slide. What is finished in the folder is not done again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spatialdl.bags.end_to_end import MODES
from spatialdl.bench.bag_end_to_end_worker import ARMS, TILES
from spatialdl.bench.results import (
    CPU,
    heading,
    kept,
    markdown,
    origin,
    parser_of,
    place,
    publish,
    save,
    words_of,
)
from spatialdl.comm.launch import mpiexec_command
from spatialdl.planning.worker import environment, run_worker

TITLES = {
    "random": "frozen, random",
    "proxy": "frozen, another task",
    "together": "trained together",
}
COLORS = {"random": "#a9b8c9", "proxy": "#d1701f", "together": "#1f5fa8"}


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    turns = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
    runs = []
    with tqdm(turns, desc="training", unit="run") as bar:
        for arm, seed in bar:
            bar.set_postfix_str(f"{arm}, seed {seed}")
            runs.append({"arm": arm, "seed": seed, **_train(options, arm, seed)})
    publish(summarise(options, runs), table, draw, Path(options.out) / "bag-end-to-end")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("bag_end_to_end", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs of each arm (%(default)s)")
    add("--slides", type=int, default=240, help="to train on (%(default)s)")
    add("--validation", type=int, default=200, help="slides to validate on (%(default)s)")
    add("--epochs", type=int, default=10, help="of each run (%(default)s)")
    add("--batch", type=int, default=4, help="slides between two updates (%(default)s)")
    add("--lr", type=float, default=3e-3, help="of AdamW (%(default)s)")
    add("--mode", choices=MODES, default="slices", help="how the encoder is trained (%(default)s)")
    add("--ranks", type=int, default=1, help="over which tiles are divided (%(default)s)")
    add(
        "--folder",
        default="outputs/bench/bag_end_to_end",
        help="where finished runs are kept (%(default)s)",
    )
    options = parser.parse_args(arguments)
    counts = (options.seeds, options.slides, options.validation, options.epochs, options.batch)
    if min(*counts, options.ranks) < 1 or options.lr <= 0:
        raise ValueError(
            "seeds, slides, validation, epochs, batch and ranks must be at least 1, lr above 0"
        )
    return options


def _train(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """One run, or what it has found before."""
    words = [f"--{name}={getattr(options, name)}" for name in _OF_A_RUN]
    command = [
        *([] if options.ranks == 1 else mpiexec_command(options.ranks)),
        *(sys.executable, "-m", "spatialdl.bench.bag_end_to_end_worker"),
        *("--arm", arm, "--seed", str(seed), *words),
    ]
    return kept(
        Path(options.folder) / f"{arm}-{seed}.json",
        words,
        lambda: run_worker(command, environment(threads=1), show=True),
    )


_OF_A_RUN = ("slides", "validation", "epochs", "batch", "lr", "mode", "ranks")


def summarise(options: argparse.Namespace, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy after the last epoch of each arm: mean and deviation over the seeds."""
    arms = {}
    for arm in ARMS:
        own = [run for run in runs if run["arm"] == arm]
        last = [run["accuracy"][-1] for run in own]
        arms[arm] = {
            "accuracy": statistics.mean(last),
            "deviation": statistics.stdev(last) if len(last) > 1 else None,
            "accuracies": last,
            "seconds": statistics.mean(run["seconds"] for run in own),
        }
    return {
        **origin("bag_end_to_end", words_of(options)),
        "device": CPU,
        "options": vars(options),
        "arms": arms,
        "runs": list(runs),
    }


def table(result: dict[str, Any]) -> str:
    """A line for each arm, as text."""
    options = result["options"]
    rows = []
    for arm, one in result["arms"].items():
        spread = "" if one["deviation"] is None else f" ± {100 * one['deviation']:.1f}"
        seeds = ", ".join(f"{100 * value:.1f}" for value in one["accuracies"])
        mean = f"{100 * one['accuracy']:.1f}{spread}"
        rows.append([TITLES[arm], mean, seeds, f"{one['seconds']:.0f}"])
    about = (
        f"{options['slides']} slides of {TILES} tiles, {options['validation']} to validate on, "
        f"{options['epochs']} epochs; the larger class has {_chance(options['validation']):.0f} %"
    )
    titles = ["encoder", "slide accuracy, %", "each seed", "s a run"]
    return "\n".join([*heading(result), about, "", *markdown(titles, rows)])


def _chance(slides: int) -> float:
    return 100 * (slides - slides // 2) / slides


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy over epochs: each run as a thin line, the mean of an arm as a thick one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), dpi=150, layout="constrained")
    panel = figure.subplots()
    for arm, title in TITLES.items():
        lines = [run["accuracy"] for run in result["runs"] if run["arm"] == arm]
        epochs = range(1, len(lines[0]) + 1)
        for line in lines:
            panel.plot(epochs, [100 * one for one in line], color=COLORS[arm], linewidth=0.7)
        means = [100 * statistics.mean(some) for some in zip(*lines, strict=True)]
        panel.plot(epochs, means, color=COLORS[arm], linewidth=2.5, label=title)
    chance = _chance(result["options"]["validation"])
    panel.axhline(chance, color="#888888", linewidth=0.8, linestyle=":", label="chance")
    panel.set_ylim(40, 102)
    panel.set_xlabel("epoch")
    panel.set_ylabel("accuracy on slides of validation, %")
    panel.legend(frameon=False, fontsize=9, loc="center right", title="encoder")
    panel.set_title(
        f"Classes that depend on two rare tiles of {TILES}, {place(result)}", fontsize=10
    )
    save(figure, path)
