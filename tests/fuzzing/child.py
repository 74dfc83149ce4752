"""A process in which a reader is given one damaged file after the other, and that is watched.

The parent gives each input, and hears what came of it. A reader that crashes, hangs or wants too
much memory takes the child with it, and not the test; so does nothing that a C library may do.
In the child every opening, renaming and starting that Python does is looked at
(`sys.addaudithook`): what lies outside of the folder of the inputs must not be touched.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).parents[2]
CPU_LIMIT_S = float(os.environ.get("FUZZING_CPU_LIMIT_S", "10"))
"""For an input; of the child's own time, as others may be at work on this machine."""
TIME_LIMIT_S = 120.0
"""For one that waits for something."""
MEMORY = 2**31  # bytes of addresses beyond those of a child that has read a valid input
_START_S = 600.0
_SPAWN = multiprocessing.get_context("spawn")
_RENEWED_AFTER = 2000  # inputs: what leaks in a library is not what is looked for
_READ_ANYWHERE = ("/proc/", "/sys/", "/dev/", "/usr/", "/lib", "/etc/localtime", "/etc/ld.so")
_PATH_EVENTS = {
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
}
_NEVER = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"),
    *("socket.bind", "socket.connect", "pickle.find_class", "webbrowser.open"),
}


class Outcome(NamedTuple):
    """What became of an input: "read", "refused" (cleanly), or "wrong", "crash", "hang"."""

    kind: str
    said: str = ""

    @property
    def clean(self) -> bool:
        return self.kind in ("read", "refused")


class Child:
    """The parent's side: a process that reads for any target, which is prepared when it is first.

    Args:
        folder: its own, for the inputs and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: SpawnProcess | None = None
        self._valid: dict[str, list[bytes]] = {}
        self._tried = 0

    def valid(self, target: str) -> list[bytes]:
        """The valid inputs of a target, see `tests.fuzzing.targets`; they have been read."""
        if self._process is None or self._tried >= _RENEWED_AFTER:
            self.close()
            self._start()
        if target not in self._valid:
            answer = self._asked(_START_S, target, None, b"")
            if answer is None:
                self.close()
                raise RuntimeError(f"{target} does not read a valid input: {self._tail()}")
            self._valid[target] = answer
        return self._valid[target]

    def attempt(self, target: str, number: int, data: bytes) -> Outcome:
        """Give it an input.

        Args:
            number: of the valid input that `data` was made of.
        """
        self.valid(target)
        self._tried += 1
        answer = self._asked(TIME_LIMIT_S, target, number, data)
        return self._ended() if answer is None else Outcome(*answer)

    def _asked(self, limit: float, *question: object) -> Any:
        """What it says; None if it ended, or said nothing in time."""
        try:
            self._pipe.send(question)
            return self._pipe.recv() if self._pipe.poll(limit) else None
        except (EOFError, OSError):
            return None

    def _start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._errors = (self._folder / "stderr").open("w+b")
        self._pipe, its = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_main, args=(self._folder, its), daemon=True)
        self._process.start()
        its.close()
        self._valid, self._tried = {}, 0

    def _ended(self) -> Outcome:
        assert self._process is not None
        assert self._process.pid is not None
        self._process.join(1)
        code = self._process.exitcode
        if code is None:
            os.kill(self._process.pid, signal.SIGABRT)  # says where it is
        self.close()
        kind = "hang" if code in (None, -signal.SIGPROF) else "crash"
        return Outcome(kind, f"exit code {code}{self._tail()}")

    def _tail(self) -> str:
        self._errors.seek(0)
        return "\n" + self._errors.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(2)
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


# --- the child's side


class _Watch:
    """Notes what Python does outside of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder) + os.sep
        own = (sys.prefix, sys.base_prefix, str(ROOT), self._folder)
        self._readable = (*(os.path.realpath(path) + os.sep for path in own), *_READ_ANYWHERE)
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = given
            if isinstance(path, str | bytes):
                changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                writes = bool(isinstance(flags, int) and flags & changes)
                writes = writes or bool(set(str(mode or "")) & set("wax+"))
                self._look(event, path, writes)
        elif event in _PATH_EVENTS:
            for path in given:
                if isinstance(path, str | bytes):
                    self._look(event, _from_folder(path, given[-1]), writes=True)
        elif event in _NEVER and not self._is_ours(event, given):
            self.seen.append(f"{event} {given!r}"[:300])

    def _is_ours(self, event: str, given: tuple[Any, ...]) -> bool:
        """Whether this starts the process in which `inspect` looks into HDF5 files."""
        return event == "subprocess.Popen" and "-P" in given[1]

    def _look(self, event: str, path: str | bytes, writes: bool) -> None:
        real = os.path.realpath(os.fsdecode(path))
        inside = (self._folder,) if writes else self._readable
        if not f"{real}{os.sep}".startswith(inside) and real != os.devnull:
            self.seen.append(f"{event} {'writes' if writes else 'reads'} {real}"[:300])


def _from_folder(path: str | bytes, folder: Any) -> str:
    """A path that may be relative to an open folder, as those of `shutil.rmtree` are."""
    name = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        with suppress(OSError):
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    return name


def _main(folder: Path, pipe: Connection) -> None:
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    from tests.fuzzing.targets import TARGETS

    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)  # says where it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    targets: dict[str, Any] = {}
    watch = _Watch(folder)
    with suppress(EOFError):  # the parent has ended
        while True:
            name, number, data = pipe.recv()
            if number is None:
                targets[name], valid = _prepared(TARGETS[name], folder / name)
                pipe.send(valid)
                continue
            watch.seen.clear()
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # ends this process
            kind, said = _tried(targets[name], number, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if watch.seen:
                kind, said = "wrong", f"{'; '.join(watch.seen)}; {kind} {said}"
            pipe.send((kind, said))


def _prepared(make: Any, folder: Path) -> tuple[Any, list[bytes]]:
    """A target that has read its valid inputs: what it imports is there, and nothing is wrong."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    folder.mkdir(exist_ok=True)
    target = make(folder)
    valid = target.valid()
    for number, one in enumerate(valid):
        target.attempt(number, one)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    return target, valid


def _tried(target: Any, number: int, data: bytes) -> tuple[str, str]:
    try:
        target.attempt(number, data)
    except (*target.clean, ValueError, OSError) as error:
        text = str(error)
        if type(error).__module__ == "builtins" and target.names and target.names not in text:
            return "wrong", f"the error does not say which file: {traceback.format_exc()}"
        return "refused", f"{type(error).__name__}: {text[:500]}"
    except BaseException:
        return "wrong", traceback.format_exc()
    return "read", ""
