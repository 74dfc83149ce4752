from __future__ import annotations

import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.text import width
from spatialdl.layout.placement import Placement
from spatialdl.training.console.start_table import (
    Device,
    StageMemory,
    batch_line,
    device_lines,
    rank_lines,
    stage_lines,
    start_table,
)
from spatialdl.training.console.validation_table import class_rows, confusion_rows, validation_table
from spatialdl.training.parts import RunParts
from tests.composing import composed

TINY = ["model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "device=cpu"]


@pytest.mark.parametrize(
    ("optimizer", "states", "precision", "size"),
    [("sgd", 1, "float32", 4), ("adamw", 2, "float64", 8), ("sgd", 1, "bf16-mixed", 4)],
)
def test_bytes_are_those_of_tensors(optimizer, states, precision, size):
    overrides = [f"optimizer={optimizer}", f"trainer.precision={precision}", "trainer.max_steps=1"]
    config = composed("train", *TINY, *overrides, "trainer.freeze=['conv1.*']")
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
    many = dict.fromkeys(range(64), StageMemory(1, 4, 4))
    lines = stage_lines(Placement(1, ((1, 1),) * 64), (64, 64), many, 0.0)
    assert (len(lines), lines[-2]) == (13, "  ...")
    assert lines[-1].startswith("     63  ")


@pytest.mark.parametrize(
    ("numbers", "arithmetic"),
    [
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


DEVICES = [Device(f"node{1 + rank % 2}", f"cuda:{rank // 2}", "a GPU") for rank in range(6)]
SP_PP_RANKS = """
rank  host   device  replica  stage   rows  columns
   0  node1  cuda:0        0  0       0:49     0:70
   2  node1  cuda:1        0  0      49:99     0:70
   4  node1  cuda:2        0  1       0:99     0:70
   1  node2  cuda:0        1  0       0:49     0:70
   3  node2  cuda:1        1  0      49:99     0:70
   5  node2  cuda:2        1  1       0:99     0:70
"""
GEMS_RANKS = """
rank  replica  stage             rows  columns
   0        0  0                 0:49     0:70
   0        0  1 of the copy     0:99     0:70
   1        0  0, 0 of the copy  49:99    0:70
   2        0  1                 0:99     0:70
   2        0  0 of the copy     0:49     0:70
"""


@pytest.mark.parametrize(
    ("placement", "size", "devices", "text"),
    [
        (
            *(Placement(2, ((2, 1), (1, 1)), order=(0, 2, 4, 1, 3, 5)), (99, 70), DEVICES),
            SP_PP_RANKS,
        ),
        (Placement(1, ((2, 1), (1, 1)), mirrored=True), (99, 70), None, GEMS_RANKS),
    ],
)
def test_what_lies_on_each_rank_has_a_line_a_box(placement, size, devices, text):
    lines = rank_lines(placement, size, devices) if devices else rank_lines(placement, size)
    assert [line.split() for line in lines] == [line.split() for line in text.split("\n")[1:-1]]
    assert len({width(line) for line in lines}) == 1


CLASSES = {
    "loss": 0.5,
    "samples": 7,
    "accuracy": 0.25,
    "auroc": None,
    "recall_per_class": [0.5, None],
    "auroc_per_class": [1.0, 0.75],
    "confusion_matrix": [[1000, 2], [3, 4]],
}


def test_metrics_beside_those_before():
    before = {"loss": 2.0, "accuracy": 0.5, "auroc": None}
    lines = validation_table(CLASSES, 12, ["benign", "tumour"], before).splitlines()
    assert lines[0] == "validation after step 12, 7 samples"
    assert [line.split() for line in lines[1:5]] == [
        *(["now", "before"], ["loss", "0.5", "2"]),
        *(["accuracy", "25.0", "%", "50.0", "%"], ["AUROC", "-", "-"]),
    ]
    assert [line.split() for line in lines[6:9]] == [
        *(["recall", "AUROC"], ["benign", "50.0", "%", "100.0", "%"]),
        ["tumour", "-", "75.0", "%"],
    ]
    assert lines[-3:] == [
        "  true \\ predicted  benign  tumour",
        "  benign             1,000       2",
        "  tumour                 3       4",
    ]


def test_many_classes_are_cut_short_and_what_is_undefined_left_out():
    count = 30
    found = {"dice": [0.5] * count, "confusion_matrix": [[1] * count] * count}
    assert class_rows(found, [])[-1] == ["... 10 more", ""]
    assert confusion_rows(found, []) == []
    assert confusion_rows({"confusion_matrix": []}, []) == []
    assert confusion_rows({"confusion_matrix": [[[1, 0], [0, 1]]]}, ["a"]) == []
    assert class_rows({"recall_per_class": []}, []) == []


def test_pixels_told_to_be_no_class_have_a_column_if_there_are_any():
    none, some = (
        confusion_rows({"confusion_matrix": [[5, 1, count], [2, 6, 0]]}, ["a", "b"])
        for count in (0, 9)
    )
    assert none[0][1:] == ["a", "b"]
    assert some[1] == ["a", "5", "1", "9"]
