"""From the ranks of one stage to those of the next: exact forward, scaled adjoint back."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.handover import Handover, HandoverShape
from spatialdl.layout.layout import Layout, last_slices
from tests.mpi.waits import told_by_the_first

Grid = tuple[int, int]
CPU = torch.device("cpu")


class Case(NamedTuple):
    """Grids of both stages; None for ranks that hold the same copy."""

    sender: Grid | None
    receiver: Grid | None
    senders: int
    receivers: int
    shape: tuple[int, ...] = (2, 3, 11, 7)
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.senders}:{self.sender}->{self.receivers}:{self.receiver} {self.shape}"

    def handover(self, world: MPI.Intracomm) -> Handover:
        ends = range(self.senders), range(self.senders, self.senders + self.receivers)
        return Handover(world, *ends, me=world.rank, tag=3, tags=8)

    @property
    def what(self) -> HandoverShape:
        size, one = self.shape[-2:], (1, 1)
        if self.sender is None:
            size, one = (prod(self.shape[1:]),), (1,)
        samples = self.shape[0] if self.shape else 1
        sender, receiver = (
            Layout.even(samples, size, grid or one) for grid in (self.sender, self.receiver)
        )
        return HandoverShape(self.shape, self.dtype, sender, receiver)


CASES = [
    Case((1, 1), (1, 1), 1, 1),
    Case(None, None, 1, 1, (5, 7)),
    Case((2, 1), None, 2, 1),
    Case((1, 1), (1, 2), 1, 2, dtype=torch.bfloat16),
    Case(None, None, 2, 1, ()),
    Case(None, None, 1, 2, (2, 3, 4)),
    Case((1, 1), (3, 1), 1, 3),
    Case((1, 3), (1, 1), 3, 1, (2, 11, 7)),
    Case((2, 1), (1, 2), 2, 2),
    Case((1, 2), (2, 1), 2, 2, (1, 1, 2, 2), torch.float32),
    Case(None, None, 2, 2, (6, 1)),
    Case((2, 1), (1, 2), 2, 2, (3, 2, 1, 5)),  # ranks without pixels
    # five and six ranks
    Case((1, 1), (2, 2), 1, 4),
    Case((2, 2), (2, 1), 4, 2),
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, world: MPI.Intracomm) -> Case:
    found: Case = request.param
    if found.senders + found.receivers > world.size:
        pytest.skip(f"needs {found.senders + found.receivers} ranks")
    return found


def whole(case: Case, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(case.shape, dtype=torch.float64, generator=draw).to(case.dtype)


def part_of(tensor: Tensor, layout: Layout, part: int) -> Tensor:
    if len(layout.boxes) == 1:
        return tensor.clone()
    box = layout.boxes[part]
    return tensor[last_slices(box.slices_in(layout.whole)[1:])].clone()


def upstream(case: Case, part: int, microbatch: int) -> Tensor:
    """A gradient of the receiver's own for what it got."""
    shape = case.what.local_shape(case.what.receiver, part)
    draw = torch.Generator().manual_seed(100 * part + microbatch)
    return torch.randn(shape, dtype=torch.float64, generator=draw).to(case.dtype)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "expected"])
def test_forward_is_exact_and_backward_the_scaled_adjoint(
    case: Case, world: MPI.Intracomm, ahead: bool
) -> None:
    """Three micro-batches are under way at once, and taken in another order than they were sent.

    Ranks of neither stage have nothing to do.
    """
    handover, what = case.handover(world), case.what
    if ahead:
        for microbatch in range(3):
            if world.rank < case.senders:
                handover.expect_back(what, microbatch, CPU)
            elif world.rank < case.senders + case.receivers:
                handover.expect(what, microbatch, CPU)
    left = right = 0.0
    if world.rank < case.senders:
        tiles = [part_of(whole(case, m), what.sender, world.rank) for m in range(3)]
        for microbatch, tile in enumerate(tiles):
            handover.send(tile, what, microbatch)
        for microbatch, tile in enumerate(tiles):
            grad = handover.receive_back(what, microbatch, CPU)
            assert (grad.shape, grad.dtype) == (tile.shape, case.dtype)
            right += (grad.double() * tile.double()).sum().item()
    elif world.rank < case.senders + case.receivers:
        part = world.rank - case.senders
        arrived = {microbatch: handover.receive(what, microbatch, CPU) for microbatch in (2, 0, 1)}
        for microbatch, tile in arrived.items():
            assert torch.equal(tile, part_of(whole(case, microbatch), what.receiver, part))
            grad = upstream(case, part, microbatch)
            handover.send_back(grad, what, microbatch)
            left += (grad.double() * tile.double()).sum().item()
    handover.wait_sent()
    assert not handover._leaving
    assert not handover._arriving
    factor = case.senders / case.receivers
    left, right = world.allreduce(left), world.allreduce(right)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}[case.dtype]
    assert right == pytest.approx(factor * left, rel=tolerance, abs=tolerance)


@pytest.mark.world(2, 3, 4)
def test_the_rank_that_is_waited_for_is_told(tmp_path: Path, world: MPI.Intracomm) -> None:
    """The first waits for the last alone, of all that send to it."""
    senders = range(world.size)[:0:-1]
    case = Case((len(senders), 1), (1, 1), len(senders), 1)
    me = len(senders) if world.rank == 0 else senders.index(world.rank)
    handover = Handover(world, senders, [0], me, tag=3, tags=8)

    def hand_over() -> None:
        if world.rank == 0:
            handover.receive(case.what, 2, CPU)
        else:
            handover.send(part_of(whole(case, 0), case.what.sender, me), case.what, 2)
        handover.wait_sent()

    wait = told_by_the_first(tmp_path, "hand-over forward of micro-batch 2", hand_over)
    if wait is not None:
        assert wait.ranks == (world.size - 1,)
