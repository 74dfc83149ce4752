"""Where a thread is that waits, as another one sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch
from torch import nn

from spatialdl.comm.stack import module_of, place_of
from spatialdl.comm.waiting import noted


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = Event(), Event()

    def hold(self):
        self.inside.set()
        noted("something", None, self.leave.wait, 60)

    def forward(self, x):
        self.hold()
        return x


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@contextmanager
def waiting(last: Waits, do: Callable[[], object]) -> Iterator[int]:
    """A thread that does something, and is in its last module."""
    thread = Thread(target=do)
    thread.start()
    assert last.inside.wait(60)
    yield thread.ident or 0
    last.leave.set()
    thread.join()


def test_the_place_is_the_closest_that_is_not_of_waiting_itself():
    last = Waits()
    with waiting(last, lambda: last(torch.ones(1))) as thread:
        place = place_of(thread)
    assert place.startswith("tests/comm/test_stack.py:")
    assert place.endswith(" in hold")
    assert place_of(-1) == "no place in Python"


def test_the_module_is_called_as_the_network_calls_it():
    last = Waits()
    network = nn.Sequential(nn.Tanh(), Around(nn.Sequential(nn.Tanh(), last)))
    with waiting(last, lambda: network(torch.ones(1))) as thread:
        assert module_of(thread) == "module 1.inner.1 (Waits)"


def test_a_network_of_one_module_is_told_by_its_class():
    last = Waits()
    with waiting(last, lambda: last(torch.ones(1))) as thread:
        assert module_of(thread) == "Waits"


def test_outside_of_forward_there_is_no_module():
    last = Waits()
    with waiting(last, last.hold) as thread:
        assert module_of(thread) == ""
        assert place_of(thread).startswith("tests/comm/test_stack.py:")
