"""Work is handed out to this process, others or ranks, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.batch import sharing
from spatialdl.slides.batch.executors import (
    RankExecutor,
    SerialExecutor,
    batch_executor,
    count_tiles,
    executor_of_ranks,
)
from spatialdl.slides.batch.sharing import Work, share
from tests.slides.batch.batches import in_python
from tests.slides.batch.calls import count_and_pid, die, die_once, refused, write


def nothing(*_: object) -> None:
    """Watches."""


def noted(found: list[Any], *more: Work) -> Callable[[Any], Iterator[Work]]:
    def then(result: Any) -> Iterator[Work]:
        found.append(result)
        yield from more

    return then


def test_the_most_urgent_goes_first_and_what_follows_is_done():
    found: list[Any] = []
    last = Work((0,), lambda: "first of all, once it is known", noted(found))
    works = [
        Work((2, 1), lambda: "third", noted(found)),
        Work((1, 9), lambda: "first", noted(found, last)),
        Work((2, 0), lambda: "second", noted(found)),
    ]
    share(SerialExecutor(nothing), works, lambda: None)
    assert found == ["first", "first of all, once it is known", "second", "third"]


def test_an_exception_is_a_result_and_ctrl_c_is_none():
    found: list[Any] = []
    works = [Work((0,), lambda: 1 // 0, noted(found)), Work((1,), lambda: 1, noted(found))]
    share(SerialExecutor(nothing), works, lambda: None)
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1] == 1

    def pressed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share(SerialExecutor(nothing), [Work((0,), pressed, noted([]))], lambda: None)


class Crew:
    """Whose calls end when nothing more is handed out; what is `None` dies, with all others."""

    room = 3

    def __init__(self) -> None:
        self.under_way: list[tuple[Future[Any], Any]] = []
        self.together: list[list[Any]] = []

    def submit(self, call: Any) -> Future[Any]:
        self.under_way.append((Future(), call))
        return self.under_way[-1][0]

    def counted(self) -> int:
        return 0

    def renew(self) -> None:
        self.under_way.clear()

    def end(self, *_: object) -> Any:
        calls = [call for _, call in self.under_way]
        self.together.append(calls)
        for future, call in self.under_way:
            if None in calls:
                future.set_exception(BrokenExecutor())
            else:
                future.set_result(call)
        done = {future for future, _ in self.under_way}
        self.under_way.clear()
        return done, set()


def test_whoever_died_is_tried_with_nothing_beside_it(monkeypatch):
    crew, found = Crew(), []
    monkeypatch.setattr(sharing, "wait", crew.end)
    works = [Work((k,), call, noted(found)) for k, call in enumerate([1, None, 2, 3, 4])]
    share(crew, works, lambda: None)
    assert crew.together[0] == [1, None, 2]  # no more than there is room for
    assert sorted(crew.together[1:4], key=str) == [[1], [2], [None]]
    assert crew.together[4:] == [[3, 4]]
    assert sorted(result for result in found if isinstance(result, int)) == [1, 2, 3, 4]
    assert len(found) == 5


@pytest.mark.parametrize("how", ["kill", pytest.param("exit", marks=pytest.mark.slow)])
def test_only_the_one_that_kills_its_process_fails(tmp_path, how):
    found: list[Any] = []
    more = Work((99,), partial(write, tmp_path / "more"), noted(found))
    calls = [partial(write, tmp_path / str(k)) for k in range(12)]
    works = [Work((k,), call, noted(found)) for k, call in enumerate(calls)]
    works.append(Work((4, 1), partial(die, tmp_path / "guilty", how), noted(found, more)))
    unlucky = Work((0,), partial(die_once, tmp_path / "unlucky"), noted(found))
    with batch_executor(2, None, nothing) as crew:
        share(crew, works, lambda: None)
        share(crew, [unlucky], lambda: None)
    (failed,) = (result for result in found if isinstance(result, Exception))
    assert isinstance(failed, BrokenExecutor)
    found.remove(failed)
    # what follows from work that died goes on, and dying once is bad luck
    assert sorted(found) == sorted(["more", "survived", *map(str, range(12))])
    # maybe beside others, then once by itself, or it would take others with it again
    assert len((tmp_path / "guilty").read_text()) <= 2


def test_this_process_does_it_at_once_and_tells():
    seen: list[int] = []
    with batch_executor(1, None, seen.append) as crew:
        assert isinstance(crew, SerialExecutor)
        futures = [crew.submit(partial(count_and_pid, tiles)) for tiles in (16, 5)]
        assert [future.result() for future in futures] == [os.getpid()] * 2
        assert isinstance(crew.submit(refused).exception(), SlideError)
        assert crew.counted() == 22
    assert seen == [16, 21, 22]


def test_processes_do_it_and_tell_and_are_replaced_when_one_dies():
    count_tiles(3)  # where nobody watches it does nothing
    with batch_executor(2, None, nothing) as crew:
        futures = [crew.submit(partial(count_and_pid, 16)) for _ in range(crew.room)]
        assert os.getpid() not in {future.result() for future in futures}
        error = crew.submit(refused).exception()
        assert isinstance(error, SlideError)
        assert str(error) == "slide a.svs: é"
        assert crew.counted() == 16 * crew.room + 1
        # Ctrl-C is left to the process that hands out
        assert crew.submit(partial(signal.raise_signal, signal.SIGINT)).exception() is None
        assert isinstance(crew.submit(partial(os._exit, 1)).exception(), BrokenProcessPool)
        with pytest.raises(BrokenProcessPool):
            crew.submit(os.getpid)
        crew.renew()
        assert crew.submit(os.getpid).result() != os.getpid()


AFTER_A_LOADER = """
import signal
from spatialdl.slides.batch.executors import ProcessExecutor, count_tiles
def work():
    count_tiles(1)
    signal.pause()
if __name__ == "__main__":
    from spatialdl.data.loader import Loader
    from tests.data.numbers import batching, views
    loader = Loader(views(4), batching(2), workers=1)
    list(loader.batches())
    loader.close()
    crew = ProcessExecutor(1)
    futures = [crew.submit(work) for _ in range(3)]
    while not crew.counted():
        pass
    crew.stop()
    for future in futures:
        try:
            future.result()
        except BaseException as error:
            print(type(error).__name__, flush=True)
"""


def test_stopping_does_not_wait_for_work(tmp_path):
    """Processes of the fork server of a loader keep SIGTERM from it: they went on for ever."""
    (tmp_path / "after.py").write_text(AFTER_A_LOADER)
    done = in_python(tmp_path / "after.py")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert set(done.stdout.splitlines()) <= {"CancelledError", "BrokenProcessPool"}


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


def test_processes_end_when_their_parent_is_killed(tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    # they all hold the other end of the pipe, so that this waits until the last of them is gone
    done = in_python(tmp_path / "orphans.py")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n")


def test_one_process_needs_no_mpi_and_a_rank_that_died_is_not_replaced():
    with executor_of_ranks() as found:
        assert found == (True, None)

    class Executor:
        num_workers = 3

    crew = RankExecutor(Executor())
    assert (crew.room, crew.counted()) == (6, 0)
    with pytest.raises(BrokenProcessPool, match="rank"):
        crew.renew()
