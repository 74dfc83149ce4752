"""Virtual ranks of several processes talk as if all were ranks of one communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.across import Across
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import move, move_back
from spatialdl.comm.turns import Turns
from spatialdl.comm.virtual import Virtual, virtual_ranks
from spatialdl.layout.layout import Layout
from spatialdl.spatial.streaming.memory import Memory
from spatialdl.spatial.streaming.store import DiskStore

EACH = 3
"""Virtual ranks of a process."""


def on_all(
    world: Communicator, work: Callable[[Virtual], Any], memory: Memory | None = None
) -> dict[int, Any]:
    """What this process's virtual ranks return, by rank; they are dealt out in turn."""
    ranks = [range(process, EACH * world.size, world.size) for process in range(world.size)]
    turns: Turns[Any] = Turns(EACH)
    across = Across(world, ranks)
    comms = virtual_ranks(EACH * world.size, turns, across)
    memory = memory or Memory()

    def watched(comm: Virtual) -> Any:
        with memory.watch():
            return work(comm)

    found = turns.run([lambda comm=comm: watched(comm) for comm in comms])
    across.finish()  # or what is sent last may have lost its memory before it has left
    assert not across._under_way
    return dict(zip(ranks[world.rank], found, strict=True))


def test_objects_and_tensors_of_all(world):
    count = EACH * world.size

    def work(comm: Virtual) -> Any:
        assert (comm.size, list(comm.world_ranks)) == (count, list(range(count)))
        own = torch.tensor([comm.rank, 1.0], dtype=torch.float64)
        under_way = own.clone()
        pending = comm.start_all_reduce(under_way)
        total, stack = comm.all_reduce(own), comm.all_gather(own)
        pending.wait()
        comm.barrier()
        first = comm.bcast(f"of {comm.rank}", 1)
        at_last = comm.gather(comm.rank, count - 1)
        return total.tolist(), under_way.tolist(), stack[:, 0].tolist(), first, at_last

    total = [count * (count - 1) / 2, float(count)]
    for rank, found in on_all(world, work).items():
        gathered = list(range(count)) if rank == count - 1 else None
        assert found == (total, total, list(map(float, range(count))), "of 1", gathered)


def whole_image() -> Tensor:
    return torch.arange(2.0 * 3 * 270 * 410, dtype=torch.float64).sin().view(2, 3, 270, 410)


@pytest.mark.parametrize("limit", [None, 2_000_000])
@pytest.mark.parametrize("below", [1, 0])
def test_windows_of_tiles_and_their_adjoint(world, tmp_path, limit, below):
    """Also where what waits for its turn is not in memory, and where a process only sends.

    Then nobody waited for its messages, whose memory was used again before they had left.
    """
    layout = Layout.even(2, (270, 410), (EACH, world.size))
    right = 3 * below
    halo = [
        ((0, 2), (r0 - 2, r1 + below), (c0 - 9, c1 + right))
        for _, (r0, r1), (c0, c1) in layout.boxes
    ]
    needed = tuple(type(layout.boxes[0])(box) for box in halo)
    padded = F.pad(whole_image(), (9, right, 2, below))

    def work(comm: Virtual) -> tuple[float, float]:
        plan = Plan(layout.boxes, needed, comm.rank)
        tile = whole_image()[(..., *(slice(*one) for one in plan.own.spatial))].contiguous()
        (r0, r1), (c0, c1) = plan.need.spatial
        expected = padded[..., r0 + 2 : r1 + 2, c0 + 9 : c1 + 9]
        window = move(comm, plan, tile)
        torch.testing.assert_close(window, expected, rtol=0, atol=0)
        weights = torch.full_like(window, comm.rank + 1.0).cos()
        back = move_back(comm, plan, weights)
        return float((window * weights).sum()), float((tile * back).sum())

    store = DiskStore(tmp_path) if limit else None
    memory = Memory(limit, store)
    sums = on_all(world, work, memory)
    there, back = (sum(values) for values in zip(*sums.values(), strict=True))
    everywhere = world.all_reduce(torch.tensor([there, back], dtype=torch.float64))
    assert float(everywhere[0]) == pytest.approx(float(everywhere[1]), rel=1e-12)
    assert store is None or (store.written > 0 and store.read > 0)
