from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spatialdl.data.batches import Batch, Batching, BatchReader
from tests.data.numbers import WHOLE, batching, views


def test_a_rank_reads_its_own_box_of_its_own_samples():
    reader = BatchReader(views(7), batching(4, 2, 2, 1, box=(2, 5, 1, 6)))
    for samples in ([0, 1, 2, 3], [4, 5, 6]):
        for part in reader.read(Batch(0, np.array(samples))):
            if part.tiles is None:
                assert len(part.labels) == 0
                continue
            assert part.tiles.shape == (len(part.labels), 3, 5, 3)
            assert part.tiles.dtype == torch.uint8
            assert part.tiles[:, 0, 0, 0].tolist() == part.labels.tolist()
            assert part.tiles[0, :, 0, 1].tolist() == [2, 3, 4]
            assert part.tiles[0, 0, :, 2].tolist() == [1, 2, 3, 4, 5]
    assert reader.views.source.asked == [1, 3, 4, 6]  # 0 1|2 3 and 4|5 6, cut 0|1, 2|3, |4, 5|6


def test_masks_are_read_in_their_own_box():
    reader = BatchReader(views(2), batching(2, box=None, mask_box=(2, 5, 1, 6)))
    (part,) = reader.read(Batch(0, np.arange(2)))
    assert part.masks.shape == (2, 3, 5)
    assert part.masks[0, :, 0].tolist() == [2, 3, 4]
    assert part.tiles is None


def test_a_rank_that_needs_no_images_reads_none():
    reader = BatchReader(views(5), batching(5, box=None))
    assert all(part.tiles is None for part in reader.read(Batch(0, np.arange(5))))
    assert reader.views.source.asked == []


def test_micro_batches_have_boxes_of_their_own():
    """As under GEMS, where a rank has another part of every other micro-batch, or none."""
    boxes = [(0, 8, 0, 3), None, (0, 8, 3, 6)]
    reader = BatchReader(views(5), Batching(5, 1, 0, boxes, [None, WHOLE, None]))
    left, neither, right = reader.read(Batch(0, np.arange(5)))
    assert left.tiles[0, 0, :, 2].tolist() == [0, 1, 2]
    assert (neither.tiles, left.masks) == (None, None)
    assert right.tiles[0, 0, :, 2].tolist() == [3, 4, 5]
    assert neither.masks.shape == (2, 8, 6)


def test_an_error_keeps_its_type_and_names_the_sample():
    reader = BatchReader(views(4, broken=2), batching(4))
    with pytest.raises(OSError, match="sample 2 is gone") as caught:
        reader.read(Batch(7, np.arange(4)))
    assert caught.value.__notes__ == ["(sample 2, epoch 7)"]


@pytest.mark.parametrize("in_parts", [("images",), ("masks",), ("images", "masks")])
def test_what_is_read_in_parts_is_left_to_later(in_parts):
    """A slice lists its samples; everything else is read as usual."""
    cut = replace(batching(4, 2, 2, 1, mask_box=WHOLE), in_parts=in_parts)
    reader = BatchReader(views(7), cut)
    first, second = reader.read(Batch(3, np.array([6, 2, 5, 1])))
    whole = BatchReader(views(7), replace(cut, in_parts=())).read(Batch(3, np.array([6, 2, 5, 1])))
    for part, other, sample in ((first, whole[0], 2), (second, whole[1], 1)):
        assert (part.epoch, part.samples) == (other.epoch, other.samples) == (3, (sample,))
        assert part.labels.tolist() == other.labels.tolist() == [sample]
        assert part.share == other.share == 0.25
        for name, found, full in (
            ("images", part.tiles, other.tiles),
            ("masks", part.masks, other.masks),
        ):
            assert (found is None) == (name in in_parts)
            assert found is None or torch.equal(found, full)
    asked = [] if len(in_parts) == 2 else [2, 1]
    assert reader.views.source.asked == asked
