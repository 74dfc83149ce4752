from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest

from spatialdl.models import resnet18
from spatialdl.pipeline.balance import memory
from spatialdl.pipeline.partition import Stage, cut
from spatialdl.planning.costs import count


def test_bounds_are_those_of_the_cut(job):
    assert job.bounds((1,)) == [0, 11]
    for widths in ((1, 1), (2, 1, 1), (4, 1)):
        stages = cut(job.model, widths, None, job.image)
        lengths = [len(stage.paths) for stage in stages if isinstance(stage, Stage)]
        assert lengths == [b - a for a, b in pairwise(job.bounds(widths))]


def test_named_cuts_are_taken(job):
    assert replace(job, names=["2"]).bounds((1, 1)) == [0, 4, 11]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_bounds_that_balance_memory_are_those_of_the_cut(job, microbatches):
    weigh = functools.partial(memory, samples=microbatches)
    model, image = resnet18(num_classes=4, width=4), (3, 32, 32)
    stages = cut(model, (1, 1), None, image, weigh=weigh)
    found = replace(job, model=model, image=image, balance="memory").bounds((1, 1), microbatches)
    assert found[1] == len(stages[0].paths)


def test_many_samples_cost_what_they_would_if_counted(job):
    found = job.costs(8, (2, 1), again=False)
    assert found == count(job.program(), (8, *job.image), (2, 1), on_cpu=False)


def test_pieces_that_run_again_belong_to_the_stage_in_which_they_begin(job):
    model = resnet18(num_classes=4, width=4)
    job = replace(job, model=model, image=(3, 32, 32))
    bounds = [0, 6, len(job.program(again=True).names)]
    parts = job.parts(bounds, again=True)
    assert parts[0][0] == 0
    assert parts[0][1] == parts[1][0]
    costs = job.costs(2, (1, 1), again=True)
    assert parts[1][1] == len(costs.layers)
    whole = sum(p.nbytes for p in model.parameters())
    assert sum(one.weights for one in costs.layers) == whole == job.weights


def test_what_the_optimizer_does_is_counted_step_by_step(job):
    updates = job.updates(again=False)
    assert len(updates) == len(job.program().names)
    conv = updates[0]
    assert sum(work.bytes for work in conv) == 3 * 4 * 8 * 8 * 9  # reads two, writes one
    assert updates[1] == []
