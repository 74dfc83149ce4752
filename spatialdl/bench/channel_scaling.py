"""Simulated strong scaling to thousands of GPUs by samples, space and channels.

Nothing is trained: the planner predicts costs on a cluster of conf/cluster. The batch size is
fixed, so with more GPUs than images several work on each image. Each point is the fastest layout
that fits into memory, among those that divide the dimensions of the curve.
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
from spatialdl.bench.results import markdown, origin, publish, save
from spatialdl.bench.scaling import options_of
from spatialdl.parallel.layout import nearly_cubic
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.auto import cluster_file
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import CannotWork, PlannedJob, Recompute
from spatialdl.planning.predict import Prediction, predict
from spatialdl.planning.setup import cluster_named

TENSOR = (1, 2, 4, 8, 16)
"""Sizes of the tensor axis to try."""

MOST_PARTS = 64
"""Maximum number of ranks per image."""


class TrainingCase(NamedTuple):
    """A network and its batch of images.

    Attributes:
        keys: arguments of the network.
    """

    title: str
    model: str
    size: tuple[int, ...]
    batch: int
    keys: tuple[tuple[str, Any], ...]


CASES = (
    TrainingCase(
        "ResNet-50, 4 times as wide, 224x224", "resnet50", (224, 224), 32, (("width", 256),)
    ),
    TrainingCase("ResNet-50, 4096x4096", "resnet50", (4096, 4096), 32, (("num_classes", 10),)),
    TrainingCase(
        "3-D U-Net, 256x256x256", "unet3d", (256,) * 3, 32, (("num_classes", 3), ("width", 32))
    ),
)
CURVES = {
    "samples": (False, False),
    "and space": (True, False),
    "and channels": (False, True),
    "all three": (True, True),
}
"""Whether images, and channels, are divided in addition to samples."""

PUBLISHED = (
    "Dryden et al. report up to 4.1 times shorter training of residual networks by channel and\n"
    "filter parallelism (SC 2019, abstract, without numbers of GPUs; measured)"
)


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    cluster = cluster_named(cluster_file(options.cluster))
    cases = []
    with tqdm(total=sum(len(_numbers(c, options.most)) for c in CASES), unit="number") as progress:
        for case in CASES:
            points = []
            for ranks in _numbers(case, options.most):
                progress.set_postfix_str(f"{case.title}, {ranks} GPUs")
                points.append({"ranks": ranks, "curves": _fastest(case, cluster, ranks)})
                progress.update()
            cases.append({"title": case.title, "batch": case.batch, "points": points})
    result = {
        **origin("channel_scaling", arguments),
        "cluster": cluster.name,
        "cases": cases,
    }
    publish(result, table, draw, Path(options.out) / f"channel-scaling-{cluster.name}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    return options_of("channel_scaling", __doc__, arguments)


def _numbers(case: TrainingCase, most: int) -> list[int]:
    """Numbers of GPUs: from two images per GPU to `MOST_PARTS` GPUs per image."""
    numbers = (case.batch * 2**n // 2 for n in range(MOST_PARTS.bit_length() + 1))
    return [number for number in numbers if 0 < number <= min(most, case.batch * MOST_PARTS)]


def _fastest(case: TrainingCase, cluster: Cluster, ranks: int) -> dict[str, Any]:
    """The fastest layout that fits, by curve."""
    job = _job(case)
    found: dict[str, Any] = {}
    for placement in _placements(case, ranks):
        one = _predicted(job, cluster, placement)
        if one is None:
            continue
        has = max(map(max, placement.grids)) > 1, placement.most_tensor_parts > 1
        for name, may in CURVES.items():
            allowed = all(can or not uses for can, uses in zip(may, has, strict=True))
            if allowed and one.seconds < found.get(name, {"seconds": float("inf")})["seconds"]:
                found[name] = {"seconds": one.seconds, "layout": placement.describe()}
    return found


@functools.cache
def _job(case: TrainingCase) -> PlannedJob:
    network = getattr(models, case.model)(**dict(case.keys))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    channels, segments = 3 if len(case.size) == 2 else 1, case.model.startswith("unet")
    return PlannedJob(
        network, (channels, *case.size), case.batch, optimizer, segments, on_cpu=False
    )


def _placements(case: TrainingCase, ranks: int) -> Iterator[Placement]:
    """Layouts with one stage, and with a second stage that divides channels of whole images."""
    dims = len(case.size)
    for data in (2**n for n in range(12) if case.batch % 2**n == 0):
        if ranks % data or ranks // data > MOST_PARTS:
            continue
        each = ranks // data
        for tensor in TENSOR:
            if each % tensor == 0:
                grid = nearly_cubic(each // tensor, dims)
                yield Placement(data, (grid,), tensor=(tensor,))
        half = each // 2
        if half in TENSOR[1:] and data < case.batch:
            grids = nearly_cubic(half, dims), (1,) * dims
            yield Placement(data, grids, tensor=(1, half))


def _predicted(job: PlannedJob, cluster: Cluster, placement: Placement) -> Prediction | None:
    """The fastest variant that fits: samples at once or in sequence, with or without recompute."""
    best: Prediction | None = None
    size, each = job.image[1:], job.batch // placement.data
    if any(n < parts for n, parts in zip(size, placement.grids[0], strict=True)):
        return None
    tried: tuple[Recompute, ...] = ("none", "block")
    for pieces in sorted({1, each}):
        for again in tried:
            try:
                schedule = make_schedule("1f1b", placement, pieces)
                one = predict(job, cluster, placement, schedule, again)
            except CannotWork:
                break
            if cluster.memory_gb is None or max(one.memory) <= 1e9 * cluster.memory_gb:
                if best is None or one.seconds < best.seconds:
                    best = one
                break
    return best


def table(result: dict[str, Any]) -> str:
    """Table with a line per number of GPUs: seconds of each curve, and the fastest layout."""
    lines = [result["command"], f"simulated: {result['cluster']} on paper, {result['date']}"]
    for case in result["cases"]:
        rows = []
        for point in case["points"]:
            curves = point["curves"]
            times = [f"{curves[n]['seconds']:.4g}" if n in curves else "-" for n in CURVES]
            best = curves.get("all three", {"layout": "none fits"})["layout"]
            rows.append([str(point["ranks"]), *times, gain(curves), best])
        titles = ["GPUs", *CURVES, "gain", "layout of all three"]
        heading = f"{case['title']}, {case['batch']} images, seconds a step"
        lines += ["", heading, "", *markdown(titles, rows)]
    lines += ["", "gain: speed-up of a step from also dividing channels", PUBLISHED]
    return "\n".join(lines)


def gain(curves: dict[str, Any]) -> str:
    """Speed-up from channels, in addition to samples and space."""
    if "and space" not in curves:
        return "-"
    return f"{curves['and space']['seconds'] / curves['all three']['seconds']:.2f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot images per second over the number of GPUs, one panel per case."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(result["cases"]), squeeze=False)[0]
    colours = dict(zip(CURVES, ("0.75", "#d1701f", "#5a9e5a", "#1f5fa8"), strict=True))
    for panel, case in zip(panels, result["cases"], strict=True):
        for name in CURVES:
            there = [point for point in case["points"] if name in point["curves"]]
            x = [point["ranks"] for point in there]
            y = [case["batch"] / point["curves"][name]["seconds"] for point in there]
            dashes, size = "--" if name == "all three" else "-", 9 if name == "samples" else 4
            panel.plot(x, y, f"o{dashes}", color=colours[name], markersize=size, label=name)
        panel.set(xscale="log", yscale="log", xlabel="GPUs")
        ticks = [point["ranks"] for point in case["points"]]
        panel.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_locator(NullLocator())
        panel.set_title(f"{case['title']}, {case['batch']} images", fontsize=10)
    panels[0].set_ylabel("images a second, simulated")
    panels[0].legend(frameon=False, fontsize=8, title="divided", title_fontsize=8)
    save(figure, path)
