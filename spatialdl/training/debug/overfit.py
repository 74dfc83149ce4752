"""``debug=overfit``: whether a network can learn one batch by heart.

If it cannot, more data will not help: learning rate, loss, labels or the network are wrong.
"""

from __future__ import annotations

import math

NEAR_ZERO = 0.1
"""Of the first loss; so little must be left of it."""


class Overfit:
    """What becomes of the loss of one batch.

    Attributes:
        first, last: loss of the first and of the latest step.
        lowest: of all steps.
    """

    def __init__(self) -> None:
        self.first = self.last = self.lowest = math.nan

    def note(self, loss: float) -> None:
        """One more step is done."""
        if math.isnan(self.first):
            self.first = self.lowest = loss
        self.last = loss
        self.lowest = min(self.lowest, loss)

    @property
    def can_learn(self) -> bool:
        """Whether the loss has fallen to near zero."""
        return math.isfinite(self.last) and self.last <= NEAR_ZERO * self.first

    def verdict(self, steps: int) -> str:
        """A sentence on what was seen in so many steps."""
        fell = (
            f"in {steps} steps on one batch the loss fell from {self.first:.4g} to {self.last:.4g}"
        )
        if self.can_learn:
            return f"{fell}: the network can learn"
        if not math.isfinite(self.last):
            return (
                f"after {steps} steps on one batch the loss is {self.last}: debug=detect_nan tells "
                "where that begins; lower optimizer.lr?"
            )
        if self.lowest <= NEAR_ZERO * self.first:
            return (
                f"{fell}, but was {self.lowest:.4g} before: the network can learn, but not "
                "steadily; lower optimizer.lr?"
            )
        if self.last < self.first:
            return (
                f"{fell}, which is not near zero: more steps by trainer.max_steps, another "
                "optimizer.lr, less weight decay or dropout; else look at labels and network"
            )
        return (
            f"in {steps} steps on one batch the loss did not fall: it was {self.first:.4g} and is "
            f"{self.last:.4g}; change optimizer.lr, look at the labels, and whether weights get "
            "gradients"
        )
