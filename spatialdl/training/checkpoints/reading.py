"""Reading of checkpoints: verified by checksums, tensors read on demand.

Nothing is unpickled; all files are JSON or safetensors.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.common import fields
from spatialdl.common.files import file_status
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import CONTENT, RANDOM, check_seal, step_of

FORMAT = 2
"""Version of `checkpoint.json`."""

_FILE = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
_MOST_STEPS = 10**8

log = logging.getLogger("spatialdl.checkpoints")


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Checkpoint:
    """Checkpoint opened for reading.

    Args:
        path: folder of the checkpoint.

    Attributes:
        path: folder of the checkpoint.
        content: content of ``checkpoint.json``.

    Raises:
        CheckpointError: if ``checkpoint.json`` or the header of a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, content_of(path)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        for name in self.content["files"]:
            if name == RANDOM:
                continue
            try:
                file = self._open.enter_context(safe_open(path / name, "pt"))
            except (OSError, SafetensorError) as error:
                self.close()
                raise CheckpointError(f"{path / name}: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self._files if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._files:
            return None
        return tuple(self._files[name].get_slice(name).get_shape())

    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(prod(self.shape(name) or ()) for name in self._files)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        if rows is None:
            whole: Tensor = self._files[name].get_tensor(name)
            return whole
        part: Tensor = self._files[name].get_slice(name)[rows]
        return part

    def random_states(self, place: int) -> dict[str, Tensor]:
        """Read the random states of the rank at a place of the layout.

        Raises:
            CheckpointError: if the file is damaged.
        """
        prefix = f"{place}/"
        try:
            with safe_open(self.path / RANDOM, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / RANDOM}: {error}") from error


def content_of(path: Path) -> dict[str, Any]:
    """Read and verify ``checkpoint.json``.

    Raises:
        CheckpointError: if it is damaged, or of another version.
    """
    file = path / CONTENT
    try:
        text = file.read_text(encoding="utf-8")
        content = fields.table({CONTENT: fields.parse(text)}, CONTENT)
        version = content["format"]
        if version == FORMAT:
            check_seal(content)
            _check(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {fields.missing(error)}") from error
    if version != FORMAT:
        wrote = fields.shown(content.get("versions", "unknown"))
        raise CheckpointError(
            f"{file} has version {fields.shown(version)}, but this spatialdl reads {FORMAT}: use "
            f"the version that wrote it ({wrote})"
        )
    if content["step"] != step_of(path):
        raise CheckpointError(f"{file} is damaged: its step is not that of the folder")
    return content


def _check(content: Mapping[str, Any]) -> None:
    """Check that all fields needed to resume exist and have the right type.

    Raises:
        KeyError: if a field is missing.
        ValueError: if a field is invalid.
    """
    files = fields.table(content, "files")
    for name in files:
        if not _FILE.fullmatch(name):
            raise ValueError(f"{fields.shown(name)} is not a file name of a checkpoint")
        record = fields.table(files, name)
        fields.whole(record, "bytes")
        fields.text(record, "sha256")
    for key in ("config", "identity", "versions"):
        fields.table(content, key)
    if fields.whole(content, "step") > _MOST_STEPS:
        raise ValueError(f"step is {content['step']}")
    layout, update = fields.table(content, "layout"), fields.table(content, "update")
    fields.text(layout, "parallel")
    fields.text(layout, "placement")
    if fields.whole(update, "scheduler_steps") > content["step"]:
        raise ValueError(f"scheduler_steps is {update['scheduler_steps']}, more than step")
    if update["scaler"] is not None:
        scaler = fields.table(update, "scaler")
        fields.positive(scaler, "scale")
        fields.whole(scaler, "steps")


def damage_of(path: Path, name: str, record: dict[str, Any]) -> str | None:
    """Describe the damage of a file of a checkpoint; None if it is intact."""
    try:
        size = file_status(path, name).st_size
        if size != record["bytes"]:
            return f"{name} has {size} bytes instead of {record['bytes']}"
        if sha256(path / name) != record["sha256"]:
            return f"{name} was changed (SHA-256 mismatch)"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def damages(path: Path, world: Communicator) -> list[str]:
    """Describe the damage of a checkpoint, the same on all ranks; ranks share the files."""
    try:
        files = content_of(path)["files"]
    except CheckpointError as error:
        files, own = {}, [str(error)]
    else:
        own = []
    mine = sorted(files)[world.rank :: world.size]
    own += [text for name in mine if (text := damage_of(path, name, files[name]))]
    return sorted({text for texts in world.allgather(own) for text in texts})


def first_whole(paths: Sequence[Path], world: Communicator) -> Path:
    """Find the first intact checkpoint; collective.

    Raises:
        CheckpointError: if all are damaged.
    """
    for number, path in enumerate(paths):
        texts = damages(path, world)
        if not texts:
            return path
        if number + 1 < len(paths):
            if world.rank == 0:
                log.warning(
                    "%s is damaged: %s; trying the previous one, %s",
                    *(path, "; ".join(texts), paths[number + 1].name),
                )
            continue
        others = "" if len(paths) == 1 else f", as are the {len(paths) - 1} other checkpoints"
        raise CheckpointError(
            f"{path} is damaged: {'; '.join(texts)}{others}: set ckpt_path to another one, or "
            "start a new run"
        )
    raise CheckpointError("there is no checkpoint")
