"""Collectives and messages over mpi4py give what they give over gloo, or what arithmetic says."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, zeros
from torch.distributed.distributed_c10d import ReduceOp as Op

from spatialdl.comm.backend import host
from tests.mpi.device import DEVICE

pytestmark = pytest.mark.usefixtures("over_mpi4py")

Collective = Callable[[dist.ProcessGroup], Sequence[Tensor]]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]
MOVED = [*INTEGERS, *FLOATS, *HALVES, torch.bool, torch.complex64, torch.complex128]
GLOO = [torch.int8, torch.uint8, torch.int32, torch.int64, *FLOATS, *HALVES]
"""What gloo moves."""
SHAPES = [(7,), (), (0,), (3, 0, 2), (5, 3)]


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def values(shape: Sequence[int], dtype: torch.dtype, of: int, low: int = -5) -> Tensor:
    """What a rank brings."""
    draw = torch.Generator().manual_seed(100 + of)
    numbers = torch.randint(low, 6, tuple(shape), generator=draw)
    if dtype.is_complex:
        return torch.complex(
            numbers.double(), numbers.double().flip(0) if shape else -numbers.double()
        ).to(dtype)
    if dtype is torch.bool:
        return numbers > 0
    return (numbers.abs() if not dtype.is_signed else numbers).to(dtype)


def alike(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(ours, theirs)


def same(collective: Collective, *groups: dist.ProcessGroup) -> None:
    """A collective that returns what it has filled, over each of the groups."""
    ours, theirs = (collective(each) for each in groups)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        alike(mine, other)


# --- reductions


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX], ids=lambda op: op.name)
def test_numbers_are_reduced_as_by_gloo(over_mpi4py, over_gloo, op, shape):
    """Small integers, so that floating point numbers are exact in any order."""
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64, *FLOATS, torch.float16):

        def all_reduce(over: dist.ProcessGroup, dtype: torch.dtype = dtype) -> list[Tensor]:
            tensor = values(shape, dtype, rank())
            dist.all_reduce(tensor, op, group=over)
            return [tensor]

        same(all_reduce, over_mpi4py, over_gloo)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64, torch.complex64], ids=str)
def test_sums_and_averages_are_rounded_once(dtype):
    """Those of half types are in float32 until then."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.float32 if dtype in HALVES else dtype
    parts = [torch.randn(1000, generator=draw, dtype=wide).to(dtype) for _ in range(size())]
    total, near = sum(part.to(wide) for part in parts), torch.finfo(dtype).eps * 4
    for op, expected in ((Op.SUM, total), (Op.AVG, total / size())):
        tensor = parts[rank()].clone()
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, expected.to(dtype), rtol=0, atol=near)


@pytest.mark.parametrize("op", [Op.BAND, Op.BOR, Op.BXOR], ids=lambda op: op.name)
def test_bits(op):
    by = {Op.BAND: operator.and_, Op.BOR: operator.or_, Op.BXOR: operator.xor}[op]
    for dtype in (*INTEGERS, torch.bool):
        tensor = values((9,), dtype, rank(), low=0)
        dist.all_reduce(tensor, op)
        alike(tensor, reduce(by, [values((9,), dtype, of, low=0) for of in range(size())]))


def test_truth_values_are_added_as_or_and_multiplied_as_and():
    parts = [values((9,), torch.bool, of) for of in range(size())]
    for op, by in ((Op.SUM, operator.or_), (Op.PRODUCT, operator.and_), (Op.MAX, operator.or_)):
        tensor = parts[rank()].clone()
        dist.all_reduce(tensor, op)
        alike(tensor, reduce(by, parts))
        assert tensor.view(torch.uint8).max() <= 1


@pytest.mark.parametrize(
    ("tensor", "op", "said"),
    [
        (torch.zeros(3), Op.BAND, "does not reduce tensors of torch.float32 by BAND"),
        (torch.zeros(3), dist._make_nccl_premul_sum(0.5), "torch.float32 by PREMUL_SUM"),
        (torch.zeros(3).long(), Op.AVG, "does not reduce tensors of torch.int64 by AVG"),
        (torch.zeros(3).to(torch.float8_e4m3fn), Op.SUM, "torch.float8_e4m3fn by SUM"),
        (torch.eye(3).to_sparse(), Op.SUM, "dense tensors only"),
    ],
)
def test_what_cannot_be_reduced_is_refused(tensor, op, said):
    with pytest.raises(TypeError, match=said):
        dist.all_reduce(tensor, op)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.bool], ids=str)
def test_reduce_changes_the_tensor_of_the_root_only(dtype):
    parts = [values((4, 3), dtype, of) for of in range(size())]
    for root in range(size()):
        tensor = parts[rank()].clone()
        dist.reduce(tensor, root)
        total = reduce(operator.or_ if dtype is torch.bool else operator.add, parts)
        alike(tensor, total if rank() == root else parts[rank()])


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float32, torch.bfloat16, torch.complex64], ids=str
)
def test_reduce_scatter(dtype):
    given = [[values((3, 2), dtype, of + 10 * to) for to in range(size())] for of in range(size())]
    expected = sum(parts[rank()] for parts in given)
    output = torch.empty(3, 2, dtype=dtype)
    dist.reduce_scatter(output, [part.clone() for part in given[rank()]])
    alike(output, expected)
    single = torch.empty(3, 2, dtype=dtype)
    dist.reduce_scatter_tensor(single, torch.cat(given[rank()]))
    alike(single, expected)
    stacked = torch.empty(3, 2, dtype=dtype)
    dist.reduce_scatter_tensor(stacked, torch.stack(given[rank()]))
    alike(stacked, expected)
    joined = torch.cat(given[rank()])  # into a part of what is sent, which MPICH once refused
    dist.reduce_scatter_tensor(joined[3 * rank() : 3 * rank() + 3], joined)
    alike(joined[3 * rank() : 3 * rank() + 3], expected)


def test_parts_of_a_reduce_scatter_may_differ_in_size():
    output = torch.empty(rank() + 1)
    dist.reduce_scatter(output, [torch.arange(to + 1.0) + rank() for to in range(size())])
    alike(output, size() * torch.arange(rank() + 1.0) + sum(range(size())))


# --- moves


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_moved_as_by_gloo(over_mpi4py, over_gloo, shape):
    for dtype in GLOO:
        own = values(shape, dtype, rank())

        def broadcast(over: dist.ProcessGroup, own: Tensor = own) -> list[Tensor]:
            filled = []
            for root in range(size()):
                filled.append(own.clone())
                dist.broadcast(filled[-1], root, group=over)
            return filled

        def all_gather(over: dist.ProcessGroup, own: Tensor = own) -> list[Tensor]:
            filled = [torch.zeros_like(own) for _ in range(size())]
            dist.all_gather(filled, own, group=over)
            return filled

        def gather(over: dist.ProcessGroup, own: Tensor = own) -> list[Tensor]:
            root = size() - 1
            filled = [torch.zeros_like(own) for _ in range(size())]
            dist.gather(own, filled if rank() == root else None, root, group=over)
            return filled

        def scatter(over: dist.ProcessGroup, own: Tensor = own) -> list[Tensor]:
            root, filled = size() - 1, torch.zeros_like(own)
            given = [values(own.shape, own.dtype, 50 + to) for to in range(size())]
            dist.scatter(filled, given if rank() == root else None, root, group=over)
            return [filled]

        for collective in (broadcast, all_gather, gather, scatter):
            same(collective, over_mpi4py, over_gloo)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_gather_into_one_tensor(dtype):
    parts = [values((3, 5), dtype, of) for of in range(size())]
    joined = torch.empty(3 * size(), 5, dtype=dtype)
    dist.all_gather_into_tensor(joined, parts[rank()])
    alike(joined, torch.cat(parts))
    stacked = torch.empty(size(), 3, 5, dtype=dtype)
    dist.all_gather_into_tensor(stacked, parts[rank()])
    alike(stacked, torch.stack(parts))
    for shift in (0, 1):  # from this rank's own place, as FSDP2 does, and from that of another
        stacked.zero_()
        place = stacked[(rank() + shift) % size()].copy_(parts[rank()])
        dist.all_gather_into_tensor(stacked, place)
        alike(stacked, torch.stack(parts))
    dist.broadcast(parts[rank()], 0)
    alike(parts[rank()], values((3, 5), dtype, 0))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float16, torch.bool, torch.complex64], ids=str
)
def test_all_to_all(dtype):
    given = [
        [values((of + 2 * to, 3), dtype, of + 10 * to) for to in range(size())]
        for of in range(size())
    ]
    expected = [parts[rank()] for parts in given]
    filled = [torch.empty_like(part) for part in expected]
    dist.all_to_all(filled, given[rank()])
    for ours, theirs in zip(filled, expected, strict=True):
        alike(ours, theirs)
    joined = torch.empty_like(torch.cat(expected))
    dist.all_to_all_single(
        joined,
        torch.cat(given[rank()]),
        [len(part) for part in expected],
        [len(part) for part in given[rank()]],
    )
    alike(joined, torch.cat(expected))
    even = torch.empty(2 * size(), dtype=torch.int64)
    even.copy_(torch.arange(2 * size()) + 100 * rank())
    dist.all_to_all_single(even, even)
    assert even.tolist() == [100 * of + 2 * rank() + k for of in range(size()) for k in (0, 1)]


def test_tensors_that_are_not_contiguous():
    """Rows of a transposed tensor, channels-last, every second element: what is between stays."""
    base = torch.zeros(6, 8)
    view = base.t()[1:7:2, ::2]
    view.fill_(rank() + 1.0)
    dist.all_reduce(view)
    total = size() * (size() + 1) / 2
    assert torch.equal(view, torch.full((3, 3), total))
    assert base.sum() == 9 * total
    image = torch.full((2, 3, 4, 5), float(rank())).contiguous(memory_format=torch.channels_last)
    dist.broadcast(image, size() - 1)
    assert (image == size() - 1).all()
    wide = torch.zeros(2, 2 * size())
    dist.all_gather_into_tensor(wide.t(), torch.tensor([[rank(), 1.0], [2.0, 3.0]]).t())
    assert wide[:, 2 * rank() : 2 * rank() + 2].tolist() == [[rank(), 1.0], [2.0, 3.0]]


def test_a_leaf_that_needs_gradients_is_filled():
    weight = torch.nn.Parameter(torch.full((3,), float(rank())))
    dist.broadcast(weight, 0)
    assert weight.tolist() == [0.0] * 3
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    dist.all_reduce(half)
    assert half.tolist() == [size()] * 3
    assert half.is_leaf


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: dist.all_gather_into_tensor(zeros(7 * size()), zeros(5)), "times as many"),
        (lambda: dist.reduce_scatter_tensor(zeros(5), zeros(5 * size() + 1)), "times as many"),
        (lambda: dist.all_to_all_single(zeros(size() + 1), zeros(size())), "rows cannot be"),
        (lambda: dist.scatter(zeros(2), [zeros(2)] * (size() + 1), rank()), "needs a list of"),
        (
            lambda: dist.all_gather([zeros(3)] * size(), zeros(4)),
            "4 elements, .* output has 3",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anybody_talks(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()
    dist.barrier()


def test_what_mpi_cannot_count_goes_in_portions_or_is_refused(monkeypatch):
    """With a small limit in place of 2 ** 31 - 1."""
    monkeypatch.setattr(host, "MOST", 100)
    tensor = torch.arange(1001.0) + rank()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(1001.0) * size() + sum(range(size())))
    tensor = torch.arange(1001.0) * (rank() + 1)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.arange(1001.0))
    dist.reduce(tensor, 0)
    assert torch.equal(tensor, torch.arange(1001.0) * (size() if rank() == 0 else 1))
    with pytest.raises(ValueError, match="of 101 elements exceeds MPI's maximum 100"):
        dist.all_gather_into_tensor(torch.empty(101 * size()), torch.empty(101))
    with pytest.raises(ValueError, match="exceeds MPI's maximum 100"):
        dist.send(torch.empty(101), (rank() + 1) % size())


# --- started, and waited for later


def test_collectives_that_are_started_run_in_their_order():
    tensors = [torch.full((17 * k,), float(rank() + k)) for k in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    now = torch.ones(3)
    dist.all_reduce(now)  # after all of these
    assert all(work.is_completed() for work in works)
    for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait()
        (value,) = work.get_future().value()
        assert value is tensor or torch.equal(value, tensor)
        assert torch.equal(tensor, torch.full((17 * k,), float(sum(range(size())) + k * size())))
    assert now.tolist() == [size()] * 3
    assert works[3].result()[0].shape == (51,)


def test_what_is_chained_to_a_future_may_talk_itself():
    def chained(future: torch.futures.Future) -> Tensor:
        (value,) = future.value()
        dist.all_reduce(value)
        later = dist.all_reduce(value, async_op=True)
        later.wait()
        return value

    futures = []
    for k in range(10):
        work = dist.all_reduce(torch.tensor([k + 1]), async_op=True)
        futures.append(work.get_future().then(chained))
        later = dist.all_reduce(torch.ones(5), async_op=True)
        later.wait()
    assert [int(future.wait()) for future in futures] == [(k + 1) * size() ** 3 for k in range(10)]


def test_a_wait_may_have_a_limit():
    """Only the others' coming ends the collective; the one who waits is told."""
    if rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(RuntimeError, match=r"all_reduce of float32 .3,. by SUM .* longer than"):
            work.wait(timedelta(milliseconds=10))
        dist.send(torch.ones(1), 1)
    elif rank() == 1:
        dist.recv(torch.ones(1), 0)  # a message does not wait behind the collective
    if rank() != 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.wait()


# --- messages


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.bool, torch.complex64], ids=str
)
def test_messages_go_around_in_a_ring(dtype):
    own, landed = values((4, 3), dtype, rank()), torch.zeros(3, 4, dtype=dtype).t()
    before, after = (rank() - 1) % size(), (rank() + 1) % size()
    works = [dist.irecv(landed, before, tag=5), dist.isend(own, after, tag=5)]
    for work in works:
        assert work.wait()
    assert works[0].is_completed()
    alike(landed, values((4, 3), dtype, before))
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, landed, before),
            dist.P2POp(dist.isend, torch.zeros_like(own), after),
        ]
    )
    for work in requests:
        work.wait()
    alike(landed, torch.zeros_like(own))


def test_messages_are_told_apart_by_tags_and_taken_from_anybody():
    if rank() == 0:
        seen = set()
        for _ in range(size() - 1):
            landed = torch.zeros(2)
            source = dist.recv(landed, tag=3)
            assert landed.tolist() == [source, 3]
            seen.add(source)
        assert seen == set(range(1, size()))
        for source in range(1, size()):
            landed = torch.zeros(2)
            assert dist.recv(landed, source, tag=4) == source
            assert landed.tolist() == [source, 4]
    else:
        works = [dist.isend(torch.tensor([float(rank()), tag]), 0, tag=tag) for tag in (4, 3)]
        for work in works:
            work.wait()


def test_a_message_that_nobody_waited_for_arrives():
    """Its memory is kept although the program has let go of it."""
    if rank() == 0:
        for k in range(20):
            dist.isend(torch.full((100_000,), float(k)), 1)
    elif rank() == 1:
        for k in range(20):
            landed = torch.zeros(100_000)
            dist.recv(landed, 0)
            assert (landed == k).all()
    dist.barrier()


def test_a_message_of_another_size_is_refused():
    if rank() == 0:
        dist.send(torch.ones(3), 1)
        dist.send(torch.ones(5), 1)
    elif rank() == 1:
        with pytest.raises(RuntimeError, match=r"recv of float32 \(4,\) from rank 0.* 12 bytes"):
            dist.recv(torch.zeros(4), 0)
        with pytest.raises(RuntimeError, match=r"recv of float32 \(4,\) from rank 0"):
            dist.recv(torch.zeros(4), 0)
    dist.barrier()


# --- objects


def fill_late(tensor: Tensor, value: float) -> None:
    """Fill a tensor in the current stream, which has something else to do for a while first."""
    if DEVICE.type == "sim":
        torch.sim.enqueue(partial(time.sleep, 0.05))
    elif DEVICE.type == "cuda":
        torch.cuda._sleep(100_000_000)
    tensor.fill_(value)


def broadcast_late(target: Tensor, at_once: bool) -> Callable[[], object]:
    work = dist.broadcast(target, 0, async_op=not at_once)
    return work.wait if work is not None else lambda: None


def receive_late(target: Tensor, at_once: bool) -> Callable[[], object]:
    """Waited for in another stream than the one that is current when it is posted."""
    if rank() == 0:
        return dist.isend(torch.full_like(target, 7.0), 1).wait
    if rank() != 1:
        target.fill_(7.0)
        return lambda: None
    work = dist.irecv(target, 0)
    if at_once:
        return work.wait

    def wait() -> None:
        with torch.Stream(DEVICE):
            work.wait()

    return wait


@pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no device")
@pytest.mark.parametrize("at_once", [False, True], ids=["in the thread", "at once"])
@pytest.mark.parametrize("fill", [broadcast_late, receive_late])
def test_what_lands_does_not_overtake_what_the_stream_does_before(fill, at_once):
    """Copies back run in the thread's stream, behind what the program has queued in its own."""
    with torch.Stream(DEVICE):
        target = torch.full((5,), 7.0, device=DEVICE)
        if rank() != 0:
            fill_late(target, -1.0)
        fill(target, at_once)()
        assert target.tolist() == [7.0] * 5


def test_every_rank_gets_the_same_bits():
    for dtype in (*FLOATS, *HALVES):
        draw = torch.Generator().manual_seed(rank())
        tensor = torch.randn(3001, generator=draw).to(dtype)
        dist.all_reduce(tensor, Op.AVG)
        everybody = [torch.empty_like(tensor) for _ in range(size())]
        dist.all_gather(everybody, tensor)
        assert all(torch.equal(other, tensor) for other in everybody)


def test_all_gather_of_uneven_tensors():
    filled = [torch.empty(2 * of + 1, dtype=torch.int64) for of in range(size())]
    dist.all_gather(filled, torch.full((2 * rank() + 1,), rank()))
    assert [part.tolist() for part in filled] == [[of] * (2 * of + 1) for of in range(size())]
