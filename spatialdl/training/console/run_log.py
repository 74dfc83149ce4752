"""What a run says: rank 0 to the terminal and a file, errors of any rank, warnings once.

Ranks other than 0 keep their warnings until all meet (`tell_warnings`), where rank 0 says those
that it has not said itself. A rank that dies before says them with its error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spatialdl.training.console.layout_text import ranks_text

if TYPE_CHECKING:
    from spatialdl.comm.communicator import Communicator

log = logging.getLogger("spatialdl.ranks")

_MOST = 100  # warnings that a rank keeps
_FORMAT = "[%(asctime)s]{}[%(name)s][%(levelname)s] - %(message)s"  # as Hydra's


class _Once(logging.Filter):
    """Lets each warning pass once, to all handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if "is_new" not in record.__dict__:
            text = record.getMessage()
            record.__dict__["is_new"] = text not in self.said
            self.said.add(text)
        return bool(record.__dict__["is_new"])


class _Kept(logging.Handler):
    """Keeps warnings; says what nobody took when this process ends."""

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
        found = list(self.kept)
        self.kept.clear()
        return found

    def flush(self) -> None:
        for text in self.take():
            sys.stderr.write(f"rank {self._rank}: {text}\n")


class _State:
    once: _Once | None = None
    kept: _Kept | None = None


def start_log(rank: int) -> None:
    """Of one of several ranks; rank 0 logs as Hydra does."""
    who = "" if rank == 0 else f"[rank {rank}]"
    stream = logging.StreamHandler(sys.stdout)
    handlers: list[logging.Handler] = [stream]
    if rank > 0:
        stream.setLevel(logging.ERROR)
        _State.kept = _Kept(rank)
        handlers.append(_State.kept)
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=_FORMAT.format(who),
        handlers=handlers,
        force=True,
    )
    warn_once()


def warn_once() -> None:
    """From now on each warning appears once, Python's own too; handlers of the root are there."""
    _State.once = _Once()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_State.once)
    logging.captureWarnings(True)


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Meanwhile this process logs into a file, too, behind what is there."""
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter(_FORMAT.format("")))
    _bear_full_disks(file)
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


def _bear_full_disks(file: logging.FileHandler) -> None:
    """A file that cannot be written to is said once; what fits its buffer is written later."""
    otherwise, said = file.handleError, set[str]()

    def tell(record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            otherwise(record)
        elif not said:
            said.add(file.baseFilename)
            sys.stderr.write(f"{file.baseFilename} cannot be written to: {error.strerror}\n")

    file.handleError = tell  # type: ignore[method-assign]


def kept_warnings() -> int:
    """How many this rank has that rank 0 does not know of."""
    return 0 if _State.kept is None else len(_State.kept.kept)


def tell_warnings(world: Communicator) -> None:
    """Rank 0 says what the others have kept; all ranks must call it."""
    everybody = world.gather([] if _State.kept is None else _State.kept.take())
    if everybody is None:
        return
    said: set[str] = set() if _State.once is None else _State.once.said
    ranks: dict[str, list[int]] = {}
    for rank, texts in enumerate(everybody):
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    for text, some in ranks.items():
        if text not in said:
            said.add(text)
            who = ranks_text(some[:1]) if len(some) == 1 else f"{len(some)} ranks, first {some[0]}"
            log.warning("%s: %s", who, text)
