"""Sums, maxima and gathers over ranks, also differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from spatialdl.comm import check, dry, trace
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.replay import once
from spatialdl.comm.waiting import noted

Result = TypeVar("Result")

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
    if comm.size > 1 and values.device.type == "meta":
        dry.record(comm, "sum", comm.size, values.nbytes)
    if comm.size == 1 or values.device.type == "meta":
        return values.clone()
    if values.is_complex():
        parts = sum_over_ranks(comm, torch.view_as_real(values.resolve_conj()), name)
        return torch.view_as_complex(parts)

    def compute() -> Tensor:
        wide = values.to(_SUMMED_AS.get(values.dtype, values.dtype))
        what = f"{name} over ranks, {values.dtype}, {values.numel()} values"
        return _together(comm, name, what, comm.all_reduce, wide).to(values.dtype)

    return once(compute)


def add_over_ranks_(comm: Communicator, values: Tensor, name: str = "sum") -> None:
    """Sum a contiguous tensor in place; the transport must support its dtype."""
    what = f"{name} over ranks, {values.dtype}, {values.numel()} values"
    _together(comm, name, what, comm.all_reduce_, values)


def _together(
    comm: Communicator, name: str, what: str, do: Callable[[Tensor], Result], values: Tensor
) -> Result:
    """A collective that is checked, traced, and recorded for hang reports."""
    check.agree(comm, what)
    with trace.span("reduce", name):
        return noted(name, None, check.run_checked, comm, do, values)


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
    if comm.size > 1 and values.device.type == "meta":
        dry.record(comm, "gather", comm.size, values.nbytes)
    if comm.size == 1 or values.device.type == "meta":
        return values.detach().expand(comm.size, *values.shape).clone()

    def compute() -> Tensor:
        what = f"{name} of all ranks, {values.dtype}, {tuple(values.shape)}"
        return _together(comm, name, what, comm.all_gather, values.detach().resolve_conj())

    return once(compute)


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
