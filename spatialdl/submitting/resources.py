"""Resources of a Slurm job: nodes, tasks and sbatch options for the ranks of a layout."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

Options = tuple[tuple[str, object], ...]
"""sbatch options in order, ``True`` for flags; runs with equal options share an array."""

_COUNTS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_task", "at_once")
_KEYS = {
    **{name: name for name in ("account", "partition", "time", "nodes", "requeue", "signal")},
    **{"ntasks_per_node": "tasks_per_node", "no_requeue": "requeue"},
    **{name: name for name in ("cpus_per_task", "gpus_per_task")},
}
_OURS = {option: f"launcher.{key} sets it" for option, key in _KEYS.items()} | {
    "array": "a sweep is an array, launcher.at_once limits it",
    "error": "the table lists the log files of jobs",
    "ntasks": "the layout determines the number of ranks",
    "open_mode": "a resumed job appends to its log",
    "output": "the table lists the log files of jobs",
    "wrap": "a job is a run",
}
"""Options that ``launcher.options`` must not contain, with the reason."""


def resources(launcher: DictConfig, ranks: int) -> Options:
    """sbatch options of a job.

    Args:
        launcher: settings of ``launcher=slurm``.
        ranks: number of ranks of the layout.

    Raises:
        ValueError: if a setting is invalid, or the ranks do not fit on the nodes.
    """
    _check(launcher)
    nodes, each = on_nodes(ranks, launcher.nodes, launcher.tasks_per_node)
    options: dict[str, Any] = {
        "account": launcher.account,
        "cpus_per_task": launcher.cpus_per_task,
        "gpus_per_task": launcher.gpus_per_task,
        "nodes": nodes,
        "ntasks": ranks,
        "ntasks_per_node": each,
        "partition": launcher.partition,
        "signal": f"USR1@{launcher.signal}",  # without B: to the ranks, not to the script
        "time": launcher.time,
        ("requeue" if launcher.requeue else "no_requeue"): True,
    }
    options |= dict(_option(text) for text in launcher.options)
    return tuple((key, value) for key, value in sorted(options.items()) if value is not None)


def on_nodes(ranks: int, nodes: int | None, each: int | None) -> tuple[int | None, int | None]:
    """Number of nodes, and maximum ranks per node; None is left to Slurm.

    Raises:
        ValueError: if the ranks do not fit, with the numbers.
    """
    if nodes is None and each is None:
        return None, None
    if nodes is None and each is not None:
        each = min(each, ranks)
        return -(-ranks // each), each
    assert nodes is not None
    if nodes > ranks:
        raise ValueError(
            f"launcher.nodes={nodes}, but the layout has {_ranks(ranks)}: use at most {ranks}"
        )
    if each is None:
        return nodes, -(-ranks // nodes)
    if nodes * each < ranks:
        raise ValueError(
            f"the layout has {_ranks(ranks)}, but launcher.nodes={nodes} x "
            f"launcher.tasks_per_node={each} = {nodes * each}: omit one of them"
        )
    return nodes, min(each, ranks)


def _check(launcher: DictConfig) -> None:
    for key in _COUNTS:
        value = launcher[key]
        if value is not None and (not _is_integer(value) or value < 1):
            raise ValueError(f"launcher.{key}={value} must be at least 1, or null")
    for key, least in (("signal", 1), ("requeue", 0)):
        value = launcher[key]
        if not _is_integer(value) or value < least:
            raise ValueError(f"launcher.{key}={value} must be at least {least}")
    for key in ("partition", "account", "time"):
        _check_words(f"launcher.{key}", launcher[key])
    for key, what in (("setup", "shell lines"), ("options", "options such as --qos=long")):
        value = launcher[key]
        if not OmegaConf.is_list(value) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"launcher.{key}={value} must be a list of {what}")


def _option(text: str) -> tuple[str, object]:
    """Parse one of ``launcher.options``, named as in submitit: ``mem_per_cpu``."""
    match = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.+))?", text)
    if match is None or not text.isprintable():
        raise ValueError(f"launcher.options has {text!r}: write options as --qos=long")
    name = match[1].replace("-", "_")
    if name in _OURS:
        raise ValueError(f"launcher.options has {text}: omit it, {_OURS[name]}")
    return name, match[2] or True


def _check_words(key: str, value: object) -> None:
    """Reject anything but a word; a line break would inject a line into the script."""
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{key}={value} must be a word or a number")
    if not str(value).isprintable():
        raise ValueError(f"{key}={value!r} must be one line")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
