"""Files and reports of a run on all ranks equal those of a single process."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.inference.features.encoders.making import make_encoder
from spatialdl.inference.features.features_cli import compute, given_in, prepare
from spatialdl.inference.features.maps import writing
from spatialdl.inference.features.options import parsed
from spatialdl.inference.predicting.loop import AgreedError
from spatialdl.training.optimization.precision import precision_of
from tests.inference.predicting.runs import write_slide

WORLD = MpiCommunicator(MPI.COMM_WORLD)
CPU = torch.device("cpu")
SIZES = {"a": (233, 150), "b": (97, 210)}


def written(slides: Path, out: Path, world: Communicator, *more: object) -> int:
    words = [*more, slides, "--out", out, "--whole", "--mpp", 0.5, "--slide-mpp", 0.5]
    words += ["--device", "cpu", "--precision", "float64", "--dtype", "float32"]
    words += ["--encoder", "tests.inference.features.maps.networks.Convolved"]
    options = parsed([*map(str, words)])
    encoder = make_encoder(options.wish)
    prepared = prepare(options, given_in(options), encoder)
    return compute(prepared, world, encoder, CPU, precision_of("float64", CPU))


def test_ranks_write_the_files_of_one_process(tmp_path, monkeypatch, capsys):
    folder = Path(WORLD.bcast(tmp_path))
    slides, one, all_ranks = folder / "slides", folder / "one", folder / "all"
    if WORLD.rank == 0:
        slides.mkdir()
        for name, size in SIZES.items():
            write_slide(slides / f"{name}.tif", *size)
        write_slide(slides / "torn.tif", 300, 200)
        data = (slides / "torn.tif").read_bytes()
        (slides / "torn.tif").write_bytes(data[: len(data) // 2])
        assert written(slides, one, SingleProcess()) == 1
    WORLD.barrier()
    monkeypatch.setattr(writing, "_BAND_BYTES", 2**12)  # many bands, of pieces of several ranks
    monkeypatch.setattr(writing, "_CHUNK_BYTES", 2**10)
    assert written(slides, all_ranks, WORLD) == 1
    said = capsys.readouterr()
    assert ("maps of 10 features of 2 slides" in said.out) == (WORLD.rank == 0)
    assert written(slides, all_ranks, WORLD) == 1
    assert ("2 of them by an earlier run" in capsys.readouterr().out) == (WORLD.rank == 0)
    if WORLD.rank:
        return
    assert "torn" in said.err
    for name in SIZES:
        with h5py.File(one / "maps" / f"{name}.h5") as file:
            wanted, attributes = file["features"][:], dict(file["features"].attrs)
        with h5py.File(all_ranks / "maps" / f"{name}.h5") as file:
            np.testing.assert_allclose(file["features"][:], wanted, rtol=1e-6, atol=1e-10)
            assert file["features"].attrs["key"] == attributes["key"]
            assert file["features"].chunks[1:] == (5, 5)
        assert (all_ranks / "maps" / f"{name}.png").is_file()
    statuses = [
        [slide["status"] for slide in json.loads((out / "manifest.json").read_text())["slides"]]
        for out in (one, all_ranks)
    ]
    assert statuses == [["processed", "processed", "failed"]] * 2


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    folder = Path(WORLD.bcast(tmp_path))
    if WORLD.rank == 0:
        write_slide(folder / "a.tif", 120, 90)

        def full(*given: object, **more: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writing, "unfinished", full)
    WORLD.barrier()
    problem = ""
    try:
        written(folder / "a.tif", folder / "out", WORLD)
    except AgreedError as error:
        problem = str(error)
    assert all("No space left" in one for one in WORLD.allgather(problem))
    with pytest.raises(AgreedError, match=f"--grid 7,1 needs 7 ranks, but there are {WORLD.size}"):
        written(folder / "a.tif", folder / "out", WORLD, "--grid", "7,1")
