"""Networks whose modules keep state, modes or aliases, cut into stages, equal one process."""

from __future__ import annotations

import pytest

from spatialdl.comm.communicator import Communicator
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

ONE = ((1, 1),)

CASES = [
    Case("lp", "norm_eval", (21, 19), ONE * 3, 1, 1, 4, ("bn", "part.norm2")),
    Case(
        "sp+pp", "norm_eval", (21, 19), ((2, 1), (1, 1)), 1, 2, 5, ("part.norm",), schedule="1f1b"
    ),
    Case("pp", "counting", (21, 19), ONE * 3, 1, 3, 5, schedule="1f1b"),
    Case("sp+pp", "counting", (21, 19), ((2, 1), (1, 1)), 1, 2, 5, ("last",)),
    Case("pp", "views", (21, 19), ONE * 3, 1, 3, 5, schedule="1f1b"),
    Case("sp", "pyramid", (21, 19), ((3, 1),), 1, 2, 5, recompute=True),
    Case("sp+pp", "pyramid", (21, 19), ((1, 2), (1, 1)), 1, 2, 5, recompute=True),
    Case("gems", "norm_eval", (21, 19), ONE * 4, 1, 2, 5, schedule="mast"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_with_state_equal_one_process(case: Case, world: Communicator) -> None:
    check_equality(case, world)
