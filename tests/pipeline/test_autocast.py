from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.autocast import autocast
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import HandoverShapes
from spatialdl.pipeline.stage import run_stage
from spatialdl.pipeline.steps import IMAGE
from spatialdl.spatial.meta import meta_copy

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Tensors of several types meet: what passes a border is of each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pad = nn.ReflectionPad2d(1)
        self.end = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        half = self.conv(x)
        wide = self.pad(half)
        exact = x[:, :1].double()
        counts = (half > 0).sum((2, 3))
        y = self.norm(half) + wide[..., 1:-1, 1:-1] * exact.float() + counts[..., None, None]
        return self.end(y.mean((2, 3)))


def stages(model: nn.Module, names: list[str]) -> list[nn.Module]:
    return cut(model, (1,) * (len(names) + 1), names, (3, 9, 7), False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_at_borders_are_those_of_a_real_run(dtype):
    parts = stages(Mixed(), ["norm", "end"])
    placement = Placement(1, ((1, 1),) * 3)
    shapes = HandoverShapes(parts, placement, (3, 9, 7), torch.float32, (CPU, dtype))
    passing = shapes.of(2)
    values = {IMAGE: torch.randn(2, 3, 9, 7)}
    with autocast(CPU, dtype), torch.no_grad():
        for part in parts[:-1]:
            values |= run_stage(part.eval(), values, 2)
    expected = {
        border: [values[value].dtype for value in given] for border, given in passing.items()
    }
    found = {border: [part.dtype for part in given.values()] for border, given in passing.items()}
    assert found == expected
    types = {one for given in found.values() for one in given}
    assert {dtype, torch.float32} <= types, "the network has borders of several types"


def test_without_autocast_types_are_those_of_the_operations():
    parts = stages(Mixed(), ["norm", "end"])
    passing = HandoverShapes(parts, Placement(1, ((1, 1),) * 3), (3, 9, 7), torch.float32).of(2)
    types = {part.dtype for given in passing.values() for part in given.values()}
    assert torch.bfloat16 not in types


def test_one_stage_is_not_looked_at():
    class Strange(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("nobody may run this")

    shapes = HandoverShapes(
        [Strange()], Placement(1, ((1, 1),)), (3, 9, 7), torch.float32, (CPU, torch.bfloat16)
    )
    assert shapes.of(2) == {}


def test_the_parameters_stay_where_they_are():
    parts = stages(Mixed(), ["norm", "end"])
    before = [parameter.clone() for part in parts for parameter in part.parameters()]
    HandoverShapes(
        parts, Placement(1, ((1, 1),) * 3), (3, 9, 7), torch.float32, (CPU, torch.bfloat16)
    ).of(2)
    after = [parameter for part in parts for parameter in part.parameters()]
    assert all(map(torch.equal, before, after))
    assert all(type(parameter) is nn.Parameter for parameter in after)


def test_a_stage_that_cannot_be_tried_is_named(monkeypatch):
    from spatialdl.pipeline import autocast as module

    parts = [meta_copy(part) for part in stages(Mixed(), ["norm", "end"])]
    parts[1].get_submodule("norm").weight = nn.Parameter(torch.ones(5, device="meta"))
    image = torch.empty(2, 3, 9, 7, device="meta")
    with pytest.raises(
        ValueError, match=r"the dtypes of the outputs of stage 1 .*precision=float32"
    ):
        module.value_types(parts, image, CPU, torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: autocast there has a list")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_at_borders_are_those_of_a_real_run_on_a_gpu(dtype):
    gpu = torch.device("cuda", 0)
    parts = [part.to(gpu) for part in stages(Mixed(), ["norm", "end"])]
    shapes = HandoverShapes(
        parts, Placement(1, ((1, 1),) * 3), (3, 9, 7), torch.float32, (gpu, dtype)
    )
    values = {IMAGE: torch.randn(2, 3, 9, 7, device=gpu)}
    with autocast(gpu, dtype), torch.no_grad():
        for part in parts[:-1]:
            values |= run_stage(part.eval(), values, 2)
    for given in shapes.of(2).values():
        assert all(part.dtype == values[value].dtype for value, part in given.items())
