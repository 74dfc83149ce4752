"""Memory of large tensors, in processes of their own."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from spatialdl.comm import allocator
from tests.comm.programs import run

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
linux = pytest.mark.skipif(not PAGES.exists(), reason="huge pages and glibc's settings are Linux's")
LARGE = """
import os, re
from pathlib import Path
import spatialdl
import torch

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

tensors = [torch.ones(9 * 2**18) for _ in range(12)]  # 9 MB each
pages = re.findall(r"AnonHugePages: +(\\d+)", Path("/proc/self/smaps").read_text())
before = resident()
del tensors[::2]
print(sum(map(int, pages)) / 1024, before - resident())
del tensors
"""
HOLES = """
from spatialdl.comm.allocator import Holes

def returned():
    before = resident()
    holes.give_back()
    return before - resident()

holes, tensors = Holes(), [torch.ones(2**18) for _ in range(256)]  # of 1 MB
del tensors[::2]
found = [returned()]
tensors += [torch.ones(2**18) for _ in range(192)]
found.append(returned())
more = torch.ones(2**26)
found.append(returned())
del more, tensors[::2]
found.append(returned())
more = torch.ones(2**26)
found.append(returned())
print(*found)
"""
IN_A_HEAP = """
from spatialdl.comm.allocator import return_freed_memory
return_freed_memory()
tensors = [torch.ones(2**18) for _ in range(64)]  # of 1 MB
before = resident()
del tensors[::2]
print(before - resident())
"""


def tunables() -> dict[str, str]:
    """What ranks are started with, whatever the environment of this test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (allocator.SWITCH, *allocator._USER_SETTINGS):
            patch.delenv(name, raising=False)
        return allocator.environment()


SETTINGS = {"program": {}, "ranks": tunables(), "of the user": {allocator.SWITCH: "0"}}
both = pytest.mark.parametrize("settings", ["program", "ranks"])


@cache
def megabytes(settings: str, then: str = HOLES) -> list[list[float]]:
    """In huge pages while 12 tensors of 9 MB lived, and returned; and what follows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (allocator.SWITCH, *allocator._USER_SETTINGS):
            patch.delenv(name, raising=False)
        done = run("-c", LARGE + then, **SETTINGS[settings])
    assert done.returncode == 0, done.stderr
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


@linux
@both
def test_large_tensors_lie_in_huge_pages_and_are_returned_when_freed(settings):
    huge, returned = megabytes(settings)[0]
    assert returned > 45
    assert huge > 80 or "[never]" in PAGES.read_text()


@linux
@both
def test_holes_are_given_back_where_a_process_is_near_its_peak(settings):
    """Of a rank's activations of a few MB, they were a fifth of all that it had at its peak."""
    of_first, none_left, none_made, far, near = megabytes(settings)[1]
    assert of_first == pytest.approx(128, abs=8)
    assert [none_left, none_made, far] == pytest.approx([0] * 3, abs=8)
    assert near == pytest.approx(160, abs=8)


@linux
@pytest.mark.parametrize("settings", ["program", pytest.param("ranks", marks=pytest.mark.slow)])
def test_holes_in_a_heap_are_returned_where_memory_is_limited(settings):
    assert 28 <= megabytes(settings, IN_A_HEAP)[1][0] <= 40


@linux
def test_what_the_user_has_set_stays():
    (huge, _), holes = megabytes("of the user")
    assert huge < 80 or "[always]" in PAGES.read_text()
    assert holes == pytest.approx([0] * 5, abs=8)


@pytest.mark.parametrize(
    ("name", "value"), [(allocator.SWITCH, "0"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=2")]
)
def test_ranks_keep_what_the_user_has_set(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert allocator.environment() == {}


def test_elsewhere_nothing_is_set(monkeypatch):
    monkeypatch.delenv(allocator.SWITCH, raising=False)
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    allocator.prepare()
    allocator.return_freed_memory()
    assert not allocator.Holes().give_back()
    assert allocator.SWITCH not in os.environ
