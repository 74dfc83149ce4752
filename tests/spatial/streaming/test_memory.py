from __future__ import annotations

import errno
import os

import pytest
import torch
from torch import nn

from spatialdl.spatial.streaming.memory import Memory, memory_within
from spatialdl.spatial.streaming.store import DiskStore, Slot

MB = 2**20 // 4  # numbers


def memory(tmp_path, limit_mb: float) -> Memory:
    return Memory(int(limit_mb * 2**20), DiskStore(tmp_path))


class Prompt(DiskStore):
    """Has stored what it is given at once: a thread decides nothing."""

    def put(self, storage: torch.UntypedStorage) -> Slot:
        slot = super().put(storage)
        slot.wait()
        return slot


def prompt_memory(tmp_path, limit_mb: float) -> Memory:
    return Memory(int(limit_mb * 2**20), Prompt(tmp_path))


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


def turns_of(kept: Memory, tiles: list[torch.Tensor], count: int) -> None:
    """Each virtual tile adds one to its tensor in its turns."""
    for _ in range(count):
        for number, tile in enumerate(tiles):
            with kept.watch(number):
                tile.add_(1)


def test_of_tiles_that_take_turns_some_stay(tmp_path):
    """If the one used last always stayed, each would go just before its turn comes."""
    kept = prompt_memory(tmp_path, 6)
    with kept.watch():
        tiles = [torch.zeros(MB) for _ in range(8)]
    turns_of(kept, tiles, 2)
    before = kept.store.read
    turns_of(kept, tiles, 5)
    assert kept.store.read - before <= 5 * 5 * 2**20  # 8 of 8 a round before
    kept.bring(tiles)
    assert [int(tile[-1]) for tile in tiles] == [7] * 8


def test_what_the_next_tile_needs_is_brought_back_before_its_turn(tmp_path):
    kept = prompt_memory(tmp_path, 12)
    with kept.watch():
        tiles = [torch.zeros(MB) for _ in range(16)]
    turns_of(kept, tiles, 2)
    there = []
    for number, tile in enumerate(tiles):
        there.append(tile.untyped_storage().nbytes() > 0)
        with kept.watch(number):
            tile.add_(1)
    assert all(there)


def test_a_forward_does_not_bring_back_what_backward_needs(tmp_path):
    kept = memory(tmp_path, 6)
    saved = []
    with kept.watch():
        for _ in range(20):
            saved.append(torch.zeros(MB))
    assert kept.store.read == 0
    x = torch.ones(MB, requires_grad=True)
    with kept.watch():
        y = x
        for _ in range(20):
            y = y.sin()
        assert kept.store.read == 0
        y.sum().backward()
    assert kept.store.read > 0


def test_in_backward_what_comes_next_is_on_its_way(tmp_path, monkeypatch):
    kept = prompt_memory(tmp_path, 16)
    x = torch.ones(MB, requires_grad=True)
    with kept.watch():
        y = x
        for _ in range(50):
            y = y.sin()
        looked = []
        look = kept.look_ahead

        def looking() -> None:
            before = kept.store.read
            look()
            looked.append(kept.store.read - before)

        monkeypatch.setattr(kept, "look_ahead", looking)
        before = kept.store.read
        y.sum().backward()
        total = kept.store.read - before
    assert sum(looked) >= 0.5 * total


def test_who_writes_outside_has_what_it_wrote(tmp_path):
    """A copy in the store was taken for what a tensor has, though an optimizer had changed it."""
    kept = memory(tmp_path, 2)
    with kept.watch():
        grad = torch.zeros(MB)
        others = [torch.zeros(MB) for _ in range(4)]
    kept.release([grad])
    grad += 3
    with kept.watch():
        more = [other + 1 for other in others]
        assert grad.untyped_storage().nbytes() > 0
    assert grad[0] == 3
    assert len(more) == 4


def test_a_write_that_fails_is_raised_and_loses_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = memory(tmp_path, 2)
    with kept.watch():
        first = torch.arange(MB)
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device"):
            list(map(first.add, range(4)))
        monkeypatch.undo()
        assert int(first.sum()) == int(torch.arange(MB).sum())


def test_memory_has_the_limit_and_the_folder(tmp_path):
    assert memory_within(None, None, torch.device("cpu")).limit is None
    memory = memory_within(1.5, str(tmp_path), torch.device("cpu"))
    assert memory.limit == 1_500_000_000
    assert memory.store is not None
    assert memory.store.folder == tmp_path


@pytest.mark.parametrize(
    ("limit", "folder", "message"),
    [
        (True, None, "limit_gb=True must be a number above 0"),
        ("2", None, "limit_gb=2 must be a number above 0"),
        (2, "host", "store=host is for accelerators, but the network is on a CPU: take disk"),
    ],
)
def test_what_cannot_be_is_refused(limit, folder, message):
    with pytest.raises(ValueError, match=message):
        memory_within(limit, folder, torch.device("cpu"))
