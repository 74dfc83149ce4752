"""Last layers of a network on several ranks: division of space, samples or channels.

Late layers have few pixels, and many channels and weights (Dryden et al., SC 2019). All variants
train the same weights on the same images, alternately in one job, and start from the same loss.
Measured times are compared with predictions of the planner.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl import models
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
from spatialdl.comm.device_path import device_of
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.auto import cluster_file
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import MEASURED, cluster_named
from spatialdl.planning.worker import environment, run_worker

NETWORKS = ("resnet50", "vgg16")
SIDES = ("space", "samples", "channels")
ALONE = "one process"
COLUMNS = ("held_mb", "weights_mb", "sent_mb")
CLASSES = 10


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    planned = predicted(options, cluster_named(cluster_file(options.cluster)))
    command = worker_command("late_worker", options.ranks, options)
    found = run_worker(command, environment(threads=1), show=True)
    name = f"late-{options.network}-{options.ranks}ranks"
    publish(summarise(options, found, planned), table, draw, Path(options.out) / name)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("late", __doc__)
    parser.add_argument(
        "--network",
        choices=NETWORKS,
        default="resnet50",
        help="last of four stages and head of a ResNet-50, or dense layers of a VGG-16 "
        "(%(default)s)",
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="images per step (%(default)s)")
    parser.add_argument(
        "--size", type=int, default=2048, help="side of the images of a ResNet-50 (%(default)s)"
    )
    parser.add_argument("--alone", action="store_true", help="also run a single process")
    parser.add_argument("--rounds", type=int, default=3, help="steps per variant (%(default)s)")
    add_device(parser)
    parser.add_argument(
        "--cluster",
        help=f"file of conf/cluster for the planner ({MEASURED}, on accelerators nvlink_node)",
    )
    options = parser.parse_args(arguments)
    if options.cluster is None:
        options.cluster = MEASURED if device_of(options.device).type == "cpu" else "nvlink_node"
    if min(options.rounds, options.batch) < 1 or options.ranks < 2 or options.size < 32:
        raise ValueError("rounds and batch must be at least 1, ranks at least 2, size at least 32")
    if options.batch % options.ranks:
        raise ValueError(
            f"--batch {options.batch} must be a multiple of --ranks {options.ranks}, to divide "
            "samples evenly"
        )
    return options


def network_of(options: argparse.Namespace) -> tuple[nn.Module, tuple[int, ...]]:
    """The late layers, and the shape of their input without the batch dim."""
    torch.manual_seed(0)
    if options.network == "resnet50":
        side = options.size // 16
        return models.resnet50(num_classes=CLASSES)[7:], (1024, side, side)
    layers = nn.Sequential(
        *(nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, CLASSES)),
    )
    return layers, (512, 7, 7)


class _Earlier(nn.Module):
    """Stand-in for the earlier layers, which need the gradient of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def predicted(options: argparse.Namespace, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step by variant, as predicted by the planner."""
    late, shape = network_of(options)
    optimizer = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    model, on_cpu = nn.Sequential(_Earlier(), *late.children()), cluster.cores is not None
    job = PlannedJob(model, shape, options.batch, optimizer, on_cpu=on_cpu)
    ranks, whole = options.ranks, (1, 1)
    placements = (
        Placement(1, (nearly_cubic(ranks),)),
        Placement(ranks, (whole,)),
        Placement(1, (whole,), tensor=(ranks,)),
    )
    return {
        name: predict(job, cluster, one, make_schedule("gpipe", one, 1), "none").seconds
        for name, one in zip(SIDES, placements, strict=True)
    }


def summarise(
    options: argparse.Namespace, found: dict[str, Any], planned: Mapping[str, float]
) -> dict[str, Any]:
    """Medians over the rounds, and of ratios to the division of space per round.

    Args:
        options: options of the benchmark.
        found: measurements of the ranks.
        planned: predicted seconds by variant.
    """
    base = found["sides"][SIDES[0]]["seconds"]
    sides = {
        name: {
            **one,
            "median": statistics.median(one["seconds"]),
            "ratio": median_ratio(one["seconds"], base),
            "predicted": planned.get(name),
        }
        for name, one in found["sides"].items()
    }
    return {
        **origin("late", words_of(options)),
        "device": found["device"],
        "options": vars(options),
        "sides": sides,
    }


def table(result: dict[str, Any]) -> str:
    """Table with a line per variant."""
    rows = [
        [
            name,
            f"{one['median']:.3g}",
            f"{one['ratio']:.2f}",
            "" if one["predicted"] is None else f"{one['predicted']:.3g}",
            f"{one['cpu_seconds']:.3g}",
            *(f"{one[column]:.1f}" for column in COLUMNS),
        ]
        for name, one in result["sides"].items()
    ]
    titles = ["divided", "s a step", "/ space", "predicted, s", "CPU s", "held, MB"]
    titles += ["weights, MB", "sent, MB"]
    lines = [
        *heading(result),
        *markdown(titles, rows),
        "",
        "CPU s: of all ranks with waits; per rank: activations held from forward to backward,",
        "weights with gradients and momentum, and data sent or all-reduced in a step",
        "",
        picked(result["sides"]),
    ]
    return "\n".join(lines)


def picked(sides: Mapping[str, Mapping[str, Any]]) -> str:
    """The planner's choice of the three divisions, and whether it was the fastest."""
    choice = min(SIDES, key=lambda name: sides[name]["predicted"])
    fastest = min(SIDES, key=lambda name: sides[name]["median"])
    if choice == fastest:
        return f"the planner picks {choice}, the fastest of the three"
    more = sides[choice]["median"] / sides[fastest]["median"] - 1
    return f"the planner picks {choice}, which takes {more:.0%} longer than {fastest}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of time, memory and sent data by variant."""
    from matplotlib.figure import Figure

    names = list(result["sides"])
    panels = {
        "s a step": [result["sides"][name]["median"] for name in names],
        "held and weights, MB a rank": [
            result["sides"][name]["held_mb"] + result["sides"][name]["weights_mb"] for name in names
        ],
        "sent in a step, MB a rank": [result["sides"][name]["sent_mb"] for name in names],
    }
    figure = Figure(figsize=(10, 3.2), dpi=150, layout="constrained")
    for panel, (title, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        colors = ["#1f5fa8" if name == SIDES[-1] else "#a9b8c9" for name in names]
        bars = panel.bar(names, values, color=colors, width=0.6)
        panel.bar_label(
            bars,
            [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values],
            fontsize=8,
        )
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.margins(y=0.15)
    options = result["options"]
    figure.suptitle(
        f"last layers of {options['network']}, {options['batch']} images, {options['ranks']} ranks "
        f"on {place(result)}",
        fontsize=10,
    )
    save(figure, path)
