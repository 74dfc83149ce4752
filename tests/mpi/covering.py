"""The rows of `equality_cases` that are run each time: a covering array, drawn from all rows.

Any two values of a row's settings that some row has together, and any schedule, recomputation and
layout, stand together in one of the rows drawn. Rows beyond them are left to `make test-slow`. A
new row needs nothing here: it is drawn if it brings two values together for the first time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import combinations

from tests.mpi.equality_cases import Case

COST = {
    "amoebanet_d": 9, "resnet110_v2": 7, "resnet50": 7, "swin": 6, "unet3d": 4, "resnet18": 3,
    "unet": 3, "vit": 3,
}  # fmt: skip
"""Of a step of a network, beside 2 of the small ones."""


def settings(case: Case) -> dict[str, Hashable]:
    """What a row says of a layout; networks and sizes are covered apart."""
    return {
        "layout": case.parallel,
        "schedule": case.schedule,
        "recompute": case.recompute,
        "dims": len(case.size),
        "stream": bool(case.stream),
        "tensor": 0 if not case.tensor else 1 if 1 in case.tensor else 2,  # some stages or all
        "shard": case.shard,
        "sync": case.sync,
        "clip": bool(case.clip),
        "local": bool(case.local),
        "order": bool(case.order),
        "gather": bool(case.gather_before),
    }


def together(case: Case) -> set[Hashable]:
    """All that a row brings together."""
    found: set[Hashable] = set(combinations(settings(case).items(), 2))
    slices = case.microbatches * case.data
    is_split = any(max(grid) > 1 for grid in case.grids)
    return found | {
        (case.parallel, case.schedule, case.recompute),
        (case.schedule, case.microbatches > 1, case.batch % slices > 0),
        (case.network, is_split, len(case.grids) > 1),
        (case.placement.world_size, is_split),
    }


def cover(cases: Sequence[Case]) -> list[Case]:
    """Rows that together bring together what all do, cheap ones first, in their order."""
    brings = [together(case) for case in cases]
    missing = set().union(*brings)
    chosen = {number for number, case in enumerate(cases) if case.pinned}
    for number in chosen:
        missing -= brings[number]

    def worth(number: int) -> float:
        case = cases[number]
        cost = COST.get(case.network, 2) * case.placement.world_size
        return len(brings[number] & missing) / cost**0.5

    heap = [(-worth(number), number) for number in range(len(cases))]
    heapq.heapify(heap)
    while missing:
        _, number = heapq.heappop(heap)
        now = worth(number)
        if heap and now < -heap[0][0]:  # others are worth more since
            heapq.heappush(heap, (-now, number))
            continue
        chosen.add(number)
        missing -= brings[number]
    return [cases[number] for number in sorted(chosen)]
