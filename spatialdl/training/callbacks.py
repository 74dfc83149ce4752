"""User callbacks, listed in ``trainer.callbacks``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from spatialdl.common.configuring.plugins import Plugin, check_names, plugins_of

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("spatialdl.trainer")


@dataclass(frozen=True)
class RunState:
    """Read-only state of a run, the same on every rank except for `stages` and `rank`.

    Attributes:
        step: optimizer steps done.
        epoch: epochs done.
        steps: optimizer steps of the whole run.
        loss: loss of the last step over the whole batch; None before the first.
        learning_rate: learning rate of the last step.
        metrics: last validation, by the names of ``validation.csv``; empty before the first.
        run_dir: the run directory, where rank 0 may write files.
        stages: stages of the network on this rank, by number. Parameters are this rank's shards
            with ``parallel.shard_state``, its channels with ``parallel.tensor``.
        rank: rank of this process.
        world_size: number of ranks.
    """

    step: int
    epoch: int
    steps: int
    loss: float | None
    learning_rate: float
    metrics: Mapping[str, Any]
    run_dir: Path
    stages: Mapping[int, nn.Module]
    rank: int
    world_size: int
    _stop: Callable[[str], None] = field(repr=False)

    def stop(self, reason: str = "") -> None:
        """End the run after this step on all ranks, with a last checkpoint and the report.

        A call on one rank suffices. Ranks synchronise after the callbacks of a step or validation.

        Args:
            reason: text for the log and the report.
        """
        self._stop(reason)


class Callback:
    """Base class of callbacks; override the methods you need.

    Every rank creates its own object from the same arguments and calls the same methods in the
    same order, callbacks in the order of the list. A method may therefore communicate if it does
    so on all ranks. Write files only where ``run.rank == 0``. An exception ends the run on all
    ranks.
    """

    def on_fit_start(self, run: RunState) -> None:
        """Called before the first step; in a resumed run, after `load_state_dict`."""

    def on_step_end(self, run: RunState) -> None:
        """Called after an optimizer step."""

    def on_validation_end(self, run: RunState) -> None:
        """Called after a validation, with its metrics in `run`."""

    def on_checkpoint(self, run: RunState) -> None:
        """Called before a checkpoint is written, and before `state_dict`."""

    def on_fit_end(self, run: RunState) -> None:
        """Called after the last step and its checkpoint; not after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints, of numbers, strings, lists and dicts; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of rank 0; called on every rank."""


def callback_plugins(trainer: DictConfig) -> list[Plugin]:
    """Parse ``trainer.callbacks`` without importing anything.

    Args:
        trainer: group ``trainer`` of the configuration.

    Raises:
        ValueError: if it is not a list of classes, or names are not unique.
    """
    plugins = plugins_of(trainer.get("callbacks"), "trainer.callbacks", "{_target_: package.Class}")
    check_names(plugins, set())
    return plugins


class Callbacks:
    """Callbacks of a run, called in order.

    Args:
        plugins: parsed ``trainer.callbacks``.

    Attributes:
        reason: reason of the first `stop` on this rank; None without one.

    Raises:
        ValueError: if one cannot be created or is not a `Callback`.
    """

    def __init__(self, plugins: list[Plugin]) -> None:
        self._named = [(one.name, _made(one)) for one in plugins]
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self._named)

    def stop(self, reason: str) -> None:
        """Request the end of the run; kept on this rank until ranks synchronise."""
        if self.reason is None:
            self.reason = reason

    def call(self, method: str, run: Callable[[], RunState]) -> None:
        """Call a method of every callback.

        Args:
            method: name of the method.
            run: returns the argument; called only if there are callbacks.
        """
        if not self._named:
            return
        current = run()
        for name, callback in self._named:
            with _naming(name, method, current.step):
                getattr(callback, method)(current)

    def state(self) -> list[dict[str, Any]]:
        """State for a checkpoint.

        Raises:
            ValueError: if a state cannot be stored as JSON.
        """
        states = []
        for name, callback in self._named:
            with _naming(name, "state_dict"):
                state = callback.state_dict()
            _check_plain(name, state)
            states.append({"name": name, "state": state})
        return states

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restore each callback from the entry of a checkpoint with its name.

        Args:
            content: content of ``checkpoint.json``.
        """
        entries = list(content.get("callbacks") or ())
        for name, callback in self._named:
            entry = next((one for one in entries if one["name"] == name), None)
            if entry is None:
                log.info(
                    "trainer.callbacks: checkpoint has no state of %s: it is not restored", name
                )
                continue
            entries.remove(entry)
            with _naming(name, "load_state_dict"):
                callback.load_state_dict(entry["state"])
        for entry in entries:
            log.info("trainer.callbacks: state of %s in the checkpoint is ignored", entry["name"])


def _made(plugin: Plugin) -> Callback:
    made = plugin.make()
    if not isinstance(made, Callback):
        raise ValueError(
            f"trainer.callbacks: {plugin.target} creates a {type(made).__name__}, expected a "
            "subclass of spatialdl.Callback"
        )
    return made


@contextmanager
def _naming(name: str, method: str, step: int | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        after = "" if step is None else f", after step {step}"
        error.add_note(f"(in {method} of the callback {name}{after})")
        raise


def _check_plain(name: str, state: object) -> None:
    text = None
    if isinstance(state, dict):
        try:
            text = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"trainer.callbacks: cannot store state_dict of {name} in a checkpoint: {error}; "
                "return numbers, strings, lists and dicts, and write tensors to separate files"
            ) from error
    if text is None or json.loads(text) != state:
        raise ValueError(
            f"trainer.callbacks: state_dict of {name} must be a dict with string keys, of "
            f"numbers, strings, lists and dicts, got {type(state).__name__}"
        )
