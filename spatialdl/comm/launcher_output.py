"""Standard error of a launcher, without its notices of a failed job.

Open MPI prints a banner for every rank that aborts or exits with an error, before or after the
rank's own message. They are held back, and shown only if no rank has a message.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from threading import Thread
from typing import Any

_RULE = b"-" * 74 + b"\n"
_NOTICE = re.compile(
    rb"MPI_ABORT was invoked|Primary job +terminated"
    rb"|(prterun|mpirun|mpiexec|orterun) (has exited due to|detected that one|noticed that process)"
)
_HEAD = 80  # bytes that decide whether a banner is a notice
_ENDS_S = 5.0  # for processes that outlive the launcher and keep its standard error open


class NoticeFilter:
    """Divides a stream into notices of a failed job and all other output.

    Attributes:
        notices: banners so far, with their rules.
    """

    def __init__(self) -> None:
        self.notices: list[bytes] = []
        self._waiting = b""
        self._skips_blanks = False  # after a notice, as Open MPI ends it with some
        self._is_open = False  # a rule was read, and what follows is not known yet

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        """Output to pass on.

        Args:
            data: next bytes of the stream, cut anywhere.
            last: whether the stream ends with them.
        """
        self._waiting += data
        passed = b""
        while True:
            if self._skips_blanks:
                self._waiting = self._waiting.lstrip(b" \n\0")
                self._skips_blanks = not self._waiting
            text, rule, after = self._waiting.partition(_RULE)
            if not self._is_open:
                held = 0 if rule or last else _partial_rule(text)
                passed += text[: len(text) - held]
                self._waiting = after if rule else text[len(text) - held :]
                self._is_open = bool(rule)
                if not rule:
                    return passed
            elif _NOTICE.match(text):
                if not rule and not last:
                    return passed
                self.notices.append(_RULE + text + rule)
                self._waiting, self._is_open, self._skips_blanks = after, False, True
            elif not rule and not last and b"\n" not in text and len(text) < _HEAD:
                return passed
            else:
                passed, self._is_open = passed + _RULE, False


def _partial_rule(text: bytes) -> int:
    """Number of last bytes that may be the begin of a rule."""
    dashes = len(text) - len(text.rstrip(b"-"))
    return min(dashes, len(_RULE) - 1)


class LauncherOutput:
    """A pipe from a launcher's standard error, passed on while the launcher runs."""

    def __init__(self) -> None:
        self._read, self._written = os.pipe()
        self._filter = NoticeFilter()
        self._thread = Thread(target=self._pass_on, name="launcher output", daemon=True)

    def of_child(self) -> dict[str, Any]:
        """Arguments of ``Popen`` for the launcher.

        It keeps the reading end open as well: if this process is killed, its message about that
        must not kill it before it has ended its ranks.
        """
        return {"stderr": self._written, "pass_fds": (self._read,)}

    def start(self) -> None:
        """Pass on what the launcher writes, once it runs."""
        os.close(self._written)
        self._thread.start()

    def close(self) -> str:
        """Wait for the rest of the output; return the notices."""
        self._thread.join(_ENDS_S)
        return b"".join(self._filter.notices).decode(errors="replace")

    def _pass_on(self) -> None:
        with open(self._read, "rb", buffering=0) as stream:
            while data := stream.read(65536):
                _write(self._filter.feed(data))
        _write(self._filter.feed(b"", last=True))


def _write(data: bytes) -> None:
    if data and sys.__stderr__ is not None:
        with suppress(OSError):  # nobody reads it, but ranks must not wait for that
            sys.__stderr__.flush()
            sys.__stderr__.buffer.write(data)
            sys.__stderr__.buffer.flush()
