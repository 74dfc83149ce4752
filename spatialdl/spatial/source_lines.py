"""Finds the line of the user's network that is running."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch

_PACKAGE = Path(__file__).parents[1]
LIBRARIES = (
    f"{Path(torch.__file__).parent}{os.sep}",
    *(
        f"{_PACKAGE / name}{os.sep}"
        for name in ("checking", "pipeline", "planning", "random", "spatial")
    ),
    f"{_PACKAGE / 'check.py'}",
)
"""Files that are not part of a user's network."""


def is_library(file: str) -> bool:
    """Whether a file is PyTorch's or part of this machinery; models of the package are not."""
    return file.startswith((*LIBRARIES, "<"))


_replaying: dict[CodeType, str] = {}


def replays(code: CodeType, name: str = "") -> None:
    """Register a function that runs a network; its callers are not part of the network.

    Args:
        name: of its local variable whose ``where`` has the line of the recorded call.
    """
    _replaying[code] = name


def users_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost caller that is the user's; empty if there is none.

    Args:
        frame: where to begin; by default the caller's.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        where = _where(frame, frame.f_lineno)
        if where is not None:
            return where
        frame = frame.f_back
    return ""


def users_line_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame of `error` that is the user's."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        where = _where(frame, line)
        if where is not None:
            return where or "no line of the network"
    return "no line of the network"


def _where(frame: FrameType, line: int) -> str | None:
    if frame.f_code in _replaying:
        name = _replaying[frame.f_code]
        return str(frame.f_locals[name].where) if name else ""
    file = frame.f_code.co_filename
    return None if is_library(file) else f"{file}:{line}"
