"""Scripts with SpatialStrategy as users start them, and the ranks and devices that it finds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from spatialdl import init_mesh, shard
from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.single_process import SingleProcess
from spatialdl.spatial.table import is_spatial
from spatialdl.training import lightning
from spatialdl.training.lightning import (
    StartedProcesses,
    StartedRanks,
    device_for,
    split_batch,
)
from tests.processes import ended

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lightning.md").read_text()
PAGE = PAGE.replace("401, 303", "41, 33")
PLAIN, SPLIT, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CPU = torch.device("cpu")
FAILS = """
    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 1:
                raise RuntimeError("a broken sample")
            return super().training_step(batch, batch_idx)

    trainer = L.Trainer(strategy=SpatialStrategy(grid=(2, 1)), max_epochs=1, logger=False)
    trainer.fit(Broken(), DataLoader(images, batch_size=4))
    print("loss nan")
"""


def loss_of(text: str) -> float:
    (found,) = re.findall(r"loss (\S+)$", text, re.MULTILINE)
    return float(found)


def test_the_split_script_of_the_page_has_the_loss_of_the_plain_one_and_an_error_ends_all_ranks(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    runpy.run_path("plain.py", run_name="__main__")
    expected = loss_of(capsys.readouterr().out)
    (tmp_path / "script.py").write_text(SPLIT + FAILS)
    done = ended([*mpiexec_command(2), sys.executable, "script.py"], tmp_path)
    text = done.stdout + done.stderr
    assert loss_of(done.stdout) == pytest.approx(expected, rel=1e-4), text
    assert text.count("`Trainer.fit` stopped") == 1  # only rank 0 reports
    assert "never averaged" not in text
    runs = sorted(path.name for path in (tmp_path / "lightning_logs").iterdir())
    assert runs == ["version_0", "version_1"]
    (kept,) = (tmp_path / "lightning_logs" / "version_1" / "checkpoints").iterdir()
    assert kept.name == "epoch=1-step=8.ckpt"
    assert done.returncode != 0
    assert "RuntimeError: a broken sample" in done.stderr


def cuda(*places: int) -> list[torch.device]:
    return [torch.device("cuda", place) for place in places]


class TwoNodes(SingleProcess):
    rank, size = 4, 6

    def nodes(self) -> list[int]:
        return [0, 1, 0, 1, 1, 0]  # ranks go round the nodes, but for two


def test_ranks_are_those_of_the_launcher(monkeypatch):
    for name, value in {"RANK": 5, "SIZE": 8, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    ranks = StartedRanks()
    assert (ranks.global_rank(), ranks.world_size(), ranks.local_rank()) == (5, 8, 1)
    assert ranks.creates_processes_externally
    ranks.find_nodes(TwoNodes())
    assert (ranks.node_rank(), ranks.local_rank()) == (1, 2)


@pytest.mark.parametrize(
    ("given", "local_rank", "expected"),
    [(cuda(0), 2, 2), (cuda(0, 1, 2), 1, 1), (cuda(2, 0), 0, 2), (cuda(2), 1, 2), ([CPU], 3, None)],
)
def test_a_rank_takes_a_device_of_its_own(given, local_rank, expected, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(lightning, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(lightning, "take_device", taken.append)
    device_for(local_rank, given)
    assert taken == ([] if expected is None else [expected])


def test_what_fails_is_noted():
    processes = StartedProcesses()
    assert processes.launch(lambda x, y: x + y, 1, y=2, trainer=None) == 3
    with pytest.raises(KeyboardInterrupt):
        processes.launch(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert processes.failed
    processes.launch(lambda: None)
    assert not processes.failed


# --- batches

MESH = init_mesh((1, 1), comm=SingleProcess())
IMAGE, MASK, LABELS = torch.rand(2, 3, 9, 7), torch.zeros(2, 9, 7, dtype=torch.long), torch.ones(2)


def is_split(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(is_spatial, batch)


class Sample(NamedTuple):
    image: Tensor
    mask: Tensor
    label: Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((IMAGE, LABELS), (True, False)),
        ([IMAGE, MASK], [True, True]),
        (Sample(IMAGE, MASK, LABELS), Sample(True, True, False)),
        ({"image": IMAGE, "name": "a", "n": 3}, {"image": True, "name": False, "n": False}),
        ({"in": {"x": IMAGE}, "y": [MASK.float()]}, {"in": {"x": True}, "y": [True]}),
        ((IMAGE, torch.rand(2, 9, 9)), (True, False)),
        ((IMAGE, torch.rand(2, 5, 4, 4)), (True, True)),
        ((IMAGE, torch.zeros(2, 1, 9, 7, dtype=torch.bool)), (True, True)),
        ((IMAGE, torch.zeros(2, 6, 4, 4, dtype=torch.long)), (True, False)),
        (IMAGE, True),
        (torch.zeros(2, 3, 9, 7, dtype=torch.uint8), True),
    ],
)
def test_images_and_their_masks_are_split(batch, expected):
    assert is_split(split_batch(batch, MESH)) == expected


def test_volumes_and_signals():
    volumes, signals = (init_mesh(grid, comm=SingleProcess()) for grid in ((1, 1, 1), (1,)))
    batch = (torch.rand(2, 1, 5, 6, 7), torch.zeros(2, 5, 6, 7, dtype=torch.long), LABELS)
    assert is_split(split_batch(batch, volumes)) == (True, True, False)
    batch = (torch.rand(2, 3, 50), torch.rand(2, 50), torch.rand(2, 4))
    assert is_split(split_batch(batch, signals)) == (True, True, False)


def test_what_is_split_already_stays():
    split = shard(IMAGE, MESH)
    assert split_batch((split, LABELS), MESH)[0] is split


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((LABELS,), r"batch of tuple with \(2,\) float32: an image .* is \(N, C, H, W\)"),
        ("text", "with no tensors"),
        (IMAGE[0], r"\(3, 9, 7\) float32"),
    ],
)
def test_batches_without_an_image_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, MESH)
