from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from spatialdl.models import unet
from spatialdl.planning.cluster import cluster_of
from spatialdl.planning.search import LayoutKeys, NothingFits, grids, layouts, limit, search, table
from spatialdl.training.layouts import placement_of, schedule_of
from tests.composing import composed
from tests.planning.conftest import planned


@pytest.fixture
def base():
    return composed("train").parallel


@pytest.mark.parametrize("world", [1, 3, 8])
def test_all_that_is_tried_is_a_layout_for_so_many_ranks(base, world):
    found = list(layouts(world, 8, 11))
    assert len({tuple(one.overrides()) for one in found}) == len(found)
    for one in found[:: 1 + len(found) // 12]:
        config = one.config(base)
        placement = placement_of(config)
        assert placement.world_size == world
        assert schedule_of(config, placement).microbatches == config.microbatches
        written = composed("train", *one.overrides()).parallel
        assert placement_of(written) == placement
        assert (written.name, written.schedule) == (config.name, config.schedule)


def test_all_kinds_are_tried():
    names = {one.name for one in layouts(8, 8, 11)}
    plain = {"dp", "sp", "lp", "pp", "gems", "sp+lp", "sp+pp", "sp+gems"}
    assert names == plain | {"none"} | {f"dp+{name}" for name in plain - {"dp"}}
    assert {one.name for one in layouts(1, 1, 11)} == {"none"}


def divided(world):
    """What divides channels, without micro-batches."""
    found = (one.overrides() for one in layouts(world, 1, 11))
    return {" ".join(one).replace("parallel.", "") for one in found if "tensor=" in str(one)}


def test_channels_are_divided_in_all_layers_or_in_the_last_ones():
    assert divided(4) == {
        "parallel=none tensor=4",
        "parallel=sp grid=[2,1] spatial_stages=1 tensor=2",
        "parallel=sp+lp grid=[2,1] stages=2 spatial_stages=1 tensor=[1,2]",
    }
    late = "parallel=sp+lp grid=[2,2] stages=3 spatial_stages=2 tensor=[1,1,4]"
    assert late in divided(12)
    assert not any("gems" in one for one in divided(12))


def test_dense_layers_of_few_images_divide_their_channels(figures, base):
    """Other layouts compute on one rank, or add up the gradients of all weights."""
    rates = {"matmul": {"flops_per_second": 1e9, "bytes_per_second": 1e30}}
    cluster = cluster_of(figures | {"rates": rates | {"pointwise": {"bytes_per_second": 1e30}}})
    dense = (nn.Linear(3 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), *dense, nn.Linear(512, 8))
    first = search(planned(model, (3, 8, 8)), cluster, base, 4, None, show=False)[0]
    assert first.layout.overrides() == ["parallel=none", "parallel.tensor=4"]
    weights = sum(one.nbytes for one in model.parameters())
    assert first.memory < weights


def test_grids_are_nearly_cubes_squares_or_slabs():
    assert grids(2) == [(2, 1)]
    assert grids(8) == [(4, 2), (8, 1)]
    assert grids(2, 3) == [(2, 1, 1)]
    assert grids(16, 3) == [(4, 2, 2), (4, 4, 1), (16, 1, 1)]
    assert grids(8, 1) == [(8,)]


def test_large_worlds_may_divide_one_volume():
    keys = [("grid", [8, 8, 8]), ("spatial_stages", 1)]
    assert LayoutKeys("sp", tuple(keys)) in list(layouts(512, 1, 50, 3))


def test_what_does_not_fit_is_not_listed(job, paper, base):
    everything = search(job, paper, base, 2, None, show=False)
    most = sorted(row.memory for row in everything)
    limit = most[len(most) // 2]
    rows = search(job, paper, base, 2, limit, show=False)
    assert len(rows) > 0
    assert max(row.memory for row in rows) <= limit
    again = [row for row in rows if row.prediction.recompute != "none"]
    assert again, "where it does not fit, layers run again"
    for row in again:
        assert any("recompute" in key for key in row.layout.overrides())


def test_if_nothing_fits_the_nearest_is_told(job, paper, base):
    with pytest.raises(NothingFits, match=r"2 ranks fits 0\.00 GB per rank: the closest one, para"):
        search(job, paper, base, 2, 1000, show=False)


def test_more_ranks_than_there_is_work_for_are_refused(job, paper, base):
    job.batch = 1
    with pytest.raises(NothingFits, match="no layout for 4099 ranks works"):
        search(job, paper, base, 4099, None, show=False)


def test_layouts_with_stages_are_found_for_networks_that_are_no_chain(paper, base):
    job = planned(unet(num_classes=3, width=4, depth=2), (3, 32, 24), segments=True)
    rows = search(job, paper, base, 2, None, show=False)
    names = {row.layout.name for row in rows}
    assert {"dp", "sp", "lp", "pp", "gems"} <= names
    cut = next(row for row in rows if row.layout.name == "lp").prediction
    whole = next(row for row in rows if row.layout.name == "dp").prediction
    assert max(cut.memory) < 2 * max(whole.memory)
    again = search(job, paper, base, 2, 0.6 * max(cut.memory), show=False)
    assert any(row.prediction.recompute != "none" for row in again if "stages" in str(row.layout))


class Handing(nn.Module):
    """Its forward cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return checkpoint(self.conv, x, use_reentrant=False).mean((2, 3))


def test_networks_that_cannot_be_cut_have_other_layouts_and_the_table_says_why(paper, base):
    job = planned(Handing(), (3, 8, 8))
    rows = search(job, paper, base, 2, None, show=False)
    found = {" ".join(row.layout.overrides()[:2]) for row in rows}
    divided = "parallel=none parallel.tensor=2"
    assert found == {"parallel=dp parallel.data=2", "parallel=sp parallel.grid=[2,1]", divided}
    note = table(rows, job, paper, len(rows)).splitlines()[-1]
    assert note.startswith("note: layouts with stages are skipped: Handing cannot be cut into 2")
    assert "calls a part under hooks, as a checkpoint does" in note


def test_without_a_limit_of_the_users_it_is_the_memory_of_the_cluster(paper):
    assert limit(None, paper, 2) == paper.memory_bytes(2) == 1e9
    assert limit(0.25, paper, 2) == 2.5e8


def test_the_fastest_comes_first_and_columns_are_in_the_units_of_their_heads(job, paper, base):
    rows = search(job, paper, base, 2, None, show=False)
    seconds = [row.prediction.seconds for row in rows]
    assert seconds == sorted(seconds)
    first, _, head, *lines = table(rows[:4], job, paper, len(rows)).splitlines()
    assert first.endswith(f"8 images of 16x12 per step on paper: 4 of {len(rows)} layouts")
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
    line = "including 0.63 GB for context, NCCL, libraries (cluster.base_mb)"
    for cores in (None, 4):  # what devices take before training
        cluster = replace(paper, cores=cores, base_mb=600.0)
        assert (line in table(rows, job, cluster, len(rows)).splitlines()) == (cores is None)
