"""Evaluations on several ranks equal those of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.inference.evaluating.evaluation import run
from tests.inference.evaluating.cases import command, read_rows, write_rows
from tests.inference.predicting.runs import MAPS, NETWORK, train, write_slide
from tests.mpi.device import device_key

WORLD = MpiCommunicator(MPI.COMM_WORLD)
LAYOUTS = {
    2: ["parallel=sp", "parallel=dp"],
    3: ["parallel=sp parallel.grid=[3,1]", "parallel=dp parallel.data=3"],
    4: ["parallel=sp parallel.grid=[2,2]"],
}.get(WORLD.size, [])
SLIDES = 5


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Path:
    """Slides with labels, regions with masks, networks, and the results of a single process."""
    folder = tmp_path_factory.mktemp("case") if WORLD.rank == 0 else None
    if folder is not None:
        train(folder / "tiles", *NETWORK)
        train(folder / "maps", "task=segmentation", *MAPS)
        (folder / "slides").mkdir()
        rows = []
        for number in range(SLIDES):
            write_slide(folder / "slides" / f"s{number}.tiff", 107, 133 - 16 * number, number)
            rows.append((f"s{number}.tiff", number % 3, f"p{number % 3}", "AB"[number // 3]))
        (folder / "slides" / "bad.tiff").write_text("no slide")
        write_rows(folder / "labels.csv", ("slide", "label", "patient", "scanner"), rows)
        write_regions(folder / "regions")
        for kind in ("slides", "regions"):
            evaluate(folder, kind, SingleProcess(), "")
    return Path(WORLD.bcast(folder))


def write_regions(path: Path) -> None:
    """Two of each of three slides."""
    rng = np.random.default_rng(0)
    with ShardWriter(path, classes=["0", "1", "2"], kind="regions") as writer:
        for number in range(6):
            size = 35, 47 - 8 * (number % 3)
            image = rng.integers(0, 256, (*size, 3), np.uint8)
            mask = rng.integers(0, 3, size, np.uint8)
            writer.add(image, None, "test", slide=f"s{number // 2}", mask=mask)


def evaluate(folder: Path, kind: str, comm: Any, layout: str) -> Path:
    out = folder / f"{kind} {layout or 'plain'}"
    if comm.rank == 0:
        out.mkdir()
    asked = {
        "slides": [f"ckpt_path={folder / 'tiles'}", f"slides=[{folder / 'slides'}]", "level=0"],
        "regions": [f"ckpt_path={folder / 'maps'}", f"shards={folder / 'regions'}"],
    }[kind]
    common = (f"labels={folder / 'labels.csv'}", "subgroups=[scanner]", "bootstrap=30")
    here = (device_key(comm), "trust=[tests]", "batch_size=5", "min_tissue=0.3")
    words = (*asked, *common, *(here if kind == "slides" else here[:3]), *layout.split())
    succeeded = run(command(*words), out, comm)
    assert succeeded == (kind == "regions")  # one slide is bad
    return out


def assert_equal(path: Path, other: Path) -> int:
    """Compares cells, numbers to 1e-10, others exactly; returns the count of numbers."""
    ours, plain = read_rows(path), read_rows(other)
    assert len(ours) == len(plain)
    numbers = 0
    for one, expected in zip(ours, plain, strict=True):
        assert one.keys() == expected.keys()
        for name, cell in one.items():
            try:
                assert abs(float(cell) - float(expected[name])) < 1e-10, (name, one)
                numbers += 1
            except ValueError:
                assert cell == expected[name], (name, one)
    return numbers


@pytest.mark.parametrize("kind", ["slides", "regions"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_equal_those_of_one_process(layout, kind, case):
    out = evaluate(case, kind, WORLD, layout)
    if WORLD.rank:
        return
    plain = case / f"{kind} plain"
    tables = {path.name for path in plain.glob("*.csv")}
    assert {"metrics.csv", "cases.csv", "slides.csv"} <= tables
    assert {path.name for path in out.iterdir()} == {path.name for path in plain.iterdir()}
    for name in tables:
        assert assert_equal(out / name, plain / name) > 5, name
    levels = {row["level"] for row in read_rows(out / "metrics.csv")}
    assert levels == {"tile" if kind == "slides" else "image", "slide", "patient"}


def test_a_mistake_of_the_labels_is_raised_on_all_ranks(case):
    """Only rank 0 reads predictions and labels; its errors must not leave other ranks waiting."""
    if WORLD.rank == 0:
        write_rows(case / "other.csv", ("slide", "label"), [("s0", "tumour")])
        (case / "refused").mkdir()
    WORLD.barrier()
    words = (f"ckpt_path={case / 'tiles'}", f"slides={case / 'slides' / 's0.tiff'}", "level=0")
    layout = ("parallel=sp", f"parallel.grid=[{WORLD.size},1]", device_key(WORLD))
    more = (f"labels={case / 'other.csv'}", "trust=[tests]", "min_tissue=0.3", *layout)
    with pytest.raises(ValueError, match="'tumour', but the network has the classes 0, 1, 2"):
        run(command(*words, *more), case / "refused", WORLD)
