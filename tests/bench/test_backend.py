"""The backend benchmark: what it makes of its measurements."""

from __future__ import annotations

import pytest

from spatialdl.bench import backend

FOUND = {
    "all_reduce": {
        "4": {
            "mpi4py backend": [2e-5, 3e-5, 9e-5],
            "raw mpi4py": [1e-5, 1e-5, 1e-5],
            "gloo": [4e-5, 9e-5, 9e-5],
            "PyTorch's call": [1e-5, 1e-5, 2e-5],
        },
        "4194304": {
            "mpi4py backend": [2e-3, 2e-3, 2e-3],
            "raw mpi4py": [2e-3, 2e-3, 2e-3],
            "gloo": [3e-3, 3e-3, 3e-3],
            "PyTorch's call": [1e-5, 1e-5, 1e-5],
        },
    },
    "step": {
        "mpi4py backend": [0.4, 0.5, 1.0],
        "gloo": [0.6, 0.6, 0.7],
        "no communication": [0.3, 0.3, 0.3],
    },
    "parameters": 23_500_000,
    "mpi": "Open MPI v5, x",
    "device": "CPU",
    "other": "gloo",
}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def result():
    return backend.summarise(backend._parse(["--ranks", "2", "--batch", "3"]), FOUND)


def test_differences_and_ratios_are_taken_round_by_round(result):
    assert result["sizes"]["4"]["above_raw_us"] == pytest.approx(20)
    assert result["sizes"]["4"]["to_other"] == pytest.approx(2)  # of 2, 3 and 1
    assert result["sizes"]["4194304"]["to_other"] == pytest.approx(1.5)
    assert result["step"]["throughput_to_other"] == pytest.approx(1.2)  # of 1.5, 1.2 and 0.7
    assert result["step"]["throughput_to_silent"] == pytest.approx(0.6)


def test_the_table_says_it_all(result):
    lines = backend.table(result).splitlines()
    assert "--ranks 2 --most 67108864" in lines[0]
    (small,) = (cells(line) for line in lines if line.startswith("| 4 B"))
    assert small[1:] == ["30.0", "10.0", "90.0", "20.0", "10.0", "2.00"]
    assert any(line.startswith("| 4 MB") for line in lines)
    (ours,) = (cells(line) for line in lines if line.startswith("| mpi4py backend"))
    assert ours[1:] == ["500", "12.00"]  # six images
    assert "throughput: 1.20 of gloo's" in lines[-1]


def test_the_picture_is_drawn(result, tmp_path):
    backend.draw(result, tmp_path / "backend.png")
    assert (tmp_path / "backend.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--ranks", "1"], "ranks must be at least 2"), (["--steps", "1"], "at least 2")],
)
def test_what_cannot_be_measured_is_told(arguments, text):
    with pytest.raises(ValueError, match=text):
        backend._parse(arguments)
