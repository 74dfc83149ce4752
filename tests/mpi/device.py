"""The device on which these tests compute: the CPU, or the simulated accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path, current_device, reports_device_aware
from spatialdl.comm.launch import launched
from spatialdl.comm.single_process import SingleProcess
from tests import simulated_device

PATH = os.environ.get("SPATIALDL_DEVICE_PATH", "auto")


def _device() -> torch.device:
    kind = os.environ.get("SPATIALDL_DEVICE", "cpu")
    if kind == "sim":
        os.environ.setdefault("SIM_DEVICES", str(launched().size))
        simulated_device.load()
    if kind not in ("cpu", current_device().type):
        raise RuntimeError(f"SPATIALDL_DEVICE={kind}, but PyTorch sees no {kind} here")
    return torch.device(kind)


DEVICE = _device()
REFERENCE = torch.device("cpu") if DEVICE.type == "sim" else DEVICE
"""Where one process computes what is compared; the simulated device would use the same code."""


def lacking(world: Communicator) -> str:
    """What this machine lacks for tests by `PATH`; else empty."""
    if PATH == "nccl" and DEVICE.type != "cpu" and _devices() < world.size:
        return f"nccl needs a device for each of {world.size} ranks, there are {_devices()}"
    if PATH == "mpi" and DEVICE.type not in ("cpu", "sim") and not reports_device_aware(DEVICE):
        return f"the MPI library does not report support for {DEVICE.type} memory"
    return ""


def _devices() -> int:
    """How many the ranks take: all, or as many as SPATIALDL_DEVICES says."""
    count = torch.accelerator.device_count()
    return min(count, int(os.environ.get("SPATIALDL_DEVICES", count)))


class CarriedOver(TorchFunctionMode):
    """Carries tensors on the CPU to the device of others that a function is called with.

    Networks, labels and indices that tests hold lie on the CPU, where the reference is computed.
    Functions that the package itself calls are not seen, but for those of `reindex` and the like
    that a test calls itself: what these have pinned stays where it is.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, dict(kwargs or {})
        if func is F.l1_loss:  # PyTorch forgets its weight, as when it asks an operand
            frame = sys._getframe()
            while frame.f_code is not F.l1_loss.__code__:
                frame = frame.f_back  # type: ignore[assignment]
            given[1]["weight"] = frame.f_locals["weight"]
        if any(isinstance(one, Tensor) and one.device.type != "cpu" for one in tree_leaves(given)):
            given = tree_map_only(Tensor, _carried, given)
        return func(*given[0], **given[1])


def _carried(tensor: Tensor) -> Tensor:
    is_pinned = type(tensor) is Tensor and tensor.is_pinned()
    return tensor.to(DEVICE) if tensor.is_cpu and not is_pinned else tensor


def device_key(comm: Communicator) -> str:
    """The override for a run of `comm`; a process by itself is a reference, on the CPU."""
    return "device=cpu" if isinstance(comm, SingleProcess) else f"device={DEVICE.type}"


def put_on(world: Communicator) -> torch.device:
    """Give every rank a device, of its own if there are enough; all ranks call it."""
    if DEVICE.type == "cpu" or lacking(world):
        return DEVICE
    torch.accelerator.set_device_index(world.rank % _devices())
    if DEVICE.type == "sim" and PATH == "mpi":
        from tests.simulated_device.device_aware_mpi import take_device_memory

        take_device_memory()
    path = choose_device_path(world, current_device(), PATH)
    assert path is not None
    assert PATH in ("auto", path.name)
    return current_device()
