"""Virtual tiles of a run: what goes with them, and where waits what is not in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig

from spatialdl.comm.allocator import return_what_is_freed
from spatialdl.parallel.placement import Placement
from spatialdl.streaming.memory import Memory
from spatialdl.streaming.store import DiskStore


def check_virtual_tiles(config: DictConfig, placement: Placement) -> None:
    """Refuse what sees whole tiles only, and settings that only virtual tiles have.

    Raises:
        ValueError: names the key.
    """
    parallel, task, trainer = config.parallel, config.task, config.trainer
    if not placement.stream:
        _check_unused(config)
        return
    refused = {
        "trainer.compile=true": trainer.compile,
        f"task.mixup={task.get('mixup')}": task.get("mixup"),
        "task.loss=cox": task.name == "survival" and task.loss == "cox",
        "debug=detect_nan": config.debug.name == "detect_nan",
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{what} does not go with virtual tiles, parallel.stream={parallel.stream}: leave "
                "one of them out"
            )


def _check_unused(config: DictConfig) -> None:
    given = {
        "parallel.stream_to": config.parallel.stream_to,
        "trainer.memory_limit_gb": config.trainer.memory_limit_gb,
    }
    for key, value in given.items():
        if value is not None:
            raise ValueError(
                f"{key}={value} is of no use without virtual tiles: set parallel.stream, such as "
                "parallel.stream=[2,2], or leave it out"
            )


def memory_within(
    limit: object, folder: object, device: torch.device, key: str = "trainer.memory_limit_gb"
) -> Memory:
    """What holds activations of virtual tiles, within a limit if there is one.

    Args:
        limit: 10^9 bytes, the value of `key`; None for no limit.
        folder: of what is not in memory, the value of ``parallel.stream_to``.

    Raises:
        ValueError: the limit is no positive number, or the store cannot be used.
    """
    if limit is None:
        if folder is not None:
            raise ValueError(
                f"parallel.stream_to={folder} is of no use without {key}: set it, or leave "
                "parallel.stream_to out"
            )
        return Memory()
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"{key}={limit} must be a number above 0")
    if device.type != "cpu":
        raise ValueError(
            f"{key}={limit} is for networks on a CPU, this run is on {device}: leave it out"
        )
    return_what_is_freed()
    return Memory(int(limit * 1e9), DiskStore(folder if folder is None else Path(str(folder))))
