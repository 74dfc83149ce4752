"""Stratified splits of groups of slides.

A greedy assignment: the largest groups first, each to the split where it adds least to the
chi-squared distance between the actual and the expected counts of classes in the splits
(StratifiedGroupKFold of scikit-learn uses standard deviations instead).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

_BINS, _MOST_CLASSES = 4, 10

Counts = npt.NDArray[np.float64]


def assign(counts: Counts, shares: Sequence[float], seed: int) -> list[int]:
    """Assign each group to a split.

    Args:
        counts: (groups, classes), slides of each class in a group.
        shares: target fraction of all slides for each split; above 0, sum 1.
        seed: of the order of groups of equal size.

    Returns:
        The index of the split of each group.

    Raises:
        ValueError: there are fewer groups than splits.
    """
    if len(counts) < len(shares):
        raise ValueError(f"{len(counts)} groups cannot be divided over {len(shares)} splits")
    # an additional class of all slides, so that sizes of splits match their shares
    wide = np.column_stack([counts, counts.sum(1)])
    expected = np.outer(shares, wide.sum(0))
    expected[expected == 0] = 1.0  # classes without slides
    order = np.random.default_rng(seed).permutation(len(counts))
    order = order[np.argsort(-wide[order, -1], kind="stable")]
    missing, assigned = -expected.copy(), [0] * len(counts)
    empty = set(range(len(shares)))
    for place, group in enumerate(order):
        added = ((2 * missing + wide[group]) * wide[group] / expected).sum(1)
        if len(order) - place <= len(empty):  # each remaining group must fill an empty split
            added[[split for split in range(len(shares)) if split not in empty]] = np.inf
        split = int(np.argmin(added))
        missing[split] += wide[group]
        empty.discard(split)
        assigned[int(group)] = split
    return assigned


def groups_of(labels: Sequence[Sequence[Hashable | None]]) -> list[int]:
    """Number the groups of slides that must stay together, in the order of their first slides.

    Args:
        labels: for each criterion one label per slide; slides with equal labels are in one group,
            None matches no other slide.
    """
    count = len(labels[0])
    parent = list(range(count))

    def root(slide: int) -> int:
        while parent[slide] != slide:
            parent[slide] = parent[parent[slide]]
            slide = parent[slide]
        return slide

    for criterion in labels:
        first: dict[Hashable, int] = {}
        for slide, label in enumerate(criterion):
            if label is not None:
                roots = root(first.setdefault(label, slide)), root(slide)
                parent[max(roots)] = min(roots)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(slide), len(numbers)) for slide in range(count)]


def strata_of(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the class of each slide for stratification.

    Args:
        columns: cells of one or several columns; a class is a combination of cells. Columns with
            more than ten different numbers are binned into quartiles.
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
    """Count the slides of each class in each group: (groups, classes)."""
    classes = {name: k for k, name in enumerate(sorted(set(strata)))}
    counts = np.zeros((max(groups) + 1, len(classes)))
    for group, name in zip(groups, strata, strict=True):
        counts[group, classes[name]] += 1
    return counts


def pairs_apart(alike: Sequence[Sequence[int]], splits: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of slides of the same group in different splits."""
    return [
        (first, second)
        for group in alike
        for first, second in combinations(group, 2)
        if splits[first] != splits[second]
    ]
