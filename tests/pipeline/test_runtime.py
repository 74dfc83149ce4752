"""The runtime in a single process; tests/mpi compares every layout with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.layout import Layout
from spatialdl.layout.placement import Axes, Placement
from spatialdl.pipeline.batch_loss import check_forwards_first
from spatialdl.pipeline.layout_checks import check_samples
from spatialdl.pipeline.options import PipelineOptions, Width
from spatialdl.pipeline.own_tile import enter, run_tile
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import gpipe, make_schedule, one_f_one_b
from spatialdl.pipeline.stage import OUTPUT
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.pipeline.steps import IMAGE
from spatialdl.spatial.random import checkpoint_contexts


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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Checkpointed(again)
    one = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", one, microbatches=1)
    pipeline = PipelineRuntime(
        *(model, one, schedule, SingleProcess(), F.cross_entropy, (3, 2, 2)),
        PipelineOptions(seed=seed),
    )
    gradients = []
    for step in range(steps):
        images = torch.linspace(-1, 1, 60).view(5, 3, 2, 2)
        pipeline.train_step([Microbatch(5, 1.0, images, torch.tensor([0, 1, 2, 0, 1]))], step)
        gradients.append(torch.cat([p.grad.flatten() for p in pipeline.parameters()]))
    return gradients


def test_steps_and_seeds_draw_other_numbers_and_runs_the_same():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = trained(None)
    assert torch.equal(torch.get_rng_state(), before)  # the default generator is left alone
    assert not torch.equal(first, second)
    assert not torch.equal(first, trained(None, seed=1)[0])
    assert torch.equal(second, trained(None)[1])


def test_a_checkpoint_of_the_network_itself_draws_again():
    again = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)
    for ours, plain in zip(trained(again), trained(None), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_would_draw_other_numbers_is_refused(reentrant):
    with pytest.raises(RuntimeError, match=r"differ from that of forward.*checkpoint_contexts"):
        trained(partial(checkpoint, use_reentrant=reentrant))


# --- stage runtime


LABELS = torch.tensor([0, 2, 1])


def images(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, 6, 5, dtype=torch.float64, generator=draw)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), head).double()


def pipeline_of(
    model: nn.Module,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    options: PipelineOptions | None = None,
) -> PipelineRuntime:
    one = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", one, 2)
    return PipelineRuntime(model, one, schedule, SingleProcess(), criterion, (3, 6, 5), options)


@pytest.mark.parametrize(
    ("tile", "target", "sentence"),
    [
        (None, LABELS, "the first stage needs the images of its micro-batches"),
        (images(1), None, "the last stage needs the targets of its micro-batches"),
    ],
)
def test_what_a_stage_is_not_given_is_told(tile, target, sentence, model):
    whole = Microbatch(3, 0.5, images(0), LABELS)
    with pytest.raises(ValueError, match=sentence):
        pipeline_of(model).train_step([whole, Microbatch(3, 0.5, tile, target)], 0)


def test_a_network_that_learns_nothing_has_a_loss_all_the_same(model):
    model.requires_grad_(False)
    batch = [Microbatch(3, 0.5, images(seed), LABELS) for seed in range(2)]
    loss = pipeline_of(model).train_step(batch, 0)
    plain = [F.cross_entropy(model(images(seed)), LABELS).item() for seed in range(2)]
    assert loss == pytest.approx(sum(plain) / 2, rel=1e-14)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "run", [PipelineRuntime.evaluate, lambda one, batch: one.train_step(batch, 0)]
)
def test_images_and_activations_are_gone_after_a_step_and_after_an_evaluation(
    run: Callable[[PipelineRuntime, list[Microbatch]], object], model
):
    seen: list[StorageWeakRef] = []

    def note(layer: nn.Module, inputs: object, output: Tensor) -> None:
        if not output.is_meta:  # where sizes are worked out
            seen.append(StorageWeakRef(output.untyped_storage()))

    for layer in model[:3]:
        layer.register_forward_hook(note)
    pipeline = pipeline_of(model)
    batch = [Microbatch(3, 0.5, images(seed), LABELS) for seed in range(2)]
    seen += [StorageWeakRef(one.tile.untyped_storage()) for one in batch]
    run(pipeline, batch)
    del batch
    assert [ref.expired() for ref in seen] == [True] * (2 + 2 * 3)
    del pipeline  # which was there until now


# --- one tile


def test_values_need_not_depend_on_anything_that_learns(model):
    x, layer = images(3), model[0].requires_grad_(False)
    mesh = Mesh(Axes(spatial=(1, 1)), 0, 0, SingleProcess(), SingleProcess())
    shapes = {
        value: HandoverShape(shape, x.dtype, *[Layout.even(3, shape[2:], (1, 1))] * 2)
        for value, shape in ((IMAGE, (3, 3, 6, 5)), (OUTPUT, (3, 4, 4, 3)))
    }
    made = run_tile(layer, mesh, {IMAGE: x}, shapes, 3, PipelineOptions())
    made.backward_of({OUTPUT: torch.ones(3, 4, 4, 3)}, shapes)
    assert torch.equal(made.gradient(IMAGE, shapes[IMAGE]), torch.zeros_like(x))


def test_layers_and_losses_are_cast_alike(model):
    seen = []

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        seen.extend([output.dtype, torch.mm(output.float().T, output.float()).dtype])
        return F.cross_entropy(output.float(), target)

    pipeline = pipeline_of(model.float(), criterion, PipelineOptions(mixed=torch.bfloat16))
    pipeline.train_step([Microbatch(3, 0.5, images(n).float(), LABELS) for n in range(2)], 0)
    assert seen == [torch.bfloat16] * 4


def test_the_first_operation_may_write_into_a_leaf():
    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    F.relu_(enter(leaf)).sum().backward()
    assert leaf.grad.tolist() == [0, 1]
    assert leaf.tolist() == [0, 2]  # the same memory


# --- batch loss


def pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """No sum over samples; those of NaN are none."""
    there = ~target[:, 0].isnan()
    both = there[:, None] & there
    times = target.nan_to_num()[:, 0]
    products = (output[:, None, 0] * times - output[:, 0] * times[:, None]).exp()
    return products.where(both, 0.0).sum() / both.sum()


def over_batches() -> PipelineRuntime:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 1)).double()
    placement = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", placement, 4)
    options = PipelineOptions(batch_loss=Width(1, 1))
    return PipelineRuntime(model, placement, schedule, SingleProcess(), pairs, (1, 2, 3), options)


def batch(count: int) -> list[Microbatch]:
    """A batch in four micro-batches."""
    torch.manual_seed(1)
    found = []
    for number in range(4):
        tile, target = torch.rand(1, 1, 2, 3).double(), torch.rand(1, 1).double()
        there = (1, 1 / count, tile, target) if number < count else (0, 0.0)
        found.append(Microbatch(*there))
    return found


@pytest.mark.parametrize("count", [4, 3])
def test_gradients_are_those_of_the_whole_batch(count) -> None:
    ours = over_batches()
    loss = ours.train_step(batch(count), 0)
    some = batch(count)[:count]
    model = over_batches().stages[0]
    output = model(torch.cat([one.tile for one in some]))
    expected = pairs(output, torch.cat([one.target for one in some]))
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-14)
    for own, wanted in zip(ours.parameters(), model.parameters(), strict=True):
        assert wanted.grad.ne(0).all()
        torch.testing.assert_close(own.grad, wanted.grad, rtol=0, atol=1e-13)


def test_an_output_of_another_shape_is_refused() -> None:
    ours = over_batches()
    ours.stages[0].append(nn.Linear(1, 2).double())
    with pytest.raises(ValueError, match=r"returns \(1, 2\) for a sample.*\(1, 1\)"):
        ours.train_step(batch(4), 0)


def test_backwards_before_the_last_forward_are_refused() -> None:
    check_forwards_first(gpipe(1, 3))
    with pytest.raises(ValueError, match="needs all forwards"):
        check_forwards_first(one_f_one_b(1, 3))


# --- layout checks


def test_every_replica_needs_samples_in_every_microbatch():
    check_samples(6, 3, 2, "a batch")
    with pytest.raises(
        ValueError,
        match=r"the last batch has 5 for parallel\.microbatches=3 x parallel\.data=2: .* 6 or none",
    ):
        check_samples(5, 3, 2, "the last batch")
