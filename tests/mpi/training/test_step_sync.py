from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.errors import ShardError
from spatialdl.training import signals
from spatialdl.training.console import run_log
from spatialdl.training.signals import STOPPING
from spatialdl.training.step_sync import COUNTS, StepSync
from tests.mpi.training.small import trained

WORLD = MpiCommunicator(MPI.COMM_WORLD)
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = SIZE * (SIZE - 1) / 2  # the sum of their numbers
IS_LAST = RANK == SIZE - 1


class Place:
    """Step synchronisation with recorded calls on this rank."""

    def __init__(self, damaged: int = 0) -> None:
        self.went_on: list[tuple[float, float]] = []
        self.times: list[tuple[list[float], int]] = []
        self.progress = SimpleNamespace(stopped=None)
        writer = SimpleNamespace(
            status=lambda: (float(RANK), 100.0 * RANK),
            advance=lambda *sums: self.went_on.append(sums),
        )
        staging = SimpleNamespace(damage=lambda: damaged, raise_damage=self.raise_damage)
        split = SimpleNamespace(
            own=lambda: [RANK + 10.0 * part for part in range(COUNTS)],
            note=lambda *told: self.times.append(told),
        )
        self.meeting = StepSync(WORLD, writer, staging, self.progress, split)

    def raise_damage(self) -> None:
        raise ShardError("a shard is damaged")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(signals, "flags", lambda: [0.0] * len(STOPPING))


def test_each_number_is_added_up_and_reaches_whom_it_is_for():
    place = Place()
    assert place.meeting.after_step(0.5 + RANK) == 0.5 * SIZE + RANKS
    assert place.times == [([RANKS + 10.0 * part * SIZE for part in range(COUNTS)], SIZE)]
    assert place.went_on == [(RANKS, 100.0 * RANKS)]
    assert place.progress.stopped is None


def test_between_steps_no_time_is_counted():
    place = Place()
    place.meeting.between()
    assert place.times == []
    assert place.went_on == [(RANKS, 100.0 * RANKS)]


def test_damage_that_one_rank_has_found_ends_all():
    place = Place(damaged=int(IS_LAST))
    with pytest.raises(ShardError, match="a shard is damaged"):
        place.meeting.after_step(1.0)
    assert place.went_on == []


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_that_one_rank_has_seen_stops_all_and_stays(number, monkeypatch):
    place = Place()
    seen = [float(IS_LAST and one == number) for one in STOPPING]
    monkeypatch.setattr(signals, "flags", lambda: seen)
    place.meeting.after_step(1.0)
    assert place.progress.stopped == signal.Signals(number)
    monkeypatch.setattr(signals, "flags", lambda: [0.0] * len(STOPPING))
    place.meeting.between()
    assert place.progress.stopped == signal.Signals(number)


@pytest.mark.parametrize("kept", [0, 1])
def test_warnings_that_one_rank_has_kept_are_told_by_all_together(kept, monkeypatch):
    told = []
    monkeypatch.setattr(run_log, "kept_warnings", lambda: kept * int(IS_LAST))
    monkeypatch.setattr(run_log, "log_warnings", told.append)
    Place().meeting.after_step(1.0)
    assert told == [WORLD] * kept


LAYOUTS = {2: ["parallel=sp", "parallel=pp parallel.microbatches=2"], 3: ["parallel=sp+lp"]}


@pytest.mark.parametrize("layout", LAYOUTS.get(SIZE, []))
def test_all_ranks_are_called_alike_and_the_last_one_stops_them(layout, tmp_path) -> None:
    run_dir = Path(WORLD.bcast(str(tmp_path)))
    recorder = "_target_: tests.training.own_callbacks.Recorder"
    recorder = f"{{{recorder}, stop_at: 3, stopping_rank: {SIZE - 1}}}"
    words = ("model.width=2", "data.image_size=[40,36]", "data.samples=4", "data.batch_size=2")
    words += ("data.validation_samples=3", "trainer.validate_every=2", "trainer.max_steps=8")
    words += ("trainer.report=false",)
    words += (f"trainer.callbacks=[{recorder}]", *layout.split())
    trainer, summary = trained(run_dir, WORLD, *words)
    assert trainer.progress.step == 3
    assert trainer.progress.ended == "as was asked for"
    own = json.loads((run_dir / f"calls-{RANK}.json").read_text())
    assert all(one == own for one in WORLD.allgather(own))
    names = [(name, step) for name, step, *_ in own["calls"]]
    assert names[0] == ("fit_start", 0)
    assert names[-2:] == [("checkpoint", 3), ("fit_end", 3)]
    if RANK == 0:
        assert [loss for name, _, loss, _ in own["calls"] if name == "step_end"] == summary["loss"]


@pytest.mark.usefixtures("clean")
def test_all_ranks_warn_once_together(world, capsys):
    run_log.start_log(world.rank)
    log = logging.getLogger("spatialdl.somewhere")
    log.warning("everybody says this")
    if world.rank == world.size - 1:
        log.warning("the last one has a slow disk")
    if world.rank > 0:
        log.warning("all but the first are cold")
        assert run_log.kept_warnings() >= 2
    for _ in range(2):
        run_log.log_warnings(world)
    assert run_log.kept_warnings() == 0
    said = capsys.readouterr().out
    if world.rank > 0 or world.size == 1:
        assert world.size == 1 or said == ""
        return
    lines = [line.rpartition(" - ")[2] for line in said.splitlines()]
    cold = "rank 1" if world.size == 2 else f"{world.size - 1} ranks, first 1"
    assert sorted(lines) == sorted(
        [
            "everybody says this",
            f"rank {world.size - 1}: the last one has a slow disk",
            f"{cold}: all but the first are cold",
        ]
    )
