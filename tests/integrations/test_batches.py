"""Detection and splitting of images in a batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from spatialdl import Mesh, init_mesh, shard
from spatialdl.comm.single_process import SingleProcess
from spatialdl.integrations.batches import split_batch
from spatialdl.spatial.table import is_spatial

MESH = init_mesh((1, 1), comm=SingleProcess())
IMAGE, MASK, LABELS = torch.rand(2, 3, 9, 7), torch.zeros(2, 9, 7, dtype=torch.long), torch.ones(2)


def is_split(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(is_spatial, batch)


class Sample(NamedTuple):
    image: Tensor
    mask: Tensor
    label: Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((IMAGE, LABELS), (True, False)),
        ([IMAGE, MASK], [True, True]),
        (Sample(IMAGE, MASK, LABELS), Sample(True, True, False)),
        ({"image": IMAGE, "name": "a", "n": 3}, {"image": True, "name": False, "n": False}),
        ({"in": {"x": IMAGE}, "y": [MASK.float()]}, {"in": {"x": True}, "y": [True]}),
        ((IMAGE, torch.rand(2, 9, 9)), (True, False)),
        ((IMAGE, torch.rand(2, 5, 4, 4)), (True, True)),
        ((IMAGE, torch.zeros(2, 1, 9, 7, dtype=torch.bool)), (True, True)),
        ((IMAGE, torch.zeros(2, 6, 4, 4, dtype=torch.long)), (True, False)),
        (IMAGE, True),
        (torch.zeros(2, 3, 9, 7, dtype=torch.uint8), True),
    ],
)
def test_images_and_their_masks_are_split(batch, expected):
    assert is_split(split_batch(batch, MESH)) == expected


def test_volumes_and_signals():
    volumes, signals = (
        init_mesh((1, 1, 1), comm=SingleProcess()),
        init_mesh((1,), comm=SingleProcess()),
    )
    batch = (torch.rand(2, 1, 5, 6, 7), torch.zeros(2, 5, 6, 7, dtype=torch.long), LABELS)
    assert is_split(split_batch(batch, volumes)) == (True, True, False)
    batch = (torch.rand(2, 3, 50), torch.rand(2, 50), torch.rand(2, 4))
    assert is_split(split_batch(batch, signals)) == (True, True, False)


def test_keys_and_places():
    other = torch.rand(2, 5, 4, 4)
    batch = OrderedDict(image=IMAGE, matrices=other, mask=MASK)
    found = split_batch(batch, MESH, ("image", "mask"))
    assert type(found) is OrderedDict
    assert is_split(dict(found)) == {"image": True, "matrices": False, "mask": True}
    assert found["matrices"] is other
    assert is_split(split_batch({"image": [IMAGE, IMAGE]}, MESH, "image")) == {"image": [True] * 2}
    assert is_split(split_batch((IMAGE, other), MESH, 0)) == (True, False)
    assert is_split(split_batch(Sample(IMAGE, MASK, LABELS), MESH, [0])) == Sample(
        True, False, False
    )


def test_a_function_decides_and_what_is_split_already_stays():
    split = shard(IMAGE, MESH)
    assert split_batch((split, LABELS), MESH)[0] is split

    def crops(batch: Any, mesh: Mesh) -> Any:
        return shard(batch[0][..., :5], mesh), batch[1]

    image, labels = split_batch((IMAGE, LABELS), MESH, crops)
    assert (tuple(image.shape), labels is LABELS) == ((2, 3, 9, 5), True)


@pytest.mark.parametrize(
    ("batch", "how", "message"),
    [
        ((LABELS,), None, r"batch of tuple with \(2,\) float32: an image .* is \(N, C, H, W\)"),
        ("text", None, "with no tensors"),
        (IMAGE[0], None, r"\(3, 9, 7\) float32"),
        ({"image": IMAGE}, ["imge"], r"has keys \['imge'\], but a batch has \['image'\]"),
        ((IMAGE, LABELS), [2], r"has keys \[2\], but a batch has \[0, 1\]"),
        (IMAGE, [0], "a batch is a Tensor: give a function"),
    ],
)
def test_batches_without_what_is_to_be_split_are_refused(batch, how, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, MESH, how)
