"""Converts tensors for MPI: dense, on the host, with a datatype that MPI can move or reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

MOST = 2**31 - 1
"""Maximum number of elements of a message: MPI counts are 32-bit."""

_MOVED = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_REDUCED = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_HALF = (torch.float16, torch.bfloat16)
_Kind: Any = ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}
_ON_BOOL = {  # bytes of 0 and 1
    _Kind.SUM: MPI.MAX,
    _Kind.PRODUCT: MPI.MIN,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.MIN,
    _Kind.BOR: MPI.MAX,
    _Kind.BXOR: MPI.BXOR,
}
_LINEAR = (_Kind.SUM, _Kind.AVG)
_BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)


def dense(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy on the host, pinned if it is on a device.

    Raises:
        TypeError: for sparse tensors.
    """
    if _is_dense(tensor):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_cpu:
        return plain.contiguous()
    copy = room(plain.shape, plain).copy_(plain.contiguous(), non_blocking=True)
    torch.accelerator.current_stream(plain.device).synchronize()
    return copy


def room_for(tensor: Tensor) -> Tensor:
    """Receive buffer for a whole tensor: itself, or uninitialised memory.

    Raises:
        TypeError: for sparse tensors.
    """
    return tensor if _is_dense(tensor) else room(tensor.shape, tensor)


def copy_if_aliased(sent: Tensor, received: Tensor) -> Tensor:
    """`sent`, or a copy if both tensors, which are dense, share memory: MPI forbids it."""
    first, second = sorted(
        (one.data_ptr(), one.data_ptr() + one.nbytes) for one in (sent, received)
    )
    return sent.detach().clone() if second[0] < first[1] else sent


def room(shape: Sequence[int], like: Tensor) -> Tensor:
    """Host memory, pinned if `like` is on a device."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=not like.is_cpu)


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        raise TypeError(f"mpi4py supports dense tensors only, not {tensor.layout}; call to_dense()")
    is_plain = not (tensor.is_conj() or tensor.is_neg())
    return tensor.is_cpu and tensor.is_contiguous() and is_plain


def device_kinds() -> list[str]:
    """Device types whose tensors are supported: CPU and PyTorch's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", "cuda" if accelerator is None else accelerator.type]


def give_back(tensor: Tensor, received: Tensor) -> None:
    """Copy a receive buffer to its tensor."""
    if received is not tensor:
        tensor.detach().copy_(received, non_blocking=True)
        if not tensor.is_cpu:
            torch.accelerator.current_stream(tensor.device).synchronize()


def queued_before(tensors: Sequence[Tensor]) -> list[torch.Event]:
    """Events after the work queued so far on the current streams of the tensors' devices.

    A copy back may run on another stream, in the communication thread or in the caller of `wait`.
    It must not overtake queued work that still writes or reads its target.
    """
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return [torch.accelerator.current_stream(device).record_event() for device in devices]


def wait_in_stream(events: Sequence[torch.Event]) -> None:
    """Have the current streams of this thread wait for events, without blocking the host."""
    for event in events:
        torch.accelerator.current_stream(event.device).wait_event(event)


def message(tensor: Tensor, count: int | None = None) -> list[Any]:
    """mpi4py buffer specification of a dense tensor to move.

    Args:
        count: number of elements, if not all.
    """
    size = tensor.element_size()
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel() if count is None else count, _MOVED[size]]


def blocks(tensor: Tensor, counts: Sequence[int]) -> list[Any]:
    """mpi4py buffer specification of a dense tensor with one block for each rank."""
    size = tensor.element_size()
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, (counts, None), _MOVED[size]]


def portions(tensor: Tensor) -> Sequence[Tensor]:
    """Split a dense tensor to fit MPI's counts."""
    return (tensor,) if tensor.numel() <= MOST else torch.split(tensor.detach().view(-1), MOST)


def check_counts(name: str, *counts: int) -> None:
    """Check counts of operations that cannot be split.

    Raises:
        ValueError: if one exceeds MPI's range.
    """
    if max(counts, default=0) > MOST:
        raise ValueError(
            f"{name} of {max(counts)} elements exceeds MPI's maximum {MOST}; use several tensors"
        )


def reduction(op: Any, tensor: Tensor, ranks: int) -> Reduction:
    """Reduction `op` for tensors like this one, cached.

    Args:
        op: a ReduceOp or its kind: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        ranks: number of participating ranks.

    Raises:
        TypeError: if the dtype does not support the operator.
    """
    key = (hash(op), tensor.dtype, ranks)  # both kinds of operators hash to their number
    known = _known.get(key)
    if known is None:
        known = _known[key] = Reduction(getattr(op, "op", op), tensor.dtype, ranks)
    return known


_known: dict[tuple[int, torch.dtype, int], Reduction] = {}


class Reduction:
    """A reduction operator of torch.distributed for tensors of one dtype.

    Half precision is reduced in float32, complex numbers as real pairs, bool as bytes.

    Args:
        kind: of operator.
        ranks: number of ranks, for the average.
    """

    __slots__ = ("_bool", "_half", "_ranks", "mpi", "plain", "type")

    def __init__(self, kind: Any, dtype: torch.dtype, ranks: int) -> None:
        self._half, self._bool = dtype in _HALF, dtype is torch.bool
        self._ranks = ranks if kind == _Kind.AVG else 1
        real = dtype.to_real() if dtype.is_complex else dtype
        real = torch.float32 if self._half else torch.uint8 if self._bool else real
        ops = _ON_BOOL if self._bool else _OPS
        inexact = dtype.is_floating_point or dtype.is_complex
        if (
            kind not in ops
            or real not in _REDUCED
            or (kind in _BITWISE and inexact)
            or (kind == _Kind.AVG and not inexact)
            or (dtype.is_complex and kind not in _LINEAR)
        ):
            raise TypeError(f"mpi4py does not reduce tensors of {dtype} by {kind.name}")
        self.type, self.mpi = _REDUCED[real], ops[kind]
        self.plain = real is dtype and kind != _Kind.AVG

    def opened(self, tensor: Tensor) -> Tensor:
        """Convert a dense tensor for the operator, or for its result: itself, a view, or a copy."""
        if self.plain:
            return tensor
        tensor = tensor.detach()
        if self._half:
            return tensor.float()
        return tensor.view(torch.uint8) if self._bool else _real(tensor)

    def close(self, tensor: Tensor, reduced: Tensor) -> None:
        """Finish a reduction, and store it in the dense tensor that was opened."""
        if self.plain:
            return
        if self._ranks != 1:
            reduced.div_(self._ranks)
        if self._half:
            tensor.detach().copy_(reduced)

    def message(self, tensor: Tensor, ranks: int = 1) -> list[Any]:
        """mpi4py buffer specification of an opened tensor.

        Args:
            ranks: number of equal blocks that it holds.
        """
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel() // ranks, self.type]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
