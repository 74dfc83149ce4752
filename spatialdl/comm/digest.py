"""Comparison of tensors between ranks by one number each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import shard_of

MOST = 2**22
"""Maximum number of compared elements, evenly spaced in larger tensors."""

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Relative to the largest value: processor models round differently."""

_HALF_TOLERANCE = 2e-2
_CHUNK = 2**20
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: Tensor, most: int = MOST) -> Tensor:
    """A number, on the device, that depends on each sampled element and its position."""
    values = sample(tensor, most)
    integers = values.view(_AS_INTEGERS[values.element_size()])
    weights = _weights(min(len(integers), _CHUNK), integers.device)
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    for part in torch.split(integers, _CHUNK):
        total = total * 0x5851F42D4C957F2D + (part.to(torch.int64) * weights[: len(part)]).sum()
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers: steps of splitmix64."""
    state = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    state = (state ^ (state >> 30)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27)) * -0x6B2FB644ECCEEE15
    return (state ^ (state >> 31)) | 1


def sample(tensor: Tensor, most: int) -> Tensor:
    """Up to about `most` elements of a tensor, evenly spaced over its two largest dims."""
    values = shard_of(tensor.detach())
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel() > most:
        step = int((values.numel() / most) ** 0.5) + 1
        largest = sorted(range(values.dim()), key=lambda dim: values.shape[dim])[-2:]
        for dim in largest if len(largest) == 2 else largest * 2:
            values = values[(slice(None),) * dim + (slice(None, None, step),)]
    return values.contiguous().view(-1)


def first_difference(
    comm: Communicator, named: Mapping[str, Tensor], most: int = MOST
) -> str | None:
    """Describe the first tensor that differs between ranks of `comm`; None if all are equal.

    Collective; the result is the same on all ranks. Floats may differ by `TOLERANCE`.
    """
    own = [
        (name, f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.")) for name, t in named.items()
    ]
    numbers = [int(digest(tensor, most)) for tensor in named.values()]
    gathered = comm.allgather((own, numbers))
    first, first_numbers = gathered[0]
    for rank, (other, _) in enumerate(gathered):
        if other != first:
            pairs = [pair for pair in zip(first, other, strict=False) if pair[0] != pair[1]]
            (name, text), (_, other_text) = pairs[0] if pairs else (("", "more"), ("", "fewer"))
            return f"{name} is {text} on {_name(comm, 0)}, {other_text} on {_name(comm, rank)}"
    for index, (name, tensor) in enumerate(named.items()):
        rank = next((r for r, o in enumerate(gathered) if o[1][index] != first_numbers[index]), 0)
        if rank and not _is_close(comm, tensor, most):
            return (
                f"{name} ({own[index][1]}) has different values on {_name(comm, rank)} than on "
                f"{_name(comm, 0)}"
            )
    return None


def _name(comm: Communicator, rank: int) -> str:
    return f"rank {comm.world_ranks[rank]}"


def _is_close(comm: Communicator, tensor: Tensor, most: int) -> bool:
    """Whether values differ by rounding only."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return False
    values = sample(tensor, most).to("cpu", torch.float64).nan_to_num()
    mean = comm.all_reduce(values) / comm.size
    furthest = comm.allgather((float((values - mean).abs().max()), float(values.abs().max())))
    off, largest = (max(one) for one in zip(*furthest, strict=True))
    return bool(off <= TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE) * largest)
