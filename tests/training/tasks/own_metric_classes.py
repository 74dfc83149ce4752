"""Metrics as users write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanBrightness(Metric):
    """The mean probability of class 0, its largest and smallest one, by all reductions."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")
        self.add_state("count", torch.tensor(0.0), "sum")
        self.add_state("largest", torch.tensor(0.0), "max")
        self.add_state("smallest", torch.tensor(1.0), "min")
        self.add_state("tops", [], "cat")

    def update(self, predictions: Tensor, target: Tensor) -> None:
        first = predictions[:, 0]
        self.total += first.sum()
        self.count += first.numel()
        self.largest = torch.maximum(self.largest, first.max())
        self.smallest = torch.minimum(self.smallest, first.min())
        self.tops.append(first.flatten()[first.flatten() > 0.4])

    def compute(self) -> dict[str, Tensor]:
        tops = self.tops if isinstance(self.tops, Tensor) else torch.cat(self.tops)
        return {
            "mean": self.total / self.count,
            "largest": self.largest,
            "smallest": self.smallest,
            "tops": tops.sum() / max(1, len(tops)),
        }


class RunningMean(Metric):
    """A mean over samples, kept as a mean, which ranks with more samples count more in."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), "mean")

    def update(self, predictions: Tensor, target: Tensor) -> None:
        count = self.update_count
        self.mean = self.mean + (predictions[:, 0].mean() - self.mean) / count

    def compute(self) -> Tensor:
        return self.mean


class NoReduction(Metric):
    """State without a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.tensor(0.0), None)

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.last = self.last + predictions[:, 0].mean()

    def compute(self) -> Tensor:
        return self.last


class Edges(Metric):
    """Differences between neighbours, for which tiles lack theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.total += predictions[:, 0].diff(dim=-1).abs().sum()

    def compute(self) -> Tensor:
        return self.total


class Pairs(Metric):
    """Returns an unsupported value."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), "sum")

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.count += 1

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.count, self.count
