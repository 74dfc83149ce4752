from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spatialdl.data import ShardDataset


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    subprocess.run(["cp", "-r", written, tmp_path / "set"], check=True)
    return tmp_path / "set"


@pytest.fixture
def dataset(folder: Path) -> ShardDataset:
    return ShardDataset(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of a given size in kB."""
    made = []

    def make(size: int, options: str = "rw") -> Path:
        place = tmp_path / f"small-{len(made)}"
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k,{options}", "none", str(place)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a disk")
        made.append(place)
        return place

    yield make
    for place in made:
        subprocess.run(["umount", "-l", place], check=True)


def until(condition: Callable[[], bool]) -> None:
    """Return when other processes have brought something about."""
    for _ in range(6000):
        with suppress(FileNotFoundError):  # a folder was removed while it was looked through
            if condition():
                return
        time.sleep(0.01)
    raise AssertionError("it did not come about within a minute")
