"""PyPI's torchvision beside a CPU build of PyTorch: timm and torchmetrics can be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.vision import FOLDER, need_timm

MISMATCHED = """
import spatialdl
import timm, torch, torchmetrics, torchvision
from torchvision.transforms import v2
network = timm.create_model("resnet18", num_classes=0).eval()
assert network(torch.rand(1, 3, 32, 32)).shape == (1, 512)
assert v2.RandomHorizontalFlip(1.0)(torch.arange(2.0).view(1, 1, 2)).flatten().tolist() == [1, 0]
try:
    torch.ops.torchvision.nms(torch.rand(2, 4), torch.rand(2), 0.5)
except NotImplementedError as error:
    assert "Could not run 'torchvision::nms'" in str(error)
"""
MATCHING = """
import spatialdl, torch, torchvision
print(hasattr(torch.ops.torchvision, "nms"))
"""


def output(code: str, *folders: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, *sys.path[1:])))}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, check=True
    ).stdout


def test_networks_and_transforms_work_without_the_operators():
    need_timm()
    assert output(MISMATCHED, FOLDER) == ""


def test_where_the_library_can_be_loaded_nothing_is_declared(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", package / "_C.so")
    assert output(MATCHING, tmp_path) == "False\n"
