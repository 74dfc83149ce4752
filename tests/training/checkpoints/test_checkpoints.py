"""Saved and resumed runs in a single process; other layouts are in tests/mpi/training."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints import writing
from spatialdl.training.checkpoints.reading import Checkpoint
from tests.data.conftest import flip
from tests.training.checkpoints.runs import checkpoints, losses, network, table, train

NO_BEST = "trainer.checkpoint.best=null"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of 8 steps with checkpoints after 2, 4, 6 and 8."""
    path = tmp_path_factory.mktemp("whole")
    train(path, "trainer.checkpoint.every_steps=2", "trainer.checkpoint.keep=9", NO_BEST)
    return path


@pytest.fixture
def run_dir(whole, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "run")


def test_a_run_goes_on_bit_for_bit_where_it_was_saved(whole, tmp_path):
    path = whole / "checkpoints" / "step-00000004"
    ours = train(tmp_path, f"ckpt_path={path}", NO_BEST)
    assert losses(tmp_path) == losses(whole)
    assert [int(row["step"]) for row in table(tmp_path / "metrics.csv")] == list(range(1, 9))
    assert table(tmp_path / "validation.csv") == table(whole / "validation.csv")
    assert ours.progress.step == 8
    assert checkpoints(tmp_path) == [8]


def test_a_finished_run_has_nothing_left_to_do_until_it_is_made_longer(run_dir, whole, tmp_path):
    trainer = train(run_dir, "ckpt_path=latest", NO_BEST)
    assert trainer.progress.step == 8
    assert losses(run_dir) == losses(whole)
    for name in ("validation.csv", "predictions.csv"):
        assert (run_dir / name).read_text() == (whole / name).read_text()
    train(tmp_path / "short", "trainer.max_steps=4", NO_BEST)
    train(tmp_path / "short", "trainer.max_steps=8", "ckpt_path=latest", NO_BEST)
    assert losses(tmp_path / "short") == losses(whole)
    assert checkpoints(tmp_path / "short") == [4, 8]


def test_a_run_that_was_killed_before_it_removed_the_others_does_so_when_it_goes_on(
    tmp_path, monkeypatch
):
    """A run that had made its last step kept more than it should."""
    often = ("trainer.checkpoint.every_steps=2", "trainer.checkpoint.keep=1", NO_BEST)
    with monkeypatch.context() as during:
        during.setattr(writing, "prune", lambda *_: None)
        train(tmp_path, *often)
    assert checkpoints(tmp_path) == [2, 4, 6, 8]
    train(tmp_path, "ckpt_path=latest", "trainer.checkpoint.keep=3", NO_BEST)
    assert checkpoints(tmp_path) == [2, 4, 6, 8], "a finished run with another keep"
    train(tmp_path, *often, "ckpt_path=latest")
    assert checkpoints(tmp_path) == [8]


def test_latest_starts_anew_where_there_is_none(tmp_path):
    assert train(tmp_path, "ckpt_path=latest", "trainer.max_steps=2").progress.step == 2
    assert checkpoints(tmp_path) == [2]


def test_checkpoints_of_an_earlier_run_are_not_lost(run_dir):
    with pytest.raises(CheckpointError, match=r"up to step-00000008: resume with ckpt_path=latest"):
        train(run_dir)
    assert checkpoints(run_dir) == [2, 4, 6, 8]


def test_going_on_before_the_end_leaves_the_rest_of_the_curve(run_dir, whole):
    path = run_dir / "checkpoints" / "step-00000004"
    train(run_dir, f"ckpt_path={path}", "trainer.max_steps=6", NO_BEST, "trainer.checkpoint.keep=3")
    assert len(table(run_dir / "metrics.csv")) == 6
    assert losses(run_dir) == losses(whole)[:6]
    assert checkpoints(run_dir) == [2, 4, 6]


@pytest.mark.parametrize("file", ["stage-00.safetensors", "checkpoint.json"])
def test_a_flipped_bit_is_seen_and_the_checkpoint_before_taken(file, run_dir, whole, caplog):
    flip(run_dir / "checkpoints" / "step-00000008" / file)
    with caplog.at_level(logging.INFO):
        train(run_dir, "ckpt_path=latest", NO_BEST)
    (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert f"step-00000008 is damaged: {'' if file.endswith('json') else file}" in warning
    assert "trying the previous one, step-00000006" in warning
    assert "resuming after step 6" in caplog.text
    assert losses(run_dir) == losses(whole)


def test_where_all_are_damaged_there_is_an_error(run_dir):
    for step in (2, 4, 6, 8):
        flip(run_dir / "checkpoints" / f"step-{step:08d}" / "stage-00.safetensors")
    with pytest.raises(CheckpointError, match="as are the 3 other checkpoints"):
        train(run_dir, "ckpt_path=latest")
    one = run_dir / "checkpoints" / "step-00000006"
    with pytest.raises(CheckpointError, match=r"6 is damaged: stage-00\.safetensors was"):
        train(run_dir, f"ckpt_path={one}")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=1", "trained with seed=0, but this run has seed=1"),
        ("++model.hidden=5", r"'0\.weight' is 4x3x3x3, but that of model._target_ is 5x3x3x3"),
        ("++model._target_=spatialdl.models.resnet18", "of another network: it has no"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(override, sentence, whole, tmp_path):
    with pytest.raises(CheckpointError, match=sentence):
        train(tmp_path, f"ckpt_path={whole}", override)
    assert not checkpoints(tmp_path)


def test_what_else_is_different_is_said_and_holds(whole, tmp_path, caplog):
    path = whole / "checkpoints" / "step-00000004"
    with caplog.at_level(logging.INFO):
        train(tmp_path, f"ckpt_path={path}", "optimizer.lr=0.01", "parallel.microbatches=2")
    assert "optimizer.lr=0.01 (was 0.05)" in caplog.text
    assert "batches are now split into 2 slices" in caplog.text
    rates = [float(row["learning_rate"]) for row in table(tmp_path / "metrics.csv")]
    assert rates == [0.05] * 4 + [0.01] * 4


def test_the_learning_rate_follows_a_longer_schedule(tmp_path):
    cosine = ("scheduler=cosine", "scheduler.warmup_steps=2", NO_BEST)
    train(tmp_path / "run", *cosine, "trainer.max_steps=4")
    train(tmp_path / "run", *cosine, "ckpt_path=latest")
    train(tmp_path / "whole", *cosine)
    ours, whole = (
        [row["learning_rate"] for row in table(tmp_path / name / "metrics.csv")]
        for name in ("run", "whole")
    )
    assert ours[4:] == whole[4:]


def test_a_checkpoint_has_plain_names_and_nothing_pickled(whole):
    folder = whole / "checkpoints" / "step-00000004"
    content = json.loads((folder / "checkpoint.json").read_text())
    assert (content["step"], content["epoch"], content["batch"]) == (4, 1, 1)
    assert content["config"]["optimizer"]["lr"] == 0.05
    assert content["optimizer"][0]["momentum"] == 0.9
    assert set(content["versions"]) == {"spatialdl", "torch", "python"}
    assert [row["step"] for row in content["validations"]] == [3]
    names: set[str] = set()
    for path in folder.iterdir():
        if path.name != "checkpoint.json":
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
    assert {"0.weight", "1.running_mean", "1.num_batches_tracked"} <= names
    assert "optimizer/0.weight/momentum_buffer" in names


def test_the_best_checkpoint_stays_and_is_named(tmp_path):
    train(tmp_path, "trainer.validate_every=1", "trainer.checkpoint.keep=1")
    rows = table(tmp_path / "validation.csv")
    best = min(rows, key=lambda row: float(row["loss"]))
    name = (tmp_path / "checkpoints" / "best").read_text().strip()
    assert name == f"step-{int(best['step']):08d}"
    assert set(checkpoints(tmp_path)) == {int(best["step"]), 8}
    content = json.loads((tmp_path / "checkpoints" / name / "checkpoint.json").read_text())
    assert content["best"]["value"] == float(best["loss"])


def test_a_run_that_gets_no_better_stops_early_and_stays_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    early = ("trainer.early_stopping.metric=accuracy", "trainer.early_stopping.patience=2")
    early += ("trainer.validate_every=1", "optimizer.lr=0")  # the same each time
    assert train(tmp_path, *early).progress.step == 3
    assert len(losses(tmp_path)) == 3
    why = "Stopped early after step 3 of 8: accuracy has not improved on"
    assert why in caplog.text
    assert why in (tmp_path / "report.html").read_text()
    assert train(tmp_path, *early, "ckpt_path=latest").progress.step == 3
    more = (*early[:1], "trainer.early_stopping.patience=4", *early[2:])
    assert train(tmp_path, *more, "ckpt_path=latest").progress.step == 5


def test_a_frozen_run_begins_with_weights_and_goes_on_with_its_own(tmp_path):
    start = {key: value + 0.5 for key, value in network().state_dict().items()}
    torch.save(start, tmp_path / "start.pt")
    chosen = ("trainer.freeze=[0.*,1.*]", f"weights={tmp_path / 'start.pt'}", "trainer.ema=0.5")
    chosen += ("optimizer=adamw", "task.mixup=0.4", "trainer.checkpoint.every_steps=3", NO_BEST)
    whole = train(tmp_path / "whole", *chosen, "trainer.checkpoint.keep=9")
    path = tmp_path / "whole" / "checkpoints" / "step-00000003"
    ours = train(tmp_path / "run", *chosen, f"ckpt_path={path}")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    tables = [(tmp_path / run / "predictions.csv").read_text() for run in ("run", "whole")]
    assert tables[0] == tables[1]
    found, expected = ours.parts.pipeline.state_dict(), whole.parts.pipeline.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(found["0.weight"], start["0.weight"].double())
    average = ours.parts.update.average.state_dict()
    assert torch.equal(average["0.weight"], start["0.weight"].double())


def test_a_run_with_other_layers_frozen_goes_on(tmp_path):
    train(tmp_path, "trainer.max_steps=3", "optimizer.momentum=0.9", NO_BEST)
    more = ("ckpt_path=latest", "trainer.freeze=[0.*,1.*]", "trainer.max_steps=6", NO_BEST)
    before = Checkpoint(tmp_path / "checkpoints" / "step-00000003").read("0.weight")
    ours = train(tmp_path, *more)
    assert torch.equal(ours.parts.pipeline.state_dict()["0.weight"], before)
    again = train(tmp_path, "ckpt_path=latest", "trainer.max_steps=8", NO_BEST)
    assert not torch.equal(again.parts.pipeline.state_dict()["0.weight"], before)
