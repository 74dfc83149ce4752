"""Which number of call it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from spatialdl.random import keyed, scope


def test_a_scope_does_not_depend_on_what_ran_before() -> None:
    with keyed(0, 0):
        with scope("a"):
            first = torch.rand(5)
        torch.rand(5)
        with scope("b"):
            other = torch.rand(5)
    with keyed(0, 0), scope("b"):
        assert torch.equal(torch.rand(5), other)
    assert not torch.equal(first, other)
    with scope("a"):  # outside of a key it does nothing
        assert torch.rand(5).shape == (5,)


def test_a_rank_with_some_samples_draws_what_one_process_draws_for_them() -> None:
    x, noise = torch.ones(5, 3, 4), nn.Dropout(0.5)

    def drawn(own: range | None) -> list[torch.Tensor]:
        part = x if own is None else x[own.start : own.stop]
        with keyed(1, 2, 3, own), scope("layer"):
            masks = [noise(part), F.dropout1d(part), torch.rand(7)]  # the last of no sample
            return [*masks, torch.rand(len(part), 2)]

    whole, some = drawn(None), drawn(range(2, 5))
    for one, part in zip(whole, some, strict=True):
        assert torch.equal(part, one[-3:] if len(one) == 5 else one)
