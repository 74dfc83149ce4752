from __future__ import annotations

import pytest
import torch

from spatialdl.data.batches import Slice
from spatialdl.data.device_copy import DeviceCopy
from spatialdl.data.loader import Loader
from tests.data.numbers import WHOLE, batching, contents, views


def test_on_a_cpu_nothing_is_copied():
    tiles = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)
    batch = [Slice(torch.tensor([3]), 1.0, tiles)]
    assert DeviceCopy(torch.device("cpu")).begin(batch)() is batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_batches_arrive_while_others_are_computed_with(workers):
    device = torch.device("cuda", torch.cuda.current_device())
    cut = batching(2, 2, mask_box=WHOLE)
    expected = contents(Loader(views(9), cut, 0).batches())
    loader = Loader(views(9), cut, 0, workers=workers, device=device)
    found = []
    busy = torch.randn(1024, 1024, device=device)
    for batch in loader.batches():
        busy = busy @ busy / 1024  # the copies must not overtake, nor wait for it
        assert all(x.device == device for one in batch for x in one.tensors())
        found.append([one.map(lambda x: x + 0) for one in batch])
        del batch  # its memory may be taken again by the next copy
    loader.close()
    assert contents([[one.map(torch.Tensor.cpu) for one in batch] for batch in found]) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
def test_a_gpu_copies_beside_what_it_computes():
    device = torch.device("cuda", torch.cuda.current_device())
    copy = DeviceCopy(device)
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy / 4096
    computed = torch.cuda.current_stream(device).record_event()
    arrived = copy.begin([Slice(torch.tensor([3]), 1.0, None)])
    torch.cuda.Stream.synchronize(copy._stream)
    assert not computed.query(), "the copy has waited for the computing"
    assert arrived()[0].labels.tolist() == [3]
