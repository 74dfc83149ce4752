from __future__ import annotations

import json

import openslide
import pytest
from PIL import Image

from spatialdl.bench import tiling

SECONDS = {
    tiling.OPENSLIDE: 4.0,
    tiling.NATIVE: 0.5,
    tiling.OURS: 1.0,
    tiling.THROUGH: 5.0,
    tiling.PASSED: 0.4,
    tiling.HASHED: 0.2,
}


@pytest.fixture
def workers(monkeypatch):
    """Stands in for the processes: the second round takes twice as long."""
    commands: list[list[str]] = []

    def run(command, _environment):
        way, side = command[3], int(command[command.index("--tile-size") + 1])
        jobs = int(command[command.index("--jobs") + 1])
        turn = sum(other[3:] == command[3:] for other in commands)
        commands.append(command)
        cpu = SECONDS[way] * (side / 256) ** 2 * (1 + turn)
        return {"cpu_seconds": cpu, "seconds": 1.2 * cpu / jobs, "tiles": 1000}

    monkeypatch.setattr(tiling, "run_worker", run)
    return commands


def test_table_json_and_picture(workers, tmp_path, capsys):
    slide = tmp_path / "slide.tiff"
    tiling.main(
        ["--side", "1024", "--slide", str(slide), "--rounds", "2", "--out", str(tmp_path / "out")]
    )
    with openslide.OpenSlide(slide) as drawn:
        assert drawn.dimensions == (1024, 1024)
    result = json.loads((tmp_path / "out" / "tiling-1024.json").read_text())
    small, large = result["rows"]
    assert (small["side"], large["side"]) == (256, 1024)
    assert small["rates"][tiling.OURS] == pytest.approx(750)  # between 1000 and 500
    assert small["to_openslide"][tiling.NATIVE] == pytest.approx(8)
    assert large["to_openslide"][tiling.THROUGH] == pytest.approx(0.8)
    assert {jobs: each["rate"] for jobs, each in result["clock"].items()} == {
        **{"1": pytest.approx(625), "2": pytest.approx(1250)},
    }
    assert result["clock"]["2"]["to_one"] == pytest.approx(2)
    turn = [*tiling.WAYS, *tiling.WAYS, tiling.OURS, tiling.OURS]
    assert [command[3] for command in workers] == turn * 2
    assert [command[command.index("--slides") + 1] for command in workers[12:14]] == ["4", "4"]
    printed = capsys.readouterr().out
    assert "end to end, through openslide" in printed
    assert "2 processes" in printed
    assert "slide of 1024 x 1024 pixels" in printed
    with Image.open(tmp_path / "out" / "tiling-1024.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


def test_a_slide_that_is_there_is_taken(workers, tmp_path, capsys):
    slide = tmp_path / "slide.tiff"
    slide.write_text("as it is")
    tiling.main(["--slide", str(slide), "--rounds", "1", "--out", str(tmp_path)])
    assert slide.read_text() == "as it is"
    assert len(workers) == 14


@pytest.mark.parametrize(
    "wrong",
    [["--rounds", "0"], ["--tiles", "0"], ["--most", "0"], ["--jobs", "0"], ["--side", "512"]],
)
def test_nothing_of_a_kind_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be at least 1|smaller than a tile of 1024"):
        tiling.main(wrong)
