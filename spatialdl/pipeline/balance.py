"""Finds the cut of a list of steps that minimizes the cost of the heaviest stage.

Inputs and outputs of a stage add to its cost, so that of equally good cuts the one with less
traffic wins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spatialdl.pipeline.steps import IMAGE, Recording, Value, run_step
from spatialdl.random import keyed
from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.torch_internals import tree_leaves

OPERATIONS_PER_ELEMENT = 20
"""Cost of a memory-bound operation per element of its output, in multiply-adds."""


@dataclass(frozen=True)
class StepCosts:
    """Costs of a network's steps, and of passing their values between stages.

    Attributes:
        steps: in any unit.
        values: for both sides, in the same unit; values without an entry cost 0.
    """

    steps: Sequence[float]
    values: dict[Value, float]


def estimated(model: nn.Module, recording: Recording, image: tuple[int, ...]) -> StepCosts:
    """Estimate time by operation counts; memory-bound operations cost by the element.

    Args:
        recording: of the network in evaluation, for images of shape `image`.
        image: (N, C, *spatial).
    """
    counts = []
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    values = {IMAGE: torch.zeros(image, dtype=dtype, device="meta")}
    shadow = meta_copy(model)
    with torch.no_grad(), on_meta(), keyed(0, 0):
        for step in recording.steps:
            with FlopCounterMode(display=False) as counter:
                run_step(step, shadow, values, torch.device("meta"))
            elements = sum(values[value].numel() for value in step.gives)
            counts.append(counter.get_total_flops() / 2 + OPERATIONS_PER_ELEMENT * elements)
    return StepCosts(
        counts, {v: float(OPERATIONS_PER_ELEMENT * n) for v, n in recording.sizes.items()}
    )


def balance(
    costs: StepCosts,
    recording: Recording,
    widths: Sequence[int],
    places: Container[int] | None = None,
) -> list[int]:
    """Minimize the largest ``cost / width`` of a stage; exact.

    Args:
        widths: ranks of each stage.
        places: steps at which a stage may begin, at least as many as stages; by default any.

    Returns:
        Bounds: stage s has the steps ``[bounds[s], bounds[s + 1])``, at least one.
    """
    steps, table = len(costs.steps), _stage_costs(costs, recording)

    @cache
    def best(stage: int, stop: int) -> tuple[float, tuple[int, ...]]:
        """Cost of the heaviest stage, and bounds, of stages 0 to `stage` over `stop` steps."""
        if stage == 0:
            return table[0][stop] / widths[0], (0, stop)
        options = [(inf, (0,) * (stage + 2))]
        for start in range(stage, stop):
            if places is not None and start not in places:
                continue
            heaviest, bounds = best(stage - 1, start)
            own = table[start][stop] / widths[stage]
            options.append((max(heaviest, own), (*bounds, stop)))
        return min(options)

    return list(best(len(widths) - 1, steps)[1])


def _stage_costs(costs: StepCosts, recording: Recording) -> list[list[float]]:
    """``[start][stop]``: cost of the steps between them, with their inputs and outputs."""
    sums = [0.0, *accumulate(costs.steps)]
    uses: dict[Value, list[int]] = defaultdict(list)
    for number, step in enumerate(recording.steps):
        for value in set(step.takes):
            uses[value].append(number)
    for value in tree_leaves(recording.output, is_leaf=lambda leaf: isinstance(leaf, Value)):
        if isinstance(value, Value):
            uses[value].append(len(recording.steps) - 1)
    table = []
    for start in range(len(recording.steps)):
        changes = [0.0] * (len(recording.steps) + 2)
        for value, numbers in uses.items():
            cost = costs.values.get(value, 0.0)
            if value.step < start:  # an input, if any step of the stage takes it
                first = next((n for n in numbers if n >= start), None)
                if first is not None and value.step >= 0:
                    changes[first + 1] += cost
            elif numbers[-1] > value.step:  # an output, if a later step takes it
                changes[value.step + 1] += cost
                changes[numbers[-1] + 1] -= cost
        passing = list(accumulate(changes))[: len(sums)]
        rows = zip(sums, passing, strict=True)
        table.append([total - sums[start] + more for total, more in rows])
    return table
