"""The runtime that executes a schedule on one rank, micro-batch by micro-batch.

One runtime covers all modes of parallelism. One stage on one rank is ordinary training, one stage
on a grid is spatial parallelism, several replicas are data parallelism, several stages are a
pipeline (layer parallelism with one micro-batch), and a second copy of the network in reverse
order is GEMS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spatialdl.comm import trace, waiting
from spatialdl.comm.across import Across
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Replicated, lane_of
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.waiting import noted
from spatialdl.comm.world import as_communicator
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.batch_loss import BatchLoss, check_forwards_first
from spatialdl.pipeline.gradients import Gradients, stage_groups
from spatialdl.pipeline.handovers import Handovers
from spatialdl.pipeline.layout_checks import check_shardable
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import Criterion
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.samples_apart import check_samples_apart
from spatialdl.pipeline.shapes import HandoverShapes, divide_stage
from spatialdl.pipeline.simulate import Action, Schedule, actions_of, describe
from spatialdl.pipeline.stage import SAMPLES, start_training
from spatialdl.pipeline.stage_runtime import Microbatch, StageRuntime, moved
from spatialdl.pipeline.step_context import StepContext
from spatialdl.pipeline.virtual_tiles import Made
from spatialdl.spatial.channels.weights import check_plan, full_state, settle, weights_of
from spatialdl.spatial.meta import dtype_of
from spatialdl.spatial.recompute import blocks_of
from spatialdl.spatial.split import gather_before as gather
from spatialdl.spatial.streaming.memory import Memory

if TYPE_CHECKING:
    from mpi4py import MPI

    from spatialdl.pipeline.sharded import ShardedStage


class PipelineRuntime:
    """Stages of a network spread over the ranks of `comm`, as this rank holds them.

    Args:
        model: the whole network, identical on every rank.
        placement: maps stages to ranks; must fit the size of `comm`.
        schedule: made for this placement.
        comm: the ranks.
        criterion: the mean loss of outputs and targets.
        image_size: global (channels, *size) of the images.
        options: pipeline options.

    Attributes:
        stages: modules of the stages on this rank, by stage number, with the network's names.
        sharded: the same stages where state is sharded.
        divided: maps ids of parameters divided by channels to the ranks that divide them.
        gradients: the gradients that `train_step` leaves in the stages, to unscale and clip.
        doing: the current action of a training step.
        memory: stores tensors of virtual tiles between uses; None without virtual tiles.

    Raises:
        ValueError: if network, placement, schedule and options are incompatible.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        schedule: Schedule,
        comm: Communicator | MPI.Intracomm,
        criterion: Criterion,
        image_size: tuple[int, ...],
        options: PipelineOptions | None = None,
    ) -> None:
        self.options = options = options or PipelineOptions()
        if options.shard_state:
            check_shardable(placement)
        self.placement, self.schedule, self.criterion = placement, schedule, criterion
        self.mixed = options.mixed
        self.device = options.device
        self._scale = 1.0
        self.doing: Action | None = None
        self._comm = comm = as_communicator(comm)
        gather(model, options.gather_before)
        check_plan(model, options.tensor_plan)
        blocks = list(blocks_of(model).values()) if options.shard_state else []
        stages = self._cut(model, image_size)
        dtype = dtype_of(model)
        to = (self.device, self.mixed) if self.mixed else None
        self._shapes = HandoverShapes(stages, placement, image_size, dtype, to)
        placed = self._place(stages)
        self._placed = {
            (runtime.position.copy, runtime.position.stage): runtime for runtime in placed
        }
        self._divide(placed)
        self._check_samples_apart(dtype)
        meshes = {runtime.position.stage: runtime.mesh for runtime in placed}
        groups = stage_groups(placement, meshes, comm)
        self.sharded = self._shard(blocks) if options.shard_state else {}
        self.divided = self._divided_parameters(meshes)  # after sharding, which replaces some
        self._train = actions_of(comm.rank, placement, schedule.train)
        self._evaluate = actions_of(comm.rank, placement, schedule.evaluate)
        replicated = self._replicated(meshes, groups)
        channels = {stage: mesh.tensor for stage, mesh in meshes.items()}
        self.gradients = Gradients(
            *(replicated, self.sharded, comm, self.device),
            *(channels, self.divided, self._replicated_criterion()),
        )
        units = {stage: sharded.units for stage, sharded in self.sharded.items()}
        sync, microbatches = options.sync_batchnorm, schedule.microbatches
        self._context = StepContext(
            placed, self.stages, groups, placement, sync, microbatches, comm, units, options.seed
        )
        self._batch_loss: BatchLoss | None = None
        if options.batch_loss is not None:
            check_forwards_first(schedule.train)
            [one] = placed
            self._batch_loss = BatchLoss(criterion, options.batch_loss, one.mesh)
        self._copies = {
            action.microbatch: action.copy for actions in schedule.evaluate for action in actions
        }

    @property
    def image_size(self) -> tuple[int, ...]:
        """Global (channels, *size) of the images; may be set where there is one stage."""
        return self._shapes.image_size

    @image_size.setter
    def image_size(self, size: tuple[int, ...]) -> None:
        self._shapes.image_size = size

    def _cut(self, model: nn.Module, image_size: tuple[int, ...]) -> list[nn.Module]:
        """All stages of the network."""
        options, placement = self.options, self.placement
        divided = placement.network_copies * placement.most_batch_parts > 1
        stages = cut(
            *(model, placement.widths, options.cut, image_size),
            *(options.recompute == "block", divided),
        )
        for stage in stages if len(stages) > 1 else ():
            stage.train()  # an override of train() may freeze weights
        return stages

    def _place(self, stages: list[nn.Module]) -> list[StageRuntime]:
        """Return the runtimes of this rank's stages, their modules on the device."""
        comm, placement = self._comm, self.placement
        learns = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
        positions = placement.positions(comm.rank)
        self.replica = positions[0].replica
        self.stages = {p.stage: moved(stages[p.stage], self.device) for p in sorted(positions)}
        borders = list(self._shapes.borders)
        handovers = Handovers(placement, self.schedule, comm, borders, self.device)
        self.memory = (self.options.memory or Memory()) if placement.stream else None
        return [
            StageRuntime(
                self.stages[p.stage],
                placement,
                p,
                comm,
                handovers,
                shapes=self._shapes,
                learns=learns,
                options=self.options,
                memory=self.memory,
            )
            for p in positions
        ]

    def _divide(self, placed: list[StageRuntime]) -> None:
        """Divide the weights of stages that divide channels and keep this rank's part."""
        if self.placement.most_tensor_parts == 1:
            return
        arriving = self._shapes.arriving(SAMPLES)
        for stage, mesh in {one.position.stage: one.mesh for one in placed}.items():
            if mesh.tensor > 1:
                inputs, plan = arriving[stage], self.options.tensor_plan
                divide_stage(self.stages[stage], mesh.tensor_comm, inputs, SAMPLES, plan)

    def _divided_parameters(self, meshes: Mapping[int, Mesh]) -> dict[int, Communicator]:
        return {
            id(parameter): meshes[stage].tensor_comm
            for stage, module in self.stages.items()
            for weights in (weights_of(module),)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name in weights
        }

    def _check_samples_apart(self, dtype: torch.dtype) -> None:
        """Check networks whose samples are divided over ranks or normalized across replicas."""
        local = self.placement.most_batch_parts
        across_replicas = self.options.sync_batchnorm and self.placement.data > 1
        if local == 1 and not across_replicas:
            return
        stages = [
            runtime
            for _, runtime in sorted(self._placed.items())
            if across_replicas or runtime.mesh.batch > 1
        ]
        reason = (
            f"parallel.sync_batchnorm=true synchronizes BatchNorm over the samples of "
            f"{self.placement.data} replicas"
            if across_replicas
            else f"parallel.local_dp={local} divides the samples of a micro-batch over ranks"
        )
        check_samples_apart(stages, dtype, self._comm, reason)

    def _shard(self, blocks: list[nn.Module]) -> dict[int, ShardedStage]:
        from spatialdl.comm.groups import backend_of, start
        from spatialdl.pipeline.sharded import ShardedStage

        backend = self.options.backend or backend_of(self._comm, self.device)
        start(backend)
        shards = {}
        for placed in self._placed.values():
            _, stage, part, _, tensor = placed.position
            replicas = range(self.placement.data)
            ranks = [self.placement.ranks(stage, n, tensor=tensor)[part] for n in replicas]
            module, mesh = self.stages[stage], placed.mesh
            shards[stage] = ShardedStage(module, blocks, mesh, ranks, backend, self.device)
        return shards

    def _replicated(
        self, meshes: Mapping[int, Mesh], groups: Mapping[int, Communicator]
    ) -> dict[int, Replicated]:
        """This rank's stages in stage order, so that ranks sharing several create them alike."""
        replicated = {}
        for stage, comm in sorted(groups.items()):
            stage_weights = meshes[stage].replicated(self.stages[stage], bool(self.sharded))
            if not self.sharded:
                copies = stage_weights.copies * self.placement.copies
                stage_weights = replace(stage_weights, comm=comm, copies=copies, lane=lane_of(comm))
            replicated[stage] = stage_weights
        return replicated

    def _replicated_criterion(self) -> Replicated | None:
        """The criterion, which ranks without a last stage hold as well, if it is trained."""
        criterion = self.criterion
        if not isinstance(criterion, nn.Module) or next(criterion.parameters(), None) is None:
            return None
        placement = self.placement
        losses = placement.network_copies * placement.widths[-1] * prod(placement.stream or (1,))
        return Replicated(criterion, (), self._comm, losses)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of all stages on this rank."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of this rank's stages, with the whole network's names."""
        for module in self.stages.values():
            yield from module.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank's stages, with the whole network's names.

        Collective where state is sharded or divided by channels; the result has whole tensors.
        """
        state: dict[str, Tensor] = {}
        for stage, module in self.stages.items():
            own = self.sharded[stage].state_dict() if self.sharded else None
            state |= full_state(module, own)
        return state

    def first(self, microbatch: int) -> Mesh | None:
        """The mesh over which a micro-batch enters the network; None if this rank is not in it."""
        placed = self._placed.get((self._copies[microbatch], 0))
        return placed.mesh if placed else None

    def last(self, microbatch: int) -> Mesh | None:
        """The mesh over which a micro-batch leaves the network; None if this rank is not in it."""
        placed = self._placed.get((self._copies[microbatch], self.placement.stages - 1))
        return placed.mesh if placed else None

    @property
    def across(self) -> list[Across]:
        """Exchanges between virtual tiles of this rank and of its peers, by stage and copy."""
        exchanges = [placed.across for placed in self._placed.values()]
        return [exchange for exchange in exchanges if exchange is not None]

    def own_outputs(self, microbatch: int, samples: int) -> range:
        """Samples of a micro-batch whose outputs this rank has; for ranks with a `last` mesh."""
        return self._placed[self._copies[microbatch], self.placement.stages - 1].own(samples)

    def train_step(
        self, microbatches: Sequence[Microbatch], step: int, scale: float = 1.0
    ) -> float:
        """Run forward and backward of all micro-batches; leave averaged gradients in the stages.

        Args:
            step: number of the optimizer step; seeds its random numbers.
            scale: loss scale of the gradients, against underflow in float16.

        Returns:
            This rank's part of the loss; the sum over all ranks is the loss of the whole batch.
        """
        for module in self.stages.values():
            start_training(module)
        self._check_samples(microbatches)
        self._scale = scale
        self.gradients.begin()
        self._context.begin(microbatches, step)
        total: Tensor | float = 0.0  # read by the host at the end only, so devices run ahead
        todo = self._todo(self._train, microbatches)
        last = {
            action.stage: number for number, action in enumerate(todo) if action.kind == "backward"
        }
        outputs: dict[int, Tensor] = {}
        criteria: Mapping[int, Criterion] | None = None
        for number, action in enumerate(self._in_turn(todo, microbatches)):
            placed = self._placed[action.copy, action.stage]
            microbatch = microbatches[action.microbatch]
            self.doing, name = action, describe(action)
            waiting.doing(name)
            with trace.span("compute", name, action):
                if action.kind == "forward":
                    with self._context.forward(placed, action.microbatch, microbatch):
                        made = placed.forward(action.microbatch, microbatch)
                        if self._batch_loss is not None:
                            outputs[action.microbatch] = made.output
                        del made  # the stage drops it after its backward
                else:
                    criteria = (
                        self._criteria(outputs, microbatches) if criteria is None else criteria
                    )
                    self.gradients.before_backward(action.stage, number == last[action.stage])
                    with self._context.slice_of(placed, action.microbatch):
                        total += self._backward(
                            placed, action.microbatch, microbatch, criteria[action.microbatch]
                        )
        if criteria is None:  # this replica has no samples
            self._criteria(outputs, microbatches)
        self.doing = None
        waiting.doing("")
        self._wait_sent()
        self.gradients.average()
        if self.placement.most_tensor_parts > 1:
            for module in self.stages.values():
                settle(module)
        self._context.fold(len(microbatches))
        # the only wait for peers if nothing before it has synchronized
        return noted("the end of the step", self._comm.world_ranks, float, total)

    @property
    def loss_parts(self) -> int:
        """Number of losses that backward sums on the last stages, of which the mean counts."""
        last = self.placement.stages - 1
        parts = self.placement.widths[last] // self.placement.tensor_parts(last)
        return self.placement.network_copies * parts

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Return outputs (n, ...) by micro-batch for this rank's samples, in full precision."""
        return {
            number: self._full_precision(made.output) for number, made in self._made(microbatches)
        }

    @torch.no_grad()
    def evaluate_tiles(
        self, microbatches: Sequence[Microbatch]
    ) -> Iterator[tuple[int, Mesh, Tensor]]:
        """Evaluate with maps returned by virtual tile, so that no map is ever whole.

        Yields:
            Micro-batch number, mesh of its output, and the output. Consume all of them.
        """
        if not self.placement.stream:
            for number, output in self.evaluate(microbatches).items():
                mesh = self.last(number)
                if mesh is not None:
                    yield number, mesh, output
            return
        for number, made in self._made(microbatches):
            for mesh, output in made.outputs():
                yield number, mesh, self._full_precision(output)

    def _full_precision(self, output: Tensor) -> Tensor:
        return output.float() if self.mixed else output

    def _made(self, microbatches: Sequence[Microbatch]) -> Iterator[tuple[int, Made]]:
        """Yield the last stage's results for each micro-batch, in evaluation mode."""
        for module in self.stages.values():
            module.eval()
        self._context.begin(microbatches)
        with ExitStack() as stack:
            for sharded in self.sharded.values():
                stack.enter_context(sharded.gathered())
            todo = self._todo(self._evaluate, microbatches)
            for action in self._in_turn(todo, microbatches):
                placed = self._placed[action.copy, action.stage]
                microbatch = microbatches[action.microbatch]
                with self._context.forward(placed, action.microbatch, microbatch):
                    made = placed.forward(action.microbatch, microbatch)
                if placed.is_last:
                    yield action.microbatch, made
            self._wait_sent()
        self._context.fold(len(microbatches))

    def _todo(self, actions: list[Action], microbatches: Sequence[Microbatch]) -> list[Action]:
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(
                f"the schedule is for {self.schedule.microbatches} micro-batches, got "
                f"{len(microbatches)}"
            )
        return [
            action
            for action in actions
            if self._placed[action.copy, action.stage].own(microbatches[action.microbatch].samples)
        ]

    def _in_turn(
        self, todo: Sequence[Action], microbatches: Sequence[Microbatch]
    ) -> Iterator[Action]:
        """Yield the actions; the receives of each are posted before the one before it runs."""
        for action, upcoming in pairwise([None, *todo, None]):
            if upcoming is not None:
                placed = self._placed[upcoming.copy, upcoming.stage]
                placed.expect(upcoming, microbatches[upcoming.microbatch].samples)
            if action is not None:
                yield action

    def _check_samples(self, microbatches: Sequence[Microbatch]) -> None:
        for number, microbatch in enumerate(microbatches):
            if self.sharded and microbatch.samples == 0:
                raise ValueError(
                    f"replica {self.replica} has no samples in micro-batch {number}, but sharded "
                    "state needs every replica in every micro-batch: take larger batches"
                )

    def _criteria(
        self, outputs: Mapping[int, Tensor], microbatches: Sequence[Microbatch]
    ) -> Mapping[int, Criterion]:
        """Criterion of each micro-batch; collective, once a step, after the forwards."""
        if self._batch_loss is None:
            return dict.fromkeys(range(len(microbatches)), self.criterion)
        return self._batch_loss.gather(outputs, microbatches, self.device)

    def _backward(
        self, placed: StageRuntime, number: int, microbatch: Microbatch, criterion: Criterion
    ) -> Tensor | float:
        """This rank's part of the loss; of a grid's ranks, which agree, only the first counts."""
        share = microbatch.share * self._part_of(placed.own(microbatch.samples), microbatch)
        weight = share * self.placement.network_copies * placed.mesh.batch * self._scale
        loss = placed.backward(number, microbatch, criterion, weight)
        return loss * share if placed.mesh.counts else 0.0

    def _part_of(self, own: range, microbatch: Microbatch) -> float | Tensor:
        """Weight of this rank's samples in a micro-batch's mean loss; stays on its device."""
        target = microbatch.target
        if len(own) == microbatch.samples or target is None or self.options.sample_weights is None:
            return len(own) / microbatch.samples
        weights = self.options.sample_weights(target)
        if weights is None:
            return len(own) / microbatch.samples
        weights = weights.double()  # a quotient of integers would be float32
        total = weights.sum()
        part = weights[own.start : own.stop].sum() / total.where(total > 0, 1.0)
        return float(part) if part.is_cpu else part

    def _wait_sent(self) -> None:
        for placed in self._placed.values():
            placed.wait_sent()
