"""Shard usage of a rank: which shards it reads, when first and how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spatialdl.data.batches import Batching
from spatialdl.data.image_source import Box, whole_box
from spatialdl.data.loader import sample_order
from spatialdl.data.samples import ShardInfo, TileSample
from spatialdl.data.shards import ShardDataset
from spatialdl.data.views import Views


@dataclass(frozen=True)
class ShardUse:
    """Position of a shard's first read, in samples, and its reads per epoch."""

    first: int
    uses: float


ShardUsage = Mapping[int, ShardUse]
"""Usage by shard number."""


def training_usage(
    views: Views,
    batching: Batching,
    seed: int,
    batches: int,
    position: tuple[int, int] = (0, 0),
) -> ShardUsage:
    """Usage of the training samples by a rank.

    Samples are redistributed over the replicas every epoch, so over several epochs each replica
    reads all of them. If images are rotated or cropped anew, each rank reads all of their pixels.

    Args:
        views: views of a `ShardDataset`.
        seed: seed of the sample order.
        batches: number of batches to read.
        position: (epoch, batch) that is read first.
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
    """Usage of the validation samples, read `times` per epoch, by a rank."""
    needs = _usage(views, batching, np.arange(len(views)))
    return {shard: ShardUse(need.first, need.uses * times) for shard, need in needs.items()}


def combined_usage(of_ranks: Iterable[ShardUsage]) -> ShardUsage:
    """Combined usage of ranks that share a disk."""
    total: dict[int, ShardUse] = {}
    for needs in of_ranks:
        for shard, need in needs.items():
            before = total.get(shard, ShardUse(need.first, 0))
            total[shard] = ShardUse(min(before.first, need.first), before.uses + need.uses)
    return total


def one_after_another(needs: ShardUsage, later: ShardUsage) -> ShardUsage:
    """Usage of `needs` followed by that of `later`."""
    end = 1 + max((need.first for need in needs.values()), default=0)
    moved = {shard: ShardUse(need.first + end, need.uses) for shard, need in later.items()}
    return combined_usage([needs, moved])


def select_fitting(needs: ShardUsage, shards: Sequence[ShardInfo], room: int) -> list[int]:
    """The shards to copy, in reading order.

    If there is no room for all, those with the fewest reads per byte are left out.
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
    """Usage of samples in one epoch; in any epoch if it is None."""
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
    if isinstance(found, TileSample):  # fast path, for millions of tiles
        return (found.shard,)
    if epoch is None:
        return dataset.shards_under(sample, whole_box(found.size))
    return dataset.shards_under(sample, views.stored_box(epoch, sample, box))
