from __future__ import annotations

import torch

from spatialdl.comm.dry import Dry, Talk, listening, note
from spatialdl.comm.reduce import gather_over_ranks, sum_over_ranks
from spatialdl.comm.tape import Tape


def test_what_would_be_said_is_noted_while_somebody_listens():
    comm, values = Dry(1, 4), torch.empty(3, device="meta")
    sum_over_ranks(comm, values)
    with listening() as outer:
        assert sum_over_ranks(comm, values).shape == (3,)
        with listening() as inner:
            assert gather_over_ranks(comm, values).shape == (4, 3)
    assert outer == [Talk("sum", 4, 12), Talk("gather", 4, 12)]
    assert inner == outer[1:]


def test_what_runs_again_says_nothing_twice():
    tape, comm = Tape(), Dry(0, 2, "tensor")
    with listening() as heard:
        with tape.record():
            note(comm, "sum", 2, 8)
        with tape.replay():
            note(comm, "sum", 2, 8)
    assert heard == [Talk("sum", 2, 8, "tensor")]


def test_a_rank_by_itself_says_nothing():
    with listening() as heard:
        sum_over_ranks(Dry(0, 1), torch.empty(3, device="meta"))
    assert heard == []
