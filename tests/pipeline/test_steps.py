from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spatialdl.pipeline.steps import (
    IMAGE,
    Attribute,
    Recording,
    Step,
    Value,
    output_of,
    run_step,
)

CPU = torch.device("cpu")


def step(call, *args, gives=1, **kwargs) -> Step:
    return Step(call, args, kwargs, tuple(Value(7, part) for part in range(gives)), "")


def test_what_a_step_takes_is_found_anywhere_in_its_arguments():
    cat = step(torch.cat, [IMAGE, Value(3, 1)], dim=1, out=Attribute("norm.weight"))
    assert cat.takes == (IMAGE, Value(3, 1))
    assert cat.attributes == ("norm.weight",)
    assert (cat.name, cat.path) == ("cat", "")
    assert step("layer1.0", IMAGE).path == "layer1.0"


def test_constants_are_no_part_of_the_form():
    assert step(F.pad, IMAGE, (0, 1)).form == step(F.pad, IMAGE, (0, 2)).form
    assert step(F.pad, IMAGE, (0, 1)).form != step(F.pad, Value(0), (0, 1)).form


def test_a_step_is_carried_out_with_tensors_in_their_places():
    model = nn.Module()
    model.inner = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    values = {IMAGE: x}
    run_step(step(F.linear, IMAGE, weight=Attribute("inner.weight")), model, values, CPU)
    assert torch.equal(values[Value(7)], x @ model.inner.weight.T)
    run_step(step("inner", IMAGE), model, values, CPU)
    assert torch.equal(values[Value(7)], model.inner(x))


def test_several_results_have_a_value_each():
    values = {IMAGE: torch.arange(6.0).view(2, 3)}
    run_step(step(torch.max, IMAGE, dim=1, gives=2), nn.Module(), values, CPU)
    assert values[Value(7, 1)].tolist() == [2, 2]
    with pytest.raises(ValueError, match="zip"):
        run_step(step(torch.max, IMAGE, dim=1, gives=3), nn.Module(), values, CPU)


def test_without_gradients_where_the_network_wanted_none():
    values = {IMAGE: torch.ones(2, requires_grad=True)}
    plain = Step(torch.neg, (IMAGE,), {}, (Value(0),), "", with_grad=False)
    run_step(plain, nn.Module(), values, CPU)
    assert not values[Value(0)].requires_grad
    assert torch.is_grad_enabled()


def test_tensors_are_made_where_the_network_runs():
    made = step(torch.zeros, 3, device=torch.device("meta"))
    values: dict[Value, torch.Tensor] = {}
    run_step(made, nn.Module(), values, CPU)
    assert values[Value(7)].device == CPU


def test_the_output_has_its_own_form():
    recording = Recording(
        (), {"a": Value(0), "b": [Value(1), None]}, {}, frozenset(), frozenset(), ""
    )
    one, two = torch.ones(1), torch.ones(2)
    assert output_of(recording, {Value(0): one, Value(1): two}) == {"a": one, "b": [two, None]}
