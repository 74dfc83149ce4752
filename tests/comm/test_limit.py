from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest

from spatialdl.comm import limit
from spatialdl.comm.limit import limit_waits, seconds, timeout_of_groups


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit._Limit, "seconds", None)
    monkeypatch.setattr(limit._Limit, "is_set", False)


def test_torch_keeps_its_own_timeouts_until_a_limit_is_set():
    assert timeout_of_groups() is None
    assert seconds() is None


def test_groups_give_up_later_than_the_watchdog():
    limit_waits(90)
    assert seconds() == 90
    assert timeout_of_groups() >= timedelta(seconds=90 + 60)


@pytest.mark.parametrize("for_ever", [None, 0])
def test_ranks_that_may_wait_for_ever_are_not_stopped_by_groups(for_ever):
    limit_waits(for_ever)
    assert seconds() is None
    assert timeout_of_groups() > timedelta(days=30)


def test_it_needs_no_pytorch():
    """It is asked before ranks are started."""
    code = "import spatialdl.comm.limit, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
