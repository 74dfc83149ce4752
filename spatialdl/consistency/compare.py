"""Refusing ranks that are not alike, before they work together.

Every rank sends its host and a few digits a subject. Only where these differ do the ranks that
have something of their own send what it is, one rank for all that have the same.
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
    """Refuse ranks that differ; all of them must call it.

    Args:
        subjects: by name; those of other ranks may have others, if their code is another.

    Raises:
        ValueError: on all ranks, telling what differs and which ranks have which.
    """
    if world.size == 1:
        return
    own = {name: sum_of_items(subject.items) for name, subject in subjects.items()}
    everybody = world.allgather((socket.gethostname(), own))
    hosts = [host for host, _ in everybody]
    said = []
    for name in dict.fromkeys(name for _, sums in everybody for name in sums):
        sums = [found.get(name, "") for _, found in everybody]
        if len(set(sums)) > 1:
            said.append(_difference(world, name, subjects.get(name), hosts, sums))
    if said:
        raise ValueError(f"the ranks are not alike: {'; '.join(said)}")


def _difference(
    world: Communicator, name: str, own: RankState | None, hosts: Sequence[str], sums: Sequence[str]
) -> str:
    """What differs in a subject; all ranks ask."""
    speaks = sums.index(sums[world.rank]) == world.rank
    content = None if own is None or not speaks else (dict(own.items), own.advice, own.place)
    contents: list[_Content | None] = world.allgather(content)
    of_ranks = [contents[sums.index(one)] or ({}, "", "") for one in sums]
    texts = list(_items(of_ranks, hosts))
    if len(texts) > _MOST_ITEMS:
        texts[_MOST_ITEMS:] = [f"and {len(texts) - _MOST_ITEMS} more"]
    where = [
        f"rank {rank} has {found[2]}" for rank, found in enumerate(contents) if found and found[2]
    ]
    if len({found[2] for found in contents if found}) > 1:
        texts.append(f"({', '.join(where[:_MOST_VALUES])})")
    advice = next((found[1] for found in contents if found), "")
    return f"{name}: {', '.join(texts)}: {advice}"


def _items(of_ranks: Sequence[_Content], hosts: Sequence[str]) -> Iterator[str]:
    """A text for each item that differs: "seed is 0 on rank 0 (node1), 1 on rank 1 (node2)"."""
    for item in dict.fromkeys(item for items, _, _ in of_ranks for item in items):
        values: dict[str, list[int]] = {}
        for rank, (items, _, _) in enumerate(of_ranks):
            values.setdefault(items.get(item, "missing"), []).append(rank)
        if len(values) == 1:
            continue
        said = [
            f"{fitted(value, _WIDEST)} on {ranks_and_hosts(ranks, hosts)}"
            for value, ranks in values.items()
        ]
        more = len(said) - _MOST_VALUES
        said[_MOST_VALUES:] = [f"{more} others elsewhere"] if more > 0 else []
        yield f"{item} is {', '.join(said)}"


def ranks_and_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "rank 0 (node1)", "ranks 0-3 (node1), 6 (node2)".

    Args:
        ranks: in order.
        hosts: of all ranks.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1 and hosts[rank] == hosts[rank - 1]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = [
        f"{run[0]}{f'-{run[-1]}' if len(run) > 1 else ''} ({hosts[run[0]]})"
        for run in runs[:_MOST_HOSTS]
    ]
    more = sum(map(len, runs[_MOST_HOSTS:]))
    if more:
        said.append(f"and {more} more")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(said)}"
