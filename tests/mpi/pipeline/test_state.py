"""Networks whose modules keep state, count calls or set modes equal one process in any layout."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

ONE, SIZE, LARGE = ((1, 1),), (17, 14), (21, 19)
LOCAL = [
    # micro-batches of one sample and of two, for the two ranks of a stage: one has none
    Case("pp", "odd", (33, 29), ONE * 2, 1, 2, 3, ("2",), local=(1, 2)),
    Case("pp", "odd", (33, 29), ONE * 2, 1, 2, 3, ("4",), "", "stage", local=(1, 2)),
    Case("pp", "spectral", SIZE, ONE * 2, 1, 2, 4, ("3",), local=(1, 2)),
]
CHECKPOINTED = [  # layers under a checkpoint count twice
    Case("none", "checkpointed", SIZE, ONE, 1, 3, 7),
    Case("dp", "checkpointed", SIZE, ONE, 2, 3, 9),
    Case("sp", "checkpointed", SIZE, ((2, 1),), 1, 2, 4),
    Case("gems", "checkpointed", SIZE, ONE * 2, 1, 2, 5, schedule="mast"),
    Case("pp", "checkpointed", SIZE, ONE * 3, 1, 4, 9, schedule="1f1b"),
    Case("pp", "checkpointed", SIZE, ONE * 2, 1, 3, 7, ("4",), local=(1, 2)),
    Case("dp+pp", "checkpointed", SIZE, ONE * 2, 2, 2, 8, schedule="1f1b", recompute="stage"),
    Case("dp+sp", "checkpointed", SIZE, ((1, 2),), 2, 2, 8),
]
AVERAGES = [  # buffers that forward updates
    Case("dp", "averages", SIZE, ONE, 2, 3, 9),
    Case("dp", "averages", SIZE, ONE, 3, 2, 4),  # some have none
    Case("gems", "averages", SIZE, ONE * 2, 1, 2, 5, schedule="mast"),
    Case("dp+pp", "averages", SIZE, ONE * 2, 2, 2, 8, schedule="1f1b"),
    Case("dp+sp", "centred", SIZE, ((1, 2),), 2, 2, 8),
]
SPECTRAL = [  # each slice has its own power iteration
    Case("dp", "spectral", SIZE, ONE, 2, 2, 4, shard=True),
    Case("pp", "spectral", SIZE, ONE * 2, 1, 3, 7, schedule="1f1b"),
    Case("dp", "spectral", SIZE, ONE, 2, 1, 4, recompute=True),
    Case("dp", "spectral", SIZE, ONE, 3, 2, 4),  # some have none
    Case("gems", "spectral", SIZE, ONE * 4, 1, 2, 5, schedule="mast"),
    Case("dp+pp", "spectral", SIZE, ONE * 2, 2, 2, 8, shard=True),
    Case("dp+pp", "spectral", SIZE, ONE * 2, 2, 2, 6, sync=True, recompute="stage"),
    Case("dp+sp", "spectral", SIZE, ((1, 2),), 2, 2, 8),
    # norms in the second stage only: ranks of the first one have none, or those of the other copy
    Case("sp+gems", "spectral", SIZE, ((1, 2), (1, 1)), 1, 2, 5, ("1",), schedule="mast"),
]
STATISTICS = [  # of layers called twice, cumulative ones, timm's; some replicas have no samples
    *(Case("dp", "statistics", SIZE, ONE, data, 2, 3) for data in (2, 3)),
    Case("dp+sp", "statistics", SIZE, ((2, 1),), 2, 2, 5),
]
CUT = [  # modules whose state, modes or aliases a cut must not lose
    Case("lp", "norm_eval", LARGE, ONE * 3, 1, 1, 4, ("bn", "part.norm2")),
    Case("sp+pp", "norm_eval", LARGE, ((2, 1), (1, 1)), 1, 2, 5, ("part.norm",), schedule="1f1b"),
    Case("sp+pp", "counting", LARGE, ((2, 1), (1, 1)), 1, 2, 5, ("last",)),
    Case("pp", "views", LARGE, ONE * 3, 1, 3, 5, schedule="1f1b"),
    Case("sp", "pyramid", LARGE, ((3, 1),), 1, 2, 5, recompute=True),
    Case("sp+pp", "pyramid", LARGE, ((1, 2), (1, 1)), 1, 2, 5, recompute=True),
    Case("gems", "norm_eval", LARGE, ONE * 4, 1, 2, 5, schedule="mast"),
]
NORMS = [  # of a forward of their own, which see all samples
    Case("pp", "norms", SIZE, ONE * 2, 1, 2, 5, ("2",), local=(1, 2)),
    Case("dp", "norms", SIZE, ONE, 3, 2, 8, sync=True),
]
EVALUATED = [  # as in training: by the samples of all ranks, with the same random numbers
    Case("none", "of_samples_at_random", SIZE, ONE, 1, 2, 3),
    Case("dp", "of_samples", SIZE, ONE, 2, 1, 3, sync=True),
    Case("dp", "of_samples", SIZE, ONE, 3, 1, 2, sync=True),
    Case("dp", "of_samples_at_random", SIZE, ONE, 3, 2, 4),
    Case("sp", "of_samples_at_random", SIZE, ((2, 2),), 1, 2, 3),
    Case("sp", "of_samples_at_random", SIZE, ((2, 1),), 1, 1, 2, stream=(1, 2)),
    Case("pp", "of_samples_at_random", SIZE, ONE * 2, 1, 2, 3, ("2",), local=(1, 2)),
    Case("sp+lp", "of_samples_at_random", SIZE, ((2, 1), (1, 1)), 1, 1, 1, ("3",), local=(1, 2)),
    Case("sp+lp", "of_samples", SIZE, ((2, 1), (1, 1)), 1, 1, 3, ("3",), local=(1, 2)),
    Case("gems", "of_samples_at_random", SIZE, ONE * 2, 1, 2, 5, schedule="mast"),
    Case("none", "of_samples", SIZE, ONE, tensor=(2,)),
    Case("dp", "always_moves", SIZE, ONE, 2, 2, 5),
    Case("dp", "always_moves", SIZE, ONE, 3, 1, 2),
    Case("dp", "of_samples", SIZE, ONE, 2, 2, 4, shard=True),
    Case("dp+sp", "always_moves", SIZE, ((1, 2),), 2, 2, 5),
    Case("pp", "always_moves", SIZE, ONE * 3, 1, 3, 4),
]


@pytest.mark.parametrize(
    "case",
    [*STATISTICS, *LOCAL, *CHECKPOINTED, *AVERAGES, *SPECTRAL, *CUT, *NORMS, *EVALUATED],
    ids=str,
)
def test_networks_with_state_equal_one_process(
    case: Case, world: MPI.Intracomm, ends_process_group: None
) -> None:
    check_equality(case, world)
