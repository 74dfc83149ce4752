from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from spatialdl.models import resnet18, unet
from spatialdl.pipeline.balance import estimated
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import borders
from spatialdl.pipeline.stage import Stage
from spatialdl.planning.program import Program
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


def test_a_chain_has_its_layers_and_blocks():
    program = Program(resnet18(num_classes=3, width=4), (3, 64, 64))
    assert program.names[3:6] == ["maxpool", "layer1.0", "layer1.1"]
    assert program.is_chain


def test_any_other_network_has_the_steps_of_its_forward():
    program = Program(Forked(), IMAGE)
    assert program.names == ["first", "relu", "second", "mul", "cat", "third", "mean"]
    assert not program.is_chain


def test_a_network_that_cannot_be_recorded_is_one_step_and_says_why():
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    program = Program(Looks(), IMAGE)
    assert program.names == [""]
    with pytest.raises(ValueError, match="Looks cannot be cut into 2 stages: "):
        program.bounds((1, 1), None, lambda: program.costs(estimated))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("model", [Forked(), unet(num_classes=3, width=4, depth=2)])
@pytest.mark.parametrize("widths", [(1, 1), (2, 1, 1), (4, 1)])
def test_cuts_weights_and_what_passes_are_those_of_the_runtime(model, widths, again):
    program = Program(model, IMAGE, again)
    bounds = program.bounds(widths, None, lambda: program.costs(estimated))
    stages = cut(meta_copy(model), widths, None, IMAGE, recompute=again)
    assert all(isinstance(stage, Stage) for stage in stages)
    assert bounds == [0, *(stage._stop for stage in stages)]
    assert program.borders(bounds) == borders(stages)
    for stage, (start, stop) in zip(stages, pairwise(bounds), strict=True):
        own = sum(one.nbytes for state in program.state[start:stop] for one in state)
        assert own == sum(one.nbytes for one in (*stage.parameters(), *stage.buffers()))


def test_weights_that_two_stages_would_share_are_refused_as_in_training():
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(4)))
    model[3].weight = model[0].weight
    program = Program(model, IMAGE)
    with pytest.raises(ValueError, match="'0' and '3' share a weight"):
        program.bounds((1, 1), ["2"], lambda: program.costs(estimated))
