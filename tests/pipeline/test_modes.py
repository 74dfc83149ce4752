from __future__ import annotations

from torch import nn

from spatialdl.pipeline.modes import start_training


def test_batch_norm_of_which_nothing_learns_stays_in_evaluation():
    stage = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False))
    stage.append(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    for layer in (stage[0], stage[3][0]):
        layer.requires_grad_(False)
    stage[1].bias.requires_grad_(False)  # its weight learns
    stage.eval()
    start_training(stage)
    assert [layer.training for layer in stage] == [False, True, True, True]
    assert [layer.training for layer in stage[3]] == [False, True]
