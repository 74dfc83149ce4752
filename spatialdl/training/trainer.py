"""The training loop, the same on every rank and in every layout."""

from __future__ import annotations

import logging
import math
import resource
import time
from contextlib import ExitStack
from pathlib import Path

import hydra.utils
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from spatialdl import trace
from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.world import world
from spatialdl.data.loader import Position
from spatialdl.data.views import Views
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.pipeline.shardable import check_samples
from spatialdl.training.feeding import Feed
from spatialdl.training.layouts import check_batch, check_image, placement_of, schedule_of
from spatialdl.training.optimizers import make_optimizer, make_scheduler
from spatialdl.training.progress import Progress
from spatialdl.training.run_directory import RunDirectory
from spatialdl.training.settings import DTYPES, Sources, device_of, open_sources
from spatialdl.training.staging import Staging, stage_feeds
from spatialdl.training.tasks import task_of
from spatialdl.training.timeline import Timeline

log = logging.getLogger("spatialdl.trainer")


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
        position: the batch that comes next; set it before `fit` to go on in the middle of an epoch.
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
        validation, seed = self.sources.validation_views, int(config.seed)
        self.train_feed = self._feed(self.sources.train_views, seed)
        self.validation_feed = None if validation is None else self._feed(validation, None)
        self.steps = self._total_steps()
        self._check_last_batch()
        self.optimizer = make_optimizer(
            config.optimizer, self.pipeline.parameters(), int(config.data.batch_size)
        )
        self.scheduler = make_scheduler(config.scheduler, self.optimizer, self.steps)
        self.step = 0
        self.position = Position()
        self._warned = False
        self._timeline: Timeline | None = None
        self._staging = Staging(world)

    def fit(self, run_dir: Path) -> None:
        """Train to the end; rank 0 writes the run directory."""
        self._describe()
        with ExitStack() as stack:
            record = progress = None
            if self.world.rank == 0:
                record = stack.enter_context(RunDirectory(run_dir, self.config))
                progress = stack.enter_context(Progress(self.steps))
            validation = self.validation_feed
            self._staging = stack.enter_context(
                stage_feeds(self.world, self.config, self.train_feed, validation, self.steps)
            )
            if self.config.trainer.trace:
                train = self.pipeline.schedule.train
                self._timeline = Timeline(self.world, self.device, self.placement, train, run_dir)
            stack.callback(self._close_feeds)
            while self.step < self.steps:
                self._train_epoch(record, progress)
            self._staging.finish()
            memory = self.world.gather(peak_memory_mb(self.device))
            if record is not None:
                record.finish({"world_size": self.world.size, "peak_memory_mb": memory})
                log.info("run directory: %s", record.path)
                log.info("loss curve:    %s", record.path / "loss.png")

    def _train_epoch(self, record: RunDirectory | None, progress: Progress | None) -> None:
        """Train on what is left of an epoch."""
        epoch, first = self.position.epoch, self.position.batch
        started = time.perf_counter()
        batches = self.train_feed.batches(epoch, first)
        for batch in trace.each("data", "wait for the batch", batches):
            waited = time.perf_counter() - started
            images = self.train_feed.samples(self.position.batch)
            loss = self._train_step(self.train_feed.microbatches(batch))
            self.position = self.position.after(len(self.train_feed))
            seconds = time.perf_counter() - started
            if self._timeline is not None:
                self._timeline.step_done(last=self.step == self.steps)
            if record is not None and progress is not None:
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

    def _train_step(self, batch: list[Microbatch]) -> float:
        """One optimizer step; returns the loss of the whole batch, the same on every rank."""
        own = self.pipeline.train_step(batch, self.step)
        if self.config.trainer.clip_norm is not None:
            self.pipeline.clip(float(self.config.trainer.clip_norm))
        with trace.span("compute", "optimizer"):
            self.optimizer.step()
        self._last_learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        self.step += 1
        sums = self._over_world(torch.tensor([own, self._staging.damage()], dtype=torch.float64))
        if sums[1]:
            self._staging.refuse()
        return sums[0]

    def validate(self, record: RunDirectory | None) -> None:
        """Loss and metrics over all validation samples, each counted once."""
        if self.validation_feed is None:
            return
        sums = torch.zeros(self.task.tallied, dtype=torch.float64)
        for batch in self.validation_feed.batches():
            parts = self.validation_feed.microbatches(batch)
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

    def _feed(self, views: Views, seed: int | None) -> Feed:
        replicas = self.placement.data
        return Feed(self.config, views, self.pipeline, replicas, self.dtype, seed)

    def _close_feeds(self) -> None:
        for feed in (self.train_feed, self.validation_feed):
            if feed is not None:
                feed.close()

    def _total_steps(self) -> int:
        settings = self.config.trainer
        limits = []
        if settings.max_steps is not None:
            limits.append(int(settings.max_steps))
        if settings.max_epochs is not None:
            limits.append(int(settings.max_epochs) * len(self.train_feed))
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
        if self.config.parallel.shard_state and left and self.steps >= len(self.train_feed):
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
