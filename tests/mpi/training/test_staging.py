"""Staging on several ranks: one copier a node, the shards of its ranks, the same losses."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.nodes import Nodes
from spatialdl.data import ShardWriter
from spatialdl.errors import ShardError
from spatialdl.layout import even_bounds
from spatialdl.training.staging import Staging
from spatialdl.training.trainer import Trainer

SIZE = 1100, 24  # three rows of chunks
RANKS = MPI.COMM_WORLD.size


def write(folder: Path, regions: int) -> None:
    draw = np.random.default_rng(0)
    with ShardWriter(folder, ("a", "b"), kind="regions", stripes=3) as writer:
        for number in range(regions):
            image = draw.integers(0, 256, (*SIZE, 3), np.uint8)
            writer.add(image, number % 2, "train" if number < 4 else "val")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    world = MPI.COMM_WORLD
    folder = world.bcast(tmp_path_factory.mktemp("set") if world.rank == 0 else None)
    if world.rank == 0:
        write(folder / "set", 6)
        write(folder / "one", 1)
        shutil.copytree(folder / "set", folder / "damaged")
        damaged = folder / "damaged" / "shard-00001.h5"
        content = bytearray(damaged.read_bytes())
        content[-1000] ^= 1
        damaged.write_bytes(content)
    world.Barrier()
    return folder


@pytest.fixture
def until_done(monkeypatch):
    """Training waits at each step until the copiers are as far as they get."""
    damage = Staging.damage

    def looking(self: Staging) -> int:
        if self._copier is not None:
            while not self._copier.shards["done"] and self._copier._process.poll() is None:
                self._copier.look()
        return damage(self)

    monkeypatch.setattr(Staging, "damage", looking)


def train(
    run_dir: Path, data: Path, comm: Communicator, layout: str, to: object, note=None, nodes=None
):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose(
            "train",
            [
                *("model.width=2", "data=shards", f"data.path={data}", f"data.stage.to={to}"),
                *(
                    f"data.batch_size={1 if data.name == 'one' else 2}",
                    "trainer.max_steps=4",
                    "trainer.precision=float64",
                ),
                *("device=cpu", "comm.check=true", *layout.split()),
            ],
        )
    trainer, losses = Trainer(config, comm, nodes), []
    step = trainer._train_step

    def stepping(batch):
        losses.append(step(batch))
        if note is not None:
            note(trainer._meeting._staging)
        return losses[-1]

    trainer._train_step = stepping
    trainer.fit(run_dir)
    return losses


@pytest.mark.parametrize("layout", [f"parallel=sp parallel.grid=[{RANKS},1]", "parallel=dp"])
def test_losses_are_those_without_staging(layout, data, tmp_path, world, until_done, monkeypatch):
    if layout == "parallel=dp":
        if RANKS > 2:
            pytest.skip("a batch of two")
        layout += f" parallel.data={RANKS}"
    plain = train(tmp_path / "plain", data / "set", world, layout, "off")
    here = world.bcast(tmp_path / "disk")
    found = []

    def note(run: Staging) -> None:
        opened = run._datasets[0]._shards._shards.values()
        found.append((run._copier is not None, [shard.is_local for shard in opened]))

    monkeypatch.setattr("spatialdl.data.open_shards._LOOK_EVERY_S", 0.0)
    staged = train(tmp_path / "staged", data / "set", world, layout, here, note)
    assert staged == plain
    everybody = world.allgather(found[-1])
    assert [copies for copies, _ in everybody] == [True] + [False] * (RANKS - 1)
    assert all(all(local) and local for _, local in everybody)
    assert not list(here.iterdir())


@pytest.mark.world(2, 3, 4)
def test_each_node_has_its_own_ranks_shards(data, tmp_path, world, until_done, caplog):
    """Ranks of the upper rows on one node, the last rank on another one."""
    nodes = Nodes(world, ["upper"] * (world.size - 1) + ["lower"])
    disk = tmp_path / "disk"  # of each rank its own; a node's is that of its first rank
    copied = []

    def note(run: Staging) -> None:
        if run._copier is not None:
            copied.append(sorted(path.name for path in run._copier.folder.glob("*.h5")))

    layout = f"parallel=sp parallel.grid=[{world.size},1]"
    with caplog.at_level(logging.INFO):
        train(tmp_path / "run", data / "one", world, layout, disk, note, nodes)
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


def test_damage_ends_all_ranks(data, tmp_path, world, until_done):
    layout = f"parallel=sp parallel.grid=[{RANKS},1]"
    with pytest.raises(ShardError, match=r"shard-00001\.h5 does not .* It holds samples 0, 1, 2"):
        train(tmp_path / "run", data / "damaged", world, layout, world.bcast(tmp_path / "disk"))
    world.barrier()  # nobody is left in the middle of something
