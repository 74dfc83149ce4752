"""Simulated memory and store of virtual tiles, compared with a real run."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.single_process import SingleProcess
from spatialdl.models import resnet18, unet, vit
from spatialdl.parallel.axes import Axes
from spatialdl.parallel.layout import Layout
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.own_tile import TileRegion
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.steps import IMAGE
from spatialdl.pipeline.virtual_tiles import VirtualTiles
from spatialdl.planning.job import PlannedJob
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import job_of as job_of_config
from spatialdl.planning.store_use import SimulatedMemory, StoreUse
from spatialdl.random import keyed
from spatialdl.streaming.memory import Memory
from spatialdl.streaming.store import DiskStore
from spatialdl.training.layouts import placement_of, schedule_of
from spatialdl.training.trainer import Trainer
from tests.fitting import fit

NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "resnet": (lambda: resnet18(num_classes=10, width=16), (3, 512, 480)),
    "unet": (lambda: unet(num_classes=5, width=8, depth=2), (3, 384, 400)),
    "vit": (lambda: vit(num_classes=10, patch=8, width=128, depth=2, heads=4), (3, 256, 256)),
}
CLOSE = {"none": 0.2, "stage": 0.4}
"""How far bytes may be from those predicted: tiles differ a little in size, and copies that are
kept of what has arrived, for a stage that runs again, are not followed."""
READ_OF_ATTENTION = 0.5
"""The same of bytes read where keys and values circulate: whose are read is not followed."""


def job_of(name: str) -> PlannedJob:
    torch.manual_seed(0)
    make, image = NETWORKS[name]
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return PlannedJob(make(), image, 1, optimizer, segments=name == "unet", on_cpu=False)


def predicted(
    job: PlannedJob, cluster: Any, stream: tuple[int, ...], recompute: Any = "none"
) -> StoreUse:
    placement = Placement(1, ((1, 1),), stream=stream)
    schedule = make_schedule("gpipe", placement, 1)
    (use,) = predict(job, cluster, placement, schedule, recompute).stores
    return use


def real(
    model: nn.Module, image: tuple[int, ...], stream: tuple[int, ...], memory: Memory, again: bool
) -> StoreUse:
    """Of a step with random pixels."""
    mesh = Mesh(Axes(spatial=(1, 1)), 0, 0, SingleProcess(), SingleProcess(), stream=stream)
    tiles = VirtualTiles(model.train(), mesh, again, None, memory)
    whole = torch.randn(1, *image)
    masks = torch.zeros(1, *image[1:], dtype=torch.int64)
    layout = Layout.even(1, image[1:], stream)

    def region(full: Tensor) -> TileRegion:
        return TileRegion(tuple(full.shape), full.dtype, image[1:], lambda part: full[part].clone())

    shape = HandoverShape(tuple(whole.shape), whole.dtype, layout, layout)
    with keyed(0, 0, 0):
        made = tiles.forward({IMAGE: region(whole)}, {IMAGE: shape}, 1, torch.device("cpu"))
    is_map = tiles.each(lambda number: made._made[number].output)[0].dim() > 2
    labels = region(masks) if is_map else masks[:, 0, 0]
    made.backward_of_loss(F.cross_entropy, labels, 1.0)
    store = memory.store
    if store is None:
        return StoreUse(memory.peak)
    return StoreUse(memory.peak, store.peak, store.written, store.read)


@pytest.mark.parametrize(
    ("name", "stream", "recompute"),
    [("resnet", (2, 2), "stage"), ("unet", (4, 3), "none"), ("vit", (2, 2), "none")],
)
def test_a_run_takes_what_is_predicted(name, stream, recompute, paper, tmp_path):
    job = job_of(name)
    again, close = recompute == "stage", CLOSE[recompute]
    plain = predicted(job, paper, stream, recompute)
    assert (plain.stored, plain.written, plain.read) == (0, 0, 0)
    ours = real(job.model, job.image, stream, Memory(10**12, DiskStore(tmp_path)), again)
    assert plain.here == pytest.approx(ours.here, rel=close)
    limited = replace(job, limit=plain.here // 3)
    found = predicted(limited, paper, stream, recompute)
    store = Memory(limited.limit, DiskStore(tmp_path))
    run = real(job.model, job.image, stream, store, again)
    for key in ("here", "stored", "written"):
        assert getattr(found, key) == pytest.approx(getattr(run, key), rel=close), key
    close = READ_OF_ATTENTION if name == "vit" else close
    assert found.read == pytest.approx(run.read, rel=close)


def key(number: int, tile: int = 0) -> tuple[tuple[int, int, int], int, int]:
    return (0, 0, 0), tile, number


def test_what_was_used_first_leaves_and_comes_back():
    room = SimulatedMemory(100)
    room.touch((), (), {key(0): 60})
    room.touch((), (), {key(1): 60})  # both are there while it is made
    assert (room.peak, room.here, room.written, room.read) == (120, 60, 60, 0)
    room.touch((key(0),), (), {})
    assert (room.here, room.written, room.read) == (60, 120, 60)
    room.touch((key(1),), (), {})  # the first is still stored: nothing has written to it
    assert (room.written, room.read) == (120, 120)
    room.touch((key(0),), (key(0),), {})
    room.touch((key(1),), (), {})
    assert room.written == 180
    assert room.stored == 2 * 4096


def test_gradients_of_tiles_are_added_up_in_one():
    room = SimulatedMemory(None)
    for tile in range(3):
        room.touch((), (), {key(7, tile): 10})
    for tile in range(3):
        room.add_up(key(7, tile), key(7, -1))
    assert (room.here, room.peak) == (10, 30)
    room.forget_all((0, 0, 0))
    assert room.here == 0


def test_the_time_of_the_store_is_part_of_the_step(paper):
    job = job_of("resnet")
    placement = Placement(1, ((1, 1),), stream=(2, 2))
    schedule = make_schedule("gpipe", placement, 1)
    whole = predict(job, paper, placement, schedule, "none")
    limited = replace(job, limit=whole.stores[0].here // 3, store="host")
    found = predict(limited, paper, placement, schedule, "none")
    (use,) = found.stores
    assert found.storing == pytest.approx((use.written + use.read) / paper.host_bytes_per_second)
    assert found.seconds == pytest.approx(whole.seconds + found.storing)
    assert found.memory[0] < whole.memory[0]
    disk = predict(replace(limited, store="disk"), paper, placement, schedule, "none")
    ratio = paper.host_bytes_per_second / paper.disk_bytes_per_second
    assert disk.storing == pytest.approx(ratio * found.storing)


def test_ranks_of_a_node_share_its_disk(paper):
    rates = [paper.store_bytes_per_second("disk", ranks) for ranks in (1, 2, 64)]
    assert rates == [paper.disk_bytes_per_second / n for n in (1, 2, paper.ranks_per_node)]
    assert paper.store_bytes_per_second("host", 64) == paper.host_bytes_per_second


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_micro_batches_and_stages_of_virtual_tiles_are_predicted(name, paper):
    """All micro-batches that are held between forward and backward are there together."""
    job = replace(job_of("resnet"), batch=4)
    placement = Placement(1, ((2, 1), (1, 1)), stream=(2, 1))
    found = predict(job, paper, placement, make_schedule(name, placement, 4), "none")
    assert len(found.stores) == len(found.memory) == 3
    assert found.stores[0] == found.stores[1]
    if name == "1f1b":
        gpipe = predict(job, paper, placement, make_schedule("gpipe", placement, 4), "none")
        assert found.stores[0].here < 0.7 * gpipe.stores[0].here


def test_a_run_of_the_training_command_stores_what_is_predicted(paper, tmp_path):
    words = [
        *("task=segmentation", "model=unet", "model.width=8", "model.depth=2"),
        *("data.image_size=[400,420]", "data.batch_size=2", "parallel.microbatches=2"),
        *("trainer.max_steps=1", "data.samples=2", "data.validation_samples=0"),
        *("parallel.stream=[3,4]", "device=cpu", "trainer.report=false"),
        *("trainer.memory_limit_gb=0.015", f"parallel.stream_to={tmp_path}"),
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", words)
    placement = placement_of(config.parallel, 2)
    schedule = schedule_of(config.parallel, placement)
    (use,) = predict(job_of_config(config, paper), paper, placement, schedule, "none").stores
    trainer = Trainer(config, SingleProcess())
    fit(trainer, tmp_path / "run")
    memory = trainer.parts.pipeline.options.memory
    assert memory is not None
    assert memory.store is not None
    assert use.written > 20e6
    # reading a tile has a copy of its pixels for a moment
    assert memory.peak == pytest.approx(use.here, rel=0.2)
    assert memory.store.peak == pytest.approx(use.stored, rel=0.1)
    assert memory.store.written == pytest.approx(use.written, rel=0.2)
    assert memory.store.read == pytest.approx(use.read, rel=0.2)
