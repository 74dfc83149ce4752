"""End-to-end user scripts with SpatialStrategy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.comm.launch import mpiexec_command

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lightning.md").read_text()
PLAIN, SPLIT, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    launcher = mpiexec_command(ranks) if ranks else []
    return subprocess.run(
        [*launcher, sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def loss_of(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"loss (\S+)$", done.stdout, re.MULTILINE)
    return float(found)


def test_the_split_script_of_the_page_has_the_loss_of_the_plain_one(tmp_path):
    expected = loss_of(run(PLAIN, tmp_path))
    done = run(SPLIT, tmp_path, ranks=2)
    assert loss_of(done) == pytest.approx(expected, rel=1e-4)
    text = done.stdout + done.stderr
    assert text.count("`Trainer.fit` stopped") == 1  # only rank 0 reports
    assert "never averaged" not in text
    runs = sorted(path.name for path in (tmp_path / "lightning_logs").iterdir())
    assert runs == ["version_0", "version_1"]
    (kept,) = (tmp_path / "lightning_logs" / "version_1" / "checkpoints").iterdir()
    assert kept.name == "epoch=1-step=8.ckpt"


@pytest.mark.slow
def test_scripts_of_pytorch_lightning(tmp_path):
    script = SPLIT.replace("import lightning as L", "import pytorch_lightning as L")
    assert 0 < loss_of(run(script.replace("grid=(2, 1)", "grid=(1, 1)"), tmp_path)) < 5


def test_an_error_on_one_rank_ends_all(tmp_path):
    fails = """
        if self.global_rank == 1 and batch_idx == 1:
            raise RuntimeError("a broken sample")
        return loss
"""
    done = run(SPLIT.replace("\n        return loss\n", fails), tmp_path, ranks=2)
    assert done.returncode != 0
    assert "RuntimeError: a broken sample" in done.stderr
    assert "loss" not in done.stdout
