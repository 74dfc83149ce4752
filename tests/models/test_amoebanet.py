from __future__ import annotations

import pytest
import torch

from spatialdl.models import amoebanet_d
from spatialdl.pipeline.recording import Forward


@pytest.mark.parametrize(
    ("layers", "filters", "millions"), [(18, 208, 82), (18, 416, 318), (18, 544, 542)]
)
def test_it_has_the_parameters_that_were_published(layers, filters, millions):
    """Huang et al. 2019 (GPipe), table 1."""
    with torch.device("meta"):
        model = amoebanet_d(1000, 3, layers, filters)
    found = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert found == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("size", [(64, 64), (65, 33), (97, 71), (1, 1)])
def test_images_of_any_size_lead_to_classes(size):
    model = amoebanet_d(num_classes=4, in_channels=2, layers=3, filters=16).eval()
    x = torch.randn(2, 2, *size)
    y, before = model[:3](x)
    assert y.shape[-2:] == tuple(-(-n // 8) for n in size)
    assert before.shape[-2:] == tuple(-(-n // 4) for n in size)
    assert model(x).shape == (2, 4)


def test_every_weight_learns():
    model = amoebanet_d(num_classes=4, layers=3, filters=16)
    model(torch.randn(3, 3, 64, 64)).square().sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert unused == []


def test_it_can_be_cut_before_every_cell():
    steps = Forward(amoebanet_d(layers=3, filters=16), (3, 64, 64)).of(2, training=True).steps
    names = [step.call for step in steps]
    assert names[:4] == ["stem.conv", "stem.norm", "stem_reduction1", "stem_reduction2"]
    assert names[4:] == [
        *("group1_cell1", "reduction1", "group2_cell1", "reduction2", "group3_cell1", "head")
    ]


@pytest.mark.parametrize("wrong", [{"layers": 4}, {"layers": 0}, {"filters": 24}, {"filters": 0}])
def test_what_cannot_be_shared_out_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong.values()))}"):
        amoebanet_d(**wrong)
