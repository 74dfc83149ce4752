"""The checkpoints of a run: what goes in, and how a run goes on from one."""

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
from spatialdl.training.checkpoints.settings import local_folder
from spatialdl.training.checkpoints.writing import Writer
from spatialdl.training.optimization.update import Update
from spatialdl.version import __version__

log = logging.getLogger("spatialdl.checkpoints")

T = TypeVar("T")
Resumed = tuple[Path, dict[str, Any]]
"""The checkpoint from which a run goes on, and what it says of the run."""


class Checkpoints:
    """Those of a run; all ranks must make it and call it together.

    Args:
        run_dir: the same on every rank.
        data: what is worth knowing of the data where a network is used later.

    Attributes:
        writer: tells and is told what travels with the sums over all ranks, see `Writer`.
        last: the step of the last one that was begun, or from which the run went on.
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
        settings = config.trainer.checkpoint
        self._data = dict(data or {})
        self._config, self._world, self._run_dir = config, world, run_dir
        self._pipeline, self._update = pipeline, update
        self.keep = int(settings.keep)
        self.writer = Writer(run_dir, world, self.keep, local_folder(settings.local))
        self.last: int | None = None
        # now, while the data set is there: it may be read from copies when this is saved
        self._identity = identity(config) if world.rank == 0 else {}

    def writes(self, step: int, is_best: bool = False) -> bool:
        """Whether `save` writes a checkpoint after a step."""
        return self.keep > 0 and (step != self.last or is_best)

    def save(self, progress: dict[str, Any], is_best: bool = False) -> None:
        """Copy what there is to save; it is written while training goes on.

        Args:
            progress: of the run, with its `step`; `resume` gives it back.
        """
        if not self.writes(progress["step"], is_best):
            return
        self.writer.wait()
        started = time.perf_counter()
        files = copies(self._pipeline, self._update, self._world.rank)
        everybody = self._world.gather(random_states(self._pipeline.device))
        content: dict[str, Any] = {}
        if everybody is not None:
            ranks = self._pipeline.placement.ranks_by_place
            files.update(random_file([everybody[rank] for rank in ranks]))
            content = self._content()
        self.writer.start(files, {**content, **progress}, is_best)
        self.last = progress["step"]
        log.info(
            "step %d: a checkpoint is written, training waited %.3f s for its copy",
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
        """Go on from the checkpoint that `ckpt_path` names.

        Returns:
            Its folder, and what ``checkpoint.json`` says, such as the progress that was saved;
            None if the run starts anew.

        Raises:
            CheckpointError: if there is none, all are damaged, or it is of another run.
        """
        wanted = self._config.ckpt_path
        paths = self._rank_0(lambda: self._choices(wanted))
        self.writer.clean()  # rank 0 has said that no other run writes to this directory
        if not paths:
            return None
        path = first_whole(paths, self._world)
        with Checkpoint(path) as checkpoint:
            content = checkpoint.content
            self._rank_0(lambda: check_same(content, self._config))
            restore(self._pipeline, self._update, checkpoint, self._world)
            self._update.restore(content["update"])
            if content["layout"] == self._layout():
                place = self._pipeline.placement.place(self._world.rank)
                restore_random(checkpoint.random_states(place), self._pipeline.device)
        if path.parent == self._run_dir / FOLDER:
            self.last = self.writer.last = int(content["step"])
            self._rank_0(lambda: self._prune(path, content))
        log.info(
            "going on after step %d from %s (saved by parallel=%s, %s)",
            *(content["step"], path, content["layout"]["parallel"], content["layout"]["placement"]),
        )
        return path, content

    def _prune(self, path: Path, content: Mapping[str, Any]) -> None:
        """Remove what the run that wrote it would have, had it not been killed before."""
        kept = content["config"]["trainer"]["checkpoint"]["keep"]
        if 0 < self.keep == kept and pointed(path.with_name(LATEST)) == path:
            with suppress(OSError):
                prune(path.parent, path, self.keep)

    def _choices(self, wanted: str | None) -> list[Path]:
        """Those to try; nothing in the run directory may be lost by starting anew."""
        folder = self._run_dir / FOLDER
        clean(folder)
        found = candidates(str(wanted), self._run_dir) if wanted is not None else []
        there = complete(folder)
        if there and self.keep and not any(path.parent == folder for path in found):
            raise CheckpointError(
                f"{self._run_dir} has checkpoints of an earlier run, up to {there[-1].name}: add "
                "ckpt_path=latest to go on with it, or take another hydra.run.dir"
            )
        if wanted is not None and not found:
            log.info("ckpt_path=%s: there is none in %s yet, a new run starts", wanted, folder)
        return found

    def _rank_0(self, work: Callable[[], T]) -> T:
        """What rank 0 finds out, on all ranks; its mistake is everybody's."""
        found: tuple[T | None, str | None] = None, None
        if self._world.rank == 0:
            try:
                found = work(), None
            except (CheckpointError, OSError) as error:
                found = None, str(error)
        result, mistake = self._world.bcast(found)
        if mistake is not None:
            raise CheckpointError(mistake)
        return result  # type: ignore[no-any-return]
