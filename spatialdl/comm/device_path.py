"""By which way tensors on accelerators go from rank to rank: chosen once, for all ranks.

``nccl``: NCCL, RCCL or what else PyTorch has for the device; every rank needs a device of its own.
``mpi``: MPI reads and writes device memory. ``host``: through pinned memory of the host.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_group import backend_for
from spatialdl.comm.processes import machine

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("spatialdl.comm")

PATHS = ("auto", "nccl", "mpi", "host")
PROBES = (4096, 8 * 2**20)
"""Bytes: MPI sends small messages at once and large ones after a handshake, in different ways."""


@dataclass(frozen=True)
class DevicePath:
    """How device tensors travel.

    Attributes:
        name: ``nccl``, ``mpi`` or ``host``.
        reason: why, for people.
        store: where the groups of ``nccl`` meet.
    """

    name: str
    reason: str
    store: Store | None = None


class _Chosen:
    path: DevicePath | None = None


def device_path() -> DevicePath:
    """What `choose_device_path` has found; through the host until then."""
    return _Chosen.path or DevicePath("host", "nothing was chosen yet")


def current_device() -> torch.device:
    """The current device of the accelerator that PyTorch sees, else the CPU.

    Apple's has neither streams of its own nor float64: the CPU is taken there.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def take_device(index: int) -> None:
    """Make a device the current one, with a context: MPI looks for one when it is initialised.

    Choosing a device makes none where it is the current one already, as device 0 is.
    """
    torch.accelerator.set_device_index(index)
    torch.empty(1, device=current_device())


def device_of(name: str) -> torch.device:
    """The device of this rank, as ``device=`` names it; which one was chosen when it started.

    Raises:
        ValueError: if PyTorch sees none of that kind.
    """
    found = torch.device("cpu") if name == "cpu" else current_device()
    if name not in ("auto", found.type):
        raise ValueError(f"device={name}, but PyTorch sees no {name} here: take cpu or auto")
    return found


class _Own(NamedTuple):
    """What a rank brings to the choice: its device, and which ways it could go."""

    kind: str
    device: object
    has_group: bool
    has_aware_mpi: bool
    chosen: str | None


def choose_device_path(
    comm: Communicator, device: torch.device, wanted: str = "auto"
) -> DevicePath | None:
    """Agree how tensors on accelerators travel; all ranks of `comm` must call it.

    From then on backward runs on the thread that calls it, as MPI may not be called from the
    threads that autograd has for devices.

    Args:
        comm: all ranks that will ever talk to each other.
        device: this rank's.
        wanted: one of `PATHS`.

    Returns:
        None where ranks compute on CPUs.

    Raises:
        ValueError: on all ranks, if they have devices of different kinds, or the way that is
            wanted cannot be had.
    """
    if wanted not in PATHS:
        raise ValueError(f"comm.device_path={wanted} is unknown: take one of {', '.join(PATHS)}")
    everybody: list[_Own] = comm.allgather(_own(comm, device))
    kinds = sorted({one.kind for one in everybody})
    if kinds == ["cpu"]:
        return None
    if len(kinds) > 1:
        raise ValueError(
            f"ranks compute on different kinds of device ({', '.join(kinds)}): choose one for all"
        )
    torch.autograd.set_multithreading_enabled(False)
    chosen = {one.chosen for one in everybody}
    if chosen != {None}:
        return _kept(chosen, wanted)
    _Chosen.path = _found(comm, device, wanted, everybody)
    if comm.rank == 0:
        log.info("tensors on %s go by %s: %s", kinds[0], _Chosen.path.name, _Chosen.path.reason)
    return _Chosen.path


def _own(comm: Communicator, device: torch.device) -> _Own:
    if device.type == "cpu":
        return _Own("cpu", None, False, False, None)
    return _Own(
        device.type,
        (machine(), _identity(device)),
        backend_for(device) is not None,
        _is_mpi(comm) and says_device_aware(device),
        None if _Chosen.path is None else _Chosen.path.name,
    )


def _identity(device: torch.device) -> str:
    """Identify a device among those of its machine, whichever of them a process sees.

    By its PCI address, which NCCL compares: parts of one GPU (MIG) share it, though each has a UUID
    of its own. On ROCm by the UUID: partitions of a GPU are devices of their own to RCCL.
    """
    found = torch.get_device_module(device).get_device_properties(device)
    address = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address and torch.version.hip is None:
        return f"PCI {':'.join(map(str, address))}"
    visible = [os.environ.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "ROCR", "HIP")]
    return str(getattr(found, "uuid", (visible, device.index)))


def _kept(chosen: set[str | None], wanted: str) -> DevicePath:
    if len(chosen) > 1 or _Chosen.path is None:
        raise ValueError(
            "some ranks have chosen how device tensors travel, in a mesh of their own, and others "
            "have not: make a mesh of all ranks first"
        )
    if wanted not in ("auto", _Chosen.path.name):
        raise ValueError(f"device tensors go by {_Chosen.path.name} already, not by {wanted}")
    return _Chosen.path


def _found(
    comm: Communicator, device: torch.device, wanted: str, everybody: Sequence[_Own]
) -> DevicePath:
    """The first way that all can go; the same on all ranks."""
    lacking: dict[str, Callable[[], str]] = {
        "nccl": lambda: _lacks_nccl(device, everybody),
        "mpi": lambda: _lacks_mpi(comm, device, everybody),
        "host": lambda: "",
    }
    missing: list[str] = []
    for name in lacking if wanted == "auto" else (wanted,):
        why_not = lacking[name]()
        if not why_not:
            reason = "; ".join(missing) or ("as wanted" if wanted != "auto" else _GOOD[name])
            return DevicePath(name, reason, _store(comm) if name == "nccl" else None)
        missing.append(why_not)
    raise ValueError(f"comm.device_path={wanted} cannot be had: {missing[0]}")


_GOOD = {"nccl": "every rank has a device of its own", "mpi": "MPI takes device memory"}


def _lacks_nccl(device: torch.device, everybody: Sequence[_Own]) -> str:
    """Empty, or what is missing."""
    if not all(one.has_group for one in everybody):
        return f"PyTorch has no collectives for {device.type} here"
    device_of, count = Counter(one.device for one in everybody).most_common(1)[0]
    if count > 1:
        ranks = [rank for rank, one in enumerate(everybody) if one.device == device_of]
        return f"ranks {ranks[0]} and {ranks[1]} share a device"
    return ""


def _lacks_mpi(comm: Communicator, device: torch.device, everybody: Sequence[_Own]) -> str:
    if not all(one.has_aware_mpi for one in everybody):
        return f"MPI does not say that it takes memory of {device.type}"
    for nbytes in PROBES:
        if not all(comm.allgather(_moves_device_memory(comm, device, nbytes))):  # type: ignore[arg-type]
            return f"MPI says that it takes memory of {device.type}, but does not move {nbytes} B"
    return ""


def _is_mpi(comm: Communicator) -> bool:
    return hasattr(comm, "Sendrecv")


def _store(comm: Communicator) -> Store:
    """Where groups of any of these ranks meet."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    from spatialdl.comm.store import store_by_mpi

    return store_by_mpi(comm)  # type: ignore[arg-type]


# --- MPI that takes device memory

_KINDS = {"cuda": ("cuda",), "hip": ("rocm", "hip"), "xpu": ("level_zero", "ze")}
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support",),
    "hip": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
    "xpu": ("MPIX_Query_ze_support",),
}
_MPICH_NUMBERS = {"cuda": 0, "xpu": 1, "hip": 2}


def says_device_aware(device: torch.device) -> bool:
    """Whether the MPI library says that it takes memory of such devices.

    By the info key of MPI 4.1, by the functions of Open MPI, of MPICH and of Cray MPICH.
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
    ask: Any = getattr(library, "MPIX_GPU_query_support", None)
    answer = ctypes.c_int(0)
    number = _MPICH_NUMBERS.get(kind)
    if ask is None or number is None or ask(number, ctypes.byref(answer)) != 0:
        return False
    return bool(answer.value)


def _moves_device_memory(comm: MPI.Intracomm, device: torch.device, nbytes: int) -> bool:
    """Send numbers around the ring, from device memory to device memory."""
    from mpi4py import MPI

    own = torch.full((nbytes // 4,), comm.rank, dtype=torch.int32, device=device)
    landed = torch.full_like(own, -1)
    torch.accelerator.current_stream(device).synchronize()
    ours, theirs = (
        [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), MPI.INT32_T]
        for x in (own, landed)
    )
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    try:
        comm.Sendrecv(ours, after, 0, theirs, before, 0)
    except MPI.Exception:
        return False
    return bool((landed == before).all().item())
