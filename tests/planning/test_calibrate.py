from __future__ import annotations

import json

import pytest

from spatialdl.comm.launch import mpiexec_command
from spatialdl.data import saving
from spatialdl.planning import calibrate
from spatialdl.planning.cluster import cluster_of
from spatialdl.planning.ledger import RankOperation
from spatialdl.planning.worker import environment, run_worker

CONV = [(flops * 1e9, size * 2**20) for flops in (1, 5) for size in (1, 4, 32, 128)]


def seconds(flops, size):
    return 1e-4 + flops / 5e10 + size / (4e9 if size < calibrate.MAPPED_FROM else 2e9)


def test_rates_are_found_again():
    rows = [["conv", flops, size, seconds(flops, size)] for flops, size in CONV]
    rows += [["pool", 0.0, size, size / 3e9] for size in (1e5, 1.2e5, 1e7)]
    found = calibrate.rates_of(rows)
    conv = found["conv"]
    assert conv["seconds"] == pytest.approx(1e-4, rel=1e-3)
    assert conv["flops_per_second"] == pytest.approx(5e10, rel=1e-3)
    assert [speed for _, speed in conv["bytes_per_second"]] == pytest.approx([4e9, 2e9], rel=1e-3)
    sizes = [size for size, _ in found["pool"]["bytes_per_second"]]
    assert sizes == pytest.approx([(1e5 * 1.2e5) ** 0.5, 1e7])


def measurement():
    operations = [["conv", 1e9, 2.0**20, 0.02], ["pointwise", 0.0, 1e6, 1e-3]]
    return dict.fromkeys(("busy", "lone", "alone"), operations) | {
        "exchange": [[512, 1e-5], [1e7, 1e-2]],
        "all_reduce": [[64, 2e-5], [1e7, 2e-2]],
    }


def test_what_was_measured_is_kept_and_is_a_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "run_worker", lambda command, environment, show: measurement())
    monkeypatch.setattr(calibrate, "_base_mb", lambda layout: 300.0 + (layout == "dp"))
    assert calibrate.measured() is None
    made = calibrate.calibrate()
    assert calibrate.cache_file().parent.parent == tmp_path
    assert calibrate.measured() == made == json.loads(calibrate.cache_file().read_text())
    cluster = cluster_of(made)
    assert cluster.seconds([RankOperation("pool", 0.0, 1e6)], cluster.cores) == pytest.approx(1e-3)
    assert (cluster.base_bytes(1), cluster.base_bytes(2)) == (300 * 2**20, 301 * 2**20)
    assert cluster.all_reduce([0, 1], 1e7) == pytest.approx(2e-2, rel=1e-2)


def test_what_was_measured_before_stays_until_all_is_written(monkeypatch, tmp_path):
    """It was emptied first, and a command that read it then began without measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "run_worker", lambda command, environment, show: measurement())
    monkeypatch.setattr(calibrate, "_base_mb", lambda layout: 300.0)
    made = calibrate.calibrate()
    seen = []

    def stopped(path):
        seen.append(calibrate.measured())
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "sync", stopped)
    monkeypatch.setattr(calibrate, "_base_mb", lambda layout: 400.0)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate()
    assert seen == [made]
    assert calibrate.measured() == made
    assert list(calibrate.cache_file().parent.iterdir()) == [calibrate.cache_file()]


def test_a_file_that_is_broken_counts_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibrate.cache_file().parent.mkdir()
    calibrate.cache_file().write_text("{")
    assert calibrate.measured() is None


@pytest.mark.slow
def test_ranks_measure_all_kinds_in_all_ways():
    found = run_worker([*mpiexec_command(3), *calibrate.WORKER], environment(1))
    for way in ("busy", "lone", "alone"):
        rates = calibrate.rates_of(found[way])
        assert {"conv", "conv_input", "conv_weight", "norm", "pool", "pointwise"} <= set(rates)
        assert all(row[3] > 0 for row in found[way])
    assert found["exchange"][-1][1] > 0
    assert found["all_reduce"][-1][1] > 0
