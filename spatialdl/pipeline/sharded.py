"""Stages with parameters, gradients and optimizer state sharded over the data replicas.

Uses FSDP2 (Zhao et al., "PyTorch FSDP", 2023, https://arxiv.org/abs/2304.11277; the third stage of
Rajbhandari et al., "ZeRO", 2020): each replica keeps a part of every parameter; weights are
gathered for a forward or backward and freed after it. Ranks with the same part of the grid in all
replicas shard with each other. So the grid's ranks of one replica have the same shards, whose
gradients are averaged among them. Where channels are divided, this rank's part of a weight is
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spatialdl.comm.groups import new_group
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.reduce import gather_over_ranks
from spatialdl.pipeline.own_tile import enter
from spatialdl.spatial.channels.weights import full_outputs, held_weights
from spatialdl.torch_internals import tree_map_only


class ShardedStage:
    """Sharded state of a stage; construction is collective over `ranks`.

    Args:
        module: the stage, on its device; its parameters become DTensors.
        blocks: modules in it whose weights are gathered separately.
        mesh: of the stage.
        ranks: of the world that shard, in replica order.
        backend: of torch.distributed.
        device: of the stage.

    Attributes:
        units: the modules whose weights are gathered together, the stage first.

    Raises:
        ValueError: if the backend does not support the device, parameters have different dtypes,
            or one has a gradient hook.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        mesh: Mesh,
        ranks: Sequence[int],
        backend: str,
        device: torch.device,
    ) -> None:
        self._mesh = mesh
        types = {parameter.dtype for parameter in module.parameters()}
        if len(types) > 1:
            raise ValueError(
                f"parallel.shard_state=true needs parameters of one dtype in a stage, got "
                f"{', '.join(sorted(map(str, types)))}: convert the network"
            )
        if (backend == "gloo") != (device.type == "cpu") and backend != "mpi4py":
            raise ValueError(
                f"parallel.shard_state=true cannot shard tensors on {device.type} over "
                f"comm.backend={backend}: take mpi4py"
            )
        self._module, self._group = module, new_group(backend, ranks)
        replicas = DeviceMesh.from_group(self._group, device.type)
        # FSDP2 does not support divided channels between blocks: only the stage takes and returns
        # whole tensors
        inside = set(module.modules()) - {module} if mesh.tensor == 1 else set()
        _refuse_hooks(module)
        for unit in (*(block for block in blocks if block in inside), module):
            unit.register_forward_hook(_without_views)
            fully_shard(unit, mesh=replicas, reshard_after_forward=True)
            unit.register_forward_pre_hook(_writable)  # after that of FSDP2
        self.units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        if mesh.tensor > 1:
            with held_weights(module):  # FSDP2 first looks them up as attributes
                module.unshard()  # type: ignore[operator]
                module.reshard()  # type: ignore[operator]
        self._parameters = list(module.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as without sharding; collective over the replicas."""
        return {name: self.full(value) for name, value in self._module.state_dict().items()}

    def full(self, value: Tensor) -> Tensor:
        """Gather a parameter, or optimizer state of it; collective over the replicas.

        Uses the group itself, not its name as DTensors do: cached meshes may have a destroyed one.
        """
        if not isinstance(value, DTensor):
            return value
        local, size = value.to_local(), self._group.size()
        rows = self._most_rows(value.shape[0])
        own = local.new_zeros(rows, *value.shape[1:])
        own[: len(local)] = local
        gathered = local.new_empty(rows * size, *value.shape[1:])
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        return gathered[: value.shape[0]]

    def rows(self, rows: int) -> slice:
        """This replica's rows of a whole parameter with `rows` rows."""
        most = self._most_rows(rows)
        return slice(most * self._group.rank(), min(rows, most * (self._group.rank() + 1)))

    def _most_rows(self, rows: int) -> int:
        """Rows per replica; the last replicas have fewer or none."""
        return -(-rows // self._group.size())

    def before_backward(self, is_last: bool) -> None:
        """Prepare a backward; only the last one of a step reduces gradients over the replicas."""
        root = self.units[0]
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)

    def check_gradients(self) -> None:
        """Check gradients that FSDP2 has averaged over the replicas, before the grid's average.

        Raises:
            ValueError: if a parameter has a gradient on some replicas only.
        """
        present = torch.tensor([parameter.grad is not None for parameter in self._parameters])
        gathered = gather_over_ranks(self._mesh.comm, present.to(torch.int32), "sharded gradients")
        of_replicas = gathered.view(self._mesh.data, -1, len(self._parameters))
        uneven = (of_replicas != of_replicas[:1]).any(0).any(0)
        if uneven.any():
            raise ValueError(
                f"parallel.shard_state=true: {int(uneven.sum())} parameters have gradients on some "
                "replicas only, as their forwards differ; use all parameters in every forward"
            )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather whole weights for forwards only, of which a replica may have none."""
        root = self.units[0]
        root.set_reshard_after_forward(False)
        for unit in self.units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self.units:
                unit.reshard()
            root.set_reshard_after_forward(True)


def _refuse_hooks(stage: nn.Module) -> None:
    """Refuse gradient hooks of parameters, which FSDP2 replaces by others that it shards.

    Raises:
        ValueError: if a parameter has a hook.
    """
    for name, parameter in stage.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parallel.shard_state=true: '{name}' has a gradient hook, but its gradient is "
                "never whole: put the hook on what the layer returns, or leave shard_state out"
            )


def _writable(module: nn.Module, args: Any) -> Any:
    """Replace FSDP2's views, into which a first layer may not write."""

    def own(value: Tensor) -> Tensor:
        return enter(value) if value.requires_grad else value

    return tree_map_only(Tensor, own, args)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Clone views: a view written in place loses the hook that gathers weights for backward.

    Outputs get all channels, as FSDP2 does not support divided ones.
    """

    def own(value: Tensor) -> Tensor:
        return value.clone() if value.requires_grad and value._base is not None else value

    return tree_map_only(Tensor, own, full_outputs(output))
