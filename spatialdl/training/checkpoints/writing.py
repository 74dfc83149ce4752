"""Background writing of checkpoints.

Each rank passes copies of its tensors to a thread, which writes, hashes and syncs them. Threads do
not communicate: the all-reduce of each step carries two numbers per rank (`status`). When no rank
is busy, rank 0's thread completes the checkpoint, or removes it if a rank failed:

    write ──► complete ──► (nothing)
      └─ failed ─┴──────► discard ──► (nothing)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import sync
from spatialdl.training.checkpoints.content import Files
from spatialdl.training.checkpoints.folder import (
    BEST,
    FOLDER,
    LATEST,
    clean,
    point,
    prune,
    publish,
    temporary_of,
)
from spatialdl.training.checkpoints.reading import sha256

log = logging.getLogger("spatialdl.checkpoints")

Phase = Literal["write", "complete", "discard"] | None

Records = dict[str, dict[str, Any]]
"""Bytes and SHA-256 by file name."""

ROWS = "metrics.csv"
"""File in the run directory with one row per step, synced before each checkpoint."""


class Writer:
    """Writes the checkpoints of a run, one at a time; collective.

    Args:
        run_dir: run directory, the same on every rank.
        world: all ranks.
        keep: number of checkpoints to keep besides the best.

    Attributes:
        folder: folder of the checkpoints.
        last: step of the latest complete checkpoint; None without one.
    """

    def __init__(self, run_dir: Path, world: Communicator, keep: int) -> None:
        self.folder = run_dir / FOLDER
        self._world, self._keep = world, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._phase: Phase = None
        self._work: Future[Any] | None = None
        self._content: dict[str, Any] = {}
        self._is_best = False
        self.last: int | None = None

    def start(self, files: Files, content: dict[str, Any], is_best: bool = False) -> None:
        """Start writing a checkpoint, after a pending one.

        Args:
            files: tensors of this rank, freed as they are written.
            content: content of ``checkpoint.json`` without the files; rank 0's is written.
            is_best: whether it is the best so far.
        """
        self.wait()
        self._content, self._is_best = content, is_best
        temporary = temporary_of(self.folder, content["step"])
        self._work = self._thread.submit(_write, files, temporary)
        self._phase = "write"

    def status(self) -> tuple[float, float]:
        """Whether this rank is busy, and whether it has failed; 0 or 1, to be all-reduced."""
        if self._work is None:
            return 0.0, 0.0
        if not self._work.done():
            return 1.0, 0.0
        return 0.0, float(_reason(self._work) is not None)

    def advance(self, busy: float, failed: float) -> None:
        """Start the next phase if no rank is busy.

        Args:
            busy: sum of the first number of `status` over all ranks.
            failed: sum of the second number.
        """
        if self._phase is None or busy:
            return
        done, self._work = self._work, None
        if self._phase == "write":
            own = (_reason(done), done.result() if done and not done.exception() else {})
            gathered = self._world.gather(own)
            if gathered is not None and not failed:
                self._content["files"] = dict(sorted(merged(one for _, one in gathered).items()))
                self._submit(self._complete)
            elif gathered is not None:
                reasons = [f"rank {r}: {why}" for r, (why, _) in enumerate(gathered) if why]
                self._discard("; ".join(reasons))
        elif self._phase == "complete" and failed and self._world.rank == 0:
            self._discard(f"rank 0: {_reason(done)}")
        elif self._phase == "complete" and not failed:
            self.last = self._content["step"]
        self._phase = _after(self._phase, bool(failed))

    def _submit(self, work: Callable[[], None]) -> None:
        self._work = self._thread.submit(work)

    def _discard(self, reason: str) -> None:
        step, folder = self._content["step"], self.folder
        log.warning(
            "step %d: cannot write checkpoint (%s); training continues, the last one is unchanged",
            *(step, reason),
        )
        self._submit(lambda: clean(folder))

    def _complete(self) -> None:
        with suppress(OSError):  # unsynced rows would be lost if the node fails
            sync(self.folder.parent / ROWS)
        path = publish(temporary_of(self.folder, self._content["step"]), self._content)
        if self._is_best:
            point(self.folder, BEST, path)
        point(self.folder, LATEST, path)
        prune(self.folder, path, self._keep)
        log.info("checkpoint: %s%s", path, ", the best so far" if self._is_best else "")

    def wait(self) -> None:
        """Wait until the pending checkpoint is written or discarded; collective."""
        while self._phase is not None:
            if self._work is not None:
                self._work.exception()  # waits
            sums = self._world.all_reduce(torch.tensor(self.status(), dtype=torch.float64))
            self.advance(*sums.tolist())

    def close(self) -> None:
        """Stop the thread; call `wait` first, or a pending checkpoint is lost."""
        self._thread.shutdown()


def _after(phase: Phase, failed: bool) -> Phase:
    if phase == "discard":
        return None
    if failed:
        return "discard"
    return "complete" if phase == "write" else None


def merged(records: Any) -> Records:
    """Merge the records of all ranks, which write different files."""
    return {name: record for one in records for name, record in one.items()}


def _reason(work: Future[Any] | None) -> str | None:
    """Text of a file system error; other errors are raised."""
    error = work.exception() if work is not None else None
    if error is None:
        return None
    if isinstance(error, OSError | SafetensorError):
        return " ".join(str(error).split())
    raise error


def _write(files: Files, temporary: Path) -> Records:
    if not files:
        return {}
    temporary.mkdir(parents=True, exist_ok=True)
    return {name: save(temporary / name, files.pop(name)) for name in list(files)}


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Any:
    """Write and sync a safetensors file; return its record."""
    path.touch()
    mode = path.stat().st_mode  # the default mode: safetensors removes access for other users
    save_file(tensors, path, metadata)
    path.chmod(mode)
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
