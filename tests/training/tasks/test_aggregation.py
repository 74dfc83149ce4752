from __future__ import annotations

import torch

from spatialdl.training.tasks.aggregation import to_slides

NAN = torch.nan


def test_tiles_become_slides():
    told = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.45, 0.55]], dtype=torch.float64)
    found = to_slides(told, torch.tensor([1, 0, 1, 0]), ["b", "a", "b", "a"])
    assert found.slides == ["b", "a"]
    assert found.tiles.tolist() == [2, 2]
    torch.testing.assert_close(found.means, torch.stack([told[::2].mean(0), told[1::2].mean(0)]))
    assert found.labels.tolist() == [1, 0]
    assert found.agree.tolist() == [True, True]


def test_most_tiles_win_and_of_equally_many_the_larger_mean():
    told = torch.tensor([[0.4, 0.6]] * 2 + [[1.0, 0.0]] + [[0.9, 0.1], [0.3, 0.7]]).double()
    found = to_slides(told, torch.zeros(5).long(), ["a", "a", "a", "tie", "tie"])
    assert found.votes.tolist() == [1, 0]
    assert found.means.argmax(1).tolist() == [0, 0]  # not what the vote of the first says


def test_slides_whose_tiles_have_several_labels_are_marked():
    told = torch.rand(5, 2, dtype=torch.float64)
    found = to_slides(told, torch.tensor([0, 1, 1, 1, 0]), ["a", "a", "b", "b", "c"])
    assert found.agree.tolist() == [False, True, True]
    labels = torch.tensor([[1, NAN], [1, NAN], [1, NAN], [1, 0.0]])
    assert to_slides(told[:4], labels, ["a", "a", "b", "b"]).agree.tolist() == [True, False]
