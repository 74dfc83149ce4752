"""The runtime in one process; every layout is proved equal to it in tests/mpi."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.alone import Alone
from spatialdl.mesh import Placement
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.random import checkpoint_contexts


class Checkpointed(nn.Module):
    """Lets its own part run again in backward."""

    def __init__(self, again: partial | None) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(12, 9), nn.Linear(9, 3), again

    def part(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(x.tanh(), 0.5, self.training))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        return self.again(self.part, x) if self.again else self.part(x)


def trained(again: partial | None, steps: int = 2, seed: int = 0) -> list[Tensor]:
    """Gradients of all steps; the weights stay as they are."""
    torch.manual_seed(0)
    one = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", one, microbatches=1)
    pipeline = Pipeline(
        Checkpointed(again), one, schedule, Alone(), F.cross_entropy, (3, 2, 2), seed=seed
    )
    gradients = []
    for step in range(steps):
        images = torch.linspace(-1, 1, 60).view(5, 3, 2, 2)
        pipeline.train_step([Microbatch(5, 1.0, images, torch.tensor([0, 1, 2, 0, 1]))], step)
        gradients.append(torch.cat([p.grad.flatten() for p in pipeline.parameters()]))
    return gradients


def test_steps_and_seeds_draw_other_numbers_and_runs_the_same():
    first, second = trained(None)
    assert not torch.equal(first, second)
    assert not torch.equal(first, trained(None, seed=1)[0])
    assert torch.equal(second, trained(None)[1])


def test_training_leaves_the_default_generator_alone():
    trained(None, steps=1)
    after = torch.rand(3)
    trained(None, steps=2)
    assert torch.equal(torch.rand(3), after)


def test_a_checkpoint_of_the_network_itself_draws_again():
    again = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)
    for ours, plain in zip(trained(again), trained(None), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_would_draw_other_numbers_is_refused(reentrant):
    with pytest.raises(RuntimeError, match=r"differ from that of forward.*checkpoint_contexts"):
        trained(partial(checkpoint, use_reentrant=reentrant))
