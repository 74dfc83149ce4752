"""Lightning's Trainer on split images: ``Trainer(strategy=SpatialStrategy(grid=(2, 2)))``."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from spatialdl.comm.agreement import broadcast_state
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import current_device, take_device
from spatialdl.comm.gradients import lane_of
from spatialdl.comm.launch import launched
from spatialdl.comm.mesh import Mesh, init_mesh
from spatialdl.comm.reduce import differentiable_gather, gather_over_ranks
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.waiting import Timeout
from spatialdl.comm.world import start_world
from spatialdl.comm.world import world as all_ranks
from spatialdl.layout.layout import image_shape
from spatialdl.spatial.parallel import Averaging
from spatialdl.spatial.replicas import BatchNormOver
from spatialdl.spatial.split import shard
from spatialdl.spatial.table import is_spatial, refusal
from spatialdl.torch_internals import tree_leaves, tree_map_only

try:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
except ImportError as error:
    raise ImportError(
        "spatialdl.training.lightning needs the package lightning (pytorch_lightning is "
        'another): pip install "spatialdl[lightning]"'
    ) from error

_REPLACE_LAYERS = frozenset(
    f"{name}Precision" for name in ("Bitsandbytes", "DeepSpeed", "FSDP", "TransformerEngine", "XLA")
)
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    **{"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}
}


def split_batch(batch: Any, mesh: Mesh) -> Any:
    """Split the images of a batch over the grid of a mesh; collective over the mesh.

    Floating tensors (N, C, *spatial) are images, or those of integers if there are none. Masks are
    tensors (N, C, *spatial) or (N, *spatial) with the spatial size of such an image. Everything
    else stays whole on every rank.

    Args:
        batch: tensors in tuples, lists, dicts and named tuples; the same on all ranks of a grid.
        mesh: the ranks.

    Raises:
        ValueError: there is no image.
    """
    dims = len(mesh.grid)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    whole = [one for one in tensors if not is_spatial(one)]
    images = [one for one in whole if one.dim() == dims + 2]
    floating = [one for one in images if one.is_floating_point()]
    sizes = {one.shape[-dims:] for one in floating or images}
    if not sizes and len(whole) == len(tensors):
        shapes = [f"{tuple(x.shape)} {x.dtype}".replace("torch.", "") for x in tensors]
        raise ValueError(
            f"found no image in a batch of {type(batch).__name__} with "
            f"{', '.join(shapes) or 'no tensors'}: an image to be split over a grid of "
            f"{mesh.grid} is {image_shape(dims)}; split the batch yourself with split=, a function "
            "of batch and mesh"
        )

    def part(x: Tensor) -> Tensor:
        fits = x.dim() in (dims + 1, dims + 2) and x.shape[-dims:] in sizes
        return shard(x, mesh) if fits and not is_spatial(x) else x

    return tree_map_only(Tensor, part, batch)


class StartedRanks(LightningEnvironment):
    """Cluster environment of ranks numbered by mpiexec, srun or torchrun."""

    creates_processes_externally = True

    def __init__(self) -> None:
        super().__init__()
        self._local_rank = self._node_rank = 0
        info = launched()
        if info is not None:
            self._global_rank, self._world_size = info.rank, info.size
            self._local_rank = info.local_rank

    def find_nodes(self, world: Communicator) -> None:
        """Find the ranks on each machine; collective over `world`."""
        nodes = world.nodes()
        own = nodes[world.rank]
        self._local_rank = nodes[: world.rank].count(own)
        self._node_rank = sorted(set(nodes)).index(own)

    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._local_rank

    def node_rank(self) -> int:
        """Index of the machine."""
        return self._node_rank

    def teardown(self) -> None:
        """Do nothing: the environment is the launcher's."""


class StartedProcesses(_Launcher):
    """Launcher that runs the Trainer's function in this process, and records failure.

    Attributes:
        failed: whether the function raised. Ranks may then have diverged, so communication, such as
            for a last checkpoint in callbacks, could deadlock.
    """

    failed = False
    is_interactive_compatible = True

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kw: Any
    ) -> Any:
        """Run the function in this process."""
        self.failed = False
        try:
            return function(*args, **kw)
        except BaseException:
            self.failed = True
            raise

    def kill(self, signum: Any) -> None:
        """Do nothing: the launcher signals every rank."""


class SpatialStrategy(ParallelStrategy):
    """Train a LightningModule on images split over ranks, with the results of a single process.

    Start the ranks by ``mpiexec -n N python script.py``, ``srun`` or ``torchrun``. Every rank of a
    grid loads the same whole images, keeps its part of them, and has whole labels. Gradients are
    averaged once per optimizer step, before clipping. Checkpoints contain whole weights under the
    module's names, and load in any other layout and in Lightning without this strategy. BatchNorm
    uses the statistics of all images of a step.

    Args:
        grid: number of parts along each spatial dim: (rows, columns) for images.
        data: number of replicas; Lightning distributes the samples over them.
        split: a function of batch and mesh that returns the split batch; by default `split_batch`,
            which detects images and masks.
        timeout: seconds after which a rank that waits for a peer aborts the run; None disables it.
        checkpoint_io: as in other strategies of Lightning.
        precision_plugin: as in other strategies of Lightning.

    Attributes:
        mesh: the mesh of ranks, available after ``Trainer(...)``.

    Raises:
        ValueError: from ``Trainer(...)``, if the number of ranks is not ``data * prod(grid)``, or
            other arguments of it are not supported.
    """

    strategy_name = "spatial"
    mesh: Mesh

    def __init__(
        self,
        grid: Sequence[int] = (1, 1),
        data: int = 1,
        *,
        split: Callable[[Any, Mesh], Any] = split_batch,
        timeout: Timeout = "default",
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self._ranks = StartedRanks()
        super().__init__(
            cluster_environment=self._ranks,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._arguments: dict[str, Any] = {"grid": grid, "data": data, "timeout": timeout}
        self._split = split
        self._processes = StartedProcesses()
        self._replicas: Communicator = SingleProcess()
        self._lane: Communicator | None = None
        self._averaging: Averaging | None = None
        self._metrics: list[tuple[Metric, Any]] = []
        self.num_nodes = 1  # set by the Trainer
        # otherwise each rank prints the Trainer's messages
        rank_zero_only.rank = self._ranks.global_rank()  # type: ignore[attr-defined]

    # --- ranks

    def set_world_ranks(self) -> None:
        """Set up the mesh; called by the Trainer after it has chosen the devices."""
        if hasattr(self, "mesh"):
            return
        self._check_trainer()
        given = self.parallel_devices or [torch.device("cpu")]
        self._device = device_for(self._ranks.local_rank(), given)
        info = launched()
        if info is not None and info.launcher == "torchrun":
            start_world()
        self.mesh = mesh = init_mesh(**self._arguments)
        self._lane = lane_of(mesh.comm)
        self._ranks.find_nodes(all_ranks())
        if mesh.data > 1:
            same_part = [replica * mesh.parts + mesh.part for replica in range(mesh.data)]
            self._replicas = mesh.comm.subset(same_part)

    def _check_trainer(self) -> None:
        """Refuse arguments of the Trainer that replace layers or weights."""
        kinds = [kind.__name__ for kind in type(self.precision_plugin).__mro__]
        if self._layer_sync is not None or not _REPLACE_LAYERS.isdisjoint(kinds):
            what = "sync_batchnorm=True" if self._layer_sync is not None else kinds[0]
            raise ValueError(
                f"{what} replaces layers or weights by some that cannot be split: leave "
                "sync_batchnorm out, BatchNorm is computed over all images of a step, and use "
                "precision=32-true, 64-true, bf16-true, 16-true, bf16-mixed or 16-mixed"
            )

    def _configure_launcher(self) -> None:
        self._launcher = self._processes

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def is_distributed(self) -> bool:
        """Whether ranks have different samples, for the Trainer's samplers and `log`."""
        return bool(self._arguments["data"] > 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler: all ranks of a grid get the same samples."""
        return {"num_replicas": self.mesh.data, "rank": self.mesh.replica}

    def setup_environment(self) -> None:
        """Set up at the start of fit, validate, test and predict."""
        super().setup_environment()
        agree_on_random_numbers(self.mesh, self.root_device)

    # --- batches

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by replica, if ``seed_everything(workers=True)`` is set."""
        wanted = int(os.environ.get("PL_SEED_WORKERS", "0"))
        if wanted and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.mesh.replica)
        return dataloader

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch to the device by the hooks of the module, and split it."""
        return self._split(super().batch_to_device(batch, device, dataloader_idx), self.mesh)

    # --- the module and its gradients

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Broadcast the weights of rank 0, and set up gradient averaging."""
        broadcast_state(model, self.mesh.comm)
        network = replace(self.mesh.replicated(model), lane=self._lane)
        self._averaging = Averaging(network, self.mesh.agreement)
        self._share_metrics(model)
        return model

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step."""
        self._follow()
        with self._statistics():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; it averages gradients, unless they accumulate."""
        with self._statistics():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _follow(self) -> None:
        """Follow gradients of this step, also of parameters that it unfreezes."""
        if self._averaging is None or self.model is None:
            return
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        frozen = [p for p in frozen if p.is_floating_point() or p.is_complex()]
        for parameter in frozen:
            parameter.requires_grad_(True)
        self._averaging.follow()
        for parameter in frozen:
            parameter.requires_grad_(False)

    def _statistics(self) -> AbstractContextManager[object]:
        """Context in which BatchNorm uses the images of all replicas."""
        over = BatchNormOver(self.mesh.comm, self.mesh.parts)
        return over if self.mesh.data > 1 else nullcontext()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging; the backward after the block averages the sum."""
        assert self._averaging is not None
        self._averaging.accumulates = True
        try:
            yield
        finally:
            self._averaging.accumulates = False

    def _share_metrics(self, model: nn.Module) -> None:
        """Synchronise torchmetrics of the module over replicas."""
        if self.mesh.data == 1:
            return
        comm = self._replicas

        def gathered(value: Tensor, group: object = None) -> list[Tensor]:
            return [one.to(value.device) for one in comm.allgather(value.detach().cpu())]

        for module in model.modules():
            if isinstance(module, Metric) and module.dist_sync_fn is None:
                self._metrics.append((module, module.distributed_available_fn))
                module.dist_sync_fn, module.distributed_available_fn = gathered, lambda: True

    def teardown(self) -> None:
        """Release the module and its metrics."""
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None
        for metric, available in self._metrics:
            metric.dist_sync_fn, metric.distributed_available_fn = None, available
        self._metrics = []
        super().teardown()

    # --- between ranks

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas, as ``self.log(..., sync_dist=True)``; non-tensors are unchanged.

        Args:
            tensor: the same on all ranks of a grid.
            group: must be None.
            reduce_op: mean, sum, max or min.
        """
        name = str(getattr(reduce_op, "name", reduce_op or "mean")).lower().replace("avg", "mean")
        if name not in _REDUCTIONS:
            raise ValueError(f"cannot reduce by {reduce_op}: use one of {', '.join(_REDUCTIONS)}")
        if not isinstance(tensor, Tensor):
            return tensor
        _check_shared(tensor, group)
        if self.mesh.data == 1 or self._processes.failed:
            return tensor
        values = gather_over_ranks(self._replicas, tensor, "reduce")
        is_integer = not (values.is_floating_point() or values.is_complex())
        values = values.double() if name == "mean" and is_integer else values
        return _REDUCTIONS[name](values, 0)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather the tensors of all replicas, (replicas, ...); with one replica, the tensor itself.

        Args:
            tensor: the same on all ranks of a grid, with the same shape on all replicas.
            group: must be None.
            sync_grads: whether it is differentiable.
        """
        _check_shared(tensor, group)
        if self.mesh.data == 1:
            return tensor
        gather = differentiable_gather if sync_grads else gather_over_ranks
        return gather(self._replicas, tensor, "all_gather")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not self._processes.failed:
            all_ranks().barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast an object of rank `src`."""
        return obj if self._processes.failed else all_ranks().bcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision is true on all ranks, or on any."""
        if self._processes.failed:
            return decision
        decisions = all_ranks().allgather(bool(decision))
        return False not in decisions if all else True in decisions


def _check_shared(tensor: Tensor, group: Any) -> None:
    """Check that a tensor can be reduced over replicas.

    Raises:
        ValueError: a group is given.
        UnsupportedSpatialOp: the tensor is a split image.
    """
    if group is not None and getattr(group, "WORLD", group) is not None:
        raise ValueError(
            "SpatialStrategy reduces over data replicas: leave group and sync_dist_group out"
        )
    if is_spatial(tensor):
        raise refusal(
            "a reduction over data replicas",
            [tensor],
            "reduce it to a scalar first, or use to_local() for this rank's tile, full_tensor() "
            "for the whole",
        )


def device_for(local_rank: int, given: list[torch.device]) -> torch.device:
    """Choose the device of a rank and make it current; call before MPI starts, which uses it.

    Args:
        local_rank: rank on the machine, from the launcher.
        given: Lightning's devices of ``accelerator=`` and ``devices=``.
    """
    if given[0].type == "cpu" or given[0].type != current_device().type:
        return given[0]
    places = [device.index or 0 for device in given]
    if places == [0]:  # one device per process, as launchers count
        places = list(range(torch.accelerator.device_count()))
    take_device(places[local_rank % len(places)])
    return current_device()


def agree_on_random_numbers(mesh: Mesh, device: torch.device) -> None:
    """Broadcast random states within each replica; collective over the mesh.

    All ranks of a replica then shuffle, augment and drop out identically, with or without a seed.
    """
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    own = random.getstate(), np.random.get_state(), torch.get_rng_state(), module.get_rng_state()
    of_python, of_numpy, of_torch, of_device = mesh.grid_comm.bcast(own)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    module.set_rng_state(of_device)
