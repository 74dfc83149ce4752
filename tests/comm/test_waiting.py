from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, get_ident

import pytest
import torch
from torch import nn

from spatialdl.comm import trace, waiting
from spatialdl.comm.waiting import each, module_of, noted, place_of, wait_of


def seen() -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    wait = wait_of(get_ident())
    return None if wait is None else (wait.what, wait.ranks)


def test_notes_within_each_other_are_told_from_the_widest_to_the_closest():
    assert seen() is None
    assert noted("data", None, seen) == (("data",), ())
    assert noted("sum", None, noted, "all-reduce", (0, 2), seen) == (("sum", "all-reduce"), (0, 2))
    assert noted("sum", (1,), noted, "sum", None, seen) == (("sum",), (1,))
    assert noted("halo", lambda: [3, 1], seen) == (("halo",), (3, 1))
    noted("halo", pytest.fail, int)  # ranks are worked out when they are asked for
    with pytest.raises(ZeroDivisionError):
        noted("division", (), divmod, 1, 0)
    assert seen() is None


def number() -> int:
    return wait_of(get_ident()).number


def test_each_wait_has_a_number_of_its_own():
    assert len({noted("same", (), number) for _ in range(3)}) == 3
    before, inner, after = noted(
        "outer", (), lambda: (number(), noted("inner", (), number), number())
    )
    assert before == after != inner


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


def test_a_thread_is_told_by_its_place_and_the_module_as_the_network_calls_it():
    """Not by what waits itself, nor by a module outside of forward."""
    last = Waits()
    network = nn.Sequential(nn.Tanh(), Around(nn.Sequential(nn.Tanh(), last)))
    ways = {
        "module 1.inner.1 (Waits)": lambda: network(torch.ones(1)),
        "Waits": lambda: last(torch.ones(1)),
        "": last.hold,
    }
    for module, do in ways.items():
        last.inside.clear()
        last.leave.clear()
        with thread_that_waits(last, do) as thread:
            place = place_of(thread)
            assert module_of(thread) == module
        assert place.startswith("tests/comm/test_waiting.py:")
        assert place.endswith(" in hold")
    assert place_of(-1) == "no Python frame"


@pytest.fixture(autouse=True)
def stopped():
    yield
    trace.stop()


def test_spans_lie_in_each_other_and_end_in_their_order():
    trace.start()
    with trace.span("compute", "outer", 7), trace.span("halo", "inner"):
        pass
    inner, outer = trace.take()
    assert (inner.kind, inner.name, inner.detail) == ("halo", "inner", None)
    assert (outer.kind, outer.name, outer.detail) == ("compute", "outer", 7)
    assert 0 <= outer.start <= inner.start <= inner.end <= outer.end
    assert trace.take() == []


def test_computing_is_over_when_the_device_has_settled():
    settled = []
    trace.start(lambda: settled.append(len(trace.take())))
    with trace.span("halo", "talk"):
        pass
    with trace.span("compute", "work"):
        pass
    assert settled == [1]


def test_waiting_for_items_is_recorded_one_by_one():
    trace.start()
    assert list(trace.each("data", "next", "abc")) == ["a", "b", "c"]
    assert [span.kind for span in trace.take()] == ["data"] * 4  # the last finds the end


@pytest.fixture
def counting():
    trace.count()
    yield
    trace.stop_counting()


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_moment_counts_once_for_the_outermost_wait(recorded, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trace.time, "perf_counter", lambda: now[0])
    if recorded:
        trace.start()
    with trace.span("compute", "work"):
        now[0] += 100
        with trace.span("hand-over", "outer"):
            now[0] += 1
            with trace.span("halo", "inner"):
                now[0] += 2
        with trace.span("halo", "alone"):
            now[0] += 4
    assert trace.counted() == {"halo": 4, "hand-over": 3, "reduce": 0, "data": 0}
    assert trace.counted() == dict.fromkeys(trace.WAITS, 0)
    assert len(trace.take()) == (4 if recorded else 0)


@pytest.mark.usefixtures("counting")
def test_a_wait_that_fails_has_ended():
    with pytest.raises(KeyError), trace.span("halo", "broken"):
        raise KeyError
    with trace.span("reduce", "next"):
        pass
    assert trace.counted()["reduce"] > 0


def test_nobody_counts_unless_asked_to():
    with trace.span("halo", "talk"):
        pass
    assert (trace.counted(), trace.watched()) == ({}, False)
