"""How a process finds its ranks; real launchers, real processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import spatialdl
from spatialdl.comm import world
from spatialdl.comm.launch import mpiexec_command
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.trainer import Trainer
from tests.comm.programs import ROOT, TORCHRUN, run
from tests.composing import composed
from tests.fitting import fit

SMALL = [
    *("model.width=4", "data.image_size=[41,37]", "data.samples=8", "data.batch_size=4"),
    *("data.validation_samples=0", "trainer.max_steps=3", "trainer.precision=float64"),
    "device=cpu",
]
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
def no_mpi(tmp_path) -> dict[str, str]:
    """Variables of processes that find no MPI."""
    (tmp_path / "path" / "mpi4py").mkdir(parents=True)
    (tmp_path / "path" / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI here')")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), str(ROOT), *sys.path])}


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "summary.json").read_text())["loss"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "mpiexec"])
def test_training_over_torch_equals_one_process(how, no_mpi, tmp_path):
    """Torchrun's ranks where MPI is out of reach, or mpiexec's."""
    words = ["-m", "spatialdl.train", *SMALL, "parallel=sp", "comm.check=true"]
    words += ["comm.transport=torch", "hydra.run.dir=run"]
    if how == "torchrun":
        done = run(*TORCHRUN, *words, cwd=tmp_path, **no_mpi)
    else:
        done = run(*words, launcher=mpiexec_command(2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fit(Trainer(composed("train", *SMALL), SingleProcess()), tmp_path / "plain")
    expected = losses(tmp_path / "plain")
    assert len(expected) == 3
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-10)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["parallel"]) == (2, "sp")


def test_a_program_that_torchrun_starts_gets_its_ranks(no_mpi, tmp_path):
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    done = run(*TORCHRUN, "program.py", cwd=tmp_path, **no_mpi)
    assert done.returncode == 0, done.stderr
    # files, not lines: what two processes print to one pipe may be cut into each other
    assert sorted(path.name for path in tmp_path.glob("content-*")) == ["content-0", "content-1"]
    # a thread of gloo that outlives Python's own end may end the process with SIGABRT
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads-{rank}").read_text()


def test_a_program_that_has_not_initialised_torch_distributed_is_told_so(monkeypatch):
    monkeypatch.setattr(world._Chosen, "world", None)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group\(\) first"):
        spatialdl.init_mesh((2, 1))


def test_a_process_that_nobody_launched_is_alone(monkeypatch):
    monkeypatch.setattr(world, "launched", lambda: None)
    monkeypatch.setattr(world._Chosen, "world", None)
    found = world.start_world("torch")
    assert isinstance(found, SingleProcess)
    assert world.world() is found
    mesh = spatialdl.init_mesh()
    assert (mesh.size, mesh.comm.allgather(3), mesh.comm.gather(4)) == (1, [3], [4])
