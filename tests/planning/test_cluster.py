from __future__ import annotations

import json
import math
import os
import sys

import pytest

from spatialdl.comm import allocator
from spatialdl.comm.launch import mpiexec_command
from spatialdl.common import files as saving
from spatialdl.planning import calibrate
from spatialdl.planning.calibrate import environment, run_worker
from spatialdl.planning.cluster import Rate, cluster_of
from spatialdl.spatial.streaming.ledger import RankOperation


def test_a_rate_has_a_part_for_itself_one_for_operations_and_one_for_bytes():
    rate = Rate(1e-3, 1e9, ((1e3, 1e6), (1e5, 1e8)))
    assert rate.of(2e9, 0) == pytest.approx(1e-3 + 2)
    assert rate.of(0, 100) == pytest.approx(1e-3 + 100 / 1e6)
    assert rate.of(0, 1e4) == pytest.approx(1e-3 + 1e4 / 1e7)  # half way in logarithms
    assert rate.of(0, 1e6) == pytest.approx(1e-3 + 1e6 / 1e8)
    assert Rate(0.0, math.inf, ((1.0, 5.0),)).of(7, 10) == 2


def test_kinds_without_a_rate_take_a_similar_one(paper):
    work = [RankOperation(kind, 1e9, 0) for kind in ("conv_input", "matmul", "pool")]
    assert paper.seconds(work, 1) == pytest.approx(2)


def test_threads_are_faster_than_one(figures):
    figures |= {"cores": 4}
    figures["rates_alone"] = {"pointwise": {"bytes_per_second": 4e9}}
    figures["rates"] = {"pointwise": {"bytes_per_second": 1e9}}
    cluster = cluster_of(figures)
    seconds = [cluster.seconds([RankOperation("pool", 0, 4e9)], ranks) for ranks in (1, 2, 4, 8)]
    assert seconds == pytest.approx([1, 2, 4, 4])


def test_sums_go_by_rings_within_nodes_and_then_between(paper):
    assert paper.all_reduce([3], 1e9) == 0
    assert paper.all_reduce([0, 1], 1e9) == pytest.approx(1 + 2e-6)
    # four of a node send 3/2, then each a quarter to the other node
    found = paper.all_reduce(range(8), 1e9)
    assert found == pytest.approx(1.5 + 0.25e9 / 1e8, rel=1e-4)
    # one of each node
    assert paper.all_reduce([0, 4], 1e9) == pytest.approx(10, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rates": {}}, "needs cluster.rates.pointwise"),
        ({"rates": {"convolution": {}}}, "rates.convolution is unknown: take one of conv"),
        ({"ranks_per_node": 0}, "at least 1, got 0"),
        ({"speed": 3}, "cluster.speed is unknown: take one of base_mb"),
        ({"within_node": {}}, "cluster=paper is incomplete: 'seconds'"),
    ],
)
def test_clusters_that_make_no_sense_are_refused(figures, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        cluster_of({**figures, **change})


# --- calibrate


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
    calibrate.cache_file().parent.mkdir()
    calibrate.cache_file().write_text("{")  # which counts as none
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


@pytest.mark.slow
def test_ranks_measure_all_kinds_in_all_ways():
    found = run_worker([*mpiexec_command(3), *calibrate.WORKER], environment(1))
    for way in ("busy", "lone", "alone"):
        rates = calibrate.rates_of(found[way])
        assert {"conv", "conv_input", "conv_weight", "norm", "pool", "pointwise"} <= set(rates)
        assert all(row[3] > 0 for row in found[way])
    assert found["exchange"][-1][1] > 0
    assert found["all_reduce"][-1][1] > 0


# --- worker


@pytest.mark.parametrize("plain", [False, True])
def test_memory_is_as_pytorch_comes_or_as_the_product_sets_it(plain):
    found = calibrate.environment(2, plain)
    assert found["OMP_NUM_THREADS"] == "2"
    settings = {allocator.SWITCH: "0"} if plain else allocator.environment()
    assert settings.items() <= found.items()


def test_a_worker_tells_in_its_last_line_and_is_quoted_if_it_fails():
    program = "import os; print('starting'); print(os.environ['FOUND'])"
    environment = {**os.environ, "FOUND": '{"seconds": [1.5]}'}
    found = calibrate.run_worker([sys.executable, "-c", program], environment)
    assert found == {"seconds": [1.5]}
    with pytest.raises(RuntimeError, match="no such model"):
        calibrate.run_worker([sys.executable, "-c", "raise SystemExit('no such model')"], {})
