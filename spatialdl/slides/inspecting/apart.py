"""Description of HDF5 files in a subprocess, since HDF5 may crash or hang on damaged files.

HDF5 does not validate the heaps of variable-length strings: a few damaged bytes cause an endless
loop. Reading pixels does not use these heaps, describing all of a file does.
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
_PROGRAM = "from spatialdl.slides.inspecting.apart import answer; answer()"


def describe_apart(path: Path, patience_s: float = PATIENCE_S) -> str:
    """Call `describe_hdf5` in a subprocess.

    Raises:
        ShardError: as `describe_hdf5`, and if HDF5 crashes or does not end in time.
    """
    check_start(path)
    home = str(Path(spatialdl.__file__).parents[1])
    import_path = os.pathsep.join([home, *filter(None, [os.getenv("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, os.fspath(path)],
            env={**os.environ, "PYTHONPATH": import_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
            check=False,
        )
        is_read, text = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise ShardError(
            f"cannot read {path}: HDF5 crashed or timed out, as the file is damaged; copy it again"
        ) from None
    if not is_read:
        raise ShardError(str(text))
    return str(text)


def answer() -> None:
    """Describe the file in the argument; the entry point of the subprocess."""
    try:
        result = True, describe_hdf5(Path(sys.argv[1]))
    except ShardError as error:
        result = False, str(error)
    sys.stdout.write(json.dumps(result))
