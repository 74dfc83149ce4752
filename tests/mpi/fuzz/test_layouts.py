"""Random networks in random layouts, trained as the command trains them, against one process.

A few cases run each time. In the longer proof hypothesis draws others on rank 0, which hands each
to all ranks, and looks for the smallest of those that differ; here those of a seed::

    mpiexec -n 6 python -m pytest -s -p no:cacheprovider tests/mpi/fuzz -m slow --hypothesis-seed=7

A case is printed before it runs, so that one which hangs is known too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from spatialdl.comm.communicator import Communicator
from tests.mpi.fuzz.cases import Case, case_of, cases
from tests.mpi.fuzz.reference import alone, data_of
from tests.mpi.fuzz.runs import TOLERANCE, differences, trained

EVERY_DAY = {2: 1, 3: 1, 4: 2, 5: 1, 8: 1}
"""Cases by the number of ranks."""
PROOF = 40
"""Cases of the longer proof on each number of ranks."""


@pytest.mark.world(*EVERY_DAY)
@pytest.mark.parametrize("seed", range(max(EVERY_DAY.values())))
def test_a_random_network_equals_one_process_in_a_random_layout(
    seed: int, world: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if seed >= EVERY_DAY[world.size]:
        pytest.skip(f"there are {EVERY_DAY[world.size]} cases on {world.size} ranks")
    check(case_of(seed, world.size), world, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.world(*EVERY_DAY)
def test_many_random_networks_equal_one_process_in_random_layouts(
    world: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(
        max_examples=PROOF,
        derandomize=False,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(cases(world.size))
    def take(case: Case) -> None:
        world.bcast(case)
        check(case, world, tmp_path_factory)

    if world.rank == 0:
        try:
            take()
        finally:
            world.bcast(None)
    while world.rank > 0 and (case := world.bcast(None)) is not None:
        try:
            check(case, world, tmp_path_factory)
        except Exception as error:  # all ranks fail alike, and the first one tells
            print(f"rank {world.rank}: {error!r}", file=sys.__stderr__, flush=True)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("left_out", "seed"),
    [  # of tiles, and of replicas with BatchNorm
        ("spatialdl.spatial.conv._present", 58),  # pixels of neighbours
        ("spatialdl.pipeline.gradients.Gradients.average", 58),
        ("spatialdl.pipeline.statistics.SliceStatistics.fold", 42),
    ],
)
def test_what_a_layout_leaves_out_is_found(
    left_out: str,
    seed: int,
    world: Communicator,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(left_out, lambda *_: ())
    assert differing(case_of(seed, 2), world, tmp_path_factory)


def check(case: Case, world: Communicator, tmp_path_factory: pytest.TempPathFactory) -> None:
    if world.rank == 0:
        print(f"on {world.size} ranks, {case}", file=sys.__stderr__, flush=True)
    wrong = differing(case, world, tmp_path_factory)
    worst = dict(sorted(wrong.items(), key=lambda one: -one[1])[:8])
    assert not wrong, f"on {world.size} ranks, {case}: {len(wrong)} differ, such as {worst}"


def differing(
    case: Case, world: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """What differs from one process, and by how much; every rank calls it."""
    folder = Path(world.bcast(tmp_path_factory.mktemp("fuzz") if world.rank == 0 else None))
    data = data_of(case)
    ours = trained(case, world, folder, data)
    found = differences(ours, alone(case, data) if world.rank == 0 else None, world)
    return {name: by for name, by in found.items() if not by <= TOLERANCE}
