"""Folders of checkpoints, their files, and damaged and foreign ones; ranks: tests/mpi/training."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.common import fields
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import (
    BEST,
    CONTENT,
    LATEST,
    RANDOM,
    SEAL,
    candidates,
    check_seal,
    clean,
    complete,
    name_of,
    point,
    pointed,
    prune,
    publish,
    sealed,
    stage_file,
    temporary_of,
)
from spatialdl.training.checkpoints.reading import (
    FORMAT,
    Checkpoint,
    content_of,
    damages,
)
from tests.training.checkpoints.runs import made


def make(folder: Path, step: int, mark: str = "") -> Path:
    temporary = temporary_of(folder, step)
    temporary.mkdir(parents=True)
    path = publish(temporary, {"step": step, "mark": mark})
    point(folder, LATEST, path)
    return path


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete(folder)]


def test_a_checkpoint_has_its_name_when_it_is_whole(tmp_path):
    path = make(tmp_path, 100)
    assert path == tmp_path / "step-00000100"
    assert {one.name for one in tmp_path.iterdir()} == {path.name, LATEST}
    assert pointed(tmp_path / LATEST) == path
    (tmp_path / name_of(200)).mkdir()  # without a checkpoint.json
    assert steps(tmp_path) == [100]


def test_steps_of_a_curve_that_was_left_go(tmp_path):
    for step in (10, 20, 30):
        make(tmp_path, step)
    newest = make(tmp_path, 12)  # of a run that went on from 10
    assert candidates(LATEST, tmp_path.parent) == []
    assert [path.name[-2:] for path in candidates(str(tmp_path), tmp_path)] == ["12", "10"]
    prune(tmp_path, newest, 2)
    assert steps(tmp_path) == [10, 12]


def unsealed(text: str) -> dict[str, object]:
    content = fields.table({CONTENT: fields.parse(text)}, CONTENT)
    check_seal(content)
    del content[SEAL]
    return content


def test_a_bit_that_is_flipped_is_seen_wherever_it_is():
    """In a number it was not: a run went on with another schedule."""
    content = {"step": 3, "update": {"scheduler_steps": 12}, "best": float("nan"), "path": Path()}
    text = sealed(content).encode()
    found = unsealed(text.decode())
    assert found["update"] == content["update"]
    same = json.dumps(found)
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert json.dumps(unsealed(flipped.decode())) == same
        except ValueError:
            continue


SLOW = pytest.mark.slow
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def dies(work: Callable[[], object], at: int) -> bool:
    """Do some work in a process that ends before its so many-th change of the file system.

    Returns:
        Whether it came so far.
    """
    child = os.fork()
    if child == 0:
        left = iter(range(at))

        def count(event: str, arguments: tuple[object, ...]) -> None:
            if event in CHANGES and next(left, None) is None:
                os._exit(1)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("step", "keep"),
    [(3, 1), *(pytest.param(*one, marks=SLOW) for one in ((4, 2), (4, 1), (3, 2)))],
)
def test_whenever_it_is_killed_there_is_a_whole_checkpoint(step, keep, tmp_path):
    """Of step 3 there is one already, which is replaced: it turned out to be the best."""
    before = tmp_path / "before"
    for number in (1, 2, 3):
        newest = make(before, number, "old")
    prune(before, newest, keep)

    def write() -> None:
        path = make(folder, step, "new")
        point(folder, BEST, path)
        prune(folder, path, keep)

    for operation in range(100):
        folder = shutil.copytree(before, tmp_path / str(operation))
        is_over = not dies(write, operation)
        clean(folder)
        path, *others = candidates(str(folder), folder)
        content = unsealed((path / CONTENT).read_text())
        assert content in ({"step": 3, "mark": "old"}, {"step": step, "mark": "new"})
        assert len(others) >= keep - 1
        assert not list(folder.glob(".*"))
        if is_over:
            break
    assert operation > 10
    assert content == {"step": step, "mark": "new"}


def test_every_way_to_name_a_checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    first, second = make(folder, 1), make(folder, 2)
    point(folder, BEST, first)
    for named, expected in (
        (LATEST, [second, first]),
        (str(tmp_path / "run"), [second, first]),
        (str(folder), [second, first]),
        (str(first), [first]),
        (str(folder / BEST), [first]),
        (str(folder / LATEST), [second]),
    ):
        assert candidates(named, tmp_path / "run") == expected
    assert candidates(LATEST, tmp_path / "another") == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere", "does not exist"),
        (".", "has no complete checkpoint"),
        ("text", "does not name an existing checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_told(tmp_path, path, sentence):
    (tmp_path / "text").write_text("../../etc\n")
    with pytest.raises(CheckpointError, match=sentence):
        candidates(str(tmp_path / path), tmp_path)


def test_pointers_cannot_lead_elsewhere(tmp_path):
    make(tmp_path / "other", 7)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LATEST).write_text("../other/step-00000007")
    assert pointed(tmp_path / "run" / LATEST) is None


def test_every_rank_has_its_own_random_states(tmp_path):
    with Checkpoint(made(tmp_path)) as found:
        for place in (0, 1, 10, 11):
            (state,) = found.random_states(place).items()
            assert state[0] == "torch"
            assert state[1].tolist() == [place, place]
        assert found.random_states(5) == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"step": 4}, "its step is not that of the folder"),
        ({"format": FORMAT + 1}, r"has version 3, .*reads 2: .*wrote it .*1\.2\.3"),
        ({"files": []}, "files"),
        ({"files": {"../stage-00.safetensors": {}}}, "is not a file name of a checkpoint"),
        ({"files__stage-00.safetensors__bytes": -1}, "bytes"),
        ({"update__scheduler_steps": 9}, "scheduler_steps is 9, more than step"),
        ({"update__scaler": {"scale": 0, "steps": 1}}, "scale"),
        ({"layout__placement": None}, "placement"),
        ({"config": "none"}, "config"),
    ],
    ids=str,
)
def test_one_that_lacks_what_a_run_needs_is_refused(changes, sentence, tmp_path):
    path = made(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        content_of(path)
    assert len(damages(path, SingleProcess())) == 1


def test_all_damages_are_told(tmp_path):
    path = made(tmp_path)
    (path / RANDOM).unlink()
    file = path / stage_file(0)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a tensor: the header is whole
    file.write_bytes(content)
    missing, differs = damages(path, SingleProcess())
    assert differs == "stage-00.safetensors was changed (SHA-256 mismatch)"
    assert RANDOM in missing
    assert "No such file" in missing
    file.write_bytes(content[:-7])
    said = f"{file.name} has {len(content) - 7} bytes instead of {len(content)}"
    assert said in damages(path, SingleProcess())[1]
    file.write_bytes(content[:50])
    with pytest.raises(CheckpointError, match=r"stage-00\.safetensors: "):
        Checkpoint(path)
