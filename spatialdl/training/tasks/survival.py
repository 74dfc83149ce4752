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
from spatialdl.pipeline.options import Width
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.constants import on
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


# --- Harrell's concordance index


def concordance(risks: Tensor, times: Tensor, events: Tensor) -> float | None:
    """Share of the comparable pairs that the risks order correctly.

    An event precedes all later times and censored samples at the same time. Equal risks count
    half, NaN risks count as wrong.

    Args:
        risks: (N,), larger for earlier expected events.
        times: (N,), NaN for padding.
        events: (N,), 1 for an event at that time, 0 for a censored sample.

    Returns:
        The index, 0 to 1; None without comparable pairs.
    """
    there = ~times.isnan()
    risks, times, events = risks[there], times[there], events[there]
    is_event = events == 1
    # a pair of an event and a sample of a larger place is comparable
    place = _ranks(2 * _ranks(times) + ~is_event)
    pairs = _behind(place, is_event)
    if not pairs:
        return None
    seen = ~risks.isnan()
    rank, place, is_event = _ranks(risks[seen]), place[seen], is_event[seen]
    by_risk_and_place = rank * (len(place) + 1) + place
    equal = _behind(by_risk_and_place, is_event, of=rank)
    # equal places are sorted by risk, so that their pairs are no inversions
    order = (place * (len(place) + 1) + rank).argsort()
    higher = _inversions(rank[order], is_event[order])
    return (higher + 0.5 * equal) / pairs


def _ranks(values: Tensor) -> Tensor:
    """Dense ranks of values, int64 (N,), from 0."""
    _, inverse = torch.unique(values, return_inverse=True)
    ranks: Tensor = inverse
    return ranks


def _behind(keys: Tensor, chosen: Tensor, of: Tensor | None = None) -> int:
    """Count pairs of a chosen sample and one with a larger key, within a group of `of` if set.

    Args:
        keys: (N,), keys.
        chosen: (N,), mask of the chosen samples.
        of: (N,), groups; keys of a later group are larger.
    """
    ordered = keys.sort().values
    end = torch.searchsorted(ordered, keys[chosen], right=True)
    last = torch.full_like(end, len(keys))
    if of is not None:
        last = torch.searchsorted(of.sort().values, of[chosen], right=True)
    return int((last - end).sum())


def _inversions(ranks: Tensor, chosen: Tensor) -> int:
    """Count pairs of a chosen sample and a later one of lower rank.

    A pair is counted at the highest bit in which its ranks differ. There both are in one group of
    equal higher bits, in which samples keep their order.
    """
    total = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for bit in reversed(range(len(ranks).bit_length())):
        is_high = (ranks >> bit) & 1
        before = (is_high * chosen).cumsum(0)
        groups = ranks >> (bit + 1)
        first = torch.searchsorted(groups, groups)
        of_earlier_groups = torch.where(first > 0, before[(first - 1).clamp(min=0)], 0)
        total += ((before - of_earlier_groups) * (1 - is_high)).sum()
        order = (ranks >> bit).argsort(stable=True)
        ranks, chosen = ranks[order], chosen[order]
    return int(total)


# --- Cox's partial likelihood


class Cox(Risks):
    """Cox partial likelihood of the events in a batch.

    Targets are (N, 2): the time of the event or of censoring, and 1 for an event, else 0.
    """

    bins = 1
    meaning = ("task.loss=cox", "a risk")
    batch_loss = Width(output=1, target=2)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Negative log-likelihood per event; 0 without events. NaN samples are padding."""
        self.check_output(output, target)
        return partial_likelihood(wide(output)[:, 0], target[:, 0], target[:, 1])


def partial_likelihood(risks: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Negative log partial likelihood of Cox, divided by the number of events.

    Args:
        risks: (N,), log hazard ratios.
        times: (N,), NaN for padding.
        events: (N,), 1 for an event at that time, 0 for a censored sample.
    """
    # padding is sorted first, where it is never in a risk set
    times, order = times.nan_to_num(nan=-torch.inf).sort(stable=True)
    risks, events = risks[order], events.nan_to_num(nan=0.0)[order].to(risks.dtype)
    first = torch.searchsorted(times, times)  # first sample with the same time
    at_risk = risks.flip(0).logcumsumexp(0).flip(0)[first]  # risk set from that time on
    zeros = torch.zeros_like(events)
    tied = zeros.index_add(0, first, events)[first]
    share = zeros.index_add(0, first, events * (risks - at_risk).exp())[first]
    before = events.cumsum(0) - events
    passed = (before - before[first]) / tied.clamp(min=1)  # share of tied events before it
    likelihoods = risks - at_risk - torch.log1p(-events * passed * share)
    return -(events * likelihoods).sum() / events.sum().clamp(min=1)


def check_order(train: ImageSource) -> None:
    """Check that the training samples have comparable pairs.

    Raises:
        ValueError: if no sample is observed after an event.
    """
    labels = torch.from_numpy(train.labels)
    times = labels[labels[:, 1] == 1, 0]
    if not len(times) or len(labels) < 2 or bool(times.min() >= labels[:, 0].max()):
        raise ValueError(
            f"{len(times)} events among {len(labels)} training slides, but task.loss=cox needs "
            "events before the last observed time"
        )
