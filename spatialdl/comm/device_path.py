"""Data path of accelerator tensors between ranks, chosen once for all ranks.

``nccl``: NCCL, RCCL or PyTorch's equivalent for the device; every rank needs a separate device.
``mpi``: MPI reads and writes device memory. ``host``: through pinned host memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import machine
from spatialdl.torch_internals import backend_plugins, default_store

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("spatialdl.comm")

PATHS = ("auto", "nccl", "mpi", "host")
PROBES = (4096, 8 * 2**20)
"""Bytes: MPI uses an eager protocol for small messages and a rendezvous for large ones."""


@dataclass(frozen=True)
class DevicePath:
    """Data path of device tensors.

    Attributes:
        name: ``nccl``, ``mpi`` or ``host``.
        reason: why it was chosen, as text.
        store: rendezvous store for groups of ``nccl``.
    """

    name: str
    reason: str
    store: Store | None = None


class _Chosen:
    path: DevicePath | None = None


def device_path() -> DevicePath:
    """Result of `choose_device_path`; through the host before that."""
    return _Chosen.path or DevicePath("host", "not chosen yet")


def current_device() -> torch.device:
    """Current device of PyTorch's accelerator, else the CPU.

    Also the CPU for MPS, which has neither streams nor float64.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def take_device(index: int) -> None:
    """Make a device current and create its context, which MPI looks for when it is initialised.

    Setting the device creates none if it is current already, as device 0 is.
    """
    torch.accelerator.set_device_index(index)
    torch.empty(1, device=current_device())


def device_of(name: str) -> torch.device:
    """Device of this rank for ``device=name``; its index was chosen at start.

    Raises:
        ValueError: if PyTorch has no device of that type.
    """
    device = torch.device("cpu") if name == "cpu" else current_device()
    if name not in ("auto", device.type):
        raise ValueError(f"device={name}, but PyTorch finds no {name} device: set cpu or auto")
    return device


class _Own(NamedTuple):
    """Device of a rank, and the paths that it supports."""

    kind: str
    device: object
    has_group: bool
    has_aware_mpi: bool
    chosen: str | None


def choose_device_path(
    comm: Communicator, device: torch.device, wanted: str = "auto"
) -> DevicePath | None:
    """Agree on the data path of accelerator tensors; collective.

    Afterwards backward runs on the calling thread, as MPI may not be called from autograd's
    device threads.

    Args:
        comm: all ranks that will ever communicate.
        device: this rank's device.
        wanted: one of `PATHS`.

    Returns:
        None if ranks compute on CPUs.

    Raises:
        ValueError: on all ranks, if they have devices of different types, or `wanted` is
            unavailable.
    """
    if wanted not in PATHS:
        raise ValueError(f"unknown comm.device_path={wanted}, must be one of {', '.join(PATHS)}")
    ranks: list[_Own] = comm.allgather(_own(comm, device))
    kinds = sorted({one.kind for one in ranks})
    if kinds == ["cpu"]:
        return None
    if len(kinds) > 1:
        raise ValueError(
            f"ranks use different device types ({', '.join(kinds)}): choose one for all ranks"
        )
    torch.autograd.set_multithreading_enabled(False)
    chosen = {one.chosen for one in ranks}
    if chosen != {None}:
        return _kept(chosen, wanted)
    _Chosen.path = _available(comm, device, wanted, ranks)
    if comm.rank == 0:
        log.info(
            "data path of %s tensors: %s (%s)", kinds[0], _Chosen.path.name, _Chosen.path.reason
        )
    return _Chosen.path


def _own(comm: Communicator, device: torch.device) -> _Own:
    if device.type == "cpu":
        return _Own("cpu", None, False, False, None)
    return _Own(
        device.type,
        (machine(), _identity(device)),
        backend_for(device) is not None,
        _is_mpi(comm) and reports_device_aware(device),
        None if _Chosen.path is None else _Chosen.path.name,
    )


def _identity(device: torch.device) -> str:
    """Identify a device within its machine, independent of the devices visible to a process.

    By its PCI address, which NCCL compares: MIG parts of one GPU share it, though their UUIDs
    differ. On ROCm by the UUID: RCCL treats partitions of a GPU as separate devices.
    """
    properties = torch.get_device_module(device).get_device_properties(device)
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address and torch.version.hip is None:
        return f"PCI {':'.join(map(str, address))}"
    visible = [os.environ.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "ROCR", "HIP")]
    return str(getattr(properties, "uuid", (visible, device.index)))


def _kept(chosen: set[str | None], wanted: str) -> DevicePath:
    if len(chosen) > 1 or _Chosen.path is None:
        raise ValueError(
            "some ranks have chosen their device path in an earlier mesh, and some have not: "
            "create a mesh of all ranks first"
        )
    if wanted not in ("auto", _Chosen.path.name):
        raise ValueError(f"the device path is {_Chosen.path.name} already, not {wanted}")
    return _Chosen.path


def _available(
    comm: Communicator, device: torch.device, wanted: str, ranks: Sequence[_Own]
) -> DevicePath:
    """The first path that all ranks support; the same on all ranks."""
    obstacles: dict[str, Callable[[], str]] = {
        "nccl": lambda: _lacks_nccl(device, ranks),
        "mpi": lambda: _lacks_mpi(comm, device, ranks),
        "host": lambda: "",
    }
    missing: list[str] = []
    for name in obstacles if wanted == "auto" else (wanted,):
        why_not = obstacles[name]()
        if not why_not:
            reason = "; ".join(missing) or ("as configured" if wanted != "auto" else _GOOD[name])
            return DevicePath(name, reason, _store(comm) if name == "nccl" else None)
        missing.append(why_not)
    raise ValueError(f"comm.device_path={wanted} is unavailable: {missing[0]}")


_GOOD = {"nccl": "every rank has a separate device", "mpi": "MPI is device-aware"}


def _lacks_nccl(device: torch.device, ranks: Sequence[_Own]) -> str:
    """Why ``nccl`` is unavailable; else empty."""
    if not all(one.has_group for one in ranks):
        return f"PyTorch has no collectives for {device.type} here"
    device_of, count = Counter(one.device for one in ranks).most_common(1)[0]
    if count > 1:
        sharing = [rank for rank, one in enumerate(ranks) if one.device == device_of]
        return f"ranks {sharing[0]} and {sharing[1]} share a device"
    return ""


def _lacks_mpi(comm: Communicator, device: torch.device, ranks: Sequence[_Own]) -> str:
    """Why ``mpi`` is unavailable; else empty."""
    if not all(one.has_aware_mpi for one in ranks):
        return f"MPI does not report support for {device.type} memory"
    for nbytes in PROBES:
        if not all(comm.allgather(_moves_device_memory(comm, device, nbytes))):  # type: ignore[arg-type]
            return f"MPI reports support for {device.type} memory, but fails to move {nbytes} B"
    return ""


def _is_mpi(comm: Communicator) -> bool:
    return hasattr(comm, "Sendrecv")


def _store(comm: Communicator) -> Store:
    """Rendezvous store for groups of these ranks."""
    if dist.is_initialized():
        return default_store()
    from spatialdl.comm.store import store_by_mpi

    return store_by_mpi(comm)  # type: ignore[arg-type]


# --- device-aware MPI

_KINDS = {"cuda": ("cuda",), "hip": ("rocm", "hip"), "xpu": ("level_zero", "ze")}
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support",),
    "hip": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
    "xpu": ("MPIX_Query_ze_support",),
}
_MPICH_NUMBERS = {"cuda": 0, "xpu": 1, "hip": 2}


def reports_device_aware(device: torch.device) -> bool:
    """Whether the MPI library reports support for memory of such devices.

    Uses the info key of MPI 4.1, and functions of Open MPI, MPICH and Cray MPICH.
    """
    from mpi4py import MPI

    kind = "hip" if device.type == "cuda" and torch.version.hip else device.type
    allocated = MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    if {one.partition(":")[0] for one in allocated.split(",")} & set(_KINDS.get(kind, ())):
        return True
    library = ctypes.CDLL(MPI.__file__)
    queries = (getattr(library, name, None) for name in _QUERIES.get(kind, ()))
    if any(query is not None and query() for query in queries):
        return True
    query_mpich: Any = getattr(library, "MPIX_GPU_query_support", None)
    supported = ctypes.c_int(0)
    number = _MPICH_NUMBERS.get(kind)
    if query_mpich is None or number is None or query_mpich(number, ctypes.byref(supported)) != 0:
        return False
    return bool(supported.value)


def _moves_device_memory(comm: MPI.Intracomm, device: torch.device, nbytes: int) -> bool:
    """Test a ring exchange from device memory to device memory."""
    from mpi4py import MPI

    own = torch.full((nbytes // 4,), comm.rank, dtype=torch.int32, device=device)
    received = torch.full_like(own, -1)
    torch.accelerator.current_stream(device).synchronize()
    ours, theirs = (
        [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), MPI.INT32_T]
        for x in (own, received)
    )
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    try:
        comm.Sendrecv(ours, after, 0, theirs, before, 0)
    except MPI.Exception:
        return False
    return bool((received == before).all().item())


# --- groups over PyTorch's collectives for an accelerator, such as NCCL for CUDA

_made: Counter[tuple[int, ...]] = Counter()

_CLASSES = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}


def backend_for(device: torch.device) -> str | None:
    """Name of PyTorch's backend for such devices; None if unavailable."""
    name = dist.Backend.default_device_backend_map.get(device.type)
    if name is None:
        return None
    built_in = _CLASSES.get(name)
    if built_in is not None:
        return name if hasattr(dist, built_in) else None
    return name if name.upper() in backend_plugins else None


def device_group(
    store: Store, ranks: tuple[int, ...], rank: int, device: torch.device, limit: timedelta
) -> Any:
    """Create a group that torch.distributed does not register; collective over its ranks.

    Args:
        store: rendezvous store.
        ranks: world ranks, in the order of their numbers in the group.
        rank: this process in that order.
        device: device of this rank.
        limit: timeout of operations.

    Returns:
        A ``ProcessGroup`` with all ranks connected, because an exchange may involve only some.
    """
    name = backend_for(device)
    if name is None:
        raise ValueError(f"PyTorch has no collectives for {device.type} here")
    own = PrefixStore(f"spatialdl/{name}/{'-'.join(map(str, ranks))}/{_made[ranks]}", store)
    _made[ranks] += 1
    group = _group(name, own, rank, len(ranks), device, limit)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return group


def _group(
    name: str, store: Store, rank: int, size: int, device: torch.device, limit: timedelta
) -> Any:
    backend = _backend(name, store, rank, size, limit)
    if isinstance(backend, dist.ProcessGroup):
        return backend
    kind = getattr(dist.ProcessGroup.BackendType, name.upper(), None)
    kind = dist.ProcessGroup.BackendType.CUSTOM if kind is None else kind
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def _backend(name: str, store: Store, rank: int, size: int, limit: timedelta) -> Any:
    if name in _CLASSES:
        group_class = getattr(dist, _CLASSES[name])
        options = group_class.Options()
        options._timeout = limit
        return group_class(store, rank, size, options)
    plugin = backend_plugins[name.upper()]
    if plugin.extended_api:
        raise ValueError(f"unsupported backend {name}: set comm.device_path=host")
    return plugin.creator_fn(store, rank, size, limit)
