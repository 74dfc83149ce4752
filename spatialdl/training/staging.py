"""Staging of shards to node-local disks during training."""

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
from spatialdl.common.text import counted, readable_bytes
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
from spatialdl.data.staging.local_disk import DiskSpace, find_disk, is_local
from spatialdl.data.staging.process import CopierProcess
from spatialdl.errors import ShardError
from spatialdl.training.progress import TrainingProgress
from spatialdl.training.rank_loader import RankLoader

log = logging.getLogger("spatialdl.data")


@dataclass(frozen=True)
class StageTo:
    """Staging target ("auto", "off" or a folder), and whether copies are kept."""

    to: str
    keep: bool = False

    @classmethod
    def of(cls, data: DictConfig) -> StageTo:
        """Parse ``data.stage``.

        Raises:
            ValueError: if a value is invalid.
        """
        stage = data.get("stage")
        if stage is None:
            return cls("off")
        to, keep = stage.get("to", "auto"), stage.get("keep", False)
        if to in (None, False):  # YAML parses off as false
            to = "off"
        if not isinstance(to, str) or not to:
            raise ValueError(f"data.stage={to} is not supported: use auto, off or a folder")
        if not isinstance(keep, bool):
            raise ValueError(f"data.stage.keep={keep} must be true or false")
        return cls(to, keep)

    def is_for(self, source: Path) -> bool:
        """Whether this node stages a data set; "auto" skips those on a local disk."""
        return self.to != "off" and not (self.to == "auto" and is_local(source))

    def disk(self) -> tuple[Path | None, str]:
        """The folder on a disk of this node, or None and the reason."""
        if self.to != "auto":
            return Path(self.to).expanduser().absolute(), ""
        disk, why = find_disk()
        return disk, "" if disk else f"no suitable disk on this node: {why}"


class Staging:
    """Copies of shards on this node; collective, all ranks must create it.

    The first rank of each node starts its copier.

    Args:
        world: all ranks.
        where: staging target.
        datasets: data sets of one folder; they read from copies as these become available.
        usage: returns the shards that this rank reads.
        nodes: nodes of the world, if known.
    """

    def __init__(
        self,
        world: Communicator,
        where: StageTo = StageTo("off"),
        datasets: Sequence[ShardDataset] = (),
        usage: Callable[[], ShardUsage] = dict,
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
        of_ranks = node.gather(usage())
        message = folder = None
        if of_ranks is not None:
            message = self._start(where, combined_usage(of_ranks))
            folder = self._copier.folder if self._copier is not None else None
        folder = node.bcast(folder)
        for dataset in datasets:
            dataset.use_copies(folder)
        for text, count in Counter(filter(None, world.gather(message) or ())).items():
            log.info("staging %s%s", text, f", on each of {count} nodes" if count > 1 else "")

    def damage(self) -> int:
        """Number of damaged shards found by the copier that this rank started, if any."""
        if self._copier is None:
            return 0
        self._copier.look()
        return len(self._copier.damaged)

    def raise_damage(self) -> NoReturn:
        """Raise on all ranks after damage on at least one; collective.

        Raises:
            ShardError: always; names the shard and its samples.
        """
        texts = self._world.allgather(self._damage_text())
        raise ShardError(next(filter(None, texts)))

    def finish(self) -> None:
        """Log a summary of the copies; collective.

        Raises:
            ShardError: if a shard is damaged.
        """
        if not self._is_on:
            return
        if self._world.allreduce(self.damage()):
            self.raise_damage()
        copier = self._copier
        counts = self._world.gather(None if copier is None else (copier.shards, copier.bytes))
        copiers = [count for count in counts or () if count is not None]
        if not copiers:
            return
        shards = sum((count for count, _ in copiers), Counter[str]())
        size = sum((count for _, count in copiers), Counter[str]())
        texts = [
            f"{counted(shards[kind], 'shard')} ({readable_bytes(size[kind])}) {text}"
            for kind, text in (
                ("copied", "copied"),
                ("reused", "reused from earlier jobs"),
                ("left", "left at the source"),
                ("unreadable", "not readable at the source"),
            )
            if shards[kind]
        ]
        if shards["done"] < len(copiers):
            texts.append("incomplete at the end of the run")
        log.info("staged: %s", ", ".join(texts))

    def close(self) -> None:
        """Stop the copier and remove its copies unless they are kept."""
        for dataset in self._datasets:
            dataset.use_copies(None)
        if self._copier is not None:
            self._copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _start(self, where: StageTo, usage: ShardUsage) -> str | None:
        """Start the copier of this node if there is space; return its log message."""
        dataset = self._datasets[0]
        if not where.is_for(dataset.path):
            return None
        disk, why = where.disk()
        if disk is not None:
            try:
                return self._start_copier(disk, where.keep, usage)
            except (OSError, ShardError) as error:
                why = f"cannot stage to {disk}: {error}"
        if why:
            log.warning("%s: %s; reading from %s", socket.gethostname(), why, dataset.path)
        return None

    def _start_copier(self, disk: Path, keep: bool, usage: ShardUsage) -> str:
        dataset = self._datasets[0]
        shards = dataset.manifest.shards
        wanted = [shards[shard] for shard in usage]
        for info in wanted:
            local_name(info)
        copier = CopierProcess(dataset.path, disk, wanted, keep)
        try:
            room = DiskSpace(disk).bytes
            there = {
                shard: use for shard, use in usage.items() if shards[shard].file in copier.there
            }
            missing = {shard: use for shard, use in usage.items() if shard not in there}
            fit = {*there, *select_fitting(missing, shards, room)}
            chosen = sorted(fit, key=lambda shard: (usage[shard].first, shard))
            copier.start([shards[shard] for shard in chosen])
        except BaseException:
            copier.close()
            raise
        self._copier = copier
        size = sum(shards[shard].bytes for shard in chosen)
        text = (
            f"{counted(len(chosen), 'shard')} ({readable_bytes(size)}) of {dataset.path} "
            f"to {copier.folder.parents[1]} ({readable_bytes(max(room, 0))} free)"
        )
        left = [shards[shard].bytes for shard in usage if shard not in fit]
        copier.shards["left"], copier.bytes["left"] = len(left), sum(left)
        if left:
            text += f"; {counted(len(left), 'shard')} ({readable_bytes(sum(left))}) more do not fit"
        return text

    def _damage_text(self) -> str:
        if self._copier is None or not self._copier.damaged:
            return ""
        manifest = self._datasets[0].manifest
        file, why = next(iter(self._copier.damaged.items()))
        number = next(n for n, info in enumerate(manifest.shards) if info.file == file)
        return f"{why}. It holds {manifest.describe_samples(number)}"


def stage_loaders(
    world: Communicator,
    config: DictConfig,
    train: RankLoader,
    validation: RankLoader | None,
    progress: TrainingProgress,
    nodes: Nodes | None = None,
) -> Staging:
    """Start copying the shards that the rest of a run reads; collective."""
    loaders = [loader for loader in (train, validation) if loader is not None]
    sources = [loader.loader.views.source for loader in loaders]
    datasets = [source for source in sources if isinstance(source, ShardDataset)]

    def usage() -> ShardUsage:
        first = train.loader
        training = training_usage(
            first.views,
            first.batching,
            int(config.seed),
            progress.steps - progress.step,
            (progress.epoch, progress.batch),
        )
        if validation is None:
            return training
        then, times = validation.loader, progress.validations_an_epoch
        return one_after_another(training, validation_usage(then.views, then.batching, times))

    return Staging(world, StageTo.of(config.data), datasets, usage, nodes)
