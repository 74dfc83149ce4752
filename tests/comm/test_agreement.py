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
data = TensorDataset(torch.randn(4, 3, 8, 8), torch.arange(4) % 3)
for images, labels in accelerator.prepare(DataLoader(data, batch_size=2)):
    IMAGE
    torch.nn.functional.cross_entropy(x.mean((2, 3)), labels).backward()
"""
WHOLE = "x = spatialdl.shard(images, mesh).requires_grad_()"
TILES = (
    "first, last, _, _ = mesh.box((8, 8)); "
    "x = spatialdl.from_local(images[:, :, first:last].requires_grad_(), mesh, size=(8, 8))"
)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (WHOLE, "image (float32 (2, 3, 8, 8)) has different values on rank 1"),
        (TILES, "gradient of the loss"),  # other labels, as tiles cannot be compared
    ],
)
def test_a_prepared_loader_is_refused_with_what_to_do(
    tmp_path: Path, image: str, said: str
) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "prepared.py").write_text(PROGRAM.replace("IMAGE", image))
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
    assert said in done.stderr
    assert "do not pass it the DataLoader, and use DistributedSampler(" in done.stderr
