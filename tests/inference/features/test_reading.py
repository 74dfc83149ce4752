"""Pieces of slides are read in order, errors are those of their slide, and files close."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import SlideError
from spatialdl.inference.features import workers
from spatialdl.inference.features.encoders.encoder import Wish
from spatialdl.inference.features.encoders.making import make_encoder
from spatialdl.inference.features.sources import SlideTiles
from spatialdl.inference.features.workers import TileWork
from spatialdl.inference.predicting.loop import Team, process
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.training.optimization.precision import precision_of

CPU = torch.device("cpu")


class Source:
    """Slides of as many tiles as their names say, of which `bad` cannot be read."""

    def __init__(self) -> None:
        self.opened: list[BytesIO] = []

    def key(self, task: SimpleNamespace) -> str:
        if task.name == "0":
            raise RuntimeError("no slide")
        return "key"

    def open(self, task: SimpleNamespace, key: str) -> SlideTiles:
        count, bad = int(task.name), 8 if task.name == "20" else -1

        def files() -> BytesIO:
            self.opened.append(BytesIO())
            return self.opened[-1]

        def read(opened: BytesIO, tiles: slice, part: PartRecord) -> list[Any]:
            assert not opened.closed
            if tiles.start <= bad < tiles.stop:
                raise OSError("bad")
            return [np.full((600, 600, 3), n, np.uint8) for n in range(count)[tiles]]

        return SlideTiles(task.name, key, TilingReport(task.name), {}, 600, count, files, read)


@pytest.mark.parametrize(("threads", "batch"), [(1, 64), (4, 4)])
def test_pieces_are_read_in_order_and_errors_are_of_their_slide(threads, batch, monkeypatch):
    found, source = {}, Source()

    def save(run, tiles, parts, computed):
        if tiles.name == "9":
            raise SlideError("not finite")
        found[tiles.name] = [one for some in computed for one in some]
        return tiles.report

    monkeypatch.setattr(workers, "save_slide", save)
    monkeypatch.setattr(workers, "resume", lambda *_: None)
    encoder = make_encoder(Wish("tests.inference.features.tiny.Tiny"))
    options = Namespace(batch_size=batch, readers=threads)
    run = SimpleNamespace(source=source, options=options, layout=None)
    tasks = [SimpleNamespace(name=name, path=name) for name in ("0", "9", "20", "15")]
    with ThreadPoolExecutor(threads) as pool:
        work = TileWork(run, encoder, CPU, precision_of("float32", CPU), pool)
        alone = SingleProcess()
        reports = list(process(tasks, Team(alone), alone, work))
    assert [one.failed for one in reports] == [True, True, True, False]
    notes = ["RuntimeError: no slide", "not finite", "bad", ""]
    assert all(note in one.note for note, one in zip(notes, reports, strict=True))
    assert list(found) == ["15"]
    images = torch.stack([torch.full((600, 600, 3), n, dtype=torch.uint8) for n in range(15)])
    with torch.inference_mode():
        wanted = encoder.network(work._preprocess(images))
    np.testing.assert_allclose(np.stack(found["15"]), wanted, rtol=1e-4, atol=1e-5)
    assert all(one.closed for one in source.opened)
