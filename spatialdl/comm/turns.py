"""Threads that take turns: exactly one is active, until it waits for another thread.

Virtual ranks of one process therefore run in sequence, in a fixed order, and never use shared
state concurrently.

On accelerators threads are reused by later runs. PyTorch caches the execution plans of cuDNN per
thread, and a new thread would build the plan of every convolution again, which takes longer than
the convolutions.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from spatialdl.comm import trace
from spatialdl.errors import CommMismatch

Result = TypeVar("Result")


class _Stopped(BaseException):
    """Ends a thread after another thread has failed."""


class Turns(Generic[Result]):
    """Runs functions as threads of which one is active at a time.

    Each begins with the random state, grad mode and autocast of the thread that calls `run`, and
    keeps a separate state of PyTorch's default CPU generator, NumPy's and Python's.

    Args:
        count: number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._active = -1
        self._failure: BaseException | None = None

    def run(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run `works` to completion and return their results.

        Raises:
            CommMismatch: if all threads wait for each other.
            BaseException: the first exception that a thread raised; all threads have ended.
        """
        self._failure, self._results = None, [None] * self._count
        self._ready: list[Callable[[], bool] | None] = [_always] * self._count
        self._gates = [threading.Lock() for _ in works]
        self._over = threading.Event()
        for gate in self._gates:
            gate.acquire()
        state, contexts = _State(), _thread_contexts()
        self._states = [state] * self._count
        threads = [_Thread.take(number) for number in range(self._count)]
        for number, (thread, work) in enumerate(zip(threads, works, strict=True)):
            thread.start(partial(copy_context().run, self._work, number, work, contexts))
        self._open(0)
        try:
            while not self._over.wait(0.5):  # so that signals are handled
                pass
        except BaseException as error:
            self._failure = self._failure or error
            self._over.wait()
        for thread in threads:
            thread.join()
            thread.leave()
        if self._failure is not None:
            state.restore()
            raise self._failure
        self._states[0].restore()
        return self._results  # type: ignore[return-value]

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Run other threads until `is_ready()`; called by the active thread."""
        own = self._active
        if is_ready():
            return
        self._ready[own] = is_ready
        self._states[own] = _State()
        self._switch(own)
        began = time.perf_counter()
        self._gates[own].acquire()
        trace.leave_out(time.perf_counter() - began)
        self._active = own
        if self._failure is not None:
            raise _Stopped
        self._states[own].restore()
        self._ready[own] = _always

    def _work(
        self,
        own: int,
        work: Callable[[], Result],
        contexts: Sequence[Callable[[], AbstractContextManager[Any]]],
    ) -> None:
        self._gates[own].acquire()
        self._active = own
        try:
            if self._failure is None:
                self._states[own].restore()
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context())
                    self._results[own] = work()  # type: ignore[call-overload]
                self._states[own] = _State()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        self._ready[own] = None
        self._switch(own)

    def _switch(self, own: int) -> None:
        """Activate the next thread that is ready, or finish."""
        following = [(own + step) % self._count for step in range(1, self._count + 1)]
        unfinished = [number for number in following if self._ready[number] is not None]
        if not unfinished:
            self._over.set()
            return
        if self._failure is None:
            for number in unfinished:
                if self._ready[number]():  # type: ignore[misc]
                    self._open(number)
                    return
            ended = self._count - len(unfinished)
            self._failure = CommMismatch(
                f"deadlock: {len(unfinished)} of {self._count} virtual ranks wait for each other"
                + (f", and {ended} have ended" if ended else "")
                + ": the network must execute the same operations on every virtual rank"
            )
        self._open(unfinished[0])

    def _open(self, number: int) -> None:
        self._gates[number].release()


_kept: dict[int, list[_Thread]] = {}
"""Idle threads by virtual rank."""

os.register_at_fork(after_in_child=_kept.clear)  # a child process has no other threads


class _Thread:
    """A thread that runs jobs, kept for later runs on machines with an accelerator.

    Args:
        number: of the virtual rank whose jobs it runs.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, number: int) -> _Thread:
        """Return a kept thread of this virtual rank, or a new one."""
        try:
            return _kept[number].pop()
        except LookupError:
            return cls(number)

    def start(self, job: Callable[[], None]) -> None:
        """Start a job, which must not raise."""
        self._is_done.clear()
        self._thread.name = f"virtual rank {self._number}"
        self._jobs.put(job)

    def join(self) -> None:
        """Wait until the job has returned and is not referenced any more."""
        self._is_done.wait()

    def leave(self) -> None:
        """Keep the thread for a later run, or end it."""
        if torch.accelerator.is_available():
            self._thread.name = f"spare thread {self._number}"
            _kept.setdefault(self._number, []).append(self)
            return
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
            self._is_done.set()


def _always() -> bool:
    return True


class _State:
    """State of the random generators that the threads of a process share."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy, self._python = np.random.get_state(), random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _thread_contexts() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts that reproduce the thread-local PyTorch settings of this thread."""
    contexts: list[Callable[[], AbstractContextManager[Any]]] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        # on a GPU autograd would run in a device thread, outside of the turns
        partial(torch.autograd.set_multithreading_enabled, False),
    ]
    if torch.accelerator.is_available():  # a new thread starts on the first device's default stream
        contexts.append(partial(_on_stream, torch.accelerator.current_stream()))
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            contexts.append(partial(torch.autocast, device, dtype))
    return contexts


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    torch.accelerator.set_stream(stream)  # of its device, too
    yield
