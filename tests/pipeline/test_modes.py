from __future__ import annotations

import copy

from torch import nn

from spatialdl.pipeline.modes import rest_in_training, start_training


def test_layers_that_rest_stay_in_evaluation_and_so_do_their_copies():
    stage = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    rest_in_training(stage[0])
    for one in (stage, copy.deepcopy(stage)):
        one.eval()
        start_training(one)
        assert [layer.training for layer in (one, *one, *one[1])] == [True, False, True, True, True]


def test_weights_that_do_not_learn_are_no_rest():
    """BatchNorm of which a user has frozen the weights counts on, as in PyTorch."""
    stage = nn.Sequential(nn.BatchNorm2d(2)).requires_grad_(False).eval()
    start_training(stage)
    assert stage[0].training
