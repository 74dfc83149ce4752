"""Presets on the ranks of their own layouts, small; tests/test_conf.py trains each on one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spatialdl.configuring.keys import groups
from spatialdl.data import ShardWriter

SMALL = {
    "quickstart": (2, ["model.width=2", "data.image_size=[32,24]"]),
    "segmentation": (2, ["model.width=2", "data.image_size=[32,24]"]),
    "gems_resnet110": (4, ["model.width=2", "data.image_size=[32,24]"]),
    "hyfi_amoebanet": (6, ["model.layers=3", "model.filters=16", "data.image_size=[64,72]"]),
    "camelyon_like": (4, ["model.width=2", "scheduler.warmup_steps=1", "data.batch_size=4"]),
    "whole_vs_tiles": (2, ["model.width=2", "data.batch_size=4"]),
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


@pytest.mark.slow
def test_quickstart_learns(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spatialdl.train", "experiment=quickstart"),
            f"hydra.run.dir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    validation = json.loads((tmp_path / "summary.json").read_text())["validation"]
    assert validation[-1]["accuracy"] > 0.9
