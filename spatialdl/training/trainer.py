"""Training loop, identical on every rank and in every layout."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig

from spatialdl.comm import check, trace, waiting
from spatialdl.comm.across import GivenUp
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import Nodes
from spatialdl.comm.world import world
from spatialdl.errors import NotFinite
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training import signals
from spatialdl.training.callbacks import Callbacks, RunState, callback_plugins
from spatialdl.training.checkpoints.checkpoints import Checkpoints, Resumed
from spatialdl.training.console.run_log import log_warnings
from spatialdl.training.console.start_table import log_ranks, start_table
from spatialdl.training.finite import Guard
from spatialdl.training.parts import RunParts
from spatialdl.training.peak_memory import device_memory_mb, peak_memory_mb
from spatialdl.training.pictures.timeline import StepTimeline
from spatialdl.training.progress import TrainingProgress
from spatialdl.training.rank_loader import RankLoader
from spatialdl.training.reporter import Reporter
from spatialdl.training.signals import MARKER, write_marker
from spatialdl.training.staging import stage_loaders
from spatialdl.training.step_sync import COLUMNS, StepSync, TimeSplit
from spatialdl.training.tasks.metrics import Scores
from spatialdl.training.tasks.mixup import mix_samples
from spatialdl.training.virtual_tiles import StepWatch, offloaded_mb, share_one_image

log = logging.getLogger("spatialdl.trainer")


def run(config: DictConfig, run_dir: Path) -> None:
    """Train as configured; collective, all ranks must call it.

    Args:
        config: configuration of the run.
        run_dir: run directory, taken from rank 0.

    Raises:
        ValueError: if the configuration is inconsistent.
    """
    check.enable(bool(config.comm.check))
    trainer = Trainer(config, world())
    trainer.fit(run_dir)


class Trainer:
    """Trainer of one rank; collective, all ranks of `world` must create it.

    Args:
        config: configuration of the run.
        world: all ranks.
        nodes: nodes of the world, if known.

    Attributes:
        parts: data, network and optimizer.
        progress: steps and epochs done.

    Raises:
        ValueError: if the configuration is inconsistent.
    """

    def __init__(self, config: DictConfig, world: Communicator, nodes: Nodes | None = None) -> None:
        self.config, self.world = config, world
        self.parts = parts = RunParts(config, world, nodes)
        pipeline = parts.pipeline
        is_scaled = pipeline.mixed is torch.float16  # gradients of a scaled loss may overflow
        self._guard = Guard(pipeline, world, gradients=not is_scaled)
        smaller = parts.metrics.is_smaller_better
        self.progress = TrainingProgress(
            config.trainer, parts.steps, len(parts.train_loader), smaller
        )
        self._callbacks = Callbacks(callback_plugins(config.trainer))
        self._loss: float | None = None
        self._metrics: Scores = {}
        self._timeline: StepTimeline | None = None
        self._reporter: Reporter | None = None
        self._split = TimeSplit()
        self._watch = StepWatch(
            pipeline.memory,
            pipeline.stages.values(),
            shows=world.rank == 0,
            stops=signals.seen if share_one_image(parts.placement) else None,
            across=pipeline.across,
        )

    def fit(self, run_dir: Path) -> None:
        """Train to the end or until a stop is requested; rank 0 writes the run directory."""
        self._run_dir = run_dir = self.world.bcast(run_dir)
        parts, sources = self.parts, self.parts.sources
        images = sources.normalisation.text(sources.train_views.dtype)
        table = start_table(parts.pipeline, self.world, self.config, parts.batch_size, images)
        if self.config.comm.map:
            log_ranks(parts.pipeline, self.world)
        with ExitStack() as stack:
            resumed = self._open_checkpoints(stack)
            if table is not None:
                self._reporter = stack.enter_context(self._make_reporter(table, resumed))
                (run_dir / MARKER).unlink(missing_ok=True)
            loaders = parts.train_loader, parts.validation_loader
            staging = stack.enter_context(
                stage_loaders(self.world, self.config, *loaders, self.progress, parts.nodes)
            )
            stack.callback(parts.close_loaders)
            self._step_sync = StepSync(
                self.world,
                self.checkpoints.writer,
                staging,
                self.progress,
                self._split,
                self._callbacks,
            )
            if self.config.trainer.trace:
                schedule = parts.pipeline.schedule.train
                self._timeline = StepTimeline(
                    self.world, parts.device, parts.placement, schedule, run_dir
                )
            trace.count()
            stack.callback(trace.stop_counting)
            self._start_callbacks(resumed)
            try:
                self._train(is_resumed=resumed is not None)
            except NotFinite as error:  # on all ranks
                self._report_not_finite(error)
                raise
            self._call("on_fit_end")
            waiting.at(f"end of the run, after step {self.progress.step}")
            self.checkpoints.writer.wait()
            log_warnings(self.world)
            if self.progress.stopped is None:
                staging.finish()
            self._report_end()

    def _open_checkpoints(self, stack: ExitStack) -> Resumed | None:
        """Also restores the state of a resumed run."""
        parts = self.parts
        self.checkpoints = Checkpoints(
            self.config,
            self.world,
            parts.pipeline,
            parts.update,
            self._run_dir,
            parts.sources.described(),
        )
        stack.callback(self.checkpoints.writer.close)
        resumed = self.checkpoints.resume()
        if resumed is not None:
            self.progress.restore(resumed[1])
        return resumed

    def _start_callbacks(self, resumed: Resumed | None) -> None:
        if resumed is not None:
            content = resumed[1]
            self._callbacks.restore(content)
            self._metrics = dict(next(reversed(content["validations"]), {}))
        self._call("on_fit_start")
        self._callbacks.state()  # raises now if a checkpoint could not store it

    def _call(self, method: str) -> None:
        self._callbacks.call(method, self._run_state)

    def _run_state(self) -> RunState:
        progress, parts = self.progress, self.parts
        return RunState(
            step=progress.step,
            epoch=progress.epoch,
            steps=progress.steps,
            loss=self._loss,
            learning_rate=parts.update.learning_rate,
            metrics=MappingProxyType(self._metrics),
            run_dir=self._run_dir,
            stages=MappingProxyType(parts.pipeline.stages),
            rank=self.world.rank,
            world_size=self.world.size,
            _stop=self._callbacks.stop,
        )

    def _call_and_agree(self, method: str) -> None:
        """Call the callbacks; all ranks stop if a callback of any rank requests it."""
        if self._callbacks:
            self._call(method)
            self._step_sync.between()

    def _make_reporter(self, table: str, resumed: Resumed | None) -> Reporter:
        return Reporter(
            self.config,
            self._run_dir,
            steps=self.parts.steps,
            table=table,
            names=self.parts.sources.names,
            columns=[*self.parts.update.log_values, *COLUMNS],
            resumed=resumed,
        )

    # --- the end

    def _summary(self) -> dict[str, Any]:
        """Gather memory and times of all ranks; collective, all ranks must call it."""
        return {
            "world_size": self.world.size,
            "peak_memory_mb": self.world.gather(peak_memory_mb(self.parts.device)),
            "device_memory_mb": self.world.gather(device_memory_mb(self.parts.device)),
            "offloaded_mb": self.world.gather(offloaded_mb(self.parts.pipeline.memory)),
            "time_split": self._split.summary(),
        }

    def _report_end(self) -> None:
        step, number = self.progress.step, self.progress.stopped
        if number is not None and self.world.rank == 0:
            write_marker(self._run_dir, number, step, self.checkpoints.writer.last)
            log.info("stopped by %s after step %d: resume with ckpt_path=latest", number.name, step)
        summary = self._summary()
        if self._reporter is None:
            return
        if number is None:
            self._reporter.finish(summary, self.progress.stopped_early())
        else:
            why = f"Stopped by {number.name} after step {step} of {self.parts.steps}."
            self._reporter.stopped(summary, why)

    def _report_not_finite(self, error: NotFinite) -> None:
        """Complete the pending checkpoint, add advice to the error, write the report."""
        self.checkpoints.writer.wait()
        log_warnings(self.world)
        saved = self.checkpoints.writer.last
        resume = f"ckpt_path=latest resumes after step {saved}"
        left = "there is no checkpoint" if saved is None else resume
        error.add_note(f"({left}; try a lower optimizer.lr or trainer.clip_norm)")
        summary = self._summary()
        if self._reporter is not None:
            self._reporter.stopped(summary, f"Stopped: {error}.")
        self.world.barrier()  # so that rank 0 reports the error for all ranks

    # --- the loop

    def _train(self, is_resumed: bool) -> None:
        if is_resumed:
            self._between_steps()  # due if the run was stopped before it
        waiting.at(f"step {self.progress.step + 1}")
        while not self.progress.is_over():
            self._train_epoch()

    def _train_epoch(self) -> None:
        """Train the rest of an epoch, or of the run."""
        loader, progress = self.parts.train_loader, self.progress
        epoch = progress.epoch
        self._split.restart()
        started = time.perf_counter()
        batches = loader.batches(epoch, progress.batch)
        for batch in trace.each("data", "wait for the batch", batches):
            waiting.at(f"step {progress.step + 1}")
            waited = time.perf_counter() - started
            images = loader.samples(progress.batch)
            try:
                self._loss = self._train_step(loader.microbatches(batch))
            except GivenUp:
                self._step_sync.between()
                self._between_steps()
                break
            seconds = time.perf_counter() - started
            if self._timeline is not None:
                self._timeline.step_done(last=progress.is_over())
            if self._reporter is not None:
                row = {
                    "step": progress.step,
                    "epoch": epoch,
                    "loss": self._loss,
                    "learning_rate": self.parts.update.learning_rate,
                    "images_per_second": images / seconds,
                    "data_wait": waited / seconds,
                    **self.parts.update.log_values,
                    **{part: self._split.last[part] for part in COLUMNS},
                }
                self._reporter.step(row, peak_memory_mb(self.parts.device))
            self._call_and_agree("on_step_end")
            self._between_steps()
            if progress.is_over():
                break
            started = time.perf_counter()

    def _train_step(self, batch: list[Microbatch]) -> float:
        """Make one optimizer step.

        Returns:
            The loss of the whole batch, the same on every rank.

        Raises:
            GivenUp: if a stop is requested during the step, see `StepWatch`.
        """
        with self._watch.over(self.progress.step + 1):
            own = self.run_step(batch)
        self.progress.step_done()
        signals.step_done()
        return self._step_sync.after_step(own)

    def run_step(self, batch: list[Microbatch]) -> float:
        """Run forward, backward and update; collective.

        Args:
            batch: micro-batches of this rank.

        Returns:
            This rank's part of the loss of the whole batch.

        Raises:
            NotFinite: on all ranks, if the loss or a gradient on any rank is not finite.
        """
        parts, pipeline, step = self.parts, self.parts.pipeline, self.progress.step
        seed, classes = int(self.config.seed), parts.sources.num_classes
        place = pipeline.replica, pipeline.placement.data
        mixed = mix_samples(batch, parts.task.mixup, classes, seed, step, *place)
        scale = parts.update.scale
        own = self._guard.run(step + 1, lambda: pipeline.train_step(mixed, step, scale))
        with trace.span("compute", "optimizer"):
            parts.update.step()
        return own

    def _between_steps(self) -> None:
        """Validate and write a checkpoint if they are due."""
        is_best = False
        validates, saves = self.progress.validation_is_due(), self.progress.checkpoint_is_due()
        if validates:
            waiting.at(f"validation after step {self.progress.step}")
            metrics = self.validate()
            is_best = metrics is not None and self.progress.validated(metrics)
            if metrics is not None:
                self._metrics = metrics
                self._call_and_agree("on_validation_end")
            saves = self.progress.checkpoint_is_due()
        if is_best or saves:
            self._guard.check_weights(self.progress.step)
            waiting.at(f"checkpoint after step {self.progress.step}")
            self._save(is_best)
        if validates or is_best or saves:
            waiting.at(f"step {self.progress.step + 1}")
            self._split.restart()

    def _save(self, is_best: bool) -> None:
        if not self.checkpoints.writes(self.progress.step, is_best):
            return
        self._call("on_checkpoint")
        content = {
            "validations": [] if self._reporter is None else self._reporter.record.validations,
            "callbacks": self._callbacks.state(),
        }
        self.checkpoints.save({**self.progress.state(), **content}, is_best)

    def validate(self) -> Scores | None:
        """Compute loss and metrics over all validation samples, each counted once.

        Returns:
            None if there are no validation samples, or a stop was requested meanwhile.
        """
        validation, loader = self.parts.validation, self.parts.validation_loader
        if validation is None or loader is None:
            return None
        with self.parts.update.averaged():
            own = validation.own(self._until_stopped(loader))
        trace.take()  # validation does not count in the trace of the next step
        if self.progress.stopped is not None:
            return None
        metrics = validation.scores(own)
        if self._reporter is not None:
            self._reporter.validated(self.progress.step, metrics)
            validation.write(self._run_dir)
        return metrics

    def _until_stopped(self, loader: RankLoader) -> Iterator[list[Microbatch]]:
        for batch in loader.batches():
            self._step_sync.between()
            if self.progress.stopped is not None:
                return
            yield loader.microbatches(batch)
