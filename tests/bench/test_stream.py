"""The benchmark of streamed images: its steps within a limit, and what it makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from spatialdl.bench import stream
from spatialdl.bench.stream_picture import draw


def step(side: float, **sizes: float) -> dict[str, Any]:
    found = {"fits": True, "seconds": 2 * side, "cpu_seconds": side, "resident_gb": side / 10}
    return {**found, "base_gb": 0.2, "base_data_gb": 0.1, "loss": 2.0, **sizes}


@pytest.fixture
def result() -> dict[str, Any]:
    options = stream._parse(["--sizes", "512", "128", "256", "--small-from", "512", "--tile", "64"])
    stored = dict.fromkeys(("written_gb", "read_gb", "stored_gb", "live_gb"), 1.5)
    refused = {"fits": False, "why": "can't allocate memory"}
    rows: list[dict[str, Any]] = []
    sides = [(128, "float32", 4.0), (256, "float32", None), (128, "bfloat16", 2.0)]
    for size, precision, ideal in [*sides, (512, "bfloat16", None)]:
        runs: list[dict[str, Any]] = []
        for more in (1, 2, 3):
            runs.append({"streamed": step(size / 16 * more, **stored), "limited": refused})
            if ideal:
                runs[-1]["ideal"] = step(ideal * more)
        rows.append({"size": size, "precision": precision, "grid": size // 64, "runs": runs})
    stream.complete(rows)
    largest = [
        {"precision": "float32", "whole": 64, "refused": 96, "streamed": 256},
        {"precision": "bfloat16", "whole": 0, "refused": None, "streamed": 512},
    ]
    found = {"command": "bench", "machine": "2 cores, X", "date": "today", "device": "CPU"}
    return {**found, "options": vars(options), "rows": rows, "largest": largest}


def test_what_was_not_measured_is_extrapolated_by_pixels_of_the_same_precision(
    result: dict[str, Any],
) -> None:
    seconds = [(row["cpu_seconds"], row["ideal"]["cpu_seconds"]) for row in result["rows"]]
    assert seconds == [(16, 8), (32, 32), (16, 4), (64, 64)]
    assert [row["is_measured"] for row in result["rows"]] == [True, False, True, False]


def test_the_table_has_a_line_for_each_size_and_the_largest_images(result: dict[str, Any]) -> None:
    lines = [line for line in stream.table(result).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2][:5] == ["128", "2 x 2", "32.0", "16.0", "2.00"]
    assert cells[3][:5] == ["256", "4 x 4", "64.0", "~64.0", "1.00"]
    assert cells[5][0] == "512, *bf16*"
    assert cells[5][-1] == "does not fit"
    assert cells[-2] == ["float32", "64", "96", "256", "16 or more"]
    assert cells[-1] == ["bfloat16", "0", "", "512", ""]
    result["rows"][1]["fits"] = False
    assert stream.table(result).count("does not fit") == 5


def test_the_picture_is_drawn(result: dict[str, Any], tmp_path: Any) -> None:
    draw(result, tmp_path / "stream.png")
    assert (tmp_path / "stream.png").stat().st_size > 5000


def test_steps_that_do_not_compute_the_same_are_refused() -> None:
    stream.check_alike(64, "float32", 2.0001, 2.0)
    for other in (2.001, float("nan")):
        with pytest.raises(RuntimeError, match="the loss of 64x64 in float32 is"):
            stream.check_alike(64, "float32", other, 2.0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sizes", "0"], "must be at least 1"),
        (["--live-gb", "3"], r"--live-gb 3.0 must be above 0 and below --limit-gb 2.0"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        stream._parse(words)


def test_the_largest_images_are_found_for_each_precision(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(_: Any, size: int, precision: str, words: list[str], __: int) -> dict[str, Any]:
        assert words == ["--limit-gb", "2.0"]
        taken = size**2 / (200_000 if precision == "float32" else 400_000)
        return {"fits": taken <= 2, "resident_gb": 1.99, "needed_gb": taken}

    monkeypatch.setattr(stream, "_step", found)
    options = stream._parse(["--sizes", "2048"])
    largest = stream._largest(options, result["rows"])
    assert [(one["whole"], one["refused"]) for one in largest] == [(576, 640), (832, 896)]
    assert [one["streamed"] for one in largest] == [256, 512]
