"""Staging for a run: what each node needs, copied to a disk of its own while the ranks train."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import Nodes
from spatialdl.data.raw_reading import is_local
from spatialdl.data.shard_usage import (
    ShardUsage,
    combined_usage,
    one_after_another,
    select_fitting,
    training_usage,
    validation_usage,
)
from spatialdl.data.shards import ShardDataset
from spatialdl.data.staging.cache import local_name
from spatialdl.data.staging.local_disk import DiskSpace, find_disk
from spatialdl.data.staging.process import CopierProcess
from spatialdl.data.staging.samples import samples_in
from spatialdl.errors import ShardError
from spatialdl.text import counted, readable_bytes
from spatialdl.training.progress import TrainingProgress
from spatialdl.training.rank_loader import RankLoader

log = logging.getLogger("spatialdl.data")


@dataclass(frozen=True)
class StageTo:
    """Where shards are staged to: "auto", "off" or a folder; and whether they stay there."""

    to: str
    keep: bool = False

    @classmethod
    def of(cls, data: DictConfig) -> StageTo:
        """What a configuration says.

        Raises:
            ValueError: it does not fit.
        """
        stage = data.get("stage")
        if stage is None:
            return cls("off")
        to, keep = stage.get("to", "auto"), stage.get("keep", False)
        if to in (None, False):  # how YAML reads off
            to = "off"
        if not isinstance(to, str) or not to:
            raise ValueError(f"data.stage={to} is not supported: take auto, off or a folder")
        if not isinstance(keep, bool):
            raise ValueError(f"data.stage.keep={keep} is not supported: take true or false")
        return cls(to, keep)

    def is_for(self, source: Path) -> bool:
        """Whether a data set folder is to be staged, as this node sees it."""
        return self.to != "off" and not (self.to == "auto" and is_local(source))

    def disk(self) -> tuple[Path | None, str]:
        """The folder on a disk of this node, or None and why there is none."""
        if self.to != "auto":
            return Path(self.to).expanduser().absolute(), ""
        disk, why = find_disk()
        return disk, "" if disk else f"no disk of this node will do: {why}"


class Staging:
    """The copies that the ranks of this node read, until it is closed.

    All ranks of the world make it together. The first rank of each node starts its copier.

    Args:
        world: all ranks.
        where: to be staged to.
        datasets: of one folder; they read from the copies as these arrive.
        needs: finds out what this rank reads of it.
        nodes: of the world, if they are known.
    """

    def __init__(
        self,
        world: Communicator,
        where: StageTo = StageTo("off"),
        datasets: Sequence[ShardDataset] = (),
        needs: Callable[[], ShardUsage] = dict,
        nodes: Nodes | None = None,
    ) -> None:
        self._world, self._datasets = world, datasets
        self._copier: CopierProcess | None = None
        self._is_on = False
        if where.to == "off" or not datasets:
            return
        self._is_on = any(world.allgather(where.is_for(datasets[0].path)))
        if not self._is_on:
            return
        node = (nodes or Nodes(world)).own
        of_ranks = node.gather(needs())
        told = folder = None
        if of_ranks is not None:
            told = self._start(where, combined_usage(of_ranks))
            folder = self._copier.folder if self._copier is not None else None
        folder = node.bcast(folder)
        for dataset in datasets:
            dataset.use_copies(folder)
        for text, count in Counter(filter(None, world.gather(told) or ())).items():
            log.info("staging %s%s", text, f", on each of {count} nodes" if count > 1 else "")

    def damage(self) -> int:
        """Damaged shards that the copier of this node, if this rank started it, has found."""
        if self._copier is None:
            return 0
        self._copier.look()
        return len(self._copier.damaged)

    def refuse(self) -> NoReturn:
        """End all ranks, of which one at least has heard of damage; they call it together.

        Raises:
            ShardError: always; names shard and samples.
        """
        texts = self._world.allgather(self._damage_text())
        raise ShardError(next(filter(None, texts)))

    def finish(self) -> None:
        """Tell what was staged; all ranks call it together.

        Raises:
            ShardError: a shard is damaged.
        """
        if not self._is_on:
            return
        if self._world.allreduce(self.damage()):
            self.refuse()
        copier = self._copier
        counts = self._world.gather(None if copier is None else (copier.shards, copier.bytes))
        found = [count for count in counts or () if count is not None]
        if not found:
            return
        shards = sum((count for count, _ in found), Counter[str]())
        size = sum((count for _, count in found), Counter[str]())
        told = [
            f"{counted(shards[what], 'shard')} ({readable_bytes(size[what])}) {text}"
            for what, text in (
                ("copied", "copied"),
                ("reused", "of earlier jobs used again"),
                ("left", "left at the source"),
                ("unreadable", "not readable at the source"),
            )
            if shards[what]
        ]
        if shards["done"] < len(found):
            told.append("no more before the run ended")
        log.info("staged: %s", ", ".join(told))

    def close(self) -> None:
        """End the copier; copies are removed unless they are to stay."""
        for dataset in self._datasets:
            dataset.use_copies(None)
        if self._copier is not None:
            self._copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _start(self, where: StageTo, needs: ShardUsage) -> str | None:
        """Start the copier of this node, if there is a place; what to tell of it."""
        dataset = self._datasets[0]
        if not where.is_for(dataset.path):
            return None
        disk, why = where.disk()
        if disk is not None:
            try:
                return self._start_copier(disk, where.keep, needs)
            except (OSError, ShardError) as error:
                why = f"cannot stage to {disk}: {error}"
        if why:
            log.warning("%s: %s; reading from %s", socket.gethostname(), why, dataset.path)
        return None

    def _start_copier(self, disk: Path, keep: bool, needs: ShardUsage) -> str:
        dataset = self._datasets[0]
        shards = dataset.manifest.shards
        wanted = [shards[shard] for shard in needs]
        for info in wanted:
            local_name(info)
        copier = CopierProcess(dataset.path, disk, wanted, keep)
        try:
            room = DiskSpace(disk).bytes
            there = {
                shard: need for shard, need in needs.items() if shards[shard].file in copier.there
            }
            missing = {shard: need for shard, need in needs.items() if shard not in there}
            fit = {*there, *select_fitting(missing, shards, room)}
            chosen = sorted(fit, key=lambda shard: (needs[shard].first, shard))
            copier.start([shards[shard] for shard in chosen])
        except BaseException:
            copier.close()
            raise
        self._copier = copier
        size = sum(shards[shard].bytes for shard in chosen)
        told = (
            f"{counted(len(chosen), 'shard')} ({readable_bytes(size)}) of {dataset.path} "
            f"to {copier.folder.parents[1]}, where {readable_bytes(max(room, 0))} are free"
        )
        left = [shards[shard].bytes for shard in needs if shard not in fit]
        copier.shards["left"], copier.bytes["left"] = len(left), sum(left)
        if left:
            told += f"; {counted(len(left), 'shard')} ({readable_bytes(sum(left))}) more do not fit"
        return told

    def _damage_text(self) -> str:
        if self._copier is None or not self._copier.damaged:
            return ""
        manifest = self._datasets[0].manifest
        file, why = next(iter(self._copier.damaged.items()))
        number = next(n for n, info in enumerate(manifest.shards) if info.file == file)
        return f"{why}. It holds {samples_in(manifest, number)}"


def stage_loaders(
    world: Communicator,
    config: DictConfig,
    train: RankLoader,
    validation: RankLoader | None,
    progress: TrainingProgress,
    nodes: Nodes | None = None,
) -> Staging:
    """Begin to copy the shards that the rest of a run reads; all ranks call it."""
    loaders = [loader for loader in (train, validation) if loader is not None]
    sources = [loader.loader.views.source for loader in loaders]
    datasets = [source for source in sources if isinstance(source, ShardDataset)]

    def needs() -> ShardUsage:
        first = train.loader
        found = training_usage(
            first.views,
            first.batching,
            int(config.seed),
            progress.steps - progress.step,
            (progress.epoch, progress.batch),
        )
        if validation is None:
            return found
        then, times = validation.loader, progress.validations_an_epoch
        return one_after_another(found, validation_usage(then.views, then.batching, times))

    return Staging(world, StageTo.of(config.data), datasets, needs, nodes)
