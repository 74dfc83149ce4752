"""Running statistics with ranks without samples, and with layers that run twice."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

SIZE = (17, 14)
FEW = [
    # micro-batches of one sample and of two, for the two ranks of a stage
    Case("pp", "odd", (33, 29), ((1, 1),) * 2, 1, 2, 3, ("2",), local=(1, 2)),
    Case("pp", "odd", (33, 29), ((1, 1),) * 2, 1, 2, 3, ("4",), "", "stage", local=(1, 2)),
]
CHECKPOINTED = [
    Case("none", "checkpointed", SIZE, ((1, 1),), 1, 3, 7),
    Case("dp", "checkpointed", SIZE, ((1, 1),), 2, 3, 9),
    Case("sp", "checkpointed", SIZE, ((2, 1),), 1, 2, 4),
    Case("pp", "checkpointed", SIZE, ((1, 1),) * 2, 1, 3, 7, schedule="1f1b"),
    Case("gems", "checkpointed", SIZE, ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
    Case("pp", "checkpointed", SIZE, ((1, 1),) * 3, 1, 4, 9, schedule="1f1b"),
    Case("pp", "checkpointed", SIZE, ((1, 1),) * 2, 1, 3, 7, ("4",), local=(1, 2)),
    Case("dp+pp", "checkpointed", SIZE, ((1, 1),) * 2, 2, 2, 8, schedule="1f1b", recompute="stage"),
    Case("dp+sp", "checkpointed", SIZE, ((1, 2),), 2, 2, 8),
]


@pytest.mark.world(3)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_rank_without_samples_keeps_the_same_running_statistics(
    case: Case, world: MPI.Intracomm
) -> None:
    check_equality(case, world)


@pytest.mark.parametrize("case", CHECKPOINTED, ids=str)
def test_layers_under_a_checkpoint_count_twice(case: Case, world: MPI.Intracomm) -> None:
    check_equality(case, world)
