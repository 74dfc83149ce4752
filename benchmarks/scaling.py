"""Simulated scaling to thousands of GPUs, compared with the papers of GEMS, Hy-Fi and Dryden et al.

Nothing is trained: the planner predicts costs on a cluster of conf/cluster. Each point is the
fastest of some layouts that fit into memory: of images in layers, pipelines and space, and of
samples, space and channels at a fixed batch, where several GPUs work on each image.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness import Lines, add_numbers, markdown, origin, parser_of, publish, start
from spatialdl import models
from spatialdl.layout.layout import nearly_cubic
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import CannotWork, PlannedJob, Recompute
from spatialdl.planning.predict import Prediction, predict
from spatialdl.planning.setup import cluster_file, cluster_named


class Layout(NamedTuple):
    """A layout to try: its placement, schedule, and number of micro-batches."""

    placement: Placement
    pieces: int = 1
    kind: str = "1f1b"


class ImageCase(NamedTuple):
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


IMAGE_CASES = (
    ImageCase("ResNet-110 v2, 1024x1024", "resnet110_v2", 1024, 1, (1, 2), 2048, 0.5),
    ImageCase("ResNet-50, 16384x16384", "resnet50", 16384, 8, (8, 16, 32, 64), 128, 8),
    ImageCase("ResNet-50, 100000x100000", "resnet50", 100_000, 256, (256, 512, 1024, 2048), 1, 256),
)
GEMS = "GEMS reports 97.32 % efficiency on 1,024 V100 (ResNet of 1,000 layers; abstract, SC 2020)"

ONE, ROWS, SQUARE = (1, 1), (2, 1), (2, 2)
SIDE, IMAGES = 2048, 4
HYBRID: dict[str, list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]] = {
    "layers": [((ONE,) * 4, (1,))],  # on four GPUs: grids of the stages, numbers of micro-batches
    "pipeline": [((ONE,) * 4, (2, 4))],
    "space, and with a pipeline": [((SQUARE,), (1, 4)), ((ROWS,) * 2, (2, 4))],
}
HY_FI = "Hy-Fi reports up to 2.67 times layers and 1.68 times a pipeline (abstract, ISC 2022)"


class ChannelCase(NamedTuple):
    """A network with the given arguments, and its batch of images."""

    title: str
    model: str
    size: tuple[int, ...]
    batch: int
    keys: tuple[tuple[str, Any], ...]


CHANNEL_CASES = (
    ChannelCase(
        "ResNet-50, 4 times as wide, 224x224", "resnet50", (224, 224), 32, (("width", 256),)
    ),
    ChannelCase("ResNet-50, 4096x4096", "resnet50", (4096, 4096), 32, (("num_classes", 10),)),
    ChannelCase(
        "3-D U-Net, 256x256x256", "unet3d", (256,) * 3, 32, (("num_classes", 3), ("width", 32))
    ),
)
TENSOR, MOST_PARTS = (1, 2, 4, 8, 16), 64
"""Sizes of the tensor axis to try, and maximum number of ranks per image."""
CURVES = {
    "samples": (False, False),
    "and space": (True, False),
    "and channels": (False, True),
    "all three": (True, True),
}
"""Whether images, and channels, are divided in addition to samples."""
DRYDEN = (
    "Dryden et al. report up to 4.1 times shorter training of residual networks by channels "
    "(abstract, SC 2019, without numbers of GPUs; measured)"
)


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    cluster = cluster_named(cluster_file(options.cluster))
    result = {**origin("scaling", arguments), "cluster": cluster.name}
    if "images" in options.parts:
        result["images"] = [_image_case(case, cluster, options.most) for case in IMAGE_CASES]
        result["hybrid"] = {name: _hybrid(cluster, name) for name in HYBRID}
    if "channels" in options.parts:
        result["channels"] = [_channel_case(case, cluster, options.most) for case in CHANNEL_CASES]
    publish(result, table(result), _panels(result), Path(options.out) / f"scaling-{cluster.name}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("scaling", __doc__)
    text = "file of conf/cluster (%(default)s)"
    parser.add_argument("--cluster", default="infiniband", help=text)
    parts = ("images", "channels")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="parts (both)")
    add_numbers(parser, most=(2048, 1, "largest number of GPUs"))
    return parser.parse_args(arguments)


def _fastest(job: PlannedJob, cluster: Cluster, layouts: Iterable[Layout]) -> Found | None:
    """The fastest layout that fits into memory, with or without recomputation of blocks."""
    best: Found | None = None
    for layout in layouts:
        tried: tuple[Recompute, ...] = ("none",) if layout.placement.mirrored else ("none", "block")
        schedule = make_schedule(layout.kind, layout.placement, layout.pieces)
        for recompute in tried:
            try:
                one = predict(job, cluster, layout.placement, schedule, recompute)
            except CannotWork:
                break
            if cluster.memory_gb is None or max(one.memory) <= 1e9 * cluster.memory_gb:
                if best is None or one.seconds < best.prediction.seconds:
                    best = Found(layout, recompute, one)
                break  # recomputation takes longer
    return best


class Found(NamedTuple):
    """A layout that fits, and its costs."""

    layout: Layout
    recompute: Recompute
    prediction: Prediction

    def describe(self) -> str:
        pieces, recompute = self.layout.pieces, self.recompute
        where = self.layout.placement.describe()
        return f"{where}, {pieces} micro-batches, recompute {recompute}"


@functools.cache
def _job(
    model: str, size: tuple[int, ...], keys: tuple[tuple[str, Any], ...] = (("num_classes", 10),)
) -> PlannedJob:
    network = getattr(models, model)(**dict(keys))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    channels, segments = 3 if len(size) == 2 else 1, model.startswith("unet")
    return PlannedJob(network, (channels, *size), 1, optimizer, segments, on_cpu=False)


# --- images: layers, pipelines and space


def _image_case(case: ImageCase, cluster: Cluster, most: int) -> dict[str, Any]:
    """Points of weak and strong scaling."""
    curves: dict[str, list[dict[str, Any]]] = {"weak": [], "strong": []}
    numbers = [2**n for n in range(12) if case.first <= 2**n <= most]
    job = _job(case.model, (case.size,) * 2)
    for kind, ranks in tqdm([(k, n) for k in curves for n in numbers], case.title, unit="number"):
        job.batch = case.batch if kind == "strong" else max(1, round(ranks / case.each))
        best = _fastest(job, cluster, _image_layouts(case, ranks, job.batch))
        if best is not None:
            one = best.prediction
            point = {"ranks": ranks, "batch": job.batch, "layout": best.describe()}
            point |= {"seconds": one.seconds, "memory_gb": max(one.memory) / 1e9}
            curves[kind].append(point)
    return {**case._asdict(), "curves": curves}


def _image_layouts(case: ImageCase, ranks: int, batch: int) -> Iterator[Layout]:
    for parts in case.grids:
        if ranks % parts or ranks // parts > batch:
            continue
        data = ranks // parts
        placement = Placement(data, (nearly_cubic(parts),))
        for pieces in sorted({1, batch // data}):  # all images at once, or in sequence
            yield Layout(placement, pieces)
    for stages in (2, 4):
        if case.first == 1 and ranks % stages == 0 and batch >= 2 * ranks // stages:
            mirrored = Placement(ranks // stages, (ONE,) * stages, mirrored=True)
            yield Layout(mirrored, 2, "basic")


def _hybrid(cluster: Cluster, name: str) -> float:
    """Seconds of a step of ResNet-50 on four GPUs in the fastest layout."""
    job = _job("resnet50", (SIDE, SIDE))
    job.batch = IMAGES
    layouts = [Layout(Placement(1, grids), n) for grids, most in HYBRID[name] for n in most]
    best = _fastest(job, cluster, layouts)
    if best is None:
        raise ValueError(f"{IMAGES} images of {SIDE}x{SIDE} do not fit on four GPUs by {name}")
    return best.prediction.seconds


def efficiencies(points: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Images per second per GPU, relative to the smallest number of GPUs."""
    each = [(one["ranks"], one["batch"] / one["seconds"] / one["ranks"]) for one in points]
    return [(ranks, rate / each[0][1]) for ranks, rate in each]


# --- channels, beside samples and space


def _channel_case(case: ChannelCase, cluster: Cluster, most: int) -> dict[str, Any]:
    """By number of GPUs, from two images per GPU on, the fastest layout of each curve."""
    job = _job(case.model, case.size, case.keys)
    job.batch = case.batch
    numbers = (case.batch * 2**n // 2 for n in range(MOST_PARTS.bit_length() + 1))
    points = []
    for ranks in tqdm([n for n in numbers if 0 < n <= most], case.title, unit="number"):
        found = [_fastest(job, cluster, layouts) for layouts in _channel_layouts(case, ranks)]
        curves: dict[str, Any] = {}
        for one in (one for one in found if one is not None):
            place, seconds = one.layout.placement, one.prediction.seconds
            uses = max(map(max, place.grids)) > 1, place.most_tensor_parts > 1
            for name, may in CURVES.items():
                allowed = all(can or not has for can, has in zip(may, uses, strict=True))
                if allowed and (name not in curves or seconds < curves[name]["seconds"]):
                    curves[name] = {"seconds": seconds, "layout": place.describe()}
        points.append({"ranks": ranks, "curves": curves})
    return {"title": case.title, "batch": case.batch, "points": points}


def _channel_layouts(case: ChannelCase, ranks: int) -> Iterator[list[Layout]]:
    """Layouts with one stage, and with a second stage that divides channels of whole images.

    By placement, with samples at once or in sequence.
    """
    dims = len(case.size)
    for data in (2**n for n in range(12) if case.batch % 2**n == 0):
        if ranks % data or ranks // data > MOST_PARTS:
            continue
        each = ranks // data
        places = [
            Placement(data, (nearly_cubic(each // tensor, dims),), tensor=(tensor,))
            for tensor in TENSOR
            if each % tensor == 0
        ]
        if each // 2 in TENSOR[1:] and data < case.batch:
            grids = nearly_cubic(each // 2, dims), (1,) * dims
            places.append(Placement(data, grids, tensor=(1, each // 2)))
        for place in places:
            if all(n >= parts for n, parts in zip(case.size, place.grids[0], strict=True)):
                yield [Layout(place, pieces) for pieces in sorted({1, case.batch // data})]


def gain(curves: dict[str, Any]) -> str:
    """Speed-up from channels, in addition to samples and space."""
    if "and space" not in curves:
        return "-"
    return f"{curves['and space']['seconds'] / curves['all three']['seconds']:.2f}"


# --- report


def table(result: dict[str, Any]) -> list[str]:
    """Tables with a line per number of GPUs."""
    lines = [f"simulated: {result['cluster']} on paper"]
    for case in result.get("images", ()):
        for kind, points in case["curves"].items():
            rows = [
                [
                    *(str(one["ranks"]), str(one["batch"]), f"{one['seconds']:.4g}"),
                    *(f"{one['batch'] / one['seconds']:.4g}", f"{share:.1%}"),
                    *(f"{one['memory_gb']:.1f}", one["layout"]),
                ]
                for one, (_, share) in zip(points, efficiencies(points), strict=True)
            ]
            titles = ["GPUs", "images", "s per step", "images/s", "efficiency", "GB", "layout"]
            lines += ["", f"{case['title']}, {kind} scaling", "", *markdown(titles, rows)]
    if "hybrid" in result:
        seconds = result["hybrid"]
        rows = [[k, f"{s:.4f}", f"{seconds['layers'] / s:.2f}"] for k, s in seconds.items()]
        about = f"ResNet-50, {IMAGES} images of {SIDE}x{SIDE} on 4 GPUs"
        lines += ["", GEMS, "", about, "", *markdown(["", "s per step", "times layers"], rows)]
        lines += ["", HY_FI]
    for case in result.get("channels", ()):
        rows = []
        for point in case["points"]:
            curves = point["curves"]
            times = [f"{curves[n]['seconds']:.4g}" if n in curves else "-" for n in CURVES]
            best = curves.get("all three", {"layout": "none fits"})["layout"]
            rows.append([str(point["ranks"]), *times, gain(curves), best])
        about = f"{case['title']}, {case['batch']} images, seconds per step"
        lines += ["", about, "", *markdown(["GPUs", *CURVES, "gain", "layout of all three"], rows)]
    if "channels" in result:
        lines += ["", "gain: speed-up of a step from also dividing channels", DRYDEN]
    return lines


def _panels(result: dict[str, Any]) -> list[Lines]:
    panels = [
        Lines(
            *(case["title"], "GPUs", "images/s per GPU, share of the smallest number"),
            {f"{kind} scaling": efficiencies(one) for kind, one in case["curves"].items()},
            "x",
        )
        for case in result.get("images", ())
        if any(case["curves"].values())
    ]
    for case in result.get("channels", ()):
        curves: dict[str, list[tuple[float, float]]] = {
            name: [
                (point["ranks"], case["batch"] / point["curves"][name]["seconds"])
                for point in case["points"]
                if name in point["curves"]
            ]
            for name in CURVES
        }
        title = f"{case['title']}, {case['batch']} images"
        panels.append(Lines(title, "GPUs", "images a second", curves, "xy"))
    return panels


if __name__ == "__main__":
    start(main)
