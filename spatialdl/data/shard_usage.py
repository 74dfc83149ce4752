"""Which shards a rank reads, when first and how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spatialdl.data.batches import Batching
from spatialdl.data.format import ShardInfo, TileSample
from spatialdl.data.image_source import Box, whole_box
from spatialdl.data.loader import sample_order
from spatialdl.data.shards import ShardDataset
from spatialdl.data.views import Views


@dataclass(frozen=True)
class ShardUse:
    """When a shard is read first, counted in samples read, and how many times an epoch."""

    first: int
    uses: float


ShardUsage = Mapping[int, ShardUse]
"""By the number of the shard."""


def training_usage(
    views: Views,
    batching: Batching,
    seed: int,
    batches: int,
    position: tuple[int, int] = (0, 0),
) -> ShardUsage:
    """What a rank needs of the training samples.

    The replicas share an epoch's samples out anew each time: over several epochs each of them
    needs all; where images are turned or cropped anew, each rank needs all of their pixels.

    Args:
        views: of a `ShardDataset`.
        seed: of the order of the samples.
        batches: how many will be read.
        position: the epoch, and the batch of it, that are read first.
    """
    epoch, first = position
    order = sample_order(len(views), seed, epoch)
    left = order[first * batching.size :]
    needs = _usage(views, batching, left[: batches * batching.size], epoch)
    if batches <= -(-len(left) // batching.size):
        return needs
    later = Batching(batching.size, 1, 0, batching.boxes, batching.mask_boxes)
    everything = _usage(views, later, order, None if views.moves else epoch)
    return {
        shard: ShardUse(
            needs[shard].first if shard in needs else len(left) + need.first,
            need.uses / batching.replicas,
        )
        for shard, need in everything.items()
    }


def validation_usage(views: Views, batching: Batching, times: float = 1) -> ShardUsage:
    """What a rank needs of the validation samples, which are read so many times an epoch."""
    needs = _usage(views, batching, np.arange(len(views)))
    return {shard: ShardUse(need.first, need.uses * times) for shard, need in needs.items()}


def together(of_ranks: Iterable[ShardUsage]) -> ShardUsage:
    """What ranks need that share a disk."""
    total: dict[int, ShardUse] = {}
    for needs in of_ranks:
        for shard, need in needs.items():
            before = total.get(shard, ShardUse(need.first, 0))
            total[shard] = ShardUse(min(before.first, need.first), before.uses + need.uses)
    return total


def one_after_another(needs: ShardUsage, later: ShardUsage) -> ShardUsage:
    """What is needed now and, when all of that was read, later."""
    end = 1 + max((need.first for need in needs.values()), default=0)
    moved = {shard: ShardUse(need.first + end, need.uses) for shard, need in later.items()}
    return together([needs, moved])


def that_fit(needs: ShardUsage, shards: Sequence[ShardInfo], room: int) -> list[int]:
    """The shards to be copied, in the order in which they are read.

    Where there is no room for all, those are left out that are used least for their size.
    """
    first = sorted(needs, key=lambda shard: (needs[shard].first, shard))
    if sum(shards[shard].bytes for shard in first) <= room:
        return first
    place = {shard: number for number, shard in enumerate(first)}
    chosen = set()
    for shard in sorted(
        first, key=lambda shard: (-needs[shard].uses / max(shards[shard].bytes, 1), place[shard])
    ):
        if shards[shard].bytes <= room:
            chosen.add(shard)
            room -= shards[shard].bytes
    return [shard for shard in first if shard in chosen]


def _usage(
    views: Views, batching: Batching, order: npt.NDArray[np.int64], epoch: int | None = 0
) -> ShardUsage:
    """Of these samples in one epoch; in whichever, if it is None."""
    read: list[int] = []
    for start in range(0, len(order), batching.size):
        batch = order[start : start + batching.size]
        parts = zip(batching.own(len(batch)), batching.boxes, batching.mask_boxes, strict=True)
        for own, *boxes in parts:
            for box in [one for one in boxes if isinstance(one, tuple)]:
                for sample in batch[own].tolist():
                    read += _shards_under(views, sample, box, epoch)
    shards, first, uses = np.unique(np.array(read, np.int64), return_index=True, return_counts=True)
    rows = zip(shards.tolist(), first.tolist(), uses.tolist(), strict=True)
    return {shard: ShardUse(begin, count) for shard, begin, count in rows}


def _shards_under(views: Views, sample: int, box: Box, epoch: int | None) -> Sequence[int]:
    dataset = views.source
    assert isinstance(dataset, ShardDataset)
    found = dataset.sample(sample)
    if isinstance(found, TileSample):  # of which there may be millions
        return (found.shard,)
    if epoch is None:
        return dataset.shards_under(sample, whole_box(found.size))
    return dataset.shards_under(sample, views.stored_box(epoch, sample, box))
