"""The examples run as they say. (The demo, which takes minutes, has a command of its own.)"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from spatialdl.comm.launch import mpiexec_command
from spatialdl.slides.reading.reader import Slide
from tests.fitting import summary
from tests.inference.evaluating.cases import read_rows
from tests.processes import printed

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(folder: Path, *command: str) -> str:
    return printed(command, folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_of_ones_own(ranks, tmp_path):
    launcher = mpiexec_command(ranks) if ranks > 1 else []
    out = run(tmp_path, *launcher, sys.executable, str(EXAMPLES / "custom_model.py"))
    title, _, *rows = out.splitlines()
    assert f"{ranks}x1 tiles" in title
    losses, *differences = zip(*(map(float, row.split()[1:]) for row in rows), strict=True)
    assert losses[-1] < losses[0]
    assert max(map(max, differences)) < 1e-13


def test_a_data_set_of_ones_own(tmp_path):
    out = run(tmp_path, sys.executable, str(EXAMPLES / "custom_dataset.py"), "--out", "stripes")
    assert "wrote 40 images" in out
    found = summary(tmp_path / "stripes" / "run")
    assert found["world_size"] == 2
    assert found["validation"][-1]["accuracy"] > 0.5
    words = ("stripes/set", "data/augment=light", "data.image_size=[48,72]")
    out = run(tmp_path, sys.executable, str(EXAMPLES / "show_augmentation.py"), *words)
    assert "11 epochs of it: augmented.png" in out
    with Image.open(tmp_path / "augmented.png") as sheet:
        assert sheet.size == (6 * 76 - 4, 2 * 68 - 4)


def test_a_loss_of_ones_own(tmp_path):
    out = run(tmp_path, sys.executable, str(EXAMPLES / "custom_loss.py"))
    rows = out.splitlines()[-4:]
    losses, *_, differences = zip(*(map(float, row.split()[1:]) for row in rows), strict=True)
    assert all(0 < loss < 1 for loss in losses)
    assert len(set(losses)) == 4
    assert max(differences) < 1e-13
    for layout, ranks in (("none", 1), ("sp", 2)):
        assert summary(tmp_path / "own_loss" / layout)["world_size"] == ranks


def test_a_network_is_fine_tuned(tmp_path):
    out = run(tmp_path, sys.executable, str(EXAMPLES / "finetuning.py"))
    assert "fc.weight is initialised, 2x64; the file has 5x64" in out
    assert float(out.splitlines()[-1].split()[1].rstrip("%")) > 60
    again = ["ckpt_path=finetuning/second", "out=tuned.safetensors"]
    run(tmp_path, sys.executable, "-m", "spatialdl.export", *again)
    before = load_file(tmp_path / "finetuning" / "pretrained.safetensors")
    after = load_file(tmp_path / "tuned.safetensors")
    frozen = ("conv1.", "bn1.", "layer1.")
    assert all(after[name].equal(before[name]) for name in before if name.startswith(frozen))
    assert not after["layer4.1.conv2.weight"].equal(before["layer4.1.conv2.weight"])
    assert (len(before["fc.bias"]), len(after["fc.bias"])) == (5, 2)


def test_every_pixel_gets_a_class(tmp_path):
    out = run(tmp_path, sys.executable, str(EXAMPLES / "segmentation.py"))
    dice = {
        line.split()[2]: float(line.split()[3]) for line in out.splitlines() if "Dice of" in line
    }
    assert list(dice) == ["ground", "round", "square"]
    assert min(dice.values()) > 0.6
    with Image.open(tmp_path / "cells" / "overlay.png") as sheet:
        assert sheet.size == (3 * 56, 4 * 64)
        shown = np.asarray(sheet.convert("RGB"), np.int16)
    image, marked, predicted = np.split(shown, 3, axis=1)
    covered = (marked != image).any(2)
    assert 0.05 < covered.mean() < 0.5
    assert (marked == predicted)[covered].mean() > 0.6


def test_predictions_for_qupath(tmp_path):
    out = run(tmp_path, sys.executable, str(EXAMPLES / "predict_to_qupath.py"), "--out", "q")
    named = [Path(line.split()[0]) for line in out.partition("in QuPath:")[2].splitlines()[1:]]
    files = [path for path in named if path.suffix in (".geojson", ".tif")]
    assert len(files) == 5
    assert all((tmp_path / path).is_file() for path in files)
    rows = read_rows(tmp_path / "q" / "predicted" / "predictions.csv")
    # most tiles are told as their mean colour says
    with Slide(tmp_path / "q" / "slide.tiff") as slide:
        found = [
            (pixels[..., 0].mean() < pixels[..., 2].mean() + 3) == (row["predicted"] == "gland")
            for row in rows
            for pixels in [slide.read_scaled(int(row["x"]), int(row["y"]), (64, 64), 1.0)]
        ]
    assert sum(found) > 0.8 * len(rows) > 100
