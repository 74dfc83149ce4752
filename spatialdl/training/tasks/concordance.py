"""Harrell's concordance index of risks with times of events, without a matrix of pairs.

Harrell et al., "Evaluating the Yield of Medical Tests", JAMA 247, 1982
(https://doi.org/10.1001/jama.1982.03320430047030). Pairs are counted as inversions, a bit of the
ranks at a time: N log N steps, N numbers of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def concordance(risks: Tensor, times: Tensor, events: Tensor) -> float | None:
    """Share of the pairs of known order in which the risk has that order.

    An event comes before all later times, and before a censored one at the same time; equal risks
    count half, and risks that are NaN are never right.

    Args:
        risks: (N,), the larger, the earlier events are expected.
        times: (N,), NaN of what is no sample.
        events: (N,), 1 for an event at that time, 0 for the end of watching.

    Returns:
        The index, 0 to 1; None where no order is known.
    """
    there = ~times.isnan()
    risks, times, events = risks[there], times[there], events[there]
    is_event = events == 1
    # a pair of an event and a sample of a larger place is in known order
    place = _ranks(2 * _ranks(times) + ~is_event)
    pairs = _behind(place, is_event)
    if not pairs:
        return None
    seen = ~risks.isnan()
    rank, place, is_event = _ranks(risks[seen]), place[seen], is_event[seen]
    by_risk_and_place = rank * (len(place) + 1) + place
    equal = _behind(by_risk_and_place, is_event, of=rank)
    # of equal places the least risk first, so that none of their pairs is an inversion
    order = (place * (len(place) + 1) + rank).argsort()
    higher = _inversions(rank[order], is_event[order])
    return (higher + 0.5 * equal) / pairs


def _ranks(values: Tensor) -> Tensor:
    """int64 (N,): numbers of the different values, from 0."""
    _, found = torch.unique(values, return_inverse=True)
    numbers: Tensor = found
    return numbers


def _behind(keys: Tensor, chosen: Tensor, of: Tensor | None = None) -> int:
    """Pairs of a chosen sample and one of a larger key, in the same group `of` if it is given.

    Args:
        of: (N,), groups; keys of a later group are larger.
    """
    ordered = keys.sort().values
    end = torch.searchsorted(ordered, keys[chosen], right=True)
    last = torch.full_like(end, len(keys))
    if of is not None:
        last = torch.searchsorted(of.sort().values, of[chosen], right=True)
    return int((last - end).sum())


def _inversions(ranks: Tensor, chosen: Tensor) -> int:
    """Pairs of a chosen sample and one behind it of a lower rank.

    A pair is counted at the highest bit in which its ranks differ: there both are in one group of
    equal higher bits, in which the samples keep their order.
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
