"""Shows the operations of a thread to an object that keeps tensors within a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spatialdl.torch_internals import DisableTorchFunction, TorchDispatchMode


class Keeper(Protocol):
    """Receiver of operations; see `memory.Memory`."""

    on_operation: Callable[[], object] | None

    def begin(self, tile: int) -> None: ...

    def make_room(self, needed: Iterable[torch.UntypedStorage]) -> None: ...

    def need(self, storage: torch.UntypedStorage, writes: bool = False) -> None: ...

    def note(self, storage: torch.UntypedStorage) -> None: ...

    def look_ahead(self) -> None: ...


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context for a thread.

    Args:
        memory: receiver of the operations.
        tile: number of the virtual tile of the thread.
        device: the accelerator whose tensors are stored; None for the CPU.
    """

    def __init__(self, memory: Keeper, tile: int, device: torch.device | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._tile = memory, tile
        self._stream = None if device is None else torch.accelerator.current_stream(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # its operations on tiles are dispatched here again
        kwargs, memory = kwargs or {}, self._memory
        if memory.on_operation is not None:
            memory.on_operation()
        inputs: dict[int, torch.UntypedStorage] = {}
        _collect(args, inputs)
        _collect(kwargs.values(), inputs)
        own = self._stream
        if own is not None:
            current = torch.accelerator.current_stream(own.device)
            if current != own:
                self._bring(inputs.values(), own, current)
                return func(*args, **kwargs)
        memory.begin(self._tile)
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        memory.make_room(inputs.values())
        for key, storage in inputs.items():
            memory.need(storage, key in written)
        result = func(*args, **kwargs)
        outputs: dict[int, torch.UntypedStorage] = {}
        _collect((result,), outputs)
        for key, storage in outputs.items():
            if key not in inputs:
                memory.note(storage)
        memory.make_room((*inputs.values(), *outputs.values()))
        memory.look_ahead()
        return result

    def _bring(
        self,
        inputs: Iterable[torch.UntypedStorage],
        own: torch.Stream,
        current: torch.Stream,
    ) -> None:
        """Load inputs of an operation on another stream, such as the packing of messages.

        Its outputs are not watched: stores and frees are ordered with the own stream only.
        """
        with own:
            for storage in inputs:
                self._memory.need(storage)
        current.wait_stream(own)


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        with DisableTorchFunction():  # not an operation of the network
            yield tensor.untyped_storage()


def _collect(values: Iterable[Any], storages: dict[int, torch.UntypedStorage]) -> None:
    """Collect the storages of the tensors among `values` and their lists, by address."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type != "meta":
                storage = value.untyped_storage()
                storages[storage._cdata] = storage
        elif isinstance(value, list | tuple):
            _collect(value, storages)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Addresses of the storages that an operation writes to."""
    storages: dict[int, torch.UntypedStorage] = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            _collect((value,), storages)
    return set(storages)
