"""A process in which a reader is given one damaged file after the other, and that is watched.

The parent gives each input, and hears what came of it. A reader that crashes, hangs or wants too
much memory takes the child with it, and not the test; so does nothing that a C library may do.
In the child every opening, renaming and starting that Python does is looked at
(`sys.addaudithook`): what lies outside of the folder of the inputs must not be touched.

    python -m tests.fuzzing.child TARGET FOLDER      reads inputs from stdin, answers on stdout
"""

from __future__ import annotations

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
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

ROOT = Path(__file__).parents[2]
CPU_LIMIT_S = float(os.environ.get("FUZZING_CPU_LIMIT_S", "10"))
"""For an input; of the child's own time, as others may be at work on this machine."""
TIME_LIMIT_S = 120.0
"""For one that waits for something."""
MEMORY = 2**31  # bytes of addresses beyond those of a child that has read a valid input
_START_S = 600.0
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
    """The parent's side.

    Args:
        target: name of a target, see `tests.fuzzing.targets`.
        folder: its own, for the inputs and nothing else.
    """

    def __init__(self, target: str, folder: Path) -> None:
        self._target, self._folder = target, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._tried = 0

    def attempt(self, number: int, data: bytes) -> Outcome:
        """Give it an input.

        Args:
            number: of the valid input that `data` was made of.
        """
        if self._process is None or self._tried >= _RENEWED_AFTER:
            self.close()
            self._start()
        self._tried += 1
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(struct.pack("<II", number, len(data)) + data)
            process.stdin.flush()
            answer = self._answer(process)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return Outcome(*answer)
        return self._ended(process)

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
            [sys.executable, "-m", "tests.fuzzing.child", self._target, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env=environment,
        )
        self._tried = 0
        ready = self._answer(self._process, _START_S)
        if ready is None or ready[0] != "ready":
            self.close()
            raise RuntimeError(f"{self._target} does not read a valid input: {self._tail()}")

    def _answer(self, process: subprocess.Popen[bytes], limit: float = TIME_LIMIT_S) -> Any:
        """What it says; None if it ended, or said nothing in time."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit)[0]:
            return None
        head = process.stdout.read(4)
        if len(head) < 4:
            return None
        return json.loads(process.stdout.read(struct.unpack("<I", head)[0]))

    def _ended(self, process: subprocess.Popen[bytes]) -> Outcome:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
                    self._look(event, path, writes=True)
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


def _main(name: str, folder: Path) -> None:
    from tests.fuzzing.targets import TARGETS

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)  # says where it is
    target = TARGETS[name](folder)
    for number, valid in enumerate(target.valid()):
        target.attempt(number, valid)  # imports all that is needed, and raises nothing
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch = _Watch(folder)
    _say(answers, "ready", "")
    while len(head := sys.stdin.buffer.read(8)) == 8:
        number, length = struct.unpack("<II", head)
        data = sys.stdin.buffer.read(length)
        watch.seen.clear()
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # ends this process
        kind, said = _tried(target, number, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if watch.seen:
            kind, said = "wrong", f"{'; '.join(watch.seen)}; {kind} {said}"
        _say(answers, kind, said)


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
    _main(sys.argv[1], Path(sys.argv[2]))
