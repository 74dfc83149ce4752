"""Random networks in random layouts, trained as the command trains them, against one process.

A case follows from its seed and the number of ranks, and is printed before it runs, so that one
which hangs is known too. ``SPATIALDL_FUZZ=100-160`` takes other seeds than those of every day::

    SPATIALDL_FUZZ=117 mpiexec -n 6 python -m pytest -s -p no:cacheprovider tests/mpi/fuzz
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spatialdl.comm.communicator import Communicator
from tests.mpi.fuzz.cases import PLAIN, Case, drawn
from tests.mpi.fuzz.reference import alone, data_of
from tests.mpi.fuzz.runs import TOLERANCE, differences, driven, trained

EVERY_DAY = {2: 1, 3: 2, 4: 4, 5: 1, 8: 1}
"""Cases by the number of ranks, 9 in all."""
PROOF = 40
"""More of them on each number of ranks, 200 in all."""
LEFT_OUT: dict[str, Callable[..., object]] = {
    "spatialdl.spatial.conv._present": lambda *_: iter(()),  # pixels of neighbours
    "spatialdl.pipeline.gradients.Gradients.average": lambda *_: None,
    "spatialdl.pipeline.statistics.SliceStatistics.fold": lambda *_: None,
}
"""What a layout cannot do without, and what does nothing in its place."""


def seeds() -> list[object]:
    wanted = os.environ.get("SPATIALDL_FUZZ")
    if wanted:
        first, _, last = wanted.partition("-")
        return list(range(int(first), int(last or first) + 1))
    first_of_proof = max(EVERY_DAY.values())
    every_day = [
        pytest.param(seed, marks=pytest.mark.world(*(n for n, k in EVERY_DAY.items() if k > seed)))
        for seed in range(first_of_proof)
    ]
    proof = range(first_of_proof, first_of_proof + PROOF)
    return every_day + [pytest.param(seed, marks=pytest.mark.slow) for seed in proof]


@pytest.mark.parametrize("seed", seeds())
def test_a_random_network_equals_one_process_in_a_random_layout(
    seed: int, world: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = drawn(seed, world.size)
    if world.rank == 0:
        print(f"on {world.size} ranks, {case}", file=sys.__stderr__, flush=True)
    wrong = differing(case, world, tmp_path_factory)
    worst = dict(sorted(wrong.items(), key=lambda one: -one[1])[:8])
    assert not wrong, f"on {world.size} ranks, {case}: {len(wrong)} differ, such as {worst}"


@pytest.mark.world(4)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_layout_that_leaves_something_out_is_found(
    name: str,
    world: Communicator,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(name, LEFT_OUT[name])
    assert differing(PLAIN, world, tmp_path_factory)


def differing(
    case: Case, world: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """What differs from one process, and by how much; every rank calls it."""
    folder = Path(world.bcast(tmp_path_factory.mktemp("fuzz") if world.rank == 0 else None))
    data = data_of(case)
    ours = driven(case, world, data) if case.by_hand else trained(case, world, folder, data)
    found = differences(ours, alone(case, data) if world.rank == 0 else None, world)
    return {name: by for name, by in found.items() if not by <= TOLERANCE}
