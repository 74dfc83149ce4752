"""Callbacks of the user's own, named by ``trainer.callbacks``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from spatialdl.configuring.plugins import Plugin, check_names, plugins_of

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("spatialdl.trainer")


@dataclass(frozen=True)
class RunState:
    """What a callback gets: how far a run is, read-only, the same on every rank but for `stages`.

    Attributes:
        step: optimizer steps made.
        epoch: whole passes over the samples made.
        steps: of the whole run.
        loss: of the last step, over the whole batch; None before the first.
        learning_rate: of the last step.
        metrics: of the last validation, by the names of ``validation.csv``; empty before the first.
        run_dir: the run directory, where rank 0 may write files.
        stages: by number the stages of the network that this rank holds. Their parameters are
            this rank's shards with ``parallel.shard_state``, its channels with ``parallel.tensor``.
        rank: of this process.
        world_size: all ranks.
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
        """End the run after this step, on all ranks, with its last checkpoint and its report.

        One rank suffices. Ranks agree on it after the callbacks of a step, or of a validation.

        Args:
            reason: for the log and the report.
        """
        self._stop(reason)


class Callback:
    """What a run calls while it trains: derive from it, and overwrite what you need.

    All ranks make their own object, from the same arguments, and call the same methods in the same
    order, callback by callback as they are listed. So a method may talk to the other ranks if it
    does so on all of them; what writes files does so where ``run.rank == 0``. An exception
    ends the run on all ranks.
    """

    def on_fit_start(self, run: RunState) -> None:
        """Before the first step; where a run resumes, after `load_state_dict`."""

    def on_step_end(self, run: RunState) -> None:
        """After an optimizer step."""

    def on_validation_end(self, run: RunState) -> None:
        """After a validation, whose metrics are there."""

    def on_checkpoint(self, run: RunState) -> None:
        """Before a checkpoint is written, with what `state_dict` then gives."""

    def on_fit_end(self, run: RunState) -> None:
        """After the last step, and the checkpoint that follows it; not after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep: numbers, texts, lists and dicts; that of rank 0 counts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with what `state_dict` gave on rank 0; every rank gets it."""


def callback_plugins(trainer: DictConfig) -> list[Plugin]:
    """What ``trainer.callbacks`` names; nothing is imported.

    Args:
        trainer: the group of a configuration.

    Raises:
        ValueError: if it is no list of classes, or two have the same name.
    """
    found = plugins_of(trainer.get("callbacks"), "trainer.callbacks", "{_target_: package.Class}")
    check_names(found, set())
    return found


class Callbacks:
    """Those of a run, called one after the other.

    Args:
        plugins: what ``trainer.callbacks`` names.

    Raises:
        ValueError: if one cannot be made, or is none.
    """

    def __init__(self, plugins: list[Plugin]) -> None:
        self._named = [(one.name, _made(one)) for one in plugins]
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self._named)

    def stop(self, reason: str) -> None:
        """Ask for the end of the run; kept on this rank until ranks agree."""
        if self.reason is None:
            self.reason = reason

    def call(self, method: str, run: Callable[[], RunState]) -> None:
        """Call a method of all of them.

        Args:
            method: its name.
            run: gives what they get; called only if there is a callback.
        """
        if not self._named:
            return
        current = run()
        for name, callback in self._named:
            with _naming(name, method, current.step):
                getattr(callback, method)(current)

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint.

        Raises:
            ValueError: if a state is not what JSON can hold.
        """
        found = []
        for name, callback in self._named:
            with _naming(name, "state_dict"):
                state = callback.state_dict()
            _check_plain(name, state)
            found.append({"name": name, "state": state})
        return found

    def restore(self, content: Mapping[str, Any]) -> None:
        """Hand to each callback what a checkpoint has of one with its name.

        Args:
            content: of ``checkpoint.json``.
        """
        kept = list(content.get("callbacks") or ())
        for name, callback in self._named:
            found = next((one for one in kept if one["name"] == name), None)
            if found is None:
                log.info(
                    "trainer.callbacks: the checkpoint has no state of %s, which begins anew", name
                )
                continue
            kept.remove(found)
            with _naming(name, "load_state_dict"):
                callback.load_state_dict(found["state"])
        for one in kept:
            log.info(
                "trainer.callbacks: the checkpoint has state of %s, which is left out", one["name"]
            )


def _made(plugin: Plugin) -> Callback:
    made = plugin.make()
    if not isinstance(made, Callback):
        raise ValueError(
            f"trainer.callbacks: {plugin.target} gives a {type(made).__name__}: derive it from "
            "spatialdl.Callback"
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
                f"trainer.callbacks: state_dict of {name} cannot be kept in a checkpoint: {error}; "
                "give numbers, texts, lists and dicts, and write tensors to files of their own"
            ) from error
    if text is None or json.loads(text) != state:
        raise ValueError(
            f"trainer.callbacks: state_dict of {name} must be a dict with texts as keys, of "
            f"numbers, texts, lists and dicts, got {type(state).__name__}"
        )
