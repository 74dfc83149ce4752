"""Ranks that make a mesh with different arguments are refused, all of them, before they talk."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from spatialdl import init_mesh
from spatialdl.comm import check


@pytest.mark.world(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("grid", lambda ranks, rank: {"grid": (ranks, 1) if rank else (1, ranks)}),
        ("check", lambda ranks, rank: {"grid": (ranks, 1), "check": rank == 0}),
        ("timeout", lambda ranks, rank: {"grid": (ranks, 1), "timeout": 100.0 + rank}),
    ],
)
def test_different_arguments_are_refused(name: str, arguments: Any, world: MPI.Intracomm) -> None:
    before = check.enabled()
    with pytest.raises(ValueError, match=f"init_mesh with different arguments: {name}="):
        init_mesh(**arguments(world.size, world.rank))
    assert check.enabled() == before


@pytest.mark.parametrize("timeout", [-1, "soon", float("inf"), True])
def test_a_timeout_that_is_none_is_refused(timeout: Any, world: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* must be the seconds .* or None for no limit"):
        init_mesh((world.size, 1), timeout=timeout)


def test_the_check_is_switched(world: MPI.Intracomm) -> None:
    before = check.enabled()
    for on in (False, True):
        init_mesh((world.size, 1), check=on)
        init_mesh((world.size, 1))
        assert check.enabled() == on
    check.enable(before)
