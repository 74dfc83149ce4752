"""Cuts networks into stages, and runs them by schedules.

Every layout is a pipeline: one stage on one rank is ordinary training, one stage on a grid spatial
parallelism, several replicas data parallelism, a second copy of the network in reverse order GEMS.
A schedule is a list of actions for each group of ranks, and one runtime executes any. Three stages
and four micro-batches by 1F1B::

    stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3    F forward, B backward of a micro-batch;
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3          between stages a hand-over: a repartition
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3             of activations, in backward its adjoint

In the order in which to read:

1. `recording.py`, `recorder.py`, `steps.py`: the forward of a network as a list of calls.
2. `partition.py`, `stage.py`: the list cut into stages of equal cost, each a module.
3. `shapes.py`, `handovers.py`: what passes between stages, computed without data, and sent.
4. `schedule.py`, `simulate.py`: lists of actions, and their time, bubbles and memory.
5. `runtime.py`, `stage_runtime.py`, `own_tile.py`: the schedule, a stage of it, a tile of that;
   `virtual_tiles.py` runs a stage in tiles that take turns.
6. `step_context.py`, `statistics.py`, `forward_state.py`, `gradients.py`: what ranks share in a
   step, and after it; `sharded.py` for state that is divided over replicas.
7. `front.py` and `streamed.py`: `spatialdl.Pipeline` and `spatialdl.stream`, for a loop of one's
   own. `layout_checks.py`, `samples_apart.py`, `python_state.py`: what is refused.
"""
