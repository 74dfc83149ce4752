from __future__ import annotations

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_module

from spatialdl.planning.search import search
from spatialdl.planning.table import limit, table


def test_without_a_limit_of_the_users_it_is_the_memory_of_the_cluster(paper):
    assert limit(None, paper, 2) == paper.memory_bytes(2) == 1e9
    assert limit(0.25, paper, 2) == 2.5e8


@pytest.mark.parametrize("given", [0, -1, "two"])
def test_a_limit_is_more_than_nothing(given, paper):
    with pytest.raises(ValueError, match="must be more than 0"):
        limit(given, paper, 2)


def test_columns_are_in_the_units_of_their_heads(job, paper):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        base = compose("train").parallel
    rows = search(job, paper, base, 2, None, show=False)
    first, _, head, *lines = table(rows[:4], job, paper, len(rows)).splitlines()
    assert first.endswith(f"8 images of 16x12 a step, on paper: 4 of {len(rows)} layouts")
    assert head.split("  ")[-1] == "layout"
    for line, row in zip(lines[:4], rows, strict=False):
        memory, seconds, rate, sent, waiting, *keys = line.split()
        one = row.prediction
        assert float(memory) == pytest.approx(row.memory / 1e9, abs=0.005)
        assert float(seconds) == pytest.approx(one.seconds, rel=1e-3)
        assert float(rate) == pytest.approx(8 / one.seconds, rel=1e-3)
        assert float(sent) == pytest.approx(one.sent / 1e6, abs=0.05)
        assert float(waiting.rstrip("%")) == pytest.approx(100 * one.bubble, abs=0.5)
        assert keys == row.layout.overrides()


@pytest.mark.parametrize("cores", [None, 4])
def test_what_devices_take_before_training_is_a_line_of_its_own(cores, job, paper):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        base = compose("train").parallel
    cluster = replace(paper, cores=cores, base_mb=600.0)
    rows = search(job, cluster, base, 2, None, show=False)
    line = "of them 0.63 GB: context, NCCL, libraries (cluster.base_mb)"
    assert (line in table(rows, job, cluster, len(rows)).splitlines()) == (cores is None)
