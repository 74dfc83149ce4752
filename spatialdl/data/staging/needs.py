"""Which shards a rank reads, when first and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import ShardInfo
from spatialdl.data.loader import Batching, Box, sample_order
from spatialdl.data.shards import ShardDataset
from spatialdl.layout import even_bounds


@dataclass(frozen=True)
class Need:
    """When a shard is read first, counted in samples read, and how many times an epoch."""

    first: int
    uses: float


Needs = Mapping[int, Need]
"""By the number of the shard."""


def training_needs(dataset: ShardDataset, batching: Batching, seed: int, batches: int) -> Needs:
    """What a rank needs of the training samples.

    The replicas share an epoch's samples out anew each time: over several epochs each of them
    needs all.

    Args:
        seed: of the order of the samples.
        batches: how many will be read.
    """
    order = sample_order(len(dataset), seed, 0)
    needs = _needs(dataset, batching, order[: batches * batching.size])
    if batches * batching.size <= len(dataset):
        return needs
    later = Batching(batching.size, 1, 0, batching.boxes, batching.mask_boxes)
    everything = _needs(dataset, later, order)
    return {
        shard: Need(
            needs[shard].first if shard in needs else len(dataset) + need.first,
            need.uses / batching.replicas,
        )
        for shard, need in everything.items()
    }


def validation_needs(dataset: ShardDataset, batching: Batching, times: float = 1) -> Needs:
    """What a rank needs of the validation samples, which are read so many times an epoch."""
    needs = _needs(dataset, batching, np.arange(len(dataset)))
    return {shard: Need(need.first, need.uses * times) for shard, need in needs.items()}


def together(of_ranks: Iterable[Needs]) -> Needs:
    """What ranks need that share a disk."""
    total: dict[int, Need] = {}
    for needs in of_ranks:
        for shard, need in needs.items():
            before = total.get(shard, Need(need.first, 0))
            total[shard] = Need(min(before.first, need.first), before.uses + need.uses)
    return total


def one_after_another(needs: Needs, later: Needs) -> Needs:
    """What is needed now and, when all of that was read, later."""
    end = 1 + max((need.first for need in needs.values()), default=0)
    moved = {shard: Need(need.first + end, need.uses) for shard, need in later.items()}
    return together([needs, moved])


def that_fit(needs: Needs, shards: Sequence[ShardInfo], room: int) -> list[int]:
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


def _needs(dataset: ShardDataset, batching: Batching, order: npt.NDArray[np.int64]) -> Needs:
    under: dict[Box, list[tuple[int, ...]]] = {}
    read: list[int] = []
    for start in range(0, len(order), batching.size):
        batch = order[start : start + batching.size]
        for own, box in _own(batching, len(batch)):
            if box not in under:
                under[box] = [dataset.shards_under(n, box) for n in range(len(dataset))]
            read += [shard for n in batch[own] for shard in under[box][n]]
    shards, first, uses = np.unique(np.array(read, np.int64), return_index=True, return_counts=True)
    rows = zip(shards.tolist(), first.tolist(), uses.tolist(), strict=True)
    return {shard: Need(begin, count) for shard, begin, count in rows}


def _own(batching: Batching, samples: int) -> Iterator[tuple[slice, Box]]:
    """The parts of a batch that a rank reads, and of them which box."""
    bounds = pairwise(even_bounds(samples, len(batching.boxes)))
    for (start, stop), *boxes in zip(bounds, batching.boxes, batching.mask_boxes, strict=True):
        cuts = even_bounds(stop - start, batching.replicas)
        own = slice(start + cuts[batching.replica], start + cuts[batching.replica + 1])
        for box in boxes:
            if box is not None:
                yield own, box
