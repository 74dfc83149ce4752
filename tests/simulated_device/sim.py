"""The module `torch.sim`: the simulated accelerator with the names that `torch.cuda` has."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Device = torch.device | str | int | None
Stream, Event = torch.Stream, torch.Event
_ops = torch.ops.sim
_initialized = True  # checkpoint asks whether there are random states to keep
PATIENCE_S = 30  # of what is held, or a test that fails would hang


def _index(device: Device) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


is_initialized = is_available


def device_count() -> int:
    return int(_ops.device_count())


current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
device = torch.accelerator.device_index


@dataclass(frozen=True)
class Properties:
    name: str
    uuid: str
    total_memory: int


def get_device_properties(device: Device = None) -> Properties:
    return Properties("sim", f"sim-{_index(device)}", mem_get_info(device)[1])


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


# Streams and events.

current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize


def default_stream(device: Device = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(kind))


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Queue work in a stream for a while; None changes nothing."""
    return stream or contextlib.nullcontext()


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[threading.Event]:
    """Hold a stream, the current one by default, until the end or until the event is set.

    What is queued in it has certainly not run until then.
    """
    gate = threading.Event()

    def hold() -> None:
        if not gate.wait(PATIENCE_S):
            raise TimeoutError("the host waited for a stream that a test holds back")

    enqueue(hold, stream)
    try:
        yield gate
    finally:
        gate.set()


# Memory.

empty_cache = torch.accelerator.memory.empty_cache
memory_allocated = torch.accelerator.memory.memory_allocated
max_memory_allocated = torch.accelerator.memory.max_memory_allocated
memory_reserved = torch.accelerator.memory.memory_reserved
reset_peak_memory_stats = torch.accelerator.memory.reset_peak_memory_stats
mem_get_info = torch.accelerator.memory.get_memory_info
"""Free and total bytes."""


# Random numbers.


def manual_seed(seed: int) -> None:
    _ops.manual_seed(_signed(seed), current_device())


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _ops.manual_seed(_signed(seed), index)


def _signed(seed: int) -> int:
    return (int(seed) + 2**63) % 2**64 - 2**63


def initial_seed() -> int:
    return int(_ops.initial_seed(current_device())) % 2**64


def get_rng_state(device: Device = "sim") -> Tensor:
    state: Tensor = _ops.get_rng_state(_index(device))
    return state


def set_rng_state(new_state: Tensor, device: Device = "sim") -> None:
    _ops.set_rng_state(new_state.cpu(), _index(device))


def _is_in_bad_fork() -> bool:
    return False


# Autocast.


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# What tests count and plant.


def set_delay(most_us: int, seed: int = 0) -> None:
    """Have streams wait for a random time of at most `most_us` before each piece of work."""
    _ops.set_delay(most_us, seed)


@dataclass(frozen=True)
class Counters:
    """What happened since `reset_counters`.

    Attributes:
        waits: how often the host waited, by kind and by operator (empty: a call of its own).
        copies, bytes: "to the device" and "to the host".
        launches: operators that were queued.
    """

    waits: dict[tuple[str, str], int]
    copies: dict[str, int]
    bytes: dict[str, int]
    launches: int

    @property
    def host_waits(self) -> int:
        return sum(self.waits.values())


def counters() -> Counters:
    found = {tuple(key.split("\t")): value for key, value in _ops.counters().items()}

    def named(what: str) -> dict[str, int]:
        return {key[1]: value for key, value in found.items() if key[0] == what}

    waits = {(key[1], key[2]): value for key, value in found.items() if key[0] == "wait"}
    return Counters(waits, named("copies"), named("bytes"), found.get(("launches",), 0))


def reset_counters() -> None:
    _ops.reset_counters()


@contextlib.contextmanager
def wait_sites(folder: str) -> Iterator[Counter[tuple[str, str, str]]]:
    """Where the host waits: (kind, operator, file:line) and how often.

    Args:
        folder: the innermost line of a file below it is named; else `backward`, for threads of
            autograd run no Python, or the innermost line of all.
    """
    sites: Counter[tuple[str, str, str]] = Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    def notice(kind: bytes, name: bytes) -> None:
        innermost = frame = sys._getframe(1) if sys._getframe().f_back else None
        while frame is not None and not frame.f_code.co_filename.startswith(folder):
            frame = frame.f_back
        frame = frame or innermost
        site = "backward" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        sites[kind.decode(), name.decode(), site] += 1

    _ops.set_wait_watcher(ctypes.cast(notice, ctypes.c_void_p).value)
    try:
        yield sites
    finally:
        _ops.set_wait_watcher(0)


def synchronous_operators() -> list[str]:
    """Operators for which the host waited because their shapes are not known beforehand."""
    return list(_ops.synchronous_operators())


# What simulated transports need.


def pointer_kind(address: int) -> str:
    """`device 0`, `pinned host` or `other`."""
    return str(_ops.pointer_kind(address))


def host_address(address: int) -> int:
    """Where kernels and transports reach what lies at a device address; waits for nothing."""
    return int(_ops.host_address(address))


def host_view(tensor: Tensor) -> Tensor:
    """A device tensor's memory as a CPU tensor, without waiting and without keeping it alive."""
    view: Tensor = _ops.host_view(tensor.detach())
    return view


_callbacks: dict[int, tuple[Callable[[], Any], int]] = {}
_numbers = itertools.count()


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _call(number: int) -> None:
    function, index = _callbacks.pop(number)
    try:
        function()
    except BaseException as error:
        _ops.fail(index, f"{function} failed on sim: {error!r}")


def enqueue(function: Callable[[], Any], stream: torch.Stream | None = None) -> None:
    """Have a stream call a function, in order, in its own thread.

    An exception is raised where the host next waits for the device.
    """
    stream = current_stream() if stream is None else stream
    number = next(_numbers)
    _callbacks[number] = function, stream.device_index
    address = ctypes.cast(_call, ctypes.c_void_p).value
    enqueue_native(address, number, stream)


def enqueue_native(function: int, argument: int, stream: torch.Stream | None = None) -> None:
    """Have a stream call the C function `void f(int64_t)` at an address, without the GIL."""
    stream = current_stream() if stream is None else stream
    _ops.enqueue(stream.device_index, stream.stream_id, function, argument)
