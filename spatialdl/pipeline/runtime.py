"""Running a schedule: what this rank holds of a network, micro-batch by micro-batch.

All modes of parallelism are this one runtime: one stage on one rank is ordinary training, one
stage on a grid is spatial parallelism, several replicas are data parallelism, several stages are a
pipeline, or layer parallelism if there is one micro-batch; a second copy of the network in inverse
order is GEMS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spatialdl.channels.uses import check_plan, uses_of
from spatialdl.channels.weights import divide, settle, weights_of, whole_state
from spatialdl.comm import trace, waiting
from spatialdl.comm.across import Across
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import Replicated, lane_of
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.waiting import noted
from spatialdl.comm.world import as_communicator
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Action, Schedule, describe
from spatialdl.pipeline.balance import weighing
from spatialdl.pipeline.batch_loss import BatchLoss, check_forwards_first
from spatialdl.pipeline.batch_norm import Sharing
from spatialdl.pipeline.compilable import check_compilable
from spatialdl.pipeline.compiled import check_compiler, compile_stages
from spatialdl.pipeline.gradients import Gradients
from spatialdl.pipeline.handovers import Handovers
from spatialdl.pipeline.moving import moved
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import Criterion, Made
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.samples_apart import check_samples_apart
from spatialdl.pipeline.shapes import HandoverShapes
from spatialdl.pipeline.shardable import check_shardable
from spatialdl.pipeline.simulate import actions_of
from spatialdl.pipeline.stage import SAMPLES, run_stage, start_training
from spatialdl.pipeline.stage_groups import stage_groups, stage_reducers
from spatialdl.pipeline.stage_runtime import Microbatch, StageRuntime
from spatialdl.pipeline.step_context import StepContext, are_weights_apart
from spatialdl.spatial.gather import gather_before as gather
from spatialdl.spatial.recompute import blocks_of
from spatialdl.streaming.memory import Memory

if TYPE_CHECKING:
    from mpi4py import MPI

    from spatialdl.pipeline.sharded import ShardedStage


class PipelineRuntime:
    """This rank's stages of a network that is spread over the ranks of `comm`.

    Args:
        model: the whole network, the same on every rank.
        placement: which ranks hold which stages; fits the size of `comm`.
        schedule: made for this placement.
        comm: the ranks.
        criterion: the mean loss of outputs and targets.
        image_size: global (channels, *size) of the images.
        options: how it works.

    Attributes:
        stages: by number the stages that this rank holds, their layers under their own names.
        sharded: the same ones, where state is sharded.
        divided: by the ids of parameters that are divided by channels the ranks that divide them.
        gradients: what `train_step` leaves in the stages, to be unscaled and clipped.
        doing: the action of a training step that is under way.
        memory: holds what virtual tiles need later; None without any.

    Raises:
        ValueError: if network, placement, schedule and options do not fit together.
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
            check_shardable(placement, schedule)
        if options.compiled:
            check_compilable(placement, schedule, options.recompute, options.shard_state)
            check_compiler(options.device or torch.device("cpu"))
        self.placement, self.schedule, self.criterion = placement, schedule, criterion
        self.image_size, self.mixed = image_size, options.mixed
        self.device = options.device or torch.device("cpu")
        self._scale = 1.0
        self.doing: Action | None = None
        self._comm = comm = as_communicator(comm)
        gather(model, options.gather_before)
        check_plan(model, options.tensor_plan)
        blocks = list(blocks_of(model).values()) if options.shard_state else []
        stages = self._cut(model)
        dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        to = (self.device, self.mixed) if self.mixed else None
        self._shapes = HandoverShapes(stages, placement, image_size, dtype, to)
        placed = self._place(stages)
        self._placed = {(one.position.copy, one.position.stage): one for one in placed}
        self._divide(placed)
        self._check_samples_apart(dtype)
        meshes = {one.position.stage: one.mesh for one in placed}
        holders = stage_groups(placement, meshes, comm)
        self.sharded = self._shard(blocks) if options.shard_state else {}
        self.divided = self._divided_parameters(meshes)  # of which sharding has made others
        self._train = actions_of(comm.rank, placement, schedule.train)
        self._evaluate = actions_of(comm.rank, placement, schedule.evaluate)
        apart = are_weights_apart(self._train)
        backend = None if self.sharded else options.backend
        nodes = None if self.sharded else options.nodes
        reducers = stage_reducers(holders, meshes, placement, comm, backend, nodes)
        replicated = self._replicated(meshes, reducers, apart)
        channels = {stage: mesh.tensor for stage, mesh in meshes.items()}
        self.gradients = Gradients(
            *(replicated, self.sharded, comm, self.device), channels, self.divided
        )
        units = {stage: sharded.units for stage, sharded in self.sharded.items()}
        sync, microbatches = options.sync_batchnorm, schedule.microbatches
        sharing = Sharing(placed, self.stages, holders, placement, sync, microbatches, comm, units)
        self._context = StepContext(sharing, placement, self.replica, options.seed, apart)
        self._batch_loss: BatchLoss | None = None
        if options.batch_loss is not None:
            check_forwards_first(schedule.train)
            [one] = placed
            self._batch_loss = BatchLoss(criterion, options.batch_loss, one.mesh)
        if options.compiled:  # not before all looks at it have been taken
            compile_stages(self.stages.values())
        self._copies = {
            action.microbatch: action.copy for actions in schedule.evaluate for action in actions
        }

    def _cut(self, model: nn.Module) -> list[nn.Module]:
        """All stages of the network."""
        options, placement = self.options, self.placement
        microbatches = self.schedule.microbatches
        weigh = weighing(options.balance, self._comm, self.device, microbatches)
        divided = placement.network_copies * placement.most_batch_parts > 1
        stages = cut(
            *(model, placement.widths, options.cut, self.image_size),
            *(options.recompute == "block", weigh, divided, options.compiled),
        )
        for stage in stages if len(stages) > 1 else ():
            stage.train()  # which may freeze weights
        return stages

    def _place(self, stages: list[nn.Module]) -> list[StageRuntime]:
        """Those of this rank, where they compute."""
        comm, placement = self._comm, self.placement
        learns = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
        positions = placement.positions(comm.rank)
        self.replica = positions[0].replica
        self.stages = {p.stage: moved(stages[p.stage], self.device) for p in sorted(positions)}
        borders = list(self._shapes.borders)
        handovers = Handovers(placement, self.schedule, comm, borders, self.device)
        again = self.options.recompute == "stage"
        self.memory = (self.options.memory or Memory()) if placement.stream else None
        return [
            StageRuntime(
                *(self.stages[p.stage], placement, p, comm, handovers, learns, again, self.mixed),
                self.memory,
            )
            for p in positions
        ]

    def _divide(self, placed: list[StageRuntime]) -> None:
        """Leave this rank its part of the weights of stages that divide channels."""
        if self.placement.most_tensor_parts == 1:
            return
        arriving = self._shapes.arriving(SAMPLES)
        for stage, mesh in {one.position.stage: one.mesh for one in placed}.items():
            if mesh.tensor > 1:
                module = self.stages[stage]
                run = partial(run_stage, values=arriving[stage], samples=SAMPLES)
                uses = uses_of(module, mesh.tensor_comm, run, self.options.tensor_plan)
                divide(module, uses, mesh.tensor_comm)

    def _divided_parameters(self, meshes: Mapping[int, Mesh]) -> dict[int, Communicator]:
        return {
            id(parameter): meshes[stage].tensor_comm
            for stage, module in self.stages.items()
            for weights in (weights_of(module),)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name in weights
        }

    def _check_samples_apart(self, dtype: torch.dtype) -> None:
        """Where ranks have some samples of a micro-batch each, or BatchNorm sees those of all."""
        local = self.placement.most_batch_parts
        over = self.options.sync_batchnorm and self.placement.data > 1
        if local == 1 and not over:
            return
        stages = [one for _, one in sorted(self._placed.items()) if over or one.mesh.batch > 1]
        reason = (
            f"parallel.sync_batchnorm=true lets BatchNorm see the samples of {self.placement.data} "
            "replicas as those of one batch"
            if over
            else f"parallel.local_dp={local} divides the samples of a micro-batch over ranks"
        )
        to = dtype, self.device, self.mixed
        check_samples_apart(stages, self._shapes, self.image_size, *to, self._comm, reason)

    def _shard(self, blocks: list[nn.Module]) -> dict[int, ShardedStage]:
        from spatialdl.comm.groups import backend_of, start
        from spatialdl.pipeline.sharded import ShardedStage

        backend = self.options.backend or backend_of(self._comm, self.device)
        start(backend)
        found = {}
        for placed in self._placed.values():
            _, stage, part, _, tensor = placed.position
            replicas = range(self.placement.data)
            ranks = [self.placement.ranks(stage, n, tensor=tensor)[part] for n in replicas]
            module, mesh = self.stages[stage], placed.mesh
            found[stage] = ShardedStage(module, blocks, mesh, ranks, backend, self.device)
        return found

    def _replicated(
        self, meshes: Mapping[int, Mesh], reducers: Mapping[int, Communicator], apart: bool
    ) -> dict[int, Replicated]:
        """This rank's stages; ranks that share several ask for these in one order."""
        found = {}
        for stage, comm in sorted(reducers.items()):
            one = meshes[stage].replicated(self.stages[stage], bool(self.sharded))
            if not self.sharded:
                # weights whose gradients wait for weight actions must not have hooks
                lane = None if apart else lane_of(comm)
                copies = one.copies * self.placement.copies
                one = replace(one, comm=comm, copies=copies, lane=lane)
            found[stage] = one
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all stages that this rank holds."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all stages that this rank holds, under the names of the whole network."""
        for module in self.stages.values():
            yield from module.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """Of all stages that this rank holds, under the names of the whole network.

        All ranks must call it where state is sharded, or divided by channels: they get whole
        tensors.
        """
        found: dict[str, Tensor] = {}
        for stage, module in self.stages.items():
            own = self.sharded[stage].state_dict() if self.sharded else None
            found |= whole_state(module, own)
        return found

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
        """What virtual tiles of this rank exchange with those of others, by stage and copy."""
        found = [placed.across for placed in self._placed.values()]
        return [one for one in found if one is not None]

    def own_outputs(self, microbatch: int, samples: int) -> range:
        """The samples of a micro-batch whose outputs leave from this rank; it has a `last`."""
        return self._placed[self._copies[microbatch], self.placement.stages - 1].own(samples)

    def train_step(
        self, microbatches: Sequence[Microbatch], step: int, scale: float = 1.0
    ) -> float:
        """Forward and backward of all micro-batches; averaged gradients are left in the stages.

        Args:
            step: number of the optimizer step; each draws random numbers of its own.
            scale: of the gradients that are left, so that small ones do not vanish in float16.

        Returns:
            This rank's part of the loss; over all ranks it adds up to that of the whole batch.
        """
        for module in self.stages.values():
            start_training(module)
            module.zero_grad()
        self._check_samples(microbatches)
        self._scale = scale
        self.gradients.begin()
        self._context.begin(microbatches, step)
        total: Tensor | float = 0.0  # the host waits for it in the end only
        todo = self._todo(self._train, microbatches)
        coming = self._given(todo, microbatches)
        last = {one.stage: number for number, one in enumerate(todo) if one.kind == "backward"}
        outputs: dict[int, Tensor] = {}
        criteria: Mapping[int, Criterion] | None = None
        for number, action in enumerate(todo):
            placed = self._placed[action.copy, action.stage]
            microbatch = microbatches[action.microbatch]
            self._expect(action, coming, microbatches)
            self.doing, name = action, describe(action)
            waiting.doing(name)
            with trace.span("compute", name, action):
                if action.kind == "forward":
                    with self._context.forward(placed, action.microbatch, microbatch):
                        if self._batch_loss is None:  # and nobody holds the output here
                            self._run(placed, action.microbatch, microbatch)
                        else:
                            outputs[action.microbatch] = self._run(
                                placed, action.microbatch, microbatch
                            ).output
                elif action.kind == "backward":
                    criteria = (
                        self._criteria(outputs, microbatches) if criteria is None else criteria
                    )
                    self.gradients.before_backward(action.stage, number == last[action.stage])
                    with self._context.backward(placed, action):
                        total += self._backward(
                            placed, action.microbatch, microbatch, criteria[action.microbatch]
                        )
                else:
                    self._context.add_weights(action)
        if criteria is None:  # this replica has no samples
            self._criteria(outputs, microbatches)
        self.doing = None
        waiting.doing("")
        self._wait_sent()
        self.gradients.average()
        self._context.end(len(microbatches))
        if self.placement.most_tensor_parts > 1:
            for module in self.stages.values():
                settle(module)
        # where nothing else has waited for the other ranks, this does
        return noted("the end of the step", self._comm.world_ranks, float, total)

    @property
    def loss_parts(self) -> int:
        """How many losses backward adds up on the last stages, of which the mean counts."""
        last = self.placement.stages - 1
        parts = self.placement.widths[last] // self.placement.tensor_parts(last)
        return self.placement.network_copies * parts

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Outputs (n, ...) by micro-batch: of the samples that leave from this rank, never half."""
        return {number: self._never_half(made.output) for number, made in self._made(microbatches)}

    @torch.no_grad()
    def evaluate_tiles(
        self, microbatches: Sequence[Microbatch]
    ) -> Iterator[tuple[int, Mesh, Tensor]]:
        """The same, but maps virtual tile by virtual tile, so that none is ever whole.

        Returns:
            The number of the micro-batch, the mesh over which its output leaves, and that. All of
            them must be taken.
        """
        if not self.placement.stream:
            for number, output in self.evaluate(microbatches).items():
                mesh = self.last(number)
                if mesh is not None:
                    yield number, mesh, output
            return
        for number, made in self._made(microbatches):
            for mesh, output in made.outputs():
                yield number, mesh, self._never_half(output)

    def _never_half(self, output: Tensor) -> Tensor:
        return output.float() if self.mixed else output

    def _made(self, microbatches: Sequence[Microbatch]) -> Iterator[tuple[int, Made]]:
        """What the last stage makes of each micro-batch, in evaluation."""
        for module in self.stages.values():
            module.eval()
        with ExitStack() as stack:
            for sharded in self.sharded.values():
                stack.enter_context(sharded.gathered())
            todo = self._todo(self._evaluate, microbatches)
            coming = self._given(todo, microbatches)
            for action in todo:
                placed = self._placed[action.copy, action.stage]
                self._expect(action, coming, microbatches)
                made = self._run(placed, action.microbatch, microbatches[action.microbatch])
                if placed.is_last:
                    yield action.microbatch, made
            self._wait_sent()

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

    def _given(self, todo: Sequence[Action], microbatches: Sequence[Microbatch]) -> deque[Action]:
        """The actions that need what others give; the first one is expected."""
        coming = deque(action for action in todo if action.kind != "weight")
        self._expect_next(coming, microbatches)
        return coming

    def _expect(
        self, action: Action, coming: deque[Action], microbatches: Sequence[Microbatch]
    ) -> None:
        """While an action runs, what the next one needs may already arrive."""
        if action.kind != "weight":
            coming.popleft()
            self._expect_next(coming, microbatches)

    def _expect_next(self, coming: deque[Action], microbatches: Sequence[Microbatch]) -> None:
        if coming:
            following = coming[0]
            shapes = self._shapes.of(microbatches[following.microbatch].samples)
            self._placed[following.copy, following.stage].expect(following, shapes, self.device)

    def _check_samples(self, microbatches: Sequence[Microbatch]) -> None:
        for number, microbatch in enumerate(microbatches):
            if self.sharded and microbatch.samples == 0:
                raise ValueError(
                    f"replica {self.replica} has no samples in micro-batch {number}, but sharded "
                    "state needs every replica in every micro-batch: take larger batches"
                )

    def _run(self, placed: StageRuntime, number: int, microbatch: Microbatch) -> Made:
        shapes = self._shapes.of(microbatch.samples)
        size = microbatch.size or self.image_size[1:]
        return placed.forward(number, microbatch, shapes, size, self.device)

    def _criteria(
        self, outputs: Mapping[int, Tensor], microbatches: Sequence[Microbatch]
    ) -> Mapping[int, Criterion]:
        """By micro-batch; all ranks ask for it once a step, when the forwards are done."""
        if self._batch_loss is None:
            return dict.fromkeys(range(len(microbatches)), self.criterion)
        return self._batch_loss.gather(outputs, microbatches, self.device)

    def _backward(
        self, placed: StageRuntime, number: int, microbatch: Microbatch, criterion: Criterion
    ) -> Tensor | float:
        """This rank's part of the loss; the ranks of a grid agree on it, the first one counts."""
        shapes = self._shapes.of(microbatch.samples)
        share = microbatch.share * self._part_of(placed.own(microbatch.samples), microbatch)
        weight = share * self.placement.network_copies * placed.mesh.batch * self._scale
        loss = placed.backward(number, microbatch, shapes, criterion, weight, self.device)
        return loss * share if placed.mesh.counts else 0.0

    def _part_of(self, own: range, microbatch: Microbatch) -> float | Tensor:
        """What some of its samples count in the mean loss of a micro-batch; stays on a device."""
        target = microbatch.target
        if len(own) == microbatch.samples or target is None or self.options.sample_weights is None:
            return len(own) / microbatch.samples
        weights = self.options.sample_weights(target)
        if weights is None:
            return len(own) / microbatch.samples
        weights = weights.double()  # a quotient of whole numbers would be float32
        total = weights.sum()
        part = weights[own.start : own.stop].sum() / total.where(total > 0, 1.0)
        return float(part) if part.is_cpu else part

    def _wait_sent(self) -> None:
        for placed in self._placed.values():
            placed.wait_sent()
