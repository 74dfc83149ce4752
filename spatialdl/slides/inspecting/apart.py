"""HDF5 files looked into by a process of their own, which may crash or never end.

Text of a length that differs lies in heaps of which HDF5 believes what they say of themselves: a
few damaged bytes, and it goes round in them for ever. Reading pixels needs none of it; only who
wants to know all that is in a file has to ask.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import spatialdl
from spatialdl.errors import ShardError
from spatialdl.slides.inspecting.hdf5 import check_start, describe_hdf5

PATIENCE_S = 60.0
_ASK = "from spatialdl.slides.inspecting.apart import answer; answer()"


def describe_apart(path: Path, patience_s: float = PATIENCE_S) -> str:
    """As `describe_hdf5`; raises what it raises, also where HDF5 fails."""
    check_start(path)
    home = str(Path(spatialdl.__file__).parents[1])
    known = os.pathsep.join([home, *filter(None, [os.getenv("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK, os.fspath(path)],
            env={**os.environ, "PYTHONPATH": known},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
            check=False,
        )
        is_read, text = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise ShardError(
            f"cannot read {path}: it is damaged so that HDF5 does not get through it; copy it again"
        ) from None
    if not is_read:
        raise ShardError(str(text))
    return str(text)


def answer() -> None:
    """What the process does: its file is the argument."""
    try:
        found = True, describe_hdf5(Path(sys.argv[1]))
    except ShardError as error:
        found = False, str(error)
    sys.stdout.write(json.dumps(found))
