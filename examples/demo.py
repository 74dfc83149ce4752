"""From slides to a trained network and a map of its predictions, on two ranks, without a GPU.

The demo writes four synthetic slides (or uses your own), cuts them into tiles, trains a small
ResNet with every image split over two ranks, and predicts a slide. These are the commands of the
README; each is printed before it runs, and can be run again by hand in the folder of the demo.

    python examples/demo.py
    python examples/demo.py --slides /path/to/slides

Classes of your slides are read from a file labels.csv (slide,label,split) in their folder. Without
it, each slide is a separate class, and there is no validation.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from spatialdl.slides.batch.finding_slides import find_slides
from spatialdl.slides.synthetic import KINDS, write_synthetic_slide

SPLITS = ("train", "val")
SIZE = 6144  # side of a slide in pixels
TILE_SIZE, MPP = 256, 1.0  # a tile covers 512 pixels of the slide, enough for a gland
NETWORK = ("model=resnet18", "model.width=16", "optimizer=adamw", "optimizer.lr=1e-3")
EPOCHS = 4


@dataclass
class Steps:
    """The steps of the demo: each is announced, and its command printed before it runs.

    Attributes:
        folder: working directory of the commands.
        count: number of steps.
        done: number of steps so far.
    """

    folder: Path
    count: int
    done: int = 0

    def announce(self, text: str) -> None:
        """Print the number and the purpose of the next step."""
        self.done += 1
        print(f"\n[{self.done}/{self.count}] {text}", flush=True)

    def run(self, *arguments: object) -> None:
        """Print and run a command; exit if it fails."""
        words = [str(argument) for argument in arguments]
        print(f"$ {shlex.join(words)}", flush=True)
        programs = Path(sys.executable).parent  # where pip has put those of this package
        first = sys.executable if words[0] == "python" else str(programs / words[0])
        code = subprocess.run([first, *words[1:]], cwd=self.folder, check=False).returncode
        if code:
            sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slides", type=Path, help="your own slides: a file or a folder")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")
    options = parser.parse_args()
    started = time.monotonic()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tiles", "my_run", "predicted"):  # of an earlier demo
        shutil.rmtree(folder / name, ignore_errors=True)
    if options.slides is None:
        print("This takes about two minutes on two cores.")
        steps = Steps(folder, 4)
        slides, labels = synthetic_slides(steps)
    else:
        print("This takes a minute, and the time of your slides.")
        steps = Steps(folder, 3)
        slides = options.slides.resolve()
        labels = labels_of(slides, folder)
    print(f"Commands run in {folder}")
    steps.announce("cut the slides into tiles, where there is tissue")
    steps.run(
        *("spatialdl-tile", slides, "--out", "tiles", "--tile-size", TILE_SIZE, "--mpp", MPP),
        *("--labels", labels, *(["--skip-errors"] if options.slides else [])),
    )
    classes = json.loads((folder / "tiles" / "manifest.json").read_text())["classes"]
    if len(classes) < 2:
        print(f"\nall slides have class {classes[0]}: training needs at least two classes")
        print_files(folder)
        return
    steps.announce("train a ResNet on two ranks, each with half of every image")
    steps.run(
        *("python", "-m", "spatialdl.train", "parallel=sp", "data=shards", "data.path=tiles"),
        *(f"trainer.max_epochs={EPOCHS}", *NETWORK, "scheduler=cosine", "hydra.run.dir=my_run"),
    )
    unseen = find_slides([slides])[0] if options.slides else "slides/*-val.tif"
    steps.announce("predict slides on two ranks, and draw maps of the predicted classes")
    steps.run(
        *("python", "-m", "spatialdl.predict", "ckpt_path=my_run", f"slides={unseen}"),
        *("parallel=sp", "hydra.run.dir=predicted"),
    )
    print_results(folder, time.monotonic() - started)


def synthetic_slides(steps: Steps) -> tuple[Path, Path]:
    """Write slides of both classes for training and validation, and their labels.

    Returns:
        Paths of slides and labels, relative to the folder of the demo.
    """
    folder = steps.folder / "slides"
    folder.mkdir(exist_ok=True)
    rows = [(f"{kind}-{split}.tif", kind, split) for split in SPLITS for kind in KINDS]
    steps.announce(f"draw {len(rows)} slides of {SIZE} x {SIZE} pixels, two of each class")
    with ProcessPoolExecutor(2) as workers:
        jobs = [
            # slides of one split share a seed, so that they differ in their class only
            workers.submit(
                write_synthetic_slide, folder / name, kind, (SIZE, SIZE), seed=SPLITS.index(split)
            )
            for name, kind, split in rows
        ]
        for job in tqdm(jobs, desc="slides", unit="slide"):
            job.result()
    write_labels(folder / "labels.csv", rows)
    return Path("slides"), Path("slides", "labels.csv")


def labels_of(slides: Path, folder: Path) -> Path:
    """The labels of the user's slides, or else one class per slide."""
    beside = (slides if slides.is_dir() else slides.parent) / "labels.csv"
    if beside.exists():
        return beside
    names = [path.name for path in find_slides([slides])]
    print(f"no file {beside}: every slide is a separate class, without validation")
    rows = [(name, Path(name).stem, "train") for name in names]
    write_labels(folder / "labels.csv", rows)
    return Path("labels.csv")


def write_labels(path: Path, rows: list[tuple[str, str, str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "split"), *rows])


def print_results(folder: Path, seconds: float) -> None:
    """Print what training reached, and the files to look at."""
    summary = json.loads((folder / "my_run" / "summary.json").read_text())
    loss = summary["loss"]
    tenth = max(1, len(loss) // 10)
    first, last = sum(loss[:tenth]) / tenth, sum(loss[-tenth:]) / tenth
    print(f"\nafter {seconds:.0f} s, on {summary['world_size']} ranks:")
    print(f"  loss                 {first:.3f} -> {last:.3f} (means of {tenth} steps)")
    if summary["validation"]:
        found = summary["validation"][-1]
        print(f"  validation accuracy  {found['accuracy']:.1%} of {found['samples']} tiles")
    print_files(folder)


def print_files(folder: Path) -> None:
    """Print the pictures and reports of the demo, and how to go on."""
    names = ("tiles/report.html", "my_run/report.html", "my_run/loss.png", "predicted/*.png")
    print("\nLook at:")
    for path in (path for name in names for path in sorted(folder.glob(name))):
        print(f"  {path}")
    activate = Path(sys.prefix, "bin", "activate")
    if activate.exists():
        print(f"\nTo run these commands yourself:\n  . {activate}; cd {folder}")


if __name__ == "__main__":
    main()
