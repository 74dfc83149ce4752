from __future__ import annotations

import pytest
import torch
from omegaconf import DictConfig

from spatialdl import train
from spatialdl.planning.fakecomm import look
from spatialdl.planning.predict import predict
from spatialdl.planning.setup import cluster_file, cluster_named, job_of
from spatialdl.training.layouts import placement_of, schedule_of
from tests.composing import composed

REFUSED = "tests.planning.test_preflight.Refused"
"""A network that is right on whole images alone."""
SMALL = ["model.width=4", "data.image_size=[65,48]", "data.batch_size=6", "debug=fakecomm"]


def config(*overrides: str) -> DictConfig:
    return composed("train", *SMALL, *overrides)


@pytest.mark.parametrize(
    "words",
    [
        *(["sp", "task=multilabel"], ["dp+sp+gems"], ["experiment/hyfi_amoebanet"]),
        ["sp+lp", "parallel.gather_before=[layer3]", "task.class_weights=balanced"],
        ["sp+pp", "model=unet", "model.depth=2", "task.dice=1"],  # no chain
    ],
    ids=lambda words: words[0],
)
def test_layouts_that_work_would_run(words, capsys):
    given = config(f"parallel={words[0]}", *words[1:])
    assert look(given)
    lines = capsys.readouterr().out.splitlines()
    placement = placement_of(given.parallel)
    assert lines[0] == f"layout: {placement.describe()}, images of 65x48"
    assert lines[-1] == "it would run"
    assert not any("memory is predicted for float32" in line for line in lines)
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if line[:5].strip().isdigit() and "M" in line]
    assert [int(row[0]) for row in rows] == list(range(placement.stages))
    assert sum("GB each" in line for line in lines) >= placement.stages


def test_another_task_and_precision_would_run(capsys):
    words = ["task=regression", "trainer.precision=bf16-mixed", "trainer.accumulate=2"]
    assert train._print_preflight(config("parallel=sp", *words), words)
    text = capsys.readouterr().out
    assert text.endswith("it would run\n")
    assert "note: memory is predicted for float32" in text


def test_sizes_memory_and_halos(capsys):
    given = config(
        "parallel=sp+pp", "parallel.grid=[2,1]", "parallel.microbatches=3", "parallel.cut=[layer2]"
    )
    assert look(given)
    text = capsys.readouterr().out
    assert "batch of 6: 3 micro-batches of 2, 1 replica with 2 of these" in text
    first, second = (line for line in text.splitlines() if line.startswith(("    0  ", "    1  ")))
    assert "32 to 33 x 48" in first
    assert "17 x 12" in second
    cluster = cluster_named(cluster_file("infiniband"))
    job = job_of(given, cluster)
    placement = placement_of(given.parallel)
    schedule = schedule_of(given.parallel, placement)
    memory = predict(job, cluster, placement, schedule, "none").memory
    base = cluster.base_bytes(3)
    for rank, stage in ((0, 0), (2, 1)):
        told = f"{(memory[rank] - base) / 1e9:.3f} GB each"
        assert any(f"with stage {stage} " in one and told in one for one in text.splitlines())


def convolutions(num_classes, in_channels):
    """Of 5 channels, then of 7."""
    conv, pool = torch.nn.Conv3d, torch.nn.AdaptiveAvgPool3d
    maps = conv(in_channels, 5, 3, padding=1), conv(5, 7, 3, padding=1), pool(1)
    return torch.nn.Sequential(*maps, torch.nn.Flatten(), torch.nn.Linear(7, num_classes))


def test_halos_are_those_of_arithmetic_by_hand(capsys):
    network = ["~model.width", f"model._target_={__name__}.convolutions"]
    words = ["data.image_size=[64,100,110]", "data.batch_size=5", "parallel.grid=[2,1,1]"]
    assert look(config("parallel=sp", *network, *words))
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("    0  "))
    # forward: a slice of 3 and of 5 channels; backward: the gradient of that of 5
    assert line.endswith(f" {4 * 5 * 100 * 110 * (3 + 5 + 5) / 1e6:.2f}")


def test_a_network_of_volumes_has_tiles_boxes_halos_and_memory(capsys):
    network = ["model=unet3d", "model.depth=2", "data.batch_size=1"]
    given = config(
        *(*network, "parallel=sp+lp", "parallel.grid=[2,1,3]"),
        *("data.image_size=[17,16,25]", "comm.map=true"),
    )
    assert look(given)
    lines = capsys.readouterr().out.splitlines()
    placement = placement_of(given.parallel, 3)
    assert lines[0] == f"layout: {placement.describe()}, images of 17x16x25"
    assert lines[-1] == "it would run"
    first = next(line for line in lines if line.startswith("    0  "))
    assert "8 to 9 x 16 x 8 to 9" in first
    rows = [line.split() for line in lines]
    at = rows.index(["rank", "replica", "stage", "slices", "rows", "columns"])
    assert rows[at + 6][-3:] == ["8:17", "0:16", "16:25"]
    assert all(float(one) > 0 for one in first.split()[-2:])
    assert sum("GB each" in line for line in lines) == placement.stages


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        (
            ["parallel=sp+pp", "data.batch_size=3", "parallel.schedule=foo"],
            ["unknown schedule foo", "data.batch_size=3 cannot be split into parallel.m"],
        ),
        (["parallel=sp", "parallel.grid=[2,99]"], ["65x48 is smaller than the grid 2x99"]),
        (["parallel=lp", "parallel.stages=99"], ["cannot be cut into 99 stages"]),
        (["parallel=sp", "task=segmentation"], ["returns (6, 10) for 6 masks of 65x48, but task"]),
        (["parallel=sp", "model=unet", "task=multilabel"], ["for 6 images with 10 classes each"]),
        (["parallel=sp+lp", "parallel.cut=[layr2]"], ["the network calls no module 'layr2'"]),
        (["trainer.precision=int8", "parallel.grid=x"], ["precision=int8", "parallel.grid must"]),
        (["parallel=sp", "task.class_weights=[1]"], ["task.class_weights has 1 weights for 10"]),
        (["trainer.freeze=[zz.*]"], ["no parameter matches zz.*"]),
        (
            ["parallel.stream=[2,2]", "parallel.stream_to=/scratch"],
            ["has no effect without trainer.memory_limit_gb"],
        ),
        (["weights=gone", "ckpt_path=nowhere"], ["weights=gone is not", "ckpt_path=nowhere"]),
        (["parallel=sp", "model.num_classes=x"], ["model=spatialdl.models.resnet18 cannot be bu"]),
    ],
)
def test_every_error_is_named(overrides, sentences, capsys):
    assert not train._print_preflight(config(*overrides), overrides)
    errors = [one for one in capsys.readouterr().out.splitlines() if one.startswith("error: ")]
    for sentence in sentences:
        assert sum(sentence in one for one in errors) == 1, (sentence, errors)
    assert len(errors) == len(sentences)


def test_what_is_refused_is_told_with_its_line(capsys):
    network = ["~model.width", "~model.num_classes", "~model.in_channels"]
    words = f"model._target_={REFUSED}", "data.num_classes=3"
    assert not look(config("parallel=sp", *words, *network))
    text = capsys.readouterr().out
    assert text.count("refused: ") == 4
    assert "refused: torch.Tensor.cumsum at " in text
    assert "in inner.1 (Cumulated)" in text
    assert text.endswith("it would not run: 4 problems\n")


def test_channels_are_divided(capsys):
    layout = ("parallel=sp+lp", "parallel.grid=[2,1]", "parallel.tensor=[1,2]", "comm.map=true")
    assert look(config(*layout, "parallel.cut=[layer3]"))
    text = capsys.readouterr().out
    assert text.startswith("layout: 1 replica x (2x1 + 2 by channels) = 4 ranks, images of 65x48")
    assert "1 of 2" in text
    assert max(map(len, text.splitlines())) <= 100
    (said,) = (line for line in text.splitlines() if line.startswith("stage 1 divides"))
    assert said.startswith("stage 1 divides channels over 2 ranks, each of which sends 0.")
    assert "     2 with stage 1 " in text


def test_a_plan_of_what_is_divided_is_followed(capsys):
    """It was left out: weights were counted as divided otherwise."""
    found = []
    for words in ([], ["parallel.tensor_plan={layer4: replicate}"]):
        assert look(config("parallel=none", "parallel.tensor=2", *words))
        rows = capsys.readouterr().out.splitlines()
        found.append([line for line in rows if line[:5].strip().isdigit()])
    assert found[0] != found[1]
    assert not look(
        config("parallel=none", "parallel.tensor=2", "parallel.tensor_plan={no: input}")
    )
    assert "tensor_plan names 'no'" in capsys.readouterr().out


def test_virtual_tiles_have_memory_and_a_store(capsys):
    words = ["parallel=sp", "parallel.grid=[2,1]", "data.image_size=[130,128]", "device=cuda"]
    assert look(config(*words, "parallel.stream=[2,2]", "trainer.memory_limit_gb=0.005"))
    text = capsys.readouterr().out
    assert "65 x 128" in text
    assert "2x2 virtual tiles: activations within 0.005 GB, at least 0.0" in text
    assert "GB stored in pinned host memory" in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("it would run\n")
    assert look(config("parallel.stream=[2,2]"))
    assert "all activations stay in memory, without trainer.mem" in capsys.readouterr().out
