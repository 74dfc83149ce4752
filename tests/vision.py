"""timm and torchvision for the tests that need them.

Beside a CPU build of PyTorch, torchvision can be imported after spatialdl only, see
`spatialdl.torchvision_operators`. Programs of tests import others first. So both lie in a folder
of their own, where no library finds them that would try.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import spatialdl  # noqa: F401  (before torchvision)

FOLDER = Path(sys.prefix) / "vision"


def need_timm() -> None:
    """Let timm and torchvision be imported, or skip the test."""
    if find_spec("timm") is None:
        if not (FOLDER / "timm").is_dir():
            pytest.skip("timm is not installed")
        sys.path.append(str(FOLDER))


def import_path(*first: Path | str) -> str:
    """PYTHONPATH of a process that a test starts: as here, without what `need_timm` has added.

    There torchmetrics would find a torchvision that cannot be imported.
    """
    return os.pathsep.join([*map(str, first), *(x for x in sys.path if x not in ("", str(FOLDER)))])
