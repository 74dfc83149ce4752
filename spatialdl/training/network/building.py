"""Construction of the network of a run from its configuration."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase

import hydra.utils
import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import Nodes
from spatialdl.common.configuring.own_keys import offered_keys, refused_key
from spatialdl.common.configuring.plugins import describe_cause
from spatialdl.data.bags import BagSource
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.simulate import Schedule
from spatialdl.pipeline.stage import rest_in_training
from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.spatial.streaming.memory import memory_within
from spatialdl.torch_internals import BatchNormBase
from spatialdl.training.checkpoints.content import random_states, restore_random
from spatialdl.training.network.weights import (
    check_alike,
    find_weights,
    load_weights,
    warn_of_other_input,
)
from spatialdl.training.optimization.precision import Precision, channels_last
from spatialdl.training.settings import TARGETED, Sources
from spatialdl.training.tasks.own_metrics import OwnMetrics
from spatialdl.training.tasks.survival import Cox
from spatialdl.training.tasks.task import Task
from spatialdl.training.virtual_tiles import check_room


def build_model(config: DictConfig, sources: Sources) -> nn.Module:
    """Build the network with weights initialised from the seed, the same on every rank."""
    describe_data(config, sources)
    seed_generators(int(config.seed))
    return instantiate(config)


def describe_data(config: DictConfig, sources: Sources) -> None:
    """Set values of the configuration that depend on the data, for its interpolations."""
    with open_dict(config):
        config.data.image_size = list(sources.image_size)
        config.data.channels = sources.channels
        config.data.num_classes = sources.num_classes
        if config.data.name == "dataset":
            config.data.samples = len(sources.train)
        if isinstance(sources.train, BagSource) and sources.train.tile is not None:
            _describe_tiles(config.data, sources, sources.train.tile)


def _describe_tiles(data: DictConfig, sources: Sources, tile: tuple[int, ...]) -> None:
    """Pass tile size and normalisation to the network, which normalises raw pixels itself."""
    normalisation = sources.normalisation
    data.tile, data.tile_channels = list(tile), tile[0]
    data.mean, data.std = normalisation.by_channel(tile[0])
    data.scale = normalisation.white(sources.train_views.dtype)


def seed_generators(seed: int) -> None:
    """Seed PyTorch, NumPy and Python, which a user's network may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def instantiate(config: DictConfig) -> nn.Module:
    """Instantiate the network of a configuration.

    Args:
        config: configuration of a run; removes those `offered_keys` that the network does not
            accept, so that the same call builds it again.

    Raises:
        ValueError: if it is not a network, or cannot be built.
    """
    try:
        model = _called(config.model, offered_keys(config.model))
    except hydra.errors.InstantiationException as error:
        raise ValueError(
            f"model={config.model._target_} cannot be built: {describe_cause(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={config.model._target_} creates a {type(model).__name__}, expected a "
            "torch.nn.Module"
        )
    return model


def _called(settings: DictConfig, offered: Sequence[str]) -> object:
    """Call the target without those offered arguments that it does not accept."""
    try:
        return _made(settings)
    except hydra.errors.InstantiationException as error:
        refused = refused_key(error, offered)
        if refused is None:
            _remove(settings, offered)
            if offered:  # the error may not name the argument
                with suppress(hydra.errors.InstantiationException):
                    return _made(settings)
            raise
    _remove(settings, [refused])
    return _called(settings, [key for key in offered if key != refused])


def _made(settings: DictConfig) -> object:
    """Call the target with plain lists and dicts, since many libraries reject OmegaConf's."""
    return hydra.utils.instantiate(settings, _convert_=settings.get("_convert_", "all"))


def _remove(settings: DictConfig, keys: Sequence[str]) -> None:
    with open_dict(settings):
        for key in keys:
            del settings[key]


def make_network(config: DictConfig, sources: Sources, world: Communicator) -> nn.Module:
    """Build the network, load pretrained weights and freeze parameters.

    Raises:
        ValueError: if the weights do not fit, or differ between ranks.
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
    """Build the network and distribute it over all ranks; see `PipelineRuntime`.

    Args:
        config: configuration of the run.
        sources: data of the run.
        task: loss and metrics.
        placement: the layout.
        schedule: the pipeline schedule.
        precision: dtypes.
        device: device of this rank.
        world: all ranks.
        nodes: nodes of the world.
        metrics: metrics of the user, tried out on the shape of the network's output.

    Raises:
        ValueError: if network, weights and layout are inconsistent.
    """
    model = make_network(config, sources, world).to(precision.dtype)
    columns = check_head(model, task, sources)
    if metrics is not None:
        parts = placement.axes(placement.stages - 1).parts
        copies = placement.network_copies * parts
        metrics.try_out(columns, sources.num_classes, placement.dims, copies, parts)
    parallel = config.parallel
    if config.trainer.channels_last and not parallel.shard_state:  # FSDP2 refuses these
        for one in (*model.parameters(), *model.buffers()):
            one.data = channels_last(one.data)
    memory = None
    if placement.stream:
        keys = "trainer.memory_limit_gb", "parallel.stream_to"
        memory = memory_within(config.trainer.memory_limit_gb, parallel.stream_to, device, *keys)
        check_room(
            *(memory, model, _in_flight(config, sources, placement)),
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
            gather_before=parallel.gather_before,
            recompute=parallel.recompute,
            sync_batchnorm=bool(parallel.sync_batchnorm),
            seed=int(config.seed),
            backend=config.comm.backend,
            shard_state=bool(parallel.shard_state),
            device=device,
            mixed=precision.mixed,
            tensor_plan=dict(parallel.tensor_plan or {}),
            sample_weights=task.weights,
            memory=memory,
            batch_loss=task.batch_loss if isinstance(task, Cox) else None,
        ),
    )


def _in_flight(config: DictConfig, sources: Sources, placement: Placement) -> tuple[int, ...]:
    """Shape of all images of a replica between forward and backward at a time."""
    samples = -(-int(config.data.batch_size) // placement.data)
    if config.parallel.schedule != "gpipe":  # other schedules hold one micro-batch per stage
        samples = -(-samples * placement.stages // int(config.parallel.microbatches))
    return (samples, sources.channels, *sources.image_size)


# --- freezing


log = logging.getLogger("spatialdl.trainer")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the patterns (``layer1.*``, ``*.bias``).

    BatchNorm layers with only frozen parameters stay in evaluation mode, see `pipeline.stage`:
    their running statistics are frozen too.

    Raises:
        ValueError: if a pattern matches nothing, or no trainable parameter is left.
    """
    parameters = dict(model.named_parameters())
    matched: set[nn.Parameter] = set()
    for pattern in patterns:
        chosen = [name for name in parameters if fnmatchcase(name, pattern)]
        if not chosen:
            names = [*parameters, *(f"{name}.*" for name, _ in model.named_modules() if name)]
            near = get_close_matches(str(pattern), names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"trainer.freeze: no parameter matches {pattern}; did you mean {' or '.join(near)}?"
            )
        for name in chosen:
            parameters[name].requires_grad_(False)
            matched.add(parameters[name])
    for layer in model.modules():
        own = set(layer.parameters(recurse=False))
        if isinstance(layer, BatchNormBase) and own and own <= matched:
            rest_in_training(layer)
    frozen = [p.numel() for p in parameters.values() if not p.requires_grad]
    if patterns and len(frozen) == len(parameters):
        raise ValueError(
            f"trainer.freeze={list(patterns)} freezes all {len(frozen)} parameters: nothing is "
            "left to train"
        )
    if patterns:
        total = sum(p.numel() for p in parameters.values())
        log.info("frozen: %.2f of %.2f M parameters", sum(frozen) / 1e6, total / 1e6)


# --- output shape


_CPU = torch.device("cpu")
_SAMPLES = 2  # BatchNorm may reject a single sample


def check_head(model: nn.Module, task: Task, sources: Sources) -> int | None:
    """Run a network on the meta device and check the shape of its output.

    A network that cannot run there is checked by its first loss.

    Args:
        model: the network, not changed.
        task: the task.
        sources: data of the run.

    Returns:
        Number of output columns, or of classes per pixel; None if it cannot run on meta.

    Raises:
        ValueError: if shape or number of classes do not match the task.
    """
    size = (sources.channels, *sources.image_size)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    states = random_states(_CPU)
    try:
        with torch.no_grad(), on_meta():
            output = meta_copy(model)(torch.empty(_SAMPLES, *size, dtype=dtype))
    except Exception:
        return None
    finally:  # a forward may draw random numbers
        restore_random(states, _CPU)
    task.check_output(output, _target(task, sources))
    return int(output.shape[1]) if isinstance(output, Tensor) and output.dim() > 1 else None


def _target(task: Task, sources: Sources) -> Tensor:
    """Labels or masks on the meta device."""
    if task.name == "segmentation":
        return torch.empty(_SAMPLES, *sources.image_size, dtype=torch.int64, device="meta")
    columns = (sources.num_classes,) if task.name in TARGETED else ()
    return torch.empty(_SAMPLES, *columns, device="meta")
