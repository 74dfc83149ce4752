from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, get_ident

import pytest
import torch
from torch import nn

from spatialdl.comm import waiting
from spatialdl.comm.waiting import each, module_of, noted, place_of, wait_of


def seen() -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    wait = wait_of(get_ident())
    return None if wait is None else (wait.what, wait.ranks)


def test_notes_within_each_other_are_told_from_the_widest_to_the_closest():
    assert seen() is None
    assert noted("data", None, seen) == (("data",), ())
    assert noted("sum", None, noted, "all-reduce", (0, 2), seen) == (("sum", "all-reduce"), (0, 2))
    assert noted("sum", (1,), noted, "sum", None, seen) == (("sum",), (1,))
    assert seen() is None


def test_ranks_may_be_worked_out_when_they_are_asked_for():
    asked = []
    noted("halo", lambda: asked.append(1), int)
    assert not asked
    assert noted("halo", lambda: [3, 1], seen) == (("halo",), (3, 1))


def test_each_wait_has_a_number_of_its_own():
    numbers = [noted("same", (), lambda: wait_of(get_ident()).number) for _ in range(3)]
    assert len(set(numbers)) == 3

    def around() -> list[int]:
        return [
            wait_of(get_ident()).number,
            noted("inner", (), lambda: wait_of(get_ident()).number),
            wait_of(get_ident()).number,
        ]

    before, inner, after = noted("outer", (), around)
    assert before == after != inner


def test_an_error_leaves_no_note():
    with pytest.raises(ZeroDivisionError):
        noted("division", (), divmod, 1, 0)
    assert seen() is None


def test_items_are_handed_on_and_only_getting_them_is_noted():
    def items():
        for number in range(3):
            assert seen() == (("the next",), ())
            yield number

    found = []
    for item in each("the next", items()):
        assert seen() is None
        found.append(item)
    assert found == [0, 1, 2]


def test_another_thread_sees_what_this_one_is_in():
    inside, leave = Event(), Event()

    def wait() -> None:
        inside.set()
        leave.wait(60)

    thread = Thread(target=noted, args=("halo", (1,), wait))
    thread.start()
    assert inside.wait(60)
    assert wait_of(thread.ident).what == ("halo",)
    assert thread.ident in waiting.numbers()
    leave.set()
    thread.join()
    assert thread.ident not in waiting.numbers()


def test_the_place_is_told_with_what_is_done_there():
    waiting.at("step 3")
    waiting.doing("forward 1")
    assert waiting.place() == "step 3, forward 1"
    waiting.at("step 4")
    assert waiting.place() == "step 4"
    waiting.at("")
    assert waiting.place() == ""


def test_the_closest_timeout_counts():
    class Call:
        timeout_s = 3.0

    inner = noted("group", (0, 1), noted, Call(), None, lambda: wait_of(get_ident()))
    assert (inner.ranks, inner.limit_s) == ((0, 1), 3.0)
    assert noted("other", (0, 1), lambda: wait_of(get_ident())).limit_s == math.inf


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
def thread_that_waits(last: Waits, do: Callable[[], object]) -> Iterator[int]:
    """A thread that does something, and is in its last module."""
    thread = Thread(target=do)
    thread.start()
    assert last.inside.wait(60)
    yield thread.ident or 0
    last.leave.set()
    thread.join()


def test_the_place_is_the_closest_that_is_not_of_waiting_itself():
    last = Waits()
    with thread_that_waits(last, lambda: last(torch.ones(1))) as thread:
        place = place_of(thread)
    assert place.startswith("tests/comm/test_waiting.py:")
    assert place.endswith(" in hold")
    assert place_of(-1) == "no Python frame"


def test_the_module_is_called_as_the_network_calls_it():
    last = Waits()
    network = nn.Sequential(nn.Tanh(), Around(nn.Sequential(nn.Tanh(), last)))
    with thread_that_waits(last, lambda: network(torch.ones(1))) as thread:
        assert module_of(thread) == "module 1.inner.1 (Waits)"


def test_a_network_of_one_module_is_told_by_its_class():
    last = Waits()
    with thread_that_waits(last, lambda: last(torch.ones(1))) as thread:
        assert module_of(thread) == "Waits"


def test_outside_of_forward_there_is_no_module():
    last = Waits()
    with thread_that_waits(last, last.hold) as thread:
        assert module_of(thread) == ""
        assert place_of(thread).startswith("tests/comm/test_waiting.py:")
