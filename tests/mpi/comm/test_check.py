"""With ``comm.check`` ranks that go different ways are told so, all of them, before they talk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from spatialdl import CommMismatch, init_mesh, shard
from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.watchdog import MOST, Report, Reports

pytestmark = pytest.mark.world(2, 3, 4)

KERNEL = torch.ones(1, 2, 3, 3)
OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "conv2d": lambda x: F.conv2d(x, KERNEL, padding=1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "sum": lambda x: x.sum(),
    "full_tensor": lambda x: x.full_tensor(),
}
PAIRS = list(pairwise([*OPERATIONS, "conv2d"]))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_all_ranks_hear_of_both_sides(one: str, other: str, world: MPI.Intracomm) -> None:
    mesh = init_mesh((world.size, 1))
    x = shard(torch.rand(2, 2, 12, 8), mesh)
    name = one if world.rank == 0 else other
    with pytest.raises(CommMismatch, match="ranks call different operations") as error:
        OPERATIONS[name](x)
    text = str(error.value)
    assert f"rank {world.rank} is at '{name}" in text
    expected = f"rank 1 at '{other}" if world.rank == 0 else f"rank 0 at '{one}"
    assert expected in text
    assert "control flow that depends on the rank" in text
    OPERATIONS["sum"](x)  # nobody has talked; all can go on


def test_the_same_operation_on_images_of_other_sizes(world: MPI.Intracomm) -> None:
    mesh = replace(init_mesh((world.size, 1)), agreement=None)  # which would notice before
    x = shard(torch.rand(1, 2, 12 if world.rank else 16, 8), mesh)
    with pytest.raises(CommMismatch, match="conv2d forward plan"):
        F.conv2d(x, KERNEL, padding=1)


def test_forward_and_backward_are_told_apart(world: MPI.Intracomm) -> None:
    mesh = init_mesh((world.size, 1))
    x = shard(torch.rand(1, 2, 12, 8), mesh).requires_grad_()
    y = F.conv2d(x, KERNEL, padding=1)
    loss = (y * 2).to_local().sum()
    step = (lambda: F.conv2d(x.detach(), KERNEL, padding=1)) if world.rank == 0 else loss.backward
    with pytest.raises(CommMismatch, match=r"conv2d (adjoint|forward) plan .*conv2d"):
        step()


def test_without_it_the_last_communications_of_each_group_are_remembered(
    world: MPI.Intracomm,
) -> None:
    check.enable(False)
    try:
        mesh = init_mesh((world.size, 1))
        gradients = mesh.comm.duplicate()
        for number in range(2 * check.KEPT):
            check.agree(mesh.grid_comm, f"operation {number}")
        check.agree(gradients, "gradients")
        done = check.last_calls()
    finally:
        check.enable()
    if world.size == 1:
        return
    *operations, last = done[-check.KEPT - 1 :]
    assert [(one.number, one.text) for one in operations] == [
        (number + 1, f"operation {number}") for number in range(check.KEPT, 2 * check.KEPT)
    ]
    assert (last.number, last.text) == (1, "gradients")
    assert len({one.group for one in done}) > 1
    everywhere = world.allgather(done[-check.KEPT - 1 :])
    assert all(one == everywhere[0] for one in everywhere)  # whatever each calls the groups


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("grid", lambda ranks, rank: {"grid": (ranks, 1) if rank else (1, ranks)}),
        ("check", lambda ranks, rank: {"grid": (ranks, 1), "check": rank == 0}),
        ("timeout", lambda ranks, rank: {"grid": (ranks, 1), "timeout": 100.0 + rank}),
    ],
)
def test_different_arguments_are_refused(name: str, arguments: Any, world: MPI.Intracomm) -> None:
    before = check.enabled()
    with pytest.raises(ValueError, match=f"init_mesh with different arguments: {name} is "):
        init_mesh(**arguments(world.size, world.rank))
    assert check.enabled() == before


def test_the_check_is_switched(world: MPI.Intracomm) -> None:
    before = check.enabled()
    for on in (False, True):
        init_mesh((world.size, 1), check=on)
        init_mesh((world.size, 1))
        assert check.enabled() == on
    check.enable(before)


RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def test_reports_of_hangs_reach_all_ranks(world: Communicator) -> None:
    """Also the longest there is, which nobody may receive for long."""
    reports = Reports.between(world)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("MPI takes calls from one thread only")
    text, calls = "waits ".ljust(MOST, "."), check.last_calls()
    MPI.COMM_WORLD.Barrier()
    assert reports.poll() == {}
    MPI.COMM_WORLD.Barrier()
    reports.send(Report(RANK, text, RANK == 0, RANK > 0, {1: "stopped"}, calls))
    while len(reports.poll()) < SIZE:  # what does not come runs out of the test's time
        pass
    assert [reports.of[rank].raised for rank in range(SIZE)] == [True] + [False] * (SIZE - 1)
    assert {(one.text, one.stopped[1]) for one in reports.of.values()} == {(text, "stopped")}
    reports.wait_for_exits()
