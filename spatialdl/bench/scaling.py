"""Simulated scaling to thousands of GPUs, compared with the papers of GEMS and Hy-Fi.

Nothing is trained: the planner predicts costs on a cluster of conf/cluster. Each point is the
fastest of some layouts that fit into memory.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from spatialdl import models
from spatialdl.bench.results import origin, parser_of, publish, save
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.auto import cluster_file
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import CannotWork, PlannedJob, Recompute
from spatialdl.planning.predict import Prediction, predict
from spatialdl.planning.setup import cluster_named

MOST = 2048


class ScalingCase(NamedTuple):
    """A network on images of a size.

    Attributes:
        first: smallest number of GPUs, the reference of efficiencies.
        grids: numbers of parts of an image to try.
        batch: images per step of strong scaling.
        each: GPUs per image of weak scaling; may be below 1.
    """

    title: str
    model: str
    size: int
    first: int
    grids: tuple[int, ...]
    batch: int
    each: float


CASES = (
    ScalingCase("ResNet-110 v2, 1024x1024", "resnet110_v2", 1024, 1, (1, 2), 2048, 0.5),
    ScalingCase("ResNet-50, 16384x16384", "resnet50", 16384, 8, (8, 16, 32, 64), 128, 8),
    ScalingCase(
        "ResNet-50, 100000x100000", "resnet50", 100_000, 256, (256, 512, 1024, 2048), 1, 256
    ),
)
PUBLISHED = {
    "ResNet-110 v2, 1024x1024": (
        1024,
        0.9732,
        "GEMS: 97.32 % on 1,024 V100\n(a ResNet of 1,000 layers)",
    ),
}
"""Jain et al., SC 2020, abstract. That of Hy-Fi (ISC 2022) has 2,048 GPUs, but no efficiency."""

ONE, ROWS, SQUARE = (1, 1), (2, 1), (2, 2)
SIDE, IMAGES = 2048, 4
Tried = list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]
LAYOUTS: dict[str, Tried] = {  # on four GPUs: grids of the stages, numbers of micro-batches
    "layers": [((ONE,) * 4, (1,))],
    "pipeline": [((ONE,) * 4, (2, 4))],
    "space, and with a pipeline": [((SQUARE,), (1, 4)), ((ROWS,) * 2, (2, 4))],
}
HYBRID = "Hy-Fi reports up to 2.67 times layers and 1.68 times a pipeline (abstract, ISC 2022)"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    cluster = cluster_named(cluster_file(options.cluster))
    numbers = [n for case in CASES for n in _numbers(case, options.most)]
    found = []
    with tqdm(total=2 * len(numbers), desc="numbers of GPUs", unit="number") as bar:
        for case in CASES:
            curves: dict[str, Any] = {}
            for kind in ("weak", "strong"):
                curves[kind] = []
                for ranks in _numbers(case, options.most):
                    bar.set_postfix_str(f"{case.title}, {kind}, {ranks}")
                    curves[kind].append(_point(case, cluster, kind, ranks))
                    bar.update()
            found.append({**case._asdict(), "curves": curves})
    result = {
        "hybrid": {name: _fastest(cluster, name) for name in LAYOUTS},
        **origin("scaling", arguments),
        "cluster": cluster.name,
        "cases": found,
    }
    publish(result, table, draw, Path(options.out) / f"scaling-{cluster.name}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    return options_of("scaling", __doc__, arguments)


def options_of(name: str, doc: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a simulation on a cluster of conf/cluster."""
    parser = parser_of(name, doc)
    parser.add_argument(
        "--cluster", default="infiniband", help="file of conf/cluster (%(default)s)"
    )
    parser.add_argument("--most", type=int, default=MOST, help="largest number (%(default)s)")
    options = parser.parse_args(arguments)
    if options.most < 1:
        raise ValueError(f"--most {options.most} must be at least 1 GPU")
    return options


def _numbers(case: ScalingCase, most: int) -> list[int]:
    return [2**n for n in range(12) if case.first <= 2**n <= most]


@functools.cache
def _job(model: str, size: int) -> PlannedJob:
    network = getattr(models, model)(num_classes=10)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return PlannedJob(network, (3, size, size), 1, optimizer, on_cpu=False)


def _point(case: ScalingCase, cluster: Cluster, kind: str, ranks: int) -> dict[str, Any] | None:
    """The fastest layout that fits into memory; None if none does."""
    batch = case.batch if kind == "strong" else max(1, round(ranks / case.each))
    job = _job(case.model, case.size)
    job.batch = batch
    best: tuple[Prediction, str] | None = None
    for name, placement, schedule, recompute in _layouts(case, ranks, batch):
        try:
            found = predict(job, cluster, placement, schedule, recompute)
        except CannotWork:
            continue
        fits = cluster.memory_gb is None or max(found.memory) <= 1e9 * cluster.memory_gb
        if fits and (best is None or found.seconds < best[0].seconds):
            best = found, name
    if best is None:
        return None
    one, name = best
    return {
        "ranks": ranks,
        "batch": batch,
        "layout": name,
        "seconds": one.seconds,
        "images_per_second": batch / one.seconds,
        "memory_gb": max(one.memory) / 1e9,
    }


def _fastest(cluster: Cluster, name: str) -> float:
    """Seconds of a step of ResNet-50 on four GPUs in the fastest layout."""
    job = _job("resnet50", SIDE)
    job.batch = IMAGES
    placements = [(Placement(1, grids), pieces) for grids, most in LAYOUTS[name] for pieces in most]
    return min(
        predict(job, cluster, one, make_schedule("1f1b", one, pieces), "none").seconds
        for one, pieces in placements
    )


def _layouts(
    case: ScalingCase, ranks: int, batch: int
) -> Iterator[tuple[str, Placement, Schedule, Recompute]]:
    again: tuple[Recompute, ...] = ("none", "block")
    for parts in case.grids:
        if ranks % parts or ranks // parts > batch:
            continue
        rows, cols = nearly_cubic(parts)
        data = ranks // parts
        placement = Placement(data, ((rows, cols),))
        for pieces in sorted({1, batch // data}):  # all images at once, or in sequence
            for recompute in again:
                name = f"{data} x {rows}x{cols}, {pieces} micro-batches, recompute {recompute}"
                yield name, placement, make_schedule("1f1b", placement, pieces), recompute
    for stages in (2, 4):
        if case.first > 1 or ranks % stages or batch < 2 * ranks // stages:
            continue
        data = ranks // stages
        mirrored = Placement(data, ((1, 1),) * stages, mirrored=True)
        yield f"{data} x GEMS of {stages}", mirrored, make_schedule("basic", mirrored, 2), "none"


def efficiencies(points: Sequence[dict[str, Any] | None]) -> list[tuple[int, float]]:
    """Images per second per GPU, relative to the smallest number of GPUs that works."""
    there = [point for point in points if point is not None]
    each = [(p["ranks"], p["images_per_second"] / p["ranks"]) for p in there]
    return [(ranks, rate / each[0][1]) for ranks, rate in each]


def table(result: dict[str, Any]) -> str:
    """Tables with a line per number of GPUs."""
    lines = [result["command"], f"{result['cluster']} on paper, {result['date']}"]
    for case in result["cases"]:
        for kind, points in case["curves"].items():
            lines += ["", f"{case['title']}, {kind} scaling"]
            lines.append(
                f"{'GPUs':>6}{'images':>8}{'s a step':>10}{'images/s':>10}{'efficiency':>12}"
                f"{'GB':>7}  layout"
            )
            shares = dict(efficiencies(points))
            for point in (one for one in points if one is not None):
                lines.append(
                    f"{point['ranks']:6}{point['batch']:8}{point['seconds']:10.4g}"
                    f"{point['images_per_second']:10.4g}{shares[point['ranks']]:12.1%}"
                    f"{point['memory_gb']:7.1f}  {point['layout']}"
                )
    seconds = result["hybrid"]
    lines += ["", f"ResNet-50, {IMAGES} images of {SIDE}x{SIDE} on 4 GPUs, seconds a step"]
    for name, one in seconds.items():
        lines.append(f"{name:28}{one:8.4f}{seconds['layers'] / one:8.2f} times layers")
    lines.append(HYBRID)
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot efficiency over the number of GPUs, one panel per case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(result["cases"]), sharey=True, squeeze=False)[0]
    colours = {"weak": "#1f5fa8", "strong": "#d1701f"}
    highest = 100.0
    for panel, case in zip(panels, result["cases"], strict=True):
        for kind, points in case["curves"].items():
            shares = efficiencies(points)
            label = f"{kind} scaling, simulated"
            x, y = [n for n, _ in shares], [100 * share for _, share in shares]
            panel.plot(x, y, "o-", color=colours[kind], markersize=4, label=label)
            highest = max([highest, *y])
        if case["title"] in PUBLISHED:
            ranks, share, text = PUBLISHED[case["title"]]
            panel.plot([ranks], [100 * share], "*", color="black", markersize=10, label=text)
        panel.set_xscale("log", base=2)
        panel.axhline(100, color="0.8", linewidth=0.8, zorder=0)
        ticks = [2**n for n in range(12) if case["first"] <= 2**n]
        shown = ticks if len(ticks) <= 5 else ticks[-1::-2]
        panel.set_xticks(shown, [f"{n:,}" for n in shown], fontsize=8)
        panel.set_title(case["title"], fontsize=10)
        panel.set_xlabel("GPUs")
        panel.legend(frameon=False, fontsize=8, loc="lower left")
    panels[0].set_ylim(0, 1.08 * highest)
    panels[0].set_ylabel("images/s per GPU, % of the smallest number")
    save(figure, path)
