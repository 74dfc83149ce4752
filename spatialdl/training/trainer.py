"""The training loop, the same on every rank and in every layout."""

from __future__ import annotations

import logging
import math
import resource
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from spatialdl.comm import check
from spatialdl.data.loader import Batching, ImageSource, Loader, Slice, sample_order, to_input
from spatialdl.pipeline.runtime import Microbatch, Pipeline
from spatialdl.training.layouts import check_batch, check_image, placement_of
from spatialdl.training.progress import Progress
from spatialdl.training.run_directory import RunDirectory
from spatialdl.training.settings import DTYPES, Sources, device_of, open_sources

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger("spatialdl.trainer")


def run(config: DictConfig, run_dir: Path) -> None:
    """Train as `config` says; every rank of the world calls it.

    Raises:
        ValueError: if the configuration does not fit together.
    """
    from mpi4py import MPI

    check.enable(bool(config.comm.check))
    trainer = Trainer(config, MPI.COMM_WORLD)
    trainer.fit(run_dir)


class Trainer:
    """One rank's part of a training run.

    Attributes:
        pipeline: this rank's stage, and how it talks to the others.
        step: optimizer steps made.
    """

    def __init__(self, config: DictConfig, world: MPI.Intracomm) -> None:
        self.config, self.world = config, world
        self.dtype = DTYPES[config.trainer.precision]
        self.device = device_of(config.device)
        self.placement = placement_of(config.parallel)
        self.sources = open_sources(config.data, int(config.seed))
        check_image(self.sources.image_size, self.placement)
        self.microbatches = int(config.parallel.microbatches)
        check_batch(int(config.data.batch_size), self.microbatches, self.placement.data)
        self.pipeline = Pipeline(
            build_model(config, self.sources).to(self.dtype),
            self.placement,
            world,
            classification_loss,
            (self.sources.channels, *self.sources.image_size),
            config.parallel.cut,
            config.parallel.schedule,
            self.device,
        )
        self.loader = self._loader(self.sources.train)
        self.steps = self._total_steps()
        self.optimizer = self._optimizer()
        self.scheduler = self._scheduler()
        self.step = 0
        self._warned = False

    def fit(self, run_dir: Path) -> None:
        """Train to the end; rank 0 writes the run directory."""
        self._describe()
        with ExitStack() as stack:
            record = progress = None
            if self.world.rank == 0:
                record = stack.enter_context(RunDirectory(run_dir, self.config))
                progress = stack.enter_context(Progress(self.steps))
            epoch = 0
            while self.step < self.steps:
                self._train_epoch(epoch, record, progress)
                epoch += 1
            memory = self.world.gather(peak_memory_mb(self.device))
            if record is not None:
                record.finish({"world_size": self.world.size, "peak_memory_mb": memory})
                log.info("run directory: %s", record.path)
                log.info("loss curve:    %s", record.path / "loss.png")

    def _train_epoch(
        self, epoch: int, record: RunDirectory | None, progress: Progress | None
    ) -> None:
        order = sample_order(len(self.sources.train), int(self.config.seed), epoch)
        batch_size = int(self.config.data.batch_size)
        started = time.perf_counter()
        for number, batch in enumerate(self.loader.batches(order)):
            waited = time.perf_counter() - started
            loss = self._train_step(batch)
            seconds = time.perf_counter() - started
            if record is not None and progress is not None:
                images = min(
                    batch_size, len(order) - number * batch_size
                )  # the last may be smaller
                rate, wait = images / seconds, waited / seconds
                record.log_step(
                    step=self.step,
                    epoch=epoch,
                    loss=loss,
                    learning_rate=self._last_learning_rate,
                    images_per_second=rate,
                    data_wait=wait,
                )
                if not math.isfinite(loss) and not self._warned:
                    self._warned = True
                    log.warning("step %d: the loss is %s: lower optimizer.lr?", self.step, loss)
                progress.update(loss=loss, images_per_second=rate, data_wait=wait)
            every = self.config.trainer.validate_every
            if every is not None and self.step % int(every) == 0 and self.step < self.steps:
                self.validate(record)
            if self.step == self.steps:
                break
            started = time.perf_counter()
        if self.config.trainer.validate_every is None or self.step == self.steps:
            self.validate(record)

    def _train_step(self, batch: list[Slice]) -> float:
        """One optimizer step; returns the loss of the whole batch, the same on every rank."""
        total = self.pipeline.train_step([self._microbatch(part) for part in batch])
        self.optimizer.step()
        self._last_learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        self.step += 1
        return self._over_world(total / self.placement.data)[0]

    def validate(self, record: RunDirectory | None) -> None:
        """Loss and accuracy over all validation samples, each counted once."""
        if self.sources.validation is None:
            return
        sums = [0.0, 0.0, 0.0]
        order = torch.arange(len(self.sources.validation)).numpy()
        for batch in self._loader(self.sources.validation).batches(order):
            parts = [self._microbatch(part) for part in batch]
            targets = [part.target for part in parts if part.samples > 0]
            for output, target in zip(self.pipeline.evaluate(parts), targets, strict=False):
                if target is not None:
                    sums[0] += classification_loss(output, target, "sum").item()
                    sums[1] += (output.argmax(1) == target).sum().item()
                    sums[2] += len(target)
        loss, correct, samples = self._over_world(*sums)
        if record is not None:
            log.info(
                "step %d: validation loss %.4f, accuracy %.1f %% of %d samples",
                *(self.step, loss / samples, 100 * correct / samples, int(samples)),
            )
            record.log_validation(
                step=self.step,
                loss=loss / samples,
                accuracy=correct / samples,
                samples=int(samples),
            )

    def _over_world(self, *values: float) -> list[float]:
        """Sums over the replicas of what the last stage found; the ranks of its grid agree."""
        counts = self.pipeline.is_last and self.pipeline.mesh.part == 0
        own = torch.tensor(values if counts else [0.0] * len(values), dtype=torch.float64)
        total = torch.empty_like(own)
        self.world.Allreduce(own.numpy(), total.numpy())
        return [float(value) for value in total]

    def _microbatch(self, part: Slice) -> Microbatch:
        samples = len(part.labels)
        tile = target = None
        if part.tiles is not None:
            tile = to_input(part.tiles, self.dtype, self.device)
        if self.pipeline.is_last and samples:
            target = torch.from_numpy(part.labels).to(self.device)
        return Microbatch(samples, self.placement.data * part.share, tile, target)

    def _loader(self, source: ImageSource) -> Loader:
        mesh = self.pipeline.mesh
        return Loader(
            source,
            Batching(
                size=int(self.config.data.batch_size),
                microbatches=self.microbatches,
                replicas=self.placement.data,
                replica=self.pipeline.position.replica,
                box=mesh.box(self.sources.image_size) if self.pipeline.is_first else None,
            ),
        )

    def _total_steps(self) -> int:
        settings = self.config.trainer
        limits = []
        if settings.max_steps is not None:
            limits.append(int(settings.max_steps))
        if settings.max_epochs is not None:
            limits.append(int(settings.max_epochs) * len(self.loader))
        if not limits or min(limits) < 1:
            raise ValueError(
                f"trainer.max_steps={settings.max_steps} and trainer.max_epochs="
                f"{settings.max_epochs} leave no step to make: set one of them to at least 1"
            )
        return min(limits)

    def _optimizer(self) -> torch.optim.Optimizer:
        # a stage may have no parameters, PyTorch's optimizers refuse that
        parameters = list(self.pipeline.stage.parameters()) or [nn.Parameter(torch.empty(0))]
        try:
            optimizer: torch.optim.Optimizer = hydra.utils.instantiate(self.config.optimizer)(
                parameters
            )
        except (TypeError, hydra.errors.InstantiationException) as error:
            raise ValueError(f"the optimizer cannot be made: {error}") from error
        return optimizer

    def _scheduler(self) -> Any:
        settings = self.config.scheduler.copy()
        if "T_max" in settings and settings.T_max is None:
            settings.T_max = self.steps
        return hydra.utils.instantiate(settings)(self.optimizer)

    def _describe(self) -> None:
        parameters = sum(p.numel() for p in self.pipeline.stage.parameters())
        position = self.pipeline.position
        own = (position.stage, parameters) if position.replica == position.part == 0 else None
        stages = [found for found in self.world.gather(own) or [] if found is not None]
        if self.world.rank != 0:
            return
        height, width = self.sources.image_size
        log.info("layout: %s", self.placement.describe())
        for stage, count in stages:
            rows, cols = self.placement.grids[stage]
            log.info(
                "stage %d: %.2f M parameters, tiles of about %dx%d of %dx%d on %dx%d ranks",
                *(stage, count / 1e6, height // rows, width // cols, height, width, rows, cols),
            )


def classification_loss(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy.

    Args:
        output: (N, classes), what the network gives.
        target: (N,), labels.

    Raises:
        ValueError: if the network gives anything else, or has too few classes.
    """
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(target):
        raise ValueError(
            f"the network gives {shape} for {len(target)} images: to classify, it must give "
            f"({len(target)}, classes)"
        )
    highest = int(target.max())
    if highest >= output.shape[1]:
        raise ValueError(
            f"the network tells {output.shape[1]} classes apart, but there is a label {highest}: "
            "leave model.num_classes out, or set data.num_classes"
        )
    return F.cross_entropy(output, target, reduction=reduction)


def build_model(config: DictConfig, sources: Sources) -> nn.Module:
    """The network of a configuration, its weights drawn from the seed alike on every rank."""
    with open_dict(config):
        config.data.image_size = list(sources.image_size)
        config.data.channels = sources.channels
        config.data.num_classes = sources.num_classes
    torch.manual_seed(int(config.seed))
    try:
        model = hydra.utils.instantiate(config.model)
    except hydra.errors.InstantiationException as error:
        raise ValueError(f"model={config.model._target_} cannot be built: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={config.model._target_} gives a {type(model).__name__}, no network"
        )
    return model


def peak_memory_mb(device: torch.device) -> float:
    """Most memory so far: of the device on a GPU, resident on a CPU; in MB (2**20 bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
