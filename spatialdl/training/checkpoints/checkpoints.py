"""Saving and resuming the checkpoints of a run."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.errors import CheckpointError
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.checkpoints.content import (
    copies,
    random_file,
    random_states,
    restore,
    restore_random,
)
from spatialdl.training.checkpoints.folder import (
    FOLDER,
    LATEST,
    candidates,
    clean,
    complete,
    pointed,
    prune,
)
from spatialdl.training.checkpoints.reading import FORMAT, Checkpoint, first_whole
from spatialdl.training.checkpoints.same_run import check_same, identity, settings_of
from spatialdl.training.checkpoints.writing import Writer
from spatialdl.training.optimization.update import Update
from spatialdl.version import __version__

log = logging.getLogger("spatialdl.checkpoints")

T = TypeVar("T")
Resumed = tuple[Path, dict[str, Any]]
"""Folder and ``checkpoint.json`` of the checkpoint that a run resumes from."""


class Checkpoints:
    """Checkpoints of a run; collective, all ranks must create and call it together.

    Args:
        config: configuration of the run.
        world: all ranks.
        pipeline: the network on its ranks.
        update: optimizer, scheduler and averages.
        run_dir: run directory, the same on every rank.
        data: metadata for inference, see `Sources.described`.

    Attributes:
        keep: number of checkpoints to keep.
        writer: writes in the background, see `Writer`.
        last: step of the last checkpoint that was started, or resumed from.
    """

    def __init__(
        self,
        config: DictConfig,
        world: Communicator,
        pipeline: PipelineRuntime,
        update: Update,
        run_dir: Path,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._data = dict(data or {})
        self._config, self._world, self._run_dir = config, world, run_dir
        self._pipeline, self._update = pipeline, update
        self.keep = int(config.trainer.checkpoint.keep)
        self.writer = Writer(run_dir, world, self.keep)
        self.last: int | None = None
        # computed now, because the data set may be read from copies at the time of saving
        self._identity = identity(config) if world.rank == 0 else {}

    def writes(self, step: int, is_best: bool = False) -> bool:
        """Whether `save` writes a checkpoint after a step."""
        return self.keep > 0 and (step != self.last or is_best)

    def save(self, progress: dict[str, Any], is_best: bool = False) -> None:
        """Copy the state, then write it while training continues.

        Args:
            progress: progress of the run, with its `step`; returned by `resume`.
            is_best: whether it is the best checkpoint so far.
        """
        if not self.writes(progress["step"], is_best):
            return
        self.writer.wait()
        started = time.perf_counter()
        files = copies(self._pipeline, self._update, self._world.rank)
        gathered = self._world.gather(random_states(self._pipeline.device))
        content: dict[str, Any] = {}
        if gathered is not None:
            ranks = self._pipeline.placement.ranks_by_place
            files.update(random_file([gathered[rank] for rank in ranks]))
            content = self._content()
        self.writer.start(files, {**content, **progress}, is_best)
        self.last = progress["step"]
        log.info(
            "step %d: writing checkpoint, training waited %.3f s for the copy",
            *(progress["step"], time.perf_counter() - started),
        )

    def _content(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._update.optimizer.param_groups
        ]
        return {
            "format": FORMAT,
            "optimizer": groups,
            "update": self._update.state(),
            "layout": self._layout(),
            "identity": self._identity,
            "config": settings_of(self._config),
            "data": self._data,
            "versions": {
                "spatialdl": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _layout(self) -> dict[str, Any]:
        placement = self._pipeline.placement
        return {
            "parallel": str(self._config.parallel.name),
            "placement": placement.describe(),
            "world_size": self._world.size,
            "shard_state": bool(self._pipeline.sharded),
        }

    def resume(self) -> Resumed | None:
        """Resume from the checkpoint that ``ckpt_path`` names.

        Returns:
            Folder and content of ``checkpoint.json``, with the saved progress; None for a new run.

        Raises:
            CheckpointError: if there is none, all are damaged, or it is of another run.
        """
        wanted = self._config.ckpt_path
        paths = self._on_rank_0(lambda: self._choices(wanted))
        if not paths:
            return None
        path = first_whole(paths, self._world)
        with Checkpoint(path) as checkpoint:
            content = checkpoint.content
            self._on_rank_0(lambda: check_same(content, self._config))
            restore(self._pipeline, self._update, checkpoint, self._world)
            self._update.restore(content["update"])
            if content["layout"] == self._layout():
                place = self._pipeline.placement.place(self._world.rank)
                restore_random(checkpoint.random_states(place), self._pipeline.device)
        if path.parent == self._run_dir / FOLDER:
            self.last = self.writer.last = int(content["step"])
            self._on_rank_0(lambda: self._prune(path, content))
        log.info(
            "resuming after step %d from %s (saved with parallel=%s, %s)",
            *(content["step"], path, content["layout"]["parallel"], content["layout"]["placement"]),
        )
        return path, content

    def _prune(self, path: Path, content: Mapping[str, Any]) -> None:
        """Remove older checkpoints that a killed run did not remove."""
        kept = content["config"]["trainer"]["checkpoint"]["keep"]
        if 0 < self.keep == kept and pointed(path.with_name(LATEST)) == path:
            with suppress(OSError):
                prune(path.parent, path, self.keep)

    def _choices(self, wanted: str | None) -> list[Path]:
        """Checkpoints to try; refuse to start anew over checkpoints in the run directory."""
        folder = self._run_dir / FOLDER
        clean(folder)
        paths = candidates(str(wanted), self._run_dir) if wanted is not None else []
        existing = complete(folder)
        if existing and self.keep and not any(path.parent == folder for path in paths):
            raise CheckpointError(
                f"{self._run_dir} has checkpoints of an earlier run, up to {existing[-1].name}: "
                "resume with ckpt_path=latest, or set another hydra.run.dir"
            )
        if wanted is not None and not paths:
            log.info("ckpt_path=%s: no checkpoint in %s yet, starting a new run", wanted, folder)
        return paths

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0; return its result, or raise its error, on all ranks."""
        outcome: tuple[T | None, str | None] = None, None
        if self._world.rank == 0:
            try:
                outcome = work(), None
            except (CheckpointError, OSError) as error:
                outcome = None, str(error)
        result, failure = self._world.bcast(outcome)
        if failure is not None:
            raise CheckpointError(failure)
        return result  # type: ignore[no-any-return]
