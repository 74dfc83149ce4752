from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from spatialdl.planning import setup
from spatialdl.planning.calibrate import cache_file
from spatialdl.planning.cluster import cluster_of
from spatialdl.planning.setup import (
    check_first,
    cluster_named,
    job_of,
    planned_type,
    with_virtual_tiles,
)
from spatialdl.training.network.building import build_model
from spatialdl.training.settings import open_sources
from spatialdl.training.virtual_tiles import choose_virtual_tiles, microbatch_shape
from tests.bags import bag_config, write_bags
from tests.composing import composed
from tests.planning.conftest import FIGURES

SMALL = ["model.width=4", "data.image_size=[40,24]", "data.batch_size=6"]
VOLUMES = ("model=unet3d", "model.depth=1", "data.num_classes=3")


def config(*overrides: str):
    return composed("train", *SMALL, *overrides)


@pytest.fixture
def this_machine(tmp_path, monkeypatch):
    """As if it had been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_file().parent.mkdir()
    cache_file().write_text(json.dumps(FIGURES | {"name": "this_machine"}))


def test_what_was_measured_is_taken_unless_the_configuration_says_otherwise(this_machine):
    plain = cluster_named(OmegaConf.create({"name": "this_machine"}))
    assert plain == cluster_of(FIGURES | {"name": "this_machine"})
    own = cluster_named(OmegaConf.create({"name": "this_machine", "memory_gb": 7}))
    assert own == replace(plain, memory_gb=7)


def test_it_is_measured_anew_where_that_is_asked_for(this_machine, monkeypatch):
    slower = FIGURES | {"name": "this_machine", "lone_speed": 3.0}
    monkeypatch.setattr("spatialdl.planning.setup.calibrate", lambda: slower)
    settings = OmegaConf.create({"name": "this_machine"})
    assert cluster_named(settings).lone_speed == 1.0
    assert cluster_named(settings, again=True).lone_speed == 3.0


@pytest.mark.parametrize(("cores", "on_cpu"), [(2, True), (None, False)])
def test_the_job_is_what_the_configuration_trains(figures, cores, on_cpu):
    given = config("trainer.precision=float64", "parallel.cut=[layer2]", "optimizer=adamw")
    job = job_of(given, cluster_of(figures | {"cores": cores}))
    assert (job.image, job.batch, list(job.names)) == ((3, 40, 24), 6, ["layer2"])
    assert {p.dtype for p in job.model.parameters()} == {torch.float64}
    assert planned_type(given) == torch.float64
    assert job.state_ratio == 2
    assert (job.on_cpu, job.segments) == (on_cpu, False)
    assert (job.read_bytes > 0) == on_cpu


def test_reading_a_box_takes_memory_for_each_of_its_pixels(figures):
    """Whatever the size of the image, of which a corner is read."""
    cluster = cluster_of(figures | {"cores": 2})
    small, large = (
        job_of(config(f"data.image_size={size}"), cluster).read_bytes
        for size in ("[256,256]", "[5000,6000]")
    )
    assert 3 < small < 300
    volumes = job_of(config("data.image_size=[40,50,60]", "data.channels=1", *VOLUMES), cluster)
    assert volumes.image == (1, 40, 50, 60)
    assert 1 < volumes.read_bytes < 300
    assert large == pytest.approx(small, rel=0.2)


def test_bags_of_several_lengths_are_not_planned(figures, tmp_path):
    with pytest.raises(ValueError, match=r"bags of different lengths.*name the layout"):
        job_of(bag_config(write_bags(tmp_path)), cluster_of(figures))


@pytest.mark.parametrize(
    ("words", "cores", "limit", "store"),
    [
        ([], 2, None, "disk"),
        (["trainer.memory_limit_gb=0.5"], 2, 5 * 10**8, "disk"),
        (["trainer.memory_limit_gb=0.5"], None, 5 * 10**8, "host"),
        (["trainer.memory_limit_gb=2", "parallel.stream_to=/scratch"], None, 2 * 10**9, "disk"),
        (["trainer.memory_limit_gb=2", "parallel.stream_to=host"], 2, 2 * 10**9, "host"),
    ],
)
def test_virtual_tiles_have_a_limit_and_a_store(words, cores, limit, store, figures):
    given = config("parallel.stream=[2,2]", *words)
    job = job_of(given, cluster_of(figures | {"cores": cores}))
    assert (job.limit, job.store) == (limit, store)
    check_first(given, measures=False)


def test_auto_takes_the_tiles_that_training_takes():
    words = ["parallel.stream=auto", "data.image_size=[512,512]", "trainer.memory_limit_gb=0.01"]
    given = config(*words)
    sources = open_sources(given.data, 0, given.task.name)
    found = with_virtual_tiles(given, sources)
    shape = microbatch_shape(given, (3, 512, 512))
    assert shape == (6, 3, 512, 512)
    own = given.parallel.copy()
    choose_virtual_tiles(own, build_model(given, sources), shape, torch.float32, 0.01)
    assert list(found.parallel.stream) == list(own.stream) != [1, 1]
    assert given.parallel.stream == "auto"
    named = config("parallel.stream=[3,1]")
    assert with_virtual_tiles(named, sources) is named
    with pytest.raises(ValueError, match=r"needs a memory limit: set trainer\.memory_limit"):
        with_virtual_tiles(config("parallel.stream=auto"), sources)


# --- auto


WORDS = ["model.width=4", "data.image_size=[64,48]", "data.batch_size=4", "parallel=auto"]


def config_for_auto(*overrides: str):
    return composed("train", *WORDS, "parallel.cluster=nvlink_node", *overrides)


def test_what_was_asked_stays_as_it_is(capsys):
    """Layouts that leave one value a channel are passed over: BatchNorm refuses it in training."""
    given = config_for_auto("data.image_size=[32,32]", "model.width=8")
    before = given.copy()
    chosen, row = setup.choose(given, 2)
    assert given == before
    assert chosen.parallel.name == row.layout.name != "auto"
    shown = [line for line in capsys.readouterr().out.splitlines() if "parallel=" in line]
    assert len(shown) == setup.SHOWN + 1


@pytest.mark.parametrize("word", ["tensor=2", "tensor_plan={fc: input}"])
def test_channels_are_not_divided_by_both(word):
    with pytest.raises(ValueError, match=f"leave parallel.{word.split('=', maxsplit=1)[0]}=.* out"):
        setup.choose(config_for_auto(f"parallel.{word}"), 2)
