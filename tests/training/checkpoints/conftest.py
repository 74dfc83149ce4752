from __future__ import annotations

import pytest

from spatialdl.training import run_directory


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """The picture of the loss takes longer than these runs, and has tests of its own."""
    monkeypatch.setattr(run_directory, "draw", lambda *_: None)
