from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.streaming.memory import Memory, memory_within
from spatialdl.streaming.store import DiskStore

MB = 2**20 // 4  # numbers


def memory(tmp_path, limit_mb: float) -> Memory:
    return Memory(int(limit_mb * 2**20), DiskStore(tmp_path))


def test_tensors_come_back_when_they_are_read(tmp_path):
    kept = memory(tmp_path, 3)
    with kept.watch():
        made = [torch.arange(MB) + number for number in range(8)]
        assert kept.here <= 3 * 2**20
        assert sum(one.untyped_storage().nbytes() > 0 for one in made) == 1
        totals = [int(one.sum()) for one in made]
    assert totals == [int((torch.arange(MB) + number).sum()) for number in range(8)]
    assert kept.peak <= 5 * 2**20  # and what one operation reads and makes


def test_what_is_written_to_is_stored_anew(tmp_path):
    kept = memory(tmp_path, 1)
    with kept.watch():
        first = torch.zeros(MB)
        second = torch.ones(MB)  # the first is stored
        first[3:5] += 7  # of a view, and stored again
        third = second * 2
        assert first[:6].tolist() == [0, 0, 0, 7, 7, 0]
        assert third[0] == 2
        torch.add(second, third, out=first)
        second + third
        assert first[:2].tolist() == [3, 3]


def test_backward_reads_what_forward_has_kept(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))).double()
    x = torch.randn(4000, 64, dtype=torch.float64, requires_grad=True)
    net(x).square().sum().backward()
    whole = [x.grad, *(each.grad for each in net.parameters())]
    x.grad = None
    net.zero_grad()
    kept = memory(tmp_path, 4)
    with kept.watch():
        net(x).square().sum().backward()
    kept.bring([x.grad])
    for one, other in zip(whole, [x.grad, *(p.grad for p in net.parameters())], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert kept.store is not None
    assert kept.store.written > 10e6
    assert kept.peak < 4 * 2**20 + 4 * x.nbytes


def test_room_is_made_before_stored_tensors_come_back(tmp_path):
    kept = memory(tmp_path, 4)
    with kept.watch():
        first = [torch.zeros(MB) for _ in range(4)]
        last = [torch.zeros(MB) for _ in range(4)]  # the first are stored
        kept.peak = kept.here
        torch._foreach_add_(first, 1)
        assert kept.peak == 4 * 2**20  # not those that are needed beside all others
        assert (float(first[3][0]), float(last[3][0])) == (1, 0)


def test_a_storage_that_is_gone_leaves_its_place(tmp_path):
    kept = memory(tmp_path, 1)
    with kept.watch():
        for _ in range(5):
            first, second = torch.zeros(MB), torch.zeros(MB)
            del first, second
    assert kept.here == 0
    assert kept.store is not None
    assert kept.store.peak == 2**20


def test_what_others_have_made_is_left_alone(tmp_path):
    kept, own = memory(tmp_path, 1), torch.zeros(4 * MB)
    with kept.watch():
        view, copied = own[:], own + 1
        copied.mul_(2)
    assert own.untyped_storage().nbytes() == 4 * 2**20
    assert view[0] == 0


def test_shapes_without_memory_and_small_ones_are_not_counted(tmp_path):
    kept = memory(tmp_path, 1)
    with kept.watch():
        shape = torch.empty(100 * MB, device="meta") + 1
        small = torch.zeros(100)
    assert kept.here == kept.peak == 0
    assert (len(shape), len(small)) == (100 * MB, 100)


def test_memory_has_the_limit_and_the_folder(tmp_path):
    assert memory_within(None, None, torch.device("cpu")).limit is None
    memory = memory_within(1.5, str(tmp_path), torch.device("cpu"))
    assert memory.limit == 1_500_000_000
    assert memory.store is not None
    assert memory.store.folder == tmp_path


@pytest.mark.parametrize(
    ("limit", "folder", "device", "message"),
    [
        (None, "/tmp", "cpu", "store=/tmp is of no use without limit_gb"),
        (0, None, "cpu", "limit_gb=0 must be a number above 0"),
        (True, None, "cpu", "limit_gb=True must be a number above 0"),
        ("2", None, "cpu", "limit_gb=2 must be a number above 0"),
        (
            2,
            None,
            "cuda",
            "limit_gb=2 is for networks on a CPU, this one is on cuda",
        ),
        (2, "/no/such/folder", "cpu", "cannot store tensors in /no/such/folder"),
    ],
)
def test_what_cannot_be_is_refused(limit, folder, device, message):
    with pytest.raises(ValueError, match=message):
        memory_within(limit, folder, torch.device(device))
