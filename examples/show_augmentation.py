"""Draw an image and its augmented versions in several epochs.

    python examples/show_augmentation.py tiles data/augment=pathology data.augment.blur=2

Arguments are a data set folder and any keys of the training command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_module
from PIL import Image

from spatialdl.training.settings import open_sources

EPOCHS, COLUMNS, GAP = 11, 6, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="data set folder")
    parser.add_argument("keys", nargs="*", help="keys of the training command")
    parser.add_argument(
        "--sample", type=int, default=0, help="index in the training split (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("augmented.png"), help="(%(default)s)")
    options = parser.parse_args()
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["data=shards", f"data.path={options.folder}", *options.keys])
    sources = open_sources(config.data, int(config.seed), config.task.name)
    views = sources.train_views
    whole = (0, views.size[0], 0, views.size[1])
    images = [sources.train.read(options.sample)]
    images += [views.read(epoch, options.sample, whole) for epoch in range(EPOCHS)]
    height, width = (max(image.shape[axis] for image in images) + GAP for axis in (0, 1))
    sheet = np.full((-(-len(images) // COLUMNS) * height, COLUMNS * width, 3), 255, np.uint8)
    for number, image in enumerate(images):
        row, col = number // COLUMNS * height, number % COLUMNS * width
        sheet[row : row + image.shape[0], col : col + image.shape[1]] = image
    Image.fromarray(sheet[:-GAP, :-GAP]).save(options.out)
    print(f"the image and {EPOCHS} epochs of it: {options.out}")


if __name__ == "__main__":
    main()
