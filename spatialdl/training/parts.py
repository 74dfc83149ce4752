"""Components of a training run on this rank, built from the configuration."""

from __future__ import annotations

from math import prod

from omegaconf import DictConfig

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_of
from spatialdl.comm.processes import Nodes
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.views import Views
from spatialdl.layout.node_order import placed_by_nodes
from spatialdl.pipeline.layout_checks import check_samples
from spatialdl.training.layouts import (
    AUTO,
    check_batch,
    check_image,
    compares_samples,
    placement_of,
    repeats,
    schedule_of,
)
from spatialdl.training.network.building import build_model, describe_data, make_pipeline
from spatialdl.training.optimization.precision import precision_of, set_arithmetic
from spatialdl.training.optimization.update import Update
from spatialdl.training.own_data import check_same_samples
from spatialdl.training.progress import total_steps
from spatialdl.training.rank_loader import RankLoader
from spatialdl.training.settings import open_sources, resolve_statistics
from spatialdl.training.tasks.own_metrics import OwnMetrics
from spatialdl.training.tasks.segmentation import Segmentation
from spatialdl.training.tasks.task import task_of
from spatialdl.training.validation import Validation
from spatialdl.training.virtual_tiles import choose_virtual_tiles, microbatch_shape


class RunParts:
    """Data, network and optimizer of one rank; collective, all ranks of `world` must create it.

    Args:
        config: configuration of the run.
        world: all ranks.
        nodes: nodes of the world, if known.

    Attributes:
        sources: data sets.
        placement: ranks of the stages and tiles.
        task: loss and metrics.
        metrics: metrics of the user.
        microbatches: micro-batches per step.
        batch_size: samples per step, over all replicas.
        pipeline: this rank's stages and their communication.
        train_loader: loader of training batches.
        validation_loader: loader of validation batches; None without validation samples.
        validation: computes the validation metrics; None without validation samples.
        steps: optimizer steps of the whole run.
        update: clipping, optimizer, scheduler and averaging after backward.

    Raises:
        ValueError: if the configuration is inconsistent.
    """

    def __init__(self, config: DictConfig, world: Communicator, nodes: Nodes | None = None) -> None:
        self.config, self.world = config, world
        settings = config.trainer
        set_arithmetic(
            tf32=bool(settings.tf32),
            deterministic=bool(settings.deterministic),
            cudnn_benchmark=bool(settings.cudnn_benchmark),
        )
        self.device = device_of(config.device)
        self.precision = precision_of(settings.precision, self.device)
        self.nodes = nodes or Nodes(world)
        resolve_statistics(config.data, world)
        self.sources = open_sources(
            config.data, int(config.seed), config.task.name, config.task.get("loss")
        )
        self._choose_virtual_tiles()
        placement = placement_of(config.parallel, len(self.sources.image_size))
        self.placement = placed_by_nodes(placement, self.nodes.of)
        self.task = task_of(config.task, self.sources.num_classes, self.sources.train)
        is_split = any(prod(grid) > 1 for grid in self.placement.grids)
        check_same_samples(self.sources.train, world, is_split)
        describe_data(config, self.sources)
        self.metrics = OwnMetrics(config.task)
        schedule = schedule_of(
            *(config.parallel, self.placement, repeats(config, self.placement)),
            forwards_first=compares_samples(config.task),
        )
        self.microbatches = schedule.microbatches
        self.batch_size = int(config.data.batch_size) * int(settings.accumulate)
        if not self.sources.train_views.varies:
            check_image(self.sources.image_size, self.placement)
            check_batch(self.batch_size, self.microbatches, self.placement)
        self.pipeline = make_pipeline(
            config,
            *(self.sources, self.task, self.placement, schedule),
            *(self.precision, self.device, world, self.nodes),
            metrics=self.metrics,
        )
        self.train_loader = self._loader(self.sources.train_views, int(config.seed), trains=True)
        self.validation_loader: RankLoader | None
        self.validation: Validation | None
        self.validation_loader, self.validation = self._validation()
        self.steps = total_steps(settings, len(self.train_loader))
        self._check_last_batch()
        self.update = Update(config, self.pipeline, steps=self.steps)

    def _choose_virtual_tiles(self) -> None:
        """Resolve ``parallel.stream=auto``."""
        config, sources = self.config, self.sources
        if config.parallel.stream != AUTO:
            return
        choose_virtual_tiles(
            config.parallel,
            build_model(config, sources),
            microbatch_shape(config, (sources.channels, *sources.image_size)),
            self.precision.dtype,
            config.trainer.memory_limit_gb,
        )

    def close_loaders(self) -> None:
        for loader in (self.train_loader, self.validation_loader):
            if loader is not None:
                loader.close()

    @property
    def _overfits(self) -> bool:
        return bool(self.config.debug.name == "overfit")

    def _validation(self) -> tuple[RankLoader, Validation] | tuple[None, None]:
        """Loader and metrics of validation; None without validation samples or when overfitting."""
        views, early = self.sources.validation_views, self.config.trainer.early_stopping.metric
        if views is None or self._overfits:
            if early is not None:
                raise ValueError(
                    f"trainer.early_stopping.metric={early} needs validation samples, but there "
                    "are none: set a validation split, or leave it out"
                )
            return None, None
        loader = self._loader(views, None)
        parts = self.pipeline, self.task, self.sources, loader, self.world
        return loader, Validation(*parts, self.metrics)

    def _loader(self, views: Views, seed: int | None, trains: bool = False) -> RankLoader:
        return RankLoader(
            self.config.data,
            views,
            self.pipeline,
            batch_size=self.batch_size,
            masks=self.config.task.name == "segmentation",
            classes=self.sources.num_classes,
            normalisation=self.sources.normalisation,
            dtype=self.precision.dtype,
            channels_last=bool(self.config.trainer.channels_last),
            seed=seed,
            one_batch=self._overfits,
            masks_in_parts=trains or self._scores_tiles(views),
        )

    def _scores_tiles(self, views: Views) -> bool:
        """Whether maps are validated per virtual tile.

        A user's loss needs whole maps, and a user's data set returns whole masks.
        """
        is_whole = isinstance(views.source, DatasetSource)
        return isinstance(self.task, Segmentation) and not (self.task.has_own_loss or is_whole)

    def _check_last_batch(self) -> None:
        """Check the last batch of an epoch, which may be smaller, for sharded state."""
        samples, size = len(self.sources.train), self.batch_size
        left = samples % size
        is_reached = self.steps >= len(self.train_loader) and not self._overfits
        if self.config.parallel.shard_state and left and is_reached:
            batch = f"the last batch of an epoch of {samples}"
            check_samples(left, self.microbatches, self.placement.data, batch)
