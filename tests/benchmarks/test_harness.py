"""The harness: turns, ratios, tables, results, pictures and ranks."""

from __future__ import annotations

import json
from argparse import Namespace

from PIL import Image

from benchmarks import harness
from benchmarks.harness import Bars, Lines


def test_sides_take_turns_in_alternating_order():
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    assert harness.alternate(sides, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert harness.median_ratio([1, 9, 4], [1, 3, 1]) == 3


def test_a_result_is_printed_written_and_drawn(tmp_path, capsys):
    result = {**harness.origin("x", ["--size", "3", "--out", "there"], "H100, by nccl"), "a": 1}
    rows = [["long name", "1", "1000.0"], ["b", "23", ""]]
    lines = harness.markdown(["", "a", "us"], rows)
    panels = [
        Bars("us", {"ours": [1, 3, 2], "theirs": [4]}, {"ours": "text"}, ours=["ours"], mark=2),
        Lines("curves", "x", "y", {"a": [(1, 2), (3, 4)], "b": []}, log="xy", mark=3),
    ]
    harness.publish(result, lines, panels, tmp_path / "new" / "x-1.5")
    text = capsys.readouterr().out
    assert text.splitlines()[:7] == [
        *("`python -m benchmarks.x --size 3`", ""),
        *(f"{result['machine']}, H100, by nccl, {result['date']}", ""),
        "|           |   a |     us |",
        "| --------- | --: | -----: |",
        "| long name |   1 | 1000.0 |",
    ]
    assert json.loads((tmp_path / "new" / "x-1.5.json").read_text()) == result
    assert (tmp_path / "new" / "x-1.5.md").read_text() in text
    with Image.open(tmp_path / "new" / "x-1.5.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


def test_a_result_is_kept_under_its_words(tmp_path):
    path = tmp_path / "new" / "kept.json"
    results = [harness.cached(path, [w], lambda n=n: {"x": n}) for n, w in enumerate("aab")]
    assert results == [{"x": 0}, {"x": 0}, {"x": 2}]


def test_a_worker_runs_in_a_process_with_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = Namespace(way="SHA-256 alone", side=8, most=3)
    found = harness.run_ranks("tiling", options, variables={"PYTHONPATH": "elsewhere"})
    assert found["tiles"] == 3
