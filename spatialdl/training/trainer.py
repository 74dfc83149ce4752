"""The training loop, the same on every rank and in every layout."""

from __future__ import annotations

import logging
import math
import resource
import time
from contextlib import ExitStack
from pathlib import Path

import hydra.utils
import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from spatialdl import trace
from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.world import world
from spatialdl.data.loader import Batching, ImageSource, Loader, Slice, sample_order, to_input
from spatialdl.mesh import Mesh
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.pipeline.shardable import check_samples
from spatialdl.spatial.split import from_local
from spatialdl.training.debug.detect_nan import NanWatch
from spatialdl.training.debug.overfit import Overfit
from spatialdl.training.layouts import check_batch, check_image, placement_of, schedule_of
from spatialdl.training.optimizers import make_optimizer, make_scheduler
from spatialdl.training.progress import Progress
from spatialdl.training.run_directory import RunDirectory
from spatialdl.training.settings import DTYPES, Sources, device_of, open_sources
from spatialdl.training.tasks import task_of
from spatialdl.training.timeline import Timeline

log = logging.getLogger("spatialdl.trainer")

_NOT_FINITE = "step %d: the loss is %s: lower optimizer.lr? debug=detect_nan tells where it began"


def run(config: DictConfig, run_dir: Path) -> None:
    """Train as `config` says; every rank of the world calls it.

    Raises:
        ValueError: if the configuration does not fit together.
    """
    check.enable(bool(config.comm.check))
    trainer = Trainer(config, world())
    trainer.fit(run_dir)


class Trainer:
    """One rank's part of a training run.

    Attributes:
        pipeline: this rank's stage, and how it talks to the others.
        step: optimizer steps made.
    """

    def __init__(self, config: DictConfig, world: Communicator) -> None:
        self.config, self.world = config, world
        self.dtype = DTYPES[config.trainer.precision]
        self.device = device_of(config.device)
        self.placement = placement_of(config.parallel)
        self.sources = open_sources(config.data, int(config.seed), config.task)
        self.task = task_of(config.task, self.sources.num_classes)
        check_image(self.sources.image_size, self.placement)
        self.microbatches = int(config.parallel.microbatches)
        check_batch(int(config.data.batch_size), self.microbatches, self.placement.data)
        self.pipeline = Pipeline(
            build_model(config, self.sources).to(self.dtype),
            self.placement,
            schedule_of(config.parallel, self.placement),
            world,
            self.task.loss,
            (self.sources.channels, *self.sources.image_size),
            config.parallel.cut,
            self.device,
            balance=config.parallel.balance,
            gather_before=config.parallel.gather_before or (),
            recompute=config.parallel.recompute,
            sync_batchnorm=bool(config.parallel.sync_batchnorm),
            seed=int(config.seed),
            backend=config.comm.backend,
            shard_state=bool(config.parallel.shard_state),
        )
        watches = config.debug.name == "detect_nan"
        self._nan_watch = NanWatch(self.pipeline, world) if watches else None
        self._overfit = Overfit() if config.debug.name == "overfit" else None
        self.loader = self._loader(self.sources.train)
        self.steps = self._total_steps()
        self._check_last_batch()
        self.optimizer = make_optimizer(
            config.optimizer, self.pipeline.parameters(), int(config.data.batch_size)
        )
        self.scheduler = make_scheduler(config.scheduler, self.optimizer, self.steps)
        self.step = 0
        self._warned = False
        self._timeline: Timeline | None = None

    def fit(self, run_dir: Path) -> None:
        """Train to the end; rank 0 writes the run directory."""
        self._describe()
        with ExitStack() as stack:
            record = progress = None
            if self.world.rank == 0:
                record = stack.enter_context(RunDirectory(run_dir, self.config))
                progress = stack.enter_context(Progress(self.steps))
            if self.config.trainer.trace:
                train = self.pipeline.schedule.train
                self._timeline = Timeline(self.world, self.device, self.placement, train, run_dir)
            epoch = 0
            while self.step < self.steps:
                self._train_epoch(epoch, record, progress)
                epoch += 1
            memory = self.world.gather(peak_memory_mb(self.device))
            if record is not None:
                if self._overfit is not None:
                    log.info("debug=overfit: %s", self._overfit.verdict(self.step))
                record.finish({"world_size": self.world.size, "peak_memory_mb": memory})
                log.info("run directory: %s", record.path)
                log.info("loss curve:    %s", record.path / "loss.png")

    def _train_epoch(
        self, epoch: int, record: RunDirectory | None, progress: Progress | None
    ) -> None:
        order = self._order(epoch)
        batch_size = int(self.config.data.batch_size)
        started = time.perf_counter()
        batches = trace.each("data", "wait for the batch", self.loader.batches(order))
        for number, batch in enumerate(batches):
            waited = time.perf_counter() - started
            loss = self._train_step(batch)
            seconds = time.perf_counter() - started
            if self._timeline is not None:
                self._timeline.step_done(last=self.step == self.steps)
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
                    log.warning(_NOT_FINITE, self.step, loss)
                progress.update(loss=loss, images_per_second=rate, data_wait=wait)
            every = self.config.trainer.validate_every
            if every is not None and self.step % int(every) == 0 and self.step < self.steps:
                self.validate(record)
            if self.step == self.steps:
                break
            started = time.perf_counter()
        if self.config.trainer.validate_every is None or self.step == self.steps:
            self.validate(record)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The samples of an epoch; of ``debug=overfit`` one batch, every time the same."""
        samples, seed = len(self.sources.train), int(self.config.seed)
        if self._overfit is not None:
            return sample_order(samples, seed, 0)[: int(self.config.data.batch_size)]
        return sample_order(samples, seed, epoch)

    def _train_step(self, batch: list[Slice]) -> float:
        """One optimizer step; returns the loss of the whole batch, the same on every rank."""
        own = self.pipeline.train_step(self._microbatches(batch), self.step)
        if self._nan_watch is not None:
            self._nan_watch.check(self.step + 1)
        if self.config.trainer.clip_norm is not None:
            self.pipeline.clip(float(self.config.trainer.clip_norm))
        with trace.span("compute", "optimizer"):
            self.optimizer.step()
        self._last_learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        self.step += 1
        loss = self._over_world(torch.tensor([own], dtype=torch.float64))[0]
        if self._overfit is not None:
            self._overfit.note(loss)
        return loss

    def validate(self, record: RunDirectory | None) -> None:
        """Loss and metrics over all validation samples, each counted once."""
        if self.sources.validation is None or self._overfit is not None:
            return
        sums = torch.zeros(self.task.tallied, dtype=torch.float64)
        order = torch.arange(len(self.sources.validation)).numpy()
        for batch in self._loader(self.sources.validation).batches(order):
            parts = self._microbatches(batch)
            for number, output in self.pipeline.evaluate(parts).items():
                target, mesh = parts[number].target, self.pipeline.last(number)
                if target is not None and mesh is not None:
                    if mesh.batch > 1:
                        own = self.pipeline.own_outputs(number, parts[number].samples)
                        sums += self.task.tally(output, target[own.start : own.stop], part=0)
                    else:
                        sums += self.task.tally(output, target, mesh.part)
        found = self.task.metrics(self._over_world(sums))
        trace.take()  # no part of the next step
        if record is not None:
            told = ", ".join(
                f"{name.replace('_', ' ')} {100 * found[name]:.1f} %"
                for name in ("accuracy", "mean_dice", "mean_iou")
                if name in found
            )
            log.info(
                "step %d: validation loss %.4f, %s of %d samples",
                *(self.step, found["loss"], told, found["samples"]),
            )
            record.log_validation(step=self.step, **found)

    def _over_world(self, own: Tensor) -> list[float]:
        """The sum over all ranks."""
        return [float(value) for value in self.world.all_reduce(own)]

    def _microbatches(self, batch: list[Slice]) -> list[Microbatch]:
        microbatches = []
        for number, part in enumerate(batch):
            samples, mesh = len(part.labels), self.pipeline.last(number)
            tile = target = None
            if part.tiles is not None:
                tile = to_input(part.tiles, self.dtype, self.device)
            if mesh is not None and samples:
                target = self._target(part, mesh)
            microbatches.append(Microbatch(samples, part.share, tile, target))
        return microbatches

    def _target(self, part: Slice, mesh: Mesh) -> Tensor:
        """Labels (N,) or masks (N, H, W), of which every rank of the grid holds its box."""
        if part.masks is None:
            return torch.from_numpy(part.labels).to(self.device)
        mask = torch.from_numpy(part.masks).to(self.device, torch.int64)
        return mask if mesh.grid == (1, 1) else from_local(mask, mesh, self.sources.image_size)

    def _loader(self, source: ImageSource) -> Loader:
        size, numbers = self.sources.image_size, range(self.microbatches)
        first = [self.pipeline.first(number) for number in numbers]
        last = [self.pipeline.last(number) for number in numbers]
        segments = self.config.task == "segmentation"
        return Loader(
            source,
            Batching(
                size=int(self.config.data.batch_size),
                replicas=self.placement.data,
                replica=self.pipeline.replica,
                boxes=[mesh.box(size) if mesh else None for mesh in first],
                mask_boxes=[mesh.box(size) if mesh and segments else None for mesh in last],
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

    def _check_last_batch(self) -> None:
        """That of an epoch may be smaller."""
        samples, size = len(self.sources.train), int(self.config.data.batch_size)
        left = samples % size
        if self.config.parallel.shard_state and left and self.steps >= len(self.loader):
            what = f"the last batch of an epoch of {samples}"
            check_samples(left, self.microbatches, self.placement.data, what)

    def _describe(self) -> None:
        own = {
            stage: sum(p.numel() for p in module.parameters())
            for stage, module in self.pipeline.stages.items()
        }
        everybody = self.world.gather(own)
        if everybody is None:
            return
        height, width = self.sources.image_size
        log.info("layout: %s", self.placement.describe())
        for stage, count in sorted({key: n for one in everybody for key, n in one.items()}.items()):
            rows, cols = self.placement.grids[stage]
            parts = self.placement.batch_parts(stage)
            if parts > 1:
                where = f"whole images, {parts} ranks that divide the samples"
            else:
                where = (
                    f"tiles of about {height // rows}x{width // cols} of {height}x{width} on "
                    f"{rows}x{cols} ranks"
                )
            log.info("stage %d: %.2f M parameters, %s", stage, count / 1e6, where)


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
