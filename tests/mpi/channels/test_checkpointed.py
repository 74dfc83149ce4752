"""Networks with checkpoints of their own, whose channels are divided: equal to one process."""

from __future__ import annotations

import pytest

from spatialdl.comm.communicator import Communicator
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

ONE = ((1, 1),)
SIZE = (21, 19)

CASES = [
    Case("none", "checkpointed", SIZE, ONE, 1, 2, 5, tensor=(2,)),
    Case("none", "checkpointed", SIZE, ONE, 1, 1, 5, recompute="stage", tensor=(2,)),
    Case("none", "checkpointed", SIZE, ONE, 1, 2, 5, recompute="stage", tensor=(2,)),
    Case("sp", "checkpointed", SIZE, ((2, 1),), 1, 2, 5, recompute="stage", tensor=(2,)),
    Case("pp", "checkpointed", SIZE, ONE * 2, 1, 2, 6, recompute="stage", tensor=(2, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoints_of_the_network_equal_one_process(case: Case, world: Communicator) -> None:
    check_equality(case, world)
