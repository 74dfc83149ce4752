"""Pretrain a network, and fine-tune it on few images of another kind over two ranks.

    python examples/finetuning.py

The network is trained on many images of five kinds of stripes, and its weights are exported to one
file. A second run starts from it with frozen first layers, a small learning rate and a new head.
Files of torchvision and timm work likewise: weights=resnet18-f37072fd.pth.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from spatialdl.data import ShardWriter

SIZE = 48
NETWORK = ("model=resnet18", "model.width=8", "optimizer=adamw", "data=shards", "device=cpu")
FROZEN = "[conv1.*,bn1.*,layer1.*]"


def stripes(count: float, tilted: bool, rng: np.random.Generator) -> np.ndarray:
    """Stripes under noise: uint8 (rows, columns, channels)."""
    rows, cols = np.mgrid[:SIZE, :SIZE] / SIZE
    phase = 2 * np.pi * (count * (rows + cols if tilted else cols) + rng.random())
    noise = rng.normal(0, 20, (SIZE, SIZE, 3))
    return (128 + 60 * np.sin(phase)[..., None] + noise).clip(0, 255).astype(np.uint8)


def write(
    path: Path, classes: dict[str, tuple[float, bool]], images: dict[str, int], seed: int
) -> Path:
    """Write a data set; `images` is the number of images per class by split."""
    rng = np.random.default_rng(seed)
    with ShardWriter(path, classes=list(classes), overwrite=True) as writer:
        for split, count in images.items():
            for _ in range(count):
                for name, (across, tilted) in classes.items():
                    writer.add(stripes(across, tilted, rng), label=name, split=split)
    return path


def command(*words: object) -> None:
    print(f"\n$ python -m {shlex.join(map(str, words))}", flush=True)
    done = subprocess.run([sys.executable, "-m", *map(str, words)], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("finetuning"), help="folder (%(default)s)")
    out = parser.parse_args().out
    shutil.rmtree(out / "first", ignore_errors=True)  # remove earlier runs
    shutil.rmtree(out / "second", ignore_errors=True)
    many = {str(count): (count, False) for count in (2, 4, 7, 11, 16)}
    few = {"coarse": (3.0, True), "fine": (9.0, True)}

    first = write(out / "many", many, {"train": 20}, seed=0)
    command(
        *("spatialdl.train", *NETWORK, f"data.path={first}", "data.batch_size=16"),
        *("trainer.max_epochs=2", f"hydra.run.dir={out / 'first'}"),
    )
    weights = out / "pretrained.safetensors"
    command("spatialdl.export", f"ckpt_path={out / 'first'}", f"out={weights}")

    second = write(out / "few", few, {"train": 8, "val": 16}, seed=1)
    command(
        *("spatialdl.train", *NETWORK, f"data.path={second}", f"weights={weights}"),
        f"trainer.freeze={FROZEN}",  # keeps general features and their BatchNorm statistics
        "optimizer.lr=3e-4",  # a third of the default of adamw, to keep the pretrained features
        *("parallel=sp", "trainer.max_epochs=6", f"hydra.run.dir={out / 'second'}"),
    )
    summary = json.loads((out / "second" / "summary.json").read_text())
    found = summary["validation"][-1]
    print(f"\naccuracy {found['accuracy']:.1%} of {found['samples']} images, trained on 16")


if __name__ == "__main__":
    main()
