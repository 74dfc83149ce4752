"""Differences of settings as text."""

from __future__ import annotations

from spatialdl.features.manifest import different


def test_settings_that_differ_are_named_where_they_lie():
    before = {"encoder": {"width": 3, "pool": None}, "dtype": "float16"}
    now = {"encoder": {"width": 4, "pool": None}, "dtype": "float16", "more": 1}
    assert different(before, before) == []
    assert different(before, now) == ["encoder.width was 3, is 4", "more was None, is 1"]
