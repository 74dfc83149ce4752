"""Staging on several ranks: one copier per node copies the shards of its ranks, equal losses."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.processes import Nodes
from spatialdl.data import ShardWriter
from spatialdl.data.staging.process import CopierProcess
from spatialdl.errors import ShardError
from spatialdl.layout.layout import even_bounds
from spatialdl.training.staging import Staging
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.data.conftest import flip
from tests.fitting import fit
from tests.mpi.training.small import written_once

pytestmark = pytest.mark.world(2, 3)
SIZE = 1100, 24  # three rows of chunks
WORLD = MpiCommunicator(MPI.COMM_WORLD)
RANKS = WORLD.size


def write(folder: Path, regions: int) -> None:
    draw = np.random.default_rng(0)
    with ShardWriter(folder, ("a", "b"), kind="regions", stripes=3) as writer:
        for number in range(regions):
            image = draw.integers(0, 256, (*SIZE, 3), np.uint8)
            writer.add(image, number % 2, "train" if number < 4 else "val")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    def write_all(folder: Path) -> None:
        write(folder / "set", 6)
        write(folder / "one", 1)
        shutil.copytree(folder / "set", folder / "damaged")
        flip(folder / "damaged" / "shard-00001.h5", -1000)

    return written_once(tmp_path_factory, write_all)


@pytest.fixture
def until_done(monkeypatch):
    """Let training wait at each step for the copiers."""
    damage = Staging.damage

    def looking(self: Staging) -> int:
        if self._copier is not None:
            while not self._copier.shards["done"] and self._copier._process.poll() is None:
                self._copier.look()
        return damage(self)

    monkeypatch.setattr(Staging, "damage", looking)


SPLIT = f"parallel=sp parallel.grid=[{RANKS},1]"
GIVEN = (
    *("++model._target_=tests.training.checkpoints.runs.network", "~model.width", "data=shards"),
    *("trainer.precision=float64", "trainer.report=false", "device=cpu", "comm.check=true"),
)


def train(
    run_dir: Path,
    data: Path,
    comm: Communicator,
    to: object,
    note=None,
    nodes=None,
    steps=3,
    layout=SPLIT,
) -> list[float]:
    words = (f"data.path={data}", f"data.stage.to={to}", f"trainer.max_steps={steps}")
    words += (f"data.batch_size={1 if data.name == 'one' else 2}", *layout.split())
    trainer, losses = Trainer(composed("train", *GIVEN, *words), comm, nodes), []
    step = trainer._train_step

    def stepping(batch):
        losses.append(step(batch))
        if note is not None:
            note(trainer._step_sync._staging)
        return losses[-1]

    trainer._train_step = stepping
    fit(trainer, run_dir)
    return losses


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory) -> list[float]:
    """The losses without staging."""
    return train(tmp_path_factory.mktemp("plain"), data / "set", WORLD, "off")


@pytest.fixture
def two_nodes(world) -> Nodes:
    """The last rank is on a separate node."""
    return Nodes(world, ["upper"] * (world.size - 1) + ["lower"])


@pytest.mark.parametrize("layout", [SPLIT, "parallel=dp"] if RANKS == 2 else [SPLIT])
def test_losses_are_those_without_staging(layout, data, tmp_path, world, until_done, monkeypatch):
    plain = train(tmp_path / "plain", data / "set", world, "off", layout=layout)
    here = world.bcast(tmp_path / "disk")
    found = []

    def note(run: Staging) -> None:
        opened = run._datasets[0]._shards._shards.values()
        found.append((run._copier is not None, [shard.is_local for shard in opened]))

    monkeypatch.setattr("spatialdl.data.open_shards._LOOK_EVERY_S", 0.0)
    staged = train(tmp_path / "staged", data / "set", world, here, note, layout=layout)
    assert staged == plain
    everybody = world.allgather(found[-1])
    assert [copies for copies, _ in everybody] == [True] + [False] * (RANKS - 1)
    assert all(all(local) and local for _, local in everybody)
    assert not list(here.iterdir())


@pytest.mark.world(3)
def test_each_node_has_its_own_ranks_shards(data, tmp_path, world, until_done, two_nodes, caplog):
    """Ranks of the upper rows on one node, the last rank on another one."""
    disk = tmp_path / "disk"  # of each rank its own; a node's is that of its first rank
    copied = []

    def note(run: Staging) -> None:
        if run._copier is not None:
            copied.append(sorted(path.name for path in run._copier.folder.glob("*.h5")))

    with caplog.at_level(logging.INFO):
        train(tmp_path / "run", data / "one", world, disk, note, two_nodes)
    everybody = world.allgather(copied[-1] if copied else None)
    starters = [rank for rank, names in enumerate(everybody) if names is not None]
    assert starters == [0, world.size - 1]
    stripes, (*_, begins, _) = even_bounds(SIZE[0], 3), even_bounds(SIZE[0], world.size)
    upper = [stripe for stripe in range(3) if stripes[stripe] < begins]
    lower = [stripe for stripe in range(3) if stripes[stripe + 1] > begins]
    assert (len(everybody[0]), len(everybody[-1])) == (len(upper), len(lower))
    assert len(set(everybody[0] + everybody[-1])) == 3
    if world.rank == 0:
        said = [one.message for one in caplog.records if one.name == "spatialdl.data"]
        assert sum(one.startswith("staging ") for one in said) == 2
        assert said[-1].startswith(f"staged: {len(upper) + len(lower)} shards (")
    assert not disk.exists() or not list(disk.iterdir())


@pytest.fixture
def small_disk(world, tmp_path):
    """Of this rank, with room for two of three shards."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(disk)]
    made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if not all(world.allgather(made)):
        pytest.skip("needs the right to mount a disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def warnings(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


@pytest.mark.world(3)
def test_a_disk_that_others_fill_is_said_once_a_node(
    data, plain, tmp_path, world, until_done, two_nodes, small_disk, monkeypatch, caplog
):
    start = CopierProcess.start

    def late(self: CopierProcess, shards) -> None:
        room = os.statvfs(small_disk)
        (small_disk / "of-others").write_bytes(bytes(room.f_bavail * room.f_bsize - 100_000))
        start(self, shards)

    monkeypatch.setattr(CopierProcess, "start", late)
    caplog.clear()
    staged = train(tmp_path / "staged", data / "set", world, small_disk, nodes=two_nodes)
    assert staged == plain
    told = warnings(caplog)
    assert len(told) == (two_nodes.own.rank == 0)
    assert all("no space left for it; shards missing in" in one for one in told)
    assert [path.name for path in small_disk.iterdir()] in (["of-others"], [])


@pytest.mark.world(3)
def test_damage_ends_all_ranks(data, tmp_path, world, until_done):
    with pytest.raises(
        ShardError, match=r"shard-00001\.h5 has SHA-256 .* It holds samples 0, 1, 2"
    ):
        train(tmp_path / "run", data / "damaged", world, world.bcast(tmp_path / "disk"))
    world.barrier()  # nobody is left in the middle of something
