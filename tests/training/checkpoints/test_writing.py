"""Background writing of checkpoints: results, and leftovers of failures."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.checkpoints import writing
from spatialdl.training.checkpoints.checkpoints import Checkpoints
from spatialdl.training.checkpoints.folder import LATEST, pointed, stage_file
from spatialdl.training.checkpoints.reading import FORMAT, damages
from spatialdl.training.checkpoints.writing import Writer
from tests.training.checkpoints.runs import checkpoints, losses, train


def content(step: int) -> dict:
    update = {"scheduler_steps": step, "scaler": None}
    layout = {"parallel": "none", "placement": "1 replica x 1x1 = 1 rank"}
    rest = {"config": {}, "identity": {}, "versions": {}}
    return {"format": FORMAT, "step": step, "update": update, "layout": layout, **rest}


def tensors(value: float = 1.0, size: int = 1000) -> dict:
    return {stage_file(0): {"weight": torch.full((size,), value)}}


def write(writer: Writer, step: int, value: float = 1.0) -> None:
    writer.start(tensors(value), content(step))
    writer.wait()


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path, SingleProcess(), keep=2)
    yield made
    made.close()


def weights(tmp_path: Path, step: int) -> torch.Tensor:
    return load_file(tmp_path / "checkpoints" / f"step-{step:08d}" / stage_file(0))["weight"]


def test_a_checkpoint_is_whole_when_all_have_been_told(writer, tmp_path):
    write(writer, 10, 3.0)
    path = pointed(tmp_path / "checkpoints" / LATEST)
    assert path is not None
    assert (path.name, writer.last) == ("step-00000010", 10)
    assert damages(path, SingleProcess()) == []
    assert weights(tmp_path, 10).tolist() == [3.0] * 1000
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert set(modes.values()) == {0o666 & ~umask()}, "readable as every other file"


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_training_goes_on_while_it_is_written(writer, tmp_path, monkeypatch):
    gate, save = threading.Event(), writing.save

    def slow(*args):
        gate.wait()
        return save(*args)

    monkeypatch.setattr(writing, "save", slow)
    writer.start(tensors(), content(1))
    for _ in range(3):  # steps
        assert writer.status() == (1.0, 0.0)
        writer.advance(*writer.status())
        assert not (tmp_path / "checkpoints" / "step-00000001").exists()
    gate.set()
    writer.start(tensors(2.0), content(2))  # waits for the first
    assert checkpoints(tmp_path) == [1]
    writer.wait()
    assert checkpoints(tmp_path) == [1, 2]


def test_rows_of_the_steps_before_are_on_the_disk_first(writer, tmp_path, monkeypatch):
    """A node that fails keeps a checkpoint, which is synced, and lost the last rows."""
    (tmp_path / "metrics.csv").write_text("step\n1\n")
    synced, fsync = [], os.fsync

    def note(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2])
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    write(writer, 1)
    assert synced[:2] == [stage_file(0), "metrics.csv"]
    assert writer.last == 1


def test_an_error_of_ours_is_not_taken_for_one_of_the_disk(writer):
    writer.start({"x": {"weight": object()}}, content(1))  # type: ignore[dict-item]
    with pytest.raises(Exception, match=r"(?i)tensor|object|attribute|unexpected"):
        writer.wait()


# --- disks that are full or read-only


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[float]:
    """The losses of a run that nobody disturbs."""
    path = tmp_path_factory.mktemp("whole")
    train(path)
    return losses(path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_told_and_the_checkpoint_before_untouched(small_disk, caplog):
    writer = Writer(small_disk, SingleProcess(), keep=2)
    writer.start(tensors(1.0), content(1))
    for step in (2, 3):
        writer.start(tensors(2.0, size=2**20), content(step))
    write(writer, 4, 4.0)
    writer.close()
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.split(":")[0] for text in told] == ["step 2", "step 3"], "at each try"
    assert all("No space left" in text and "rank 0" in text for text in told)
    assert checkpoints(small_disk) == [1, 4]
    assert weights(small_disk, 1)[0] == 1.0
    assert not list((small_disk / "checkpoints").glob(".*"))


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    path = disk / "filler"
    with path.open("wb", 0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))
    return path


def test_training_goes_on_with_a_full_disk(small_disk, whole, caplog, monkeypatch):
    save = Checkpoints.save

    def with_a_busy_neighbour(self: Checkpoints, progress: dict, is_best: bool = False) -> None:
        self.writer.wait()
        if progress["step"] == 4:
            fill(small_disk)
        elif progress["step"] == 8:
            (small_disk / "filler").unlink()
        save(self, progress, is_best)

    run = small_disk / "run"
    with monkeypatch.context() as during:
        during.setattr(Checkpoints, "save", with_a_busy_neighbour)
        train(run, "trainer.checkpoint.every_steps=2", "trainer.checkpoint.best=null")
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    lost = [text.split(":")[0] for text in told if "cannot write checkpoint" in text]
    assert lost == ["step 4", "step 6"]
    assert checkpoints(run) == [2, 8]
    assert losses(run) == whole


def test_a_read_only_file_system_is_told_and_nothing_changes(small_disk, caplog):
    writer = Writer(small_disk, SingleProcess(), keep=2)
    write(writer, 1, 1.0)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    write(writer, 2, 2.0)
    assert "Read-only file system" in caplog.text
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    write(writer, 3, 3.0)
    writer.close()
    assert checkpoints(small_disk) == [1, 3]


# --- killed in the middle


def killed_in(function: Any, run_dir: Path) -> None:
    """A run in a process of its own that is killed in the second call of a function."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    calls = []

    def deadly(*args: Any, **keys: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **keys)

    module, name = function
    original = getattr(module, name)
    setattr(module, name, deadly)
    with suppress(BaseException):
        train(run_dir, "trainer.checkpoint.every_steps=3", "trainer.checkpoint.best=null")
    os._exit(1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "left"),
    [
        ((writing, "sync"), []),  # of the second file
        ((writing, "publish"), [3]),
        ((writing, "point"), [3, 6]),
    ],
    ids=lambda one: one[1] if isinstance(one, tuple) else None,
)
def test_a_run_killed_while_it_writes_leaves_whole_checkpoints(function, left, whole, tmp_path):
    killed_in(function, tmp_path)
    assert checkpoints(tmp_path) == left
    for path in (tmp_path / "checkpoints").glob("step-*"):
        assert damages(path, SingleProcess()) == []
    train(tmp_path, "ckpt_path=latest")
    assert losses(tmp_path) == whole
    assert not list((tmp_path / "checkpoints").glob(".*.tmp"))
