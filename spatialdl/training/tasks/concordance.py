"""Harrell's concordance index in O(N log N) time and O(N) memory.

Harrell et al., "Evaluating the Yield of Medical Tests", JAMA 247, 1982
(https://doi.org/10.1001/jama.1982.03320430047030). Pairs are counted as inversions, one bit of the
ranks at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def concordance(risks: Tensor, times: Tensor, events: Tensor) -> float | None:
    """Share of the comparable pairs that the risks order correctly.

    An event precedes all later times and censored samples at the same time. Equal risks count
    half, NaN risks count as wrong.

    Args:
        risks: (N,), larger for earlier expected events.
        times: (N,), NaN for padding.
        events: (N,), 1 for an event at that time, 0 for a censored sample.

    Returns:
        The index, 0 to 1; None without comparable pairs.
    """
    there = ~times.isnan()
    risks, times, events = risks[there], times[there], events[there]
    is_event = events == 1
    # a pair of an event and a sample of a larger place is comparable
    place = _ranks(2 * _ranks(times) + ~is_event)
    pairs = _behind(place, is_event)
    if not pairs:
        return None
    seen = ~risks.isnan()
    rank, place, is_event = _ranks(risks[seen]), place[seen], is_event[seen]
    by_risk_and_place = rank * (len(place) + 1) + place
    equal = _behind(by_risk_and_place, is_event, of=rank)
    # equal places are sorted by risk, so that their pairs are no inversions
    order = (place * (len(place) + 1) + rank).argsort()
    higher = _inversions(rank[order], is_event[order])
    return (higher + 0.5 * equal) / pairs


def _ranks(values: Tensor) -> Tensor:
    """Dense ranks of values, int64 (N,), from 0."""
    _, inverse = torch.unique(values, return_inverse=True)
    ranks: Tensor = inverse
    return ranks


def _behind(keys: Tensor, chosen: Tensor, of: Tensor | None = None) -> int:
    """Count pairs of a chosen sample and one with a larger key, within a group of `of` if set.

    Args:
        keys: (N,), keys.
        chosen: (N,), mask of the chosen samples.
        of: (N,), groups; keys of a later group are larger.
    """
    ordered = keys.sort().values
    end = torch.searchsorted(ordered, keys[chosen], right=True)
    last = torch.full_like(end, len(keys))
    if of is not None:
        last = torch.searchsorted(of.sort().values, of[chosen], right=True)
    return int((last - end).sum())


def _inversions(ranks: Tensor, chosen: Tensor) -> int:
    """Count pairs of a chosen sample and a later one of lower rank.

    A pair is counted at the highest bit in which its ranks differ. There both are in one group of
    equal higher bits, in which samples keep their order.
    """
    total = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for bit in reversed(range(len(ranks).bit_length())):
        is_high = (ranks >> bit) & 1
        before = (is_high * chosen).cumsum(0)
        groups = ranks >> (bit + 1)
        first = torch.searchsorted(groups, groups)
        of_earlier_groups = torch.where(first > 0, before[(first - 1).clamp(min=0)], 0)
        total += ((before - of_earlier_groups) * (1 - is_high)).sum()
        order = (ranks >> bit).argsort(stable=True)
        ranks, chosen = ranks[order], chosen[order]
    return int(total)
