from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command
from spatialdl.errors import SlideError
from spatialdl.slides.batch.executors import (
    ProcessExecutor,
    RankExecutor,
    SerialExecutor,
    batch_executor,
    count_tiles,
    executor_of_ranks,
)
from tests.vision import import_path

ROOT = Path(__file__).resolve().parents[3]


def count_and_pid(tiles: int) -> int:
    count_tiles(tiles)
    return os.getpid()


def refused() -> None:
    count_tiles(1)
    raise SlideError("slide a.svs: é")


def test_this_process_does_it_at_once_and_tells() -> None:
    seen: list[int] = []
    with batch_executor(1, None, seen.append) as crew:
        assert isinstance(crew, SerialExecutor)
        futures = [crew.submit(partial(count_and_pid, tiles)) for tiles in (16, 5)]
        assert [future.result() for future in futures] == [os.getpid()] * 2
        assert isinstance(crew.submit(refused).exception(), SlideError)
        assert crew.counted() == 22
    assert seen == [16, 21, 22]


def test_telling_where_nobody_watches_does_nothing() -> None:
    count_tiles(3)


def test_processes_do_it_and_tell() -> None:
    with batch_executor(2, None, lambda tiles: None) as crew:
        futures = [crew.submit(partial(count_and_pid, 16)) for _ in range(crew.room)]
        assert os.getpid() not in {future.result() for future in futures}
        error = crew.submit(refused).exception()
        assert isinstance(error, SlideError)
        assert str(error) == "slide a.svs: é"
        assert crew.counted() == 16 * crew.room + 1


def test_processes_are_replaced_when_one_dies() -> None:
    with batch_executor(1 + 1, None, lambda tiles: None) as crew:
        assert isinstance(crew.submit(partial(os._exit, 1)).exception(), BrokenProcessPool)
        with pytest.raises(BrokenProcessPool):
            crew.submit(os.getpid)
        crew.renew()
        assert crew.submit(os.getpid).result() != os.getpid()


def test_ctrl_c_is_left_to_the_process_that_hands_out() -> None:
    with batch_executor(2, None, lambda tiles: None) as crew:
        assert crew.submit(partial(signal.raise_signal, signal.SIGINT)).exception() is None


def test_stopping_does_not_wait_for_work() -> None:
    crew = ProcessExecutor(2)
    futures = [crew.submit(signal.pause) for _ in range(6)]  # which never ends
    crew.stop()
    for future in futures:
        with pytest.raises((CancelledError, BrokenProcessPool)):
            future.result()


AFTER_A_LOADER = """
import signal
from spatialdl.data.loader import Loader
from spatialdl.slides.batch.executors import ProcessExecutor, count_tiles
from tests.data.numbers import batching, views
def work():
    count_tiles(1)
    signal.pause()
if __name__ == "__main__":
    loader = Loader(views(4), batching(2), workers=1)
    list(loader.batches())
    loader.close()
    crew = ProcessExecutor(1)
    crew.submit(work)
    while not crew.counted():
        pass
    crew.stop()
    print("stopped", flush=True)
"""


def test_stopping_ends_processes_of_the_fork_server_of_a_loader(tmp_path) -> None:
    """Which keeps SIGTERM from those it starts: they went on for ever."""
    (tmp_path / "after.py").write_text(AFTER_A_LOADER)
    done = subprocess.run(
        [sys.executable, tmp_path / "after.py"],
        env={**os.environ, "PYTHONPATH": import_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


ORPHANS = """
import os, signal, sys
from spatialdl.slides.batch.executors import ProcessExecutor
if __name__ == "__main__":
    crew = ProcessExecutor(2)
    for future in [crew.submit(os.getpid) for _ in range(4)]:
        future.result()
    crew.submit(signal.pause)
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_when_their_parent_is_killed(tmp_path) -> None:
    (tmp_path / "orphans.py").write_text(ORPHANS)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "orphans.py"],
        env={**os.environ, "PYTHONPATH": import_path()},
        stdout=subprocess.PIPE,
        text=True,
    )
    # they all hold the other end of the pipe, so that this waits until the last of them is gone
    out, _ = process.communicate(timeout=250)
    assert (process.returncode, out) == (-signal.SIGKILL, "ready\n")


RANKS = """
import os
from functools import partial
from spatialdl.slides.batch.executors import RankExecutor, batch_executor, executor_of_ranks

int_of_x = partial(int, "x")

with executor_of_ranks() as (first, executor):
    if first:
        with batch_executor(1, executor, print) as crew:
            assert isinstance(crew, RankExecutor)
            found = [crew.submit(os.getpid) for _ in range(40)]
            error = type(crew.submit(int_of_x).exception()).__name__
            pids = {future.result() for future in found}
            print(crew.room, os.getpid() in pids, len(pids) <= 2, error, flush=True)
print("ended", flush=True)
"""


def test_ranks_do_what_the_first_hands_out(tmp_path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        [*mpiexec_command(3), sys.executable, tmp_path / "ranks.py"],
        env={
            **os.environ,
            "PYTHONPATH": import_path(),
            "OMPI_MCA_mpi_yield_when_idle": "1",
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "4 False True ValueError",
        "ended",
        "ended",
        "ended",
    ]


def test_one_process_needs_no_mpi() -> None:
    with executor_of_ranks() as (first, executor):
        assert (first, executor) == (True, None)


def test_a_rank_that_died_is_not_replaced() -> None:
    class Executor:
        num_workers = 3

    crew = RankExecutor(Executor())
    assert (crew.room, crew.counted()) == (6, 0)
    with pytest.raises(BrokenProcessPool, match="rank"):
        crew.renew()
