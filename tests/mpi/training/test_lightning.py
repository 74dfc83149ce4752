"""A Trainer with SpatialStrategy gives the results of a single process without it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import FSDPPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Accuracy, MeanMetric

import spatialdl
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Reducer
from spatialdl.training.lightning import SpatialStrategy
from tests.mpi.training.lightning_modules import (
    CLASSES,
    SAMPLES,
    Classifier,
    Encoder,
    Masked,
    Segmenter,
    assert_equal,
    fitted,
    labelled,
)


def grids(world: Communicator) -> list[tuple[int, int]]:
    """Grids of rows and columns, and of rows only."""
    size = world.size
    return [(2, size // 2) if size % 2 == 0 else (1, size), (size, 1)]


def strategy(world: Communicator, which: int = 0, **arguments: Any) -> SpatialStrategy:
    return SpatialStrategy(grid=grids(world)[which], **arguments)


def assert_same_logs(ours: list[dict[str, Tensor]], plain: list[dict[str, Tensor]]) -> None:
    assert len(ours) == len(plain) > 0
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_classification(world: Communicator) -> None:
    # ranks that were seeded differently become alike
    ours, trainer, followed = fitted(strategy(world), validates=True, seed=5 + world.rank)
    plain, alone, expected = fitted("auto", validates=True)
    assert_equal(ours, plain)
    assert_same_logs(followed.logged, expected.logged)
    loader = DataLoader(labelled(5), 2)
    predicted = torch.cat(trainer.predict(ours, loader))
    assert torch.equal(predicted, world.bcast(predicted))
    torch.testing.assert_close(predicted, torch.cat(alone.predict(plain, loader)))
    assert trainer.validate(ours, loader, verbose=False)[0] == pytest.approx(
        alone.validate(plain, loader, verbose=False)[0], rel=1e-10
    )


def test_segmentation_with_masks(world: Communicator) -> None:
    ours, trainer, _ = fitted(strategy(world), Segmenter, Masked(), max_epochs=1)
    plain, alone, _ = fitted("auto", Segmenter, Masked(), max_epochs=1)
    assert_equal(ours, plain)
    loader = DataLoader(Masked(), 5)
    predicted, expected = trainer.predict(ours, loader), alone.predict(plain, loader)
    torch.testing.assert_close(torch.cat(predicted), torch.cat(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "clip",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ],
)
def test_accumulated_and_clipped(
    clip: dict[str, Any], world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged, reduce = [], Reducer.reduce
    monkeypatch.setattr(Reducer, "reduce", lambda self: averaged.append(1) or reduce(self))
    ours, trainer, followed = fitted(strategy(world), accumulate_grad_batches=4, **clip)
    assert len(averaged) == trainer.global_step == 4  # of 6 batches an epoch: 4, and 2
    plain, _, expected = fitted("auto", accumulate_grad_batches=4, **clip)
    assert_equal(ours, plain)
    for mine, theirs in zip(followed.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


class Measured(Classifier):
    """Logs values that differ between replicas."""

    def __init__(self) -> None:
        super().__init__(dropout=0)
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)
        self.mean = MeanMetric().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        scores = self.net(images)
        loss = F.cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.mean(loss)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        self.log("metric", self.mean, on_epoch=True, on_step=False)
        for how in ("mean", "sum", "max", "min"):
            self.log(how, labels.double().sum(), on_epoch=True, reduce_fx=how, sync_dist=True)
        return loss


@pytest.mark.world(2, 4)
def test_replicas_train_on_samples_of_their_own(world: Communicator) -> None:
    keys = {"accumulate_grad_batches": 2}
    replicas = SpatialStrategy(grid=(world.size // 2, 1), data=2)
    ours, trainer, followed = fitted(replicas, Measured, batch=2, **keys)
    order = DistributedSampler(labelled(), 1, 0)  # Lightning's own, for one process
    plain, _, expected = fitted("auto", Measured, batch=4, sampler=order, **keys)
    assert_equal(ours, plain)
    found, wanted = followed.logged[-1], expected.logged[-1]
    torch.testing.assert_close(found["metric"], wanted["metric"], rtol=1e-10, atol=1e-10)
    assert found["accuracy"] == wanted["accuracy"]
    labels = labelled().tensors[1][list(order)].double()
    sums = labels.view(-1, 2, 2).sum(1)  # over the samples that a replica has in a batch
    assert found["mean_epoch"] == sums.mean()
    assert found["sum_epoch"] == sums.sum()
    assert found["max_epoch"] == sums.max()
    assert found["min_epoch"] == sums.min()
    assert ours.mean.dist_sync_fn is None  # let go
    predicted = trainer.predict(ours, DataLoader(labelled(), 2))
    assert sum(map(len, predicted)) == SAMPLES // 2


class Adversaries(L.LightningModule):
    """Two networks, each with its optimizer; the second's backward bypasses Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh())
        self.judge = Encoder(dropout=0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        of_maker, of_judge = self.optimizers()
        self.toggle_optimizer(of_maker)
        self.manual_backward(-F.cross_entropy(self.judge(self.maker(images)), labels))
        self.clip_gradients(of_maker, 0.05, "norm")
        of_maker.step()
        of_maker.zero_grad()
        self.untoggle_optimizer(of_maker)
        self.judge.requires_grad_(True)
        for image in images.split(1):
            F.cross_entropy(self.judge(self.maker(image).detach()), labels[:1]).backward()
        of_judge.step()
        of_judge.zero_grad()
        self.judge.requires_grad_(False)  # until the next step needs it

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.maker.parameters()), torch.optim.SGD(
            self.judge.parameters(), 0.1
        )


def test_manual_optimization(world: Communicator) -> None:
    ours, _, _ = fitted(strategy(world), Adversaries, max_epochs=1)
    assert_equal(ours, fitted("auto", Adversaries, max_epochs=1)[0])


# --- files


@pytest.fixture
def folder(tmp_path: Path, world: Communicator) -> Path:
    """One for all ranks."""
    found: Path = world.bcast(tmp_path)
    return found


def test_resumes_in_any_layout_and_without_the_strategy(folder: Path, world: Communicator) -> None:
    saves = {"enable_checkpointing": True, "default_root_dir": folder}
    kept = ModelCheckpoint(folder / "kept", filename="{epoch}", save_top_k=-1)
    fitted(strategy(world), callbacks=[kept], max_epochs=2, **saves)
    assert sorted(file.name for file in (folder / "kept").iterdir()) == [
        "epoch=0.ckpt",
        "epoch=1.ckpt",
    ]
    path = folder / "kept" / "epoch=0.ckpt"
    names = torch.load(path, weights_only=False)["state_dict"].keys()
    assert names == Classifier().state_dict().keys()
    runs = {"max_epochs": 3, "shuffle": False, "make": lambda: Classifier(dropout=0)}
    whole, _, _ = fitted("auto", ckpt_path=path, **runs)
    resumed, trainer, _ = fitted(strategy(world, 1), ckpt_path=path, **runs)
    assert trainer.current_epoch == 3
    assert_equal(resumed, whole)
    trainer.save_checkpoint(folder / "last.ckpt")
    saved = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    torch.testing.assert_close(saved, dict(whole.state_dict()), rtol=1e-10, atol=1e-10)
    loaded = Classifier.load_from_checkpoint(folder / "last.ckpt", weights_only=False)
    assert_equal(loaded.double(), whole, tolerance=1e-6)  # it builds the module in float32


def test_rank_0_writes_logs_and_all_stop_early(folder: Path, world: Communicator) -> None:
    stop = EarlyStopping("validation", min_delta=1e9, patience=1)
    logger = CSVLogger(world.bcast(folder), name="log", version=0)
    arguments = {"callbacks": [stop], "logger": logger, "log_every_n_steps": 1, "max_epochs": 9}
    _, trainer, _ = fitted(strategy(world), validates=True, **arguments)
    assert trainer.current_epoch == 2
    assert trainer.is_global_zero == (world.rank == 0)
    assert trainer.world_size == world.size
    trainer.strategy.barrier()
    with (folder / "log" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train_step"]) for row in rows) == 12


# --- ranks


def test_a_value_of_a_replica_is_reduced_over_replicas(world: Communicator) -> None:
    replicas = SpatialStrategy(data=world.size)
    L.Trainer(strategy=replicas, accelerator="cpu", logger=False, enable_checkpointing=False)
    size, value = world.size, torch.tensor([world.rank + 1])
    assert replicas.distributed_sampler_kwargs == {"num_replicas": size, "rank": world.rank}
    assert replicas.reduce(value).item() == (size + 1) / 2
    assert replicas.reduce(value, reduce_op="sum").item() == size * (size + 1) // 2
    assert replicas.reduce(value, reduce_op="max").item() == size
    assert replicas.reduce("text") == "text"
    assert replicas.broadcast(world.rank, src=size - 1) == size - 1
    assert replicas.reduce_boolean_decision(True)
    assert replicas.reduce_boolean_decision(world.rank == 0) == (size == 1)
    assert replicas.reduce_boolean_decision(world.rank == 0, all=False)
    leaf = torch.tensor([float(world.rank)], requires_grad=True)
    gathered = replicas.all_gather(leaf, sync_grads=True)
    if size > 1:
        assert gathered.flatten().tolist() == list(range(size))
        gathered.sum().backward()
        assert leaf.grad.item() == size  # each rank's loss counts
    image = spatialdl.shard(torch.ones(1, 1, 8, 8), replicas.mesh)
    with pytest.raises(spatialdl.UnsupportedSpatialOp, match="full_tensor"):
        replicas.reduce(image)
    with pytest.raises(ValueError, match="leave group"):
        replicas.all_gather(torch.ones(1), group="half of the ranks")


class Unsupported(Classifier):
    """Reads the pixels of another rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch[0]
        return F.grid_sample(images, torch.zeros(len(images), 4, 4, 2, dtype=images.dtype)).mean()


@pytest.mark.world(2, 4)
def test_what_cannot_be_split_is_refused(world: Communicator) -> None:
    with pytest.raises(spatialdl.UnsupportedSpatialOp, match="grid_sample"):
        fitted(strategy(world), Unsupported)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm=True replaces layers"),
        ({"plugins": [FSDPPrecision("32-true")]}, "FSDPPrecision replaces layers"),
    ],
)
def test_arguments_that_contradict_are_refused(
    arguments: dict[str, Any], message: str, world: Communicator
) -> None:
    with pytest.raises(ValueError, match=message):
        L.Trainer(strategy=strategy(world), accelerator="cpu", logger=False, **arguments)
    other = SpatialStrategy(grid=(1, world.size + 1))
    with pytest.raises(ValueError, match=rf"this world has {world.size} rank"):
        L.Trainer(strategy=other, accelerator="cpu", logger=False)


@pytest.mark.slow  # PyTorch's compiler is slow to import
def test_a_compiled_module_is_refused(world: Communicator) -> None:
    trainer = L.Trainer(strategy=strategy(world), accelerator="cpu", logger=False)
    with pytest.raises(RuntimeError, match="SpatialStrategy"):
        trainer.fit(torch.compile(Classifier()), DataLoader(labelled(), 2))
