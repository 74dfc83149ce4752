"""Processes of the benchmark `io`: a loader before an emulated accelerator, and a slow source.

The slow source is a folder whose files are read at a rate shared by all processes. Requests are
served in sequence and in pieces, so that concurrent readers share the rate. It throttles
`os.preadv`, which shards and the copier use, in every Python process with the
hook's folder in its PYTHONPATH: they run a copy of this file at start (`sitecustomize`), whose
imports are therefore of the standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BOX, VALUE, SEED = 1024, 7, 1
_VARIABLE = "SPATIALDL_BENCH_SLOW_SOURCE"
_STATE = struct.Struct("dQ")  # time at which the server is free again, and bytes served
_PIECE = 2**20  # bytes per request, as of network file systems
_IDLE_S = 0.05  # seconds of read-ahead of an idle server


class SlowSource:
    """Rate limiter shared by processes.

    Args:
        state: a file accessible to all processes.
        rate: bytes per second.
    """

    def __init__(self, state: str, rate: float) -> None:
        self._state, self._rate = state, rate

    def serve(self, count: int) -> None:
        """Block until `count` bytes have been served."""
        while count > 0:
            piece = min(count, _PIECE)
            self._wait(piece)
            count -= piece

    def served(self) -> int:
        """Bytes served so far, to all processes."""
        try:
            return int(_STATE.unpack(Path(self._state).read_bytes())[1])
        except FileNotFoundError:
            return 0

    def _wait(self, count: int) -> None:
        # opened each time: forked processes would share a lock
        file = os.open(self._state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = os.pread(file, _STATE.size, 0)
            free, served = _STATE.unpack(known) if known else (0.0, 0)
            free = max(free, time.monotonic() - _IDLE_S) + count / self._rate
            os.pwrite(file, _STATE.pack(free, served + count), 0)
        finally:
            os.close(file)
        time.sleep(max(0.0, free - time.monotonic()))


def slow_environment(folder: Path, rate: float, work: Path) -> tuple[SlowSource, Mapping[str, str]]:
    """Environment variables of processes that read `folder` at `rate`.

    Args:
        folder: the throttled folder.
        rate: bytes per second.
        work: an empty folder for hook and state.
    """
    hook, state = work / "hook", work / "state"
    hook.mkdir()
    shutil.copyfile(__file__, hook / "sitecustomize.py")
    settings = {"folder": str(folder.resolve()), "state": str(state), "rate": rate}
    path = os.pathsep.join(filter(None, [str(hook), os.getenv("PYTHONPATH")]))
    return SlowSource(str(state), rate), {_VARIABLE: json.dumps(settings), "PYTHONPATH": path}


def _install(folder: str, state: str, rate: float) -> None:
    source, plain = SlowSource(state, rate), os.preadv

    def preadv(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = plain(file, buffers, offset, flags)
        if os.readlink(f"/proc/self/fd/{file}").startswith(folder + os.sep):
            source.serve(count)
        return count

    os.preadv = preadv


def install_from(environ: Mapping[str, str], install: Callable[..., None] = _install) -> None:
    """Throttle this process, if its environment says so."""
    if _VARIABLE in environ:
        install(**json.loads(environ[_VARIABLE]))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Load an epoch, or read a box of a giant image."""
    return _read_giant(Path(options.giant)) if hasattr(options, "giant") else _load(options)


def _load(options: argparse.Namespace) -> dict[str, Any]:
    """End times of the steps; compute is emulated by sleeping, as in DLIO."""
    from spatialdl.comm.single_process import SingleProcess
    from spatialdl.data import ShardDataset
    from spatialdl.data.batches import Batching
    from spatialdl.data.loader import Loader
    from spatialdl.data.shard_usage import training_usage
    from spatialdl.data.views import Views
    from spatialdl.training.staging import StageTo, Staging

    dataset = ShardDataset(Path(options.folder))
    size = dataset.image_size(0)
    views = Views(dataset, size, augmentation=_preset(options.augment), seed=SEED)
    batching = Batching(options.batch, 1, 0, [(0, size[0], 0, size[1])], [None])
    batches = -(-len(views) // options.batch)
    began, ends = time.perf_counter(), []
    with ExitStack() as stack:
        if not options.staged:  # worker processes start during staging, as in training
            loader = Loader(views, batching, SEED, workers=options.workers)
        staging = Staging(
            SingleProcess(),
            StageTo(options.stage),
            [dataset],
            lambda: training_usage(views, batching, SEED, batches),
        )
        stack.enter_context(staging)
        if options.staged:
            _wait_for(Path(options.stage), len(dataset.manifest.shards))
            began = time.perf_counter()
            loader = Loader(views, batching, SEED, workers=options.workers)
        for _ in loader.batches():
            time.sleep(options.compute)
            ends.append(time.perf_counter() - began)
    loader.close()
    return {"ends": ends}


def _preset(name: str | None) -> Any:
    """Augmentation of a preset of data/augment."""
    if name is None:
        return None
    from hydra import compose, initialize_config_module

    from spatialdl.data.augmentation.settings import Augmentation

    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["data=shards", f"data/augment={name}", "data.path=none"])
    return Augmentation.from_config(config.data.augment)


def _wait_for(disk: Path, shards: int) -> None:
    from spatialdl.data.staging.cache import NodeCache

    jobs = NodeCache(disk).path / "jobs"
    while len(list(jobs.glob("*/*.h5"))) < shards:
        time.sleep(0.05)


def middle(side: int) -> int:
    """First row, and column, of the box of a giant image."""
    return (side - BOX) // 2


def _peak_mb() -> float:
    """Peak resident set; `getrusage` would include that of the parent."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def _read_giant(folder: Path) -> dict[str, Any]:
    """Peak MB before opening the data set, and after reading the box."""
    from spatialdl.data import ShardDataset

    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the imports
    before = _peak_mb()
    data = ShardDataset(folder)
    side, _ = data.image_size(0)
    begin = middle(side)
    box = data.read(0, (begin, begin + BOX, begin, begin + BOX))
    after = _peak_mb()
    if not (box == VALUE).all():
        raise RuntimeError("the box has other pixels than were written")
    return {"imports": before, "peak": after, "mb": after - before}


if __name__ == "sitecustomize":
    install_from(os.environ)
