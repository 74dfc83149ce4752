"""Pipeline: pipelines, GEMS and all other layouts in a user's own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from spatialdl.comm.agreement import (
    HOW_TO_SWITCH_OFF,
    broadcast_state,
    check_same,
    first_difference,
    is_due,
)
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh, start_placement
from spatialdl.comm.waiting import Timeout
from spatialdl.layout.layout import even_bounds
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.layout_checks import check_size
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import GEMS, SCHEDULES, make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.channels.weights import local_state
from spatialdl.spatial.split import Names
from spatialdl.spatial.tensor import SpatialTensor

if TYPE_CHECKING:
    from mpi4py import MPI

_SCHEDULES = (*SCHEDULES, "gems", *GEMS[:2])


class Pipeline:
    """A network over stages, grids and replicas of ranks, for your own training loop.

    Construction and all methods are collective, with the same network and arguments on every rank.
    Weights and buffers are broadcast from rank 0. Results match a single process that accumulates
    over the same slices of a batch: micro-batch by micro-batch, replica by replica within it, each
    as even as possible.

    ::

        pipeline = spatialdl.Pipeline(
            model, stages=2, schedule="1f1b", microbatches=4, image_size=(3, 512, 512),
            criterion=torch.nn.functional.cross_entropy,
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for images, labels in loader:
            loss = pipeline.step(images, labels)  # forward, backward, averaged gradients
            optimizer.step()

    Args:
        model: the whole network.
        layout: a mesh of `init_mesh` for a network in one stage, or a `Placement`; None to use
            the keywords `grid` to `interleave`.
        image_size: (channels, *size) of the whole images.
        criterion: the mean loss of outputs and targets. Gradients of its parameters, if it is a
            module with some, are averaged as well; give them to the optimizer, too.
        schedule: "gpipe", "1f1b", "interleaved" (ranks hold several stages each),
            "gems" or "mast", or "basic" (a second copy of the network in reverse order).
        microbatches: number of micro-batches in a batch; even with GEMS.
        grid: number of parts along each spatial dim, in stages that cut images.
        stages: number of stages.
        spatial_stages: number of first stages that cut images; by default 1, with "interleaved"
            all.
        data: replicas, each with its own slice of every micro-batch.
        tensor: ranks that divide the channels of weights and activations in each stage.
        interleave: stages of each rank with "interleaved".
        cut: names of the modules at which stages 2, 3 ... begin; by default balanced by time.
        gather_before: modules that get whole images.
        recompute: "block" or "stage" to recompute these in backward.
        sync_batchnorm: whether BatchNorm normalizes over the samples of all replicas.
        seed: of random numbers that the network draws, such as dropout.
        device: of weights and tensors.
        mixed: torch.bfloat16 to run under autocast.
        comm: the ranks, see `init_mesh`.
        timeout: see `init_mesh`.
        check: False to skip the occasional comparison of the ranks' batches.

    Attributes:
        steps: number of finished steps; seeds random numbers, so set it when training resumes.
        runtime: executes the schedule and holds the stages of this rank.

    Raises:
        ValueError: if layout, schedule, network and number of ranks are incompatible.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Mesh | Placement | None = None,
        *,
        image_size: Sequence[int],
        criterion: Callable[[Tensor, Tensor], Tensor],
        schedule: str = "gpipe",
        microbatches: int = 1,
        grid: Sequence[int] | None = None,
        stages: int = 1,
        spatial_stages: int | None = None,
        data: int = 1,
        tensor: int = 1,
        interleave: int | None = None,
        cut: Names = None,
        gather_before: Names = None,
        recompute: Literal["none", "block", "stage"] = "none",
        sync_batchnorm: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        mixed: torch.dtype | None = None,
        comm: Communicator | MPI.Intracomm | None = None,
        timeout: Timeout = "default",
        check: bool | None = None,
    ) -> None:
        size = tuple(image_size)
        if not 2 <= len(size) <= 4 or any(type(extent) is not int or extent < 1 for extent in size):
            raise ValueError(
                "image_size must be (channels, *size) of images, such as (3, 512, 512), got "
                f"{image_size}"
            )
        if mixed not in (None, torch.bfloat16):
            raise ValueError(f"mixed={mixed} is not supported: take torch.bfloat16, or None")
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule={schedule} is unknown: take one of {', '.join(_SCHEDULES)}")
        if type(microbatches) is not int or microbatches < 1:
            raise ValueError(f"microbatches={microbatches} must be a whole number of at least 1")
        degrees = (grid, stages, spatial_stages, data, tensor, interleave)
        if layout is not None and degrees != (None, 1, None, 1, 1, None):
            raise ValueError(
                "layout replaces grid, stages, data, tensor and interleave: leave out either"
            )
        if isinstance(layout, Mesh):
            if comm is not None:
                raise ValueError("a mesh already has its ranks: leave comm out beside it")
            placement, world = _of_mesh(layout, schedule), layout.comm
        else:
            placement = layout or _placement(grid or (1,) * (len(size) - 1), *degrees[1:], schedule)
            arguments: dict[str, object] = {
                **{key: value for key, value in asdict(placement).items() if key != "order"},
                **{"image_size": size, "schedule": schedule, "microbatches": microbatches},
                **{"recompute": recompute, "seed": seed, "check": check, "timeout": timeout},
            }
            world, placement = start_placement(
                placement, comm, timeout, check, "the pipeline", "Pipeline", arguments
            )
        _check_size(size, placement)
        broadcast_state(model, world)
        if isinstance(criterion, nn.Module):
            broadcast_state(criterion, world)
        self._names = list(model.state_dict())
        self._size, self._world, self._compares = size, world, check is not False
        self.steps = 0
        options = PipelineOptions(
            cut=cut,
            gather_before=gather_before,
            recompute=recompute,
            sync_batchnorm=sync_batchnorm,
            seed=seed,
            device=torch.device(device or "cpu"),
            mixed=mixed,
        )
        name = {"gems": "mast"}.get(schedule, schedule)
        made = make_schedule(name, placement, microbatches)
        self.runtime = PipelineRuntime(model, placement, made, world, criterion, size, options)

    @property
    def box(self) -> tuple[int, ...] | None:
        """This rank's half-open box of an image, see `Mesh.box`; None if it needs no images."""
        mesh = next(filter(None, map(self.runtime.first, self._microbatches)), None)
        return None if mesh is None else mesh.box(self._size[1:])

    @property
    def needs_targets(self) -> bool:
        """Whether this rank holds the last stage."""
        return any(self.runtime.last(number) is not None for number in self._microbatches)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over parameters of this rank's stages, for elementwise optimizers."""
        return self.runtime.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over parameters of this rank's stages, with the whole network's names."""
        return self.runtime.named_parameters()

    def step(
        self, images: Tensor | None, targets: Tensor | None, samples: int | None = None
    ) -> float:
        """Run forward and backward of a batch; leave averaged gradients in the parameters.

        Drops the gradients of the previous step. Collective, with the same batch on every rank.

        Args:
            images: (N, C, *size), the whole batch, of which this rank takes its part; or
                (N, C, *own), this rank's `box` of all N images; or None where `box` is None.
            targets: (N, ...), the whole batch; or None where `needs_targets` is False.
            samples: N, needed only without images and targets.

        Returns:
            The loss of the whole batch, the same on every rank.

        Raises:
            ValueError: if shapes or sizes are wrong, or batches differ between ranks.
        """
        count = self._count(images, targets, samples)
        self._check_alike(images, targets, count)
        if targets is None and self.needs_targets:
            raise ValueError("this rank holds the last stage, so step needs targets")
        microbatches = self._cut(images, targets, count)
        own = self.runtime.train_step(microbatches, self.steps)
        self.steps += 1
        loss: float = self._world.allreduce(own)
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the last `step` by their norm over the whole network.

        Args:
            max_norm: maximum norm.

        Returns:
            The norm before clipping, the same on every rank.
        """
        return self.runtime.gradients.clip(max_norm)

    def evaluate(self, images: Tensor | None, samples: int | None = None) -> Tensor:
        """Return the outputs (N, ...) for a batch on every rank; collective.

        Args:
            images: as for `step`.
            samples: as for `step`.
        """
        count = self._count(images, None, samples)
        microbatches = self._cut(images, None, count)
        starts = self._starts(count)
        pieces = []
        for number, output in sorted(self.runtime.evaluate(microbatches).items()):
            mesh = self.runtime.last(number)
            whole = output.full_tensor() if isinstance(output, SpatialTensor) else output
            if mesh is not None and mesh.counts:
                pieces.append((starts[number].start, whole.cpu()))
        gathered = [piece for own in self._world.allgather(pieces) for piece in own]
        ordered = sorted(gathered, key=lambda piece: piece[0])
        return torch.cat([output for _, output in ordered]).to(self.runtime.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole network's state on the CPU of every rank; collective."""
        own = self.runtime.state_dict()
        placement, rank = self.runtime.placement, self._world.rank
        gives: dict[str, Tensor] = {}
        for stage, module in self.runtime.stages.items():
            if placement.ranks(stage, 0)[0] == rank:
                gives |= {name: own[name].detach().cpu() for name in module.state_dict()}
        state = {
            name: tensor for each in self._world.allgather(gives) for name, tensor in each.items()
        }
        return {name: state[name] for name in self._names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of a whole network; collective.

        Args:
            state: of the whole network, as returned by `state_dict`.

        Raises:
            ValueError: if names are missing or unexpected.
        """
        if set(state) != set(self._names):
            missing = next((name for name in self._names if name not in state), None)
            other = next((name for name in state if name not in self._names), None)
            difference = (
                f"has no {missing}" if missing is not None else f"has {other}, unlike the network"
            )
            raise ValueError(f"the state dict is of another network: it {difference}")
        for module in self.runtime.stages.values():
            own = {name: state[name] for name in module.state_dict()}
            module.load_state_dict(local_state(module, own))

    @property
    def _microbatches(self) -> range:
        return range(self.runtime.schedule.microbatches)

    def _count(self, images: Tensor | None, targets: Tensor | None, samples: int | None) -> int:
        counts = {
            name: int(count)
            for name, count in (
                ("images", None if images is None else len(images)),
                ("targets", None if targets is None else len(targets)),
                ("samples", samples),
            )
            if count is not None
        }
        if not counts:
            raise ValueError("without images and targets, give the number of samples=")
        if len(set(counts.values())) > 1:
            sizes = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise ValueError(f"images and targets must have the same length, got {sizes}")
        count = next(iter(counts.values()))
        if count < 1:
            raise ValueError("a batch has at least one sample")
        return count

    def _check_alike(self, images: Tensor | None, targets: Tensor | None, count: int) -> None:
        """Compare the batches of the ranks in the first steps, and occasionally later."""
        if not self._compares or self._world.size == 1 or not is_due(self.steps + 1):
            return
        whole = images is not None and tuple(images.shape[1:]) == self._size
        what = "ranks have batches of different size"
        check_same(self._world, what, {"its samples": count}, "give all ranks the same batch")
        own = (whole and not isinstance(images, SpatialTensor), targets is not None)
        batches = self._world.allgather(own)
        named = {}
        if images is not None and all(batch[0] for batch in batches):
            named["images"] = images
        if targets is not None and all(batch[1] for batch in batches):
            named["targets"] = targets
        found = first_difference(self._world, named) if named else ""
        if found:
            raise ValueError(
                f"{found}: give every rank the same whole batch, of which it takes its part; "
                "load, shuffle and augment identically on all ranks ("
                f"{HOW_TO_SWITCH_OFF.replace('init_mesh', 'Pipeline')})"
            )

    def _starts(self, count: int) -> list[range]:
        """The samples of this replica in each micro-batch."""
        placement, replica = self.runtime.placement, self.runtime.replica
        ranges = []
        for start, stop in pairwise(even_bounds(count, len(self._microbatches))):
            cuts = even_bounds(stop - start, placement.data)
            ranges.append(range(start + cuts[replica], start + cuts[replica + 1]))
        return ranges

    def _cut(self, images: Tensor | None, targets: Tensor | None, count: int) -> list[Microbatch]:
        """This rank's part of a batch, as micro-batches for the runtime."""
        tiles, device = self._tiles(images), self.runtime.device
        microbatches = []
        for number, own in enumerate(self._starts(count)):
            samples, tile, target = slice(own.start, own.stop), None, None
            if tiles is not None and self.runtime.first(number) is not None:
                tile = tiles[samples].to(device)
            if targets is not None and self.runtime.last(number) is not None:
                target = targets[samples].to(device)
            microbatches.append(Microbatch(len(own), len(own) / count, tile, target))
        return microbatches

    def _tiles(self, images: Tensor | None) -> Tensor | None:
        box = self.box
        if box is None:
            return None
        if images is None:
            raise ValueError(
                f"this rank holds the first stage, so it needs images, or its box {box}"
            )
        if isinstance(images, SpatialTensor):
            images = images.to_local()
        own = tuple(stop - start for start, stop in zip(box[::2], box[1::2], strict=True))
        if tuple(images.shape[1:]) == (self._size[0], *own):
            return images
        if tuple(images.shape[1:]) != self._size:
            raise ValueError(
                f"images must be (N, {', '.join(map(str, self._size))}), or this rank's box, "
                f"(N, {self._size[0]}, {', '.join(map(str, own))}), got {tuple(images.shape)}"
            )
        pixels = (slice(*bounds) for bounds in zip(box[::2], box[1::2], strict=True))
        return images[(slice(None), slice(None), *pixels)].contiguous()


def _of_mesh(mesh: Mesh, schedule: str) -> Placement:
    if mesh.tensor > 1:
        raise ValueError(
            "a mesh with a tensor axis has ranks that Pipeline cannot place: give Pipeline grid=, "
            "data= and tensor= instead of the mesh"
        )
    if schedule not in SCHEDULES[:3]:
        raise ValueError(
            f"schedule={schedule} needs stages, but a mesh is one stage: give stages= instead"
        )
    return Placement(mesh.data, (mesh.grid,))


def _placement(
    grid: Sequence[int],
    stages: int,
    spatial_stages: int | None,
    data: int,
    tensor: int,
    interleave: int | None,
    schedule: str,
) -> Placement:
    is_interleaved = schedule == "interleaved"
    if interleave is None:
        interleave = 2 if is_interleaved else 1
    cut = (stages if is_interleaved else 1) if spatial_stages is None else spatial_stages
    numbers = {"stages": stages, "data": data, "tensor": tensor, "interleave": interleave}
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value} must be a whole number of at least 1")
    if not 0 <= cut <= stages or (cut == 0 and prod(grid) > 1):
        raise ValueError(
            f"spatial_stages={cut} of stages={stages} cannot cut images by grid={grid}"
        )
    whole = (1,) * len(grid)
    grids = (tuple(grid),) * cut + (whole,) * (stages - cut)
    parts = (tensor,) * stages if tensor > 1 else ()
    mirrored = schedule in ("gems", *GEMS)
    return Placement(data, grids, interleave, mirrored, tensor=parts)


def _check_size(size: tuple[int, ...], placement: Placement) -> None:
    grid = placement.grids[0]
    if len(grid) != len(size) - 1:
        raise ValueError(
            f"image_size={size} has {len(size) - 1} spatial dims, the grid {grid} has {len(grid)}"
        )
    check_size(size[1:], grid)
