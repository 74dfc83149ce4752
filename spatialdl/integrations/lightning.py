"""Lightning's Trainer on split images: ``Trainer(strategy=SpatialStrategy(grid=(2, 2)))``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from spatialdl.comm.agreement import broadcast_state
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import lane_of
from spatialdl.comm.launch import launched
from spatialdl.comm.mesh import Mesh, init_mesh
from spatialdl.comm.reduce import differentiable_gather, gather_over_ranks
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.waiting import Timeout
from spatialdl.comm.world import start_world
from spatialdl.comm.world import world as all_ranks
from spatialdl.integrations.batches import Split, split_batch
from spatialdl.integrations.lightning_ranks import (
    StartedProcesses,
    StartedRanks,
    agree_on_random_numbers,
    check_devices,
    device_for,
    lightning_module,
)
from spatialdl.spatial.averaging import Averaging
from spatialdl.spatial.replicas import BatchNormOver
from spatialdl.spatial.table import is_spatial, refusal

if TYPE_CHECKING:
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = lightning_module("pytorch.strategies").ParallelStrategy
    rank_zero_only = lightning_module("fabric.utilities.rank_zero").rank_zero_only
    pl_worker_init_function = lightning_module("fabric.utilities.seed").pl_worker_init_function

_REPLACE_LAYERS = frozenset(
    f"{name}Precision" for name in ("Bitsandbytes", "DeepSpeed", "FSDP", "TransformerEngine", "XLA")
)
_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.double().mean(0) if _is_integer(values) else values.mean(0),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "product": lambda values: values.prod(0),
}


def _is_integer(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex())


class SpatialStrategy(ParallelStrategy):
    """Train a LightningModule on images split over ranks, with the results of a single process.

    Start the ranks by ``mpiexec -n N python script.py``, ``srun`` or ``torchrun``. Every rank of a
    grid loads the same whole images, keeps its part of them, and has whole labels. Gradients are
    averaged once per optimizer step, before clipping. Checkpoints contain whole weights under the
    module's names, and load in any other layout and in Lightning without this strategy. BatchNorm
    uses the statistics of all images of a step.

    ``trainer.strategy.mesh`` is the mesh.

    Args:
        grid: number of parts along each spatial dim: (rows, columns) for images.
        data: number of replicas; Lightning distributes the samples over them.
        split: images and masks of a batch, instead of detecting them: keys of a dict, indices of a
            tuple, or a function of batch and mesh that returns the split batch; see
            `spatialdl.integrations.batches.split_batch`. Alternatively override `split`.
        timeout: seconds after which a rank that waits for a peer aborts the run; None disables it.
        checkpoint_io: as in other strategies of Lightning.
        precision_plugin: as in other strategies of Lightning.

    Raises:
        ValueError: from ``Trainer(...)``, if the number of ranks is not ``data * prod(grid)``, or
            other arguments of it are not supported.
    """

    strategy_name = "spatial"

    def __init__(
        self,
        grid: Sequence[int] = (1, 1),
        data: int = 1,
        *,
        split: Split = None,
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
        self._how = split
        self._processes = StartedProcesses()
        self._mesh: Mesh | None = None
        self._replicas: Communicator = SingleProcess()
        self._lane: Communicator | None = None
        self._root_device = torch.device("cpu")
        self._averaging: Averaging | None = None
        self._metrics: list[tuple[Metric, Any]] = []
        self.num_nodes = 1  # set by the Trainer
        # otherwise each rank prints the Trainer's messages
        rank_zero_only.rank = self._ranks.global_rank()  # type: ignore[attr-defined]

    # --- ranks

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks, available after ``Trainer(...)``.

        Raises:
            RuntimeError: the Trainer has not set it up yet.
        """
        if self._mesh is None:
            raise RuntimeError("the mesh is set up by Trainer(strategy=SpatialStrategy(...))")
        return self._mesh

    def set_world_ranks(self) -> None:
        """Set up the mesh; called by the Trainer after it has chosen the devices."""
        if self._mesh is not None:
            return
        self._check_trainer()
        given = self.parallel_devices or [torch.device("cpu")]
        info = launched()
        self._root_device = device_for(info.local_rank if info else 0, given)
        if info is not None and info.launcher == "torchrun":
            start_world()
        world = all_ranks()
        check_devices(given, self.num_nodes, world.size, self._ranks.launcher)
        self._mesh = mesh = init_mesh(**self._arguments)
        self._lane = lane_of(mesh.comm)
        self._ranks.find_nodes(world)
        if mesh.data > 1:
            same_part = [replica * mesh.parts + mesh.part for replica in range(mesh.data)]
            self._replicas = mesh.comm.subset(same_part)

    def _check_trainer(self) -> None:
        """Check the other arguments of the Trainer.

        Raises:
            ValueError: one of them is not supported.
        """
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True replaces BatchNorm by layers that cannot be split: leave it "
                "out, SpatialStrategy computes BatchNorm over all images of a step"
            )
        kinds = [kind.__name__ for kind in type(self.precision_plugin).__mro__]
        if not _REPLACE_LAYERS.isdisjoint(kinds):
            raise ValueError(
                f"SpatialStrategy does not support {kinds[0]}, which replaces layers or weights: "
                "use precision=32-true, 64-true, bf16-true, 16-true, bf16-mixed or 16-mixed"
            )

    def _configure_launcher(self) -> None:
        self._launcher = self._processes

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._root_device

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
        return self.split(super().batch_to_device(batch, device, dataloader_idx))

    def split(self, batch: Any) -> Any:
        """Split the images of a batch; override it for custom batches.

        Args:
            batch: on the device, after the hooks of the module; the same on all ranks of a grid.
        """
        return split_batch(batch, self.mesh, self._how)

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
        return (
            BatchNormOver(self.mesh.comm, self.mesh.parts) if self.mesh.data > 1 else nullcontext()
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging; the backward after the block averages the sum."""
        averaging = self._averaging
        if averaging is None:
            yield
            return
        averaging.accumulates = True
        try:
            yield
        finally:
            averaging.accumulates = False

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
            reduce_op: mean, sum, max, min or product.
        """
        name = str(getattr(reduce_op, "name", reduce_op or "mean")).lower()
        name = "mean" if name == "avg" else name
        if name not in _REDUCTIONS:
            raise ValueError(f"cannot reduce by {reduce_op}: use one of {', '.join(_REDUCTIONS)}")
        if not isinstance(tensor, Tensor):
            return tensor
        _check_shared(tensor, group)
        if self.mesh.data == 1 or self._processes.failed:
            return tensor
        return _REDUCTIONS[name](gather_over_ranks(self._replicas, tensor, "reduce"))

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
