"""Buffers changed in forward match a single process, or are refused by name."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

SIZE = (17, 14)
AVERAGES = [
    Case("dp", "averages", SIZE, ((1, 1),), 2, 3, 9),
    Case("dp", "averages", SIZE, ((1, 1),), 3, 2, 4),  # some have none
    Case("gems", "averages", SIZE, ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
    Case("dp+pp", "averages", SIZE, ((1, 1),) * 2, 2, 2, 8, schedule="1f1b"),
    Case("dp+sp", "centred", SIZE, ((1, 2),), 2, 2, 8),
    Case("dp", "centred", SIZE, ((1, 1),), 2, 2, 8),
]


@pytest.mark.parametrize("case", AVERAGES, ids=str)
def test_buffers_that_forward_updates(case: Case, world: MPI.Intracomm) -> None:
    check_equality(case, world)
