"""Threads that take turns: exactly one is active, until it waits for what another must do.

So virtual ranks of one process run one after the other, in a fixed order, and nothing that they
share is ever used by two at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from spatialdl.comm import trace
from spatialdl.errors import CommMismatch

Result = TypeVar("Result")


class _Stopped(BaseException):
    """Ends a thread whose turn will not come any more, since another has failed."""


class Turns(Generic[Result]):
    """Runs functions as threads of which one is active at a time.

    Each begins with the random numbers, grad mode and autocast of the thread that calls `run`, and
    keeps its own: of PyTorch's default CPU generator, NumPy's and Python's.

    Args:
        count: number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._active = -1
        self._failure: BaseException | None = None

    def run(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """What each returns; returns when all are done.

        Raises:
            CommMismatch: all wait, and none for what another would still do.
            BaseException: the first that one of them has raised; the others have ended, too.
        """
        self._failure, self._results = None, [None] * self._count
        self._ready: list[Callable[[], bool] | None] = [_always] * self._count
        self._gates = [threading.Lock() for _ in works]
        self._over = threading.Event()
        for gate in self._gates:
            gate.acquire()
        state, contexts = _State(), _thread_contexts()
        self._states = [state] * self._count
        threads = [
            threading.Thread(
                target=copy_context().run,
                args=(self._work, number, work, contexts),
                name=f"virtual rank {number}",
                daemon=True,
            )
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        self._open(0)
        try:
            while not self._over.wait(0.5):  # so that signals are seen
                pass
        except BaseException as error:
            self._failure = self._failure or error
            self._over.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            state.restore()
            raise self._failure
        self._states[0].restore()
        return self._results  # type: ignore[return-value]

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Let others have their turns until `is_ready()`; called by the active thread."""
        me = self._active
        if is_ready():
            return
        self._ready[me] = is_ready
        self._states[me] = _State()
        self._pass_on(me)
        began = time.perf_counter()
        self._gates[me].acquire()
        trace.leave_out(time.perf_counter() - began)
        self._active = me
        if self._failure is not None:
            raise _Stopped
        self._states[me].restore()
        self._ready[me] = _always

    def _work(
        self,
        me: int,
        work: Callable[[], Result],
        contexts: Sequence[Callable[[], AbstractContextManager[Any]]],
    ) -> None:
        self._gates[me].acquire()
        self._active = me
        try:
            if self._failure is None:
                self._states[me].restore()
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context())
                    self._results[me] = work()  # type: ignore[call-overload]
                self._states[me] = _State()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        self._ready[me] = None
        self._pass_on(me)

    def _pass_on(self, me: int) -> None:
        """Give the turn to the next one that can go on, or end."""
        others = [(me + step) % self._count for step in range(1, self._count + 1)]
        unfinished = [one for one in others if self._ready[one] is not None]
        if not unfinished:
            self._over.set()
            return
        if self._failure is None:
            for one in unfinished:
                if self._ready[one]():  # type: ignore[misc]
                    self._open(one)
                    return
            ended = self._count - len(unfinished)
            self._failure = CommMismatch(
                f"{len(unfinished)} of {self._count} virtual ranks wait for each other"
                + (f", and {ended} have ended" if ended else "")
                + ": the network does not do the same on every one of them"
            )
        self._open(unfinished[0])

    def _open(self, number: int) -> None:
        self._gates[number].release()


def _always() -> bool:
    return True


class _State:
    """Of the generators of random numbers that the threads of a process share."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy, self._python = np.random.get_state(), random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _thread_contexts() -> list[Callable[[], AbstractContextManager[Any]]]:
    """What a thread sets for itself in PyTorch, as it is in this one."""
    contexts: list[Callable[[], AbstractContextManager[Any]]] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        # on a GPU autograd would go on in a thread of the device, past the turns
        partial(torch.autograd.set_multithreading_enabled, False),
    ]
    if torch.accelerator.is_available():  # the first one is what a new thread begins with
        contexts.append(partial(_on_device, torch.accelerator.current_device_index()))
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            contexts.append(partial(torch.autocast, device, dtype))
    return contexts


@contextmanager
def _on_device(index: int) -> Iterator[None]:
    torch.accelerator.set_device_index(index)
    yield
