from __future__ import annotations

import json

import pytest

from spatialdl.bench import analysis, analysis_worker
from spatialdl.comm.single_process import SingleProcess


@pytest.fixture
def workers(monkeypatch):
    """Stands in for the processes: ours take 1, 2 and 3 seconds, theirs twice as long."""
    runs: list[str] = []

    def run(command, environment):
        ours = any("spatialdl.bench.device" in word for word in command)
        runs.append(analysis.OURS if ours else analysis.THEIRS)
        seconds = (runs.count(runs[-1])) * (1.0 if ours else 2.0)
        return {
            "seconds": dict.fromkeys(analysis.WHAT, seconds),
            "values": dict.fromkeys(analysis.WHAT, 5.0),
        }

    monkeypatch.setattr(analysis, "run_worker", run)
    return runs


def test_table_json_and_picture(workers, tmp_path, capsys):
    analysis.main(["--ranks", "2", "--rounds", "3", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "analysis.json").read_text())
    assert workers == [analysis.OURS, analysis.THEIRS] * 3, "in turns"
    assert len(result["rows"]) == len(analysis.WHAT)
    for row in result["rows"]:
        assert row["seconds"] == {analysis.OURS: 2.0, analysis.THEIRS: 4.0}
        assert row["times_as_fast"] == pytest.approx(2)
    assert "| k-means, 16 clusters, 10 iterations" in capsys.readouterr().out
    assert (tmp_path / "analysis.png").stat().st_size > 10_000


def test_different_results_are_no_comparison(workers, monkeypatch, tmp_path):
    values = iter([1.0, 1.1])
    monkeypatch.setattr(
        analysis,
        "run_worker",
        lambda *_: {
            "seconds": dict.fromkeys(analysis.WHAT, 1.0),
            "values": dict.fromkeys(analysis.WHAT, next(values)),
        },
    )
    with pytest.raises(RuntimeError, match=r"kmeans: results differ by 0\.1"):
        analysis.main(["--ranks", "1", "--rounds", "1", "--out", str(tmp_path)])


def test_both_do_the_same():
    features, targets = analysis_worker.made(600, 40)
    theirs = analysis_worker.theirs(features)
    for name, method in analysis_worker.ours(features, SingleProcess()).items():
        wanted = theirs[name](features, targets, features[:30] + 0.5)
        assert method(features, targets, features[:30] + 0.5) == pytest.approx(wanted, rel=1e-9)
    assert set(theirs) == set(analysis.WHAT)


def test_refusals():
    with pytest.raises(ValueError, match="rows 2000 and width 32"):
        analysis.main(["--rows", "10"])
