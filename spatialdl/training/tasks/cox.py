"""Survival of patients: Cox partial likelihood of the risks in a batch.

Partial likelihood: Cox, "Regression Models and Life-Tables", J. R. Stat. Soc. B 34, 1972, section 5
(https://doi.org/10.1111/j.2517-6161.1972.tb00899.x); events at the same time as in Efron, "The
Efficiency of Cox's Likelihood Function for Censored Data", J. Am. Stat. Assoc. 72, 1977, section 4
(https://doi.org/10.1080/01621459.1977.10480613).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spatialdl.data.image_source import ImageSource
from spatialdl.pipeline.batch_loss import Width
from spatialdl.spatial.autocast import wide
from spatialdl.training.tasks.survival import Risks


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
