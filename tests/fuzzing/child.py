"""A process in which a reader is given one damaged file after the other, and that is watched.

The parent gives each input, and hears what came of it. A reader that crashes, hangs or wants too
much memory takes the child with it, and not the test; so does nothing that a C library may do.
In the child every opening, renaming and starting that Python does is looked at
(`sys.addaudithook`): what lies outside of the folder of the inputs must not be touched.

    python -m tests.fuzzing.child FOLDER      reads inputs from stdin, answers on stdout
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

ROOT = Path(__file__).parents[2]
CPU_LIMIT_S = float(os.environ.get("FUZZING_CPU_LIMIT_S", "10"))
"""For an input; of the child's own time, as others may be at work on this machine."""
TIME_LIMIT_S = 120.0
"""For one that waits for something."""
MEMORY = 2**31  # bytes of addresses beyond those of a child that has read a valid input
_START_S = 600.0
_HEAD = struct.Struct("<IiI")  # bytes of the target's name, number of the input, its bytes
_PREPARE = -1
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
        self._process: subprocess.Popen[bytes] | None = None
        self._valid: dict[str, list[bytes]] = {}
        self._tried = 0

    def valid(self, target: str) -> list[bytes]:
        """The valid inputs of a target, see `tests.fuzzing.targets`; they have been read."""
        if self._process is None or self._tried >= _RENEWED_AFTER:
            self.close()
            self._start()
        if target not in self._valid:
            answer = self._asked(target, _PREPARE, b"", _START_S)
            if answer is None or answer[0] != "ready":
                self.close()
                raise RuntimeError(f"{target} does not read a valid input: {self._tail()}")
            self._valid[target] = [base64.b64decode(one) for one in answer[1:]]
        return self._valid[target]

    def attempt(self, target: str, number: int, data: bytes) -> Outcome:
        """Give it an input.

        Args:
            number: of the valid input that `data` was made of.
        """
        self.valid(target)
        self._tried += 1
        answer = self._asked(target, number, data, TIME_LIMIT_S)
        return self._ended() if answer is None else Outcome(*answer)

    def _asked(self, target: str, number: int, data: bytes, limit: float) -> Any:
        """What it says; None if it ended, or said nothing in time."""
        assert self._process is not None
        assert self._process.stdin is not None
        name = target.encode()
        try:
            head = _HEAD.pack(len(name), number, len(data))
            self._process.stdin.write(head + name + data)
            self._process.stdin.flush()
            return self._answer(self._process, limit)
        except BrokenPipeError:
            return None

    def _start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self._folder),
            "OMP_NUM_THREADS": "1",
        }
        self._folder.mkdir(exist_ok=True)
        self._errors = (self._folder / "stderr").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzzing.child", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env=environment,
        )
        self._valid, self._tried = {}, 0

    def _answer(self, process: subprocess.Popen[bytes], limit: float) -> Any:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit)[0]:
            return None
        head = process.stdout.read(4)
        if len(head) < 4:
            return None
        return json.loads(process.stdout.read(struct.unpack("<I", head)[0]))

    def _ended(self) -> Outcome:
        process = self._process
        assert process is not None
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # says where it is
            self.close()
            return Outcome("hang", self._tail())
        self.close()
        kind = "hang" if code == -signal.SIGPROF else "crash"
        return Outcome(kind, f"exit code {code}{self._tail()}")

    def _tail(self) -> str:
        self._errors.seek(0)
        return "\n" + self._errors.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
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


def _main(folder: Path) -> None:
    from tests.fuzzing.targets import TARGETS

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)  # says where it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    targets: dict[str, Any] = {}
    watch = _Watch(folder)
    while len(head := sys.stdin.buffer.read(_HEAD.size)) == _HEAD.size:
        length, number, size = _HEAD.unpack(head)
        name = sys.stdin.buffer.read(length).decode()
        data = sys.stdin.buffer.read(size)
        if number == _PREPARE:
            target, valid = _prepared(TARGETS[name], folder / name)
            targets[name] = target
            _say(answers, "ready", *(base64.b64encode(one).decode() for one in valid))
            continue
        watch.seen.clear()
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # ends this process
        kind, said = _tried(targets[name], number, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if watch.seen:
            kind, said = "wrong", f"{'; '.join(watch.seen)}; {kind} {said}"
        _say(answers, kind, said)


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


def _say(answers: IO[bytes], *words: str) -> None:
    text = json.dumps(words).encode()
    answers.write(struct.pack("<I", len(text)) + text)
    answers.flush()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
