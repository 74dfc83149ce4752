"""Collectives of torch.distributed over mpi4py.

Each function runs where the program calls the collective: it checks the arguments, and copies
tensors that are not dense on the host there. It returns a job that communicates and copies the
results back, possibly in another thread. A job writes to memory directly, which autograd does not
track, as in gloo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.backend.calls import Job, describe
from spatialdl.comm.backend.host import (
    Reduction,
    blocks,
    check_counts,
    copy_if_aliased,
    dense,
    give_back,
    message,
    portions,
    reduction,
    room,
    room_for,
)

Comm = MPI.Intracomm


def all_reduce(comm: Comm, tensors: Sequence[Tensor], op: Any) -> Job:
    """Reduce every tensor over all ranks, in place, bitwise equal on all ranks."""
    size = comm.size
    prepared = [(tensor, dense(tensor), reduction(op, tensor, size)) for tensor in tensors]

    def job() -> None:
        for tensor, held, how in prepared:
            opened = held if how.plain else how.opened(held)
            for part in portions(opened):
                comm.Allreduce(MPI.IN_PLACE, how.message(part), how.mpi)
            if not how.plain:
                how.close(held, opened)
            if held is not tensor:
                give_back(tensor, held)

    return job


def reduce(comm: Comm, tensor: Tensor, root: int, op: Any) -> Job:
    """Reduce a tensor to the root; tensors of other ranks are not modified."""
    held, how = dense(tensor), reduction(op, tensor, comm.size)
    is_root = comm.rank == root

    def job() -> None:
        opened = how.opened(held)
        for part in portions(opened):
            if is_root:
                comm.Reduce(MPI.IN_PLACE, how.message(part), how.mpi, root)
            else:
                comm.Reduce(how.message(part), None, how.mpi, root)
        if is_root:
            how.close(held, opened)
            give_back(tensor, held)

    return job


def broadcast(comm: Comm, tensors: Sequence[Tensor], root: int) -> Job:
    """Overwrite every tensor with that of the root."""
    taken = dense if comm.rank == root else room_for
    prepared = [(tensor, taken(tensor)) for tensor in tensors]

    def job() -> None:
        for tensor, held in prepared:
            for part in portions(held):
                comm.Bcast(message(part), root)
            if comm.rank != root:
                give_back(tensor, held)

    return job


def all_gather_single(comm: Comm, output: Tensor, tensor: Tensor) -> Job:
    """Concatenate the tensors of all ranks.

    Raises:
        ValueError: if the sizes do not match.
    """
    check_fits("all_gather", output, tensor, comm.size)
    held, received = dense(tensor), room_for(output)
    in_place = held.data_ptr() == received.data_ptr() + comm.rank * held.nbytes

    def job() -> None:
        sent = held if in_place else copy_if_aliased(held, received)
        comm.Allgather(MPI.IN_PLACE if in_place else message(sent), message(received, held.numel()))
        give_back(output, received)

    return job


def all_gather(comm: Comm, outputs: Sequence[Tensor], tensor: Tensor) -> Job:
    """Gather the tensors of all ranks; sizes may differ, as given by the outputs."""
    counts = [output.numel() for output in outputs]
    check_list("all_gather", outputs, comm.size, tensor)
    if counts[comm.rank] != tensor.numel():
        raise ValueError(
            f"all_gather: rank {comm.rank} has {tensor.numel()} elements, but its output has "
            f"{counts[comm.rank]}"
        )
    held = dense(tensor)

    def job() -> None:
        received = room((sum(counts),), outputs[0])
        comm.Allgatherv(message(held), blocks(received, counts))
        give_back_parts(outputs, received, counts)

    return job


def gather(comm: Comm, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Job:
    """Gather the tensors of all ranks on the root; other ranks have no outputs."""
    held = dense(tensor)
    counts = [output.numel() for output in outputs]
    if comm.rank == root:
        check_list("gather", outputs, comm.size, tensor)

    def job() -> None:
        if comm.rank != root:
            comm.Gatherv(message(held), None, root)
            return
        received = room((sum(counts),), outputs[0])
        comm.Gatherv(message(held), blocks(received, counts), root)
        give_back_parts(outputs, received, counts)

    return job


def scatter(comm: Comm, output: Tensor, tensors: Sequence[Tensor], root: int) -> Job:
    """Distribute tensors of the root, one for each rank; other ranks have no inputs."""
    received = room_for(output)
    counts = [tensor.numel() for tensor in tensors]
    if comm.rank == root:
        check_list("scatter", tensors, comm.size, output)
    joined = flat(tensors, received) if comm.rank == root else None

    def job() -> None:
        comm.Scatterv(None if joined is None else blocks(joined, counts), message(received), root)
        give_back(output, received)

    return job


def reduce_scatter_single(comm: Comm, output: Tensor, tensor: Tensor, op: Any) -> Job:
    """Reduce a tensor, and distribute the result in equal parts.

    Raises:
        ValueError: if the sizes do not match.
    """
    check_fits("reduce_scatter", tensor, output, comm.size)
    held, received, how = dense(tensor), room_for(output), reduction(op, tensor, comm.size)
    counts = [output.numel()] * comm.size
    return _reduce_scatter(comm, output, received, held, counts, how)


def reduce_scatter(comm: Comm, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Job:
    """Reduce a list of tensors, one for each rank, and distribute the results; sizes may differ."""
    check_list("reduce_scatter", tensors, comm.size, output)
    received, how = room_for(output), reduction(op, output, comm.size)
    counts = [tensor.numel() for tensor in tensors]
    if counts[comm.rank] != output.numel():
        raise ValueError(
            f"reduce_scatter: rank {comm.rank} has {counts[comm.rank]} elements for itself, "
            f"but its output has {output.numel()}"
        )
    return _reduce_scatter(comm, output, received, flat(tensors, received), counts, how)


def _reduce_scatter(
    comm: Comm, output: Tensor, received: Tensor, held: Tensor, counts: list[int], how: Reduction
) -> Job:
    check_counts("reduce_scatter", held.numel())
    width = 2 if held.is_complex() else 1
    counts = [width * count for count in counts]
    is_even = len(set(counts)) == 1

    def job() -> None:
        taken = how.opened(received)
        sent = copy_if_aliased(how.opened(held), taken)
        if is_even:
            comm.Reduce_scatter_block(how.message(sent, comm.size), how.message(taken), how.mpi)
        else:
            comm.Reduce_scatter(how.message(sent), how.message(taken), counts, how.mpi)
        how.close(received, taken)
        give_back(output, received)

    return job


def all_to_all_single(
    comm: Comm,
    output: Tensor,
    tensor: Tensor,
    output_rows: Sequence[int],
    rows: Sequence[int],
) -> Job:
    """Exchange rows between all ranks.

    Args:
        output_rows: number from each rank; empty for equal numbers.
        rows: number for each rank; empty for equal numbers.

    Raises:
        ValueError: if the numbers of rows do not match.
    """
    outgoing = _counts("all_to_all", tensor, rows, comm.size)
    incoming = _counts("all_to_all", output, output_rows, comm.size)
    if output.dtype != tensor.dtype:
        raise ValueError(f"all_to_all from {tensor.dtype} to {output.dtype}: dtypes differ")
    held, received = dense(tensor), room_for(output)

    def job() -> None:
        sent = copy_if_aliased(held, received)
        comm.Alltoallv(blocks(sent, outgoing), blocks(received, incoming))
        give_back(output, received)

    return job


def all_to_all(comm: Comm, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Job:
    """Exchange tensors between all ranks."""
    check_list("all_to_all", outputs, comm.size, tensors[0])
    check_list("all_to_all", tensors, comm.size, tensors[0])
    counts = [output.numel() for output in outputs]
    own = [tensor.numel() for tensor in tensors]
    held = flat(tensors, tensors[0])

    def job() -> None:
        received = room((sum(counts),), outputs[0])
        comm.Alltoallv(blocks(held, own), blocks(received, counts))
        give_back_parts(outputs, received, counts)

    return job


def barrier(comm: Comm) -> Job:
    """Synchronise all ranks."""
    return comm.Barrier


def when_all_are_here(comm: Comm, job: Job) -> Job:
    """A job that sleeps until all ranks have come to it.

    MPI waits by polling, which would take the cores from a backward that runs meanwhile.
    """

    def waiting() -> None:
        all_here, pause = comm.Ibarrier(), 20e-6
        while not all_here.Test():
            time.sleep(pause)
            pause = min(2 * pause, 500e-6)
        job()

    return waiting


def all_of(jobs: Sequence[Job]) -> Job:
    """Combine several collectives to one job."""

    def job() -> None:
        for each in jobs:
            each()

    return job


def flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate all elements of some tensors, on the host."""
    parts = [dense(tensor).detach().reshape(-1) for tensor in tensors]
    return torch.cat(parts) if parts else room((0,), like)


def give_back_parts(outputs: Sequence[Tensor], received: Tensor, counts: Sequence[int]) -> None:
    """Copy parts of a received buffer to the outputs."""
    for output, part in zip(outputs, torch.split(received, list(counts)), strict=True):
        give_back(output, part.view(output.shape))


def check_fits(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Check that `whole` has as many parts as there are ranks."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise ValueError(
            f"{name} over {ranks} ranks between {describe(part)} and {describe(whole)}: the latter "
            f"must have {ranks} times as many elements, of the same dtype"
        )
    check_counts(name, part.numel())


def check_list(name: str, tensors: Sequence[Tensor], ranks: int, like: Tensor) -> None:
    """Check that there is one tensor for each rank, of one dtype."""
    types = {tensor.dtype for tensor in tensors} | {like.dtype}
    if len(tensors) != ranks or len(types) != 1:
        kinds = ", ".join(sorted(map(str, types)))
        raise ValueError(
            f"{name} over {ranks} ranks needs a list of {ranks} tensors of one dtype, not "
            f"{len(tensors)} ({kinds})"
        )
    check_counts(name, sum(tensor.numel() for tensor in tensors))


def _counts(name: str, tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Number of elements for each rank."""
    height = tensor.size(0) if tensor.dim() else 1
    if (rows and (len(rows) != ranks or sum(rows) != height)) or (not rows and height % ranks):
        split = f"split as {list(rows)}" if rows else "in equal parts"
        raise ValueError(f"{name} over {ranks} ranks: {height} rows cannot be {split}")
    check_counts(name, tensor.numel())
    row = tensor.numel() // height if height else 0
    return [row * count for count in rows or [height // ranks] * ranks]
