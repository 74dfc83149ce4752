"""Sums over ranks: of statistics, of losses, of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.datatypes import buffer, reduction_type

if TYPE_CHECKING:
    from mpi4py import MPI


def sum_over_ranks(comm: MPI.Intracomm, values: Tensor, name: str = "sum") -> Tensor:
    """The sum of `values` over the ranks of `comm`, the same bits on every rank.

    `values` itself is left as it is; half precision is added up in float32.
    """
    if comm.size == 1 or values.device.type == "meta":
        return values.clone()
    check.agree(comm, f"{name} over ranks, {values.dtype}, {values.numel()} values")
    from mpi4py import MPI

    summable = values.dtype not in (torch.float16, torch.bfloat16)
    total = values.to("cpu", values.dtype if summable else torch.float32, copy=True).contiguous()
    kind = reduction_type(total)
    comm.Allreduce(MPI.IN_PLACE, [buffer(total), total.numel(), kind], op=MPI.SUM)
    return total.to(values.device, values.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The backward of an all-reduce is an all-reduce: each rank's loss counts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: MPI.Intracomm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return sum_over_ranks(comm, values, name)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_over_ranks(ctx.comm, grad, f"{ctx.name} backward"), None, None


def differentiable_sum(comm: MPI.Intracomm, values: Tensor, name: str) -> Tensor:
    """`sum_over_ranks` that autograd sees."""
    total: Tensor = _SumOverRanks.apply(values, comm, name)  # type: ignore[no-untyped-call]
    return total
