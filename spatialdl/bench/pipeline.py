"""Pipelines and GEMS against layer parallelism and their simulation, in one job.

The simulated ideal is the time of a step with the measured times of its actions, but without waits
for messages, averaging of gradients and weight updates.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spatialdl.bench.device import add_device, worker_command
from spatialdl.bench.results import (
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
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.worker import environment, run_worker

ONE_AFTER_THE_OTHER = "layer parallel"
INTERLEAVE = 2


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    command = worker_command("pipeline_worker", options.ranks, options)
    found = run_worker(command, environment(threads=1), show=True)
    name = f"pipeline-{options.model}-{options.size}-{options.ranks}ranks"
    publish(summarise(options, found), table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("pipeline", __doc__)
    parser.add_argument(
        "--model", default="resnet18", help="function of spatialdl.models (%(default)s)"
    )
    parser.add_argument("--size", type=int, default=512, help="side of the images (%(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="ranks, with one stage each (%(default)s)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=8, help="micro-batches of one image (%(default)s)"
    )
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=6, help="steps per layout (%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.size, options.rounds) < 1 or options.ranks < 2:
        raise ValueError("size and rounds must be at least 1, ranks at least 2")
    if options.microbatches < 2 or options.microbatches % 2:
        raise ValueError(
            f"--microbatches {options.microbatches} must be even: GEMS divides them over two "
            "replicas"
        )
    return options


def summarise(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, and of ratios per round."""
    base = found["layouts"][ONE_AFTER_THE_OTHER]
    slowest = [seconds / base["images"] for seconds in base["seconds"]]
    layouts = {}
    for name, one in found["layouts"].items():
        per_image = [seconds / one["images"] for seconds in one["seconds"]]
        layouts[name] = {
            "images_per_second": 1 / statistics.median(per_image),
            "ideal_images_per_second": one["images"] / statistics.median(one["ideal"]),
            "speed_up": median_ratio(slowest, per_image),
            "reached": median_ratio(one["ideal"], one["seconds"]),
            "held": one["held"],
        }
    return {
        **origin("pipeline", words_of(options)),
        "device": found["device"],
        "options": vars(options),
        "rounds": found["layouts"],
        "layouts": layouts,
    }


def table(result: dict[str, Any]) -> str:
    """Table with a line per layout."""
    keys = ("images_per_second", "speed_up", "ideal_images_per_second", "reached")
    titles = ["", "images/s", "/ layer parallel", "ideal images/s", "reached", "held"]
    rows = [
        [name, *(f"{one[key]:.2f}" for key in keys), str(one["held"])]
        for name, one in result["layouts"].items()
    ]
    lines = [
        *heading(result),
        *markdown(titles, rows),
        "",
        "ideal: simulated from the measured times of actions (on an accelerator: in another step",
        "that synchronises after each action, so reached may exceed 1);",
        "reached: ideal time / time;",
        "held: largest number of micro-batches whose activations a rank holds",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of images per second, with a mark at the simulated ideal."""
    from matplotlib.figure import Figure

    options, layouts = result["options"], result["layouts"]
    figure = Figure(figsize=(8, 3.8), dpi=150, layout="constrained")
    panel = figure.subplots()
    names = list(layouts)
    panel.barh(names, [layouts[n]["images_per_second"] for n in names], color="#1f5fa8")
    for row, name in enumerate(names):
        one = layouts[name]
        ideal = one["ideal_images_per_second"]
        panel.plot([ideal, ideal], [row - 0.4, row + 0.4], color="black", linewidth=1.2)
        text = f"  {one['speed_up']:.2f} of layer parallel, {one['reached']:.0%} of ideal"
        panel.text(max(ideal, one["images_per_second"]), row, text, va="center", fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.7 * max(one["ideal_images_per_second"] for one in layouts.values()))
    panel.set_xlabel("images per second; the black mark is the simulator's ideal")
    panel.set_title(
        f"{options['model']}, {options['size']}x{options['size']}, {options['ranks']} ranks, "
        f"micro-batches of one image, up to {options['microbatches']} of them, {place(result)}",
        loc="left",
        fontsize=10,
    )
    save(figure, path)


class NamedLayout(NamedTuple):
    """A layout of a network on ranks; micro-batches are of one image."""

    name: str
    placement: Placement
    schedule: Schedule


def layouts(ranks: int, microbatches: int) -> list[NamedLayout]:
    """Layer parallelism, pipelines, and GEMS with one or more images per replica."""
    plain = Placement(1, ((1, 1),) * ranks)
    dealt = Placement(1, ((1, 1),) * ranks * INTERLEAVE, INTERLEAVE)
    mirrored = Placement(1, ((1, 1),) * ranks, mirrored=True)

    def made(name: str, placement: Placement, kind: str, count: int, times: int = 1) -> NamedLayout:
        return NamedLayout(name, placement, make_schedule(kind, placement, count, times))

    return [
        made(ONE_AFTER_THE_OTHER, plain, "gpipe", 1),
        made("GPipe", plain, "gpipe", microbatches),
        made("1F1B", plain, "1f1b", microbatches),
        made("zero bubble", plain, "zero_bubble", microbatches),
        made("interleaved", dealt, "interleaved", microbatches),
        made("GEMS mast", mirrored, "mast", 2),
        made("GEMS master", mirrored, "master", microbatches, microbatches // 2),
        made("GEMS basic", mirrored, "basic", 2),
        made("GEMS basic, more", mirrored, "basic", microbatches),
    ]
