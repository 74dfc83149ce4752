"""Shows what keeps tensors within a limit the operations of a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Keeper(Protocol):
    """What is told of operations; see `memory.Memory`."""

    told: Callable[[], object] | None

    def begin(self, tile: int) -> None: ...

    def make_room(self, needed: Iterable[torch.UntypedStorage]) -> None: ...

    def need(self, storage: torch.UntypedStorage, writes: bool = False) -> None: ...

    def note(self, storage: torch.UntypedStorage) -> None: ...

    def look_ahead(self) -> None: ...


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context for a thread.

    Args:
        memory: what is told.
        tile: number of the virtual tile that the thread works on.
        device: the accelerator whose tensors are stored; None for those of a CPU.
    """

    def __init__(self, memory: Keeper, tile: int, device: torch.device | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._tile = memory, tile
        self._stream = None if device is None else torch.accelerator.current_stream(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # what it does with its tiles comes here
        kwargs, memory = kwargs or {}, self._memory
        if memory.told is not None:
            memory.told()
        given: dict[int, torch.UntypedStorage] = {}
        _collect(args, given)
        _collect(kwargs.values(), given)
        own = self._stream
        if own is not None:
            current = torch.accelerator.current_stream(own.device)
            if current != own:
                self._bring(given.values(), own, current)
                return func(*args, **kwargs)
        memory.begin(self._tile)
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        memory.make_room(given.values())
        for key, storage in given.items():
            memory.need(storage, key in written)
        result = func(*args, **kwargs)
        made: dict[int, torch.UntypedStorage] = {}
        _collect((result,), made)
        for key, storage in made.items():
            if key not in given:
                memory.note(storage)
        memory.make_room((*given.values(), *made.values()))
        memory.look_ahead()
        return result

    def _bring(
        self,
        given: Iterable[torch.UntypedStorage],
        own: torch.Stream,
        current: torch.Stream,
    ) -> None:
        """For an operation of another stream, such as the packing of messages.

        What it makes is not watched: what is stored or freed waits for the own stream only.
        """
        with own:
            for storage in given:
                self._memory.need(storage)
        current.wait_stream(own)


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        with torch._C.DisableTorchFunction():  # it is no operation of the network
            yield tensor.untyped_storage()


def _collect(values: Iterable[Any], found: dict[int, torch.UntypedStorage]) -> None:
    """The storages of the tensors among `values`, and in their lists, by address."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type != "meta":
                storage = value.untyped_storage()
                found[storage._cdata] = storage
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """The storages that an operation writes to, by address."""
    found: dict[int, torch.UntypedStorage] = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            _collect((value,), found)
    return set(found)
