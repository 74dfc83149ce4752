from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.planning.cluster import cluster_of
from spatialdl.planning.job import CannotWork
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import job_of
from spatialdl.planning.stage import stage_costs
from spatialdl.training.layouts import placement_of, schedule_of
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit

ONE = (1, 1)
CONV = 2 * (8 * 16 * 12) * (8 * 3 * 3)
"""Operations of one convolution for one image."""
MAP = 4 * 8 * 16 * 12
"""Bytes of one map of one image."""
WEIGHTS = 4 * (4 * 8 * 8 * 9 + 8 * 4 + 4)


def layout(job, cluster, placement, name="gpipe", microbatches=1, recompute="none"):
    schedule = make_schedule(name, placement, microbatches)
    return predict(job, cluster, placement, schedule, recompute)


def test_one_rank_takes_the_time_of_its_operations(job, paper):
    found = layout(job, paper, Placement(1, (ONE,)))
    # of the first convolution there is no gradient of the images
    assert found.seconds == pytest.approx(8 * CONV * (4 + 4 + 3) / 1e9, rel=1e-3)
    assert found.sent == found.reducing == found.bubble == 0


def test_memory_of_one_rank_by_hand(job, paper):
    """Images, what tanh keeps of each block, and in the last block's backward two gradients."""
    found = layout(job, paper, Placement(1, (ONE,)))
    images = 8 * MAP
    after_forward = images + 4 * 8 * MAP
    small = 8 * 4 * (8 + 4) * 4  # the head's
    least = WEIGHTS + after_forward + 2 * 8 * MAP
    assert least <= found.memory[0] <= least + WEIGHTS + small


def test_replicas_share_the_images_and_add_up_gradients(job, paper):
    one, two = (layout(job, paper, Placement(n, (ONE,))) for n in (1, 2))
    ring = WEIGHTS / 1e9
    assert two.reducing == pytest.approx(ring + 2e-6, rel=1e-6)
    assert two.seconds - two.reducing == pytest.approx(one.seconds / 2, rel=1e-2)
    assert two.sent == WEIGHTS
    assert two.memory[0] < 0.6 * one.memory[0]


def test_a_grid_halves_work_and_memory_and_exchanges_halos(job, paper):
    one = layout(job, paper, Placement(1, (ONE,)))
    two = layout(job, paper, Placement(1, ((2, 1),)))
    assert one.seconds / 2 < two.seconds < 0.6 * one.seconds
    assert two.memory == (two.memory[0],) * 2
    assert 0.5 * one.memory[0] < two.memory[0] < 0.6 * one.memory[0]
    row = 8 * 4 * 8 * 12
    halos = (4 + 3) * row  # backward has none for the images
    sums = 2 * 8 * 8 * 4  # average and its backward
    assert two.sent == pytest.approx(WEIGHTS + halos + sums, rel=1e-2)


def test_a_pipeline_has_the_published_bubble_and_1f1b_holds_less(job, paper):
    placement = Placement(1, (ONE,) * 2)
    gpipe = layout(job, paper, placement, "gpipe", 4)
    ordered = layout(job, paper, placement, "1f1b", 4)
    # (P - 1) / (M + P - 1) if stages are balanced; the first one has less to do here
    assert 1 / 5 < gpipe.bubble < 1 / 5 + 0.05
    assert ordered.memory[0] < gpipe.memory[0]
    assert ordered.memory[1] < gpipe.memory[1]


def test_gems_holds_the_network_twice(job, paper):
    plain = layout(job, paper, Placement(1, (ONE, ONE)), "gpipe", 2)
    mast = layout(job, paper, Placement(1, (ONE, ONE), mirrored=True), "mast", 2)
    basic = layout(job, paper, Placement(1, (ONE, ONE), mirrored=True), "basic", 2)
    assert basic.seconds < mast.seconds
    assert max(mast.memory) < max(basic.memory)
    assert plain.reducing == 0 < mast.reducing


def test_layers_that_run_again_take_less_memory_and_more_time(job, paper):
    placement = Placement(1, (ONE,))
    kinds = ("none", "block", "stage")
    none, block, stage = (layout(job, paper, placement, "gpipe", 4, kind) for kind in kinds)
    assert block.memory[0] < none.memory[0]
    assert none.seconds < block.seconds
    forward = 8 * CONV * 4 / 1e9
    assert stage.seconds - none.seconds == pytest.approx(forward, rel=1e-2)


def test_state_of_optimizers_is_counted(job, paper):
    plain = layout(job, paper, Placement(1, (ONE,))).memory[0]
    for kind, ratio in (
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
    ):
        job.optimizer = kind
        job.__dict__.pop("state_ratio", None)
        found = layout(job, paper, Placement(1, (ONE,))).memory[0]
        assert found - plain == ratio * WEIGHTS


def test_ranks_that_share_cores_are_slower(job, figures):
    figures |= {"cores": 2, "memory_gb": 100}
    two = cluster_of(figures)
    apart = layout(job, two, Placement(2, (ONE,)))
    crowded = layout(job, two, Placement(4, (ONE,)))
    times = [one.seconds - one.reducing for one in (apart, crowded)]
    assert times[1] == pytest.approx(times[0], rel=1e-2)


class Sorted(torch.nn.Module):
    def forward(self, x):
        return x.sort(2).values


def test_too_many_stages_and_orders_on_a_grid_are_refused(job, paper):
    with pytest.raises(CannotWork, match="cut into 12 stages: its forward has only 11"):
        stage_costs(job, paper, Placement(1, (ONE,) * 12), 1, "none")
    ordered = torch.nn.Sequential(torch.nn.Conv2d(8, 2, 3), torch.nn.Tanh(), Sorted())
    with pytest.raises(CannotWork, match="stage 0 on a grid of 2x1: 2: sort"):
        stage_costs(replace(job, model=ordered), paper, Placement(1, ((2, 1),)), 1, "none")


def test_gradients_of_divided_channels_are_averaged_over_replicas_alone(job, paper):
    one, two = (layout(job, paper, Placement(2, (ONE,), tensor=(n,))) for n in (1, 2))
    latency = 2e-6
    assert two.reducing - latency == pytest.approx((one.reducing - latency) / 2, rel=1e-2)
    assert len(two.memory) == 2
    assert max(two.memory) < max(one.memory)
    assert two.timeline.spans[0] == two.timeline.spans[1]


def test_the_optimizer_changes_what_a_rank_has(job, figures):
    rates = {"pointwise": {"bytes_per_second": 1e9}, "in_place": {"bytes_per_second": 1e9}}
    cluster = cluster_of(figures | {"rates": rates})
    one, two = (layout(job, cluster, Placement(1, (ONE,), tensor=(n,))) for n in (1, 2))
    assert two.updating == pytest.approx(one.updating / 2, rel=1e-2)


# --- virtual tiles


def test_a_training_step_stores_at_least_what_is_predicted(paper, tmp_path):
    words = (
        "task=segmentation model=unet model.width=8 model.depth=2 parallel.stream=[2,2] "
        "data.batch_size=2 parallel.microbatches=2 data.image_size=[200,210] "
        "trainer.memory_limit_gb=0.00375 data.samples=2 trainer.max_steps=1 "
        "data.validation_samples=0 trainer.report=false"
    )
    config = composed("train", *words.split(), f"parallel.stream_to={tmp_path}", "device=cpu")
    placement = placement_of(config.parallel, 2)
    schedule, planned = schedule_of(config.parallel, placement), job_of(config, paper)
    (use,) = predict(planned, paper, placement, schedule, config.parallel.recompute).stores
    trainer = Trainer(config, SingleProcess())
    fit(trainer, tmp_path / "run")
    memory = trainer.parts.pipeline.options.memory
    assert memory is not None
    assert memory.store is not None
    assert 0.95 * use.stored < memory.store.peak < 1.4 * use.stored
    for moved in (memory.store.written, memory.store.read):
        assert 0.95 * use.moved < moved < 2 * use.moved


def test_what_is_above_the_limit_is_stored_for_each_micro_batch(job, paper):
    placement = Placement(1, (ONE,), stream=(2, 2))
    plain = layout(job, paper, placement, "1f1b", 2)
    assert (plain.stores[0].stored, plain.storing) == (0, 0)
    limited = replace(job, limit=4 * MAP, store="host")
    found, disk = (
        layout(replace(limited, store=store), paper, placement, "1f1b", 2)
        for store in ("host", "disk")
    )
    (use,) = found.stores
    assert found.memory[0] + use.stored == plain.memory[0]
    assert use.moved == 2 * use.stored > 0
    assert found.storing == pytest.approx(2 * use.moved / paper.host_bytes_per_second)
    assert disk.storing == pytest.approx(2 * use.moved / paper.disk_bytes_per_second)
    assert found.seconds == pytest.approx(plain.seconds + found.storing)
    ordered, together = (layout(limited, paper, placement, name, 2) for name in ("1f1b", "gpipe"))
    assert ordered.stores[0].stored < together.stores[0].stored == together.stores[0].moved
    # memory is never below that of the largest operation
    assert layout(replace(job, limit=1), paper, placement).memory[0] > 2 * 8 * MAP / 4
