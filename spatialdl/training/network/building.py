"""The network of a run, built from a configuration."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import hydra.utils
import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import Nodes
from spatialdl.configuring.own_keys import offered_keys, refused_key
from spatialdl.data.bags import BagSource
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Schedule
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.streaming.memory import memory_within
from spatialdl.training.network.freezing import freeze
from spatialdl.training.network.head import check_head
from spatialdl.training.network.pretrained_input import warn_of_other_input
from spatialdl.training.network.weights import check_alike, find_weights, load_weights
from spatialdl.training.optimization.precision import Precision
from spatialdl.training.settings import Sources
from spatialdl.training.tasks.cox import Cox
from spatialdl.training.tasks.own_metrics import OwnMetrics
from spatialdl.training.tasks.task import Task
from spatialdl.training.virtual_tiles import check_room


def build_model(config: DictConfig, sources: Sources) -> nn.Module:
    """The network of a configuration, its weights drawn from the seed alike on every rank."""
    describe_data(config, sources)
    seed_generators(int(config.seed))
    return instantiate(config)


def describe_data(config: DictConfig, sources: Sources) -> None:
    """Fill in what a configuration leaves to the data, and its interpolations refer to."""
    with open_dict(config):
        config.data.image_size = list(sources.image_size)
        config.data.channels = sources.channels
        config.data.num_classes = sources.num_classes
        if config.data.name == "dataset":
            config.data.samples = len(sources.train)
        if isinstance(sources.train, BagSource) and sources.train.tile is not None:
            _describe_tiles(config.data, sources, sources.train.tile)


def _describe_tiles(data: DictConfig, sources: Sources, tile: tuple[int, ...]) -> None:
    """The network gets pixels of tiles as they are, and normalises them itself."""
    normalisation = sources.normalisation
    data.tile, data.tile_channels = list(tile), tile[0]
    data.mean, data.std = normalisation.by_channel(tile[0])
    data.scale = normalisation.white(sources.train_views.dtype)


def seed_generators(seed: int) -> None:
    """Those of PyTorch, and of NumPy and Python, by which a network of the user's may draw."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def instantiate(config: DictConfig) -> nn.Module:
    """The network that a configuration names.

    Args:
        config: of a run; what ``**kwargs`` of the network refuse of `offered_keys` is removed, so
            that the same call builds it again.

    Raises:
        ValueError: if there is none, or it cannot be built so.
    """
    try:
        model = _called(config.model, offered_keys(config.model))
    except hydra.errors.InstantiationException as error:
        raise ValueError(f"model={config.model._target_} cannot be built: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={config.model._target_} gives a {type(model).__name__}, no network"
        )
    return model


def _called(settings: DictConfig, offered: Sequence[str]) -> object:
    """What the target returns, without the offered arguments that it refuses."""
    try:
        return _made(settings)
    except hydra.errors.InstantiationException as error:
        refused = refused_key(error, offered)
        if refused is None:
            _remove(settings, offered)
            if offered:  # it may say in other words that it does not know them
                with suppress(hydra.errors.InstantiationException):
                    return _made(settings)
            raise
    _remove(settings, [refused])
    return _called(settings, [key for key in offered if key != refused])


def _made(settings: DictConfig) -> object:
    """The target called with plain lists and dicts: many libraries refuse those of OmegaConf."""
    return hydra.utils.instantiate(settings, _convert_=settings.get("_convert_", "all"))


def _remove(settings: DictConfig, keys: Sequence[str]) -> None:
    with open_dict(settings):
        for key in keys:
            del settings[key]


def make_network(config: DictConfig, sources: Sources, world: Communicator) -> nn.Module:
    """The network to train: built, with the weights to begin with, and what is frozen marked.

    Raises:
        ValueError: if the weights do not fit, or differ between the ranks.
    """
    model = build_model(config, sources)
    if config.weights is not None:
        name = str(config.weights)
        load_weights(model, name)
        if world.rank == 0:
            file = find_weights(name)
            warn_of_other_input(name, file, sources.normalisation, sources.channels)
        check_alike(model, world)
    freeze(model, list(config.trainer.freeze))
    return model


def make_pipeline(
    config: DictConfig,
    sources: Sources,
    task: Task,
    placement: Placement,
    schedule: Schedule,
    precision: Precision,
    device: torch.device,
    world: Communicator,
    nodes: Nodes,
    metrics: OwnMetrics | None = None,
) -> PipelineRuntime:
    """The network to train, spread over all ranks; see `PipelineRuntime`.

    Args:
        metrics: of the user's, to be tried on what the network gives.

    Raises:
        ValueError: if network, weights and layout do not fit together.
    """
    model = make_network(config, sources, world).to(precision.dtype)
    columns = check_head(model, task, sources)
    if metrics is not None:
        parts = placement.axes(placement.stages - 1).parts
        copies = placement.network_copies * parts
        metrics.try_out(columns, sources.num_classes, placement.dims, copies, parts)
    parallel = config.parallel
    if config.trainer.channels_last and not parallel.shard_state:  # FSDP2 refuses these
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    memory = None
    if placement.stream:
        keys = "trainer.memory_limit_gb", "parallel.stream_to"
        memory = memory_within(config.trainer.memory_limit_gb, parallel.stream_to, device, *keys)
        check_room(
            *(memory, model, _under_way(config, sources, placement)),
            parts=placement.replica_size,
            ranks=nodes.of.count(nodes.of[world.rank]),
            recompute=parallel.recompute != "none",
        )
    return PipelineRuntime(
        model,
        placement,
        schedule,
        world,
        task.loss,
        (sources.channels, *sources.image_size),
        PipelineOptions(
            cut=parallel.cut,
            balance=parallel.balance,
            gather_before=parallel.gather_before,
            recompute=parallel.recompute,
            sync_batchnorm=bool(parallel.sync_batchnorm),
            seed=int(config.seed),
            backend=config.comm.backend,
            shard_state=bool(parallel.shard_state),
            device=device,
            mixed=precision.mixed,
            nodes=nodes,
            compiled=bool(config.trainer.compile),
            tensor_plan=dict(parallel.tensor_plan or {}),
            sample_weights=task.weights,
            memory=memory,
            batch_loss=task.batch_loss if isinstance(task, Cox) else None,
        ),
    )


def _under_way(config: DictConfig, sources: Sources, placement: Placement) -> tuple[int, ...]:
    """The shape of all images of a replica that are between forward and backward at a time."""
    samples = -(-int(config.data.batch_size) // placement.data)
    if config.parallel.schedule != "gpipe":  # which holds a micro-batch a stage
        samples = -(-samples * placement.stages // int(config.parallel.microbatches))
    return (samples, sources.channels, *sources.image_size)
