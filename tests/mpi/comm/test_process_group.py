"""Groups over mpi4py: who is in them, what torch.distributed asks of them, and their end."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

pytestmark = pytest.mark.usefixtures("over_mpi4py")


def threads() -> list[str]:
    """The threads of this process that talk, by name."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("mpi4py group"))


def total(group: dist.ProcessGroup | None = None, async_op: bool = False) -> int:
    tensor = torch.tensor([2 ** dist.get_rank()])
    work = dist.all_reduce(tensor, group=group, async_op=async_op)
    if async_op:
        work.wait()
    return int(tensor)


def test_the_ranks_are_those_of_mpi(over_mpi4py):
    assert (dist.get_rank(), dist.get_world_size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert (over_mpi4py.rank(), over_mpi4py.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert dist.get_backend() == over_mpi4py.name() == "mpi4py"
    assert dist.get_process_group_ranks(None) == list(range(MPI.COMM_WORLD.size))
    assert dist.is_backend_available("mpi4py")
    assert over_mpi4py.group_desc == "default_pg"
    assert repr(over_mpi4py).startswith("MpiProcessGroup(rank ")


def test_groups_of_some_ranks(over_mpi4py):
    size = dist.get_world_size()
    for chosen in ([0], [size - 1, 0] if size > 1 else [0], list(range(1, size)) or [0]):
        group = dist.new_group(chosen)
        if dist.get_rank() in chosen:
            assert total(group) == total(group, async_op=True) == sum(2**rank for rank in chosen)
            assert dist.get_process_group_ranks(group) == sorted(chosen)
            assert group.rank() == dist.get_group_rank(group, dist.get_rank())
            value = torch.tensor(dist.get_rank())
            dist.broadcast(value, max(chosen), group=group)
            assert value == max(chosen)
            dist.destroy_process_group(group)
        else:
            assert dist.get_rank(group) == -1
    mine = [rank for rank in range(size) if rank % 2 == dist.get_rank() % 2]
    alone = dist.new_group(mine, use_local_synchronization=True)  # the others do not call it
    assert total(alone) == sum(2**rank for rank in mine)
    part, _ = dist.new_subgroups(1)
    assert total(part) == 2 ** dist.get_rank()


def test_messages_in_a_group_name_its_ranks():
    size = dist.get_world_size()
    if size < 2:
        pytest.skip("needs two ranks")
    group = dist.new_group([size - 2, size - 1])
    if dist.get_rank() == size - 1:
        dist.send(torch.tensor([7]), size - 2, group=group)
    elif dist.get_rank() == size - 2:
        landed = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(landed, group=group) == size - 1
        assert landed == 7


def test_groups_that_come_in_another_order_do_not_wait_for_each_other():
    one, other = dist.new_group(), dist.new_group()
    tensors = [torch.full((1000,), float(k)) for k in range(2)]
    order = [(one, tensors[0]), (other, tensors[1])]
    if dist.get_rank() % 2:
        order.reverse()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in order]
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [0, dist.get_world_size()]


def test_a_destroyed_group_is_refused_and_its_thread_has_ended():
    before = threads()
    for _ in range(5):
        group = dist.new_group()
        last = torch.ones(3)
        dist.all_reduce(last, group=group, async_op=True)
        assert len(threads()) == len(before) + 1
        dist.destroy_process_group(group)
        assert last.tolist() == [dist.get_world_size()] * 3  # it was drained
        assert threads() == before
        with pytest.raises(RuntimeError, match=r"group '\d+' .* was destroyed"):
            group.allreduce([torch.ones(3)])


def test_a_message_that_nobody_sends_is_given_up():
    group = dist.new_group()
    landed = torch.zeros(3)
    work = dist.irecv(landed, (dist.get_rank() + 1) % dist.get_world_size(), group=group)
    assert not work.is_completed()
    dist.destroy_process_group(group)
    assert work.is_completed()


def test_another_place_than_that_of_mpi_is_refused():
    dist.destroy_process_group()
    size = dist_size = MPI.COMM_WORLD.size
    try:
        with pytest.raises(ValueError, match=f"rank 0 of {size + 5}, but MPI has rank"):
            dist.init_process_group("mpi4py", rank=0, world_size=size + 5)
        with pytest.raises(ValueError, match="omit rank and world_size"):
            dist.init_process_group("mpi4py", store=dist.HashStore(), rank=7, world_size=dist_size)
    finally:
        dist.init_process_group("mpi4py")
    assert total() == 2**size - 1


def test_it_can_be_initialised_again():
    for _ in range(3):
        work = dist.all_reduce(torch.ones(100), async_op=True)
        dist.destroy_process_group()
        assert work.is_completed()
        assert threads() == []
        dist.init_process_group("mpi4py", timeout=timedelta(minutes=2))
        assert total() == total(async_op=True) == 2**MPI.COMM_WORLD.size - 1
    gc.collect()


def test_a_store_of_the_program_is_used():
    """As in programs that bring a file or an address of their own."""
    from spatialdl.comm.store import store_by_mpi

    dist.destroy_process_group()
    world = MPI.COMM_WORLD
    store = store_by_mpi(world)
    dist.init_process_group("mpi4py", store=store, rank=world.rank, world_size=world.size)
    assert total() == 2**world.size - 1
    assert store.num_keys() > 0


def test_a_program_that_waits_needs_no_thread():
    before = threads()
    group = dist.new_group()
    assert total(group) == 2 ** dist.get_world_size() - 1
    assert threads() == before


def test_timeouts_may_be_changed(over_mpi4py):
    group = dist.new_group(timeout=timedelta(seconds=77))
    assert group._timeout_s == 77
    group.set_timeout(timedelta(seconds=5))
    assert group._timeout_s == 5
    assert over_mpi4py._timeout_s == 30 * 60
