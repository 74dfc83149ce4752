"""Survival of patients: a hazard for each of some intervals of time.

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
    """What is alike of losses on times of events.

    Attributes:
        bins: numbers that the network is to give for a sample.
        given: the setting, and what the numbers are, for messages.
    """

    name = "survival"
    mixup = 0.0
    bins: int
    given: tuple[str, str]

    def check_output(self, output: Tensor, target: Tensor) -> None:
        """Refuse what is no (N, bins)."""
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != (len(target), self.bins):
            raise ValueError(
                f"the network gives {shape} for {len(target)} slides: of {self.given[0]} it must "
                f"give ({len(target)}, {self.bins}), {self.given[1]}; leave model.num_classes out"
            )

    def weights(self, target: Tensor) -> Tensor | None:
        """None: no sample counts more than another."""
        return None

    def predictions(self, outputs: Tensor) -> Tensor:
        """(N, 1) or (N, 1 + bins): see `survival_of`."""
        return survival_of(outputs)

    def scores(self, predictions: Tensor, labels: Tensor) -> Scores:
        """Of the risks: the concordance index."""
        return survival_scores(predictions, labels)


class Survival(Risks):
    """The likelihood of times of events, seen or not yet seen.

    Targets are (N, 2): the time of the event or of the end of watching, and 1 for an event or 0.

    Args:
        edges: float64 (bins - 1,), the times at which intervals end; the last has no end.
    """

    given = ("task=survival", "a hazard for each interval")

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges
        self.bins = len(edges) + 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the samples of the negative log-likelihood."""
        self.check_output(output, target)
        output = wide(output)
        edges = on(self.edges, target.device).to(target.dtype)
        interval = torch.bucketize(target[:, 0].contiguous(), edges, right=True).unsqueeze(1)
        happens, passes = F.logsigmoid(output), F.logsigmoid(-output)
        survived = passes.cumsum(1).gather(1, interval)
        event = survived - passes.gather(1, interval) + happens.gather(1, interval)
        seen = target[:, 1:].to(output.dtype)
        return -(seen * event + (1 - seen) * survived).mean()


def survival_of(outputs: Tensor) -> Tensor:
    """(N, 1 + bins): the risk, and the probability to survive each interval.

    The risk is less the sum of these probabilities, the larger the earlier events are expected. A
    single output is the risk itself, see `tasks.cox`.
    """
    if outputs.shape[1] == 1:
        return outputs
    survived = F.logsigmoid(-outputs).cumsum(1).exp()
    return torch.cat([-survived.sum(1, keepdim=True), survived], 1)


def survival_columns(bins: int) -> list[str]:
    """Names of what `survival_of` gives."""
    return ["risk", *(f"survival_{number}" for number in range(1, bins + 1))]


def survival_scores(predictions: Tensor, labels: Tensor) -> Scores:
    """The concordance index of what `survival_of` gives, with times and events (N, 2)."""
    return {"c_index": concordance(predictions[:, 0], labels[:, 0], labels[:, 1])}


def survival_edges(train: ImageSource, bins: int) -> Tensor:
    """float64 (bins - 1,): times between which equally many events of the training samples lie.

    Raises:
        ValueError: there are too few events.
    """
    labels = torch.from_numpy(train.labels).double()
    times = labels[labels[:, 1] == 1, 0]
    shares = torch.arange(1, bins, dtype=torch.float64) / bins
    edges = torch.quantile(times, shares) if len(times) else times
    if bins < 2 or len(set(edges.tolist())) < bins - 1:
        raise ValueError(
            f"{len(times)} events at {len(set(times.tolist()))} different times cannot be divided "
            f"into {bins} intervals: set data.num_classes to at least 2, and to no more than there "
            "are different times of events"
        )
    return edges
