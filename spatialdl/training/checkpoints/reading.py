"""Checkpoints read back: checked by their checksums, tensors only as far as they are wanted.

Nothing is unpickled: there are JSON and safetensors files only.
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
from spatialdl.data import fields
from spatialdl.data.inside import file_status
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import CONTENT, RANDOM, check_seal, step_of

FORMAT = 2
"""Version of `checkpoint.json`."""

_FILE = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
_MOST_STEPS = 10**8

log = logging.getLogger("spatialdl.checkpoints")


def sha256(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Checkpoint:
    """A checkpoint that is open for reading.

    Args:
        path: its folder.

    Attributes:
        content: of ``checkpoint.json``.

    Raises:
        CheckpointError: if its ``checkpoint.json`` or a file's header is damaged.
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
        """Of all its tensors."""
        return sum(prod(self.shape(name) or ()) for name in self._files)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        if rows is None:
            whole: Tensor = self._files[name].get_tensor(name)
            return whole
        some: Tensor = self._files[name].get_slice(name)[rows]
        return some

    def random_states(self, place: int) -> dict[str, Tensor]:
        """Of the random generators of the rank at a place of the layout.

        Raises:
            CheckpointError: the file is damaged.
        """
        prefix = f"{place}/"
        try:
            with safe_open(self.path / RANDOM, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / RANDOM}: {error}") from error


def content_of(path: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says.

    Raises:
        CheckpointError: if it is damaged, or of a later version.
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
            f"{file} is of version {fields.shown(version)}, this program reads {FORMAT}: take the "
            f"spatialdl that wrote it ({wrote})"
        )
    if content["step"] != step_of(path):
        raise CheckpointError(f"{file} is damaged: it does not describe this folder")
    return content


def _check(content: Mapping[str, Any]) -> None:
    """Whether all that a run goes on with is there, and of its type.

    Raises:
        KeyError, ValueError: it is not.
    """
    files = fields.table(content, "files")
    for name in files:
        if not _FILE.fullmatch(name):
            raise ValueError(f"{fields.shown(name)} is not the name of one of its files")
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
        raise ValueError(f"there are {update['scheduler_steps']} steps of its learning rate")
    if update["scaler"] is not None:
        scaler = fields.table(update, "scaler")
        fields.positive(scaler, "scale")
        fields.whole(scaler, "steps")


def damage_of(path: Path, name: str, record: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint."""
    try:
        size = file_status(path, name).st_size
        if size != record["bytes"]:
            return f"{name} has {size} bytes instead of {record['bytes']}"
        if sha256(path / name) != record["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs)"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def damages(path: Path, world: Communicator) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks, which share the work."""
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
    """The first checkpoint that is not damaged; all ranks must ask.

    Raises:
        CheckpointError: if all are.
    """
    for number, path in enumerate(paths):
        found = damages(path, world)
        if not found:
            return path
        if number + 1 < len(paths):
            if world.rank == 0:
                log.warning(
                    "%s is damaged: %s; the one before it is taken, %s",
                    *(path, "; ".join(found), paths[number + 1].name),
                )
            continue
        others = "" if len(paths) == 1 else f", nor is any of the {len(paths) - 1} others whole"
        raise CheckpointError(
            f"{path} is damaged: {'; '.join(found)}{others}: name another one by ckpt_path=..., or "
            "train anew"
        )
    raise CheckpointError("there is no checkpoint")
