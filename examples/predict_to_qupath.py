"""Predict glands in a slide, and open the results in QuPath.

    python examples/predict_to_qupath.py
    python examples/predict_to_qupath.py --ckpt RUN --slides /data/*.svs

Without a checkpoint it writes two synthetic slides, trains on tiles of one (gland or stroma, by
colour), and predicts the other. At the end it lists the files to open in QuPath.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from spatialdl.data import ShardWriter
from spatialdl.slides.cutting.tiling import cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.synthetic import write_synthetic_slide

TILE, CLASSES = 64, ["gland", "stroma"]
SIZE = (1200, 1600)


def is_gland(tile: np.ndarray) -> bool:
    """Whether a tile is gland, purple (nuclei) or pale (lumens), and not pink stroma."""
    red, _, blue = tile.reshape(-1, 3).mean(0)
    return bool(red < blue + 3)


def write_tiles(slide: Path, folder: Path) -> None:
    """Write a data set of tiles, with the settings of the tiling."""
    settings = {"tile_size": TILE, "mpp": 0.5, "min_tissue": 0.5}
    with (
        Slide(slide) as opened,
        ShardWriter(folder, classes=CLASSES, made_with=settings, overwrite=True) as writer,
    ):
        plan = plan_tiles(opened, TILE, settings["mpp"], settings["min_tissue"])
        for number, tile in enumerate(cut_tiles(opened, plan)):
            label = CLASSES[0] if is_gland(tile.image) else CLASSES[1]
            split = "train" if number % 5 else "val"
            writer.add(tile.image, label, split, slide=slide.stem, xy=(tile.x, tile.y))


def run(command: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"spatialdl.{command}", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", type=Path, help="run directory (default: trains a network)")
    parser.add_argument("--slides", nargs="+", help="slides to predict (default: a synthetic one)")
    parser.add_argument("--out", type=Path, default=Path("qupath"), help="folder (%(default)s)")
    given = parser.parse_args()
    out, trained, slides = given.out, given.ckpt, given.slides
    if trained is None:
        trained = out / "run"
        write_synthetic_slide(out / "train.tiff", "ring", SIZE, seed=1)
        write_tiles(out / "train.tiff", out / "tiles")
        run(
            "train",
            *("data=shards", f"data.path={out / 'tiles'}", "data.batch_size=16"),
            *("model=resnet18", "model.width=8", "optimizer=adamw", "trainer.max_epochs=5"),
            f"hydra.run.dir={trained}",
        )
    if slides is None:
        write_synthetic_slide(out / "slide.tiff", "strand", SIZE, seed=2)
        slides = [str(out / "slide.tiff")]
    run(
        "predict",
        *(f"ckpt_path={trained}", f"slides=[{','.join(slides)}]", "activation=true"),
        *("batch_size=32", f"hydra.run.dir={out / 'predicted'}"),
    )
    print("\nin QuPath: open a slide, then drag onto it:")
    for path in sorted((out / "predicted").glob("*.geojson")):
        print(f"  {path}   tiles with probabilities, regions of strong activation")
    print("or open as separate images of the same region:")
    for path in sorted((out / "predicted").glob("*.tif")):
        print(f"  {path}")


if __name__ == "__main__":
    main()
