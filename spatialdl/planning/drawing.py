"""Pictures of a layout: the image on the ranks, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from spatialdl.comm.trace import Span
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import describe
from spatialdl.planning.job import Job
from spatialdl.planning.search import Row
from spatialdl.training.pictures.timeline import MOST_ROWS, ROW_INCHES, draw_legend, draw_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STAGES = 8
"""So many stages are drawn, the first ones."""


def draw_timeline(row: Row, path: Path) -> None:
    """A step of the first replica as the simulator sees it."""
    from matplotlib.figure import Figure

    one = row.prediction
    ranks = [
        [Span("compute", describe(a), start, end, a) for a, start, end in spans]
        for spans in one.timeline.spans[:MOST_ROWS]
    ]
    end = one.timeline.seconds
    for spans in ranks:
        spans.append(Span("reduce", "average gradients", end, end + one.reducing))
        spans.append(Span("compute", "optimizer", end + one.reducing, one.seconds))
    figure = Figure(figsize=(11, 2.0 + len(ranks) * ROW_INCHES), dpi=130, layout="constrained")
    panel = figure.subplots()
    hidden = len(one.timeline.spans) - len(ranks)
    more = f", {hidden} more ranks are not drawn" if hidden else ""
    draw_rows(panel, ranks, 0.0, f"a step, predicted: {one.placement.describe()}{more}")
    panel.set_xlabel("ms")
    draw_legend(figure)
    figure.savefig(path)


def draw_layout(row: Row, job: Job, path: Path) -> None:
    """Of every stage the image, and which rank holds which tile."""
    from matplotlib.figure import Figure

    placement = row.prediction.placement
    stages = min(placement.stages, MOST_STAGES)
    figure = Figure(figsize=(max(5.0, 2.6 * stages), 3.6), dpi=130, layout="constrained")
    panels = figure.subplots(1, stages, squeeze=False)[0]
    again = row.prediction.recompute == "block"
    bounds = job.bounds(placement.widths, row.prediction.schedule.microbatches, again)
    steps = job.program(again).names
    for stage, (panel, (first, after)) in enumerate(zip(panels, pairwise(bounds), strict=False)):
        names = steps[first:after]
        what = names[0] if len(names) == 1 else f"{names[0]}\nto {names[-1]}"
        panel.set_title(f"stage {stage}: {what or 'all layers'}", fontsize=9)
        _draw_stage(panel, placement, stage, job.image[1:])
    shown = "" if stages == placement.stages else f", the first {stages} stages"
    height, width = job.image[1:]
    figure.suptitle(f"{height}x{width} on {placement.describe()}{shown}", fontsize=10)
    figure.savefig(path)


def _draw_stage(panel: Axes, placement: Placement, stage: int, size: Sequence[int]) -> None:
    """The tiles of a stage, with the rank of the first replica, and of its other copy."""
    from matplotlib.patches import Rectangle

    height, width = size
    rows, cols = placement.grids[stage]
    ranks = [placement.ranks(stage, 0, copy) for copy in range(placement.copies)]
    written = max(rows, cols) <= 16
    for part in range(rows * cols):
        row, col = divmod(part, cols)
        y0, y1 = row * height // rows, (row + 1) * height // rows
        x0, x1 = col * width // cols, (col + 1) * width // cols
        colour = ("#c6dbef", "#9ecae1")[(row + col) % 2]
        panel.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=colour, edgecolor="white"))
        if written:
            text = "\n".join(str(one[part]) for one in ranks)
            panel.text((x0 + x1) / 2, (y0 + y1) / 2, text, ha="center", va="center", fontsize=8)
    panel.set_xlim(0, width)
    panel.set_ylim(height, 0)
    panel.set_aspect("equal")
    panel.tick_params(labelsize=7)
    panel.set_xticks([0, width])
    panel.set_yticks([0, height])
    panel.spines[["top", "right"]].set_visible(False)
