"""One process that is killed before a change it makes to the file system, whichever that is."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from itertools import count
from pathlib import Path

import pytest
import torch._dynamo
import torchmetrics.functional.classification

from spatialdl.training import reporter, run_directory, trainer
from tests.soak.outcome import assert_same_run
from tests.training.checkpoints.runs import noisy, train

IMPORTED_ONCE = torch._dynamo, torchmetrics, trainer, noisy
"""For all children."""

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KILLED = 9

WORDS = [
    *("++model._target_=tests.training.checkpoints.runs.noisy", "trainer.max_steps=7"),
    *("trainer.checkpoint.every_steps=2", "trainer.validate_every=2", "trainer.checkpoint.keep=1"),
    *("trainer.ema=0.5", "optimizer=adamw", "scheduler=cosine", "ckpt_path=latest"),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def changes(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & TO_WRITE) and arguments[0] != os.devnull
    return event in CHANGES


def live(run_dir: Path, dies_at: int | None = None) -> bool:
    """Train, in a process of its own, to the end or until its so many-th change.

    Returns:
        Whether it came to the end.
    """
    child = os.fork()
    if child == 0:
        try:
            _live(run_dir, dies_at)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == 0


def _live(run_dir: Path, dies_at: int | None) -> None:
    run_directory.draw = reporter.save_report = lambda *_, **__: None  # they take long
    left = iter(range(dies_at)) if dies_at is not None else count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if changes(event, arguments) and next(left, None) is None:
            os._exit(KILLED)

    sys.addaudithook(hook)
    train(run_dir, *WORDS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run that nobody disturbs."""
    path = tmp_path_factory.mktemp("alone") / "run"
    assert live(path)
    return path


@pytest.mark.parametrize("stride", [53, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_wherever_it_was_killed(stride, alone, tmp_path):
    run_dir = tmp_path / "run"
    for change in count(stride - 1, stride):
        is_over = live(run_dir, change)
        assert is_over or live(run_dir)
        assert_same_run(run_dir, alone)
        shutil.rmtree(run_dir)
        if is_over:
            break
    assert change > 50
