"""What is known of slides that are done, so that a run that is started again goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from spatialdl.data.saving import replacing

FOLDER = "records"
"""Its name in a run directory."""


@dataclass(frozen=True)
class Record:
    """The predictions for a slide.

    Attributes:
        key: what they were made of, see `key_of`.
        places: int64 (N, 2), level-0 x and y of its tiles.
        span: level-0 rows and columns of each, if known.
        values: float64 (N, classes).
        left_out: tiles that could not be read.
        files: of its maps, in the run directory.
    """

    name: str
    key: str
    places: npt.NDArray[np.int64]
    span: tuple[float, float] | None
    values: npt.NDArray[np.float64]
    left_out: int = 0
    files: Sequence[str] = ()

    def save(self, run_dir: Path) -> None:
        """Write it, when all of its files are there."""
        (run_dir / FOLDER).mkdir(exist_ok=True)
        told = {
            "name": self.name,
            "key": self.key,
            "span": self.span,
            "left_out": self.left_out,
            "files": list(self.files),
        }
        with replacing(_path(run_dir, self.name)) as out:
            np.savez(out, told=json.dumps(told), places=self.places, values=self.values)

    @classmethod
    def load(cls, run_dir: Path, name: str, key: str) -> Record | None:
        """That of a slide, if it was made of the same, and all of its files are there."""
        try:
            with np.load(_path(run_dir, name)) as found:
                told = json.loads(str(found["told"]))
                places, values = found["places"], found["values"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None
        if told["key"] != key or not all((run_dir / file).is_file() for file in told["files"]):
            return None
        span = None if told["span"] is None else (told["span"][0], told["span"][1])
        return cls(name, key, places, span, values, told["left_out"], told["files"])


def key_of(settings: Any, path: Path | None) -> str:
    """A digest of settings, and of a file as far as its length and time tell."""
    state = None
    if path is not None:
        found = path.stat()
        state = [str(path.resolve()), found.st_size, found.st_mtime_ns]
    return hashlib.sha256(json.dumps([settings, state], default=str).encode()).hexdigest()


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name}.npz"
