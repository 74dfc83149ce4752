"""Temporary files belong to the user alone, even where everything else is open to all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardWriter
from tests.private import openable
from tests.processes import printed
from tests.training.checkpoints.runs import TINY

ROOT = Path(__file__).resolve().parents[1]

PYTORCHS = "/torchinductor_"
"""Made when PyTorch's compiler is imported, which the commands do not use."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: everybody may write into it."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def test_what_is_open_to_others_is_seen(shared):
    for name, mode in (("read", 0o604), ("write", 0o602), ("closed", 0o600)):
        (shared / name).touch()
        (shared / name).chmod(mode)
    (shared / "folder").mkdir()
    (shared / "folder" / "inside").touch()
    program = [sys.executable, str(ROOT / "tests" / "private.py"), str(shared)]
    said = printed(program, shared)
    assert said.replace(f"{shared}/", "").splitlines() == [
        *("reads folder", "reads folder/inside", "reads read", "writes write")
    ]
    assert len(list(openable(shared))) > 5, "root opens all"


@pytest.mark.slow
def test_another_user_can_open_nothing_of_a_run(shared, tmp_path):
    """Two ranks that stage shards, and read them in processes of their own."""
    with ShardWriter(tmp_path / "set", ("a", "b", "c")) as writer:
        for number, tile in enumerate(np.zeros((8, 9, 8, 3), np.uint8)):
            writer.add(tile, number % 3, "train", slide=f"slide-{number // 4}")
    seen = tmp_path / "seen"
    seen.mkdir()
    data = [word for word in TINY if not word.startswith("data.")]
    words = [
        *(sys.executable, "-m", "spatialdl.train", *data, "trainer.max_steps=2"),
        *("++model._target_=tests.private.looking", f"++model.out={seen}", "parallel=dp"),
        *("parallel.data=2", "data=shards", f"data.path={tmp_path / 'set'}", "data.batch_size=4"),
        *("data.validation_split=null", "data.workers=1", f"data.stage={shared}"),
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    shell = ["sh", "-c", 'umask 0 && exec "$@"', "sh", *words]
    printed(shell, tmp_path, TMPDIR=str(shared), PYTHONPATH=str(ROOT))
    assert len(list(seen.iterdir())) == 2
    for path in seen.iterdir():
        found, _, there = path.read_text().partition("\n\n")
        for name in (f"/.spatialdl-{os.getuid()}/jobs/", "/spatialdl-ranks-", "/pymp-"):
            assert f"{shared}{name}" in there
        assert [line for line in found.splitlines() if PYTORCHS not in line] == []
