"""Splits of groups of slides, with classes in each split as in the whole.

A greedy assignment: the largest groups first, each to the split where it adds least to the
chi-squared distance between the counts of classes that a split has and those that it should have
(as StratifiedGroupKFold of scikit-learn does with standard deviations).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

_BINS, _MOST_CLASSES = 4, 10

Counts = npt.NDArray[np.float64]


def assign(counts: Counts, shares: Sequence[float], seed: int) -> list[int]:
    """The split of each group.

    Args:
        counts: (groups, classes), slides of each class in a group.
        shares: part of all slides that each split is to have; above 0, together 1.
        seed: of the order of groups of one size.

    Raises:
        ValueError: there are fewer groups than splits.
    """
    if len(counts) < len(shares):
        raise ValueError(f"{len(counts)} groups cannot be divided over {len(shares)} splits")
    # all slides count as a class of their own, so that splits without a class get the size wanted
    wide = np.column_stack([counts, counts.sum(1)])
    expected = np.outer(shares, wide.sum(0))
    expected[expected == 0] = 1.0  # no group has any of that class
    order = np.random.default_rng(seed).permutation(len(counts))
    order = order[np.argsort(-wide[order, -1], kind="stable")]
    missing, found = -expected.copy(), [0] * len(counts)
    empty = set(range(len(shares)))
    for place, group in enumerate(order):
        added = ((2 * missing + wide[group]) * wide[group] / expected).sum(1)
        if len(order) - place <= len(empty):  # each of the rest fills a split
            added[[split for split in range(len(shares)) if split not in empty]] = np.inf
        split = int(np.argmin(added))
        missing[split] += wide[group]
        empty.discard(split)
        found[int(group)] = split
    return found


def groups_of(labels: Sequence[Sequence[Hashable | None]]) -> list[int]:
    """Groups of slides that belong together, numbered in the order of their first slides.

    Args:
        labels: for each reason to belong together one label a slide; slides with a label in common
            are in one group, and None is in common with nothing.
    """
    count = len(labels[0])
    parent = list(range(count))

    def root(slide: int) -> int:
        while parent[slide] != slide:
            parent[slide] = parent[parent[slide]]
            slide = parent[slide]
        return slide

    for reason in labels:
        first: dict[Hashable, int] = {}
        for slide, label in enumerate(reason):
            if label is not None:
                one, other = root(first.setdefault(label, slide)), root(slide)
                parent[max(one, other)] = min(one, other)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(slide), len(numbers)) for slide in range(count)]


def strata_of(columns: Sequence[Sequence[str]]) -> list[str]:
    """The class of each slide by which splits are made alike.

    Args:
        columns: cells of one column or several, a class being a combination that occurs. Columns of
            more than ten different numbers are cut into quarters.
    """
    binned = [_binned(column) for column in columns]
    return [" ".join(cells) for cells in zip(*binned, strict=True)]


def _binned(column: Sequence[str]) -> list[str]:
    if len(set(column)) <= _MOST_CLASSES:
        return list(column)
    try:
        numbers = np.array([float(cell or "nan") for cell in column])
    except ValueError:
        return list(column)
    known = numbers[np.isfinite(numbers)]
    if not known.size:
        return list(column)
    edges = np.quantile(known, np.linspace(0, 1, _BINS + 1)[1:-1])
    names = [f"quarter {k + 1}" for k in range(_BINS)]
    bins = np.searchsorted(edges, numbers, side="right")
    return [
        names[k] if np.isfinite(number) else "" for k, number in zip(bins, numbers, strict=True)
    ]


def counts_of(groups: Sequence[int], strata: Sequence[str]) -> Counts:
    """(groups, classes): slides of each class in each group."""
    classes = {name: k for k, name in enumerate(sorted(set(strata)))}
    counts = np.zeros((max(groups) + 1, len(classes)))
    for group, name in zip(groups, strata, strict=True):
        counts[group, classes[name]] += 1
    return counts


def in_two_splits(labels: Sequence[Hashable | None], splits: Sequence[str]) -> dict[str, list[str]]:
    """Labels that occur in more than one split, with these splits; None and "" are no labels."""
    seen: dict[str, dict[str, None]] = {}
    for label, split in zip(labels, splits, strict=True):
        if label:
            seen.setdefault(str(label), {})[split] = None
    return {label: list(found) for label, found in seen.items() if len(found) > 1}


def pairs_apart(alike: Sequence[Sequence[int]], splits: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of slides that are alike and in different splits."""
    return [
        (one, other)
        for group in alike
        for one, other in combinations(group, 2)
        if splits[one] != splits[other]
    ]
