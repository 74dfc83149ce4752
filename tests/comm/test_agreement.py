"""Images that ranks of one grid must have alike, as programs of others deal them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
import spatialdl

accelerator = Accelerator(cpu=True)
mesh = spatialdl.init_mesh(grid=(2, 1))
torch.manual_seed(0)
loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(4, 3, 9, 8)), batch_size=2))
for (images,) in loader:
    spatialdl.shard(images, mesh)
"""


def test_a_prepared_loader_is_refused_with_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "prepared.py").write_text(PROGRAM)
    root = Path(__file__).resolve().parents[2]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI", "PMI"))}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*launcher, "prepared.py"],
        cwd=tmp_path,
        env={**plain, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    assert "image (float32 (2, 3, 9, 8)) has other values on rank 1" in done.stderr
    assert "leave the DataLoader out of it, and give it DistributedSampler(" in done.stderr
