"""Every layout gives the numbers of a single process, to 1e-10 in float64."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.covering import cover
from tests.mpi.equality import slow_cases
from tests.mpi.equality_cases import LAYOUTS, SHARDED, Case
from tests.mpi.equality_runs import check_equality

RANKS_OF_MAKE_TEST = 5
"""Of `make test`; rows of more are run where there are so many ranks, each of them."""

QUICK = [case for case in (*LAYOUTS, *SHARDED) if not case.takes_long]
COVERING = {
    *cover([case for case in QUICK if case.placement.world_size <= RANKS_OF_MAKE_TEST]),
    *(case for case in QUICK if case.placement.world_size > RANKS_OF_MAKE_TEST),
}


def here(cases: list[Case]) -> list[object]:
    """The rows that cover all others, then the others, for worlds of this size."""
    fitting = [case for case in cases if case.placement.world_size == MPI.COMM_WORLD.size]
    quick = [case for case in fitting if case in COVERING]
    return [*quick, *slow_cases(case for case in fitting if case not in COVERING)]


@pytest.mark.parametrize("case", here(LAYOUTS), ids=str)
def test_equals_one_process(case: Case, world: MPI.Intracomm) -> None:
    check_equality(case, world)


@pytest.mark.parametrize("case", here(SHARDED), ids=str)
def test_equals_one_process_with_sharded_state(
    case: Case, world: MPI.Intracomm, ends_process_group: None
) -> None:
    check_equality(case, world)
