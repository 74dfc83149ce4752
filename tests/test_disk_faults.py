"""Runs of several ranks whose file system fails in the middle, as users start them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.checkpoints.folder import pointed
from spatialdl.training.checkpoints.reading import damages
from tests.test_stopping import command, started
from tests.training.checkpoints.runs import checkpoints, table

OFTEN = ["trainer.checkpoint.every_steps=3", "trainer.validate_every=4"]
LONG = ["trainer.max_steps=1000000", "data.validation_samples=3"]


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of a few megabytes, as the runs see the shared one."""
    place = tmp_path / "shared"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", 0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


def until(process: subprocess.Popen[str], text: str, times: int = 1) -> list[str]:
    """What it says until it has said a text so often."""
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        times -= text in line
        if not times:
            return said
    pytest.fail("".join(said))


def fail(run_dir: Path, fault: str) -> None:
    if fault == "full":
        fill(run_dir.parent)
    else:  # what is opened from now on; a remount would wait for files that are open
        subprocess.run(["mount", "--bind", run_dir, run_dir], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", run_dir], check=True)


def heal(run_dir: Path, fault: str) -> None:
    if fault == "full":
        (run_dir.parent / "filler").unlink()
    else:
        subprocess.run(["umount", "-l", run_dir], check=True)


@pytest.mark.parametrize("fault", ["full", pytest.param("read-only", marks=pytest.mark.slow)])
def test_training_goes_on_while_nothing_can_be_written(fault, disk, tmp_path):
    run_dir = disk / "run"
    with started(command(run_dir, "parallel=dp", *LONG, *OFTEN)) as process:
        until(process, "checkpoint: ")
        fail(run_dir, fault)
        said = until(process, "cannot write checkpoint (", times=2)
        kept = pointed(run_dir / "checkpoints" / "latest")
        assert kept is not None
        assert damages(kept, SingleProcess()) == []
        heal(run_dir, fault)
        said += until(process, "checkpoint: ")
        process.send_signal(signal.SIGINT)
        said += process.stdout.read()
        assert process.wait(60) == 0, said
    steps = [int(row["step"]) for row in table(run_dir / "metrics.csv")]
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoints(run_dir)[-1] == len(steps)
    assert "Logging error" not in "".join(said)
