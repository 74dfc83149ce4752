"""Several ranks do not repeat predictions of bags by a single process."""

from __future__ import annotations

import csv
from pathlib import Path

from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.inference.predicting.bags import BagWork
from spatialdl.inference.predicting.batch import run
from spatialdl.training.trainer import Trainer
from tests.bags import SMALL, bag_config, write_bags
from tests.fitting import fit
from tests.inference.predicting.runs import command

WORLD = MpiCommunicator(MPI.COMM_WORLD)


def test_a_run_resumes_on_other_ranks(tmp_path, monkeypatch):
    folder = Path(WORLD.bcast(tmp_path))
    words = f"ckpt_path={folder / 'run'}", "maps=false", f"parallel.data={WORLD.size}"
    some, every = (f"features={folder / name}" for name in ("some", "bags"))
    if WORLD.rank == 0:
        for name in ("out", "some", "at_once"):
            (folder / name).mkdir()
        write_bags(folder / "bags")
        trainer = Trainer(
            bag_config(folder / "bags", *SMALL["clam"], "trainer.max_epochs=1"), SingleProcess()
        )
        fit(trainer, folder / "run")
        for number in (0, 4, 5):
            name = f"s{number}.h5"
            (folder / "some" / name).symlink_to(folder / "bags" / name)
        assert run(command(*words, some), folder / "out", SingleProcess())
        assert run(command(*words, every), folder / "at_once", SingleProcess())
    WORLD.barrier()
    names, opened = [], BagWork.open

    def noted(self, file):
        names.append(file.slide)
        return opened(self, file)

    monkeypatch.setattr(BagWork, "open", noted)
    given = command(*words, every, "parallel=dp")
    for expected in (["s1", "s2", "s3", "s6", "s7", "s8"], []):
        names.clear()
        assert run(given, folder / "out", WORLD)
        assert sorted(name for one in WORLD.allgather(names) for name in one) == expected
    if WORLD.rank == 0:
        found, at_once = (list(csv.reader(open_table(folder / one))) for one in ("out", "at_once"))
        assert len(found) == 10
        assert found == at_once


def open_table(folder: Path) -> list[str]:
    return (folder / "slides.csv").read_text().splitlines()
