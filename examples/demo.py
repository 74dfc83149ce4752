"""From slides to a trained network on several ranks, in a few minutes without a GPU.

The demo writes four synthetic slides (or uses your own), cuts them into tiles, and trains a small
ResNet with every image split over two ranks and the last layers on a third. Each step is a command
that you can also run yourself; it is printed before it runs.

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
from pathlib import Path

from tqdm import tqdm

from spatialdl.slides.batch.finding_slides import find_slides
from spatialdl.slides.synthetic.drawing import KINDS, write_synthetic_slide

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "val")
SIZE = 8192  # side of a slide in pixels
TILE_SIZE, MPP = 256, 1.0  # a tile covers 512 pixels of the slide, enough for a gland
EPOCHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slides", type=Path, help="your own slides: a file or a folder")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")
    options = parser.parse_args()
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.slides is None:
        slides, labels = synthetic_slides(options.out / "slides")
    else:
        slides, labels = options.slides, labels_of(options.slides, options.out)
    tiles, run = options.out / "tiles", options.out / "run"
    command(
        *("tools/tile_slides.py", slides, "--out", tiles, "--labels", labels),
        *("--tile-size", TILE_SIZE, "--mpp", MPP, "--overwrite", "--skip-errors"),
    )
    classes = json.loads((tiles / "manifest.json").read_text())["classes"]
    pictures = tiles / "pictures"
    if len(classes) < 2:
        print(f"\ntiles on the slides: {pictures}")
        print(f"all slides have class {classes[0]}: training needs at least two classes")
        return
    shutil.rmtree(run, ignore_errors=True)
    command(
        *("-m", "spatialdl.train", "parallel=sp+pp", "data=shards", f"data.path={tiles}"),
        *("model=resnet18", "model.width=24", "data.batch_size=16", "parallel.microbatches=2"),
        *(
            "optimizer=adamw",
            "optimizer.lr=3e-4",
            "scheduler=cosine",
            f"trainer.max_epochs={EPOCHS}",
        ),
        f"hydra.run.dir={run}",
    )
    report(run, pictures, time.monotonic() - started)


def synthetic_slides(folder: Path) -> tuple[Path, Path]:
    """Write slides of both classes for training and validation, and their labels."""
    folder.mkdir(exist_ok=True)
    rows = [(f"{kind}-{split}.tif", kind, split) for split in SPLITS for kind in KINDS]
    missing = [row for row in rows if not (folder / row[0]).exists()]
    print(f"writing {len(missing)} synthetic slides of {SIZE} x {SIZE} pixels to {folder}")
    with ProcessPoolExecutor(2) as workers:
        jobs = [
            # slides of one split share a seed, so that they differ in their class only
            workers.submit(
                write_synthetic_slide, folder / name, kind, (SIZE, SIZE), seed=SPLITS.index(split)
            )
            for name, kind, split in missing
        ]
        for job in tqdm(jobs, desc="slides", unit="slide"):
            job.result()
    return folder, write_labels(folder / "labels.csv", rows)


def labels_of(slides: Path, out: Path) -> Path:
    """The labels of the user's slides, or else one class per slide."""
    beside = (slides if slides.is_dir() else slides.parent) / "labels.csv"
    if beside.exists():
        return beside
    names = [path.name for path in find_slides([slides])]
    print(f"no file {beside}: every slide is a separate class, without validation")
    return write_labels(out / "labels.csv", [(name, Path(name).stem, "train") for name in names])


def write_labels(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "split"), *rows])
    return path


def command(*arguments: object) -> None:
    """Print and run a Python command; exit if it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    first = [str(ROOT / words[0])] if words[0].endswith(".py") else words[:1]
    done = subprocess.run([sys.executable, *first, *words[1:]], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def report(run: Path, pictures: Path, seconds: float) -> None:
    """Print the results and their location."""
    summary = json.loads((run / "summary.json").read_text())
    loss = summary["loss"]
    tenth = max(1, len(loss) // 10)
    first, last = sum(loss[:tenth]) / tenth, sum(loss[-tenth:]) / tenth
    print(f"\nafter {seconds:.0f} s on {summary['world_size']} ranks:")
    print(f"  loss                 {first:.3f} -> {last:.3f} (means of {tenth} steps)")
    if summary["validation"]:
        found = summary["validation"][-1]
        print(f"  validation accuracy  {found['accuracy']:.1%} of {found['samples']} tiles")
    print(f"  loss curve           {run / 'loss.png'}")
    print(f"  tiles on the slides  {pictures}, {pictures.parent / 'report.html'}")
    print(f"  run directory        {run}")


if __name__ == "__main__":
    main()
