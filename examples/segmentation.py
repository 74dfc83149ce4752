"""Segmentation: write images and masks, train a U-Net over two ranks, draw predictions.

    python examples/segmentation.py

The images have round cells and brighter square ones under noise; some pixels are unlabelled. Each
rank reads its half of images and masks. The weights are exported to one file, loaded into the plain
network, and overlay.png shows image, mask and prediction.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.loader import to_input
from spatialdl.export import export
from spatialdl.models import unet

CLASSES = ("ground", "round", "square")
COLORS = np.array([[0, 0, 0], [230, 120, 30], [40, 110, 220]])
UNLABELLED = 255  # class ignored by loss and metrics
IMAGES = {"train": 32, "val": 4}
SIZE = (64, 56)
UNET = {"width": 8, "depth": 2}


def picture(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Image, uint8 (rows, columns, channels), and mask, uint8 (rows, columns)."""
    rows, cols = np.mgrid[: SIZE[0], : SIZE[1]]
    mask = np.zeros(SIZE, np.uint8)
    for number in range(4):
        down = np.abs(rows - rng.integers(10, SIZE[0] - 10))
        right = np.abs(cols - rng.integers(10, SIZE[1] - 10))
        distance = np.hypot(down, right) if number % 2 == 0 else np.maximum(down, right)
        mask[distance < 8] = 1 + number % 2
    light = np.array([90, 130, 165])[mask][..., None] + rng.normal(0, 15, (*SIZE, 3))
    mask[rng.random(SIZE) < 0.02] = UNLABELLED
    return light.clip(0, 255).astype(np.uint8), mask


def write(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with ShardWriter(path, classes=CLASSES, overwrite=True) as writer:
        for split, images in IMAGES.items():
            for _ in range(images):
                image, mask = picture(rng)
                writer.add(image, mask=mask, split=split)
    return path


def overlay(image: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The image blended with the colours of the classes."""
    inside = ((classes > 0) & (classes != UNLABELLED))[..., None]
    colors = COLORS[np.where(inside[..., 0], classes, 0)]
    return np.where(inside, (image + colors) // 2, image).astype(np.uint8)


def draw(data: ShardDataset, weights: Path, out: Path) -> None:
    """Draw image, mask and prediction of every validation image, one row each."""
    model = unet(num_classes=len(CLASSES), **UNET)  # a plain network, without ranks or wrappers
    model.load_state_dict(load_file(weights))
    model.eval()
    lines = []
    for number in range(len(data)):
        image, mask = data.read(number), data.read_mask(number)
        pixels = to_input(torch.from_numpy(image)[None], torch.float32, torch.device("cpu"))
        with torch.no_grad():
            predicted = model(pixels)[0].argmax(0).numpy()
        lines.append(np.hstack([image, overlay(image, mask), overlay(image, predicted)]))
    Image.fromarray(np.vstack(lines)).save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("cells"), help="folder (%(default)s)")
    out = parser.parse_args().out
    data = write(out / "set")
    shutil.rmtree(out / "run", ignore_errors=True)  # remove an earlier run
    command = [
        *(sys.executable, "-m", "spatialdl.train", "task=segmentation", "task.dice=1"),
        *("model=unet", *(f"model.{key}={value}" for key, value in UNET.items())),
        *("data=shards", f"data.path={data}", "data.batch_size=4", "parallel=sp"),
        *("optimizer=adamw", "optimizer.lr=5e-3", "trainer.max_epochs=6"),
        *(f"hydra.run.dir={out / 'run'}", "device=cpu"),
    ]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    export(str(out / "run"), out / "unet.safetensors")
    draw(ShardDataset(data, split="val"), out / "unet.safetensors", out / "overlay.png")
    found = json.loads((out / "run" / "summary.json").read_text())["validation"][-1]
    for name, dice in zip(CLASSES, found["dice"], strict=True):
        print(f"Dice of {name:8} {dice:.3f}")
    print(f"image, mask and prediction: {out / 'overlay.png'}")


if __name__ == "__main__":
    main()
