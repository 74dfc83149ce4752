"""How a process finds its ranks; real launchers, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import spatialdl
from spatialdl.comm import world
from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.trainer import Trainer
from tests.fitting import fit

SMALL = [
    *("model.width=4", "data.image_size=[41,37]", "data.samples=8", "data.batch_size=4"),
    *("data.validation_samples=0", "trainer.max_steps=3", "trainer.precision=float64"),
    "device=cpu",
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
USER_PROGRAM = """
import atexit
from pathlib import Path
def write_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    Path(f"threads-{rank}").write_text("".join(names))
atexit.register(write_threads)  # the first to be registered is called last
import torch, torch.distributed as dist
import torch._dynamo  # imported later, it would keep the program's own group for ever
import spatialdl
dist.init_process_group("gloo")
mesh = spatialdl.init_mesh((2, 1))
image = torch.arange(2 * 7 * 5.0).view(1, 2, 7, 5).requires_grad_()
x = spatialdl.shard(image, mesh)
y = torch.nn.functional.conv2d(x, torch.ones(1, 2, 3, 3), padding=1)
expected = torch.nn.functional.conv2d(image, torch.ones(1, 2, 3, 3), padding=1)
torch.testing.assert_close(y.full_tensor(), expected)
assert mesh.comm.allgather(dist.get_rank()) == [0, 1]
rank = dist.get_rank()
Path(f"content-{rank}").touch()
dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path):
    """Runs a command in an empty folder, where MPI may be out of reach."""
    (tmp_path / "path" / "mpi4py").mkdir(parents=True)
    (tmp_path / "path" / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI here')")

    def run(command: list[str], mpi: bool = True) -> subprocess.CompletedProcess[str]:
        launcher = ("OMPI_", "PMI", "PMIX", "PRTE", "MASTER_", "TORCHELASTIC")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
        environment |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
        if not mpi:
            found = [str(tmp_path / "path"), *os.environ.get("PYTHONPATH", "").split()]
            environment["PYTHONPATH"] = os.pathsep.join(found)
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "summary.json").read_text())["loss"]
    return found


@pytest.mark.parametrize("how", ["torchrun", pytest.param("mpiexec", marks=pytest.mark.slow)])
def test_training_over_torch_equals_one_process(how, start, tmp_path):
    """Torchrun's ranks where MPI is out of reach, or mpiexec's."""
    launcher = {"torchrun": [sys.executable, *TORCHRUN], "mpiexec": mpiexec_command(2)}[how]
    python = [] if how == "torchrun" else [sys.executable]
    train = ["-m", "spatialdl.train", *SMALL, "parallel=sp", "comm.check=true"]
    chosen = ["comm.transport=torch", "hydra.run.dir=run"]
    done = start([*launcher, *python, *train, *chosen], mpi=how == "mpiexec")
    assert done.returncode == 0, done.stderr
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        fit(Trainer(compose("train", SMALL), SingleProcess()), tmp_path / "plain")
    expected = losses(tmp_path / "plain")
    assert len(expected) == 3
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-10)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["parallel"]) == (2, "sp")


def test_a_program_that_torchrun_starts_gets_its_ranks(start, tmp_path):
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    done = start([sys.executable, *TORCHRUN, "program.py"], mpi=False)
    assert done.returncode == 0, done.stderr
    # files, not lines: what two processes print to one pipe may be cut into each other
    assert sorted(path.name for path in tmp_path.glob("content-*")) == ["content-0", "content-1"]
    # a thread of gloo that outlives Python's own end may end the process with SIGABRT
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads-{rank}").read_text()


NOT_INITIALISED = "import spatialdl; spatialdl.init_mesh((2, 1))"


def test_a_program_that_has_not_initialised_torch_distributed_is_told_so(start, tmp_path):
    (tmp_path / "program.py").write_text(NOT_INITIALISED)
    done = start([sys.executable, *TORCHRUN, "program.py"], mpi=False)
    assert done.returncode != 0
    assert "call torch.distributed.init_process_group() first (dist.init" in done.stderr
    assert "comm.transport" not in done.stderr


def test_an_error_on_a_rank_of_torchrun_ends_all(start):
    train = ["-m", "spatialdl.train", *SMALL, "parallel=sp", "data.image_size=[1,37]"]
    done = start([sys.executable, *TORCHRUN, *train], mpi=False)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "1x37" in line]
    assert said, done.stderr
    told = [line for line in said if not line.startswith(" ")]  # the agent tells it again, indented
    assert {line[:6] for line in told} <= {"rank 0", "rank 1"}  # one may be ended before it speaks
    assert len(told) <= 2
    assert "mpiexec" not in done.stderr


def test_a_process_that_nobody_launched_is_alone(monkeypatch):
    monkeypatch.setattr(world, "launched", lambda: None)
    monkeypatch.setattr(world._Chosen, "world", None)
    found = world.start_world("torch")
    assert isinstance(found, SingleProcess)
    assert world.world() is found
    mesh = spatialdl.init_mesh()
    assert (mesh.size, mesh.comm.allgather(3), mesh.comm.gather(4)) == (1, [3], [4])
    with pytest.raises(ValueError, match="this world has 1"):
        spatialdl.init_mesh((2, 1))
