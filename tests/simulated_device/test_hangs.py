"""Ranks whose devices wait for each other for ever: the job ends and names what hangs."""

from __future__ import annotations

import re

import pytest

from tests.simulated_device.ranks import SECONDS, two_ranks_ran

A_SUM_ON_ONE_RANK = """
alone = world.duplicate()
alone.all_reduce(torch.ones(3, device=device))
step(split, "gpipe")
def sum_alone(*_):
    alone.all_reduce(torch.ones(3, device=device))
step(split, "gpipe", sum_alone if world.rank == 0 else None)
"""
ONE_LANE = """
step(stages, "1f1b")
made = Handovers.__init__
def shared(self, *arguments):
    made(self, *arguments)
    self._lanes = {key: self._lanes[*key[:2], "forward", key[3]] for key in self._lanes}
Handovers.__init__ = shared
step(stages, "1f1b")
"""


@pytest.mark.parametrize(
    "program",
    [A_SUM_ON_ONE_RANK, ONE_LANE],
    ids=["a sum on one rank", "one lane for both directions"],
)
def test_a_hang_on_the_device_is_named(program: str) -> None:
    code, said = two_ranks_ran(program, "nccl")
    assert said.count("a step has ended") >= 2, said  # only the one with the loss waits
    assert code != 0
    assert re.search(r"rank \d on .*waits for \d+ s in the end of the step", said), said
    assert f"longer than comm.timeout={SECONDS}" in said, said
