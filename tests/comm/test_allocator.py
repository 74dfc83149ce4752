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


IN_CHILDREN = """
import os, sys
import torch
for variables, program in {programs!r}:
    child = os.fork()  # each has memory of its own, and PyTorch is imported once
    if child == 0:
        os.environ.update(variables)
        exec(program, {{}})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
PROGRAMS = [({}, LARGE + HOLES), ({}, LARGE + IN_A_HEAP), ({allocator.SWITCH: "0"}, LARGE + HOLES)]


@cache
def megabytes(of_ranks: bool) -> list[list[list[float]]]:
    """What each of the programs prints: in huge pages, and returned; and what follows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (allocator.SWITCH, *allocator._USER_SETTINGS):
            patch.delenv(name, raising=False)
        variables = allocator.environment() if of_ranks else {}
        programs = PROGRAMS[:2] if of_ranks else PROGRAMS
        done = run("-c", IN_CHILDREN.format(programs=programs), **variables)
    assert done.returncode == 0, done.stderr
    lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    return [lines[at : at + 2] for at in range(0, len(lines), 2)]


@linux
@pytest.mark.parametrize("of_ranks", [False, True], ids=["program", "ranks"])
def test_memory_of_large_tensors(of_ranks):
    """Of a rank's activations of a few MB, holes were a fifth of all that it had at its peak."""
    (large, holes), (_, heap) = megabytes(of_ranks)[:2]
    assert large[1] > 45, "tensors are returned when they are freed"
    assert large[0] > 80 or "[never]" in PAGES.read_text(), "they lie in huge pages"
    of_first, none_left, none_made, far, near = holes
    assert of_first == pytest.approx(128, abs=8)
    assert [none_left, none_made, far] == pytest.approx([0] * 3, abs=8)
    assert near == pytest.approx(160, abs=8), "of a process near its peak"
    assert 28 <= heap[0] <= 40, "where memory is limited"


@linux
def test_what_the_user_has_set_stays():
    (huge, _), holes = megabytes(of_ranks=False)[2]
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
