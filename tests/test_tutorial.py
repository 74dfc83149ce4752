"""Tutorials run as they stand: their programs are written, their first commands carried out."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tests.inference.evaluating.cases import read_rows
from tests.processes import printed

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
AT_LEAST = {
    "own-slides": ("tiles/report.html", "tiles_run/report.html", "tiles_predicted/slides.csv"),
    "transformer": ("vit_run/report.html", "vit_run/metrics.csv"),
    "tutorial": (
        *("split.csv", "features/h5/s0.h5"),
        *("clusters/clusters.png", "run/report.html", "predicted/slides.csv"),
        *("predicted/s0-attention.png", "evaluated/report.html", "evaluated/metrics.csv"),
    ),
    "volumes": ("volume_run/report.html", "volume_predicted/volumes.csv"),
}
YOURS = {"labels.csv", "splits.csv", "metrics.csv", "process_list.csv"}
"""Files that pages name without a folder."""
PROCESSED = {"own-slides": "tiles_predicted/slides.csv", "volumes": "volume_predicted/volumes.csv"}


def words_of(line: str) -> list[str]:
    """A command of the page, run by this Python from this source."""
    program, *words = shlex.split(line)
    if program == "python":
        return [sys.executable, *words]
    module, _, function = SCRIPTS[program].partition(":")
    start = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", start, *words]


def carry_out(page: str, folder: Path) -> None:
    """Write the programs of a page, and run the lines of its first shell block one by one."""
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.M | re.S):
        (folder / name).write_text(code)
    commands = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)[0]
    for line in commands.splitlines():
        printed(words_of(line), folder, PYTHONPATH=str(ROOT))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", AT_LEAST)
def test_every_command_of_a_tutorial_works(name, tmp_path):
    page = (DOCS / f"{name}.md").read_text()
    carry_out(page, tmp_path)
    named = set(re.findall(r"`([\w/-]+\.(?:html|csv|png|h5|nii))`", page)) - YOURS
    expected = {*named, *AT_LEAST[name]}
    assert sorted(one for one in expected if not (tmp_path / one).is_file()) == []
    if name == "tutorial":
        rows = read_rows(tmp_path / "predicted" / "slides.csv")
        assert [row["slide"] for row in rows] == [f"s{number}" for number in range(8)]
        assert {row["predicted"] for row in rows} <= {"ring", "strand"}
        metrics = read_rows(tmp_path / "evaluated" / "metrics.csv")
        found = {(row["level"], row["metric"]) for row in metrics}
        assert {("slide", "accuracy"), ("patient", "accuracy")} <= found
    if name in PROCESSED:
        rows = read_rows(tmp_path / PROCESSED[name])
        assert [row["status"] for row in rows] == ["processed"] * 4
