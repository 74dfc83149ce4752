"""ZB-H1: 1F1B whose weight gradients come later, to fill the time in which ranks would wait.

Qi et al. 2024, "Zero bubble pipeline parallelism", section 2. Nobody but the optimizer waits for
the gradient of a weight, so a backward gives that of the stage's input only, and the weights' are
an action of their own. Three stages and four micro-batches, every action one unit of time:

    stage 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    stage 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    stage 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Gradients go back to the first stage as fast as they can, as the weights of stage s wait for s more
micro-batches. With P stages, at least P micro-batches and even costs F, B, W of a forward, a
backward and a weight action (W no larger than the others), a rank waits for (P - 1)(F + B - W)
(table 1), with 1F1B for (P - 1)(F + B + W). Activations are held of P - s micro-batches as with
1F1B, and of s + 1 what the weights wait for.
"""

from __future__ import annotations

from spatialdl.pipeline.action import Action, Lists


def zero_bubble(stages: int, microbatches: int) -> Lists:
    """The order of 1F1B, with the weights of a stage as many micro-batches late as it has before.

    Weights get their gradients in the order of the micro-batches.
    """
    return [_of_stage(stage, stages, microbatches) for stage in range(stages)]


def _of_stage(stage: int, stages: int, microbatches: int) -> list[Action]:
    ahead = min(stages - stage, microbatches)
    actions = [Action("forward", stage, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action("backward", stage, m))
        if m >= stage:
            actions.append(Action("weight", stage, m - stage))
        if ahead + m < microbatches:
            actions.append(Action("forward", stage, ahead + m))
    late = range(max(0, microbatches - stage), microbatches)
    return actions + [Action("weight", stage, m) for m in late]
