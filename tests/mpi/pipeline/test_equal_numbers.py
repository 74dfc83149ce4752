"""Every layout gives the numbers of a single process, to 1e-10 in float64."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality import slow_cases
from tests.mpi.equality_cases import LAYOUTS, SLOW, Case
from tests.mpi.equality_runs import check_equality


def here(cases: list[Case]) -> list[Case]:
    """Those for a world of this size."""
    return [case for case in cases if case.placement.world_size == MPI.COMM_WORLD.size]


@pytest.mark.parametrize("case", [*here(LAYOUTS), *slow_cases(here(SLOW))], ids=str)
@pytest.mark.usefixtures("ends_process_group")  # that of a sharded state
def test_equals_one_process(case: Case, world: MPI.Intracomm) -> None:
    check_equality(case, world)
