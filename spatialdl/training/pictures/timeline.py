"""Trace of the first steps of a run, and a timeline of one step with its simulation."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spatialdl.comm import trace
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.trace import Span
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.simulate import (
    Action,
    Lists,
    actions_of,
    describe,
    measured_costs,
    simulate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger("spatialdl.comm.trace")

STEPS = 3
"""Number of recorded steps; the first is slower, as it allocates memory and times exchanges."""

COLOURS = {
    "forward": "#6baed6",
    "backward": "#2171b5",
    "halo": "#e6550d",
    "hand-over": "#d9d9d9",
    "reduce": "#756bb1",
    "data": "#a1622d",
    "optimizer": "#74c476",
}
ROW_INCHES = 0.34
MOST_ROWS = 32


class StepTimeline:
    """Records the first steps of all ranks; collective, all ranks must create and call it.

    Args:
        world: all ranks.
        device: device of this rank.
        placement: the layout.
        train: actions of a step, see `pipeline.schedule`.
        run_dir: folder in which rank 0 writes ``trace.json`` and ``timeline.png``.
    """

    def __init__(
        self,
        world: Communicator,
        device: torch.device,
        placement: Placement,
        train: Lists,
        run_dir: Path,
    ) -> None:
        self._world, self._placement, self._train = world, placement, train
        self._run_dir = run_dir
        self._steps: list[list[Span]] = []
        world.barrier()
        if device.type != "cpu":
            # not the whole device: a gradient all-reduce may wait for ranks that wait for this one
            trace.start(torch.accelerator.current_stream(device).synchronize)
        else:
            trace.start()

    def step_done(self, last: bool) -> None:
        """Record a step; write the files after `STEPS` steps or the last one."""
        if not trace.enabled():
            return
        self._steps.append(trace.take())
        if len(self._steps) < STEPS and not last:
            return
        trace.stop()
        gathered = self._world.gather(self._steps)
        if gathered is not None:
            try:
                self._write(gathered)
            except OSError as error:  # a full disk must not abort the run
                log.warning("cannot write the trace: %s", error)

    def _write(self, ranks: list[list[list[Span]]]) -> None:
        write_trace(self._run_dir / "trace.json", [list(chain(*steps)) for steps in ranks])
        picture = self._run_dir / "timeline.png"
        draw_step([steps[-1] for steps in ranks], self._placement, self._train, picture)
        log.info("trace:         %s", self._run_dir / "trace.json")
        log.info("timeline:      %s", picture)


def write_trace(path: Path, ranks: Sequence[Sequence[Span]]) -> None:
    """Write Chrome's trace event format for Perfetto or chrome://tracing, one track per rank."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(ranks))
    ]
    for rank, spans in enumerate(ranks):
        for span in spans:
            event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": 0, "tid": rank}
            event |= {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            if hasattr(span.detail, "_asdict"):
                event["args"] = span.detail._asdict()
            events.append(event)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def simulated(
    ranks: Sequence[Sequence[Span]], placement: Placement, train: Lists
) -> list[list[Span]]:
    """Simulate the step with measured costs of actions and instant messages."""
    seen = {span.detail for spans in ranks for span in spans if isinstance(span.detail, Action)}
    done = [[action for action in actions if action in seen] for actions in train]
    actions = [actions_of(rank, placement, done) for rank in placement.replica_ranks(0)]
    rows = simulate(actions, measured_costs(ranks, placement.stages)).spans
    places = (placement.place(rank) for rank in range(placement.world_size))
    return [
        [Span("compute", describe(action), start, end, action) for action, start, end in row]
        for row in (rows[place % placement.replica_size] for place in places)
    ]


def draw_step(
    ranks: Sequence[Sequence[Span]], placement: Placement, train: Lists, path: Path
) -> None:
    """Draw a measured step and its simulation below."""
    from matplotlib.figure import Figure

    ideal = simulated(ranks, placement, train)
    begin = min((span.start for spans in ranks for span in spans), default=0.0)
    end = max((span.end for spans in ranks for span in spans), default=0.0)
    rows = min(len(ranks), MOST_ROWS)
    figure = Figure(figsize=(11, 2.2 + 2 * rows * ROW_INCHES), dpi=130, layout="constrained")
    measured, ideal_axes = figure.subplots(2, 1, sharex=True)
    longest = max((spans[-1].end for spans in ideal if spans), default=0.0)
    draw_rows(measured, ranks[:rows], begin, f"one step, {placement.describe()}")
    draw_rows(ideal_axes, ideal[:rows], 0.0, "simulated: same actions, instant messages")
    measured.axvline(1e3 * (end - begin), color="0.3", linewidth=0.8)
    ideal_axes.axvline(1e3 * longest, color="0.3", linewidth=0.8)
    ideal_axes.set_xlabel("time since the step began, ms")
    draw_legend(figure)
    figure.savefig(path)


def draw_legend(figure: Figure) -> None:
    """Add a legend of the colours at the bottom."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


def draw_rows(axes: Axes, ranks: Sequence[Sequence[Span]], begin: float, title: str) -> None:
    """Draw the spans of each rank in one row, in ms since `begin`."""
    for row, spans in enumerate(ranks):
        # a span that ends first is nested in a later one: draw it on top
        for span in reversed(spans):
            start, length = 1e3 * (span.start - begin), 1e3 * (span.end - span.start)
            action = span.detail if isinstance(span.detail, Action) else None
            colour = COLOURS[action.kind if action else _colour_name(span)]
            axes.broken_barh(
                [(start, length)],
                (row - 0.42, 0.84),
                facecolors=colour,
                edgecolor="white",
                linewidth=0.6 if action else 0.0,
            )
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _colour_name(span: Span) -> str:
    return span.kind if span.kind in COLOURS else "optimizer"
