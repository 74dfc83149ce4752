"""Memory of large tensors, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spatialdl.comm import allocator

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import os, re
from pathlib import Path
import {first}
import torch

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

tensors = [torch.ones(9 * 2**18) for _ in range(12)]  # 9 MB each
pages = re.findall(r"AnonHugePages: +(\\d+)", Path("/proc/self/smaps").read_text())
before = resident()
del tensors[::2]
print(sum(map(int, pages)) / 1024, before - resident())
"""


def huge_and_returned(first: str, program: str = PROGRAM, **environment: str) -> list[float]:
    """MB in huge pages while 12 tensors of 9 MB lived, and MB returned when every other died."""
    names = (allocator.SWITCH, *allocator._USER_SETTINGS)
    around = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", program.format(first=first)],
        env=around | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]


def tunables() -> dict[str, str]:
    """What ranks are started with, whatever the environment of this test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (allocator.SWITCH, *allocator._USER_SETTINGS):
            patch.delenv(name, raising=False)
        return allocator.environment()


@pytest.mark.skipif(not PAGES.exists(), reason="no huge pages on this system")
def test_large_tensors_lie_in_huge_pages_and_are_returned_when_freed():
    for environment in ({}, tunables()):
        huge, returned = huge_and_returned("spatialdl", **environment)
        assert returned > 45
        assert huge > 80 or "[never]" in PAGES.read_text()


@pytest.mark.skipif(not PAGES.exists(), reason="no huge pages on this system")
def test_what_the_user_has_set_stays():
    huge, returned = huge_and_returned("spatialdl", THP_MEM_ALLOC_ENABLE="0")
    plain = huge_and_returned("torch")
    assert [huge, returned] == pytest.approx(plain, abs=8)
    _, returned = huge_and_returned("spatialdl", MALLOC_MMAP_THRESHOLD_=str(2**30))
    assert returned < 45


@pytest.mark.parametrize(
    ("name", "value"), [(allocator.SWITCH, "0"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=2")]
)
def test_ranks_keep_what_the_user_has_set(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert allocator.environment() == {}


@pytest.mark.skipif(not PAGES.exists(), reason="glibc's settings are of Linux")
def test_holes_in_a_heap_are_returned_where_memory_is_limited():
    sizes = "torch.ones(9 * 2**18)", "torch.ones(2**18)"  # of 1 MB
    program = PROGRAM.replace(*sizes).replace("range(12)", "range(64)")
    call = "from spatialdl.comm import allocator; allocator.return_freed_memory()"
    for environment in ({}, tunables()):
        for more, least, most in (("", -1, 8), (call, 28, 40)):
            _, returned = huge_and_returned(f"spatialdl; {more}", program, **environment)
            assert least <= returned <= most


HOLES = """
import os
from pathlib import Path
import spatialdl, torch
from spatialdl.comm.allocator import Holes

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

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


@pytest.mark.skipif(not PAGES.exists(), reason="glibc's settings are of Linux")
def test_holes_are_given_back_where_a_process_is_near_its_peak():
    """Of a rank's activations of a few MB, they were a fifth of all that it had at its peak."""
    for environment in ({}, tunables()):
        of_first, none_left, none_made, far, near = huge_and_returned("os", HOLES, **environment)
        assert of_first == pytest.approx(128, abs=8)
        assert [none_left, none_made, far] == pytest.approx([0] * 3, abs=8)
        assert near == pytest.approx(160, abs=8)


@pytest.mark.skipif(not PAGES.exists(), reason="glibc's settings are of Linux")
def test_holes_stay_where_the_user_has_set_memory():
    found = huge_and_returned("os", HOLES, THP_MEM_ALLOC_ENABLE="0")
    assert found == pytest.approx([0] * 5, abs=8)


def test_elsewhere_nothing_is_set(monkeypatch):
    monkeypatch.delenv(allocator.SWITCH, raising=False)
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    allocator.prepare()
    allocator.return_freed_memory()
    assert not allocator.Holes().give_back()
    assert allocator.SWITCH not in os.environ
