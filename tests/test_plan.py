from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from spatialdl import plan
from spatialdl.planning import setup
from spatialdl.planning.search import Row
from spatialdl.training.layouts import placement_of
from tests.composing import composed

SMALL = ["model.width=4", "data.image_size=[64,48]", "data.batch_size=4", "cluster=nvlink_node"]


config = partial(composed, "plan")


class Planned(NamedTuple):
    folder: Path
    rows: list[Row]
    text: str


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Planned:
    """All layouts of two ranks."""
    folder, text = tmp_path_factory.mktemp("plan"), io.StringIO()
    with redirect_stdout(text):
        rows = plan.plan(config(*SMALL, "world=2", "rows=3"), SMALL, folder)
    return Planned(folder, rows, text.getvalue())


def test_the_table_and_the_pictures_are_made(two_ranks):
    folder, rows, text = two_ranks
    listed = [line for line in text.splitlines() if "parallel=" in line]
    assert len(listed) == 3 < len(rows)
    assert " ".join(rows[0].layout.overrides()) in listed[0]
    written = json.loads((folder / "plan.json").read_text())
    assert [one["overrides"] for one in written] == [row.layout.overrides() for row in rows[:3]]
    assert "the first layout:" in text
    assert re.search(r"^  stage 0, ranks? 0.*: .*; \w+", text, re.MULTILINE)
    with Image.open(folder / "timeline.png") as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["world=0"], "world=0 must be a whole number"),
        ([], "world has no value: add world="),
        (["world=2", "device_memory_gb=0"], "device_memory_gb=0 must be more than 0"),
        (["world=2", "parallel=auto"], "parallel=auto is for training: omit it"),
        (["world=3", "parallel=sp"], "world=3, but parallel=sp needs 2 ranks: leave world out"),
        (["parallel=sp", "parallel.tensor=2", "parallel.stream=[2,1]"], "tensor=2 does not"),
        (["world=1", "parallel.stream=auto"], "needs a memory limit: set trainer.mem"),
        (["world=2", "calibrate=true"], "calibrate=true measures this machine, but cluster=nv"),
    ],
)
def test_wrong_questions_are_refused(overrides, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        plan.plan(config(*SMALL, *overrides), SMALL, tmp_path)


def test_an_unknown_word_is_told_without_a_traceback(run_main):
    code, said = run_main(plan.main, "wrld=2")
    assert code == 1
    assert said.startswith("error: wrld is unknown; nearest: world; `python -m")


def test_volumes_are_planned(tmp_path, capsys):
    words = ["model=unet3d", "model.width=2", "model.depth=1", "data.image_size=[16,12,8]"]
    words += ["cluster=nvlink_node", "data.batch_size=2", "world=4"]
    rows = plan.plan(config(*words), words, tmp_path)
    assert "images of 16x12x8 per step" in capsys.readouterr().out
    grids = {tuple(dict(row.layout.keys).get("grid", ())) for row in rows}
    assert {(2, 1, 1), (4, 1, 1), (2, 2, 1)} <= grids


def test_a_cut_is_for_layouts_with_so_many_stages(tmp_path):
    rows = plan.plan(config(*SMALL, "world=2", "parallel.cut=[layer2]"), SMALL, tmp_path)
    assert {len(row.prediction.placement.grids) for row in rows} == {2}


def auto_config(*overrides: str):
    return composed("train", *SMALL[:3], "parallel=auto", *overrides)


def test_auto_takes_the_first_row_and_becomes_an_ordinary_layout(two_ranks, capsys):
    given = auto_config("parallel.cluster=nvlink_node", "parallel.world=2", "parallel.cut=null")
    first = two_ranks.rows[0]
    own = ["parallel=auto", "++parallel.cluster=nvlink_node", "parallel.device_memory_gb=9"]
    others = ["+parallel.recompute=none", "seed=1"]
    chosen, written = setup.choose_alone(given, [*own, "parallel.world=2", *others])
    assert written == [*first.layout.overrides(), *others]
    assert chosen.parallel == composed("train", *first.layout.overrides()).parallel
    assert placement_of(chosen.parallel) == first.prediction.placement
    assert f"chosen: {' '.join(first.layout.overrides())}" in capsys.readouterr().out


def test_auto_must_know_the_ranks_and_the_cluster(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"add parallel\.world="):
        setup.choose_alone(auto_config(), [])
    with pytest.raises(ValueError, match="cluster=abacus is unknown: take one of h100, inf"):
        setup.choose(auto_config("parallel.cluster=abacus"), 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="has no measurements of this machine"):
        setup.choose(auto_config(), 2, may_measure=False)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.clip_norm=-1", "clip_norm=-1 must be above 0"),
        ("data.image_size=[0,48]", "image of 0x48 is smaller than the grid"),
        ("++model._target_=nobody.Knows", "nobody"),
        ("trainer.precision=fp16-mixed", "the planner does not support"),
    ],
)
def test_other_mistakes_are_told_before_this_machine_is_measured(
    override, sentence, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("spatialdl.planning.setup.calibrate", lambda: pytest.fail("measured"))
    with pytest.raises(ValueError, match=sentence):
        setup.choose_alone(auto_config("parallel.world=2", override), [])
    given = [*SMALL[:3], override, "world=2"]
    with pytest.raises(ValueError, match=sentence):
        plan.plan(config(*given), given, tmp_path)


def test_a_named_layout_is_predicted_by_itself(two_ranks, tmp_path, capsys):
    words = ["parallel=sp", "parallel.grid=[2,1]"]
    (row,) = plan.plan(config(*SMALL, *words), [*SMALL, *words], tmp_path)
    assert row.layout.overrides() == words
    keys = (("grid", [2, 1]), ("spatial_stages", 1))
    (same,) = (one for one in two_ranks.rows if one.layout.keys == keys)
    assert row.prediction.placement == same.prediction.placement
    assert row.memory == same.memory
    # tables that operations make once are counted in the first prediction of a process
    assert row.prediction.seconds == pytest.approx(same.prediction.seconds, rel=0.02)
    small = [*words, "device_memory_gb=0.01"]
    plan.plan(config(*SMALL, *small), [*SMALL, *small], tmp_path)
    assert "note: does not fit: a rank has 0.01 GB" in capsys.readouterr().out


def test_virtual_tiles_have_memory_store_and_time(tmp_path, capsys):
    words = ["parallel=sp", "parallel.stream=[2,2]", "trainer.memory_limit_gb=0.001"]
    words += ["data.image_size=[256,256]"]
    (row,) = plan.plan(config(*SMALL, *words), [*SMALL, *words], tmp_path)
    text = capsys.readouterr().out
    assert "activations of a rank within 0.001 GB; stored in pinned host memory, at least:" in text
    assert row.prediction.placement.stream == (2, 2)
    (written,) = json.loads((tmp_path / "plan.json").read_text())
    assert written["overrides"] == ["parallel=sp", "parallel.stream=[2,2]"]
    assert len(written["stores"]) == 2
    assert all(one["moved"] > 0 for one in written["stores"])


def test_layouts_with_virtual_tiles_are_looked_for_and_chosen(tmp_path):
    words = ["parallel.stream=auto", "trainer.memory_limit_gb=0.001", "data.image_size=[128,128]"]
    rows = plan.plan(config(*SMALL, *words, "world=2"), SMALL, tmp_path)
    tiles = {tuple(dict(row.layout.keys)["stream"]) for row in rows}
    assert len(tiles) > 1  # more where a rank has more of an image
    assert all(row.prediction.stores for row in rows)
    words += ["parallel.cluster=nvlink_node", "parallel.world=2"]
    chosen, line = setup.choose_alone(auto_config(*words), ["parallel=auto", *words])
    assert min(chosen.parallel.stream) >= 1
    assert placement_of(chosen.parallel, 2).world_size == 2
    assert f"parallel.stream={list(chosen.parallel.stream)}".replace(" ", "") in line
    assert line.count("parallel.stream=auto") == 0
