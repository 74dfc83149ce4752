"""The runtime in a single process; tests/mpi compares every layout with it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Action, Schedule
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
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
    pipeline = PipelineRuntime(
        *(Checkpointed(again), one, schedule, SingleProcess(), F.cross_entropy, (3, 2, 2)),
        PipelineOptions(seed=seed),
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


def weights_after(train: list[Action], recompute: str = "none") -> tuple[Tensor, list[bool]]:
    """The gradients of a step, and after each backward whether the weights have one."""
    torch.manual_seed(0)
    one = Placement(1, ((1, 1),))
    evaluate = [[action for action in train if action.kind == "forward"]]
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    pipeline = PipelineRuntime(
        model,
        one,
        Schedule([train], evaluate, 3),
        SingleProcess(),
        F.cross_entropy,
        (3, 2, 2),
        PipelineOptions(recompute=recompute),
    )
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    found: list[bool] = []
    layers[0].bias.register_hook(lambda grad: found.append(layers[1].weight.grad is not None))
    images = torch.linspace(-1, 1, 60, dtype=torch.float64).view(5, 3, 2, 2)
    target = torch.tensor([0, 1, 2, 0, 1])
    cuts = ((0, 2), (2, 3), (3, 5))
    batch = [Microbatch(b - a, (b - a) / 5, images[a:b], target[a:b]) for a, b in cuts]
    pipeline.train_step(batch, 0)
    return torch.cat([p.grad.flatten() for p in pipeline.parameters()]), found


def actions(text: str) -> list[Action]:
    kinds = {"F": "forward", "B": "backward", "W": "weight"}
    return [Action(kinds[word[0]], 0, int(word[1])) for word in text.split()]


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_weights_have_their_gradients_after_weight_actions_and_not_before(recompute):
    plain, at_once = weights_after(actions("F0 B0 F1 B1 F2 B2"), recompute)
    ours, late = weights_after(actions("F0 B0 F1 F2 B1 W0 B2 W1 W2"), recompute)
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)
    assert at_once == [True] * 3
    assert late == [False, False, True]


def test_a_schedule_that_leaves_weights_out_is_told():
    with pytest.raises(ValueError, match="weights of backward 1, stage 0 without gradients"):
        weights_after(actions("F0 B0 F1 F2 B1 W0 B2 W2"))


@pytest.mark.parametrize("wrong", ["F0 B0 W0 F1 B1 W0 W1 F2 B2 W2", "F0 W0 B0 F1 B1 W1 F2 B2 W2"])
def test_weights_twice_or_before_their_backward_are_told(wrong):
    with pytest.raises(ValueError, match="deadlocks, ranks are stuck: stage 0 before weight 0"):
        weights_after(actions(wrong))
