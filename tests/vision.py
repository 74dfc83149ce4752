"""timm and torchvision for the tests that need them.

The wheel of torchvision has its operators for CUDA only; beside a CPU build of PyTorch they are
missing, and torchvision refuses to be imported for want of two of them. Networks and transforms are
plain Python. So both lie in a folder of their own, where no library finds them that would try, and
the two operators are declared before.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(sys.prefix) / "vision"
_LIBRARIES: list[torch.library.Library] = []


def need_timm() -> None:
    """Let timm and torchvision be imported, or skip the test."""
    if find_spec("timm") is None:
        if not (FOLDER / "timm").is_dir():
            pytest.skip("timm is not installed")
        sys.path.append(str(FOLDER))
    _declare_operators()


def import_path(*first: Path | str) -> str:
    """PYTHONPATH of a process that a test starts: as here, without what `need_timm` has added.

    There torchmetrics would find a torchvision whose operators nobody has declared.
    """
    return os.pathsep.join([*map(str, first), *(x for x in sys.path if x not in ("", str(FOLDER)))])


def _declare_operators() -> None:
    if "torchvision" in sys.modules or _LIBRARIES or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
