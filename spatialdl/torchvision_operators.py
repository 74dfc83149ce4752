"""torchvision beside a build of PyTorch that its operators were not compiled for.

The wheel of torchvision on PyPI is compiled for CUDA. Beside a CPU build of PyTorch its library
cannot be loaded, and ``import torchvision`` fails ("operator torchvision::nms does not exist"), and
with it timm and torchmetrics, which import it. Networks and transforms of torchvision are plain
Python. So the operators that the import looks up are declared before it, without an
implementation: calling one raises PyTorch's NotImplementedError.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_NAME = "torchvision"
_LOOKED_UP = ("nms", "qnms")  # other operators only where the library is loaded
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_DECLARED: list[Any] = []  # a library of PyTorch forgets its operators when it is deleted


class _BeforeImport:
    """Finder of modules that finds none: it prepares the first import of torchvision."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == _NAME and (spec := PathFinder.find_spec(name)) is not None and spec.origin:
            declare_missing(Path(spec.origin).parent)


def prepare() -> None:
    """Have the first import of torchvision in this process declare the operators it lacks."""
    sys.meta_path.insert(0, _BeforeImport())


def declare_missing(folder: Path) -> None:
    """Declare operators of torchvision, unless its compiled library can be loaded.

    Args:
        folder: the package torchvision.
    """
    import torch

    if _DECLARED:
        return
    operators: Any = torch.ops
    libraries: Any = torch.library
    try:
        for library in folder.glob("_C*.so"):
            operators.load_library(library)
    except OSError:  # as torchvision itself handles it
        declared = libraries.Library(_NAME, "FRAGMENT")
        for name in _LOOKED_UP:
            declared.define(name + _SCHEMA)
        _DECLARED.append(declared)
