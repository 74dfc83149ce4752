"""Programs that tests start, and wait for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def ended(
    words: Sequence[str], folder: Path, limit: int = 250, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, in whatever way.

    Args:
        folder: where it works.
        limit: seconds.
        environment: variables beside those of the tests.
    """
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def printed(words: Sequence[str], folder: Path, limit: int = 250, **environment: str) -> str:
    """What a program prints, which has to end well."""
    done = ended(words, folder, limit, **environment)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout
