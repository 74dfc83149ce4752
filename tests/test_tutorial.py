"""The tutorial runs as it stands, from drawn slides to an evaluated network."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MADE = (
    *("cohort/cohort.html", "cohort/cohort.csv", "split.csv", "features/h5/s0.h5"),
    *("clusters/clusters.png", "run/report.html", "predicted/slides.csv"),
    *("predicted/s0-attention.png", "evaluated/report.html", "evaluated/metrics.csv"),
)


def words_of(line: str) -> list[str]:
    """A command of the page, run by this Python from this source."""
    program, *words = shlex.split(line)
    if program == "python":
        return [sys.executable, *words]
    module, _, function = SCRIPTS[program].partition(":")
    start = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", start, *words]


def test_every_command_of_the_page_works(tmp_path):
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S):
        (tmp_path / name).write_text(code)
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in commands.splitlines():
        done = subprocess.run(
            words_of(line),
            cwd=tmp_path,
            env=where,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    named = re.findall(r"`([\w/-]+\.(?:html|csv|png|h5))`", PAGE)
    assert set(named) - {"labels.csv"} <= set(MADE)
    assert [name for name in MADE if not (tmp_path / name).is_file()] == []
    with (tmp_path / "predicted" / "slides.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == [f"s{number}" for number in range(8)]
    assert {row["predicted"] for row in rows} <= {"ring", "strand"}
    with (tmp_path / "evaluated" / "metrics.csv").open(newline="") as file:
        found = {(row["level"], row["metric"]) for row in csv.DictReader(file)}
    assert {("slide", "accuracy"), ("patient", "accuracy")} <= found
