from __future__ import annotations

import pytest
from torch import nn

from spatialdl.models import resnet18, unet
from spatialdl.planning.layers import layers_of


def test_a_chain_has_its_layers_and_blocks():
    layers, recording = layers_of(resnet18(num_classes=3, width=4), (3, 64, 64))
    assert [path for path, _ in layers][3:6] == ["maxpool", "layer1.0", "layer1.1"]
    assert len(recording.steps) == len(layers)


@pytest.mark.parametrize("model", [unet(width=2, depth=2), nn.Bilinear(2, 2, 2)])
def test_any_other_network_is_one_layer(model):
    assert layers_of(model, (3, 32, 32)) == ([("", model)], None)
