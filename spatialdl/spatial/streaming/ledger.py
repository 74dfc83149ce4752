"""Records operations on the ``meta`` device, and the lifetimes of memory.

Operations are recorded below autograd, with the shapes of one rank's tiles. Memory is that of
storages, from the operation that allocates them until the last tensor on them is freed, so what
autograd saves is counted while it is saved, and once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from spatialdl.spatial.meta import on_meta, tensors_in
from spatialdl.spatial.tensor import SpatialTensor

aten = torch.ops.aten

Phase = Literal["forward", "backward"]


class RankOperation(NamedTuple):
    """One operation on one rank.

    Attributes:
        kind: operations with the same rate, see `planning.cluster.KINDS`.
        flops: two for a multiply-add.
        bytes: read and written.
    """

    kind: str
    flops: float
    bytes: int


@dataclass(eq=False)
class StorageRecord:
    """A storage: its bytes, the part that allocated it, and its lifetime.

    Attributes:
        taken: bytes including the unused rest of its last page.
    """

    bytes: int
    taken: int
    phase: Phase
    part: int
    born: int
    died: int | None = None


PAGE = 2 * 2**20
"""Bytes of a huge page."""


def taken(size: int) -> int:
    """Bytes that become resident for a tensor on a CPU, see `spatialdl.comm.allocator`."""
    return size if size < PAGE else -(-size // PAGE) * PAGE


class RecordedOperation(NamedTuple):
    """An operation in the order of the run; bytes of its workspace, inputs and outputs."""

    phase: Phase
    part: int
    workspace: int
    operands: int


@dataclass
class Ledger:
    """Record of a run, by phase and part of the network.

    Attributes:
        phase, part: those of the next operations.
        work: operations in order.
        moments: all operations in order.
        memories: storages that operations have allocated.
        whole_pages: whether large tensors take whole pages, as on CPUs.
    """

    phase: Phase = "forward"
    part: int = 0
    work: dict[tuple[Phase, int], list[RankOperation]] = field(default_factory=dict)
    moments: list[RecordedOperation] = field(default_factory=list)
    memories: list[StorageRecord] = field(default_factory=list)
    whole_pages: bool = False
    _known: dict[int, StorageRecord] = field(default_factory=dict)

    def own(self, tensor: Tensor) -> None:
        """Exclude a tensor's memory, such as weights, which are counted elsewhere."""
        size = tensor.nbytes
        self._known[_key(tensor)] = StorageRecord(size, size, self.phase, self.part, -1)

    def memory_of(self, tensor: Tensor) -> StorageRecord | None:
        """Memory of a tensor (of a tile, if it is split); None if the run has not allocated it."""
        return self._known.get(_key(_local(tensor)))

    def watch(self) -> AbstractContextManager[None]:
        """Context of a dry run whose operations are recorded."""
        return on_meta(self._note)

    @property
    def peak(self) -> int:
        """Maximum bytes that are allocated at a time."""
        changes: Counter[int] = Counter()
        for memory in self.memories:
            changes[memory.born] += memory.bytes
            changes[len(self.moments) if memory.died is None else memory.died] -= memory.bytes
        return max(accumulate(changes[moment] for moment in sorted(changes)), default=0)

    @property
    def largest(self) -> int:
        """Maximum bytes of the inputs and outputs of an operation."""
        return max((moment.operands for moment in self.moments), default=0)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs, outputs = tensors_in((args, *kwargs.values())), tensors_in(result)
        changes = bool(func._schema.is_mutable)
        before = dict.fromkeys(_key(tensor) for tensor in inputs)
        is_view = (
            bool(outputs) and all(_key(tensor) in before for tensor in outputs) and not changes
        )
        for tensor in outputs:
            if _is_shape(func, kwargs):
                self.own(tensor)
            else:
                self._remember(tensor)
        if is_view or func in _FREE:
            return
        works = list(_works(func, args, kwargs, result, _bytes(inputs + outputs), changes))
        self.work.setdefault((self.phase, self.part), []).extend(works)
        storages = (tensor.untyped_storage() for tensor in inputs + outputs)
        operands = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        room = _workspace(func, args, result)
        self.moments.append(RecordedOperation(self.phase, self.part, room, operands))

    def _remember(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        whole = taken(size) if self.whole_pages else size
        memory = StorageRecord(size, whole, self.phase, self.part, len(self.moments))
        self._known[key] = memory
        self.memories.append(memory)
        weakref.finalize(storage, self._forget, key, memory)

    def _forget(self, key: int, memory: StorageRecord) -> None:
        memory.died = len(self.moments)
        if self._known.get(key) is memory:
            del self._known[key]


_FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.alias.default,
}


def _is_shape(func: Any, kwargs: Any) -> bool:
    """Whether a result stays on ``meta`` in real runs too, so it takes no memory."""
    return func is aten.empty_like.default and kwargs.get("device") is not None


def _local(tensor: Tensor) -> Tensor:
    return tensor._tile if isinstance(tensor, SpatialTensor) else tensor


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
}


def _works(
    func: Any, args: Any, kwargs: Any, result: Any, size: int, changes: bool
) -> Iterator[RankOperation]:
    if func is aten.convolution_backward.default:
        grad, x, weight = args[:3]
        passed = _bytes([grad, x, weight])
        for name, wanted in zip(("conv_input", "conv_weight"), args[10], strict=False):
            if wanted:
                mask = [name == "conv_input", name == "conv_weight", False]
                strided = name == "conv_input" and max(args[4]) > 1
                kind = "conv_strided_input" if strided else name
                yield RankOperation(kind, _flops(func, (*args[:10], mask), result), passed)
        return
    yield RankOperation(_kind(func, args, changes), _flops(func, args, result, **kwargs), size)


_KINDS = {
    "convolution": "conv",
    "native_group_norm_backward": "norm_backward",
    "native_layer_norm_backward": "norm_backward",
    "var_mean": "statistics",
}


def _kind(func: Any, args: Any, changes: bool) -> str:
    name = str(func._overloadpacket.__name__)
    if name in _KINDS:
        return _KINDS[name]
    if func._overloadpacket in flop_registry:
        return "matmul"
    if func in _NORMS:
        in_evaluation = name == "native_batch_norm" and not args[5]
        return "normalise" if in_evaluation else "norm"
    if name == "native_batch_norm_backward":
        return "norm_backward" if args[9][0] else "norm_sums"
    if "pool" in name:
        return "pool_backward" if "backward" in name else "pool"
    return "in_place" if changes else "pointwise"


def _flops(func: Any, args: Any, result: Any, **kwargs: Any) -> float:
    count = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


def _workspace(func: Any, args: Any, result: Any) -> int:
    """Memory that a convolution on a CPU takes beside its operands.

    oneDNN copies images into blocks of channels unless the convolution is a matrix product.
    Measured by the resident set around single convolutions in float32.
    """
    if func is aten.convolution.default:
        x, weight, _, stride = args[:4]
        return 0 if _is_product(weight, stride) else max(x.nbytes, result.nbytes)
    if func is not aten.convolution_backward.default:
        return 0
    grad, x, weight, _, stride = args[:5]
    wants_input, wants_weight = args[10][:2]
    if _is_product(weight, stride):
        return int(x.nbytes * wants_input)
    of_input = 2 * x.nbytes if max(stride) > 1 else max(x.nbytes, grad.nbytes)
    of_weight = grad.nbytes + x.nbytes * (x.shape[1] >= _BLOCK)
    return int(max(of_input * wants_input, of_weight * wants_weight))


_BLOCK = 16
"""Channels per oneDNN block; images with fewer are not copied."""


def _is_product(weight: Tensor, stride: Any) -> bool:
    return tuple(weight.shape[2:]) == (1, 1) and max(stride) == 1
