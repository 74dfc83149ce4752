"""A loss without data keeps for backward what the loss of the task keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spatialdl import gather_before, init_mesh
from spatialdl.checking.dry_loss import dry_loss
from spatialdl.comm.mesh import Mesh
from spatialdl.planning.costs import count
from spatialdl.planning.program import Program
from spatialdl.training.tasks.losses import classification_loss, segmentation_loss

SMALL = 50
"""Elements that do not count: sums, and weights of classes."""


@pytest.fixture(scope="module")
def alone() -> Mesh:
    return init_mesh((1, 1))


def kept(loss_of: Callable[[Tensor], Tensor | None], output: Tensor) -> Counter[object]:
    """Shapes and types of what autograd keeps of a loss."""
    found: Counter[object] = Counter()

    def pack(value: Tensor) -> Tensor:
        if value.numel() > SMALL:
            found[tuple(value.shape), value.dtype] += 1
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = loss_of(output * 1)
    assert loss is not None
    assert loss.shape == ()
    loss.backward()
    assert output.grad is not None
    return found


@pytest.mark.parametrize(
    ("segments", "shape", "real"),
    [
        (True, (2, 5, 16, 12), segmentation_loss),
        (False, (60, 5), classification_loss),
        (True, (60, 5), classification_loss),  # which is no map of the images
    ],
)
def test_what_is_kept_is_what_the_real_loss_keeps(segments, shape, real, alone):
    target = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    expected = kept(lambda output: real(output, target), torch.rand(shape, requires_grad=True))
    images = (shape[0], 3, 16, 12)
    with torch.device("meta"):
        output = torch.rand(shape, requires_grad=True)
        found = kept(lambda x: dry_loss(x, segments, images, alone), output)
    assert found == expected


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 5), (2, 5, 8, 6)])
def test_other_outputs_have_a_gradient_too(shape, alone):
    output = torch.rand(shape, device="meta", requires_grad=True)
    assert kept(lambda x: dry_loss(x, False, (2, 3, 16, 12), alone), output) == {}


def test_without_anything_to_learn_there_is_no_loss(alone):
    given = (torch.rand(2, 5, device="meta"), None, {"logits": 3})
    assert [dry_loss(one, False, (2, 3, 16, 12), alone) for one in given] == [None] * 3


def test_on_a_grid_the_numerators_are_added_up():
    program = Program(nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU()), (3, 16, 12))
    whole, tiles = (
        count(program, (2, 3, 16, 12), grid, segments=True) for grid in ((1, 1), (2, 1))
    )
    assert whole.loss.forward_talks == []
    assert {talk.kind for talk in tiles.loss.forward_talks} == {"sum"}
    kept = [one.lives.held(2, 3, ()) for one in (tiles, whole)]
    assert 0 < kept[0] <= kept[1] / 2 + 2 * SMALL


def test_of_a_full_output_on_a_grid_each_rank_counts_its_own_box():
    network = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU())
    gather_before(network, "1")
    full = count(Program(network, (3, 16, 12)), (2, 3, 16, 12), (2, 1), segments=True)
    assert {talk.kind for talk in full.loss.forward_talks} == {"sum"}
