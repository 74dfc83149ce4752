from __future__ import annotations

import pytest
import torch

from spatialdl.comm.boxed import Exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.layout import Box


def test_it_hears_itself():
    alone = SingleProcess()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.subset([0]).duplicate().allgather("x") == ["x"]
    assert (alone.bcast(1), alone.gather(2), alone.allreduce(3, max)) == (1, [2], 3)
    alone.barrier()


def test_a_sum_is_a_new_tensor():
    values = torch.arange(3.0)
    total = SingleProcess().all_reduce(values)
    assert torch.equal(total, values)
    assert total.data_ptr() != values.data_ptr()
    assert SingleProcess().all_gather(values).shape == (1, 3)
    SingleProcess().start_all_reduce(values).wait()
    assert torch.equal(values, torch.arange(3.0))


def test_there_is_nobody_to_talk_to():
    halves = Box(((0, 1), (0, 1), (0, 1))), Box(((0, 1), (1, 2), (0, 1)))
    kept, talks = Plan(halves, halves, 0), Plan(halves, halves[::-1], 0)
    cpu = torch.device("cpu")
    SingleProcess().start_exchange(Exchange(kept, [], [], cpu)).wait()
    with pytest.raises(RuntimeError, match="single process"):
        SingleProcess().start_exchange(Exchange(talks, [], [], cpu))
