from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.batch import running
from spatialdl.slides.batch.executors import SerialExecutor
from spatialdl.slides.batch.running import BatchRun
from spatialdl.slides.batch.steps import BatchRequest, Task
from tests.slides.batch.batches import TILES
from tests.slides.batch.test_steps import batch, task

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def tasks(small: Path) -> list[Task]:
    return [task(small / "a.tiff"), replace(task(small / "b.tiff"), bytes=10**9)]


def run(asked: BatchRequest, tasks: list[Task], *, dry: bool = False) -> BatchRun:
    made = BatchRun(asked, tasks, dry=dry)
    made.go(SerialExecutor(made.watch))
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order."""
    noted: list[str] = []
    calls = {name: getattr(running, name) for name in ("plan_slide", "cut_slide", "finish_slide")}
    for name, call in calls.items():

        def counted(*given: Any, call: Any = call, name: str = name) -> Any:
            number = f" {given[3]}" if name == "cut_slide" else ""
            noted.append(f"{name.split('_', maxsplit=1)[0]} {given[1].name}{number}")
            return call(*given)

        monkeypatch.setattr(running, name, counted)
    return noted


def test_the_largest_goes_first_and_what_is_begun_is_ended(
    tmp_path: Path, small: Path, tasks: list[Task], calls: list[str]
) -> None:
    made = run(batch(tmp_path, small, TILES), tasks)
    assert calls == [
        *("plan b", "cut b 0", "cut b 1", "finish b"),
        *("plan a", "cut a 0", "cut a 1", "cut a 2", "finish a"),
    ]
    assert {name: report.written for name, report in made.reports.items()} == {"a": 12, "b": 9}
    assert (made.finished, made.before) == (["b", "a"], [])
    again = run(batch(tmp_path, small, TILES), tasks)
    assert (again.finished, again.before) == ([], ["b", "a"])
    assert again.reports == made.reports


def test_a_dry_run_only_plans(small: Path, tasks: list[Task], calls: list[str]) -> None:
    made = run(batch(None, small, TILES), tasks, dry=True)
    assert calls == ["plan b", "plan a"]
    assert {name: report.written for name, report in made.reports.items()} == {"a": 12, "b": 9}
    assert made.bytes == 21 * 64 * 64 * 3
    assert (made.finished, made.before) == ([], [])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SlideError("slide x is damaged"), "slide x is damaged"),
        (OSError(28, "No space left on device", "/out/x"), "No space left on device (/out/x)"),
        (OSError("Can't write data"), "Can't write data"),
        (BrokenExecutor(), "the process that worked on it died (killed, perhaps out of"),
        (RuntimeError("unexpected"), "RuntimeError: unexpected"),
    ],
)
@pytest.mark.parametrize("where", ["plan_slide", "cut_slide", "finish_slide"])
def test_a_slide_that_fails_does_not_end_the_others(
    tmp_path: Path,
    small: Path,
    tasks: list[Task],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    error: Exception,
    says: str,
) -> None:
    call = getattr(running, where)

    def failing(asked: BatchRequest, work: Task, *more: Any) -> Any:
        if work.name == "b" and (where != "cut_slide" or more[1] == 1):
            raise error
        return call(asked, work, *more)

    monkeypatch.setattr(running, where, failing)
    made = run(batch(tmp_path, small, TILES), tasks)
    assert made.finished == ["a"]
    assert made.reports["a"].written == 12
    report = made.reports["b"]
    assert (report.status, report.written, report.file) == ("failed", 0, str(small / "b.tiff"))
    assert says in report.note
    # where the fault is ours, it is shown
    assert ("Traceback" in capsys.readouterr().err) == (type(error) is RuntimeError)


def test_parts_that_come_in_another_order_stay_in_theirs(tmp_path: Path, small: Path) -> None:
    class Backwards:
        """Does what was handed out last first."""

        room = 4

        def __init__(self) -> None:
            self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

        def submit(self, call: Callable[[], Any]) -> Future[Any]:
            self.waiting.append((Future(), call))
            return self.waiting[-1][0]

        def counted(self) -> int:
            return 0

        def renew(self) -> None:
            raise AssertionError

        def wait(self, *_: object) -> Any:
            future, call = self.waiting.pop()
            future.set_result(call())
            return {future}, set()

    crew = Backwards()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    work = [task(small / "a.tiff")]
    plain = run(batch(tmp_path / "one", small, TILES), work)
    other = BatchRun(batch(tmp_path / "two", small, TILES), work, dry=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spatialdl.slides.batch.sharing.wait", crew.wait)
        other.go(crew)
    names = ("one", "two")
    records = [running_record(tmp_path / name) for name in names]
    assert records[0] == records[1]
    assert other.reports["a"].written == plain.reports["a"].written == 12


def running_record(folder: Path) -> list[Any]:
    from spatialdl.slides.batch.record import SlideRecord

    record = SlideRecord.load(folder, "a")
    assert record is not None
    return [replace(part, seconds=0.0) for part in record.parts]
