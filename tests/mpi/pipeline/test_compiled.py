"""Compiled stages equal an uncompiled single process, in every supported layout."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from spatialdl.comm.communicator import Communicator
from spatialdl.pipeline import runtime
from tests.mpi.device import DEVICE
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import check_equality

ONE = ((1, 1),)
RESIDUAL = "residual", (19, 17)

CASES = [
    Case("pp", *RESIDUAL, ONE * 2, 1, 2, 4, ("block2",), compiled=True),
    Case("dp", *RESIDUAL, ONE, 2, 2, 6, compiled=True),
    Case("dp", *RESIDUAL, ONE, 2, 2, 8, sync=True, compiled=True),
    Case("gems", *RESIDUAL, ONE * 2, 1, 2, 4, schedule="mast", compiled=True),
    Case("lp", "skips", (19, 17), ONE * 2, 1, 1, 4, compiled=True),
]
FIRST = 1
"""Number of cases in every run; the rest take long to compile."""


@pytest.mark.skipif(DEVICE.type == "sim", reason="inductor does not support it")
@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=[pytest.mark.slow] * (n >= FIRST)) for n, one in enumerate(CASES)],
    ids=str,
)
def test_compiled_stages_equal_one_process(case: Case, world: Communicator) -> None:
    counters.clear()
    check_equality(case, world)
    if case.placement.world_size == world.size:
        graphs = sum(world.allgather(counters["stats"]["unique_graphs"]))
        assert (graphs > 0) != case.sync  # BatchNorm over replicas communicates


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_statistics_are_kept_around_what_is_compiled(
    case: Case, world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quickly: what would be compiled runs as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(runtime, "check_compiler", lambda device: None)
    check_equality(case, world)
