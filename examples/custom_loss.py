"""Train with your own loss on images split over ranks, and compare with a single process.

    python examples/custom_loss.py

The loss is written as for a single process. Its sums include the pixels of all ranks, because
`output` and `target` are split tensors: no averaging, gathering or scaling by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS = 4
UNLABELLED = 255  # class of unlabelled pixels


class TverskyLoss(nn.Module):
    """1 minus the mean Tversky index of the classes (Salehi et al., 2017, section 2).

    Args:
        missed: weight of false negatives; above 0.5 favours recall over precision.
    """

    def __init__(self, missed: float = 0.7) -> None:
        super().__init__()
        self.missed = missed

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Scalar loss of logits (N, classes, rows, columns) and classes (N, rows, columns)."""
        known = (target != UNLABELLED).unsqueeze(1)
        classes = torch.arange(output.shape[1], device=output.device).view(1, -1, 1, 1)
        wanted = (target.unsqueeze(1) == classes).to(output.dtype)
        found = output.softmax(1) * known
        both = (found * wanted).sum((0, 2, 3))  # over the pixels of all ranks
        missed = wanted.sum((0, 2, 3)) - both
        wrong = found.sum((0, 2, 3)) - both
        # a ratio of sums over all ranks: means of the parts of an image would be another value
        index = (both + 1) / (both + self.missed * missed + (1 - self.missed) * wrong + 1)
        return 1 - index.mean()


def losses(out: Path, parallel: str) -> list[float]:
    """Losses of the first steps of a U-Net on random images with masks, in float64."""
    shutil.rmtree(out / parallel, ignore_errors=True)
    keys = [
        *("task=segmentation", "model=unet", "model.width=4", "model.depth=2"),
        # a module in the current folder would not need PYTHONPATH
        *("task.loss._target_=custom_loss.TverskyLoss", "task.loss.missed=0.8"),
        *("data.image_size=[65,50]", "data.num_classes=3", "data.batch_size=4", "data.samples=16"),
        *("data.validation_samples=0", f"trainer.max_steps={STEPS}", "trainer.precision=float64"),
        *("trainer.checkpoint.keep=0", "device=cpu"),
        *(f"parallel={parallel}", f"hydra.run.dir={out / parallel}"),
    ]
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "spatialdl.train", *keys],
        env={**os.environ, "PYTHONPATH": here},
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    found: list[float] = json.loads((out / parallel / "summary.json").read_text())["loss"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("own_loss"), help="folder (%(default)s)")
    out = parser.parse_args().out
    one_process, two_ranks = losses(out, "none"), losses(out, "sp")
    print("step   one process     two ranks   difference")
    for step, (one, two) in enumerate(zip(one_process, two_ranks, strict=True), start=1):
        print(f"{step:4} {one:13.6f} {two:13.6f} {abs(one - two):12.1e}")


if __name__ == "__main__":
    main()
