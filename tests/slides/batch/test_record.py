"""Records of what is done are kept and taken over; work is handed out, whoever dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spatialdl.data.format import shard_problem
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.errors import SlideError
from spatialdl.slides.batch.assembly import load_settings
from spatialdl.slides.batch.record import (
    PartRecord,
    SlideRecord,
    load_part,
    save_part,
)
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.run import (
    Call,
    Job,
    SerialExecutor,
    batch_executor,
    share,
)
from tests.slides.batch.batches import in_python, shard
from tests.slides.batch.calls import die, die_once, refused, write


def part_of(info: ShardInfo | None) -> PartRecord:
    dropped = {"pen": [(5, 6)], "blur": []}
    return PartRecord(info, [(1, 2, None), (3, 2**40, 1)], dropped, bare=4, seconds=0.5)


def record_in(folder: Path) -> SlideRecord:
    bands = (RegionBand(0, 0, 512), RegionBand(1, 512, 88))
    region = RegionSample("ab", 600, 700, 0.5, True, bands, 1, "train", "é", 3, 4)
    report = TilingReport("é", 9, 8, written=2, file="é.svs").to_json()
    parts = [part_of(shard(folder)), part_of(None)]
    files = [shard(folder, "coords/clam/patches/é.h5")]
    return SlideRecord("key", "/in/é.svs", "train", parts, files, region, report)


def test_a_part_is_done_again_where_something_is_not_as_noted(tmp_path):
    for part in (PartRecord(), part_of(None), part_of(shard(tmp_path))):
        assert load_part(tmp_path, "key") is None
        save_part(tmp_path, "key", part)
        assert load_part(tmp_path, "key") == part
        assert load_part(tmp_path, "other key") is None
        if part.shard:
            for other in (b"0123456788", b"01234567890", b"", None):  # contents count
                path = tmp_path / part.shard.file
                path.unlink() if other is None else path.write_bytes(other)
                assert shard_problem(tmp_path, part.shard)
                assert load_part(tmp_path, "key") is None
            shard(tmp_path)
            assert load_part(tmp_path, "key") == part
        # what could not be read may be read now
        save_part(tmp_path, "key", replace(part, unreadable=[(7, 8)], problem="cannot read"))


def test_a_record_comes_back_and_is_whole_only_with_all_its_files(tmp_path):
    record = record_in(tmp_path)
    assert SlideRecord.load(tmp_path, "é") is None
    record.save(tmp_path, "é")
    assert SlideRecord.load(tmp_path, "é") == record
    for name in ("shard-00000.h5", "coords/clam/patches/é.h5"):
        assert record.is_whole(tmp_path)
        (tmp_path / name).write_bytes(b"012345678")
        assert not record.is_whole(tmp_path)
        (tmp_path / name).unlink()
        assert not record.is_whole(tmp_path)
        shard(tmp_path, name)
    (tmp_path / "set").mkdir()  # a link out of the data set is no file of it
    (tmp_path / "set" / "shard-00000.h5").symlink_to(tmp_path / "shard-00000.h5")
    assert "is a link out of" in shard_problem(tmp_path / "set", shard(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"key": "key", "part": {"shard": 3}}'],
)
def test_damage_means_that_it_is_not_done(tmp_path, text):
    (tmp_path / "records").mkdir()
    for name in ("part.json", "records/a.json", "settings.json"):
        (tmp_path / name).write_text(text)
    assert load_part(tmp_path, "key") is None
    assert SlideRecord.load(tmp_path, "a") is None
    if not text:
        assert load_settings(tmp_path) is None


def change(known: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of which one value, at names with dots between, is another."""
    *above, last = path.split(".")
    known = inner = deepcopy(known)
    for name in above:
        inner = inner[int(name) if name.isdigit() else name]
    inner[last] = value
    return known


@pytest.mark.parametrize(
    ("path", "value"),
    [
        # of another version
        *(("more", 1), ("report", {}), ("region", {"id": 3})),
        # with a report of other types
        *(("report.written", "2"), ("split", 3)),
        # its files were linked from and to where their names said, wherever that was
        *(("files.0.file", "a/../../b"), ("files.0.file", "/etc/passwd"), ("files.0.file", "")),
        ("parts.0.shard.file", "a\0"),
    ],
)
def test_a_record_that_cannot_be_ours_is_none(tmp_path, path, value):
    record = record_in(tmp_path)
    record.save(tmp_path, "a")
    file = tmp_path / "records" / "a.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(change(known, path, value)))
    assert SlideRecord.load(tmp_path, "a") is None
    file.write_text(json.dumps(known))
    assert SlideRecord.load(tmp_path, "a") == record


def job(found: list[Any], *steps: tuple[int, Callable[[], Any]]) -> Job:
    """A job that makes one call after the other and notes what they give."""
    for urgency, call in steps:
        try:
            found += yield [Call((urgency,), call)]
        except Exception as error:
            found.append(error)


def test_the_most_urgent_goes_first_and_an_exception_is_a_result():
    found: list[Any] = []
    follows = job(found, (1, lambda: "first"), (0, lambda: "at once, once it is known"))
    jobs = [job(found, (k, lambda k=k: 1 // (4 - k))) for k in (4, 3)]
    share(SerialExecutor(), [*jobs, follows])
    assert found[:3] == ["first", "at once, once it is known", 1]
    assert isinstance(found[3], ZeroDivisionError)

    def both() -> Job:  # all calls of a step are made, though one fails
        calls = [Call((k,), lambda k=k: found.append(1 // k)) for k in (0, 1)]
        with pytest.raises(ZeroDivisionError):
            yield calls
        found.append((yield []))  # and a step without calls goes on

    share(SerialExecutor(), [both()])
    assert found[4:] == [1, []]

    def pressed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share(SerialExecutor(), [job([], (0, pressed))])


def test_processes_do_it_and_only_the_call_that_kills_its_process_fails(tmp_path):
    found: list[Any] = []
    more = (99, partial(write, tmp_path / "more"))
    calls = [partial(write, tmp_path / str(k)) for k in range(12)]
    jobs = [job(found, (k, call)) for k, call in enumerate(calls)]
    jobs.append(job(found, (4, partial(die, tmp_path / "guilty", "kill")), more))
    unlucky = job(found, (0, partial(die_once, tmp_path / "unlucky")))
    with batch_executor(2, None) as crew:
        share(crew, jobs)
        share(crew, [unlucky])
        futures = [crew.submit(os.getpid) for _ in range(crew.room)]
        assert os.getpid() not in {future.result() for future in futures}
        error = crew.submit(refused).exception()
        assert isinstance(error, SlideError)
        assert str(error) == "slide a.svs: é"
        # Ctrl-C is left to the process that hands out
        assert crew.submit(partial(signal.raise_signal, signal.SIGINT)).exception() is None
    (failed,) = (result for result in found if isinstance(result, Exception))
    assert isinstance(failed, BrokenExecutor)
    found.remove(failed)
    # what follows from work that died goes on, and dying once is bad luck
    assert sorted(found) == sorted(["more", "survived", *map(str, range(12))])
    # maybe beside others, then once by itself, or it would take others with it again
    assert len((tmp_path / "guilty").read_text()) <= 2


AFTER_A_LOADER = """
import signal, sys
from pathlib import Path
from spatialdl.slides.batch.run import ProcessExecutor
def work():
    Path(sys.argv[1]).touch()
    signal.pause()
if __name__ == "__main__":
    from spatialdl.data.loader import Loader
    from tests.data.numbers import batching, views
    loader = Loader(views(4), batching(2), workers=1)
    list(loader.batches())
    loader.close()
    crew = ProcessExecutor(1)
    futures = [crew.submit(work) for _ in range(3)]
    while not Path(sys.argv[1]).exists():
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
    done = in_python(tmp_path / "after.py", tmp_path / "begun")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert set(done.stdout.splitlines()) <= {"CancelledError", "BrokenProcessPool"}


ORPHANS = """
import os, signal, sys
from spatialdl.slides.batch.run import ProcessExecutor
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
