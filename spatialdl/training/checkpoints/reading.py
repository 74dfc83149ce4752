"""Checkpoints read back: checked by their checksums, tensors only as far as they are wanted.

Nothing is unpickled: there are JSON and safetensors files only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import CONTENT, RANDOM, step_of, unsealed

FORMAT = 1
"""Version of `checkpoint.json`."""

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

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        if rows is None:
            whole: Tensor = self._files[name].get_tensor(name)
            return whole
        some: Tensor = self._files[name].get_slice(name)[rows]
        return some

    def random_states(self, rank: int) -> dict[str, Tensor]:
        """Of the random generators of a rank."""
        prefix = f"{rank}/"
        with safe_open(self.path / RANDOM, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def content_of(path: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says.

    Raises:
        CheckpointError: if it is damaged, or of a later version.
    """
    file = path / CONTENT
    try:
        content = unsealed(file.read_text(encoding="utf-8"))
        version, files = content["format"], content["files"]
        plain = all(Path(name).name == name for name in files)
        known = all({"bytes", "sha256"} <= set(one) for one in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{file} is of version {version}, this program reads {FORMAT}: take the spatialdl "
            f"that wrote it ({content.get('versions', {}).get('spatialdl', 'unknown')})"
        )
    if not plain or not known or content.get("step") != step_of(path):
        raise CheckpointError(f"{file} is damaged: it does not describe this folder")
    return dict(content)


def damage_of(path: Path, name: str, record: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint."""
    try:
        size = (path / name).stat().st_size
        if size != record["bytes"]:
            return f"{name} has {size} bytes instead of {record['bytes']}"
        if sha256(path / name) != record["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs)"
    except OSError as error:
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
            "start anew in another hydra.run.dir"
        )
    raise CheckpointError("there is no checkpoint")
