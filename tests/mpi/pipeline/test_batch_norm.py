"""Ranks that share a micro-batch's statistics, where one of them has none of its samples."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

FEW = [
    # micro-batches of one sample and of two, for the two ranks of a stage
    Case("pp", "odd", (33, 29), ((1, 1),) * 2, 1, 2, 3, ("2",), local=(1, 2)),
    Case("pp", "odd", (33, 29), ((1, 1),) * 2, 1, 2, 3, ("4",), "", "stage", local=(1, 2)),
]


@pytest.mark.world(3)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_rank_without_samples_keeps_the_same_running_statistics(
    case: Case, world: MPI.Intracomm
) -> None:
    check_equality(case, world)
