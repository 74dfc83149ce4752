"""A process in which a reader is given one damaged file after the other, and that is watched.

A reader that crashes, hangs or wants too much memory takes the child with it, and not the test; so
does nothing that a C library may do. In the child every opening, renaming and starting that Python
does is looked at (`sys.addaudithook`): what lies outside of the folder of the inputs must not be
touched.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).parents[2]
CPU_LIMIT_S = 10.0
"""For an input; of the child's own time, as others may be at work on this machine."""
TIME_LIMIT_S = 120.0
"""For one that waits for something."""
MEMORY = 2**31  # bytes of addresses beyond those of a child that has read a valid input
_RENEWED_AFTER = 2000  # inputs: what leaks in a library is not what is looked for
_READ_ANYWHERE = ("/proc/", "/sys/", "/dev/", "/usr/", "/lib", "/etc/localtime", "/etc/ld.so")
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
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


class Target:
    """Something that reads files.

    Attributes:
        clean: exceptions besides `ValueError` and `OSError` that are good answers.
        names: what an error has to name.
    """

    clean: tuple[type[BaseException], ...] = ()
    names = ""

    def __init__(self, folder: Path) -> None:
        """Make what is needed beside the inputs, in an empty folder."""
        self._folder = folder

    def valid(self) -> list[bytes]:
        """Inputs that are read without an error."""
        raise NotImplementedError

    def attempt(self, number: int, data: bytes) -> None:
        """Read an input that was made of the valid one of this number."""
        raise NotImplementedError


class Child:
    """A process that reads for any target; after one that it did not survive there is another.

    Args:
        folder: its own, for the inputs and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._pool = folder, None
        folder.mkdir()

    def valid(self, target: str) -> list[bytes]:
        """The valid inputs of a target, see `tests.fuzzing.targets`; they have been read."""
        valid: list[bytes] = self._do(_valid, target)
        return valid

    def attempt(self, target: str, number: int, data: bytes, cpu_s: float = CPU_LIMIT_S) -> Outcome:
        """Give it an input.

        Args:
            number: of the valid input that `data` was made of.
        """
        try:
            return Outcome(*self._do(_attempt, target, number, data, cpu_s))
        except BrokenProcessPool:
            self._pool = None
            said = (self._folder / "stderr").read_bytes()[-3000:].decode(errors="replace")
            is_hang = "most recent call first" in said and "Fatal Python error" not in said
            return Outcome("hang" if is_hang else "crash", said)

    def _do(self, work: Any, *given: object) -> Any:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                1, spawn, _begin, (self._folder,), max_tasks_per_child=_RENEWED_AFTER
            )
        return self._pool.submit(work, *given).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


# --- the child's side


class _State:
    folder: Path
    readable: tuple[str, ...]
    targets: dict[str, tuple[Target, list[bytes]]]
    seen: list[str]


def _begin(folder: Path) -> None:
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)  # says where it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = (sys.prefix, sys.base_prefix, ROOT, folder)
    _State.folder, _State.targets, _State.seen = folder.resolve(), {}, []
    _State.readable = (*(os.path.realpath(path) + os.sep for path in own), *_READ_ANYWHERE)
    sys.addaudithook(_notice)


def _notice(event: str, given: tuple[Any, ...]) -> None:
    """Note what Python does outside of the folder."""
    if event == "open":
        path, mode, flags = given
        is_written = isinstance(flags, int) and bool(flags & _CHANGES)
        _look(event, path, is_written or bool(set(str(mode or "")) & set("wax+")))
    elif event in _PATH_EVENTS:
        for path in given:
            _look(event, _from_folder(path, given[-1]), is_written=True)
    elif event in _NEVER and not (event == "subprocess.Popen" and "-P" in given[1]):
        # but for the process in which `inspect` looks into HDF5 files
        _State.seen.append(f"{event} {given!r}"[:300])


def _look(event: str, path: object, is_written: bool) -> None:
    if isinstance(path, str | bytes):
        real = os.path.realpath(os.fsdecode(path))
        inside = (f"{_State.folder}{os.sep}",) if is_written else _State.readable
        if not f"{real}{os.sep}".startswith(inside) and real != os.devnull:
            _State.seen.append(f"{event} {'writes' if is_written else 'reads'} {real}"[:300])


def _from_folder(path: object, folder: object) -> object:
    """A path that may be relative to an open folder, as those of `shutil.rmtree` are."""
    if isinstance(path, str | bytes) and isinstance(folder, int) and folder >= 0:
        with suppress(OSError):
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
    return path


def _valid(name: str) -> list[bytes]:
    return _prepared(name)[1]


def _prepared(name: str) -> tuple[Target, list[bytes]]:
    """A target that has read its valid inputs: what it imports is there, and nothing is wrong."""
    if name not in _State.targets:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        kind: type[Target] = Misbehaving
        if name != Misbehaving.__name__:
            from tests.fuzzing.targets import TARGETS

            kind = TARGETS[name]
        shutil.rmtree(_State.folder / name, ignore_errors=True)  # of a child before
        (_State.folder / name).mkdir()
        target = kind(_State.folder / name)
        valid = target.valid()
        for number, one in enumerate(valid):
            target.attempt(number, one)
        _State.targets[name] = target, valid
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    return _State.targets[name]


def _attempt(name: str, number: int, data: bytes, cpu_s: float) -> tuple[str, str]:
    target = _prepared(name)[0]
    _State.seen.clear()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # ends this process
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    kind, said = _tried(target, number, data)
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()
    if _State.seen:
        return "wrong", f"{'; '.join(_State.seen)}; {kind} {said}"
    return kind, said


def _tried(target: Target, number: int, data: bytes) -> tuple[str, str]:
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


class Misbehaving(Target):
    """A reader that does what its input says: to see that it is noticed."""

    names = "a.txt"

    def valid(self) -> list[bytes]:
        return [b"read"]

    def attempt(self, number: int, data: bytes) -> None:
        outside = self._folder.parents[1] / "outside"
        if data == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif data == b"spin":
            while True:
                pass
        elif data == b"eat":
            bytearray(2**40)
        elif data == b"write":
            outside.touch()
        elif data == b"rename":
            (self._folder / "own").touch()
            (self._folder / "own").rename(outside)
        elif data == b"look":
            outside.with_name("secret").read_bytes()
        elif data == b"remove inside":
            (self._folder / "removed" / "twice").mkdir(parents=True)
            shutil.rmtree(self._folder / "removed")
        elif data == b"unpickle":
            pickle.loads(pickle.dumps(Path()))
        elif data == b"start":
            subprocess.run(["true"], check=True)
        elif data != b"read":
            raise {b"key": KeyError, b"clean": ValueError, b"unnamed": ValueError}[data](
                "a.txt" if data == b"clean" else "something"
            )
