"""A stage in a single process: its required inputs and stored tensors; not its numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch

LABELS = torch.tensor([0, 2, 1])


def images(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, 6, 5, dtype=torch.float64, generator=draw)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), head).double()


def pipeline_of(model: nn.Module) -> PipelineRuntime:
    one = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", one, 2)
    return PipelineRuntime(model, one, schedule, SingleProcess(), F.cross_entropy, (3, 6, 5))


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
