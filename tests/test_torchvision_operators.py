"""PyPI's torchvision beside a CPU build of PyTorch: timm and torchmetrics can be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.vision import need_timm


def test_networks_and_transforms_work_without_the_operators():
    need_timm()
    import timm
    import torchmetrics  # noqa: F401  (which imports torchvision)
    from torchvision.transforms import v2

    network = timm.create_model("resnet18", num_classes=0).eval()
    assert network(torch.rand(1, 3, 32, 32)).shape == (1, 512)
    flipped = v2.RandomHorizontalFlip(1.0)(torch.arange(2.0).view(1, 1, 2))
    assert flipped.flatten().tolist() == [1, 0]
    try:  # where the library fits, there is the operator
        torch.ops.torchvision.nms(torch.rand(2, 4), torch.rand(2), 0.5)
    except NotImplementedError as error:
        assert "Could not run 'torchvision::nms'" in str(error)  # noqa: PT017


def test_where_the_library_can_be_loaded_nothing_is_declared(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", package / "_C.so")
    code = "import spatialdl, torch, torchvision; print(hasattr(torch.ops.torchvision, 'nms'))"
    path = os.pathsep.join(map(str, (tmp_path, *sys.path[1:])))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert done.stdout == "False\n"
