"""A checkpoint's network on the ranks of a layout, for images of any size."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import device_of
from spatialdl.comm.processes import Nodes
from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.configuring.own_keys import is_own_network
from spatialdl.common.fields import shown
from spatialdl.data.image_source import Size
from spatialdl.errors import CheckpointError
from spatialdl.inference.predicting.trained import Trained, trained_in
from spatialdl.layout.layout import by
from spatialdl.layout.node_order import placed_by_nodes
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.spatial.meta import meta_copy, on_meta
from spatialdl.spatial.streaming.memory import Memory, memory_within
from spatialdl.training.checkpoints.content import check_network, restore_network
from spatialdl.training.checkpoints.folder import candidates
from spatialdl.training.checkpoints.reading import Checkpoint
from spatialdl.training.console.start_table import log_ranks
from spatialdl.training.layouts import check_image, placement_of, schedule_of
from spatialdl.training.network.building import instantiate
from spatialdl.training.optimization.precision import precision_of, set_arithmetic

_OURS, _LAYERS, _TORCHVISION = "spatialdl.models", "torch.nn", "torchvision.models"
_END_TO_END = "spatialdl.bags.EndToEndNetwork"  # its networks are checked as separate targets
_NO_BUILDERS = "torchvision.models.feature_extraction"
_MORE, _FEWEST = 4, 2**20
"""Limit of parameters built: `_MORE` times the checkpoint's elements, plus `_FEWEST`."""


class Network:
    """A trained network; construction and calls are collective.

    Args:
        config: configuration of the command.

    Raises:
        ValueError: the network cannot be built, or the device does not support the precision.
        CheckpointError: the checkpoint names code that the command does not trust.
    """

    def __init__(self, trained: Trained, config: DictConfig, world: Communicator) -> None:
        check_trust(trained, config)
        settings = trained.config.trainer
        set_arithmetic(
            tf32=bool(settings.tf32),
            deterministic=bool(settings.deterministic),
            cudnn_benchmark=bool(settings.get("cudnn_benchmark", False)),
        )
        self._trained, self._config, self._world = trained, config, world
        self._device = device_of(config.device)
        self.precision = precision_of(config.precision or settings.precision, self._device)
        placement = placement_of(config.parallel, len(trained.image_size))
        self.placement = placed_by_nodes(placement, Nodes(world).of)
        self.schedule = schedule_of(config.parallel, self.placement)
        self._pipeline: PipelineRuntime | None = None

    def pipeline(self, size: Size) -> PipelineRuntime:
        """This rank's stages with weights, for images of (H, W) or (D, H, W).

        Raises:
            ValueError: the network does not take images of this size.
            CheckpointError: its weights do not match the checkpoint.
        """
        check_image(size, self.placement)
        found = self._pipeline
        if found is not None and self.placement.stages == 1 and found.image_size[1:] != size:
            self._check_takes(next(iter(found.stages.values())), size)
            found.image_size = (self._trained.channels, *size)
        elif found is None or found.image_size[1:] != size:
            self._pipeline = found = self._build(size)
        return found

    def _build(self, size: Size) -> PipelineRuntime:
        parallel, trained = self._config.parallel, self._trained
        with Checkpoint(trained.path) as source:
            model = built(trained, source).to(self.precision.dtype)
        image = (trained.channels, *size)
        self._check_takes(model, size)
        pipeline = PipelineRuntime(
            model,
            self.placement,
            self.schedule,
            self._world,
            _no_loss,
            image,
            PipelineOptions(
                cut=parallel.cut,
                gather_before=parallel.gather_before,
                device=self._device,
                mixed=self.precision.mixed,
                memory=self._memory(),
            ),
        )
        if self._config.comm.map:
            log_ranks(pipeline, self._world)
        with Checkpoint(trained.path) as source:
            averaged = bool(self._config.average)
            restore_network(pipeline, source, self._world, averaged=averaged)
        return pipeline

    def _memory(self) -> Memory | None:
        """The memory of virtual tiles; None without them."""
        if not self.placement.stream:
            return None
        limit, folder = self._config.memory_limit_gb, self._config.parallel.stream_to
        return memory_within(limit, folder, self._device, "memory_limit_gb", "parallel.stream_to")

    @torch.no_grad()
    def _check_takes(self, model: nn.Module, size: Size) -> None:
        """Run the network on the meta device if the size differs from that of training."""
        trained = self._trained
        if size == trained.image_size:
            return
        dry, dtype = meta_copy(model), self.precision.dtype
        try:
            with on_meta():
                dry(torch.empty(1, trained.channels, *size, dtype=dtype, device="meta"))
        except NotImplementedError:  # an operation without a meta kernel may still run
            return
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            reason, known = str(error).partition("\n")[0], trained.image_size
            remedy = "give such volumes" if trained.takes_volumes else f"set tile_size={known[0]}"
            raise ValueError(
                f"{type(model).__name__} does not take images of {by(size)} ({reason}); it was "
                f"trained on {by(known)}: {remedy}"
            ) from error


def check_own_network(config: DictConfig) -> None:
    """Build a user's network once before ranks start, so that errors are reported once.

    Args:
        config: configuration of the command.

    Raises:
        ValueError: the network cannot be built.
        CheckpointError: its code is not trusted, or its weights do not match the checkpoint.
    """
    try:
        trained = trained_in(candidates(str(config.ckpt_path), Path())[0])
    except CheckpointError:  # damaged: ranks may fall back to an earlier checkpoint
        return
    if is_own_network(str(trained.config.model["_target_"])):
        check_trust(trained, config)
        with Checkpoint(trained.path) as source:
            check_network([built(trained, source)], source, SingleProcess())


def check_trust(trained: Trained, config: DictConfig) -> None:
    """Check that the command trusts the code of a network.

    Raises:
        CheckpointError: it does not.
    """
    check_targets(OmegaConf.to_container(trained.config.model), list(config.trust))


def built(trained: Trained, source: Checkpoint) -> nn.Module:
    """Build the network of an open checkpoint, without its weights.

    Raises:
        ValueError: the network cannot be built, or is far larger than the checkpoint.
    """
    with no_more_weights(_FEWEST + _MORE * source.elements()):
        return instantiate(trained.config)


@contextmanager
def no_more_weights(most: int) -> Iterator[None]:
    """Limit the parameters of networks built in this context.

    A checkpoint's configuration is untrusted: a layer of a million channels exhausts memory or
    time.

    Args:
        most: elements of parameters, those replaced during construction included.

    Raises:
        ValueError: the network has more.
    """
    total = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        total += 0 if parameter is None else parameter.numel()
        if total > most:
            raise ValueError(f"the network has over {most:,} weights, the checkpoint far fewer")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise AssertionError("inference has no loss")


# --- the code that a checkpoint's configuration may call
#
# A checkpoint is data, but its configuration names the callable that builds the network
# (`model._target_`), which may be any Python function, such as `os.system`. Callables known to only
# build a network are called; others need `trust`.


def check_targets(model: Any, trusted: Sequence[str]) -> None:
    """Check that a network's configuration only names trusted code.

    Args:
        model: configuration of a network, as plain dicts and lists.
        trusted: names of additionally trusted functions, classes or packages.

    Raises:
        CheckpointError: a target is not trusted.
    """
    for target in _targets(model):
        if not any(f"{target}.".startswith(f"{one}.") for one in trusted) and not builds(target):
            raise CheckpointError(
                f"the checkpoint's network is built by {shown(target)}, which may run any code: "
                f"if you trust it and the checkpoint's source, add trust=[{target}]"
            )


def _targets(settings: Any) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if key == "_target_":
                yield str(value)
            else:
                yield from _targets(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _targets(value)
    elif isinstance(settings, str) and "${" in settings:
        raise CheckpointError(
            f"the checkpoint's configuration contains {shown(settings)}, but only plain values are "
            "allowed: it was not written by spatialdl.train"
        )


def builds(target: str) -> bool:
    """Whether a target only builds a network or layer.

    Only modules of spatialdl, PyTorch and torchvision are imported.
    """
    if target == _END_TO_END:
        return True
    module, _, name = target.rpartition(".")
    package = next(
        (one for one in (_OURS, _LAYERS, _TORCHVISION) if f"{module}.".startswith(f"{one}.")), None
    )
    if package is None:
        return False
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return False
    # a module's imports are its attributes as well: spatialdl.models.resnet.torch
    home = str(getattr(found, "__module__", ""))
    if not f"{home}.".startswith(f"{package}.") or home == _NO_BUILDERS:
        return False
    if inspect.isclass(found):
        return issubclass(found, nn.Module)
    return package != _LAYERS and inspect.isfunction(found) and _returns_network(found)


def _returns_network(function: Any) -> bool:
    try:
        given = get_type_hints(function).get("return")
    except Exception:  # evaluating annotations may raise anything
        return False
    return inspect.isclass(given) and issubclass(given, nn.Module)
