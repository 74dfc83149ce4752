"""What actions cost in reality, from what the ranks have recorded of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from spatialdl.comm.trace import Span
from spatialdl.pipeline.action import Action, Kind
from spatialdl.pipeline.simulate import Costs


def measured_costs(ranks: Sequence[Sequence[Span]], stages: int) -> Costs:
    """Medians over the micro-batches of what forwards, backwards and weight actions took.

    An action ends with its slowest rank. The time in which it waited for another stage does not
    count.

    Args:
        ranks: per rank the spans of one or more steps.
        stages: of the network; those that nobody recorded cost nothing.
    """
    seconds: dict[tuple[Kind, int], list[float]] = {}
    for spans in ranks:
        for action, busy in busy_times(spans):
            seconds.setdefault((action.kind, action.stage), []).append(busy)

    def of(kind: Kind) -> list[float]:
        return [median(seconds.get((kind, stage), [0.0])) for stage in range(stages)]

    return Costs(of("forward"), of("backward"), weight=of("weight"))


def busy_times(spans: Sequence[Span]) -> list[tuple[Action, float]]:
    """Actions of one rank with their seconds, hand-overs taken away."""
    waits = [span for span in spans if span.kind == "hand-over"]
    found = []
    for span in spans:
        if isinstance(span.detail, Action):
            inside = (w for w in waits if span.start <= w.start and w.end <= span.end)
            waited = sum(wait.end - wait.start for wait in inside)
            found.append((span.detail, span.end - span.start - waited))
    return found
