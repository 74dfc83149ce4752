"""Logging of a run: rank 0 to console and file, errors of all ranks, each warning once.

Ranks other than 0 buffer their warnings until `log_warnings`, where rank 0 logs the ones it has
not logged itself. A rank that dies before that prints its buffer with the error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

log = logging.getLogger("spatialdl.ranks")

_MOST = 100  # warnings in the buffer of a rank
LISTED = 8
"""Maximum number of ranks that are listed one by one if they are not consecutive."""

_FORMAT = "[%(asctime)s]{}[%(name)s][%(levelname)s] - %(message)s"  # the format of Hydra


class _Once(logging.Filter):
    """Pass each warning once, to all handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if "is_new" not in record.__dict__:
            text = record.getMessage()
            record.__dict__["is_new"] = text not in self.seen
            self.seen.add(text)
        return bool(record.__dict__["is_new"])


class _Kept(logging.Handler):
    """Buffer of warnings, printed to stderr when the process exits with some left."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._rank = rank
        self.kept: dict[str, None] = {}
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.WARNING and text not in self._seen and len(self.kept) < _MOST:
            self._seen.add(text)
            self.kept[text] = None

    def take(self) -> list[str]:
        warnings = list(self.kept)
        self.kept.clear()
        return warnings

    def flush(self) -> None:
        for text in self.take():
            sys.stderr.write(f"rank {self._rank}: {text}\n")


class _State:
    once: _Once | None = None
    kept: _Kept | None = None


def start_log(rank: int) -> None:
    """Set up logging on one of several ranks; rank 0 logs in the format of Hydra."""
    prefix = "" if rank == 0 else f"[rank {rank}]"
    stream = logging.StreamHandler(sys.stdout)
    handlers: list[logging.Handler] = [stream]
    if rank > 0:
        stream.setLevel(logging.ERROR)
        _State.kept = _Kept(rank)
        handlers.append(_State.kept)
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=_FORMAT.format(prefix),
        handlers=handlers,
        force=True,
    )
    warn_once()


def warn_once() -> None:
    """Log each warning once, including Python warnings; call it after adding root handlers."""
    _State.once = _Once()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_State.once)
    logging.captureWarnings(True)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Also append log records of this process to a file."""
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter(_FORMAT.format("")))
    _tolerate_write_errors(file)
    if _State.once is not None:
        file.addFilter(_State.once)
    root = logging.getLogger()
    root.addHandler(file)
    try:
        yield
    finally:
        root.removeHandler(file)
        with suppress(OSError):  # a full disk
            file.close()


def _tolerate_write_errors(file: logging.FileHandler) -> None:
    """Report the first OSError, such as a full disk; buffered records are written later."""
    default, reported = file.handleError, set[str]()

    def handle_error(record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            default(record)
        elif not reported:
            reported.add(file.baseFilename)
            sys.stderr.write(f"cannot write to {file.baseFilename}: {error.strerror}\n")

    file.handleError = handle_error  # type: ignore[method-assign]


def kept_warnings() -> int:
    """Number of warnings in this rank's buffer."""
    return 0 if _State.kept is None else len(_State.kept.kept)


def log_warnings(world: Communicator) -> None:
    """Log the buffered warnings of all ranks on rank 0; collective, all ranks must call it."""
    gathered = world.gather([] if _State.kept is None else _State.kept.take())
    if gathered is None:
        return
    seen: set[str] = set() if _State.once is None else _State.once.seen
    by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(gathered):
        for text in texts:
            by_text.setdefault(text, []).append(rank)
    for text, ranks in by_text.items():
        if text not in seen:
            seen.add(text)
            single = len(ranks) == 1
            origin = ranks_text(ranks) if single else f"{len(ranks)} ranks, first {ranks[0]}"
            log.warning("%s: %s", origin, text)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 3", "ranks 0 to 5", "ranks 0, 2, 4", "ranks 0, 2, 4, 6 ... 62"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) <= LISTED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[: LISTED // 2]))} ... {ranks[-1]}"
