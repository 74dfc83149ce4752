"""Scripts with SpatialStrategy as users start them, and the ranks and devices that it finds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.single_process import SingleProcess
from spatialdl.integrations import lightning_ranks
from spatialdl.integrations.lightning_ranks import (
    StartedProcesses,
    StartedRanks,
    check_devices,
    device_for,
)
from tests.processes import ended, printed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lightning.md").read_text()
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


@pytest.mark.slow
def test_scripts_of_pytorch_lightning(tmp_path):
    script = SPLIT.replace("import lightning as L", "import pytorch_lightning as L")
    (tmp_path / "script.py").write_text(script.replace("grid=(2, 1)", "grid=(1, 1)"))
    assert 0 < loss_of(printed([sys.executable, "script.py"], tmp_path)) < 5


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
    assert ranks.launcher == "mpiexec"
    ranks.find_nodes(TwoNodes())
    assert (ranks.node_rank(), ranks.local_rank()) == (1, 2)


@pytest.mark.parametrize(
    ("given", "nodes", "size", "message"),
    [
        ([CPU], 1, 4, None),
        ([CPU] * 2, 2, 4, None),
        ([CPU], 2, 4, None),
        (cuda(0, 1, 2), 1, 2, None),
        ([CPU] * 4, 2, 4, r"Trainer\(devices=4, num_nodes=2\) needs 4 x 2 = 8 .* started 4"),
        (cuda(0, 1), 1, 3, "2 x 1 = 2 processes, but srun started 3"),
        ([CPU], 3, 4, r"Trainer\(num_nodes=3\) needs a multiple of 3 processes"),
    ],
)
def test_devices_must_fit_the_ranks(given, nodes, size, message, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    if message is None:
        check_devices(given, nodes, size, "srun")
        return
    with pytest.raises(ValueError, match=message):
        check_devices(given, nodes, size, "srun")


@pytest.mark.parametrize(
    ("given", "local_rank", "expected"),
    [(cuda(0), 2, 2), (cuda(0, 1, 2), 1, 1), (cuda(2, 0), 0, 2), (cuda(2), 1, 2), ([CPU], 3, None)],
)
def test_a_rank_takes_a_device_of_its_own(given, local_rank, expected, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(lightning_ranks, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(lightning_ranks, "take_device", taken.append)
    device_for(local_rank, given)
    assert taken == ([] if expected is None else [expected])
    if len(given) > 1:
        with pytest.raises(ValueError, match="rank 3 of this machine has no device"):
            device_for(3, given)


def test_what_fails_is_noted():
    processes = StartedProcesses()
    assert processes.launch(lambda x, y: x + y, 1, y=2, trainer=None) == 3
    with pytest.raises(KeyboardInterrupt):
        processes.launch(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert processes.failed
    processes.launch(lambda: None)
    assert not processes.failed


def test_without_lightning_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(lightning_ranks, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'needs .*: pip install "spatialdl\[lightning\]"'):
        lightning_ranks.lightning_module("pytorch.strategies")
