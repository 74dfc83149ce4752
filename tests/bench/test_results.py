"""What the benchmarks share."""

from __future__ import annotations

import json
from argparse import Namespace

from spatialdl.bench import results


def test_a_result_is_printed_written_and_drawn(tmp_path, capsys):
    path = tmp_path / "new" / "halo-1.5"
    results.publish({"a": 1}, str, lambda result, file: file.touch(), path)
    assert json.loads((tmp_path / "new" / "halo-1.5.json").read_text()) == {"a": 1}
    assert (tmp_path / "new" / "halo-1.5.png").exists()
    assert (tmp_path / "new" / "halo-1.5.md").read_text() == "{'a': 1}\n"
    assert "{'a': 1}" in capsys.readouterr().out


def test_tables_are_aligned():
    assert results.markdown(["", "a", "us"], [["long name", "1", "1000.0"], ["b", "23", ""]]) == [
        "|           |   a |     us |",
        "| --------- | --: | -----: |",
        "| long name |   1 | 1000.0 |",
        "| b         |  23 |        |",
    ]


def test_a_heading_names_the_device_where_it_is_not_the_cpu():
    result = {"command": "x", "machine": "2 cores, y", "device": "CPU", "date": "today"}
    assert results.heading(result, "z") == ["`x`", "", "2 cores, y, z, today", ""]
    result["device"] = "H100, tensors by nccl"
    assert results.heading(result)[2] == "2 cores, y, H100, tensors by nccl, today"
    assert results.place(result) == "H100"


def test_options_as_words_of_the_command_line():
    options = Namespace(out="x", plain_ranks=True, ddp=False, only=None, grid=[2, 1], size=64)
    words = results.words_of(options)
    assert words == ["--plain-ranks", "--grid", "2", "1", "--size", "64"]
    command = results.origin("halo", words)["command"]
    assert command == "python -m spatialdl.bench halo --plain-ranks --grid 2 1 --size 64"
