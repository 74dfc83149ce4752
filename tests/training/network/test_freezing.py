from __future__ import annotations

import pytest

from spatialdl.models import resnet18
from spatialdl.training.network.building import freeze


def frozen(*patterns: str) -> set[str]:
    model = resnet18(3, width=2)
    freeze(model, patterns)
    return {name for name, one in model.named_parameters() if not one.requires_grad}


def test_patterns_choose_parameters_by_name():
    assert frozen() == set()
    assert frozen("conv1.*") == {"conv1.weight"}
    assert frozen("fc.bias", "bn1.*") == {"fc.bias", "bn1.weight", "bn1.bias"}
    layer = {name for name, _ in resnet18(width=1).named_parameters() if "layer1." in name}
    assert frozen("layer1.*") == layer
    assert len(frozen("layer[1-3].*", "*.bias")) > len(layer)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no parameter matches layer1; did you mean layer\d"):
        frozen("conv1.*", "layer1")
    with pytest.raises(ValueError, match=r"no parameter matches fc.wieght; .*fc.weight"):
        frozen("fc.wieght")


def test_something_must_be_left_to_train():
    with pytest.raises(ValueError, match=r"freezes all \d+ parameters: nothing is left"):
        frozen("*")
