"""What a network does on the ``meta`` device: its operations, and the memory that lives meanwhile.

Operations are seen below autograd, in the shapes of one rank's tiles. Memory is that of storages,
from the operation that makes them until the last tensor that holds them is gone, so that what
autograd keeps is counted as it is kept, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from spatialdl.planning.shapes import Known, run, tensors_in
from spatialdl.planning.touches import Touches, written
from spatialdl.spatial.tensor import SpatialTensor

aten = torch.ops.aten

Phase = Literal["forward", "backward"]


class RankOperation(NamedTuple):
    """One operation on one rank.

    Attributes:
        kind: of operations that one rate fits, see `planning.cluster.KINDS`.
        flops: two for a multiplication with an addition.
        bytes: that it reads and writes.
    """

    kind: str
    flops: float
    bytes: int


@dataclass(eq=False)
class StorageRecord:
    """A storage: its bytes, in which part it was made, and when it came and went.

    Attributes:
        taken: bytes with what is left over of its last page.
        number: of what a virtual tile touches; -1 where that is not followed.
    """

    bytes: int
    taken: int
    phase: Phase
    part: int
    born: int
    died: int | None = None
    number: int = -1


PAGE = 2 * 2**20
"""Bytes of a huge page."""

_RESULTS: Known = {}
"""Of all ledgers: how a result looks depends on the operands alone."""


def taken(size: int) -> int:
    """Bytes that become resident for a tensor on a CPU, see `spatialdl.comm.allocator`."""
    return size if size < PAGE else -(-size // PAGE) * PAGE


class RecordedOperation(NamedTuple):
    """An operation in the order of the run, and the memory that it needs for itself meanwhile."""

    phase: Phase
    part: int
    workspace: int


@dataclass
class Ledger:
    """What was done in a run, by phase and part of the network.

    Attributes:
        phase, part: to which what comes next belongs.
        work: operations in order.
        moments: all operations in order.
        memories: storages that operations have made.
        results: what operations give, see `planning.shapes`.
        whole_pages: whether large tensors take whole pages, as on CPUs.
        touches: what a virtual tile does with memory, which is written down, too; None otherwise.
    """

    phase: Phase = "forward"
    part: int = 0
    work: dict[tuple[Phase, int], list[RankOperation]] = field(default_factory=dict)
    moments: list[RecordedOperation] = field(default_factory=list)
    memories: list[StorageRecord] = field(default_factory=list)
    whole_pages: bool = False
    results: Known = field(default_factory=lambda: _RESULTS)
    touches: Touches | None = None
    _known: dict[int, StorageRecord] = field(default_factory=dict)

    def own(self, tensor: Tensor, enters: bool = False) -> None:
        """Leave a tensor's memory out, which somebody else counts: weights.

        Args:
            enters: whether it is a virtual tile's, which has it from elsewhere.
        """
        size = tensor.nbytes
        memory = StorageRecord(size, size, self.phase, self.part, -1)
        if enters and self.touches is not None:
            memory.number = self.touches.add(size)
        self._known[_key(tensor)] = memory

    def memory_of(self, tensor: Tensor) -> StorageRecord | None:
        """The memory of a tensor (of a tile, if it is split), if the run has made it."""
        return self._known.get(_key(_local(tensor)))

    def watch(self) -> TorchDispatchMode:
        """A context in which what is done is written down."""
        return _Watch(self)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs, outputs = tensors_in((args, *kwargs.values())), tensors_in(result)
        changes = bool(func._schema.is_mutable)
        before = dict.fromkeys(_key(one) for one in inputs)
        is_view = bool(outputs) and all(_key(one) in before for one in outputs) and not changes
        for one in outputs:
            if _is_shape(func, kwargs):
                self.own(one)
            else:
                self._remember(one)
        if self.touches is not None:
            self._touch(self.touches, before, outputs, written(func, args, kwargs) * changes)
        if is_view or func in _FREE:
            return
        works = list(_works(func, args, kwargs, result, _bytes(inputs + outputs), changes))
        self.work.setdefault((self.phase, self.part), []).extend(works)
        self.moments.append(
            RecordedOperation(self.phase, self.part, _workspace(func, args, result))
        )

    def _touch(
        self,
        touches: Touches,
        before: dict[int, None],
        outputs: list[Tensor],
        changed: list[Tensor],
    ) -> None:
        uses = [self._known[key].number for key in before if key in self._known]
        writes = [self._known[_key(one)].number for one in changed if _key(one) in self._known]
        makes = [self._known[_key(one)].number for one in outputs if _key(one) not in before]
        touches.note(self.part, uses, writes, makes)

    def _remember(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        whole = taken(size) if self.whole_pages else size
        memory = StorageRecord(size, whole, self.phase, self.part, len(self.moments))
        if self.touches is not None:
            memory.number = self.touches.add(size)
        self._known[key] = memory
        self.memories.append(memory)
        weakref.finalize(storage, self._forget, key, memory)

    def _forget(self, key: int, memory: StorageRecord) -> None:
        memory.died = len(self.moments)
        if self.touches is not None:
            self.touches.forget(memory.number)
        if self._known.get(key) is memory:
            del self._known[key]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SpatialTensor) for kind in types):
            return NotImplemented  # which works on its tile, and that comes by here again
        result = run(func, args, kwargs or {}, self._ledger.results)
        self._ledger.note(func, args, kwargs or {}, result)
        return result


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
    """Whether a tensor is on the ``meta`` device wherever the network runs, and takes nothing."""
    return func is aten.empty_like.default and kwargs.get("device") is not None


def _local(tensor: Tensor) -> Tensor:
    return tensor._tile if isinstance(tensor, SpatialTensor) else tensor


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


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
        for name, asked in zip(("conv_input", "conv_weight"), args[10], strict=False):
            if asked:
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
        given = name == "native_batch_norm" and not args[5]
        return "normalise" if given else "norm"
    if name == "native_batch_norm_backward":
        return "norm_backward" if args[9][0] else "norm_sums"
    if "pool" in name:
        return "pool_backward" if "backward" in name else "pool"
    return "in_place" if changes else "pointwise"


def _flops(func: Any, args: Any, result: Any, **kwargs: Any) -> float:
    count = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


def _workspace(func: Any, args: Any, result: Any) -> int:
    """Memory that a convolution on a CPU takes beside its operands, while it runs.

    oneDNN copies images into blocks of channels unless the convolution is a matrix product.
    Found by measuring the resident set around single convolutions in float32.
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
"""Channels that oneDNN puts together; images with fewer are read as they are."""


def _is_product(weight: Tensor, stride: Any) -> bool:
    return tuple(weight.shape[2:]) == (1, 1) and max(stride) == 1
