"""The list of benchmarks, the words that each refuses, and what all of them share."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from importlib import import_module

import pytest

from spatialdl.bench import results
from spatialdl.bench.__main__ import BENCHES, main


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), ([], 2), (["haloo"], "\nerror: unknown benchmark haloo")]
)
def test_every_benchmark_is_told_with_what_it_measures(words, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHES)
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize(
    ("bench", "words", "text"),
    [
        ("analysis", "--rows 10", "rows 2000 and width 32"),
        ("backend", "--ranks 1", "ranks must be at least 2"),
        ("backend", "--steps 1", "at least 2"),
        ("bag_end_to_end", "--tiles 1", "at least 1, tiles 2"),
        ("bag_memory", "--tiles 0", "must be at least 1"),
        ("channel_scaling", "--most 0", "must be at least 1 GPU"),
        ("channel_scaling", "--cluster abacus", "abacus is unknown"),
        ("halo", "--side 0", "at least 1"),
        ("halo", "--grid 1 1", "no halo"),
        ("io", "--rounds 0", "rounds must be at least 1"),
        ("io", "--boxes 0", "boxes must be at least 1"),
        ("io", "--side 1000", "smaller than a window of 1024"),
        ("io", "--giant 1000", "smaller than a box of 1024"),
        ("io", "--steps 4", "more than the 4 skipped"),
        ("io", "--compute 0", "more than 0 seconds"),
        ("io", "--workers -1", "0 or more"),
        ("io", "--rate 0.5", "rate must be at least 1"),
        ("late", "--rounds 0", "at least 1"),
        ("late", "--ranks 1", "ranks at least 2"),
        ("late", "--batch 6", "--batch 6 must be a multiple of --ranks 4"),
        ("memory", "--limit 0", "must be"),
        ("memory", "--ranks 0", "must be"),
        ("memory", "--largest 8", "must be"),
        ("overhead", "--rounds 0", "at least 1"),
        ("pipeline", "--rounds 0", "must be"),
        ("pipeline", "--ranks 1", "must be"),
        ("pipeline", "--microbatches 3", "must be"),
        ("pipeline", "--size 0", "must be"),
        ("plan", "--steps 1", "--steps 1 must be at least 2: the first is a warm-up"),
        ("scaling", "--most 0", "must be at least 1 GPU"),
        ("scaling", "--cluster abacus", "abacus is unknown"),
        ("spatial", "--rounds 0", "must be"),
        ("spatial", "--threads 3", "cannot be shared"),
        ("spatial", "--ddp", "must be|cannot be shared"),
        ("stream", "--sizes 0", "must be at least 1"),
        ("stream", "--live-gb 3", r"--live-gb 3.0 must be above 0 and below --limit-gb 2.0"),
        ("suite", "", "PyTorch has no accelerator"),
        ("suite", "--device cpu --ranks 0", "at least 1"),
        ("synthetic", "parallel=pp data.batch_sise=4", "nearest: data.batch_size"),
        ("synthetic", "parallel=none,ps", "parallel=ps is unknown"),
        ("synthetic", "parallel=pp data.batch_size=1", "cannot be split"),
        ("synthetic", "debug=overfit", "debug=overfit is not supported"),
        ("synthetic", "model=glob(res*)", "list the choices"),
        ("synthetic", "parallel=auto", "parallel.world"),
        ("synthetic", "model._target_=nowhere.Net", "cannot be imported"),
        ("synthetic", "--rounds 1", "--rounds 1 must be at least 2"),
        ("synthetic", "--warmup 0", "--warmup 0 must be at least 1"),
        ("tiling", "--rounds 0", "must be at least 1"),
        ("tiling", "--tiles 0", "must be at least 1"),
        ("tiling", "--most 0", "must be at least 1"),
        ("tiling", "--jobs 0", "must be at least 1"),
        ("tiling", "--side 512", "smaller than a tile of 1024"),
        ("whole_vs_tiles", "--seeds 0", "must be at least"),
        ("whole_vs_tiles", "--epochs 0", "must be at least"),
        ("whole_vs_tiles", "--slides 7", "must be at least"),
        ("whole_vs_tiles", "--validation 1", "must be at least"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    bench, words, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=text):
        import_module(f"spatialdl.bench.{bench}").main(words.split())
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_is_left_out(monkeypatch):
    for name in ("RANK", "SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "2" if name == "SIZE" else "0")
    with pytest.raises(ValueError, match="run it without a launcher"):
        import_module("spatialdl.bench.synthetic").main([])


def test_a_result_is_printed_written_and_drawn(tmp_path, capsys):
    path = tmp_path / "new" / "halo-1.5"
    results.publish({"a": 1}, str, lambda result, file: file.touch(), path)
    assert json.loads((tmp_path / "new" / "halo-1.5.json").read_text()) == {"a": 1}
    assert (tmp_path / "new" / "halo-1.5.png").exists()
    assert (tmp_path / "new" / "halo-1.5.md").read_text() == "{'a': 1}\n"
    assert "{'a': 1}" in capsys.readouterr().out


def test_tables_are_aligned_and_their_heading_names_the_device_where_it_is_not_the_cpu():
    assert results.markdown(["", "a", "us"], [["long name", "1", "1000.0"], ["b", "23", ""]]) == [
        "|           |   a |     us |",
        "| --------- | --: | -----: |",
        "| long name |   1 | 1000.0 |",
        "| b         |  23 |        |",
    ]
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
