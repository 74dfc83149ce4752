from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spatialdl.slides.batch import sharing
from spatialdl.slides.batch.executors import SerialExecutor, batch_executor
from spatialdl.slides.batch.sharing import Work, share


def nothing(*_: object) -> None:
    """Watches."""


def noted(found: list[Any], *more: Work) -> Callable[[Any], Iterator[Work]]:
    def then(result: Any) -> Iterator[Work]:
        found.append(result)
        yield from more

    return then


def test_the_most_urgent_goes_first_and_what_follows_is_done() -> None:
    found: list[Any] = []
    last = Work((0,), lambda: "first of all, once it is known", noted(found))
    works = [
        Work((2, 1), lambda: "third", noted(found)),
        Work((1, 9), lambda: "first", noted(found, last)),
        Work((2, 0), lambda: "second", noted(found)),
    ]
    share(SerialExecutor(nothing), works, lambda: None)
    assert found == ["first", "first of all, once it is known", "second", "third"]


def test_an_exception_is_a_result() -> None:
    found: list[Any] = []
    works = [Work((0,), lambda: 1 // 0, noted(found)), Work((1,), lambda: 1, noted(found))]
    share(SerialExecutor(nothing), works, lambda: None)
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1] == 1


def test_ctrl_c_is_none() -> None:
    def pressed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share(SerialExecutor(nothing), [Work((0,), pressed, noted([]))], lambda: None)


def test_no_more_is_handed_out_than_there_is_room_for() -> None:
    class Crew:
        room = 3

        def __init__(self) -> None:
            self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
            self.most = 0

        def submit(self, call: Callable[[], Any]) -> Future[Any]:
            future: Future[Any] = Future()
            self.waiting.append((future, call))
            self.most = max(self.most, len(self.waiting))
            if len(self.waiting) == self.room:
                self.counted()
            return future

        def counted(self) -> int:
            while self.waiting:
                future, call = self.waiting.pop()
                future.set_result(call())
            return 0

        def renew(self) -> None:
            raise AssertionError

    crew, found = Crew(), []
    share(crew, [Work((k,), partial(abs, k), noted(found)) for k in range(10)], crew.counted)
    assert sorted(found) == [*range(10)]
    assert crew.most == crew.room


def write(path: Path) -> str:
    with path.open("a") as file:
        file.write("x")
    return path.name


def die(path: Path, how: str) -> None:
    write(path)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def die_once(path: Path) -> str:
    if not path.exists():
        die(path, "exit")
    return "survived"


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_only_the_one_that_kills_its_process_fails(tmp_path: Path, how: str) -> None:
    found: list[Any] = []
    calls = [partial(write, tmp_path / str(k)) for k in range(12)]
    calls.insert(4, partial(die, tmp_path / "guilty", how))
    with batch_executor(2, None, nothing) as crew:
        works = [Work((k,), call, noted(found)) for k, call in enumerate(calls)]
        share(crew, works, lambda: None)
    (failed,) = (result for result in found if isinstance(result, Exception))
    assert isinstance(failed, BrokenExecutor)
    found.remove(failed)
    assert sorted(found) == sorted(map(str, range(12)))
    # maybe beside others, then once by itself, or it would take others with it again
    assert len((tmp_path / "guilty").read_text()) <= 2


def test_a_process_that_dies_once_is_bad_luck(tmp_path: Path) -> None:
    found: list[Any] = []
    with batch_executor(2, None, nothing) as crew:
        work = Work((0,), partial(die_once, tmp_path / "unlucky"), noted(found))
        share(crew, [work], lambda: None)
    assert found == ["survived"]


def test_whoever_died_is_tried_with_nothing_beside_it() -> None:
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

    crew, found = Crew(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "wait", crew.end)
        works = [Work((k,), call, noted(found)) for k, call in enumerate([1, None, 2, 3, 4])]
        share(crew, works, lambda: None)
    assert crew.together[0] == [1, None, 2]
    assert sorted(crew.together[1:4], key=str) == [[1], [2], [None]]
    assert crew.together[4:] == [[3, 4]]
    assert sorted(result for result in found if isinstance(result, int)) == [1, 2, 3, 4]
    assert len(found) == 5


def test_what_follows_from_work_that_died_goes_on(tmp_path: Path) -> None:
    found: list[Any] = []
    more = Work((0,), partial(write, tmp_path / "more"), noted(found))
    works = [
        Work((0,), partial(die, tmp_path / "guilty", "exit"), noted(found, more)),
        Work((1,), partial(write, tmp_path / "other"), noted(found)),
    ]
    with batch_executor(2, None, nothing) as crew:
        share(crew, works, lambda: None)
    assert sorted(map(str, found))[1:] == ["more", "other"]
    assert (tmp_path / "other").exists()
