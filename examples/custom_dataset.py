"""Write your own images as a data set, and train a network on it over two ranks.

    python examples/custom_dataset.py

The images are wide and narrow stripes under noise; any numpy array of uint8, uint16 or floats
works. Training reads images by boxes, so no rank holds a whole image.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from spatialdl.data import ShardWriter

STRIPES = {"wide": 6, "narrow": 18}  # across an image
IMAGES = {"train": 32, "val": 8}
SIZE = 64


def picture(stripes: int, rng: np.random.Generator) -> np.ndarray:
    """Stripes under noise: uint8 (rows, columns, channels)."""
    phase = 2 * np.pi * (stripes * np.arange(SIZE) / SIZE + rng.random())
    noise = rng.normal(0, 20, (SIZE, SIZE, 3))
    return (128 + 60 * np.sin(phase)[:, None, None] + noise).clip(0, 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("stripes"), help="folder (%(default)s)")
    out = parser.parse_args().out
    rng = np.random.default_rng(0)
    with ShardWriter(out / "set", classes=list(STRIPES), overwrite=True) as writer:
        for split, images in IMAGES.items():
            for number in range(images):
                label = list(STRIPES)[number % len(STRIPES)]
                writer.add(picture(STRIPES[label], rng), label=label, split=split)
    print(f"wrote {len(writer)} images to {writer.path}", flush=True)
    shutil.rmtree(out / "run", ignore_errors=True)  # remove an earlier run
    command = [
        *(sys.executable, "-m", "spatialdl.train", "parallel=sp", "model.width=8"),
        *("data=shards", f"data.path={out / 'set'}", "trainer.max_epochs=4"),
        *("optimizer=adamw", f"hydra.run.dir={out / 'run'}"),
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
