"""The script's part of a job; whole jobs are in tests/cluster/test_submitting.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spatialdl.submitting.job import _parser, end_markers, job_id, requeue_obstacle


def test_one_of_an_array_is_not_all_of_it():
    alone = {"SLURM_JOB_ID": "12"}
    assert job_id(alone) == "12"
    last = {**alone, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert job_id(last) == "12_3"


def test_a_run_that_ended_has_left_something_new(tmp_path):
    seen = [end_markers(tmp_path)]
    for name in ("stopped.json", "summary.json", "stopped.json"):
        (tmp_path / "new").write_text("{}")
        (tmp_path / "new").replace(tmp_path / name)
        seen.append(end_markers(tmp_path))
    assert seen[0] == []
    assert all(one != other for one, other in pairwise(seen))
    (tmp_path / "metrics.csv").touch()
    assert end_markers(tmp_path) == seen[-1]


@pytest.mark.parametrize(
    ("saved", "restarts", "reason"),
    [
        (20, 0, None),
        (20, 1, None),
        (20, 2, "launcher.requeue=2 reached; resume with ckpt_path=latest"),
        (
            None,
            0,
            "there is no checkpoint, it would restart from scratch (trainer.checkpoint.keep=0)",
        ),
    ],
)
def test_a_job_goes_on_if_there_is_something_to_go_on_from(saved, restarts, reason):
    assert requeue_obstacle({"step": 20, "checkpoint": saved}, restarts, 2) == reason


def test_the_words_of_the_ranks_are_left_as_they_are():
    words = ["--config-name", "train", "--ranks=7", "seed=1"]
    options = _parser().parse_args(["--ranks=3", "--requeue=5", "my run", *words])
    assert (options.ranks, options.requeue, options.run_dir) == (3, 5, Path("my run"))
    assert options.words == words
