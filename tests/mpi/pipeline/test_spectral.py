"""Spectral norm's vectors over replicas equal those of a single process."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

SIZE = (17, 14)
CASES = [
    Case("dp", "spectral", SIZE, ((1, 1),), 2, 3, 9),
    Case("dp", "spectral", SIZE, ((1, 1),), 2, 2, 4, shard=True),
    Case("pp", "spectral", SIZE, ((1, 1),) * 2, 1, 3, 7, schedule="1f1b"),
    Case("gems", "spectral", SIZE, ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
    Case("dp", "spectral", SIZE, ((1, 1),), 2, 1, 4, recompute=True),
    Case("dp", "spectral", SIZE, ((1, 1),), 3, 2, 4),  # some have none
    Case("gems", "spectral", SIZE, ((1, 1),) * 3, 1, 2, 5, schedule="mast"),
    Case("pp", "spectral", SIZE, ((1, 1),) * 2, 1, 2, 3, ("3",), local=(1, 2)),
    Case("dp+pp", "spectral", SIZE, ((1, 1),) * 2, 2, 2, 8, shard=True),
    Case("dp+pp", "spectral", SIZE, ((1, 1),) * 2, 2, 2, 6, sync=True, recompute="stage"),
    Case("dp+sp", "spectral", SIZE, ((1, 2),), 2, 2, 8),
    # norms in the second stage only: ranks of the first one have none, or those of the other copy
    Case("sp+gems", "spectral", SIZE, ((1, 2), (1, 1)), 1, 2, 5, ("1",), schedule="mast"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_slice_has_its_own_power_iteration(
    case: Case, world: MPI.Intracomm, ends_process_group: None
) -> None:
    check_equality(case, world)
