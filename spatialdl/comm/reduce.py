"""Sums, maxima and gathers over ranks, also differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.exchange import collect
from spatialdl.comm.once import once_differentiable

# dtypes that MPI cannot sum, or not without overflow or rounding
_SUMMED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}


def sum_over_ranks(comm: Communicator, values: Tensor, name: str = "sum") -> Tensor:
    """Sum of `values` over the ranks of `comm`, bitwise equal on all ranks.

    `values` is not modified; half precision is summed in float32.
    """
    if comm.size == 1:
        return values.clone()
    if values.is_complex():
        parts = sum_over_ranks(comm, torch.view_as_real(values.resolve_conj()), name)
        return torch.view_as_complex(parts)
    wide = values.to(_SUMMED_AS.get(values.dtype, values.dtype))
    return collect(comm, comm.all_reduce, wide, name).to(values.dtype)


def add_over_ranks_(comm: Communicator, values: Tensor, name: str = "sum") -> None:
    """Sum a contiguous tensor in place; the transport must support its dtype."""
    collect(comm, comm.all_reduce_, values, name)


class _SumOverRanks(torch.autograd.Function):
    """Backward of an all-reduce is an all-reduce, as each rank's loss counts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return sum_over_ranks(comm, values, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_over_ranks(ctx.comm, grad, f"{ctx.name} backward"), None, None


def differentiable_sum(comm: Communicator, values: Tensor, name: str) -> Tensor:
    """Differentiable `sum_over_ranks`."""
    total: Tensor = _SumOverRanks.apply(values, comm, name)  # type: ignore[no-untyped-call]
    return total


def gather_over_ranks(comm: Communicator, values: Tensor, name: str = "gather") -> Tensor:
    """Tensors of all ranks of `comm`, (ranks, ...), in rank order; shapes must be equal."""
    if comm.size == 1:
        return values.detach().clone().unsqueeze(0)
    return collect(comm, comm.all_gather, values.detach().resolve_conj(), name)


def max_over_ranks(comm: Communicator, values: Tensor, name: str = "max") -> Tensor:
    """Maximum of `values` over the ranks of `comm`; NaN where any rank has NaN."""
    return gather_over_ranks(comm, values, name).amax(0)


class _GatherOverRanks(torch.autograd.Function):
    """Backward sums a rank's part over ranks, as each rank's loss counts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return gather_over_ranks(comm, values, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = sum_over_ranks(ctx.comm, grad, f"{ctx.name} backward")
        return total[ctx.comm.rank], None, None


def differentiable_gather(comm: Communicator, values: Tensor, name: str) -> Tensor:
    """Differentiable `gather_over_ranks`."""
    gathered: Tensor = _GatherOverRanks.apply(values, comm, name)  # type: ignore[no-untyped-call]
    return gathered
