"""``debug=overfit``: check whether a network can memorise one batch.

If it cannot, more data does not help: learning rate, loss, labels or network are wrong.
"""

from __future__ import annotations

import math

NEAR_ZERO = 0.1
"""Share of the first loss below which the network has learnt the batch."""


class Overfit:
    """Loss of one batch over the steps.

    Attributes:
        first: loss of the first step.
        last: loss of the latest step.
        lowest: lowest loss so far.
    """

    def __init__(self) -> None:
        self.first = self.last = self.lowest = math.nan

    def note(self, loss: float) -> None:
        """Record the loss of a step."""
        if math.isnan(self.first):
            self.first = self.lowest = loss
        self.last = loss
        self.lowest = min(self.lowest, loss)

    @property
    def can_learn(self) -> bool:
        """Whether the loss has fallen to near zero."""
        return math.isfinite(self.last) and self.last <= NEAR_ZERO * self.first

    def verdict(self, steps: int) -> str:
        """Verdict after `steps` steps, with advice, as one sentence."""
        fell = (
            f"in {steps} steps on one batch the loss fell from {self.first:.4g} to {self.last:.4g}"
        )
        if self.can_learn:
            return f"{fell}: the network can learn"
        if not math.isfinite(self.last):
            return (
                f"after {steps} steps on one batch the loss is {self.last}: find the origin with "
                "debug=detect_nan, or try a lower optimizer.lr"
            )
        if self.lowest <= NEAR_ZERO * self.first:
            return (
                f"{fell}, but was {self.lowest:.4g} before: the network can learn, but training is "
                "unstable; try a lower optimizer.lr"
            )
        if self.last < self.first:
            return (
                f"{fell}, which is not near zero: try more trainer.max_steps, another "
                "optimizer.lr, less weight decay or dropout; otherwise check labels and network"
            )
        return (
            f"in {steps} steps on one batch the loss did not fall: it was {self.first:.4g} and is "
            f"{self.last:.4g}; change optimizer.lr, and check the labels and whether weights get "
            "gradients"
        )
