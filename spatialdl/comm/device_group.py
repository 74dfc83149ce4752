"""Process groups over PyTorch's collectives for an accelerator, such as NCCL for CUDA."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from spatialdl.torch_internals import backend_plugins

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
