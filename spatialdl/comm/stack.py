"""Where another thread of this process is, for messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_OF_NO_USE = ("threading.py", "waiting.py", "queue.py", "trace.py")


def _frames(thread: int) -> Iterator[FrameType]:
    """From the closest outwards."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(thread: int) -> str:
    """ "package/file.py:12 in function": the closest that tells something."""
    frames = list(_frames(thread))
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.name not in _OF_NO_USE:
            return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "no place in Python"


def module_of(thread: int) -> str:
    """The module of a network whose forward it is in, as ``named_modules`` calls it; or nothing."""
    torch_nn = sys.modules.get("torch.nn")
    if torch_nn is None:
        return ""
    modules: list[Any] = []
    for frame in _frames(thread):
        one = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(one, torch_nn.Module) and one not in modules:
            modules.insert(0, one)
    if not modules:
        return ""
    root, module = modules[0], modules[-1]
    name = next((name for name, one in root.named_modules() if one is module), "")
    kind = type(module).__name__
    return f"module {name} ({kind})" if name else kind
