"""Jobs that are killed again and again come to the same end as one that is left alone.

Other kills than every day, more of them, in another layout, with more words for the command:

    SPATIALDL_SOAK_SEED=7 SPATIALDL_SOAK_KILLS=100 SPATIALDL_SOAK_LAYOUT=gems \\
        SPATIALDL_SOAK_WORDS="data.workers=1 trainer.precision=fp16-mixed" \\
        python -m pytest tests/soak -m slow -s
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch._dynamo
import torchmetrics.functional.classification

from spatialdl.data.writer import ShardWriter
from spatialdl.training import reporter, run_directory, trainer
from tests.composing import composed
from tests.soak.job import VALIDATE_EVERY, Job, Kill, drawn
from tests.soak.outcome import (
    Layout,
    assert_same_run,
    assert_same_tensors,
    rows,
    seen_by_step,
    state,
)
from tests.training.checkpoints.runs import TINY, noisy, train

SEED = int(os.environ.get("SPATIALDL_SOAK_SEED", "0"))
KILLS = int(os.environ.get("SPATIALDL_SOAK_KILLS", "20"))
LAYOUT = os.environ.get("SPATIALDL_SOAK_LAYOUT", "dp+sp")
WORDS = os.environ.get("SPATIALDL_SOAK_WORDS", "").split()

SAMPLES, BATCH = 41, 6
BATCHES = -(-SAMPLES // BATCH)
STEPS_A_KILL = 5
"""A run is so long that it does not end before the last of them."""

RUN = [
    *("model._target_=tests.soak.outcome.network", "data=shards", "data.image_size=[22,19]"),
    *(f"data.batch_size={BATCH}", "data.augment.crop=random", "data.augment.flip=0.5"),
    *("data.augment.rotate=true", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.05"),
    *("scheduler=cosine", "scheduler.warmup_steps=5", "trainer.ema=0.9", "trainer.clip_norm=0.5"),
    *("trainer.checkpoint.every_steps=3", f"trainer.validate_every={VALIDATE_EVERY}"),
    *("trainer.checkpoint.keep=2", "device=cpu", "ckpt_path=latest"),
]

# all cut a batch into four slices
LAYOUTS = {
    "dp+sp": Layout(4, "parallel=dp+sp parallel.microbatches=2", [[0, 1], [2, 3]], 2),
    "sp+pp": Layout(4, "parallel=sp+pp parallel.stages=3 parallel.microbatches=4", [[0, 1]], 4),
    "gems": Layout(4, "parallel=gems parallel.stages=4 parallel.microbatches=4", [[0], [3]], 2),
    "sp+pp on 3": Layout(3, "parallel=sp+pp parallel.microbatches=4", [[0, 1]], 4),
    "dp on 2": Layout(2, "parallel=dp parallel.microbatches=2", [[0], [1]], 2),
    "pp on 2": Layout(2, "parallel=pp parallel.microbatches=4", [[0]], 4),
    "none": Layout(1, "parallel=none parallel.microbatches=4", [[0]], 4),
}


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Images whose third channel is the number of the sample."""
    path = tmp_path_factory.mktemp("data") / "set"
    draw = np.random.default_rng(0)
    with ShardWriter(path, classes=["a", "b", "c"], shard_size=20_000) as writer:
        for number in range(SAMPLES + 9):
            image = draw.integers(0, 256, (27, 24, 3), np.uint8)
            image[..., 2] = number
            label = int(draw.integers(3))
            image[..., 0] //= label + 1
            split = "train" if number < SAMPLES else "val"
            writer.add(image, label, split, slide=f"slide {number % 5}", xy=(number, 0))
    return path


class Run:
    """A run, life by life.

    Args:
        folder: for all that belongs to it; it is made.
        words: of the command line, but for the layout.

    Attributes:
        lives: the layout of each, and the step after which it went on.
    """

    def __init__(self, folder: Path, data: Path, words: Sequence[str]) -> None:
        (folder / "disk").mkdir(parents=True)
        self.folder, self.path = folder, folder / "run"
        places = (
            f"data.path={data}",
            f"data.stage.to={folder / 'disk'}",
            f"hydra.run.dir={self.path}",
        )
        self._words = [*RUN, *places, *words]
        self.lives: list[tuple[Layout, int | None]] = []
        self.start_s = 0.0

    def job(self, layout: Layout, *, by_mpiexec: bool = True) -> Job:
        ranks = layout.ranks if by_mpiexec and layout.ranks > 1 else None
        return Job(self.folder, len(self.lives), ranks, [*self._words, *layout.words.split()])

    def to_the_end(self, layout: Layout) -> None:
        """A life that nobody disturbs."""
        with self.job(layout) as job:
            assert job.until(lambda: job.steps() > 0), job.log.read_text()
            self.start_s = time.monotonic() - job.started
            assert job.wait() == 0, job.log.read_text()
            self.lives.append((layout, job.begun_at()))

    def killed(self, layout: Layout, kill: Kill, start_s: float) -> None:
        """A life that ends before."""
        with self.job(layout, by_mpiexec=kill.by_mpiexec) as job:
            assert kill.reached(job, start_s), f"{kill}: has ended\n{job.log.read_text()}"
            under_way = job.steps() > 0
            assert job.kill(kill.victim, kill.signal), f"{kill}: has ended\n{job.log.read_text()}"
            at = time.monotonic()
            code = job.wait()
            gone = time.monotonic() - at
            begun, made = job.begun_at(), job.steps()
            print(f"{len(self.lives):2}: {kill}: from {begun}, {made} steps; {code}, {gone:.1f} s")
            assert code or job.ended_well()
            assert code == 0 or not (kill.asks and under_way), job.log.read_text()
            self.lives.append((layout, begun))

    def assert_every_sample_once(self) -> None:
        """In every epoch."""
        steps = seen_by_step(self.folder, self.lives)
        assert len(steps) == len(rows(self.path))
        for start in range(0, len(steps), BATCHES):
            samples = [sample for step in steps[start : start + BATCHES] for sample in step]
            assert sorted(samples) == list(range(SAMPLES))

    def assert_nothing_left(self) -> None:
        assert not list((self.folder / "disk").iterdir())


def soaked(
    tmp_path: Path, data: Path, kills: Sequence[Kill], layouts: Sequence[Layout], *words: str
) -> tuple[Run, Run]:
    """A run that is killed so often, and one that is left alone.

    Args:
        layouts: of the lives; the last is that of the run which is left alone.
    """
    print(f"SPATIALDL_SOAK_SEED={SEED} repeats this")
    epochs = f"trainer.max_epochs={2 + len(kills) * STEPS_A_KILL // BATCHES}"
    alone, other = (Run(tmp_path / name, data, [*words, epochs]) for name in ("alone", "killed"))
    alone.to_the_end(layouts[-1])
    for layout, kill in zip(layouts[:-1], kills, strict=True):
        other.killed(layout, kill.of(layout.ranks), alone.start_s)
    other.to_the_end(layouts[-1])
    for run in (alone, other):
        run.assert_every_sample_once()
        run.assert_nothing_left()
    return other, alone


@pytest.mark.slow
@pytest.mark.timeout(60 + 120 * KILLS)
def test_twenty_kills(data, tmp_path):
    layout = LAYOUTS[LAYOUT]
    run, alone = soaked(tmp_path, data, drawn(SEED, KILLS), [layout] * (KILLS + 1), *WORDS)
    assert_same_run(run.path, alone.path)


@pytest.mark.slow
def test_kills_of_a_run_that_changes_its_layout(data, tmp_path):
    layouts = [LAYOUTS[name] for name in ("dp+sp", "none", "sp+pp", "pp on 2", "gems", "dp on 2")]
    kills = drawn(SEED, len(layouts))
    words = "trainer.precision=float64", *WORDS
    run, alone = soaked(tmp_path, data, kills, [*layouts, LAYOUTS["none"]], *words)
    for ours, theirs in zip(rows(run.path), rows(alone.path), strict=True):
        assert {name: float(ours[name]) for name in ours} == pytest.approx(
            {name: float(theirs[name]) for name in theirs}, abs=1e-10
        )
    assert_same_tensors(state(run.path), state(alone.path), within=1e-10)


# --- one process that is killed before a change it makes to the file system, whichever that is

IMPORTED_ONCE = torch._dynamo, torchmetrics, trainer, noisy
"""For all children."""

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KILLED = 9

KEEPING = [
    *("++model._target_=tests.training.checkpoints.runs.noisy", "trainer.max_steps=7"),
    *("trainer.checkpoint.every_steps=2", "trainer.validate_every=2", "trainer.checkpoint.keep=1"),
    *("trainer.ema=0.5", "optimizer=adamw", "scheduler=cosine", "ckpt_path=latest"),
]


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
    train(run_dir, *KEEPING)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run that nobody disturbs."""
    composed("train", *TINY, *KEEPING)  # once for all children
    path = tmp_path_factory.mktemp("alone") / "run"
    assert live(path)
    return path


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("stride", [43, pytest.param(1, marks=pytest.mark.slow)])
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
