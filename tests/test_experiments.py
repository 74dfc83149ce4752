"""Presets on the ranks of their own layouts, small; tests/test_conf.py trains each on one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spatialdl.configuring.keys import groups
from spatialdl.data import ShardWriter
from tests.bags import write_bags

SMALL = {
    "bag": (1, ["model.width=2"]),
    "bag_end_to_end": (1, ["data.slides=6", "data.validation_slides=2"]),
    "quickstart": (2, ["model.width=2", "data.image_size=[32,24]"]),
    "segmentation": (2, ["model.width=2", "data.image_size=[32,24]"]),
    "gems_resnet110": (4, ["model.width=2", "data.image_size=[32,24]"]),
    "hyfi_amoebanet": (6, ["model.layers=3", "model.filters=16", "data.image_size=[64,72]"]),
    "camelyon_like": (4, ["model.width=2", "scheduler.warmup_steps=1", "data.batch_size=4"]),
    "whole_vs_tiles": (2, ["model.width=2", "data.batch_size=4"]),
    "vit_slide": (2, ["model.width=12", "model.patch=8", "data.image_size=[64,96]"]),
    "whole_slide_one_device": (1, ["data.image_size=[640,480]", "parallel.stream=[4,3]"]),
    "volume_fractals": (2, ["model.width=2", "data.image_size=[16,20,18]", "data.samples=4"]),
}


def slides(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    with ShardWriter(folder, classes=["normal", "tumour"]) as writer:
        for number in range(12):
            image = rng.integers(0, 256, (64, 72, 3), np.uint8)
            writer.add(image, label=int(number % 5 == 0), split="train" if number < 8 else "val")
    return folder


def test_every_preset_is_here():
    assert sorted(SMALL) == groups()["experiment"]


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name != "quickstart"),
    ],
)
def test_a_preset_trains_on_its_ranks(name, tmp_path):
    ranks, small = SMALL[name]
    if name in ("camelyon_like", "whole_vs_tiles"):
        small = [*small, f"data.path={slides(tmp_path / 'tiles')}"]
    if name == "bag":
        bags = write_bags(tmp_path / "bags")
        small = [*small, f"data.features={bags}", f"data.labels={bags / 'labels.csv'}"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spatialdl.train", f"experiment={name}", *small),
            *("trainer.max_steps=2", f"hydra.run.dir={tmp_path}/run", "device=cpu"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == ranks
    assert len(summary["loss"]) == 2
    assert np.isfinite(summary["loss"]).all()


def trained(name: str, folder: Path, *words: str, limit: int = 250) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spatialdl.train", f"experiment={name}", *words),
            f"hydra.run.dir={folder}",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.slow
def test_quickstart_learns(tmp_path):
    assert trained("quickstart", tmp_path)["validation"][-1]["accuracy"] > 0.9


@pytest.mark.slow
def test_slides_are_learned_a_little_by_a_vit(tmp_path):
    small = ["data.image_size=[96,96]", "model.patch=8", "model.width=32", "optimizer.lr=3e-3"]
    small += ["data.num_classes=2", "data.samples=64", "data.validation_samples=8"]
    summary = trained("vit_slide", tmp_path, *small)
    assert summary["world_size"] == 2
    losses = summary["loss"]
    assert np.mean(losses[-6:]) < 0.7 * np.mean(losses[:6])


@pytest.mark.slow
def test_fractals_are_learned_a_little(tmp_path):
    small = ["data.image_size=[24,24,24]", "data.num_classes=2", "data.samples=32"]
    small += ["model.width=4", "model.depth=2", "data.validation_samples=4", "trainer.max_epochs=7"]
    summary = trained("volume_fractals", tmp_path, *small)
    assert summary["world_size"] == 2
    losses = summary["loss"]
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[:8])
    first, *_, last = (one["mean_dice"] for one in summary["validation"])
    assert last > first + 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fractals_are_learned(tmp_path):
    summary = trained("volume_fractals", tmp_path, limit=1700)  # 6 minutes on two idle cores
    assert summary["validation"][-1]["mean_dice"] > 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_slides_are_learned_by_a_vit(tmp_path):
    summary = trained("vit_slide", tmp_path, limit=1700)  # 6 minutes on two cores
    assert summary["validation"][-1]["accuracy"] > 0.9
