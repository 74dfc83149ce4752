"""Figures of a layout: the image over the ranks, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spatialdl.comm.trace import Span
from spatialdl.parallel.layout import by, even_bounds
from spatialdl.parallel.placement import Placement, Position
from spatialdl.pipeline.action import describe
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.search import Row
from spatialdl.training.pictures.timeline import MOST_ROWS, ROW_INCHES, draw_legend, draw_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STAGES = 8
"""Maximum number of drawn stages, the first ones."""

MOST_SLABS = 8
"""Maximum number of drawn slabs of a volume, the first ones."""

_SKEW = 0.4  # shift of a slab's sides to the right, relative to its depth
_VIRTUAL: dict[str, Any] = {"colors": "white", "linestyles": "dashed", "linewidth": 0.8}
_FRONT, _SIDE = ("#c6dbef", "#9ecae1"), ("#a9c4de", "#85b3d1")


def draw_timeline(row: Row, path: Path) -> None:
    """Draw the simulated step of the first replica."""
    from matplotlib.figure import Figure

    prediction = row.prediction
    ranks = [
        [Span("compute", describe(a), start, end, a) for a, start, end in spans]
        for spans in prediction.timeline.spans[:MOST_ROWS]
    ]
    end = prediction.timeline.seconds
    for spans in ranks:
        spans.append(Span("reduce", "average gradients", end, end + prediction.reducing))
        spans.append(Span("compute", "optimizer", end + prediction.reducing, prediction.seconds))
    figure = Figure(figsize=(11, 2.0 + len(ranks) * ROW_INCHES), dpi=130, layout="constrained")
    panel = figure.subplots()
    hidden = len(prediction.timeline.spans) - len(ranks)
    more = f", {hidden} more ranks not shown" if hidden else ""
    draw_rows(panel, ranks, 0.0, f"predicted step: {prediction.placement.describe()}{more}")
    panel.set_xlabel("time since the step began, ms")
    draw_legend(figure)
    figure.savefig(path)


def draw_layout(row: Row, job: PlannedJob, path: Path) -> None:
    """Draw the image for every stage, with the rank of each tile."""
    from matplotlib.figure import Figure

    placement, size = row.prediction.placement, job.image[1:]
    stages = min(placement.stages, MOST_STAGES)
    slabs = max(grid[0] for grid in placement.grids) if len(size) == 3 else 1
    inches = max(2.6, 1.7 * min(slabs, MOST_SLABS))
    rows, cols = (stages, 1) if slabs > 1 else (1, stages)
    extent = (max(5.0, inches * cols), 0.9 + 2.7 * rows)
    figure = Figure(figsize=extent, dpi=130, layout="constrained")
    panels = figure.subplots(rows, cols, squeeze=False).flat
    again = row.prediction.recompute == "block"
    bounds = job.bounds(placement.widths, row.prediction.schedule.microbatches, again)
    steps = job.program(again).names
    for stage, (panel, (first, after)) in enumerate(zip(panels, pairwise(bounds), strict=False)):
        names = steps[first:after]
        first_layers = names[0] if len(names) == 1 else f"{names[0]}\nto {names[-1]}"
        channels = placement.tensor_parts(stage)
        divided = f"\n{channels} ranks per tile, by channels" if channels > 1 else ""
        panel.set_title(f"stage {stage}: {first_layers or 'all layers'}{divided}", fontsize=9)
        _draw_stage(panel, placement, stage, size)
    shown = "" if stages == placement.stages else f", the first {stages} stages"
    what = {1: "positions", 2: "pixels", 3: "voxels"}[len(size)]
    title = f"{by(size)} {what} on {placement.describe()}{shown}"
    figure.suptitle(f"{title}\na number is the rank that holds the tile", fontsize=10)
    figure.savefig(path)


def _draw_stage(panel: Axes, placement: Placement, stage: int, size: Sequence[int]) -> None:
    """Draw the tiles of a stage; the slabs of a volume are drawn side by side."""
    grid = placement.grids[stage]
    if len(size) == 3:
        bounds = placement.layout(stage, 1, size).cuts[0]
        for slab, (first, end) in enumerate(islice(pairwise(bounds), MOST_SLABS)):
            left = slab * (1.2 * size[2] + _SKEW * bounds[1])
            _draw_sides(panel, left, size[1:], grid[1:], _SKEW * (end - first))
            _draw_tiles(panel, placement, stage, size[1:], (left, slab))
            text = f"slices {first}:{end}"
            panel.text(left + size[2] / 2, 1.03 * size[1], text, ha="center", va="top", fontsize=8)
        if grid[0] > MOST_SLABS:
            panel.set_xlabel(f"the first {MOST_SLABS} of {grid[0]} slabs", fontsize=8)
        panel.autoscale_view()
        panel.invert_yaxis()
        panel.set_xticks([])
        panel.spines[:].set_visible(False)
    else:
        # high enough to read the ranks of a signal
        height, width = size if len(size) == 2 else (max(1, size[0] // 8), size[0])
        _draw_tiles(panel, placement, stage, (height, width), (0, 0))
        panel.set_xlim(0, width)
        panel.set_ylim(height, 0)
        panel.set_xticks([0, width])
        panel.set_xlabel("columns, pixels" if len(size) == 2 else "positions", fontsize=8)
        panel.set_ylabel("rows, pixels" if len(size) == 2 else "", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panel.set_yticks([0, size[0]] if len(size) == 2 else [])
    panel.set_aspect("equal")
    panel.tick_params(labelsize=7)


def _draw_tiles(
    panel: Axes,
    placement: Placement,
    stage: int,
    size: Sequence[int],
    slab: tuple[float, int],
) -> None:
    """Draw the tiles of an image or a slab with the first replica's ranks, in each copy.

    Dashed lines separate virtual tiles.

    Args:
        slab: position of its left edge, and its number.
    """
    from matplotlib.patches import Rectangle

    rows, cols = (1, *placement.grids[stage])[-2:]
    tiles = (1, *(placement.stream or (1,) * placement.dims))[-2:]
    fine = [even_bounds(n, m * k) for n, m, k in zip(size, (rows, cols), tiles, strict=True)]
    parts = placement.axes(stage).parts
    ranks = [
        [_names_of(placement, stage, part, copy) for part in range(parts)]
        for copy in range(placement.copies)
    ]
    left, number = slab
    digits = max(len(name) for names in ranks for name in names)
    font = min(8.0, (100 if len(placement.grids[stage]) == 3 else 200) / (cols * digits))
    for (row, (y0, y1)), (col, (x0, x1)) in product(
        enumerate(pairwise(fine[0][:: tiles[0]])),
        enumerate(pairwise(fine[1][:: tiles[1]])),
    ):
        colour = _FRONT[(row + col) % 2]
        place = (left + x0, y0)
        panel.add_patch(Rectangle(place, x1 - x0, y1 - y0, facecolor=colour, edgecolor="white"))
        if max(rows, cols) <= 16:
            part = (number * rows + row) * cols + col
            text = "\n".join(names[part] for names in ranks)
            middle = left + (x0 + x1) / 2, (y0 + y1) / 2
            panel.text(*middle, text, ha="center", va="center", fontsize=font)
    inside = [
        [bound for n, bound in enumerate(bounds) if n % each]
        for bounds, each in zip(fine, tiles, strict=True)
    ]
    panel.hlines(inside[0], left, left + size[1], **_VIRTUAL)
    panel.vlines([left + bound for bound in inside[1]], 0, size[0], **_VIRTUAL)


def _draw_sides(
    panel: Axes, left: float, size: Sequence[int], grid: Sequence[int], deep: float
) -> None:
    """Draw the upper and right faces of the tiles of a slab."""
    from matplotlib.patches import Polygon

    height, width = size
    up = 0.6 * deep
    faces = []
    for col, (x0, x1) in enumerate(pairwise(even_bounds(width, grid[1]))):
        faces.append((col, [(x0, 0), (x1, 0), (x1 + deep, -up), (x0 + deep, -up)]))
    for row, (y0, y1) in enumerate(pairwise(even_bounds(height, grid[0]))):
        right = [(width, y0), (width, y1), (width + deep, y1 - up), (width + deep, y0 - up)]
        faces.append((row + grid[1] - 1, right))
    for number, corners in faces:
        shifted = [(left + x, y) for x, y in corners]
        panel.add_patch(Polygon(shifted, facecolor=_SIDE[number % 2], edgecolor="white"))


def _names_of(placement: Placement, stage: int, part: int, copy: int = 0) -> str:
    """Ranks of one part of a stage in the first replica; ranks that split channels joined by +."""
    ranks = placement.tensor_ranks(Position(0, stage, part, copy))
    named = [str(rank) for rank in ranks]
    return "+".join(named if len(named) <= 6 else [*named[:4], "...", named[-1]])
