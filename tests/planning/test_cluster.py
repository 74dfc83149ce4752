from __future__ import annotations

import math

import pytest

from spatialdl.planning.cluster import Rate, cluster_of
from spatialdl.planning.ledger import RankOperation


def test_a_rate_has_a_part_for_itself_one_for_operations_and_one_for_bytes():
    rate = Rate(1e-3, 1e9, ((1e3, 1e6), (1e5, 1e8)))
    assert rate.of(2e9, 0) == pytest.approx(1e-3 + 2)
    assert rate.of(0, 100) == pytest.approx(1e-3 + 100 / 1e6)
    assert rate.of(0, 1e4) == pytest.approx(1e-3 + 1e4 / 1e7)  # half way in logarithms
    assert rate.of(0, 1e6) == pytest.approx(1e-3 + 1e6 / 1e8)
    assert Rate(0.0, math.inf, ((1.0, 5.0),)).of(7, 10) == 2


def test_kinds_without_a_rate_take_a_similar_one(paper):
    work = [
        RankOperation("conv_input", 1e9, 0),
        RankOperation("matmul", 1e9, 0),
        RankOperation("pool", 1e9, 0),
    ]
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


def test_a_cluster_without_figures_is_refused():
    with pytest.raises(ValueError, match="cluster=mine is incomplete: 'rates'"):
        cluster_of({"name": "mine"})
