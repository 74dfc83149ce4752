from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.feature_file import write_features
from spatialdl.data.loader import sample_order
from spatialdl.training.checks import check_config
from spatialdl.training.network.building import seed_generators
from spatialdl.training.settings import open_sources
from spatialdl.training.trainer import Trainer
from tests.bags import SMALL, WIDTH, bag_config, write_bags
from tests.fitting import fit, summary
from tests.training.test_trainer import groups


@pytest.fixture
def folder(tmp_path):
    return write_bags(tmp_path / "bags")


def opened(config):
    return open_sources(config.data, int(config.seed), config.task.name)


def table(folder, *rows, head="slide,label"):
    (folder / "labels.csv").write_text("\n".join([head, *rows]) + "\n")


def run(run_dir, folder, *words) -> Trainer:
    trainer = Trainer(bag_config(folder, *words), SingleProcess())
    fit(trainer, run_dir)
    return trainer


def test_training_is_a_plain_loop_over_bags(tmp_path, folder) -> None:
    words = (*SMALL["abmil"], "model.dropout=0", "data.batch_size=2", "optimizer.lr=0.01")
    config = bag_config(folder, *words, "task.class_weights=[1,2,3]")
    trainer = Trainer(config, SingleProcess())
    fit(trainer, tmp_path / "run")
    losses = summary(tmp_path / "run")["loss"]

    source = opened(config).train
    seed_generators(0)
    network = instantiate(config.model).double()
    optimizer = torch.optim.AdamW(groups(network), lr=0.01, weight_decay=0.01)
    expected, weights = [], torch.tensor([1.0, 2, 3], dtype=torch.float64)
    for epoch in range(3):
        order = sample_order(len(source), 0, epoch)
        for first in range(0, len(source), 2):
            optimizer.zero_grad()
            some, total = order[first : first + 2], 0.0
            for sample in some:
                bag = torch.from_numpy(source.read(sample).T[None].copy())
                label = torch.from_numpy(source.labels[[sample]])
                loss = F.cross_entropy(network(bag), label, reduction="sum") * weights[label[0]]
                (loss / len(some)).backward()
                total += float(loss.detach()) / len(some)
            expected.append(total)
            optimizer.step()
    assert losses == pytest.approx(expected, abs=1e-10)
    rows = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["slide", "s6", "s7", "s8"]


@pytest.mark.parametrize("task", ["multilabel", "regression", "survival"])
def test_other_labels_train(tmp_path, folder, task) -> None:
    columns = "[time,event]" if task == "survival" else "[er,pr]"
    words = (f"task={task}", f"data.columns={columns}", "data.num_classes=null")
    bins = ("data.num_classes=2",) if task == "survival" else ()
    words += ("trainer.checkpoint.best=null", "trainer.max_epochs=1")
    run(tmp_path / "run", folder, *SMALL["mean"], *words, *bins)
    head, *rows = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
    assert len(rows) == 3
    if task == "survival":
        assert head.endswith("time,event,risk,survival_1,survival_2")
        found = summary(tmp_path / "run")
        assert "c_index" in found["validation"][-1]


def test_risks_train_and_one_slide_a_step_is_refused(tmp_path, folder) -> None:
    words = (*SMALL["mean"], "task=survival", "task.loss=cox", "trainer.checkpoint.best=c_index")
    trainer = run(tmp_path / "run", folder, *words, "data.batch_size=4")
    assert trainer.parts.sources.num_classes == 1
    head, *rows = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
    assert head.endswith("time,event,risk")
    assert len(rows) == 3
    found = summary(tmp_path / "run")
    assert len(found["loss"]) == 6
    assert found["loss"][0] > 0
    for word, message in {
        "data.batch_size=1": "compares the slides of a step",
        "data.num_classes=3": "task.loss=cox predicts a single risk",
        "task.loss=efron": "use null.*or cox",
    }.items():
        with pytest.raises(ValueError, match=message):
            Trainer(bag_config(folder, *words, "data.batch_size=2", word), SingleProcess())


def test_slides_that_do_not_fit_are_named(tmp_path, folder, caplog) -> None:
    table(folder, "s0,a", "s1,b", "x,a")
    with pytest.raises(ValueError, match=r"1 of 3 slides.*no feature file, such as x"):
        opened(bag_config(folder))
    write_features(folder / "s2.h5", np.zeros((0, WIDTH)), None)
    table(folder, "s0,a", "s1,b", "s2,a", "s3,", "x,a", "s4,b")
    with caplog.at_level(logging.INFO, "spatialdl.data"):
        found = opened(bag_config(folder, "data.skip_missing=true", "data.validation_fraction=0"))
    assert [file.slide for file in found.train.files] == ["s0", "s1", "s4"]
    assert found.names == ("a", "b")
    said = " ".join(record.getMessage() for record in caplog.records)
    for text in ("(x) have no feature file", "(s3) have no label", "(s2) have no tiles"):
        assert text in said


def test_patients_are_drawn_for_validation_class_by_class(folder) -> None:
    rows = [f"s{n},{'ab'[n % 2]},p{n // 2}" for n in range(8)]
    table(folder, *rows, head="slide,label,patient")
    found = opened(bag_config(folder, "data.validation_fraction=0.3"))
    held = {file.slide for file in found.validation.files}
    assert len(held) == 2  # both slides of a patient
    assert len({int(one[1:]) // 2 for one in held}) == 1
    assert not held & {file.slide for file in found.train.files}
    assert opened(bag_config(folder)).train.classes == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["s0,a", "s1,a"], "all slides have the same class, a"),
        (["s0,", "s1,"], "no slide has both tiles and a label"),
    ],
)
def test_labels_of_which_nothing_is_learned_are_refused(folder, rows, message) -> None:
    table(folder, *rows)
    with pytest.raises(ValueError, match=message):
        opened(bag_config(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parallel=pp", "parallel.stages=2 needs images of one size"),
        ("parallel=none parallel.tensor=2", "parallel.tensor=2 needs images of one size"),
        ("parallel=dp parallel.shard_state=true data.batch_size=2", "shard_state=true needs"),
        ("parallel=dp", "data.batch_size=1 leaves some of parallel.data=2 replicas"),
        ("task.mixup=0.2", "task.mixup=0.2 needs"),
        ("parallel.stream=[2]", r"parallel.stream=\[2\] needs images of one size"),
        ("data.labels=none.csv", "data.labels=none.csv is not a file"),
    ],
)
def test_layouts_for_images_of_one_size_are_refused(folder, words, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(bag_config(folder, *words.split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("task=segmentation", "but task=segmentation needs masks"),
        ("data.columns=[label,er]", "task=classification needs one label column"),
        ("data.max_tiles=0", "data.max_tiles=0 must be"),
        ("data.num_classes=5", "have 3 classes"),
        ("data.features=[]", "must be a folder of"),
        ("data.split=test", "no slides of data.split=test; it has train, val"),
        ("task=multilabel data.columns=[time]", "must be 1 .*0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder, words, message) -> None:
    with pytest.raises(ValueError, match=message):
        opened(bag_config(folder, *words.split()))
