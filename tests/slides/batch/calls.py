"""What processes do in tests; they import it and little else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from spatialdl.errors import SlideError


def refused() -> None:
    raise SlideError("slide a.svs: é")


def write(path: Path) -> str:
    with path.open("a") as file:
        file.write("x")
    return path.name


def die(path: Path, how: str) -> None:
    write(path)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def die_once(path: Path) -> str:
    if not path.exists():
        die(path, "exit")
    return "survived"
