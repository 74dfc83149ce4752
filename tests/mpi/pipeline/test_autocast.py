"""Mixed precision: layouts in which no rank adds up another's part give one process's bits.

Where sums over ranks occur (gradients of weights on a split image, BatchNorm's statistics), other
roundings are as good: there the distance to float32 must not be larger than that of one process,
but for a small factor.
"""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import Outcome, parallel, reference

CHAIN = ((1, 1), (1, 1))
THE_SAME_BITS = [
    Case("pp", "resnet18", (70, 93), CHAIN, microbatches=2),
    Case("pp", "resnet18", (70, 93), CHAIN, microbatches=2, recompute="stage"),
    Case("lp", "unet", (37, 29), CHAIN),  # float32 and half precision jump over the border
    Case("pp", "odd", (50, 50), ((1, 1),) * 3, microbatches=3, batch=6),
]
SLOW = [pytest.mark.slow]
AS_FAR = [
    Case("sp", "resnet18", (70, 93), ((2, 1),)),
    Case("sp", "unet", (37, 45), ((1, 2),), recompute=True),
    Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=8),
    Case("gems", "odd", (45, 50), CHAIN, microbatches=2, schedule="basic"),
    Case("sp+pp", "resnet18", (70, 93), ((2, 1), (1, 1)), microbatches=2),
    Case("sp+pp", "unet", (37, 45), ((2, 1), (2, 1)), microbatches=2),
]


def runs(cases: list[Case]) -> list[object]:
    """Each in both types, of which some are left to the longer proof."""
    return [
        pytest.param(case, mixed, marks=[] if quick and case.network != "resnet18" else SLOW)
        for case in cases
        for mixed, quick in ((torch.bfloat16, True), (torch.float16, case.network == "odd"))
    ]


def distance(one: Outcome, other: Outcome) -> torch.Tensor:
    """Of weights and statistics, in the norm over all that `one` holds."""
    found = [(value.double() - other.state[name].double()) for name, value in one.state.items()]
    return torch.stack([difference.norm() for difference in found]).norm()


def fits(case: Case, world: MPI.Intracomm) -> None:
    if case.placement.world_size != world.size:
        pytest.skip(f"needs {case.placement.describe()}")


@pytest.mark.parametrize(("case", "mixed"), runs(THE_SAME_BITS), ids=str)
def test_stages_give_the_bits_of_one_process(
    case: Case, mixed: torch.dtype, world: MPI.Intracomm
) -> None:
    fits(case, world)
    ours = parallel(case, world, torch.float32, mixed)
    plain = reference(case, torch.float32, mixed)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in ours.state.items():
        assert torch.equal(value, plain.state[name]), name
        assert value.dtype in (torch.float32, torch.int64)
    exact = reference(case, torch.float32)
    assert distance(ours, exact) > 0, "nothing was rounded"


@pytest.mark.parametrize(("case", "mixed"), runs(AS_FAR), ids=str)
def test_sums_over_ranks_round_no_worse_than_one_process(
    case: Case, mixed: torch.dtype, world: MPI.Intracomm
) -> None:
    fits(case, world)
    ours = parallel(case, world, torch.float32, mixed)
    plain = reference(case, torch.float32, mixed)
    exact = reference(case, torch.float32)
    rounding = distance(Outcome([], {name: plain.state[name] for name in ours.state}, {}), exact)
    assert 0 < distance(ours, exact) <= 2 * rounding
    # that of the first step: later ones are far from float32 by chance, which weights average out
    furthest = 2 * torch.finfo(mixed).eps * exact.losses[0]
    assert abs(plain.losses[0] - exact.losses[0]) <= furthest
    assert abs(ours.losses[0] - exact.losses[0]) <= furthest
