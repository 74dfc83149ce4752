"""The command with a stand-in for the training: who runs it, where, and with which numbers."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from spatialdl import train
from spatialdl.comm.launch import LaunchInfo, mpiexec_command
from spatialdl.data import ShardWriter
from spatialdl.training.run_lock import held
from tests.processes import ended

# found by every Python below; takes the place of the real trainer before anything imports it
STAND_IN = """
import json, sys, types
def run(config, run_dir):
    from mpi4py import MPI
    from omegaconf import OmegaConf
    world = MPI.COMM_WORLD
    text = {"config": OmegaConf.to_container(config, resolve=True), "size": world.size}
    (run_dir / f"rank{world.rank}.json").write_text(json.dumps(text))
    if config.seed == 1000 + world.rank:
        raise ValueError("seed 1001 is not to my liking")
    world.Barrier()
trainer = types.ModuleType("spatialdl.training.trainer")
trainer.run = run
sys.modules[trainer.__name__] = trainer
"""
NETWORK = """
import numpy as np
import torch
class Rows(list):
    def __init__(self):
        super().__init__((np.zeros((2, 8, 3), np.uint8), number // 7) for number in range(8))
def linear(num_classes):
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, num_classes))
def broken(num_classes): raise KeyError("no such thing")
"""


SP = "parallel=sp"
ROWS = [
    *(SP, "data=dataset", "data.dataset._target_=networks.Rows"),
    *("data.num_classes=1", "data.batch_size=2"),
]
REGIONS = [SP, "data=shards", "data.path=set"]


@pytest.fixture
def command(tmp_path):
    """Runs `python -m spatialdl.train` in an empty folder, maybe under a launcher."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path / "path"), *os.environ.get("PYTHONPATH", "").split()])

    def run(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
        launcher = mpiexec_command(ranks) if ranks else []
        start = [*launcher, sys.executable, "-m", "spatialdl.train", *arguments]
        return ended(start, tmp_path, PYTHONPATH=path)

    return run


def seen(run_dir: Path, rank: int) -> dict:
    return json.loads((run_dir / f"rank{rank}.json").read_text())


@pytest.fixture
def inside(tmp_path, monkeypatch, capsys):
    """Runs the command in this process; what it would train or start is written down."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "networks.py").write_text(NETWORK)
    torch.save({"0.weight": torch.zeros(7, 7)}, tmp_path / "other.pt")
    with ShardWriter(tmp_path / "set", kind="regions", classes=["a"]) as writer:
        for rows in (40, 50):
            writer.add(np.zeros((rows, 40, 3), np.uint8), 0, split="train")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "networks", raising=False)  # of another test
    calls: list[tuple] = []
    trainer = types.ModuleType("spatialdl.training.trainer")
    trainer.run = lambda config, run_dir: calls.append((config, run_dir))
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    monkeypatch.setattr("spatialdl.training.trainer", trainer, raising=False)
    monkeypatch.setattr(train, "start_ranks", lambda *call, **_: calls.append(call) or 0)
    monkeypatch.setattr(train, "launched", lambda: None)  # whoever started the tests
    handlers, level = logging.root.handlers[:], logging.root.level

    def run(*arguments: str) -> tuple[int, str, list[tuple]]:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        code = 0
        try:
            train.main()
        except SystemExit as stop:
            code = stop.code
        finally:
            logging.root.handlers[:], logging.root.level = handlers, level
        return code, capsys.readouterr().err, calls

    return run


def test_one_rank_trains_in_this_process(inside, tmp_path):
    code, errors, [(config, run_dir)] = inside("seed=7", "hydra.run.dir=out")
    assert (code, errors) == (0, "")
    assert run_dir == tmp_path / "out"
    assert config.seed == 7
    assert "hydra" not in config
    assert (run_dir / ".hydra" / "config.yaml").exists()
    assert OmegaConf.is_struct(config)
    assert (config.trainer.max_steps, config.trainer.max_epochs) == (None, 1)
    *_, (config, _) = inside("trainer.max_steps=90", "hydra.run.dir=other")[2]
    assert (config.trainer.max_steps, config.trainer.max_epochs) == (90, None)


@pytest.fixture
def mine(tmp_path):
    """A configuration of the user's, model=net."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    network = "_target_: spatialdl.models.resnet18\nwidth: 5\n"
    (tmp_path / "mine" / "model" / "net.yaml").write_text(network)


@pytest.mark.usefixtures("mine")
def test_several_ranks_are_started_with_this_jobs_configuration(inside, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(train, "start_ranks", lambda *call, **_: started.append(call) or 137)
    words = ("parallel=sp+pp", "model=net", "data.image_size=[33,47]")
    assert inside("--config-dir", "mine", *words, "hydra.run.dir='it\\'s, here'")[0] == 137
    quoted = str(tmp_path / "it's, here").replace("'", "\\'")
    [(ranks, module, arguments)] = started
    assert (ranks, module) == (3, "spatialdl.train")
    assert arguments == [
        *("--config-name", "train", "--config-dir", f"{tmp_path}/mine", *words),
        *(f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"),
    ]


def test_a_sweep_starts_the_ranks_of_each_job(inside, tmp_path):
    _, _, calls = inside("--multirun", "parallel=none,dp", "seed=1", "hydra.sweep.dir=sweep")
    (_, run_dir), (ranks, _, words) = calls
    assert (run_dir.name, ranks) == ("0", 2)
    assert words[2:] == [
        *("parallel=dp", "seed=1", f"hydra.run.dir='{tmp_path}/sweep/1'", "hydra.job.id=1"),
        *("hydra.job.num=1", "hydra.output_subdir=null"),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["parallel=tp"], "error: parallel=tp is unknown; choices: auto, dp, dp+gems"),
        (["-m", "parallel=dp,non"], "error: parallel=non is unknown; nearest: parallel=none;"),
        (["data=shards"], "error: data.path has no value: add data.path=..."),
        (["comm.map=ture"], "error: comm.map=ture must be true or false"),
        (["parallel=auto", "parallel.world=2", "trainer.precision=fp16-mixed"], "with float32"),
        (["parallel=dp", "parallel.data=4000", "data.batch_size=4000"], "error: 4000 ranks are"),
        ([*ROWS, "parallel.grid=[3,1]"], "error: an image of 2x8 is smaller than the grid 3x1"),
        (REGIONS, "error: the images of set have 2 different sizes, such as 40 x 40, 50 x 40"),
        (
            [*REGIONS, "data.image_size=[32,32]", "data.num_classes=0"],
            "error: data.num_classes=0, but set has 1 classes (a): leave it out",
        ),
        (ROWS, "error: sample 7 of data.dataset (networks.Rows): the class is 1, expected 0 to 0"),
        (["model._target_=networks.Nothing"], "error: model._target_=networks.Nothing cannot be"),
        ([SP, "model._target_=networks.broken"], "error: model=networks.broken cannot be built: "),
        (
            [SP, "model._target_=networks.linear", "weights=other.pt"],
            "other.pt does not match this",
        ),
    ],
)
def test_a_mistake_is_told_without_a_traceback(inside, arguments, text):
    code, errors, calls = inside(*arguments)
    assert code == 1
    assert text in errors
    assert "Traceback" not in errors
    assert not calls
    assert not any(Path("outputs").glob("*"))
    assert not Path("multirun").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_refused_its_directory_changes_nothing_there(inside, tmp_path):
    one = ("seed=1", "hydra.run.dir=sweep/0")
    assert inside(*one)[0] == 0
    with held(tmp_path / "sweep" / "0"):
        before = contents(tmp_path / "sweep" / "0")
        assert {path.name for path in before} >= {"config.yaml", "overrides.yaml", "train.log"}
        for words in (one, ("-m", "seed=2,3", "hydra.sweep.dir=sweep")):
            code, errors, calls = inside(*words)
            assert (code, len(calls)) == (1, 1)
            assert f"error: another run is writing to {tmp_path}/sweep/0 (process" in errors
            assert contents(tmp_path / "sweep" / "0") == before
    assert inside("seed=4", "hydra.run.dir=sweep/0")[0] == 0
    assert (tmp_path / "sweep" / "0" / ".hydra" / "overrides.yaml").read_text() == "- seed=4\n"


def test_what_runs_nothing_leaves_no_run_directory(inside, tmp_path, monkeypatch):
    small = ["debug=fakecomm", "model.width=4", "data.image_size=[33,47]"]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    monkeypatch.setattr("spatialdl.planning.fakecomm.look", lambda config, errors: not errors)
    assert inside(*small)[0] == 0
    assert inside(*small, SP, "parallel.grid=[2,99]")[0] == 1
    assert inside(*small, "hydra.run.dir=out")[0] == 0
    assert inside(*small, "hydra.run.dir=used")[0] == 0
    assert inside("--multirun", *small, "parallel=none,dp", "hydra.sweep.dir=sweep")[0] == 0
    assert not list((tmp_path / "outputs").iterdir())
    assert [one.name for one in (tmp_path / "sweep").iterdir()] == ["multirun.yaml"]
    assert not (tmp_path / "out").exists()
    assert contents(tmp_path).keys() == {*before, tmp_path / "sweep" / "multirun.yaml"}


def test_what_hydra_is_told_of_logging_is_done(inside, tmp_path):
    handler = "hydra.job_logging.handlers.console.stream=ext://sys.stderr"
    trainer = sys.modules["spatialdl.training.trainer"]
    trainer.run = lambda *_: logging.getLogger("spatialdl.mine").debug("in detail")
    code, errors, _ = inside("hydra.run.dir=out", "hydra.verbose=[spatialdl.mine]", handler)
    assert code == 0
    line = "[spatialdl.mine][DEBUG] - in detail\n"
    assert line in errors
    assert line in (tmp_path / "out" / "train.log").read_text()


class Program:
    """What a pickle may hold."""

    def __reduce__(self):
        return Path.touch, (Path("loaded"),)


def test_no_pickle_of_a_run_directory_is_loaded(inside, tmp_path):
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(Program()))
    code, errors, calls = inside("--experimental-rerun", "config.pickle")
    assert (code, calls) == (1, [])
    assert errors.startswith("error: --experimental-rerun unpickles files of a run directory")
    assert "pass the overrides in its .hydra/overrides.yaml instead" in errors
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("parallel=sp+pp", "(2x1 + 1x1) = 3 ranks, but this world has 2 ranks: start it"),
        ("launcher=slurm", "launcher=slurm was started by mpiexec on 2 ranks, but submits jobs"),
        ("debug=fakecomm", "debug=fakecomm was started on 2 ranks, but simulates them in one"),
        ("-m parallel=dp", "--multirun was started on 2 ranks, but launches the ranks of its jobs"),
        ("optimzer.lr=2", "optimzer.lr is unknown; nearest: optimizer.lr;"),
    ],
)
def test_ranks_of_a_launcher_are_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "launched", lambda: LaunchInfo(0, 2, 0, "mpiexec"))
    monkeypatch.setattr(train, "run_as_rank", lambda work: work())
    monkeypatch.setattr(train.signals, "install", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    with pytest.raises(ValueError, match=re.escape(said)):
        train.main()
    assert not (tmp_path / "outputs").exists()


# --- real processes


@pytest.mark.usefixtures("mine")
def test_one_process_starts_its_ranks_in_one_run_directory_and_passes_an_error_on(
    command, tmp_path
):
    done = command("-cd", "mine", "model=net", "parallel=sp", "model.width=8", "seed=1001")
    assert done.returncode == 1
    said = f"rank 1 on {os.uname().nodename}: seed 1001 is not to my liking\n"
    assert done.stderr == said, "banners of the launcher"
    [run_dir] = (tmp_path / "outputs").iterdir()
    assert (run_dir / "train.log").read_text().endswith(f"[ERROR] - {said}")
    assert {file.name for file in run_dir.iterdir()} == {
        *(".hydra", ".lock", "train.log", "rank0.json", "rank1.json")
    }
    ranks = [seen(run_dir, rank) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["size"] == 2
    assert ranks[0]["config"]["model"] == {"_target_": "spatialdl.models.resnet18", "width": 8}
    overrides = OmegaConf.load(run_dir / ".hydra" / "overrides.yaml")
    assert overrides == ["model=net", "parallel=sp", "++model.width=8", "seed=1001"]


def test_ranks_of_a_launcher_share_rank_0s_run_directory(command, tmp_path):
    done = command("parallel=sp", "hydra.run.dir=out/${now:%f}", ranks=2)
    assert done.returncode == 0, done.stderr
    [run_dir] = (tmp_path / "out").iterdir()  # the ranks were not started in the same microsecond
    assert {file.name for file in (run_dir / ".hydra").iterdir()} == {
        *("config.yaml", "hydra.yaml", "overrides.yaml")
    }
    assert OmegaConf.load(run_dir / ".hydra" / "config.yaml").parallel.name == "sp"
    assert [seen(run_dir, rank)["size"] for rank in (0, 1)] == [2, 2]
