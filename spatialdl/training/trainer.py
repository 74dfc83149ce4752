"""Training loop, identical on every rank and in every layout."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import Any

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
from spatialdl.training.parts import RunParts
from spatialdl.training.peak_memory import device_memory_mb, peak_memory_mb
from spatialdl.training.pictures.timeline import StepTimeline
from spatialdl.training.progress import TrainingProgress
from spatialdl.training.rank_loader import RankLoader
from spatialdl.training.reporter import Reporter
from spatialdl.training.signals import MARKER, write_marker
from spatialdl.training.staging import stage_loaders
from spatialdl.training.step import TrainingStep
from spatialdl.training.step_sync import COLUMNS, StepSync, TimeSplit
from spatialdl.training.tasks.metrics import Scores
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
        self._step = TrainingStep(
            *(config, parts.pipeline, parts.update),
            *(parts.task.mixup, parts.sources.num_classes, world),
        )
        smaller = parts.metrics.is_smaller_better
        self.progress = TrainingProgress(
            config.trainer, parts.steps, len(parts.train_loader), smaller
        )
        self._callbacks = Callbacks(callback_plugins(config.trainer))
        self._loss: float | None = None
        self._metrics: Scores = {}
        self._timeline: StepTimeline | None = None
        self._split = TimeSplit()
        self._watch = StepWatch(
            *(parts.pipeline.memory, parts.pipeline.stages.values()),
            shows=world.rank == 0,
            stops=signals.seen if share_one_image(parts.placement) else None,
            across=parts.pipeline.across,
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
            resumed = self._open_checkpoints(stack, run_dir)
            reporter = None
            if table is not None:
                reporter = stack.enter_context(self._reporter(run_dir, table, resumed))
                (run_dir / MARKER).unlink(missing_ok=True)
            loaders = parts.train_loader, parts.validation_loader
            staging = stack.enter_context(
                stage_loaders(self.world, self.config, *loaders, self.progress, parts.nodes)
            )
            stack.callback(parts.close_loaders)
            writer = self.checkpoints.writer
            self._step_sync = StepSync(
                *(self.world, writer, staging, self.progress, self._split, self._callbacks)
            )
            if self.config.trainer.trace:
                self._timeline = StepTimeline(
                    *(self.world, parts.device, parts.placement),
                    *(parts.pipeline.schedule.train, run_dir),
                )
            trace.count()
            stack.callback(trace.stop_counting)
            self._start_callbacks(resumed)
            try:
                self._train(reporter, is_resumed=resumed is not None)
            except NotFinite as error:  # on all ranks
                self._report_not_finite(reporter, error)
                raise
            self._call("on_fit_end")
            waiting.at(f"end of the run, after step {self.progress.step}")
            writer.wait()
            log_warnings(self.world)
            if self.progress.stopped is not None:
                self._report_stop(reporter, run_dir, self.progress.stopped)
                return
            staging.finish()
            self._finish(reporter)

    def _open_checkpoints(self, stack: ExitStack, run_dir: Path) -> Resumed | None:
        """Also restores the state of a resumed run."""
        self.checkpoints = Checkpoints(
            *(self.config, self.world, self.parts.pipeline, self.parts.update, run_dir),
            self.parts.sources.described(),
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

    def _reporter(self, run_dir: Path, table: str, resumed: Resumed | None) -> Reporter:
        return Reporter(
            self.config,
            run_dir,
            steps=self.parts.steps,
            table=table,
            names=self.parts.sources.names,
            columns=[*self.parts.update.log_values, *COLUMNS],
            resumed=resumed,
        )

    def _train(self, reporter: Reporter | None, is_resumed: bool) -> None:
        if is_resumed:
            self._between_steps(reporter)  # due if the run was stopped before it
        waiting.at(f"step {self.progress.step + 1}")
        while not self.progress.is_over():
            self._train_epoch(reporter)

    def _finish(self, reporter: Reporter | None) -> None:
        summary = self._summary()
        if reporter is not None:
            reporter.finish(summary, self.progress.stopped_early())

    def _summary(self) -> dict[str, Any]:
        """Gather memory and times of all ranks; collective, all ranks must call it."""
        return {
            "world_size": self.world.size,
            "peak_memory_mb": self.world.gather(peak_memory_mb(self.parts.device)),
            "device_memory_mb": self.world.gather(device_memory_mb(self.parts.device)),
            "offloaded_mb": self.world.gather(offloaded_mb(self.parts.pipeline.memory)),
            "time_split": self._split.summary(),
        }

    def _report_stop(self, reporter: Reporter | None, run_dir: Path, number: Signals) -> None:
        step, saved = self.progress.step, self.checkpoints.writer.last
        if self.world.rank == 0:
            write_marker(run_dir, number, step, saved)
            log.info("stopped by %s after step %d: resume with ckpt_path=latest", number.name, step)
        summary = self._summary()
        if reporter is not None:
            reporter.stopped(
                summary, f"Stopped by {number.name} after step {step} of {self.parts.steps}."
            )

    def _report_not_finite(self, reporter: Reporter | None, error: NotFinite) -> None:
        """Complete the pending checkpoint, add advice to the error, write the report."""
        self.checkpoints.writer.wait()
        log_warnings(self.world)
        saved = self.checkpoints.writer.last
        resume = f"ckpt_path=latest resumes after step {saved}"
        left = "there is no checkpoint" if saved is None else resume
        error.add_note(f"({left}; try a lower optimizer.lr or trainer.clip_norm)")
        summary = self._summary()
        if reporter is not None:
            reporter.stopped(summary, f"Stopped: {error}.")
        self.world.barrier()  # so that rank 0 reports the error for all ranks

    def _train_epoch(self, reporter: Reporter | None) -> None:
        """Train the rest of an epoch, or of the run."""
        epoch, first = self.progress.epoch, self.progress.batch
        self._split.restart()
        started = time.perf_counter()
        batches = self.parts.train_loader.batches(epoch, first)
        for batch in trace.each("data", "wait for the batch", batches):
            waiting.at(f"step {self.progress.step + 1}")
            waited = time.perf_counter() - started
            images = self.parts.train_loader.samples(self.progress.batch)
            try:
                loss = self._train_step(self.parts.train_loader.microbatches(batch))
            except GivenUp:
                self._step_sync.between()
                self._between_steps(reporter)
                break
            seconds = time.perf_counter() - started
            if self._timeline is not None:
                self._timeline.step_done(last=self.progress.is_over())
            if reporter is not None:
                reporter.step(
                    step=self.progress.step,
                    epoch=epoch,
                    loss=loss,
                    learning_rate=self.parts.update.learning_rate,
                    images_per_second=images / seconds,
                    data_wait=waited / seconds,
                    memory_mb=peak_memory_mb(self.parts.device),
                    **self.parts.update.log_values,
                    **{part: self._split.last[part] for part in COLUMNS},
                )
            self._loss = loss
            self._call_and_agree("on_step_end")
            self._between_steps(reporter)
            if self.progress.is_over():
                break
            started = time.perf_counter()

    def _between_steps(self, reporter: Reporter | None) -> None:
        """Validate and write a checkpoint if they are due."""
        is_best = False
        validates, saves = self.progress.validation_is_due(), self.progress.checkpoint_is_due()
        if validates:
            waiting.at(f"validation after step {self.progress.step}")
            metrics = self.validate(reporter)
            is_best = metrics is not None and self.progress.validated(metrics)
            if metrics is not None:
                self._metrics = metrics
                self._call_and_agree("on_validation_end")
            saves = self.progress.checkpoint_is_due()
        if is_best or saves:
            self._step.check_weights(self.progress.step)
            waiting.at(f"checkpoint after step {self.progress.step}")
            self._save(reporter, is_best)
        if validates or is_best or saves:
            waiting.at(f"step {self.progress.step + 1}")
            self._split.restart()

    def _save(self, reporter: Reporter | None, is_best: bool) -> None:
        if not self.checkpoints.writes(self.progress.step, is_best):
            return
        self._call("on_checkpoint")
        content = {
            "validations": reporter.validations if reporter is not None else [],
            "callbacks": self._callbacks.state(),
        }
        self.checkpoints.save({**self.progress.state(), **content}, is_best)

    def _train_step(self, batch: list[Microbatch]) -> float:
        """Make one optimizer step.

        Returns:
            The loss of the whole batch, the same on every rank.

        Raises:
            GivenUp: if a stop is requested during the step, see `StepWatch`.
        """
        with self._watch.over(self.progress.step + 1):
            own = self._step.run(batch, self.progress.step)
        self.progress.step_done()
        signals.step_done()
        return self._step_sync.after_step(own)

    def validate(self, reporter: Reporter | None) -> Scores | None:
        """Compute loss and metrics over all validation samples, each counted once.

        Returns:
            None if there are no validation samples, or a stop was requested meanwhile.
        """
        if self.parts.validation is None or self.parts.validation_loader is None:
            return None
        with self.parts.update.averaged():
            own = self.parts.validation.own(self._until_stopped(self.parts.validation_loader))
        trace.take()  # validation does not count in the trace of the next step
        if self.progress.stopped is not None:
            return None
        metrics = self.parts.validation.scores(own)
        if reporter is not None:
            reporter.validated(self.progress.step, metrics)
            self.parts.validation.write(reporter.record.path)
        return metrics

    def _until_stopped(self, loader: RankLoader) -> Iterator[list[Microbatch]]:
        for batch in loader.batches():
            self._step_sync.between()
            if self.progress.stopped is not None:
                return
            yield loader.microbatches(batch)
