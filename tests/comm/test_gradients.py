"""Buckets of the gradient reducer; what ranks make of them is in tests/mpi."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.comm import gradients
from spatialdl.comm.gradients import Reducer, Replicated, buckets, lane_of
from spatialdl.comm.single_process import SingleProcess

MIXED = [torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float32]


def test_buckets_hold_one_type_and_are_full_in_order():
    tensors = [torch.zeros(n, dtype=d) for n, d in zip((3, 1, 1, 2, 4), MIXED, strict=True)]
    tensors += [torch.zeros(2) for _ in range(5)]
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    portions = [[numbers[id(tensor)] for tensor in part] for part in buckets(tensors, 16)]
    assert portions == [[1, 2], [4], [0, 5], [6, 7], [8, 9], [3]], "the fifth is large, and alone"
    assert buckets([], 16) == []


def test_a_rank_with_several_copies_averages_them():
    layer = nn.Linear(2, 1)
    layer.weight.grad = torch.full((1, 2), 6.0)
    Reducer([Replicated(layer, ("data",), SingleProcess(), 2)]).reduce()
    assert torch.equal(layer.weight.grad, torch.full((1, 2), 3.0))
    assert layer.bias.grad is None


def test_the_last_parameters_are_sent_first_and_one_copy_sends_nothing(monkeypatch):
    sent = []
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    monkeypatch.setattr(
        gradients, "add_over_ranks_", lambda comm, values, name: sent.append(values.numel())
    )
    layers = [nn.Linear(2, 3), nn.Linear(5, 7)]
    for parameter in nn.ModuleList(layers).parameters():
        parameter.grad = torch.ones_like(parameter)
    copies = [Replicated(layer, ("data",), SingleProcess(), 2) for layer in layers[::-1]]
    Reducer(copies).reduce()
    assert sent == [7, 35, 3, 6]
    sent.clear()
    Reducer([Replicated(layers[0], ("data",), SingleProcess(), 1)]).reduce()
    assert sent == []


def test_a_process_by_itself_has_no_lane():
    assert lane_of(SingleProcess()) is None


def test_a_gradient_that_changes_after_it_was_sent_is_refused():
    layer = nn.Linear(2, 1)
    reducer = Reducer([Replicated(layer, ("data",), SingleProcess(), 2, lane=SingleProcess())])
    assert reducer.follow()
    assert not reducer.follow()
    layer(torch.ones(1, 2)).sum().backward()
    reducer.reduce()
    reducer.last_backward(layer)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="in several parts in one backward"):
        layer(torch.ones(1, 2)).sum().backward()
