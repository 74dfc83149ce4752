"""Consistency check between ranks, before they work together.

Every rank sends its host and a short digest for each subject. Only for subjects that differ, one
rank for each distinct digest sends the content.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from spatialdl.consistency.rank_state import RankState, sum_of_items
from spatialdl.text import fitted

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

_MOST_ITEMS, _MOST_VALUES, _MOST_HOSTS = 5, 4, 4
_WIDEST = 80

_Content = tuple[Mapping[str, str], str, str]


def check_alike(world: Communicator, subjects: Mapping[str, RankState]) -> None:
    """Check that all ranks have the same state; collective.

    Args:
        subjects: state by name; names may differ between ranks with different code.

    Raises:
        ValueError: on all ranks, naming the differences and their ranks.
    """
    if world.size == 1:
        return
    own = {name: sum_of_items(subject.items) for name, subject in subjects.items()}
    gathered = world.allgather((socket.gethostname(), own))
    hosts = [host for host, _ in gathered]
    texts = []
    for name in dict.fromkeys(name for _, sums in gathered for name in sums):
        digests = [sums.get(name, "") for _, sums in gathered]
        if len(set(digests)) > 1:
            texts.append(_difference(world, name, subjects.get(name), hosts, digests))
    if texts:
        raise ValueError(f"ranks differ: {'; '.join(texts)}")


def _difference(
    world: Communicator,
    name: str,
    own: RankState | None,
    hosts: Sequence[str],
    digests: Sequence[str],
) -> str:
    """Describe the difference in a subject; collective."""
    sends = digests.index(digests[world.rank]) == world.rank
    content = None if own is None or not sends else (dict(own.items), own.advice, own.place)
    contents: list[_Content | None] = world.allgather(content)
    of_ranks = [contents[digests.index(digest)] or ({}, "", "") for digest in digests]
    texts = list(_items(of_ranks, hosts))
    if len(texts) > _MOST_ITEMS:
        texts[_MOST_ITEMS:] = [f"and {len(texts) - _MOST_ITEMS} more"]
    places = [
        f"rank {rank} has {content[2]}"
        for rank, content in enumerate(contents)
        if content and content[2]
    ]
    if len({content[2] for content in contents if content}) > 1:
        texts.append(f"({', '.join(places[:_MOST_VALUES])})")
    advice = next((content[1] for content in contents if content), "")
    return f"{name}: {', '.join(texts)}: {advice}"


def _items(of_ranks: Sequence[_Content], hosts: Sequence[str]) -> Iterator[str]:
    """Text of each item that differs: "seed is 0 on rank 0 (node1), 1 on rank 1 (node2)"."""
    for item in dict.fromkeys(item for items, _, _ in of_ranks for item in items):
        values: dict[str, list[int]] = {}
        for rank, (items, _, _) in enumerate(of_ranks):
            values.setdefault(items.get(item, "missing"), []).append(rank)
        if len(values) == 1:
            continue
        texts = [
            f"{fitted(value, _WIDEST)} on {ranks_and_hosts(ranks, hosts)}"
            for value, ranks in values.items()
        ]
        more = len(texts) - _MOST_VALUES
        texts[_MOST_VALUES:] = [f"{more} more values"] if more > 0 else []
        yield f"{item} is {', '.join(texts)}"


def ranks_and_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "rank 0 (node1)", "ranks 0-3 (node1), 6 (node2)".

    Args:
        ranks: in ascending order.
        hosts: of all ranks.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1 and hosts[rank] == hosts[rank - 1]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [
        f"{run[0]}{f'-{run[-1]}' if len(run) > 1 else ''} ({hosts[run[0]]})"
        for run in runs[:_MOST_HOSTS]
    ]
    more = sum(map(len, runs[_MOST_HOSTS:]))
    if more:
        texts.append(f"and {more} more")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
