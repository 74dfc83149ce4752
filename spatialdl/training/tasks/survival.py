"""Survival of patients: discrete-time hazards per time interval.

Discrete-time likelihood with censored times: Zadeh and Schmid, "Bias in Cross-Entropy-Based
Training of Deep Survival Networks", TPAMI 2020 (https://doi.org/10.1109/TPAMI.2020.2979450), as
Chen et al., "Multimodal Co-Attention Transformer for Survival Prediction in Gigapixel Whole Slide
Images", ICCV 2021, use it for slides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.data.image_source import ImageSource
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.constants import on
from spatialdl.training.tasks.concordance import concordance
from spatialdl.training.tasks.metrics import Scores


class Risks:
    """Base class of survival tasks.

    Attributes:
        bins: columns of the network's output.
        meaning: setting and meaning of the output, for messages.
    """

    name = "survival"
    mixup = 0.0
    bins: int
    meaning: tuple[str, str]

    def check_output(self, output: Tensor, target: Tensor) -> None:
        """Check that an output is (N, bins)."""
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != (len(target), self.bins):
            raise ValueError(
                f"the network returns {shape} for {len(target)} slides, but {self.meaning[0]} "
                f"needs ({len(target)}, {self.bins}), {self.meaning[1]}; leave model.num_classes "
                "out"
            )

    def weights(self, target: Tensor) -> Tensor | None:
        """None, since all samples have equal weight."""
        return None

    def predictions(self, outputs: Tensor) -> Tensor:
        """Risk and survival, (N, 1) or (N, 1 + bins), see `survival_of`."""
        return survival_of(outputs)

    def scores(self, predictions: Tensor, labels: Tensor) -> Scores:
        """Concordance index of the risks."""
        return survival_scores(predictions, labels)


class Survival(Risks):
    """Discrete-time likelihood of observed and censored events.

    Targets are (N, 2): the time of the event or of censoring, and 1 for an event, else 0.

    Args:
        edges: float64 (bins - 1,), end times of the intervals; the last one is unbounded.
    """

    meaning = ("task=survival", "one hazard per interval")

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges
        self.bins = len(edges) + 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over samples."""
        self.check_output(output, target)
        output = wide(output)
        edges = on(self.edges, target.device).to(target.dtype)
        interval = torch.bucketize(target[:, 0].contiguous(), edges, right=True).unsqueeze(1)
        log_hazard, log_survival = F.logsigmoid(output), F.logsigmoid(-output)
        survived = log_survival.cumsum(1).gather(1, interval)
        event = survived - log_survival.gather(1, interval) + log_hazard.gather(1, interval)
        observed = target[:, 1:].to(output.dtype)
        return -(observed * event + (1 - observed) * survived).mean()


def survival_of(outputs: Tensor) -> Tensor:
    """Risk and survival probability of each interval, (N, 1 + bins).

    The risk is the negative sum of these probabilities, larger for earlier expected events. A
    single output is the risk itself, see `tasks.cox`.
    """
    if outputs.shape[1] == 1:
        return outputs
    survived = F.logsigmoid(-outputs).cumsum(1).exp()
    return torch.cat([-survived.sum(1, keepdim=True), survived], 1)


def survival_columns(bins: int) -> list[str]:
    """Column names of `survival_of`."""
    return ["risk", *(f"survival_{number}" for number in range(1, bins + 1))]


def survival_scores(predictions: Tensor, labels: Tensor) -> Scores:
    """Concordance index of the output of `survival_of`; labels are times and events (N, 2)."""
    return {"c_index": concordance(predictions[:, 0], labels[:, 0], labels[:, 1])}


def survival_edges(train: ImageSource, bins: int) -> Tensor:
    """Interval edges with equally many training events per interval, float64 (bins - 1,).

    Raises:
        ValueError: if there are too few events.
    """
    labels = torch.from_numpy(train.labels).double()
    times = labels[labels[:, 1] == 1, 0]
    shares = torch.arange(1, bins, dtype=torch.float64) / bins
    edges = torch.quantile(times, shares) if len(times) else times
    if bins < 2 or len(set(edges.tolist())) < bins - 1:
        raise ValueError(
            f"{len(times)} events at {len(set(times.tolist()))} different times cannot be divided "
            f"into {bins} intervals: set data.num_classes to at least 2, and at most the number of "
            "different event times"
        )
    return edges
