"""Random networks in random layouts, trained as the command trains them, against one process.

A case follows from its seed and the number of ranks, and is printed before it runs, so that one
which hangs is known too. ``SPATIALDL_FUZZ=100-160`` takes other seeds than those of every day::

    SPATIALDL_FUZZ=117 mpiexec -n 6 python -m pytest -s -p no:cacheprovider tests/mpi/fuzz
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from spatialdl.comm.communicator import Communicator
from tests.mpi.fuzz.cases import drawn
from tests.mpi.fuzz.reference import alone, data_of
from tests.mpi.fuzz.runs import TOLERANCE, differences, driven, trained

EVERY_DAY, PROOF = 10, 40
"""Cases of a number of ranks; the proof runs on five numbers of ranks."""


def seeds() -> list[object]:
    wanted = os.environ.get("SPATIALDL_FUZZ")
    if wanted:
        first, _, last = wanted.partition("-")
        return list(range(int(first), int(last or first) + 1))
    of_every_day = [pytest.param(seed, marks=pytest.mark.world(4)) for seed in range(EVERY_DAY)]
    return of_every_day + [
        pytest.param(seed, marks=pytest.mark.slow) for seed in range(EVERY_DAY, EVERY_DAY + PROOF)
    ]


@pytest.mark.parametrize("seed", seeds())
def test_a_random_network_equals_one_process_in_a_random_layout(
    seed: int, world: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = drawn(seed, world.size)
    folder = Path(world.bcast(tmp_path_factory.mktemp("fuzz") if world.rank == 0 else None))
    data = data_of(case)
    if world.rank == 0:
        print(f"on {world.size} ranks, {case}", file=sys.__stderr__, flush=True)
    ours = driven(case, world, data) if case.by_hand else trained(case, world, folder, data)
    found: dict[str, float] = {}
    if world.rank == 0:
        found = differences(ours, alone(case, data))
    wrong = {name: by for name, by in world.bcast(found).items() if not by <= TOLERANCE}
    worst = dict(sorted(wrong.items(), key=lambda one: -one[1])[:8])
    assert not wrong, f"on {world.size} ranks, {case}: {len(wrong)} differ, such as {worst}"
