"""A device without memory: what runs on it is counted, and nothing is computed.

Tensors of the device are PyTorch's fake tensors; those of the CPU are real, so that what the host
decides from its own tables is decided as always. Where the host asks for a number of the device it
gets one that lets a step go on: 1, True, or False of ``any``. `install` renames PyTorch's spare
device for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils._foreach_utils as foreach
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.host_waits.ledger import Ledger

NAME = "sim"
ADDRESSES = 1 << 60
"""Where the memory of the device seems to lie."""

aten = torch.ops.aten

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "record_stream", "is_pinned"),
}

_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class FakeDevice(TorchDispatchMode):
    """Counts what operators do with the device; the rest of the process goes on as it is."""

    _fake = FakeTensorMode()  # one for all: what the package keeps must stay usable

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._pinned: set[StorageWeakRef] = set()
        self._special = {
            "_to_copy": self._moved,
            "copy_": self._copied,
            "_local_scalar_dense": self._asked,
            "equal": self._asked,
            "nonzero": lambda func, mask: self._true(mask),
            **dict.fromkeys(_INDEXED, self._indexed),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # plain ones are named where autograd detaches what a network without data has saved
        if not all(kind is Tensor or issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # split tensors, whose tiles come here afterwards
        if func is torch.ops.prim.device.default:  # asked for very often
            return args[0].fake_device
        target = kwargs.get("device")
        is_here = target is not None and torch.device(target).type == NAME
        if is_here or any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs))):
            return self._special.get(_name(func), self._launched)(func, *args, **kwargs)
        return self._on_host(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _name(func) == "is_pinned":
            return self._is_pinned(args[0])
        if _name(func) in ("pin_memory", "_pin_memory"):
            out = args[0].clone()
        elif kwargs.get("pin_memory"):
            out = func(*args, **{**kwargs, "pin_memory": False})
        else:
            return func(*args, **kwargs)
        self._pinned.add(StorageWeakRef(out.untyped_storage()))
        return out

    def _moved(self, func: Any, source: Tensor, **kwargs: Any) -> Tensor:
        """``source.to(...)``; where it goes to the host PyTorch pins for itself."""
        if torch.device(kwargs.get("device") or source.device).type == source.device.type:
            return self._launched(func, source, **kwargs)  # type: ignore[no-any-return]
        out: Tensor = self._faked(func, source, **kwargs)
        is_async = bool(kwargs.get("non_blocking"))
        if isinstance(source, FakeTensor):
            self._note_copy("d2h", source, waits=not is_async)
            return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype).zero_()
        self._note_copy("h2d", source, waits=not (is_async and self._is_pinned(source)))
        return out

    def _copied(self, func: Any, into: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        """``into.copy_(source)``."""
        if into.device.type == source.device.type:
            return self._launched(func, into, source)
        kind, on_host = ("d2h", into) if isinstance(source, FakeTensor) else ("h2d", source)
        self._note_copy(kind, source, waits=not (non_blocking and self._is_pinned(on_host)))
        return into

    def _asked(self, func: Any, value: Tensor, *others: Tensor) -> bool | int | float:
        """``value.item()``, ``bool(value)`` or ``torch.equal``."""
        self._ledger.note("waits")
        if others or value.dtype is torch.bool:
            return not getattr(value, "_is_any", False)
        return 1.0 if value.is_floating_point() else 1

    def _is_pinned(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._pinned

    def _note_copy(self, kind: str, tensor: Tensor, waits: bool) -> None:
        if tensor.numel() == 0:
            return
        self._ledger.note(kind, tensor.nbytes)
        if waits:
            self._ledger.note("waits")

    def _indexed(self, func: Any, x: Tensor, indices: Any, *others: Any) -> Any:
        """``x[indices]``; masks as places, for whose number the host waits: here all of them."""
        places: list[Any] = []
        for one in indices:
            is_mask = isinstance(one, FakeTensor) and one.dtype in (torch.bool, torch.uint8)
            places += self._true(one).unbind(1) if is_mask else [one]
        return self._launched(func, x, places, *others)

    def _true(self, mask: Tensor) -> Tensor:
        """``mask.nonzero()``."""
        self._ledger.note("waits")
        self._ledger.note("launches")
        with self._fake:
            return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)

    def _faked(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What an operator would give; tensors of the host are only shapes to it."""

        def shape_of(one: Any) -> Any:
            if not isinstance(one, Tensor) or isinstance(one, FakeTensor):
                return one
            return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)

        with self._fake:
            args, kwargs = tree_map(shape_of, (args, kwargs))
            return func(*args, **kwargs)

    def _launched(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        out, name = self._faked(func, *args, **kwargs), _name(func)
        if name in _NO_KERNEL or _is_view(func):
            return out
        made = tree_leaves(args[0] if out is None else out)
        if any(isinstance(one, Tensor) and one.numel() for one in made):
            for _ in range(_kernels(name, args)):
                self._ledger.note("launches")
        if isinstance(out, FakeTensor) and out.dim() == 0:
            out._is_any = name == "any"  # type: ignore[attr-defined]
        return out


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _kernels(name: str, args: Any) -> int:
    """How many an operator needs: one, also for lists of tensors unless their shapes differ."""
    lists = [one for one in args if isinstance(one, list | tuple)] if "_foreach_" in name else []
    shapes = [[getattr(one, "shape", None) for one in some] for some in lists]
    is_alike = all(some == shapes[0] or None in some for some in shapes)
    return 1 if is_alike else len(lists[0])


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returned)


# --- streams


class Stream:
    """Whichever of PyTorch's streams; waits of the host are counted."""

    ledger: Ledger

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None:
        self.ledger.note("waits")

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Event:
        return Event()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """Likewise of events."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None:
        Stream.ledger.note("waits")

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class _Module:
    """``torch.sim``: as ``torch.cuda``, as far as the package asks for it."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self._current = Stream()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.{NAME}.{name}: add it to tests/host_waits/device.py")

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # of the host, as CUDA keeps it

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    def stream(self, stream: Stream) -> Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        Stream.ledger.note("waits")


# --- autocast, of which a new device has none

_libraries: list[torch.library.Library] = []
_HALF = ("conv2d", "conv_transpose2d.input", "linear", "matmul", "scaled_dot_product_attention")
_WIDE = ("layer_norm", "log_softmax.int", "softmax.int")


def _install_autocast() -> None:
    """What a GPU's does to the operators that our networks call."""
    key = "AutocastPrivateUse1"
    _libraries.append(everything := torch.library.Library("_", "IMPL", key))
    everything.fallback(torch.library.fallthrough_kernel)
    _libraries.append(some := torch.library.Library("aten", "IMPL", key))
    for name in (*_HALF, *_WIDE):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        some.impl(name, partial(_cast, op, name in _HALF))


def _cast(op: Any, to_half: bool, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(NAME) if to_half else torch.float32

    def cast(one: Any) -> Any:
        is_float = isinstance(one, Tensor) and one.is_floating_point()
        return one.to(dtype) if is_float and one.dtype is not torch.float64 else one

    with torch._C._DisableAutocast():
        args, kwargs = tree_map(cast, (args, kwargs))
        return op(*args, **kwargs)


# --- for the process


def install() -> None:
    """Make the device known, under `NAME`, to this process; once."""
    module = _Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        for other in (torch.cuda, torch.accelerator):
            if hasattr(other, name):
                setattr(other, name, getattr(module, name))
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc,assignment]
    for types in (foreach._foreach_supported_types, optimizer._foreach_supported_types):
        types.append(FakeTensor)  # as plain tensors of a GPU
    FakeTensor.data_ptr = _address  # type: ignore[method-assign,assignment]
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # type: ignore[method-assign]
    _install_autocast()


def _address(tensor: Tensor) -> int:
    return ADDRESSES + tensor.untyped_storage()._cdata + tensor.storage_offset()


@contextmanager
def counting() -> Iterator[Ledger]:
    """The device while tensors can be made on it; the ledger counts while it `is_on`."""
    ledger = Ledger()
    Stream.ledger = ledger
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then copies from the CPU where we see
    try:
        with torch.autograd.set_multithreading_enabled(False), FakeDevice(ledger):
            yield ledger
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
