"""The command in layouts and presets, as a user starts it, against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from spatialdl.common.configuring.keys import groups
from spatialdl.data import ShardWriter
from tests import fitting
from tests.bags import write_bags
from tests.processes import printed

SMALL = [
    *("data=synthetic", "data.image_size=[70,93]", "data.batch_size=4", "data.samples=8"),
    *("data.validation_samples=3", "model=resnet18", "model.width=8", "trainer.max_steps=2"),
    *("trainer.precision=float64", "parallel.microbatches=4", "device=cpu", "comm.check=true"),
]


def summary(run_dir: Path, *overrides: str, limit: int = 250) -> dict:
    words = [sys.executable, "-m", "spatialdl.train", *overrides, f"hydra.run.dir={run_dir}"]
    printed(words, run_dir.parent, limit)
    return fitting.summary(run_dir)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("none")
    words = [one for one in SMALL if not one.startswith("comm.check")]
    fitting.train(run_dir, *words)
    return fitting.summary(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "ranks"), [("sp", 2), ("gems", 2), ("sp+pp", 3), ("sp+gems", 3)]
)
def test_equals_one_process(parallel, ranks, one_process, tmp_path):
    run, plain = tmp_path / "run", one_process
    ours = summary(run, *SMALL, f"parallel={parallel}", "trainer.trace=true")
    assert (run / "timeline.png").stat().st_size > 10_000
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
    assert (ours["world_size"], len(ours["peak_memory_mb"])) == (ranks, ranks)
    assert ours["parallel"] == parallel
    (found,), (expected,) = ours["validation"], plain["validation"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    assert found | {"loss": None} == expected | {"loss": None}
    assert found["samples"] == 3


# --- presets on the ranks of their own layouts; tests/test_conf.py trains each on one rank

PRESETS = {
    "bag": (1, ["model.width=2"]),
    "bag_end_to_end": (1, ["data.slides=6", "data.validation_slides=2"]),
    "quickstart": (2, ["model.width=2", "data.image_size=[32,24]"]),
    "segmentation": (2, ["model.width=2", "data.image_size=[32,24]"]),
    "gems_resnet110": (4, ["model.width=2", "data.image_size=[32,24]"]),
    "hyfi_amoebanet": (6, ["model.layers=3", "model.filters=16", "data.image_size=[64,72]"]),
    "camelyon_like": (4, ["model.width=2", "scheduler.warmup_steps=1", "data.batch_size=4"]),
    "whole_vs_tiles": (2, ["model.width=2", "data.batch_size=4"]),
    "vit_slide": (2, ["model.width=12", "model.patch=8", "data.image_size=[64,96]"]),
    "whole_slide_one_device": (
        *(1, ["model.width=2", "data.image_size=[160,120]", "parallel.stream=[2,1]"]),
    ),
    "volumes": (2, ["model.width=2", "data.image_size=[16,20,18]", "data.samples=4"]),
}


def small_preset(name: str, folder: Path) -> list[str]:
    """Words that make a preset small, with data of its own in a folder."""
    words = [*PRESETS[name][1], "trainer.max_steps=2", "device=cpu"]
    if name == "bag":
        bags = write_bags(folder / "bags")
        words += [f"data.features={bags}", f"data.labels={bags / 'labels.csv'}"]
    elif name in ("camelyon_like", "whole_vs_tiles"):
        words.append(f"data.path={folder / 'tiles'}")
        rng = np.random.default_rng(0)
        with ShardWriter(folder / "tiles", classes=["normal", "tumour"]) as writer:
            for number in range(12):
                image = rng.integers(0, 256, (64, 72, 3), np.uint8)
                split = "train" if number < 8 else "val"
                writer.add(image, label=int(number % 5 == 0), split=split)
    elif name != "bag_end_to_end":
        words.append("data.validation_samples=2")
    return words


def test_every_preset_is_here():
    assert sorted(PRESETS) == groups()["experiment"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_on_its_ranks(name, tmp_path):
    ranks, words = PRESETS[name][0], small_preset(name, tmp_path)
    found = summary(tmp_path / "run", f"experiment={name}", *words)
    assert found["world_size"] == ranks
    assert len(found["loss"]) == 2
    assert np.isfinite(found["loss"]).all()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "metric"),
    [("quickstart", "accuracy"), ("volumes", "mean_dice"), ("vit_slide", "accuracy")],
)
def test_a_preset_learns(name, metric, tmp_path):
    """The transformer takes 6 minutes on two cores."""
    found = summary(tmp_path / "run", f"experiment={name}", limit=1700)
    assert found["validation"][-1][metric] > 0.9
