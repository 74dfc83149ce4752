"""The folder of a run's checkpoints.

RUN/checkpoints/
    step-00000100/       whole, or it would not have this name
        checkpoint.json          written last: what the files are, and all that is no tensor
        stage-00.safetensors     weights and buffers, and the optimizer's state, of a stage
        random.safetensors       states of the random generators of each rank
    .step-00000200.tmp/  being written, or left by a run that was killed
    .step-00000100.replaced.tmp/  whole, while another one of its step takes its name
    latest  best         names of such folders, as text: some file systems have no links
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spatialdl.data.saving import TEMPORARY, fsync_folder, replacing
from spatialdl.errors import CheckpointError

FOLDER = "checkpoints"
"""Its name in a run directory."""

CONTENT = "checkpoint.json"
RANDOM = "random.safetensors"
LATEST, BEST = "latest", "best"

SEAL = "sha256"

_REPLACED = ".replaced.tmp"


def stage_file(stage: int) -> str:
    """The file of a stage."""
    return f"stage-{stage:02d}.safetensors"


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None if its name is another's."""
    found = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(found[1]) if found else None


def temporary_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return folder / f".{name_of(step)}.tmp"


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the earliest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if step_of(path) is not None]
    return sorted((path for path in found if (path / CONTENT).is_file()), key=_step)


def _step(path: Path) -> int:
    step = step_of(path)
    if step is None:
        raise ValueError(f"{path} is not named as a checkpoint")
    return step


def pointed(pointer: Path) -> Path | None:
    """The checkpoint that `latest` or `best` names; None if there is no such one."""
    try:
        path = pointer.with_name(pointer.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None
    return path if step_of(path) is not None and (path / CONTENT).is_file() else None


def sealed(content: Mapping[str, Any]) -> str:
    """JSON that has, as `SEAL`, the SHA-256 of all the rest of it."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps({SEAL: _digest(plain), **plain}, indent=1)


def check_seal(content: Mapping[str, Any]) -> None:
    """Look whether all is as it was `sealed`.

    Raises:
        ValueError: it is not what was written.
    """
    rest = {key: value for key, value in content.items() if key != SEAL}
    if content.get(SEAL) != _digest(rest):
        raise ValueError("it is not what was written (its SHA-256 differs)")


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def publish(temporary: Path, content: dict[str, Any]) -> Path:
    """Complete a checkpoint by its `checkpoint.json`, and give it its name.

    One of the same step is replaced: of a curve that was left, or written before a validation was
    made that told it to be the best.
    """
    with replacing(temporary / CONTENT) as file:
        file.write(sealed(content).encode())
    folder, path = temporary.parent, temporary.with_name(name_of(content["step"]))
    if path.exists():
        replaced = folder / f".{path.name}{_REPLACED}"
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    temporary.rename(path)
    fsync_folder(folder)
    return path


def point(folder: Path, pointer: str, path: Path) -> None:
    """Have `latest` or `best` name a checkpoint."""
    with replacing(folder / pointer) as file:
        file.write(f"{path.name}\n".encode())


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep` up to the newest, and the best one.

    Later steps than the newest are of a curve that was left.
    """
    step, best = _step(newest), pointed(folder / BEST)
    until = [path for path in complete(folder) if _step(path) <= step]
    for path in complete(folder):
        if path not in until[-keep:] and path != best:
            remove(path)
    clean(folder)


def remove(path: Path) -> None:
    """Remove a checkpoint; at no time is a part of it under its name."""
    left = path.with_name(f".{path.name}.old.tmp")
    shutil.rmtree(left, ignore_errors=True)
    path.rename(left)
    shutil.rmtree(left, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what nobody writes any more; what was not replaced after all gets its name back."""
    for path in folder.glob(f".*{_REPLACED}"):
        name = folder / path.name.removeprefix(".").removesuffix(_REPLACED)
        if not name.exists():
            path.rename(name)
    for path in folder.glob(TEMPORARY):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def candidates(wanted: str, run_dir: Path) -> list[Path]:
    """The checkpoints from which a run may go on, the first choice first.

    Args:
        wanted: ``latest`` (of `run_dir`), or the path of a run directory, of its folder of
            checkpoints, of ``latest`` or ``best`` in it, or of one checkpoint.

    Returns:
        Nothing if there are none yet in `run_dir`, to which ``latest`` refers.

    Raises:
        CheckpointError: if there is nothing at that path.
    """
    if wanted == LATEST:
        return _newest_first(run_dir / FOLDER)
    path = Path(wanted).expanduser().absolute()
    if not path.exists():
        raise CheckpointError(
            f"ckpt_path={wanted} is not there: name a run directory, or a checkpoint in it"
        )
    if path.is_file():
        named = pointed(path)
        if named is None:
            raise CheckpointError(f"ckpt_path={wanted} names no checkpoint that is there")
        return [named]
    if (path / CONTENT).is_file():
        return [path]
    found = _newest_first(path / FOLDER) or _newest_first(path)
    if not found:
        raise CheckpointError(
            f"ckpt_path={wanted} has no whole checkpoint: its folders are named "
            f"{FOLDER}/{name_of(100)}, with a {CONTENT}"
        )
    return found


def _newest_first(folder: Path) -> list[Path]:
    """Those before the one that `latest` names, and that one; later ones were left."""
    found, latest = complete(folder), pointed(folder / LATEST)
    if latest is not None:
        found = [path for path in found if _step(path) <= _step(latest)]
    return found[::-1]
