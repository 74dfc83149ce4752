"""Every layout gives the numbers of a single process, to 1e-10 in float64."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality_cases import LAYOUTS, OVER_A_BACKEND, Case
from tests.mpi.equality_runs import check_equality


def marked(cases: list[Case]) -> list[object]:
    return [pytest.param(c, marks=pytest.mark.slow) if c.takes_long else c for c in cases]


@pytest.mark.parametrize("case", marked(LAYOUTS), ids=str)
def test_equals_one_process(case: Case, world: MPI.Intracomm) -> None:
    check_equality(case, world)


@pytest.mark.parametrize("case", marked(OVER_A_BACKEND), ids=str)
def test_equals_one_process_over_a_backend(
    case: Case, world: MPI.Intracomm, ends_process_group: None
) -> None:
    check_equality(case, world)
