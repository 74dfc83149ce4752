"""The collectives of torch.distributed over mpi4py.

Each function is called where the program calls the collective: it checks, and brings what is not
dense on the host there. It returns the job that talks and gives the results back, which may run in
another thread. A job writes to memory directly, so autograd does not see it, as with gloo.
"""

from __future__ import annotations

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
    """Every tensor becomes the reduction of those of all ranks, the same bits everywhere."""
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
    """The tensor of the root becomes the reduction; those of the others stay as they are."""
    held, how = dense(tensor), reduction(op, tensor, comm.size)
    is_root = comm.rank == root

    def job() -> None:
        opened = how.opened(held, own=is_root)
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
    """Every tensor becomes that of the root."""
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
    """The tensors of all ranks one after the other, in one.

    Raises:
        ValueError: if the sizes do not fit.
    """
    check_fits("all_gather", output, tensor, comm.size)
    held, landed = dense(tensor), room_for(output)

    def job() -> None:
        comm.Allgather(message(held), message(landed, held.numel()))
        give_back(output, landed)

    return job


def all_gather(comm: Comm, outputs: Sequence[Tensor], tensor: Tensor) -> Job:
    """The tensors of all ranks; their sizes may differ, where the outputs say so."""
    counts = [output.numel() for output in outputs]
    check_list("all_gather", outputs, comm.size, tensor)
    if counts[comm.rank] != tensor.numel():
        raise ValueError(
            f"all_gather: rank {comm.rank} brings {tensor.numel()} elements, and has room for "
            f"{counts[comm.rank]} of its own"
        )
    held = dense(tensor)

    def job() -> None:
        landed = room((sum(counts),), outputs[0])
        comm.Allgatherv(message(held), blocks(landed, counts))
        give_back_parts(outputs, landed, counts)

    return job


def gather(comm: Comm, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Job:
    """The tensors of all ranks on the root; the others have no outputs."""
    held = dense(tensor)
    counts = [output.numel() for output in outputs]
    if comm.rank == root:
        check_list("gather", outputs, comm.size, tensor)

    def job() -> None:
        if comm.rank != root:
            comm.Gatherv(message(held), None, root)
            return
        landed = room((sum(counts),), outputs[0])
        comm.Gatherv(message(held), blocks(landed, counts), root)
        give_back_parts(outputs, landed, counts)

    return job


def scatter(comm: Comm, output: Tensor, tensors: Sequence[Tensor], root: int) -> Job:
    """Every rank gets its tensor from the root; the others have none to give."""
    landed = room_for(output)
    counts = [tensor.numel() for tensor in tensors]
    if comm.rank == root:
        check_list("scatter", tensors, comm.size, output)
    joined = flat(tensors, landed) if comm.rank == root else None

    def job() -> None:
        comm.Scatterv(None if joined is None else blocks(joined, counts), message(landed), root)
        give_back(output, landed)

    return job


def reduce_scatter_single(comm: Comm, output: Tensor, tensor: Tensor, op: Any) -> Job:
    """Of the reduction of a tensor every rank gets its part, all of one size.

    Raises:
        ValueError: if the sizes do not fit.
    """
    check_fits("reduce_scatter", tensor, output, comm.size)
    held, landed, how = dense(tensor), room_for(output), reduction(op, tensor, comm.size)
    counts = [output.numel()] * comm.size
    return _reduce_scatter(comm, output, landed, held, counts, how)


def reduce_scatter(comm: Comm, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Job:
    """Of the reductions of a list every rank gets the one of its number; sizes may differ."""
    check_list("reduce_scatter", tensors, comm.size, output)
    landed, how = room_for(output), reduction(op, output, comm.size)
    counts = [tensor.numel() for tensor in tensors]
    if counts[comm.rank] != output.numel():
        raise ValueError(
            f"reduce_scatter: rank {comm.rank} brings {counts[comm.rank]} elements for itself, "
            f"and has room for {output.numel()}"
        )
    return _reduce_scatter(comm, output, landed, flat(tensors, landed), counts, how)


def _reduce_scatter(
    comm: Comm, output: Tensor, landed: Tensor, held: Tensor, counts: list[int], how: Reduction
) -> Job:
    check_counts("reduce_scatter", held.numel())
    width = 2 if held.is_complex() else 1
    counts = [width * count for count in counts]
    alike = len(set(counts)) == 1

    def job() -> None:
        given, taken = how.opened(held, own=False), how.landing(landed)
        if alike:
            comm.Reduce_scatter_block(how.message(given, comm.size), how.message(taken), how.mpi)
        else:
            comm.Reduce_scatter(how.message(given), how.message(taken), counts, how.mpi)
        how.close(landed, taken)
        give_back(output, landed)

    return job


def all_to_all_single(
    comm: Comm,
    output: Tensor,
    tensor: Tensor,
    output_rows: Sequence[int],
    rows: Sequence[int],
) -> Job:
    """Every rank gets rows from every other.

    Args:
        output_rows: from each rank; none for the same number from each.
        rows: for each rank, likewise.

    Raises:
        ValueError: if the numbers of rows do not fit.
    """
    outgoing = _counts("all_to_all", tensor, rows, comm.size)
    incoming = _counts("all_to_all", output, output_rows, comm.size)
    if output.dtype != tensor.dtype:
        raise ValueError(f"all_to_all from {tensor.dtype} to {output.dtype}: the types differ")
    held, landed = dense(tensor), room_for(output)

    def job() -> None:
        comm.Alltoallv(blocks(held, outgoing), blocks(landed, incoming))
        give_back(output, landed)

    return job


def all_to_all(comm: Comm, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Job:
    """Every rank gets a tensor from every other."""
    check_list("all_to_all", outputs, comm.size, tensors[0])
    check_list("all_to_all", tensors, comm.size, tensors[0])
    counts = [output.numel() for output in outputs]
    own = [tensor.numel() for tensor in tensors]
    held = flat(tensors, tensors[0])

    def job() -> None:
        landed = room((sum(counts),), outputs[0])
        comm.Alltoallv(blocks(held, own), blocks(landed, counts))
        give_back_parts(outputs, landed, counts)

    return job


def barrier(comm: Comm) -> Job:
    """Return when all ranks have come."""
    return comm.Barrier


def all_of(jobs: Sequence[Job]) -> Job:
    """Several collectives as one."""

    def job() -> None:
        for each in jobs:
            each()

    return job


def flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All elements of some tensors one after the other, on the host."""
    parts = [dense(tensor).detach().reshape(-1) for tensor in tensors]
    return torch.cat(parts) if parts else room((0,), like)


def give_back_parts(outputs: Sequence[Tensor], landed: Tensor, counts: Sequence[int]) -> None:
    """Fill the outputs with what has landed in one piece."""
    for output, part in zip(outputs, torch.split(landed, list(counts)), strict=True):
        give_back(output, part.view(output.shape))


def check_fits(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """A whole of as many parts as ranks."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise ValueError(
            f"{name} over {ranks} ranks between {describe(part)} and {describe(whole)}: the latter "
            f"must have {ranks} times as many elements, of the same type"
        )
    check_counts(name, part.numel())


def check_list(name: str, tensors: Sequence[Tensor], ranks: int, like: Tensor) -> None:
    """As many tensors as ranks, of one type."""
    types = {tensor.dtype for tensor in tensors} | {like.dtype}
    if len(tensors) != ranks or len(types) != 1:
        kinds = ", ".join(sorted(map(str, types)))
        raise ValueError(
            f"{name} over {ranks} ranks needs a list of {ranks} tensors of one type, not "
            f"{len(tensors)} ({kinds})"
        )
    check_counts(name, sum(tensor.numel() for tensor in tensors))


def _counts(name: str, tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Elements for each rank."""
    height = tensor.size(0) if tensor.dim() else 1
    if (rows and (len(rows) != ranks or sum(rows) != height)) or (not rows and height % ranks):
        split = f"split as {list(rows)}" if rows else "in equal parts"
        raise ValueError(f"{name} over {ranks} ranks: {height} rows cannot be {split}")
    check_counts(name, tensor.numel())
    row = tensor.numel() // height if height else 0
    return [row * count for count in rows or [height // ranks] * ranks]
