from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.tasks.mixup import mixed


def slices(*samples: int) -> list[Microbatch]:
    draw = torch.Generator().manual_seed(0)
    return [
        Microbatch(n, 0.5, torch.randn(n, 3, 4, 4, generator=draw), torch.arange(n) % 3)
        for n in samples
    ]


def test_off_by_default_is_off():
    given = slices(4)
    assert mixed(given, 0.0, 3, 0, 0, 0, 1)[0] is given[0]


def test_images_and_labels_are_mixed_by_one_share_with_one_partner():
    (plain,), (one,) = slices(5), mixed(slices(5), 0.4, 3, seed=1, step=7, replica=0, replicas=1)
    labels = F.one_hot(plain.target, 3).double()
    draw = np.random.default_rng([0x6D697875, 1, 7, 0])
    share, partners = draw.beta(0.4, 0.4), draw.permutation(5)
    assert 0 < share < 1
    torch.testing.assert_close(one.tile, share * plain.tile + (1 - share) * plain.tile[partners])
    torch.testing.assert_close(one.target, share * labels + (1 - share) * labels[partners])
    assert one.target.sum(1).tolist() == pytest.approx([1] * 5)
    assert (one.samples, one.share) == (5, 0.5)


def test_replicas_draw_as_one_process_does_for_the_same_slices():
    plain = mixed(slices(2, 2, 2, 2), 1.0, 3, 0, 5, replica=0, replicas=1)
    given = slices(2, 2, 2, 2)
    for replica in range(2):
        own = mixed(given[replica::2], 1.0, 3, 0, 5, replica, replicas=2)
        for ours, theirs in zip(own, plain[replica::2], strict=True):
            assert ours.tile.equal(theirs.tile)
            assert ours.target.equal(theirs.target)


def test_other_steps_and_slices_mix_otherwise():
    tiles = [mixed(slices(4), 1.0, 3, 0, step, 0, 1)[0].tile for step in range(3)]
    two = mixed([*slices(4), *slices(4)], 1.0, 3, 0, 0, 0, 1)
    assert not any(one.equal(other) for one, other in pairwise(tiles))
    assert not two[0].tile.equal(two[1].tile)


def test_ranks_without_images_or_labels_mix_what_they_have():
    whole = mixed(slices(4), 1.0, 3, 0, 0, 0, 1)[0]
    bare = slices(4)[0]
    bare.tile = None
    found = mixed([bare, Microbatch(0, 0.0)], 1.0, 3, 0, 0, 0, 1)
    assert found[0].target.equal(whole.target)
    assert found[0].tile is found[1].tile is found[1].target is None
    numbers = slices(4)[0]
    numbers.target = torch.randn(4, 2)
    assert mixed([numbers], 1.0, 3, 0, 0, 0, 1)[0].target.shape == (4, 2)
