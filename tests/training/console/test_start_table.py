from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.training.console.start_table import (
    Device,
    StageMemory,
    batch_line,
    device_lines,
    stage_lines,
    start_table,
)
from spatialdl.training.parts import RunParts

TINY = ["model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "device=cpu"]


@pytest.mark.parametrize(
    ("optimizer", "states", "precision", "size"),
    [("sgd", 1, "float32", 4), ("adamw", 2, "float64", 8), ("sgd", 1, "bf16-mixed", 4)],
)
def test_bytes_are_those_of_tensors(optimizer, states, precision, size):
    overrides = [f"optimizer={optimizer}", f"trainer.precision={precision}", "trainer.max_steps=1"]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*TINY, *overrides, "trainer.freeze=['conv1.*']"])
    parts = RunParts(config, SingleProcess())
    table = start_table(parts.pipeline, parts.world, config, parts.batch_size, "input: uint8")
    parameters = list(parts.pipeline.parameters())
    weights = size * sum(p.numel() for p in parameters)
    learning = size * sum(p.numel() for p in parameters if p.requires_grad)
    (row,) = (line for line in table.splitlines() if line.startswith("      0  whole images"))
    told = [f"{n / 1000:.1f} kB" for n in (weights, learning, learning * states)]
    assert learning < weights
    assert [cell.strip() for cell in row.split("  ") if cell.endswith("kB")][:3] == told
    assert table.splitlines()[0] == "layout: 1 replica x 1x1 = 1 rank"
    assert "input: uint8" in table.splitlines()


def test_a_line_a_stage():
    held = {
        0: StageMemory(1_000_000, 4_000_000, 4_000_000),
        1: StageMemory(2_500_000, 10_000_000, 0),
    }
    placement = Placement(1, ((2, 1), (1, 1)))
    head, first, second = stage_lines(placement, (65, 48), held, 2.0)
    assert head.split() == [
        *("stage", "per", "rank", "parameters", "weights", "gradients", "optimizer", "total")
    ]
    assert "32 to 33 x 48 of 65 x 48 pixels" in first
    assert first.endswith("1.00 M   4.0 MB     4.0 MB     8.0 MB  16.0 MB")
    assert "whole activations" in second
    assert second.endswith("2.50 M  10.0 MB    0 bytes    0 bytes  10.0 MB")


def test_many_stages_are_summarised():
    held = dict.fromkeys(range(64), StageMemory(1, 4, 4))
    lines = stage_lines(Placement(1, ((1, 1),) * 64), (64, 64), held, 0.0)
    assert len(lines) == 13
    assert lines[-2:] == ["  ...", lines[-1]]
    assert lines[-1].startswith("     63  ")


@pytest.mark.parametrize(
    ("numbers", "arithmetic"),
    [
        ((8, 1, 1), "1 micro-batch x 1 replica x 8 images = 8 images"),
        ((16, 4, 2), "4 micro-batches x 2 replicas x 2 images = 16 images"),
        ((7, 2, 1), "2 micro-batches x 1 replica x 3 or 4 images = 7 images"),
        ((1, 1, 1), "1 micro-batch x 1 replica x 1 image = 1 image"),
    ],
)
def test_the_arithmetic_of_a_batch(numbers, arithmetic):
    assert batch_line(*numbers) == f"global batch: {arithmetic} a step"


def test_ranks_of_a_machine_are_told_together():
    gpus = [Device("node1", f"cuda:{n}", "H100, 80 GiB") for n in range(4)]
    cpus = [Device(f"node{n}", "cpu", "2 threads each") for n in range(2, 30)]
    lines = list(device_lines([*gpus, *cpus]))
    assert lines[1] == "  ranks 0 to 3  node1   cuda:0 to cuda:3, H100, 80 GiB"
    assert lines[2] == "  rank 4        node2   cpu, 2 threads each"
    assert len(lines) == 11
    assert lines[-2:] == ["  ... 20 more", "  rank 31       node29  cpu, 2 threads each"]
    dealt = [Device(f"node{n % 2}", "cpu", "1 thread each") for n in range(6)]
    assert list(device_lines(dealt))[1:] == [
        "  ranks 0, 2, 4  node0  cpu, 1 thread each",
        "  ranks 1, 3, 5  node1  cpu, 1 thread each",
    ]
