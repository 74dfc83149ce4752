"""Tensors as MPI takes them: dense, on the host, with a type that it can move or reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from spatialdl.comm.device_transport import pinned_copy

MOST = 2**31 - 1
"""Elements in one message: MPI counts in 32 bits."""

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
    _Kind.PREMUL_SUM: MPI.SUM,
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
_LINEAR = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)
_BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)


def dense(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it that lies contiguous on the host, from a device in pinned memory.

    Raises:
        TypeError: for sparse tensors.
    """
    if _is_dense(tensor):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_cpu:
        return plain.contiguous()
    copy, ready = pinned_copy(plain)
    ready.synchronize()
    return copy


def room_for(tensor: Tensor) -> Tensor:
    """Where something lands that fills all of a tensor: itself, or memory without its content.

    Raises:
        TypeError: for sparse tensors.
    """
    return tensor if _is_dense(tensor) else room(tensor.shape, tensor)


def room(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory on the host, pinned if the tensor that it is for lies on a device."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=not like.is_cpu)


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        raise TypeError(f"mpi4py moves dense tensors only, not {tensor.layout}; call to_dense()")
    is_plain = not (tensor.is_conj() or tensor.is_neg())
    return tensor.is_cpu and tensor.is_contiguous() and is_plain


def device_kinds() -> list[str]:
    """Of what devices tensors may be moved: a CPU's, and those of what PyTorch sees besides."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", "cuda" if accelerator is None else accelerator.type]


def give_back(tensor: Tensor, landed: Tensor) -> None:
    """What has landed in the copy of a tensor goes into the tensor."""
    if landed is not tensor:
        tensor.detach().copy_(landed, non_blocking=True)
        if not tensor.is_cpu:
            torch.accelerator.current_stream(tensor.device).synchronize()


def queued_before(tensors: Sequence[Tensor]) -> list[torch.Event]:
    """Events of what the current streams of the devices of some tensors have queued so far.

    A copy back may run in another stream, that of the communication thread or of the caller of
    `wait`. It must not overtake what still writes or reads its target here.
    """
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return [torch.accelerator.current_stream(device).record_event() for device in devices]


def wait_in_stream(events: Sequence[torch.Event]) -> None:
    """Have the current streams of this thread wait for events; the host does not."""
    for event in events:
        torch.accelerator.current_stream(event.device).wait_event(event)


def message(tensor: Tensor, count: int | None = None) -> list[Any]:
    """A dense tensor as mpi4py takes it, to be moved.

    Args:
        count: of elements, if they are not all.
    """
    size = tensor.element_size()
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel() if count is None else count, _MOVED[size]]


def blocks(tensor: Tensor, counts: Sequence[int]) -> list[Any]:
    """A dense tensor that holds one block a rank, of so many elements each."""
    size = tensor.element_size()
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, (counts, None), _MOVED[size]]


def portions(tensor: Tensor) -> Sequence[Tensor]:
    """A dense tensor in pieces that MPI can count."""
    return (tensor,) if tensor.numel() <= MOST else torch.split(tensor.detach().view(-1), MOST)


def check_counts(name: str, *counts: int) -> None:
    """Refuse what MPI cannot count and what cannot be cut here.

    Raises:
        ValueError: with the numbers.
    """
    if max(counts, default=0) > MOST:
        raise ValueError(
            f"{name} of {max(counts)} elements: MPI counts to {MOST}; use several smaller tensors"
        )


def reduction(op: Any, tensor: Tensor, ranks: int) -> Reduction:
    """How `op` is done on tensors like this one.

    Args:
        op: a ReduceOp or its kind: SUM, AVG, PREMUL_SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        ranks: how many take part.

    Raises:
        TypeError: for an operator that the type does not have.
    """
    key = (hash(op), tensor.dtype, ranks)  # both kinds of operators hash to their number
    found = _known.get(key)
    if found is None:
        kind = getattr(op, "op", op)
        factor = op.__getstate__()[1] if kind == _Kind.PREMUL_SUM else None
        found = Reduction(kind, tensor.dtype, ranks, factor)
        if factor is None:
            _known[key] = found
    return found


_known: dict[tuple[int, torch.dtype, int], Reduction] = {}


class Reduction:
    """A reduction operator of torch.distributed on tensors of one type.

    Half types are reduced in float32, complex ones as pairs of real ones, bool as bytes.

    Args:
        kind: of operator.
        ranks: how many, for the average.
        factor: by which every rank multiplies first.
    """

    __slots__ = ("_bool", "_factor", "_half", "_ranks", "mpi", "plain", "type")

    def __init__(
        self, kind: Any, dtype: torch.dtype, ranks: int, factor: float | Tensor | None = None
    ) -> None:
        self._half, self._bool = dtype in _HALF, dtype is torch.bool
        self._ranks = ranks if kind == _Kind.AVG else 1
        self._factor = factor.cpu() if isinstance(factor, Tensor) else factor
        real = dtype.to_real() if dtype.is_complex else dtype
        real = torch.float32 if self._half else torch.uint8 if self._bool else real
        ops = _ON_BOOL if self._bool else _OPS
        inexact = dtype.is_floating_point or dtype.is_complex
        if (
            kind not in ops
            or real not in _REDUCED
            or (kind in _BITWISE and inexact)
            or (kind in (_Kind.AVG, _Kind.PREMUL_SUM) and not inexact)
            or (dtype.is_complex and kind not in _LINEAR)
        ):
            raise TypeError(f"mpi4py does not reduce tensors of {dtype} by {kind.name}")
        self.type, self.mpi = _REDUCED[real], ops[kind]
        self.plain = real is dtype and kind not in (_Kind.AVG, _Kind.PREMUL_SUM)

    def opened(self, tensor: Tensor, own: bool = True) -> Tensor:
        """A dense tensor as the operator takes it: itself, a view, or a copy.

        Args:
            own: whether its memory may be written to.
        """
        if self.plain:
            return tensor
        tensor = tensor.detach()
        if self._bool:
            tensor = tensor.view(torch.uint8)
        elif self._half:
            tensor = tensor.float()
        else:
            tensor = _real(tensor)
        if self._factor is None:
            return tensor
        return tensor.mul_(self._factor) if own or self._half else tensor * self._factor

    def landing(self, tensor: Tensor) -> Tensor:
        """Where a reduction can land that `close` then puts into a dense tensor."""
        if self.plain:
            return tensor
        tensor = tensor.detach()
        if self._half:
            return tensor.float()
        return tensor.view(torch.uint8) if self._bool else _real(tensor)

    def close(self, tensor: Tensor, reduced: Tensor) -> None:
        """Finish what was reduced, and put it into the dense tensor that it was opened from."""
        if self.plain:
            return
        if self._ranks != 1:
            reduced.div_(self._ranks)
        if self._half:
            tensor.detach().copy_(reduced)

    def message(self, tensor: Tensor, ranks: int = 1) -> list[Any]:
        """An opened tensor as mpi4py takes it.

        Args:
            ranks: whose blocks it holds, of one size.
        """
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel() // ranks, self.type]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
