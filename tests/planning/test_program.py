from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from spatialdl.layout.layout import Layout
from spatialdl.models import resnet18, unet
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import borders
from spatialdl.pipeline.stage import Stage
from spatialdl.planning.costs import count
from spatialdl.planning.program import LargestTile, Program, local
from spatialdl.spatial.meta import meta_copy

IMAGE = (3, 32, 24)


class Forked(nn.Module):
    """A value that is used far behind, a weight outside of modules, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.spare = nn.Linear(2, 2)
        self.third, self.scale = nn.Conv2d(8, 5, 1), nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        deep = self.second(torch.relu(skip)) * self.scale
        return self.third(torch.cat([skip, deep], 1)).mean((2, 3))


def test_a_program_has_the_steps_of_a_forward():
    program = Program(resnet18(num_classes=3, width=4), (3, 64, 64))
    assert program.names[3:6] == ["maxpool", "layer1.0", "layer1.1"]
    assert program.is_chain
    program = Program(Forked(), IMAGE)
    assert program.names == ["first", "relu", "second", "mul", "cat", "third", "mean"]
    assert not program.is_chain


@pytest.mark.parametrize(
    ("model", "widths", "again"),
    [
        (Forked(), (2, 1, 1), False),
        (unet(num_classes=3, width=4, depth=2), (4, 1), False),
        (unet(num_classes=3, width=4, depth=2), (2, 1, 1), True),
    ],
)
def test_cuts_weights_and_what_passes_are_those_of_the_runtime(model, widths, again):
    program = Program(model, IMAGE, again)
    bounds = program.bounds(widths, None)
    stages = cut(meta_copy(model), widths, None, IMAGE, recompute=again)
    assert all(isinstance(stage, Stage) for stage in stages)
    assert bounds == [0, *(stage._stop for stage in stages)]
    assert program.borders(bounds) == borders(stages)
    for stage, (start, stop) in zip(stages, pairwise(bounds), strict=True):
        own = sum(one.nbytes for state in program.state[start:stop] for one in state)
        assert own == sum(one.nbytes for one in (*stage.parameters(), *stage.buffers()))


# --- job


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


# --- tile


@pytest.mark.parametrize(
    ("size", "grid", "stream", "rank", "part", "tile"),
    [
        ((12, 12), (1, 1), (3, 3), 0, 4, (4, 4)),
        ((13, 8), (2, 1), (2, 2), 1, 6, (4, 4)),
        ((7, 8), (2, 1), (1, 1), 1, 1, (4, 8)),
    ],
)
def test_a_virtual_tile_is_the_largest_of_the_rank_with_the_largest_part(
    size, grid, stream, rank, part, tile
):
    found = LargestTile((2, 3, *size), grid, stream)
    assert (found.rank, found.mesh.part) == (rank, part)
    image = found.image(torch.float32)
    assert local(image).shape == (2, 3, *tile)
    own = Layout.of_ranks(2, size, grid, stream).boxes[rank]
    rows, columns = (stop - start for start, stop in own.spatial)
    assert found.bytes(image) == 4 * 2 * 3 * rows * columns
    assert found.bytes(torch.empty(5, device="meta")) == 4 * 5
