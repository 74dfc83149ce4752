"""How much of what a run has made lives at once, part by part of the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spatialdl.planning.ledger import Ledger, Memory


def peaks_forward(
    ledger: Ledger, memories: Sequence[Memory], rooms: Sequence[int], parts: int, until: int
) -> list[int]:
    """Most bytes at a time of what a part has made itself, in forward.

    Args:
        memories: those that count.
        rooms: by moment, bytes that the operation needs for itself.
        parts: how many there are.
        until: the moment at which backward begins.
    """
    changes: list[Counter[int]] = [Counter() for _ in range(parts)]
    for memory in memories:
        if memory.phase == "forward":
            changes[memory.part][memory.born] += memory.taken
            if memory.died is not None and memory.died < until:
                changes[memory.part][memory.died] -= memory.taken
    peaks, alive = [0] * parts, [0] * parts
    for time, moment in enumerate(ledger.moments[:until]):
        part = moment.part
        alive[part] += changes[part][time]
        peaks[part] = max(peaks[part], alive[part] + rooms[time])
    return peaks


def peaks_backward(
    ledger: Ledger,
    memories: Sequence[Memory],
    rooms: Sequence[int],
    parts: int,
    since: int,
    grads: set[int],
) -> list[int]:
    """Most bytes at a time in the backward of a part: what lives of it and of later parts.

    Gradients of the weights of later parts do not count.

    Args:
        memories, rooms, parts: as in forward.
        since: the moment at which backward begins.
        grads: ids of the memories of weights' gradients.
    """
    peaks, own_grads = [0] * parts, [0] * parts
    waiting = [0] * parts  # of what each part has made in forward
    births: dict[int, list[Memory]] = {}
    deaths: dict[int, list[Memory]] = {}
    for memory in memories:
        if memory.phase == "backward":
            births.setdefault(memory.born, []).append(memory)
        elif memory.died is None or memory.died >= since:
            waiting[memory.part] += memory.taken
        if memory.died is not None and memory.died >= since:
            deaths.setdefault(memory.died, []).append(memory)
    passing = 0
    for time, moment in enumerate(ledger.moments[since:], since):
        for memory in births.get(time, ()):
            own_grads[memory.part] += memory.taken * (id(memory) in grads)
            passing += memory.taken * (id(memory) not in grads)
        for memory in deaths.get(time, ()):
            waiting[memory.part] -= memory.taken * (memory.phase == "forward")
            passing -= memory.taken * (memory.phase == "backward")
        alive = passing + own_grads[moment.part] + sum(waiting[moment.part :])
        peaks[moment.part] = max(peaks[moment.part], alive + rooms[time])
    return peaks
