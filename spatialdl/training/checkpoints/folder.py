"""Folder of a run's checkpoints.

RUN/checkpoints/
    step-00000100/       a complete checkpoint
        checkpoint.json          written last: list of the files, and all that is not a tensor
        stage-00.safetensors     weights, buffers and optimizer state of a stage
        random.safetensors       states of the random generators of each rank
    .step-00000200.tmp/  being written, or left by a run that was killed
    .step-00000100.replaced.tmp/  complete, while a new checkpoint of its step replaces it
    latest  best         names of such folders, as text, since some file systems have no links
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spatialdl.common.files import TEMPORARY, fsync_folder, replacing
from spatialdl.errors import CheckpointError

FOLDER = "checkpoints"
"""Name of the folder in a run directory."""

CONTENT = "checkpoint.json"
RANDOM = "random.safetensors"
LATEST, BEST = "latest", "best"

SEAL = "sha256"

_REPLACED = ".replaced.tmp"


def stage_file(stage: int) -> str:
    """File name of a stage."""
    return f"stage-{stage:02d}.safetensors"


def name_of(step: int) -> str:
    """Folder name of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Step of a checkpoint folder; None if it is not named as one."""
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(match[1]) if match else None


def temporary_of(folder: Path, step: int) -> Path:
    """Folder in which the checkpoint of a step is written."""
    return folder / f".{name_of(step)}.tmp"


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, earliest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if step_of(path) is not None]
    return sorted((path for path in paths if (path / CONTENT).is_file()), key=_step)


def _step(path: Path) -> int:
    step = step_of(path)
    if step is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return step


def pointed(pointer: Path) -> Path | None:
    """Checkpoint that the file `latest` or `best` names; None if it does not exist."""
    try:
        path = pointer.with_name(pointer.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None
    return path if step_of(path) is not None and (path / CONTENT).is_file() else None


def sealed(content: Mapping[str, Any]) -> str:
    """JSON text with the SHA-256 of the rest of its content as `SEAL`."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps({SEAL: _digest(plain), **plain}, indent=1)


def check_seal(content: Mapping[str, Any]) -> None:
    """Verify the SHA-256 of `sealed`.

    Raises:
        ValueError: if it differs.
    """
    rest = {key: value for key, value in content.items() if key != SEAL}
    if content.get(SEAL) != _digest(rest):
        raise ValueError("content was changed (SHA-256 mismatch)")


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def publish(temporary: Path, content: dict[str, Any]) -> Path:
    """Write `checkpoint.json` and rename the checkpoint to its final name.

    Replaces a checkpoint of the same step, which was abandoned by resuming earlier, or written
    before the validation that made it the best.
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
    """Write the name of a checkpoint to the file `latest` or `best`."""
    with replacing(folder / pointer) as file:
        file.write(f"{path.name}\n".encode())


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all checkpoints except the last `keep` up to the newest, and the best one.

    Steps after the newest were abandoned by resuming earlier.
    """
    step, best = _step(newest), pointed(folder / BEST)
    until = [path for path in complete(folder) if _step(path) <= step]
    for path in complete(folder):
        if path not in until[-keep:] and path != best:
            remove(path)
    clean(folder)


def remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that its name never has part of it."""
    left = path.with_name(f".{path.name}.old.tmp")
    shutil.rmtree(left, ignore_errors=True)
    path.rename(left)
    shutil.rmtree(left, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove temporary files of killed runs; restore checkpoints whose replacement failed."""
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
    """Checkpoints to resume from, first choice first.

    Args:
        wanted: ``latest`` (of `run_dir`), or the path of a run directory, of its folder of
            checkpoints, of ``latest`` or ``best`` in it, or of one checkpoint.
        run_dir: run directory that ``latest`` refers to.

    Returns:
        Folders; empty if ``latest`` is wanted and `run_dir` has no checkpoint yet.

    Raises:
        CheckpointError: if the path does not exist or has no checkpoint.
    """
    if wanted == LATEST:
        return _newest_first(run_dir / FOLDER)
    path = Path(wanted).expanduser().absolute()
    if not path.exists():
        raise CheckpointError(
            f"ckpt_path={wanted} does not exist: set a run directory, or a checkpoint in it"
        )
    if path.is_file():
        named = pointed(path)
        if named is None:
            raise CheckpointError(f"ckpt_path={wanted} does not name an existing checkpoint")
        return [named]
    if (path / CONTENT).is_file():
        return [path]
    paths = _newest_first(path / FOLDER) or _newest_first(path)
    if not paths:
        raise CheckpointError(
            f"ckpt_path={wanted} has no complete checkpoint: expected a folder such as "
            f"{FOLDER}/{name_of(100)} with a {CONTENT}"
        )
    return paths


def _newest_first(folder: Path) -> list[Path]:
    """Checkpoints up to the one that `latest` names; later ones were abandoned."""
    paths, latest = complete(folder), pointed(folder / LATEST)
    if latest is not None:
        paths = [path for path in paths if _step(path) <= _step(latest)]
    return paths[::-1]
