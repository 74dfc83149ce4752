"""Freed memory that stays: measured by page faults, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
import spatialdl
if sys.argv[1] == "keep":
    assert spatialdl.keep_freed_memory()
x = torch.ones(16 * 2**20)
for _ in range(10):  # the heap grows until a piece of it fits
    x.clone()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    x.clone()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep freed memory")
def test_buffers_are_used_again_without_new_pages() -> None:
    pages = 4 * 16 * 2**20 // 4096
    assert faults("keep") < pages // 10
    assert faults("leave") > 4 * pages
